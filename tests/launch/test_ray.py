"""What the Ray launcher decides before it connects to Ray; the tests with a real Ray are in
tests/engines."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.cli.helpers import run_here
from tests.ports import free_address
from zmqdist.blas_threads import VARIABLES
from zmqdist.cluster import ClusterConfig
from zmqdist.errors import ConfigError
from zmqdist.launch.ray import actor_options, actor_threads, ray_hosts

FILE = """\
name: c
program: python program.py
jobs:
  worker: {count: 2, slots: 3}
  ps: {count: 1}
launcher: ray
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").touch()


def load(text: str) -> ClusterConfig:
    Path("c.yaml").write_text(text)
    return ClusterConfig.load("c.yaml")


def test_roles_are_hosts_with_one_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    hosts = ray_hosts(load(FILE), 60.0)
    assert [(host.name, host.slots) for host in hosts] == [
        ("ray-worker-0", 1),
        ("ray-worker-1", 1),
        ("ray-ps-0", 1),
    ]


def test_actor_requests_slots_as_cpus() -> None:
    config = load(FILE + "ray: {worker: {gpus: 0.5, resources: {big: 1}}, ps: {cpus: 0.25}}\n").ray
    worker, ps = actor_options(config, "worker", 3), actor_options(config, "ps", 1)
    assert (worker["num_cpus"], worker["num_gpus"], worker["resources"]) == (3, 0.5, {"big": 1})
    assert (ps["num_cpus"], ps["num_gpus"], ps["resources"]) == (0.25, 0, {})
    assert worker["max_restarts"] == 0
    assert "lifetime" not in worker  # not detached: it ends with the launcher


@pytest.mark.parametrize(
    ("cpus", "slots", "environment", "expected"),
    [
        (3, 3, {}, dict.fromkeys(VARIABLES, "1")),
        (8, 2, {"PATH": "/bin"}, dict.fromkeys(VARIABLES, "4")),
        (0.5, 1, {}, dict.fromkeys(VARIABLES, "1")),
        (8, 2, {"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3"}),
    ],
)
def test_actor_slots_share_cpus(
    cpus: float, slots: int, environment: dict[str, str], expected: dict[str, str]
) -> None:
    assert actor_threads(cpus, slots, environment) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            FILE.replace("slots: 3", "slots: auto"),
            (
                "c.yaml:4: jobs.worker.slots: is auto, but Ray needs the number of slots to place a "
                "worker (write for example 4)"
            ),
        ),
        (
            FILE + "ray: {address: 'ray://head:10001'}\n",
            (
                "c.yaml:7: ray.address: names a server of Ray's client, but the dispatcher must "
                "run where the workers can reach it (run "
                "launch on a node of the Ray cluster, with auto)"
            ),
        ),
        (
            FILE + "ray: {worker: {gpus: -1}}\n",
            "c.yaml:7: ray.worker.gpus: expected a number, 0 or more, got -1",
        ),
    ],
)
def test_mistake_names_its_key(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value) == problem


def test_missing_package_error_has_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    Path("c.yaml").write_text(FILE)
    result = run_here("launch", "c.yaml")
    assert (result.code, result.err) == (
        2,
        ("zmqdist launch: c.yaml: launcher: ray needs ray: pip install ray\n"),
    )


def test_silent_address_error_is_one_sentence() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs pip install ray")
    address = free_address()
    Path("c.yaml").write_text(f"{FILE}ray: {{address: '{address}'}}\n")
    result = run_here("launch", "c.yaml")
    assert result.code == 3
    assert result.err == (
        f"zmqdist launch: launcher: ray cannot join the Ray cluster at {address}: [Errno 111] "
        f"Connection refused: start one with "
        "`ray start --head`, or write its address as ray.address\n"
    )

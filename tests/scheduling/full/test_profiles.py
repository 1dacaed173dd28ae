"""`zmqdist profile`: which functions take the time of slots and actors."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.cli.helpers import run_here
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.connection import DispatcherClient

SECONDS = 1.0


def spin() -> None:
    while True:
        pass


def outer(flag: Path) -> None:
    flag.touch()
    spin()


def hang_in_c(flag: Path) -> None:
    flag.touch()
    while True:
        ctypes.PyDLL(None).usleep(900_000)


def rest(flag: Path) -> None:
    flag.touch()
    while True:
        time.sleep(60)


class Spinner:
    def spin(self, flag: Path) -> None:
        outer(flag)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[zd.local_cluster]:
    """Use our own sampler, also where py-spy is installed."""
    folders = os.environ["PATH"].split(os.pathsep)
    kept = [folder for folder in folders if not Path(folder, "py-spy").exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(kept))
    with zd.local_cluster(workers=1, slots=2) as made:
        yield made


@pytest.fixture
def coordinator(cluster: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    with cluster.coordinator() as made:
        yield made
        cluster.kill_worker(0)  # its functions never end


def profile(cluster: zd.local_cluster, worker: str = "", seconds: float = SECONDS) -> Any:
    address = cluster.target.removeprefix("zmq://")
    with DispatcherClient(address, cluster.credentials, "client", 30.0) as dispatcher:
        return dispatcher.call("profile", worker, seconds)


@pytest.mark.parametrize(
    ("function", "calls"),
    [(outer, ["outer", "spin"]), (hang_in_c, ["hang_in_c"]), (rest, ["rest"])],
)
def test_profile_has_the_time_of_a_function(
    function: Callable[[Path], None],
    calls: list[str],
    cluster: zd.local_cluster,
    coordinator: ClusterCoordinator,
    tmp_path: Path,
) -> None:
    coordinator.submit(function, tmp_path / "begun")
    until((tmp_path / "begun").exists)
    answer = profile(cluster)
    (most, seconds), *_ = sorted(answer["stacks"].items(), key=lambda item: -item[1])
    assert most == ";".join(f"{name} ({__file__})" for name in calls)
    assert 0.5 * SECONDS < seconds < 1.5 * SECONDS
    assert answer["failed"] == {}


def test_profile_has_the_time_of_an_actor(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    actor = coordinator.actor(Spinner)
    actor.spin(tmp_path / "begun")
    until((tmp_path / "begun").exists)
    stacks = profile(cluster, "worker:0")["stacks"]
    assert max(stacks, key=stacks.get).startswith(f"spin ({__file__});outer ({__file__});")


def test_idle_worker_has_an_empty_profile(cluster: zd.local_cluster) -> None:
    # its slots may still be starting
    until(lambda: profile(cluster, seconds=0.2)["stacks"] == {})


def test_functions_go_on_under_a_profile(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    coordinator.submit(outer, tmp_path / "begun")
    until((tmp_path / "begun").exists)
    pids = {coordinator.submit(os.getpid).result() for _ in range(3)}
    profile(cluster)
    assert {coordinator.submit(os.getpid).result() for _ in range(3)} == pids


def test_profile_survives_a_killed_slot(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    coordinator.submit(outer, tmp_path / "begun")
    until((tmp_path / "begun").exists)
    pid = coordinator.submit(os.getpid).result()
    os.kill(pid, signal.SIGKILL)
    assert max(profile(cluster)["stacks"].values()) > 0.5 * SECONDS


def test_profile_of_slots_that_are_threads(tmp_path: Path) -> None:
    with (
        zd.local_cluster(workers=1, processes=False) as cluster,
        cluster.coordinator() as coordinator,
    ):
        value = coordinator.submit(time.sleep, 3)
        until(lambda: coordinator.snapshot().unfinished)
        assert profile(cluster, seconds=0.2)["failed"] == {}
        value.result()


def test_failing_py_spy_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "py-spy").write_text("#!/bin/sh\necho Permission denied >&2\nexit 1\n")
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with zd.local_cluster(workers=1) as cluster, cluster.coordinator() as coordinator:
        coordinator.submit(rest, tmp_path / "begun")
        until((tmp_path / "begun").exists)
        assert list(profile(cluster)["stacks"]) == [f"rest ({__file__})"]
        cluster.kill_worker(0)


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_py_spy_is_used_if_it_is_there(tmp_path: Path) -> None:
    with zd.local_cluster(workers=1) as cluster, cluster.coordinator() as coordinator:
        coordinator.submit(outer, tmp_path / "begun")
        until((tmp_path / "begun").exists)
        assert f"outer ({__file__});spin ({__file__})" in profile(cluster, seconds=2)["stacks"]
        cluster.kill_worker(0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 601.0, float("nan")])
def test_seconds_out_of_range_are_refused(cluster: zd.local_cluster, seconds: float) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="wanted more than 0, at most 600 s"):
        profile(cluster, seconds=seconds)


def test_command_writes_a_file_of_speedscope(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    coordinator.submit(outer, tmp_path / "begun")
    until((tmp_path / "begun").exists)
    output, secret = tmp_path / "job.json", str(cluster.credentials.token_file)
    words = ["profile", cluster.target, "worker:0", "--seconds", "1", "-o", str(output)]
    shown = run_here(*words, "--token-file", secret, "--timeout", "20")
    assert f"s  spin ({__file__})\n" in shown.out
    document = json.loads(output.read_text())
    assert document["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    names = [frame["name"] for frame in document["shared"]["frames"]]
    (flame,) = document["profiles"]
    assert {"name": "spin", "file": __file__} in document["shared"]["frames"]
    assert ["outer", "spin"] in [[names[i] for i in sample] for sample in flame["samples"]]
    assert len(flame["samples"]) == len(flame["weights"])
    assert flame["endValue"] == pytest.approx(sum(flame["weights"]))

"""What all resolvers have from their base: first the tests that TensorFlow has, by their names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.resolvers.samples import DEVICES
from zmqdist import resolvers
from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.resolvers.base import master_url


class Mine(resolvers.ClusterResolver):
    """The least that a resolver of one's own is; it does not call __init__ of the base."""

    def __init__(
        self, jobs: dict[str, list[str]] | None = None, devices: list[str] | None = None
    ) -> None:
        self.jobs = jobs or {}
        self.devices = devices

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(self.jobs)

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        return ""

    def _device_names(self) -> list[str]:
        if self.devices is not None:
            return self.devices
        return super()._device_names()  # reach: the hook for resolvers of users


def test_num_accelerators_success() -> None:
    devices = [f"/job:worker/task:0/device:GPU:{index}" for index in range(4)]
    assert Mine(devices=devices).num_accelerators() == {"GPU": 4}


def test_num_accelerators_multi_device_success() -> None:
    devices = [
        f"/job:worker/task:0/device:{kind}:{index}"
        for kind in ("TPU", "GPU", "CPU")
        for index in range(4)
    ]
    assert Mine(devices=devices).num_accelerators() == {"TPU": 4, "GPU": 4}


def test_num_accelerators_filter_tasks() -> None:
    resolver = Mine(devices=DEVICES)
    assert resolver.num_accelerators(task_type="worker1", task_id=0) == {"TPU": 2, "GPU": 2}
    assert resolver.num_accelerators(task_type="worker2", task_id=3) == {"GPU": 1}
    assert resolver.num_accelerators(task_type="worker2", task_id=4) == {"GPU": 1}


# -- the rest of the contract ----------------------------------------------------------------------


def test_resolver_needs_two_methods() -> None:
    with pytest.raises(TypeError, match="abstract"):
        resolvers.ClusterResolver()  # type: ignore[abstract]


def test_properties_have_defaults_and_can_be_set() -> None:
    resolver, second = Mine(), Mine()
    assert (resolver.environment, resolver.task_type, resolver.task_id, resolver.rpc_layer) == (
        "",
        None,
        None,
        None,
    )
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 0, "zmq"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, "zmq")
    assert second.task_type is None


def test_accelerators_match_whole_names() -> None:
    """TensorFlow looks for a piece of text, and counts task 10 for task 1, too."""
    resolver = Mine(devices=["/job:worker/task:1/device:GPU:0", "/job:worker/task:10/device:GPU:0"])
    assert resolver.num_accelerators("worker", 1) == {"GPU": 1}


@pytest.mark.parametrize(
    ("variable", "count"),
    [
        ("", {}),
        ("-1", {}),
        ("0", {"GPU": 1}),
        ("0, GPU-8932,2", {"GPU": 3}),
        ("0,-1,2", {"GPU": 1}),
    ],
)
def test_gpus_are_those_visible_to_cuda(
    variable: str, count: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert Mine().num_accelerators() == count


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the way of the one that belongs to a driver."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    program = tmp_path / "nvidia-smi"
    program.touch(mode=0o755)
    return program


def test_gpus_listed_by_nvidia_smi(nvidia_smi: Path) -> None:
    nvidia_smi.write_text(
        '#!/bin/sh\nprintf "GPU 0: A (UUID: x)\\n  MIG 1g: y\\nGPU 1: A (UUID: z)\\n"\n'
    )
    assert Mine().num_accelerators() == {"GPU": 2}


def test_failing_nvidia_smi_is_logged(nvidia_smi: Path, caplog: pytest.LogCaptureFixture) -> None:
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    assert Mine().num_accelerators() == {}
    assert "nvidia-smi does not work here" in caplog.text


def test_host_without_nvidia_smi_has_no_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Mine().num_accelerators() == {}


def test_devices_of_this_host_are_those_of_the_own_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    resolver = Mine()
    assert resolver.num_accelerators("worker", 1) == {}, "nobody said who we are"
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.num_accelerators("worker", 1) == resolver.num_accelerators() == {"GPU": 2}
    assert resolver.num_accelerators("worker", 0) == {}


def test_device_count_of_config_wins() -> None:
    counts = {"device_count": {"GPU": 3, "CPU": 8, "TPU": 0}}
    assert Mine(devices=DEVICES).num_accelerators(config_proto=counts) == {"GPU": 3}


@pytest.mark.parametrize(
    ("address", "rpc_layer", "url"),
    [
        ("a:1", "zmq", "zmq://a:1"),
        ("a:1", None, "a:1"),
        ("a:1", "", "a:1"),
        ("", "zmq", ""),
        ("zmq://a:1", "grpc", "zmq://a:1"),
    ],
)
def test_address_becomes_url_once(address: str, rpc_layer: str | None, url: str) -> None:
    assert master_url(address, rpc_layer) == url


@pytest.mark.parametrize(
    ("jobs", "task", "problems"),
    [
        ({}, (None, None), []),
        ({"worker": ["a:1"]}, (None, None), []),
        ({"chief": ["c:1"], "worker": ["a:1"]}, ("worker", 0), []),
        ({"worker": ["a:1", "b:1"]}, ("evaluator", 0), []),
        ({"worker": ["a:1", "b:1"]}, ("worker", None), [("the cluster has several tasks, and "
                                                        "nothing says which one this process is")]),
        ({"worker": ["a:1", "b:1"]}, ("worker", 2), ["job 'worker' has no task 2; it has 0 to 1"]),
        ({"worker": ["a:1", "b:1"]}, ("chief", 0), []),
        ({"worker": ["a:1", "b"]}, ("ps", 0), [
            "task type 'ps' is not a job of the cluster; it has worker",
            "worker:1 has the address 'b': no port; write host:port",
        ]),
        ({"evaluator": ["a:1", "b:1"]}, ("evaluator", 0), [("the cluster has 2 tasks of job "
                                                           "'evaluator', at most 1 is allowed")]),
        ({"master": ["a:1"]}, ("master", 0), [
            ("there is no job 'master' in a cluster that trains; allowed are chief, worker, ps, "
             "evaluator, dispatcher "
             "(TensorFlow 1 called the chief master)")
        ]),
        ({"worker": "a:1"}, (None, None), [("the tasks of job 'worker' must be a list or a dict, "
                                           "not 'a:1'")]),
    ],
)  # fmt: skip
def test_validate_lists_problems(
    jobs: dict[str, list[str]], task: tuple[str | None, int | None], problems: list[str]
) -> None:
    resolver = Mine(jobs)
    resolver.task_type, resolver.task_id = task
    assert resolver.validate() == problems


def test_import_loads_no_heavy_module() -> None:
    program = "import sys, zmqdist; zmqdist.resolvers.KubernetesClusterResolver\n"
    program += "print(*[name for name in ('zmq', 'yaml', 'kubernetes', 'cloudpickle') if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True
    )
    assert result.stdout.split() == []

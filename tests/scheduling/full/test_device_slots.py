"""Functions with devices in real slots: which GPUs they see, and from when on."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zmqdist as zd
from tests.scheduling.work import begun, go, until, waits
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.errors import ResourceExhaustedError
from zmqdist.launch.children import Child
from zmqdist.scheduling.shared.config import WorkerConfig
from zmqdist.scheduling.worker.devices import take_resources

SMI = '#!/bin/sh\nfor i in $(seq 0 63); do echo "GPU $i: fake (UUID: x)"; done\n'
"""A fake nvidia-smi. It lists many GPUs, because tests that run meanwhile may have taken some."""


def devices() -> tuple[str | None, int]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.getpid()


def devices_at_import(folder: Path) -> str:
    """Return what CUDA_VISIBLE_DEVICES was when the module of the user was imported."""
    (folder / "module_with_gpus.py").write_text(
        "import os\nSEEN = os.environ.get('CUDA_VISIBLE_DEVICES')\n"
    )
    import sys

    sys.path.insert(0, str(folder))
    from module_with_gpus import SEEN  # type: ignore[import-not-found]

    return str(SEEN)


@pytest.fixture
def names() -> list[str]:
    """The ids of three GPUs that no other test has."""
    return [f"GPU-{os.getpid()}-{time.monotonic_ns()}-{letter}" for letter in "abc"]


@pytest.fixture
def with_gpus(
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
    start_worker: Callable[..., Child],
) -> Iterator[ClusterCoordinator]:
    """A worker with two slots and two of three visible GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    with zd.DispatchServer(growth_limit_s=0.0) as dispatcher:
        start_worker(dispatcher.address, slots=2, resources={"gpu": 2})
        with ClusterCoordinator(dispatcher, cancel_grace_s=0.1) as coordinator:
            until(coordinator.workers)
            yield coordinator


def test_function_sees_devices_of_its_lease(
    with_gpus: ClusterCoordinator, names: list[str]
) -> None:
    one = with_gpus.options(resources={"gpu": 1})
    seen, pid = one.submit(devices).result()
    assert seen == names[0]
    assert one.submit(devices).result() == (seen, pid), "its slot is used again"
    assert with_gpus.schedule(devices, resources={"gpu": 2}).result()[0] == ",".join(names[:2])
    assert with_gpus.submit(devices).result()[0] == ",".join(names), "as the worker sees them"


def test_running_functions_share_no_device(
    with_gpus: ClusterCoordinator, tmp_path: Path, names: list[str]
) -> None:
    one = with_gpus.options(resources={"gpu": 1})
    running = [one.submit(waits, tmp_path, str(n)) for n in range(2)]
    until(lambda: len(begun(tmp_path)) == 2)
    go(tmp_path)
    with_gpus.gather(running)
    seen = with_gpus.gather([one.submit(devices) for _ in range(20)])
    assert {name for name, _ in seen} <= {*names[:2]}


def test_devices_are_set_before_user_code_is_imported(
    with_gpus: ClusterCoordinator, tmp_path: Path, names: list[str]
) -> None:
    one = with_gpus.options(resources={"gpu": 1})
    assert one.submit(devices_at_import, tmp_path).result() == names[0]


def test_device_of_killed_slot_is_used_again(
    with_gpus: ClusterCoordinator, tmp_path: Path, names: list[str]
) -> None:
    both = with_gpus.options(resources={"gpu": 2})
    both.submit(waits, tmp_path)
    (pid,) = until(lambda: begun(tmp_path))
    go(tmp_path)
    os.kill(pid, signal.SIGKILL)
    assert both.submit(devices).result()[0] == ",".join(names[:2])


def test_worker_takes_gpus_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    config = WorkerConfig("localhost:1", processes=True, resources={"gpu": "auto", "x": 1})
    first = take_resources(config)
    second = take_resources(config)
    for claim in first.sockets:
        claim.close()
    assert len(first.gpus) > 32
    assert first.quantities == (("gpu", 1000 * len(first.gpus)), ("x", 1000))
    assert second.gpus == [], "the first worker of the host has them"
    assert second.quantities == (("x", 1000),)


def test_worker_with_too_few_gpus_does_not_start(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(f"\0zmqdist-gpu-{os.getuid()}-{names[0]}")
        config = WorkerConfig("localhost:1", processes=True, resources={"gpu": 3})
        with pytest.raises(ResourceExhaustedError, match=r"gpu is 3, but .* may use 2"):
            take_resources(config)
        config = WorkerConfig("localhost:1", processes=True, resources={"gpu": 2})
        taken = take_resources(config)
    assert taken.gpus == names[1:]
    for claim in taken.sockets:
        claim.close()

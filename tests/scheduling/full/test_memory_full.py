"""When memory is full or limited, an error says so, or data takes a slower way; no call hangs, and
the program is not killed.

Programs set their own limits, so they are processes of their own. Some tests need root: a mount, a
control group.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.transport import shm_pool
from zmqdist.transport.memory_limits import oom_kills

MIB = 2**20
pytestmark = pytest.mark.timeout(90)

PROGRAM = """
import resource
import numpy as np
import zmqdist as zd
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

MIB = 2**20

def virtual_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmSize"))

with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
    assert coordinator.schedule(np.sum, (np.ones(MIB, np.uint8),)).get(60) == MIB
    {body}
    assert coordinator.schedule(abs, (-3,)).get(60) == 3
print("well")
"""

ADDRESS_SPACE = """
    array = np.ones(300 * MIB, np.uint8)
    resource.setrlimit(resource.RLIMIT_AS, (virtual_bytes() + 100 * MIB,) * 2)
    try:
        coordinator.schedule(np.sum, (array,))
    except errors.ResourceExhaustedError as error:
        assert "300 MiB" in error.message and "ZMQDIST_ARENA" in error.message, error
    else:
        raise AssertionError("there was room")
    text = "x" * (60 * MIB)
    try:
        coordinator.schedule(len, ([text],))
        coordinator.schedule(len, ([text, text + "y"],))
    except errors.ResourceExhaustedError as error:
        assert "no memory" in error.message, error
    else:
        raise AssertionError("there was room")
    assert coordinator.snapshot().held.parts <= 1
"""

GROUP = """
    with open("GROUP/cgroup.procs", "w") as file:
        file.write("0")
    array = np.ones(300 * MIB, np.uint8)
    try:
        coordinator.schedule(np.sum, (array,))
    except errors.ResourceExhaustedError as error:
        assert "300 MiB" in error.message and "control group" in error.message, error
    else:
        raise AssertionError("there was room")
"""

FILE_SIZE = """
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB,) * 2)
    array = np.ones(64 * MIB, np.uint8)
    assert coordinator.schedule(np.sum, (array,)).get(60) == 64 * MIB
    assert zd.freeze(array).sum() == 64 * MIB
"""

LARGE = """
    array = np.ones(64 * MIB, np.uint8)
    assert coordinator.schedule(np.add, (array, 1)).get(60).sum() == 128 * MIB
"""


def run(body: str, *before: str) -> None:
    program = PROGRAM.replace("{body}", body.strip())
    done = subprocess.run(
        [*before, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


@pytest.mark.parametrize("body", [ADDRESS_SPACE, FILE_SIZE], ids=["ulimit -v", "ulimit -f"])
def test_program_under_memory_limit_gets_an_error(body: str) -> None:
    run(body)


def test_size_of_dev_shm_does_not_matter() -> None:
    mount = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    before = ("unshare", "-m", "sh", "-c", mount, "sh")
    try:
        subprocess.run([*before, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may mount")
    run(LARGE, *before)


# -- workers and slots -----------------------------------------------------------------------------


@pytest.fixture
def coordinator(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[ClusterCoordinator]:
    """One worker; without shared memory if the test requests this."""
    if getattr(request, "param", None) == "off":
        monkeypatch.setenv(shm_pool.POOL_VARIABLE, "off")
        monkeypatch.setattr(shm_pool, "_pool", None)
        monkeypatch.setattr(shm_pool, "_tried", False)
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as made:
        assert made.schedule(int).get(60) == 0
        yield made


def virtual_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize"))


def make(size: int) -> np.ndarray[Any, Any]:
    return np.ones(size, np.uint8)


def fill_memory() -> int:
    return np.empty(2**50, np.uint8).nbytes


@pytest.mark.parametrize("coordinator", ["off"], indirect=True)
def test_worker_without_memory_for_result_continues(
    coordinator: ClusterCoordinator,
) -> None:
    worker = int(
        coordinator.snapshot().workers and coordinator.metrics()["workers"]["worker:0"]["pid"]
    )
    resource.prlimit(worker, resource.RLIMIT_AS, (virtual_bytes(worker) + 60 * MIB,) * 2)
    failed = coordinator.schedule(make, (300 * MIB,))
    error = failed.exception(60)
    assert isinstance(error, errors.ResourceExhaustedError)
    assert "no memory for the result of a function at its worker: 300 MiB" in error.message
    assert coordinator.schedule(make, (MIB,)).get(60).sum() == MIB


def test_function_without_memory_raises_memory_error(
    coordinator: ClusterCoordinator,
) -> None:
    error = coordinator.schedule(fill_memory).exception(60)
    assert isinstance(error, MemoryError)
    assert "1.00 PiB" in str(error)
    with pytest.raises(MemoryError):
        coordinator.join(60)
    assert coordinator.schedule(int).get(60) == 0


def test_killed_slot_error_names_probable_cause(
    coordinator: ClusterCoordinator,
) -> None:
    error = coordinator.schedule(signal.raise_signal, (signal.SIGKILL,)).exception(60)
    assert isinstance(error, errors.WorkerLost)
    assert "A SIGKILL that no process sent comes from the kernel, because memory ran out" in str(
        error
    )


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 450 MiB; a process in it must leave it or end before the test ends."""
    made = Path("/sys/fs/cgroup/memory") / f"zmqdist-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text(str(450 * MIB))
    except OSError:
        pytest.skip("no control group can be made here")
    yield made
    until(lambda: not (made / "cgroup.procs").read_text())
    made.rmdir()


def test_program_in_full_control_group_gets_an_error(group: Path) -> None:
    run(GROUP.replace("GROUP", str(group)))


def fill_group(group: str) -> int:
    """Enter the control group, and allocate more memory than it allows."""
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    return int(np.ones(900 * MIB, np.uint8).sum())


def test_oom_killed_slot_error_says_so(coordinator: ClusterCoordinator, group: Path) -> None:
    before = oom_kills()
    error = coordinator.schedule(fill_group, (str(group),)).exception(60)
    assert oom_kills() > before
    assert isinstance(error, errors.WorkerLost)
    assert "the kernel of this host killed" in str(error)

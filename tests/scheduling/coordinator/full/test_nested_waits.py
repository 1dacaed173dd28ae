"""Functions that schedule functions and wait for them, in slots that are processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zmqdist as zd
from tests.scheduling.work import until
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.shared.config import WorkerConfig

SLOTS = [(1, 1), (2, 1), (2, 4)]

pytestmark = pytest.mark.timeout(200)  # hundreds of functions, and thirty processes


def fib(number: int) -> int:
    if number < 2:
        return number
    with ClusterCoordinator() as inner:
        first, second = (inner.submit(fib, number - less) for less in (1, 2))
        return first.result() + second.result()


def hundred(outer: int) -> int:
    inner = ClusterCoordinator()
    return sum(inner.gather(inner.map(int.__add__, [outer] * 100, range(100))))


@pytest.mark.parametrize(("workers", "slots"), SLOTS)
def test_fib_of_nested_tasks_ends(workers: int, slots: int) -> None:
    with (
        zd.local_cluster(workers=workers, slots=slots) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        assert coordinator.submit(fib, 12).result() == 144


def test_hundred_functions_with_hundred_each_end_on_two_slots() -> None:
    with zd.local_cluster(workers=2) as cluster, ClusterCoordinator(cluster) as coordinator:
        sums = coordinator.gather(coordinator.map(hundred, range(100)))
        assert sums == [100 * outer + 4950 for outer in range(100)]


def licensed_twice() -> int:
    inner = ClusterCoordinator()
    return inner.options(resources={"licence": 1}).submit(abs, -1).result()


def touched(folder: str, name: str) -> None:
    Path(folder, f"{name}.{os.getpid()}").touch()
    signal.pause()  # until its slot is killed


def parent_of_sleepers(folder: str) -> None:
    """Schedule two functions that do not end, and wait for them."""
    inner = ClusterCoordinator()
    sleepers = [inner.submit(touched, folder, name) for name in "ab"]
    Path(folder, f"parent.{os.getpid()}").touch()
    inner.gather(sleepers)


def pids(folder: Path, name: str) -> list[int]:
    return [int(path.suffix[1:]) for path in folder.glob(f"{name}.*")]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.fixture
def three_workers() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=3, lease_s=4.0, reconnect_grace_s=0.5) as cluster:
        yield cluster


def test_cancel_of_function_ends_its_work(three_workers: zd.local_cluster, tmp_path: Path) -> None:
    with ClusterCoordinator(three_workers, cancel_grace_s=0.2) as coordinator:
        value = coordinator.submit(parent_of_sleepers, str(tmp_path))
        until(lambda: bool(pids(tmp_path, "a") and pids(tmp_path, "b")))
        value.cancel()
        assert isinstance(value.exception(30), zd.errors.CancelledError)
        assert coordinator.gather(coordinator.map(abs, range(6))) == list(range(6))


def test_killed_slot_reruns_its_function_and_its_work(
    three_workers: zd.local_cluster, tmp_path: Path
) -> None:
    with ClusterCoordinator(three_workers, cancel_grace_s=0.2) as coordinator:
        value = coordinator.submit(parent_of_sleepers, str(tmp_path))
        until(lambda: bool(pids(tmp_path, "a") and pids(tmp_path, "b")))
        first = pids(tmp_path, "a") + pids(tmp_path, "b")
        os.kill(pids(tmp_path, "parent")[0], signal.SIGKILL)
        until(lambda: len(pids(tmp_path, "parent")) == 2)
        assert not any(map(running, first))
        until(lambda: len(pids(tmp_path, "a")) == 2 and len(pids(tmp_path, "b")) == 2)
        value.cancel()
        assert isinstance(value.exception(30), zd.errors.CancelledError)


def worker_of(cluster: zd.local_cluster, pid: int) -> int:
    """Return the index of the worker whose slot this is."""
    while pid not in cluster.pids.values():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    name = next(name for name, worker in cluster.pids.items() if worker == pid)
    return int(name.partition(":")[2])


def test_killed_worker_reruns_its_function_and_its_work(
    three_workers: zd.local_cluster, tmp_path: Path
) -> None:
    with ClusterCoordinator(three_workers, cancel_grace_s=0.2) as coordinator:
        value = coordinator.submit(parent_of_sleepers, str(tmp_path))
        until(lambda: bool(pids(tmp_path, "a") and pids(tmp_path, "b")))
        first = pids(tmp_path, "a") + pids(tmp_path, "b")
        three_workers.kill_worker(worker_of(three_workers, pids(tmp_path, "parent")[0]))
        until(lambda: len(pids(tmp_path, "parent")) == 2)
        assert not any(map(running, first))
        value.cancel()
        assert isinstance(value.exception(30), zd.errors.CancelledError)


def test_round_ends_when_no_work_below_runs(
    three_workers: zd.local_cluster, tmp_path: Path
) -> None:
    with ClusterCoordinator(three_workers, cancel_grace_s=0.2) as coordinator:
        coordinator.submit(parent_of_sleepers, str(tmp_path))
        until(lambda: bool(pids(tmp_path, "a") and pids(tmp_path, "b")))
        coordinator.submit(divmod, 1, 0)
        with pytest.raises(ZeroDivisionError):
            coordinator.join()
        slots = pids(tmp_path, "a") + pids(tmp_path, "b")
        assert not any(map(running, slots))


PROGRAM = """
import sys
import zmqdist as zd
from tests.scheduling.coordinator.full.test_nested_waits import parent_of_sleepers

with zd.ClusterCoordinator(sys.argv[1]) as coordinator:
    coordinator.submit(parent_of_sleepers, sys.argv[2]).result()
"""


def test_killed_program_ends_all_work_below(
    three_workers: zd.local_cluster, tmp_path: Path
) -> None:
    token = str(three_workers.credentials.token_file)
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, three_workers.target, str(tmp_path)],
        env={**os.environ, "ZMQDIST_TOKEN_FILE": token},
    )
    until(lambda: bool(pids(tmp_path, "a") and pids(tmp_path, "b")))
    program.kill()
    program.communicate(timeout=10)
    slots = pids(tmp_path, "parent") + pids(tmp_path, "a") + pids(tmp_path, "b")
    until(lambda: not any(map(running, slots)))


def test_wait_that_leaves_no_slot_raises() -> None:
    with (
        zd.local_cluster(workers=1, nested_slots_max=2) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        error = coordinator.submit(fib, 8).exception(40)
        assert isinstance(error, zd.errors.ResourceExhaustedError)
        assert "depth 2" in str(error)
        assert "nested_slots_max" in str(error)
        assert coordinator.submit(fib, 2).result(40) == 1


def test_inner_request_that_outer_function_keeps_fails() -> None:
    config = {"processes": True, "resources": {"licence": 1}}
    with (
        zd.DispatchServer() as dispatcher,
        zd.WorkerServer(WorkerConfig(dispatcher.address, **config)),
        ClusterCoordinator(dispatcher) as coordinator,
    ):
        licensed = coordinator.options(resources={"licence": 1})
        error = licensed.submit(licensed_twice).exception(40)
        assert "which only the functions that have scheduled it have" in str(error)
        assert licensed.submit(abs, -2).result(40) == 2

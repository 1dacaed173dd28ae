"""Functions that schedule functions and wait for them, in slots that are processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import zmqdist as zd
from tests.scheduling.work import until
from zmqdist.coordinator import ClusterCoordinator

SLOTS = [(1, 1), (2, 1), (2, 4)]


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


def touched(folder: str, name: str) -> None:
    Path(folder, f"{name}.{os.getpid()}").touch()
    while not zd.cancelled():
        signal.sigtimedwait([], 0.01)


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
        os.kill(pids(tmp_path, "parent")[0], signal.SIGKILL)
        until(lambda: len(pids(tmp_path, "parent")) == 2)
        assert not any(running(pid) for pid in pids(tmp_path, "a")[:1])
        until(lambda: len(pids(tmp_path, "a")) == 2 and len(pids(tmp_path, "b")) == 2)
        value.cancel()
        assert isinstance(value.exception(30), zd.errors.CancelledError)

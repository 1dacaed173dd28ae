"""Streams whose worker, process or dispatcher is killed in their middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import zmqdist as zd
from tests.scheduling.work import go, until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(90)


def pauses(folder: Path, count: int) -> Iterator[int]:
    """Yield numbers, and wait in the middle for the file `go`."""
    (folder / f"begun-{os.getpid()}").touch()
    for number in range(count):
        if number == count // 2:
            (folder / f"paused-{os.getpid()}").touch()
            until(lambda: (folder / "go").exists(), within_s=60)
        yield number


def pid_of_paused(folder: Path) -> int:
    (path,) = until(lambda: list(folder.glob("paused-*")))
    return int(path.name.partition("-")[2])


@pytest.mark.parametrize("victim", ["slot", "worker"])
def test_lost_stream_says_how_many_values_have_arrived(tmp_path: Path, victim: str) -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        stream = coordinator.stream(pauses, tmp_path, 10)
        taken = [next(stream), next(stream)]
        pid = pid_of_paused(tmp_path)
        until(lambda: stream.arrived == 5)
        if victim == "slot":
            os.kill(pid, signal.SIGKILL)
        else:
            cluster.kill_worker(0)
            cluster.add_worker()
        with pytest.raises(errors.UnavailableError, match="began again after 5 values had arrived"):
            taken.extend(stream)
        assert taken == list(range(5))


@pytest.mark.parametrize("victim", ["slot", "worker"])
def test_lost_stream_with_retries_goes_on(tmp_path: Path, victim: str) -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        stream = coordinator.options(retries=1).stream(pauses, tmp_path, 10)
        assert next(stream) == 0
        pid = pid_of_paused(tmp_path)
        if victim == "slot":
            os.kill(pid, signal.SIGKILL)
        else:
            cluster.kill_worker(0)
            cluster.add_worker()
        go(tmp_path)
        assert list(stream) == list(range(1, 10))
        assert len(list(tmp_path.glob("begun-*"))) == 2


def test_stream_that_lost_nothing_begins_again_by_itself(tmp_path: Path) -> None:
    def dies_first() -> Iterator[int]:
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield from range(3)

    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        assert list(coordinator.stream(dies_first)) == [0, 1, 2]

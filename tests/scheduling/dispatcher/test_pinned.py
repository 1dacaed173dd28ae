"""Pinned work on real workers that die, leave and return, and the coordinators that hear of
this.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.work import begun, go, notes, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator, get_current_worker_index
from zmqdist.launch.children import Child
from zmqdist.scheduling.shared.config import WorkerConfig

Start = Callable[..., Child]


def test_pinned_work_waits_for_its_worker(
    dispatcher: zd.DispatchServer, coordinator: ClusterCoordinator
) -> None:
    later = coordinator.schedule(get_current_worker_index, worker=1)
    with zd.WorkerServer(WorkerConfig(dispatcher.address, index=0)):
        assert {
            coordinator.schedule(get_current_worker_index, worker=0).get(20) for _ in range(20)
        } == {0}
        assert not later.done()
        with zd.WorkerServer(WorkerConfig(dispatcher.address, index=1)):
            assert later.get(20) == 1
            assert coordinator.schedule(get_current_worker_index, worker="worker:1").get(20) == 1


def test_pinned_work_precedes_work_of_its_worker(
    dispatcher: zd.DispatchServer, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    with zd.WorkerServer(WorkerConfig(dispatcher.address, index=0)) as worker:
        coordinator.schedule(waits, (tmp_path,))
        until(lambda: begun(tmp_path))
        for name in "abc":
            coordinator.schedule(notes, (tmp_path, name))
        until(lambda: worker.snapshot().waiting == 1)
        coordinator.schedule(notes, (tmp_path, "p"), worker=0)
        until(lambda: worker.snapshot().waiting == 2)
        go(tmp_path)
        coordinator.join(20)
    assert (tmp_path / "order").read_text() == "pabc"


@pytest.mark.parametrize("processes", [True, False])
def test_pinned_work_precedes_backlog(
    dispatcher: zd.DispatchServer, coordinator: ClusterCoordinator, tmp_path: Path, processes: bool
) -> None:
    with zd.WorkerServer(WorkerConfig(dispatcher.address, index=0, processes=processes)) as worker:
        for _ in range(3):
            coordinator.fetch(coordinator.map(abs, range(500)))
        coordinator.schedule(waits, (tmp_path,))
        for _ in range(100):
            coordinator.schedule(notes, (tmp_path, "a"))
        until(lambda: begun(tmp_path))
        coordinator.schedule(notes, (tmp_path, "p"), worker=0)
        until(
            lambda: (
                (worker.snapshot().waiting_pinned, worker.snapshot().slots)
                == (1, (("running", 1),))
            )
        )
        go(tmp_path)
        coordinator.join(20)
    assert (tmp_path / "order").read_text() == "p" + "a" * 100


def test_work_pinned_to_absent_worker_fails(
    dispatcher: zd.DispatchServer,
) -> None:
    with (
        zd.WorkerServer(WorkerConfig(dispatcher.address, index=0)),
        ClusterCoordinator(dispatcher, worker_recovery_timeout_s=0.1) as coordinator,
    ):
        assert coordinator.schedule(int).get(20) == 0
        value = coordinator.schedule(int, worker=4)
        with pytest.raises(
            errors.UnavailableError, match=r"pinned to worker:4, which was absent for 0\.1 s"
        ):
            value.get(20)
        with pytest.raises(errors.UnavailableError, match="worker:4"):
            coordinator.join(20)
        assert coordinator.schedule(int).get(20) == 0
        coordinator.join(20)
    until(lambda: dispatcher.snapshot().queued == 0)


def test_higher_priority_begins_first(
    dispatcher: zd.DispatchServer, coordinator: ClusterCoordinator
) -> None:
    values = [coordinator.schedule(os.times, priority=priority) for priority in (-1, 0, 0, 7, 7, 3)]
    names = ["low", "first", "second", "highest", "next", "high"]
    ended: list[str] = []
    for name, value in zip(names, values, strict=True):
        value.add_done_callback(lambda _, name=name: ended.append(name))
    until(lambda: dispatcher.snapshot().queued == 6)
    with zd.WorkerServer(WorkerConfig(dispatcher.address, index=0)):
        coordinator.join(20)
    until(lambda: len(ended) == 6)
    assert ended == ["highest", "next", "high", "first", "second", "low"]


def test_work_pinned_to_removed_worker_waits(
    dispatcher: zd.DispatchServer, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    first, second = (
        zd.WorkerServer(WorkerConfig(dispatcher.address, index=index)) for index in range(2)
    )
    with first, second:
        running = coordinator.schedule(waits, (tmp_path, "runs"), worker=1)
        waiting = coordinator.schedule(waits, (tmp_path, "waits"), worker=1)
        until(lambda: begun(tmp_path))
        coordinator.remove_worker(1, grace_s=60.0, force=True)
        until(lambda: second.snapshot().leaving)
        go(tmp_path)
        assert running.get(20) == "runs"
        until(lambda: coordinator.workers() == ["worker:0"])
        assert second.join(20)
        assert not waiting.done()
        with zd.WorkerServer(WorkerConfig(dispatcher.address, index=1)):
            assert waiting.get(20) == "waits"


def test_missing_worker_cannot_be_removed(
    dispatcher: zd.DispatchServer, coordinator: ClusterCoordinator
) -> None:
    with pytest.raises(errors.NotFoundError, match="no worker worker:3 is registered here"):
        coordinator.remove_worker(3)
    with pytest.raises(ValueError, match="wants the index of a worker"):
        coordinator.remove_worker("worker")


@pytest.mark.parametrize("worker", [-1, "ps:0", "worker", "worker:x", "worker:01", ""])
def test_invalid_worker_name_is_refused(coordinator: ClusterCoordinator, worker: int | str) -> None:
    with pytest.raises(ValueError, match="wants the index of a worker or its name"):
        coordinator.schedule(int, worker=worker)
    assert coordinator.done()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"worker": 1.5}, TypeError),
        ({"priority": "high"}, TypeError),
        ({"priority": 2**31}, ValueError),
    ],
)
def test_options_of_wrong_type_are_refused(
    coordinator: ClusterCoordinator, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        coordinator.schedule(int, **options)
    assert coordinator.done()


def test_workers_waits_for_dispatcher_and_gives_up() -> None:
    coordinator = ClusterCoordinator("127.0.0.1:1", cluster_lost_limit_s=0.05)
    with coordinator, pytest.raises(errors.UnavailableError, match="no workers are known"):
        coordinator.workers()


def test_negative_recovery_timeout_is_refused() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="worker_recovery_timeout_s"):
        ClusterCoordinator("127.0.0.1:1", worker_recovery_timeout_s=-1.0)

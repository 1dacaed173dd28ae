"""`snapshot()` of a coordinator and of a worker: each figure while there is something to count, and
nothing when all has ended."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.work import begun, go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.shared.config import WorkerConfig
from zmqdist.transport import shm_pool

LARGE = 2**20


@pytest.fixture
def worker(dispatcher: zd.DispatchServer) -> Iterator[zd.WorkerServer]:
    """With one thread."""
    with zd.WorkerServer(WorkerConfig(dispatcher.address, index=0)) as worker:
        yield worker


@pytest.fixture
def coordinator(dispatcher: zd.DispatchServer) -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(dispatcher, queue_max=4, cancel_grace_s=0.2) as coordinator:
        yield coordinator


def fails() -> None:
    raise ValueError("Some error.")


def zeros(size: int = LARGE) -> np.ndarray[Any, Any]:
    return np.zeros(size, np.uint8)


def test_snapshot_counts_work_and_waiting_threads(
    worker: zd.WorkerServer, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    coordinator.schedule(waits, (tmp_path,))
    until(lambda: begun(tmp_path))
    values: list[Any] = []
    scheduling = threading.Thread(target=lambda: values.extend(coordinator.map(abs, range(9))))
    scheduling.start()
    until(lambda: worker.snapshot().running == 2)
    until(
        lambda: (
            (coordinator.snapshot().scheduled, coordinator.snapshot().waiting_for_room) == (6, 1)
        )
    )
    full = coordinator.snapshot()
    assert full.queued == 4
    assert (full.connected, full.workers, full.busy, full.waiting_for_end) == (True, 1, True, 0)
    assert (full.scheduled, full.unfinished, full.records) == (6, 6, 6)
    snapshot = worker.snapshot()
    assert (snapshot.registered, snapshot.leaving, snapshot.waiting, snapshot.waiting_pinned) == (
        True,
        False,
        1,
        0,
    )
    assert snapshot.slots == (("running", 1),)
    go(tmp_path)
    scheduling.join(20)
    coordinator.join(20)
    assert coordinator.fetch(values) == list(range(9))
    final = coordinator.snapshot()
    assert (final.scheduled, final.unfinished, final.queued, final.records) == (10, 0, 0, 0)
    assert (final.busy, final.waiting_for_room, final.functions, final.functions_pickled) == (
        False,
        0,
        2,
        2,
    )
    until(lambda: worker.snapshot().slots == (("idle", 0),))
    assert worker.snapshot().functions == 2


def test_pinned_work_is_counted_apart(
    worker: zd.WorkerServer, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    coordinator.schedule(waits, (tmp_path,))
    until(lambda: begun(tmp_path))
    coordinator.schedule(int, worker=0)
    until(lambda: worker.snapshot().waiting_pinned == 1)
    go(tmp_path)
    coordinator.join(20)
    assert worker.snapshot().waiting_pinned == 0


def test_snapshot_shows_failed_round_and_waiting_join(
    worker: zd.WorkerServer, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    bad = coordinator.schedule(fails)
    until(bad.done)
    assert coordinator.snapshot().failed
    with pytest.raises(ValueError, match="Some error"):
        coordinator.join(20)
    assert (coordinator.snapshot().failed, coordinator.snapshot().rounds_ended) == (False, 1)
    coordinator.schedule(waits, (tmp_path,))
    joining = threading.Thread(target=coordinator.join, args=(20,))
    joining.start()
    until(lambda: coordinator.snapshot().waiting_for_end == 1)
    assert coordinator.snapshot().busy
    go(tmp_path)
    joining.join(20)
    assert not coordinator.snapshot().busy


def test_snapshot_counts_inputs_and_parts(
    worker: zd.WorkerServer, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    first = coordinator.schedule(waits, (tmp_path,))
    second = coordinator.schedule(lambda name, array: array.size, (first, zeros()), retries=1)
    until(lambda: coordinator.snapshot().waiting_for_inputs == 1)
    snapshot = coordinator.snapshot()
    assert (snapshot.records, snapshot.held.parts, snapshot.held.copies) == (2, 1, 1)
    assert snapshot.held.bytes == LARGE
    go(tmp_path)
    assert second.get(20) == LARGE
    until(lambda: coordinator.snapshot().records == 0)
    assert coordinator.snapshot().held == (0, 0, 1)


def test_snapshot_counts_kept_values(
    worker: zd.WorkerServer, coordinator: ClusterCoordinator
) -> None:
    value = coordinator.schedule(zeros, keep=True)
    assert value.exception(20) is None
    assert (coordinator.snapshot().kept, coordinator.snapshot().memories) == (1, 0)
    assert (worker.snapshot().results, worker.snapshot().held.parts) == (1, 1)
    assert worker.snapshot().held.bytes == LARGE
    value.get()
    if shm_pool.this_pool() is not None:
        assert coordinator.snapshot().memories == 1
    del value
    gc.collect()
    until(
        lambda: (
            (worker.snapshot().results, worker.snapshot().held.parts, coordinator.snapshot().kept)
            == (0, 0, 0)
        )
    )


def test_snapshot_counts_resources(
    worker: zd.WorkerServer, coordinator: ClusterCoordinator
) -> None:
    values = coordinator.create_per_worker_resource(int)
    assert values.fetch(20) == [0]
    assert (coordinator.snapshot().resources, worker.snapshot().resources) == (1, 1)
    del values
    gc.collect()
    until(lambda: (coordinator.snapshot().resources, worker.snapshot().resources) == (0, 0))


def test_snapshot_of_closed_coordinator(
    dispatcher: zd.DispatchServer,
) -> None:
    """It has figures; a worker that was not started has none."""
    coordinator = ClusterCoordinator(dispatcher)
    coordinator.schedule(int)
    coordinator.close()
    snapshot = coordinator.snapshot()
    assert (snapshot.connected, snapshot.scheduled, snapshot.unfinished, snapshot.queued) == (
        False,
        1,
        0,
        0,
    )
    worker = zd.WorkerServer(WorkerConfig(dispatcher.address), start=False)
    with pytest.raises(errors.FailedPreconditionError, match="was not started"):
        worker.snapshot()

"""Pinned work whose worker's process dies and is restarted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import zmqdist as zd
from tests.scheduling.work import begun, dies_first, exits, go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.children import Child

Start = Callable[..., Child]


def test_pinned_work_waits_for_next_incarnation(
    dispatcher: zd.DispatchServer,
    coordinator: ClusterCoordinator,
    start_worker: Start,
    tmp_path: Path,
) -> None:
    first, _ = start_worker(dispatcher.address, index=0), start_worker(dispatcher.address, index=1)
    until(lambda: coordinator.workers() == ["worker:0", "worker:1"])
    values = [coordinator.schedule(waits, (tmp_path, str(i)), worker=0) for i in range(3)]
    (before,) = until(lambda: begun(tmp_path))
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: coordinator.workers() == ["worker:1"])
    assert coordinator.schedule(int).get(20) == 0, "other work continues"
    start_worker(dispatcher.address, index=0)
    go(tmp_path)
    assert coordinator.fetch(values) == ["0", "1", "2"]
    assert coordinator.workers() == ["worker:0", "worker:1"]
    assert dispatcher.snapshot().losses_count == 1
    assert before not in begun(tmp_path, "[12]")


def test_attempts_max_applies_to_pinned_work(
    dispatcher: zd.DispatchServer,
    coordinator: ClusterCoordinator,
    start_worker: Start,
    tmp_path: Path,
) -> None:
    start_worker(dispatcher.address, index=0)
    value = coordinator.schedule(dies_first, (tmp_path, "x", 9, exits), worker=0)
    error = value.exception(20)
    assert isinstance(error, errors.WorkerLost)
    assert len(error.starts) == 3
    with pytest.raises(errors.WorkerLost):
        coordinator.join(20)

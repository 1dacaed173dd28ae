"""Dispatchers that end while worker processes run functions."""

from __future__ import annotations

from pathlib import Path

import pytest

import zmqdist as zd
from tests.scheduling.dispatcher_kills import StartDispatcher, StartWorker, kill_dispatchers
from tests.scheduling.work import Settled, begun, go, until, waits, writes, written
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.shared.config import DispatcherConfig


def test_dispatcher_end_costs_no_running_function(
    port: int, start_worker: StartWorker, tmp_path: Path
) -> None:
    """The dispatcher is in this process: the test stops it and starts another one on the same
    port.
    """
    config = DispatcherConfig(port=port, lease_s=2.0)
    first = zd.DispatchServer(config)
    start_worker(first.address, index=0)
    with ClusterCoordinator(first, cluster_lost_limit_s=60.0) as coordinator:
        value = coordinator.schedule(waits, (tmp_path,))
        settled = Settled([value])
        until(lambda: begun(tmp_path))
        first.stop()
        with zd.DispatchServer(config) as second:
            until(lambda: second.num_workers == 1)
            # functions that ran for the first dispatcher were killed
            until(lambda: len(begun(tmp_path)) >= 2)
            assert not value.done()
            go(tmp_path)
            assert value.get(20) == "x"
            coordinator.join(20)
            until(lambda: settled.counts == [1])


def test_error_without_dispatcher_is_raised_later(
    port: int, start_worker: StartWorker, tmp_path: Path
) -> None:
    config = DispatcherConfig(port=port, lease_s=1.0)
    first = zd.DispatchServer(config)
    start_worker(first.address, index=0, slots=2)
    with ClusterCoordinator(first, cluster_lost_limit_s=60.0, cancel_grace_s=0.1) as coordinator:
        long = coordinator.schedule(writes, (tmp_path,))
        until(lambda: begun(tmp_path))
        coordinator.schedule(int, ("x",)).exception(20)
        first.stop()
        until(lambda: not coordinator.snapshot().connected)
        with zd.DispatchServer(config):
            with pytest.raises(ValueError, match="invalid literal"):
                coordinator.join(20)
            before = written(tmp_path)
            with pytest.raises(errors.CancelledError):
                long.get(0)
            assert coordinator.schedule(int).get(20) == 0
            coordinator.join(20)
            assert written(tmp_path) == before


def test_workers_end_without_dispatcher(start_worker: StartWorker, tmp_path: Path) -> None:
    """The functions that they ran have ended long before: half a lease after the last contact."""
    lines: list[str] = []
    dispatcher = zd.DispatchServer(DispatcherConfig(lease_s=1.0))
    worker = start_worker(dispatcher.address, on_line=lines.append, orphan_limit_s=4.0)
    until(lambda: dispatcher.num_workers == 1)
    with ClusterCoordinator(dispatcher, cluster_lost_limit_s=3.0) as coordinator:
        value = coordinator.schedule(writes, (tmp_path,))
        until(lambda: begun(tmp_path))
        dispatcher.stop()
        at_stop = written(tmp_path)
        assert isinstance(value.exception(20), errors.UnavailableError)
    assert worker.ended.wait(20)
    assert worker.exit_code == 3
    assert "worker: no dispatcher for 4 s" in lines
    assert 0 < written(tmp_path) < at_stop + 3000  # a millisecond each


def test_dispatcher_killed_repeatedly_loses_no_result(
    port: int, start_worker: StartWorker, start_dispatcher: StartDispatcher, tmp_path: Path
) -> None:
    kill_dispatchers(3, port, start_worker, start_dispatcher, tmp_path)

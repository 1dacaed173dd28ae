"""Dispatchers that end and come back: workers rejoin, coordinators submit again, each result is accepted once."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.dispatch.work import begun, counts, go, starts, until, waits, writes, written
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.dispatch.config import DispatcherConfig, WorkerConfig
from zmqdist.launch.children import Child

StartWorker = Callable[..., Child]
StartDispatcher = Callable[..., "subprocess.Popen[str]"]


class Settled:
    """Counts how often each value is settled."""

    def __init__(self, values: list[Any]) -> None:
        self.counts = [0] * len(values)
        for index, value in enumerate(values):
            value.add_done_callback(lambda _, index=index: self.add(index))

    def add(self, index: int) -> None:
        self.counts[index] += 1


def test_a_dispatcher_killed_and_started_again_costs_nobody_a_result(
    port: int, start_worker: StartWorker, start_dispatcher: StartDispatcher, tmp_path: Path
) -> None:
    config = {"port": port, "lease_s": 2.0}
    dispatcher = start_dispatcher(**config)
    address = f"127.0.0.1:{port}"
    workers = [start_worker(address, index=index) for index in range(2)]
    with ClusterCoordinator(address, cluster_lost_limit_s=20.0) as coordinator:
        coordinator.schedule(int).get(20)
        values = [coordinator.schedule(counts, (tmp_path, str(i), 0.01)) for i in range(60)]
        values.append(coordinator.schedule(np.ones, (1_000_000,)))
        settled = Settled(values)
        until(lambda: sum(value.done() for value in values) > 5)
        for _ in range(2):
            os.kill(dispatcher.pid, signal.SIGKILL)
            dispatcher.wait()
            dispatcher = start_dispatcher(**config)
        more = [coordinator.schedule(counts, (tmp_path, f"more{i}")) for i in range(10)]
        coordinator.join(30)
        assert coordinator.fetch(values[:-1]) == [str(i) for i in range(60)]
        assert values[-1].get().sum() == 1_000_000
        assert coordinator.fetch(more) == [f"more{i}" for i in range(10)]
        until(lambda: min(settled.counts) == 1)
        assert max(settled.counts) == 1
        assert min(starts(tmp_path, str(i)) for i in range(60)) == 1
        assert not any(worker.ended.is_set() for worker in workers)


def test_what_ran_when_the_dispatcher_went_runs_again_or_ends_but_gives_one_result(
    port: int, start_worker: StartWorker, tmp_path: Path
) -> None:
    """In one process: stopped and started on the same port."""
    config = DispatcherConfig(port=port, lease_s=2.0)
    first = zd.DispatchServer(config)
    start_worker(first.address, index=0)
    with ClusterCoordinator(first, cluster_lost_limit_s=20.0) as coordinator:
        value = coordinator.schedule(waits, (tmp_path,))
        settled = Settled([value])
        until(lambda: begun(tmp_path))
        first.stop()
        with zd.DispatchServer(config) as second:
            until(lambda: second.num_workers == 1)
            until(lambda: len(begun(tmp_path)) == 2)  # what ran for the first one has been cut off
            assert not value.done()
            go(tmp_path)
            assert value.get(20) == "x"
            coordinator.join(20)
            until(lambda: settled.counts == [1])


def test_where_slots_are_threads_the_new_dispatcher_waits_for_what_runs(port: int, tmp_path: Path) -> None:
    """It cannot be cut off, so its slot counts as busy, and join does not raise before it has ended."""
    config = DispatcherConfig(port=port, lease_s=1.0)
    first = zd.DispatchServer(config)
    worker = zd.WorkerServer(WorkerConfig(first.address))
    (tmp_path / "failing").mkdir()
    with ClusterCoordinator(first, cluster_lost_limit_s=20.0) as coordinator:
        value = coordinator.schedule(stubborn, (tmp_path,))
        until(lambda: begun(tmp_path))
        first.stop()
        with zd.DispatchServer(config) as second:
            until(lambda: second.num_workers == 1 and len(second.snapshot().coordinators) == 1)
            coordinator.schedule(int, ("x",))
            value.cancel()
            second_worker = zd.WorkerServer(WorkerConfig(second.address))
            raised: list[Any] = []

            def join() -> None:
                try:
                    coordinator.join(20)
                except ValueError as error:
                    raised.append((error, begun(tmp_path, "ended")))

            joining = threading.Thread(target=join)
            joining.start()
            until(lambda: coordinator._shell._machine.ending)
            assert not raised
            go(tmp_path)
            joining.join(20)
            assert len(raised) == 1
            assert raised[0][1]
            second_worker.stop()
            worker.stop()


def stubborn(folder: Path) -> None:
    """Does not ask whether it should end."""
    (folder / f"begun-x-{os.getpid()}").touch()
    until(lambda: (folder / "go").exists())
    (folder / f"begun-ended-{os.getpid()}").touch()


def test_an_error_that_came_while_the_dispatcher_was_away_is_raised_when_it_is_back(
    port: int, start_worker: StartWorker, tmp_path: Path
) -> None:
    config = DispatcherConfig(port=port, lease_s=1.0)
    first = zd.DispatchServer(config)
    start_worker(first.address, index=0, slots=2)
    with ClusterCoordinator(first, cluster_lost_limit_s=20.0, cancel_grace_s=0.1) as coordinator:
        long = coordinator.schedule(writes, (tmp_path,))
        until(lambda: begun(tmp_path))
        coordinator.schedule(int, ("x",)).exception(20)
        first.stop()
        until(lambda: not coordinator._shell._machine.enlisted)
        with zd.DispatchServer(config):
            with pytest.raises(ValueError, match="invalid literal"):
                coordinator.join(20)
            before = written(tmp_path)
            with pytest.raises(errors.CancelledError):
                long.get(0)
            assert coordinator.schedule(int).get(20) == 0
            coordinator.join(20)
            assert written(tmp_path) == before


def test_what_was_cancelled_while_the_dispatcher_was_away_does_not_run(port: int, tmp_path: Path) -> None:
    config = DispatcherConfig(port=port)
    first = zd.DispatchServer(config)
    with ClusterCoordinator(first, cluster_lost_limit_s=20.0) as coordinator:
        values = [coordinator.schedule(counts, (tmp_path, str(i))) for i in range(2)]
        until(lambda: first.snapshot().queued == 2)
        first.stop()
        until(lambda: not coordinator._shell._machine.enlisted)
        assert values[0].cancel()
        with pytest.raises(errors.CancelledError):
            values[0].get(20)
        with zd.DispatchServer(config) as second, zd.WorkerServer(WorkerConfig(second.address)):
            assert values[1].get(20) == "1"
            coordinator.join(20)
    assert [starts(tmp_path, name) for name in "01"] == [0, 1]


@pytest.mark.parametrize("how", ["join", "fetch", "schedule"])
def test_without_a_dispatcher_for_too_long_what_waits_fails(port: int, how: str) -> None:
    """Also when there never was one: the constructor does not wait."""
    told = r"the cluster was without a dispatcher for 0\.2 s"
    with ClusterCoordinator(f"127.0.0.1:{port}", cluster_lost_limit_s=0.2, queue_max=2) as coordinator:
        values = [coordinator.schedule(int) for _ in range(2)]
        with pytest.raises(errors.UnavailableError, match=told):
            {"join": coordinator.join, "fetch": values[1].fetch, "schedule": lambda: coordinator.schedule(int)}[how]()
        for value in values:
            with pytest.raises(errors.UnavailableError, match=told):
                value.get(0)


def test_a_dispatcher_that_goes_for_good_is_told_and_a_later_one_is_used_again(port: int) -> None:
    config = DispatcherConfig(port=port)
    first = zd.DispatchServer(config)
    with ClusterCoordinator(first, cluster_lost_limit_s=0.3) as coordinator:
        with zd.WorkerServer(WorkerConfig(first.address)):
            assert coordinator.schedule(int).get(20) == 0
        first.stop()
        value = coordinator.schedule(int)
        with pytest.raises(errors.UnavailableError, match=r"without a dispatcher for 0\.3 s"):
            coordinator.join(20)
        assert isinstance(value.exception(0), errors.UnavailableError)
        with zd.DispatchServer(config) as second, zd.WorkerServer(WorkerConfig(second.address)):
            until(lambda: coordinator._shell._machine.workers)
            assert coordinator.schedule(int).get(20) == 0
            coordinator.join(20)


def test_waiting_says_whom_it_waits_for(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zmqdist.limits.WAIT_LOG_S", 0.05)
    with ClusterCoordinator(f"127.0.0.1:{port}", cluster_lost_limit_s=0.3) as coordinator, caplog.at_level("WARNING"):
        coordinator.schedule(int)
        with pytest.raises(errors.UnavailableError):
            coordinator.join()
    assert f"waiting for the dispatcher at 127.0.0.1:{port}: " in caplog.text


def test_workers_end_when_their_dispatcher_does_not_come_back(start_worker: StartWorker, tmp_path: Path) -> None:
    """And what they ran has ended long before: half a lease after the last contact."""
    lines: list[str] = []
    dispatcher = zd.DispatchServer(DispatcherConfig(lease_s=1.0))
    worker = start_worker(dispatcher.address, on_line=lines.append, orphan_limit_s=1.0)
    until(lambda: dispatcher.num_workers == 1)
    with ClusterCoordinator(dispatcher, cluster_lost_limit_s=0.3) as coordinator:
        value = coordinator.schedule(writes, (tmp_path,))
        until(lambda: begun(tmp_path))
        dispatcher.stop()
        assert isinstance(value.exception(20), errors.UnavailableError)
    assert worker.ended.wait(20)
    assert worker.exit_code == 3
    assert "worker: no dispatcher for 1 s" in lines
    before = written(tmp_path)
    assert 0 < before < 1000  # a millisecond each

"""Dispatchers that end and are restarted: workers register again, coordinators submit again, each
result is accepted once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.dispatcher_kills import StartDispatcher, StartWorker, kill_dispatchers
from tests.scheduling.work import begun, counts, go, starts, until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig


@pytest.mark.timeout(120)
@pytest.mark.processes("dispatcher")
@pytest.mark.killed("dispatcher")
def test_killed_dispatcher_loses_no_result(
    port: int, start_worker: StartWorker, start_dispatcher: StartDispatcher, tmp_path: Path
) -> None:
    kill_dispatchers(1, port, start_worker, start_dispatcher, tmp_path)


def test_new_dispatcher_waits_for_functions_in_threads(port: int, tmp_path: Path) -> None:
    """The running function cannot be killed, so its slot counts as busy, and join raises only after
    it has ended."""
    config = DispatcherConfig(port=port, lease_s=3.0)
    first = zd.DispatchServer(config)
    worker = zd.WorkerServer(WorkerConfig(first.address))
    (tmp_path / "failing").mkdir()
    with ClusterCoordinator(first, cluster_lost_limit_s=60.0) as coordinator:
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
            until(lambda: coordinator.snapshot().ending)
            assert not raised
            go(tmp_path)
            joining.join(20)
            assert len(raised) == 1
            assert raised[0][1]
            second_worker.stop()
            worker.stop()


def stubborn(folder: Path) -> None:
    """A function that does not check whether it should end."""
    (folder / f"begun-x-{os.getpid()}").touch()
    until(lambda: (folder / "go").exists())
    (folder / f"begun-ended-{os.getpid()}").touch()


def test_work_cancelled_without_dispatcher_does_not_run(port: int, tmp_path: Path) -> None:
    config = DispatcherConfig(port=port)
    first = zd.DispatchServer(config)
    with ClusterCoordinator(first, cluster_lost_limit_s=60.0) as coordinator:
        values = [coordinator.schedule(counts, (tmp_path, str(i))) for i in range(2)]
        until(lambda: first.snapshot().queued == 2)
        first.stop()
        until(lambda: not coordinator.snapshot().connected)
        assert values[0].cancel()
        with pytest.raises(errors.CancelledError):
            values[0].get(20)
        with zd.DispatchServer(config) as second, zd.WorkerServer(WorkerConfig(second.address)):
            assert values[1].get(20) == "1"
            coordinator.join(20)
    assert [starts(tmp_path, name) for name in "01"] == [0, 1]


@pytest.mark.parametrize("how", ["join", "fetch", "schedule"])
def test_waiting_work_fails_without_dispatcher(port: int, how: str) -> None:
    """This holds even if there never was a dispatcher: the constructor does not wait."""
    text = r"the cluster was without a dispatcher for 0\.2 s"
    with ClusterCoordinator(
        f"127.0.0.1:{port}", cluster_lost_limit_s=0.2, queue_max=2
    ) as coordinator:
        values = [coordinator.schedule(int) for _ in range(2)]
        with pytest.raises(errors.UnavailableError, match=text):
            {
                "join": coordinator.join,
                "fetch": values[1].fetch,
                "schedule": lambda: coordinator.schedule(int),
            }[how]()
        for value in values:
            with pytest.raises(errors.UnavailableError, match=text):
                value.get(0)


def test_coordinator_uses_later_dispatcher_after_loss(
    port: int,
) -> None:
    config = DispatcherConfig(port=port)
    first = zd.DispatchServer(config)
    with ClusterCoordinator(first, cluster_lost_limit_s=0.3) as coordinator:
        with zd.WorkerServer(WorkerConfig(first.address)):
            until(lambda: coordinator.snapshot().workers)
            assert coordinator.schedule(int).get(20) == 0
        first.stop()
        value = coordinator.schedule(int)
        with pytest.raises(errors.UnavailableError, match=r"without a dispatcher for 0\.3 s"):
            coordinator.join(20)
        assert isinstance(value.exception(0), errors.UnavailableError)
        with zd.DispatchServer(config) as second, zd.WorkerServer(WorkerConfig(second.address)):
            until(lambda: coordinator.snapshot().workers)
            assert coordinator.schedule(int).get(20) == 0
            coordinator.join(20)


WAITS: dict[str, Callable[[ClusterCoordinator, Any], object]] = {
    "join": lambda coordinator, value: coordinator.join(),
    "get": lambda coordinator, value: value.get(),
    "fetch": lambda coordinator, value: coordinator.fetch(value),
    "as_completed": lambda coordinator, value: next(iter(coordinator.as_completed([value]))).get(),
    "workers": lambda coordinator, value: coordinator.workers(),
}


@pytest.mark.parametrize("way", WAITS)
def test_waiting_call_logs_its_reason(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    monkeypatch.setattr("zmqdist.limits.WAIT_LOG_S", 0.05)
    with (
        ClusterCoordinator(f"127.0.0.1:{port}", cluster_lost_limit_s=1.0) as coordinator,
        caplog.at_level("WARNING"),
    ):
        value = None if way == "workers" else coordinator.schedule(int)
        with pytest.raises(errors.UnavailableError):
            WAITS[way](coordinator, value)
    assert f"waiting for the dispatcher at 127.0.0.1:{port}: " in caplog.text
    if way != "workers":
        assert "1 scheduled function: waiting" in caplog.text


def test_future_without_worker_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zmqdist.limits.WAIT_LOG_S", 0.05)
    with zd.DispatchServer() as dispatcher, zd.Executor(dispatcher) as executor:
        future = executor.submit(int)
        until(
            lambda: (
                "waiting for a worker to register with the dispatcher at localhost:" in caplog.text
            )
        )
        with zd.WorkerServer(WorkerConfig(dispatcher.address)):
            assert future.result(20) == 0

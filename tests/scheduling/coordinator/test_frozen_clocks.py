"""A clock that a test library has replaced, or stopped, stops no time-out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import Gate, passes_gate
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.rpc import Client, ZmqServer


@contextmanager
def replaced() -> Iterator[None]:
    """The functions of the module `time` are replaced, as by `monkeypatch`."""
    with (
        mock.patch("time.monotonic", return_value=5.0),
        mock.patch("time.perf_counter", return_value=5.0),
        mock.patch("time.time", return_value=5.0),
        mock.patch("time.sleep"),
    ):
        yield


@contextmanager
def frozen() -> Iterator[None]:
    freezegun = pytest.importorskip("freezegun")
    with freezegun.freeze_time("2020-01-01"):
        yield


@contextmanager
def travelled() -> Iterator[None]:
    time_machine = pytest.importorskip("time_machine")
    with time_machine.travel(0, tick=False):
        yield


@pytest.mark.parametrize("stop_clock", [replaced, frozen, travelled])
def test_time_outs_end_on_stopped_clock(stop_clock: Callable[[], Any]) -> None:
    Gate.opened.clear()
    with (
        stop_clock(),
        zd.local_cluster(workers=1, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
        zd.Executor(cluster) as executor,
    ):
        value = coordinator.schedule(passes_gate)
        for wait in (value.get, value.fetch, coordinator.join):
            with pytest.raises(errors.DeadlineExceededError):
                wait(0.1)
        assert coordinator.done(0.1) is False
        with pytest.raises(errors.DeadlineExceededError):
            coordinator.schedule(int, timeout=0.1).get(20)
        with pytest.raises(futures.TimeoutError):
            next(executor.map(int, "1", timeout=0.1))
        Gate.opened.set()
        assert value.get(20) == 1
        dataset = zd.data.Dataset.range(3).apply(
            zd.data.service.distribute("parallel_epochs", cluster)
        )
        assert len(list(dataset)) == 3


@pytest.mark.parametrize("stop_clock", [replaced, frozen, travelled])
def test_calls_end_on_stopped_clock(own_secrets: None, stop_clock: Callable[[], Any]) -> None:
    Gate.opened.clear()
    with stop_clock():
        server = ZmqServer("127.0.0.1:0")
        server.register("m", passes_gate)
        server.start()
        with Client.create("zmq", server.address, "", 200) as client:
            with pytest.raises(errors.DeadlineExceededError):
                client.m_blocking()
            Gate.opened.set()
            assert client.m_blocking(timeout_in_ms=20_000) == 1
        server.stop()
        with pytest.raises(errors.DeadlineExceededError):
            Client.create("zmq", server.address, "", 100)

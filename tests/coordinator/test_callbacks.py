"""The thread of callbacks: nothing that a callback raises ends it, and one that cannot be started is said where it is needed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.work import until
from zmqdist.coordinator import ClusterCoordinator

CALLBACKS = "zmqdist-callbacks"


def threads_of_callbacks() -> int:
    return sum(thread.name == CALLBACKS for thread in threading.enumerate())


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Threads of this name cannot be started, as where the process may have no more."""
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)


def exits_thread(_: object) -> None:
    raise SystemExit("enough")


def test_a_callback_that_raises_system_exit_is_logged_and_those_after_it_are_called(
    in_threads: ClusterCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    value = in_threads.schedule(int)
    value.get(20)
    called: list[Any] = []
    value.add_done_callback(exits_thread)
    value.add_done_callback(called.append)
    until(lambda: called == [value])
    assert "a done callback of <RemoteValue of builtins.int: ready> failed" in caplog.text


def test_a_thread_that_cannot_be_started_is_the_error_of_who_registers_a_callback(
    in_threads: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = in_threads.schedule(int)
    called: list[Any] = []
    with monkeypatch.context() as full:
        refuse_threads(full, CALLBACKS)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            value.add_done_callback(called.append)
    value.add_done_callback(called.append)
    until(lambda: called == [value])


def test_a_callback_that_comes_after_the_end_is_called_and_leaves_no_thread(threads: zd.local_cluster) -> None:
    with ClusterCoordinator(threads) as coordinator:
        value = coordinator.schedule(int)
        value.get(20)
    before = threads_of_callbacks()
    called: list[Any] = []
    value.add_done_callback(called.append)
    until(lambda: called == [value])
    until(lambda: threads_of_callbacks() <= before)

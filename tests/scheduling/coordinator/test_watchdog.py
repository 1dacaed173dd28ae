"""The watchdog speaks when nothing ends any more, and only then; the timer that it is made of."""

from __future__ import annotations

import io
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from zmqdist.scheduling.coordinator.coordinator import ClusterCoordinator
from zmqdist.scheduling.coordinator.watchdog import TIMEOUT_ENV, RepeatedTimer, WatchDog

pytestmark = pytest.mark.timeout(60)

TIMEOUT_S = 0.2


class Triggers:
    """Counts the calls of a watchdog, and lets a test wait for the next."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        self._calls.put(None)

    def wait(self) -> None:
        self._calls.get(timeout=20)


@pytest.fixture
def triggers() -> Triggers:
    return Triggers()


def watchdog(**options: Any) -> WatchDog:
    return WatchDog(TIMEOUT_S, **options)


def test_watchdog_triggers_until_stop(triggers: Triggers, tmp_path: Path) -> None:
    with open(tmp_path / "stacks", "w") as file:
        dog = watchdog(traceback_file=file, on_triggered=triggers)
        triggers.wait()
        dog.report_closure_done()
        triggers.wait()
        dog.stop()
        stopped_at = triggers.count
    assert not any(thread.name == "WatchDog" for thread in threading.enumerate())
    assert triggers.count == stopped_at
    stacks = (tmp_path / "stacks").read_text()
    assert "test_watchdog.py" in stacks
    assert stacks.count("end of the stacks") == stopped_at


def test_watchdog_writes_stacks_to_object_without_descriptor(
    triggers: Triggers,
) -> None:
    file = io.StringIO()
    dog = watchdog(traceback_file=file, on_triggered=triggers)
    triggers.wait()
    dog.stop()
    assert "in test_watchdog_writes_stacks" in file.getvalue()


@pytest.mark.parametrize("timeout", [-1, 0])
def test_watchdog_without_time_out_is_off(timeout: int) -> None:
    dog = WatchDog(timeout)
    assert not any(thread.name == "WatchDog" for thread in threading.enumerate())
    dog.report_closure_done()
    dog.stop()


@pytest.mark.parametrize(("text", "timeout"), [("7", 7), ("soon", 3), ("-1", 3), ("", 3)])
def test_environment_time_out_overrides_that_of_program(
    monkeypatch: pytest.MonkeyPatch, text: str, timeout: int
) -> None:
    monkeypatch.setenv(TIMEOUT_ENV, text)
    dog = WatchDog(3)
    dog.stop()
    assert dog.timeout == timeout


def test_watchdog_is_silent_with_progress_or_without_work(
    triggers: Triggers,
) -> None:
    looks: queue.SimpleQueue[None] = queue.SimpleQueue()
    state = {"ended": 0, "in flight": 0}

    def progress() -> tuple[int, int]:
        looks.put(None)
        return state["ended"], state["in flight"]

    dog = watchdog(traceback_file=io.StringIO(), on_triggered=triggers, progress=progress)
    for _ in range(30):  # three time-outs
        looks.get(timeout=20)
    assert triggers.count == 0
    state["in flight"] = 1
    triggers.wait()
    dog.stop()


def test_environment_gives_coordinator_a_watchdog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TIMEOUT_ENV, "60")
    with zd.local_cluster(workers=1, processes=False) as cluster, ClusterCoordinator(cluster):
        assert any(thread.name == "WatchDog" for thread in threading.enumerate())
    assert not any(thread.name == "WatchDog" for thread in threading.enumerate())


# -- the timer -------------------------------------------------------------------------------------


@pytest.fixture
def timer_calls() -> queue.SimpleQueue[tuple[Any, ...]]:
    return queue.SimpleQueue()


def test_timer_repeats_call_until_stop(
    timer_calls: queue.SimpleQueue[tuple[Any, ...]],
) -> None:
    timer = RepeatedTimer(0.01, lambda *args: timer_calls.put(args), 1, "two")
    assert [timer_calls.get(timeout=20) for _ in range(3)] == [(1, "two")] * 3
    seconds = timer.stop()
    assert isinstance(seconds, int)
    assert seconds >= 0
    left = timer_calls.qsize()
    assert timer.stop() >= seconds
    assert timer_calls.qsize() == left


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_timer_goes_on_after_error(
    timer_calls: queue.SimpleQueue[tuple[Any, ...]],
    caplog: pytest.LogCaptureFixture,
    error: type[BaseException],
) -> None:
    def call() -> None:
        timer_calls.put(())
        raise error("this call")

    timer = RepeatedTimer(0.01, call)
    for _ in range(3):
        timer_calls.get(timeout=20)
    timer.stop()
    assert "this call" in caplog.text


def test_timer_can_be_stopped_by_its_call() -> None:
    stop_event = threading.Event()
    timers: list[RepeatedTimer] = []

    def call() -> None:
        timers[0].stop()
        stop_event.set()

    timers.append(RepeatedTimer(0.01, call))
    assert stop_event.wait(20)
    timers[0].stop()
    assert "zmqdist" in sys.modules

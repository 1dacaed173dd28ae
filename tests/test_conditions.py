"""Conditions, and what Ctrl-C at any point leaves of them."""

from __future__ import annotations

import inspect
import os
import signal
import threading
from collections.abc import Callable
from sys import _current_frames

import pytest

from tests.house.test_rooms import modules
from tests.interrupts import interrupted_runs
from tests.scheduling.work import until
from zmqdist.callbacks import Callbacks
from zmqdist.conditions import Condition, Signals


def enters(condition: Condition) -> None:
    with condition:
        condition.notify_all()


def waits(condition: Condition) -> None:
    with condition:
        condition.wait(0.001)


def waits_for_nothing(condition: Condition) -> None:
    with condition:
        condition.wait_for(lambda: False, 0.001)


def is_free(condition: Condition) -> bool:
    """Return whether another thread can take the lock."""
    acquired: list[bool] = []

    def take() -> None:
        acquired.append(condition.acquire(timeout=10))
        condition.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return acquired == [True]


@pytest.mark.parametrize("use", [enters, waits, waits_for_nothing])
def test_interrupt_leaves_condition_free(use: Callable[[Condition], None]) -> None:
    condition = Condition()
    for point in interrupted_runs(lambda: use(condition)):
        assert is_free(condition), point
    assert point > 2


def test_modules_have_no_condition_of_python() -> None:
    uses = [path.stem for path in modules() if "threading.Condition(" in path.read_text()]
    assert uses == []


def test_wait_is_interrupted_while_it_takes_the_lock() -> None:
    condition, main = Condition(), threading.main_thread().ident
    assert main is not None

    def stands_at(line: int) -> Callable[[], bool]:
        polls = 0

        def stands() -> bool:
            nonlocal polls
            frame = _current_frames()[main]
            is_there = frame.f_code is Condition.wait.__code__ and frame.f_lineno == line
            polls = polls + 1 if is_there else 0
            return polls == 20  # so that it sleeps: a signal just before would not wake it

        return stands

    first, again = (
        line + Condition.wait.__code__.co_firstlineno
        for line, text in enumerate(inspect.getsource(Condition.wait).splitlines())
        if text.strip() == "self.acquire()"
    )

    def interrupt() -> None:
        with condition:
            condition.notify_all()
            until(stands_at(first))
            os.kill(os.getpid(), signal.SIGINT)
            until(stands_at(again))

    thread = threading.Thread(target=interrupt)
    with condition:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            condition.wait()
    thread.join()
    assert is_free(condition)


def test_wait_that_has_ended_takes_no_notification() -> None:
    condition, woken = Condition(), Signals()
    waits(condition)

    def wait() -> None:
        with condition:
            ready.release()
            condition.wait()
        woken.release()

    ready = Signals()
    thread = threading.Thread(target=wait)
    thread.start()
    assert ready.acquire(30)
    with condition:
        condition.notify()
    assert woken.acquire(30)
    thread.join()


def test_interrupted_signals_stay_usable() -> None:
    signals = Signals()
    for point in interrupted_runs(lambda: signals.acquire(0.001)):
        signals.release()
        assert signals.acquire(0), point
        assert not signals.acquire(0), point


def test_interrupted_wait_for_callbacks_leaves_them_running() -> None:
    callbacks, called = Callbacks(), Signals()
    callbacks.start()
    try:
        for point in interrupted_runs(callbacks.wait_called):
            callbacks.put(lambda _: called.release(), None)
            assert called.acquire(10), point
    finally:
        callbacks.close()


def test_interrupts_beside_notifier_leave_condition_free() -> None:
    condition, stops = Condition(), threading.Event()

    def notify() -> None:
        while not stops.is_set():
            with condition:
                condition.notify_all()

    notifier = threading.Thread(target=notify)
    notifier.start()
    try:
        for _ in range(5):
            for point in interrupted_runs(lambda: waits(condition)):
                assert is_free(condition), point
    finally:
        stops.set()
        notifier.join()


def test_condition_wakes_one_or_all() -> None:
    condition, woken = Condition(), threading.Semaphore(0)
    waiting = 0

    def wait() -> None:
        nonlocal waiting
        with condition:
            waiting += 1
            assert condition.wait(30)
        woken.release()

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    with condition:
        while waiting < 3:
            condition.wait(0.001)
        condition.notify()
    assert woken.acquire(timeout=30)
    assert not woken.acquire(timeout=0.05)
    with condition:
        condition.notify_all()
    for thread in threads:
        thread.join(30)
    assert woken.acquire(blocking=False)
    assert woken.acquire(blocking=False)


@pytest.mark.parametrize("method", ["wait", "notify", "notify_all"])
def test_method_without_the_lock_is_refused(method: str) -> None:
    condition = Condition()
    with pytest.raises(RuntimeError, match="un-acquired lock"):
        getattr(condition, method)()
    assert is_free(condition)

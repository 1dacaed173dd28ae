"""Conditions, and what Ctrl-C at any point leaves of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.house.test_rooms import modules
from tests.interrupts import interrupted_runs
from zmqdist.conditions import Condition


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
    assert not [path for path in modules() if "threading.Condition()" in path.read_text()]


def test_wait_is_interrupted_while_lock_is_taken() -> None:
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

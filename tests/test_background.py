"""What finalizers leave to threads."""

from __future__ import annotations

import sys
import threading
import time
import weakref

import pytest

from zmqdist.background import in_background, logged, wait_finished


def test_background_call_has_named_thread() -> None:
    begun, leave = threading.Event(), threading.Event()
    names: list[str] = []

    def end() -> None:
        names.append(threading.current_thread().name)
        begun.set()
        leave.wait(30)

    in_background("zmqdist-test-end", end)
    assert begun.wait(30)
    assert names == ["zmqdist-test-end"]
    assert not wait_finished(0.0)
    leave.set()


def test_wait_finished_ends_with_last_thread() -> None:
    assert wait_finished(30)
    leave = threading.Event()
    in_background("zmqdist-test-end", leave.wait, 30)
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(wait_finished(30)))
    waiting.start()
    until_it_waits(waiting)
    leave.set()
    waiting.join(30)
    assert found == [True]


class Payload:
    def end(self) -> None:
        """What a finalizer leaves to a thread."""


def test_finished_thread_drops_its_arguments() -> None:
    wait_finished(30)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # each thread is interrupted between almost any two lines
    try:
        for _ in range(1000):
            held = Payload()
            gone = weakref.ref(held)
            in_background("zmqdist-test-end", held.end)
            del held
            wait_finished(30)
            assert gone() is None
    finally:
        sys.setswitchinterval(interval_s)


def until_it_waits(thread: threading.Thread) -> None:
    """Wait until `thread` waits for an event."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        frame = sys._current_frames().get(
            thread.ident or 0
        )  # reach: documented by the standard library
        while frame is not None:
            if frame.f_code is threading.Event.wait.__code__:
                return
            frame = frame.f_back
    raise AssertionError("it does not wait")


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), MemoryError()])
def test_thread_error_is_logged_with_name(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    thread = threading.Thread(target=logged, args=(fail,), name="zmqdist-test-fails")
    thread.start()
    thread.join(30)
    in_background("zmqdist-test-finalizer", fail)
    assert wait_finished(30)
    assert [record.getMessage() for record in caplog.records] == [
        "zmqdist-test-fails failed",
        "zmqdist-test-finalizer failed",
    ]
    assert all(
        record.exc_info is not None and record.exc_info[1] is error for record in caplog.records
    )

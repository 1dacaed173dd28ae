"""What finalizers leave to threads."""

from __future__ import annotations

import threading

from zmqdist.background import in_background, wait_finished


def test_the_caller_does_not_wait_and_the_thread_has_its_name() -> None:
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


def test_a_wait_for_what_was_left_to_threads_says_whether_there_was_anything() -> None:
    wait_finished(30)
    assert not wait_finished(30)
    leave = threading.Event()
    in_background("zmqdist-test-end", leave.wait, 30)
    threading.Timer(0.02, leave.set).start()
    assert wait_finished(30)

"""The loop: the order of a turn, the inbox, timers, faults, and the end."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from tests.transport.helpers import until
from zmqdist.errors import DeadlineExceededError, FailedPreconditionError, ResourceExhaustedError
from zmqdist.transport.loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop("zmqdist-test")
    yield loop
    loop.stop()


def pair(loop: Loop) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return (this end, in the loop; the other end)."""
    one, other = loop.context.socket(zmq.PAIR), loop.context.socket(zmq.PAIR)
    one.bind("inproc://pair")
    other.connect("inproc://pair")
    loop.on_stop(one.close)
    loop.on_stop(other.close)
    return one, other


def test_callbacks_run_in_loop_thread_in_order(loop: Loop) -> None:
    seen: list[tuple[int, bool]] = []
    loop.start()
    for number in range(1000):
        loop.call_soon(lambda number=number: seen.append((number, loop.in_loop)))
    loop.run(lambda: None)
    assert seen == [(number, True) for number in range(1000)]
    assert not loop.in_loop


def test_callbacks_of_many_threads_all_run(loop: Loop) -> None:
    seen: list[int] = []
    loop.start()

    def hand_in() -> None:
        for _ in range(300):
            done = threading.Event()
            loop.call_soon(seen.append, 1)
            loop.call_soon(done.set)
            assert done.wait(30), "the loop slept although its inbox was not empty"

    threads = [threading.Thread(target=hand_in) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1200


def test_callback_before_sleep_runs(loop: Loop) -> None:
    seen: list[float] = []
    loop.call_soon(lambda: seen.append(loop.now()))
    loop.set_timer("alarm", began := loop.now() + 2.0, lambda: None)
    loop._turn()  # by hand, to have exactly this moment  # reach: one turn by hand
    assert seen
    assert seen[0] < began


def test_run_returns_result_or_raises(loop: Loop) -> None:
    assert loop.run(lambda: 1) == 1  # before the start: directly
    loop.start()
    assert loop.run(max, 1, 2) == 2
    with pytest.raises(ZeroDivisionError):
        loop.run(lambda: 1 // 0)
    assert loop.faults == 0


def test_run_gives_up_behind_busy_callback(loop: Loop) -> None:
    loop.start()
    hold = threading.Event()
    loop.call_soon(hold.wait)
    with pytest.raises(DeadlineExceededError, match="zmqdist-test did not finish the function"):
        loop.run(lambda: None, timeout_s=0.05)
    hold.set()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_loop_survives_every_exception(loop: Loop, error: type[BaseException]) -> None:
    def broken() -> None:
        raise error

    loop.start()
    loop.call_soon(broken)
    assert loop.run(lambda: "still here") == "still here"
    assert loop.faults == 1


def test_callback_error_is_logged_and_counted(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ValueError("broken on purpose")

    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    served = threading.Event()

    def drain_and_fail() -> None:
        os.read(read, 10)
        served.set()
        broken()

    loop.add_fd(read, drain_and_fail)
    loop.start()
    loop.call_soon(broken)
    loop.run(loop.set_timer, "broken", 0.0, broken)
    os.write(write, b"x")
    assert served.wait(30)
    assert loop.run(lambda: "still here") == "still here"
    loop.run(loop.remove_fd, read)
    assert loop.faults == 3
    assert "broken on purpose" in caplog.text
    for fd in (read, write):
        os.close(fd)


def test_turn_serves_input_inbox_timers_hooks(loop: Loop) -> None:
    ours, other = pair(loop)
    order: list[str] = []
    done = threading.Event()

    def read() -> None:
        order.append(ours.recv(zmq.NOBLOCK).decode())

    loop.add_socket(ours, read)
    loop.set_timer("late", 0.0, lambda: order.append("timer"))
    loop.call_soon(order.append, "inbox")
    loop.at_end_of_turn(lambda: (order.append("hook"), done.set()))
    other.send(b"input")
    loop.start()
    assert done.wait(30)
    assert order[:4] == ["input", "inbox", "timer", "hook"]


def test_hooks_rest_in_idle_turn(loop: Loop) -> None:
    turns: list[int] = []
    loop.at_end_of_turn(lambda: turns.append(1))
    loop.start()
    for _ in range(5):
        loop.run(lambda: None)
    loop.run(lambda: None)
    assert 6 <= len(turns) + 1 <= 7


def test_timers_wait_for_backlog(loop: Loop) -> None:
    ours, other = pair(loop)
    order: list[str] = []

    def read_one() -> bool:
        order.append(ours.recv(zmq.NOBLOCK).decode())
        return len(order) < 20  # "there may be more"

    done = threading.Event()
    loop.add_socket(ours, read_one)
    loop.set_timer("tick", 0.0, lambda: (order.append("tick"), done.set()))
    for number in range(20):
        other.send(str(number).encode())
    loop.start()
    assert done.wait(30)
    assert order == [*map(str, range(20)), "tick"]


def test_timers_survive_endless_backlog(loop: Loop) -> None:
    ours, other = pair(loop)

    def read_and_ask_for_more() -> bool:
        ours.recv(zmq.NOBLOCK)
        other.send(b"again")
        return True

    ticked = threading.Event()
    loop.add_socket(ours, read_and_ask_for_more)
    loop.set_timer("tick", 0.0, ticked.set)
    other.send(b"first")
    loop.start()
    assert ticked.wait(30)


@pytest.mark.parametrize("moves", [1, 1000])
def test_moved_timer_fires_once(loop: Loop, moves: int) -> None:
    fired: list[str] = []
    done = threading.Event()
    far = time.monotonic() + 3600
    for number in range(moves):
        loop.set_timer("moved", far + number, lambda: fired.append("too late"))
        loop.set_timer("off", far + number, lambda: fired.append("cancelled"))
    loop.set_timer("off", None, fired.clear)
    now = loop.now()
    loop.set_timer("moved", now + 0.02, lambda: fired.append("moved"))
    loop.set_timer("last", now + 0.04, lambda: (fired.append("last"), done.set()))
    loop.start()
    assert done.wait(30)
    assert fired == ["moved", "last"]
    assert loop.now() >= now + 0.04


def test_timer_in_past_does_not_starve_others(loop: Loop) -> None:
    def again() -> None:
        loop.set_timer("again", 0.0, again)

    loop.set_timer("again", 0.0, again)
    loop.start()
    assert loop.run(lambda: 1) == 1


def test_unread_descriptor_is_served_again(loop: Loop) -> None:
    ours, other = pair(loop)
    got: list[bytes] = []
    done = threading.Event()

    def one_at_a_time() -> None:
        got.append(ours.recv(zmq.NOBLOCK))
        if len(got) == 50:
            done.set()

    loop.add_socket(ours, one_at_a_time)
    loop.start()
    for number in range(50):
        other.send(b"%d" % number)
    assert done.wait(30)
    assert got == [b"%d" % number for number in range(50)]


def test_writable_callback_runs_while_enabled(loop: Loop) -> None:
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    calls: list[str] = []
    done = threading.Event()

    def writable() -> None:
        calls.append("writable")
        loop.watch_writable(write, False)
        done.set()

    loop.add_fd(write, lambda: calls.append("readable"), writable)
    loop.start()
    loop.run(lambda: None)
    assert calls == []
    loop.run(loop.watch_writable, write, True)
    assert done.wait(30)
    loop.run(lambda: None)
    assert calls == ["writable"]
    loop.run(loop.remove_fd, write)
    loop.run(loop.remove_fd, write)
    os.close(read)
    os.close(write)


def test_stop_runs_callbacks_and_closes_sockets() -> None:
    loop = Loop("zmqdist-test")
    ours, other = pair(loop)
    loop.add_socket(ours, lambda: None)
    order: list[str] = []
    loop.on_stop(lambda: order.append("first registered, last run"))
    loop.on_stop(lambda: order.append("closer" if loop.in_loop else "wrong thread"))
    loop.start()
    loop.call_soon(order.append, "inbox")
    loop.stop()
    loop.stop()
    assert order == ["inbox", "closer", "first registered, last run"]
    assert ours.closed
    assert other.closed
    assert loop.context.closed
    with pytest.raises(FailedPreconditionError, match="loop zmqdist-test has ended"):
        loop.call_soon(order.append, "too late")
    with pytest.raises(FailedPreconditionError, match="ended"):
        loop.run(order.append, "too late")
    with pytest.raises(FailedPreconditionError, match="has been stopped"):
        loop.start()


def test_stopped_loop_keeps_no_callback() -> None:
    loop = Loop("zmqdist-test")
    owner = threading.Event()
    gone = weakref.ref(owner)
    loop.set_timer(owner, loop.now() + 60, owner.set)
    loop.at_end_of_turn(owner.is_set)
    loop.add_socket(pair(loop)[0], owner.is_set)
    with socket.socket() as other:
        loop.add_fd(other.fileno(), owner.is_set)
        loop.start()
        loop.stop()
    del owner
    assert gone() is None


def test_function_taken_back_does_not_run_at_stop() -> None:
    loop = Loop("zmqdist-test")
    closed: list[int] = []

    def close() -> None:
        closed.append(1)

    loop.on_stop(close)
    loop.not_on_stop(close)
    loop.stop()
    assert not closed


def test_unstarted_loop_can_stop() -> None:
    loop = Loop("zmqdist-test")
    closed: list[int] = []
    loop.on_stop(lambda: closed.append(1))
    loop.stop()
    assert closed == [1]
    assert loop.context.closed


def test_loop_without_thread_can_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loop = Loop("zmqdist-test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ResourceExhaustedError):
            loop.start()
    loop.stop()
    assert loop.context.closed


def test_loop_can_stop_itself() -> None:
    loop = Loop("zmqdist-test")
    ended = threading.Event()
    loop.on_stop(ended.set)
    loop.start()
    loop.call_soon(loop.stop)
    assert ended.wait(30)
    loop.stop()
    assert loop.context.closed


def test_unstarted_loop_can_stop_twice() -> None:
    loop = Loop("zmqdist-test")
    loop.stop()
    loop.stop()
    assert loop.context.closed


def test_stop_returns_beside_busy_callback(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop("zmqdist-test")
    loop.start()
    hold = threading.Event()
    loop.call_soon(hold.wait)
    loop.stop(timeout_s=0.05)
    assert "because a callback still runs" in caplog.text
    hold.set()
    loop.stop()
    assert loop.context.closed


def test_delayed_loop_reads_before_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoll that returns far too late, and input that is there only then, imitate a process that
    was stopped."""
    clock = HandSet(time.monotonic)
    late = threading.Event()

    def comes_back_late() -> None:
        if not late.is_set():
            clock.jump(10.0)
            late.set()

    real = select.epoll
    monkeypatch.setattr(
        "zmqdist.transport.loop.platforms.new_epoll", lambda: Epoll(real(), comes_back_late)
    )
    monkeypatch.setattr("zmqdist.transport.loop.time.monotonic", clock)
    loop = Loop("zmqdist-test")
    try:
        ours, other = pair(loop)
        order: list[str] = []
        read, done = threading.Event(), threading.Event()
        loop.add_socket(ours, lambda: (order.append(ours.recv(zmq.NOBLOCK).decode()), read.set()))
        loop.set_timer(
            "overdue", clock() + 0.05, lambda: (order.append("who is late?"), done.set())
        )
        loop.start()
        assert late.wait(20)
        other.send(b"a beat")
        assert read.wait(20)
        clock.go_on()
        assert done.wait(20)
        assert order == ["a beat", "who is late?"]
    finally:
        loop.stop()


class HandSet:
    """A clock that stands still until the test sets it forward."""

    def __init__(self, real: Callable[[], float]) -> None:
        self._real = real
        self._offset_s = 0.0
        self._stands_at: float | None = real()

    def jump(self, by_s: float) -> None:
        assert self._stands_at is not None
        self._stands_at += by_s

    def go_on(self) -> None:
        assert self._stands_at is not None
        self._offset_s, self._stands_at = self._stands_at - self._real(), None

    def __call__(self) -> float:
        stands_at = self._stands_at
        return self._real() + self._offset_s if stands_at is None else stands_at


class Epoll:
    """An epoll that calls something after each sleep."""

    def __init__(self, real: select.epoll, slept: Callable[[], object]) -> None:
        self._real = real
        self._slept = slept

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        ready = self._real.poll(timeout_s)
        if timeout_s:
            self._slept()
        return ready

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_lost_socket_does_not_keep_unstarted_loop(loop: Loop) -> None:
    """A Ctrl-C leaves such a socket if it comes after the socket was made and before pyzmq has
    recorded it."""

    class Interrupted(zmq.Socket[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            left.append(self)
            zmq.backend.Socket.__init__(self, *args, **kwargs)
            raise KeyboardInterrupt

    left: list[zmq.Socket[bytes]] = []
    try:
        loop.context.socket(zmq.PAIR, socket_class=Interrupted)
    except KeyboardInterrupt:
        loop.stop()
    assert not left[0].closed
    zmq.backend.Socket.close(left[0], linger=0)
    until(lambda: loop.context.closed)


def runs_here(loop: Loop) -> bool:
    """Return whether `call_now` has run a function in this thread, as while the loop sleeps."""
    threads: list[int] = []
    loop.call_now(lambda: threads.append(threading.get_ident()))
    return threads == [threading.get_ident()]


def sleeping(loop: Loop) -> None:
    """Start the loop, and return when it sleeps."""
    loop.start()
    until(lambda: runs_here(loop))


def test_call_now_runs_in_its_thread_while_loop_sleeps(loop: Loop) -> None:
    seen: list[Any] = []
    loop.at_end_of_turn(lambda: seen.append("end of turn"))
    sleeping(loop)
    del seen[:]
    loop.call_now(lambda: seen.append((threading.get_ident(), loop.in_loop)))
    assert seen == [(threading.get_ident(), True), "end of turn"]
    assert not loop.in_loop


def test_call_now_runs_in_loop_while_it_is_busy(loop: Loop) -> None:
    seen: list[int] = []
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    loop.start()

    def busy() -> None:
        began.set()
        assert go_on.wait(20)

    loop.call_soon(busy)
    assert began.wait(20)
    loop.call_now(lambda: (seen.append(threading.get_ident()), ended.set()))
    assert seen == []
    go_on.set()
    assert ended.wait(20)
    assert seen != [threading.get_ident()]


def test_call_now_wakes_loop_for_timer_and_call(loop: Loop) -> None:
    ends = [threading.Event(), threading.Event()]

    def both() -> None:
        loop.set_timer("soon", loop.now() + 0.01, ends[0].set)
        loop.call_soon(ends[1].set)

    sleeping(loop)
    loop.call_now(both)
    assert all(end.wait(20) for end in ends)


def test_call_now_leaves_no_input_unread(loop: Loop) -> None:
    one, other = pair(loop)
    texts: list[bytes] = []
    ended = threading.Event()

    def read() -> None:
        texts.append(one.recv(zmq.NOBLOCK))
        if len(texts) == 2000:
            ended.set()

    watched = loop.add_socket(one, read)

    def send(number: int) -> None:
        # both ends are used in one thread, which consumes the signal of the input
        other.send(b"%d" % number)
        watched.dirty = True
        one.getsockopt(zmq.EVENTS)

    loop.start()
    for number in range(2000):
        loop.call_now(send, number)
    assert ended.wait(20), f"{len(texts)} of 2000 messages were read"
    assert texts == [b"%d" % number for number in range(2000)]


def test_turns_of_many_threads_do_not_overlap(loop: Loop) -> None:
    counts = [0, 0]

    def turn() -> None:
        counts[0] += 1
        assert counts[0] == 1
        counts[1] += 1
        counts[0] -= 1

    loop.start()

    def hand_in() -> None:
        for number in range(1000):
            (loop.call_now if number % 3 else loop.call_soon)(turn)

    threads = [threading.Thread(target=hand_in) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loop.run(lambda: None)
    assert counts == [0, 8000]
    assert loop.faults == 0


def test_fault_in_call_now_is_counted(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    sleeping(loop)
    loop.call_now(lambda: 1 / 0)
    assert loop.faults == 1
    assert runs_here(loop)
    assert "ZeroDivisionError" in caplog.text


def test_call_now_after_end_of_loop_raises(loop: Loop) -> None:
    sleeping(loop)
    loop.stop()
    with pytest.raises(FailedPreconditionError):
        loop.call_now(print)


def test_call_now_does_not_wake_loop_for_nothing(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer for which the loop wakes anyway is no reason to wake it."""
    loop.set_timer("late", loop.now() + 600, lambda: None)
    sleeping(loop)
    wakes: list[int] = []
    monkeypatch.setattr(loop, "_wake", lambda: wakes.append(1))
    assert runs_here(loop)
    monkeypatch.undo()
    assert wakes == []


def test_stop_in_call_now_ends_loop(loop: Loop) -> None:
    sleeping(loop)
    loop.call_now(loop.stop)
    until(lambda: not [each for each in threading.enumerate() if loop.name in each.name])


# -- functions apart from the turn -----------------------------------------------------------------


class Apart:
    """A function for `run_apart` that waits for `go`, and where it and its callbacks ran."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.began, self.go = threading.Event(), threading.Event()
        self.ran: list[tuple[int, bool]] = []
        self.ended: list[tuple[int, bool]] = []
        self.overdue: list[tuple[int, bool]] = []

    def start(self) -> None:
        self.loop.call_soon(
            self.loop.run_apart,
            self.run,
            lambda: self.ended.append(self.here()),
            lambda: self.overdue.append(self.here()),
        )

    def here(self) -> tuple[int, bool]:
        return threading.get_ident(), self.loop.in_loop

    def run(self) -> None:
        self.began.set()
        assert self.go.wait(30)
        self.ran.append(self.here())


def test_function_apart_runs_in_loop_thread_without_the_turn(loop: Loop) -> None:
    loop.start()
    thread = loop.run(threading.get_ident)
    apart = Apart(loop)
    apart.go.set()
    apart.start()
    until(lambda: apart.ended)
    assert (apart.ran, apart.ended) == ([(thread, False)], [(thread, True)])
    assert loop.run(threading.get_ident) == thread
    assert not apart.overdue


def test_function_apart_that_waits_loses_the_loop(loop: Loop) -> None:
    loop.start()
    before = loop.run(threading.get_ident)
    apart = Apart(loop)
    apart.start()
    assert apart.began.wait(30)
    after = loop.run(threading.get_ident)  # though the first thread still waits
    assert after != before
    assert apart.overdue == [(after, True)]
    apart.go.set()
    until(lambda: apart.ran)
    assert apart.ran == [(before, False)]
    until(lambda: before not in {thread.ident for thread in threading.enumerate()})
    assert loop.run(threading.get_ident) == after
    assert not apart.ended


def test_functions_apart_may_all_wait(loop: Loop) -> None:
    loop.start()
    waiting = [Apart(loop) for _ in range(5)]
    for apart in waiting:
        apart.start()
    until(lambda: all(apart.began.is_set() for apart in waiting))
    for apart in waiting:
        apart.go.set()
    until(lambda: all(apart.ran for apart in waiting))
    assert len({apart.ran[0][0] for apart in waiting}) == 5


def test_loop_stops_while_a_function_apart_waits(loop: Loop) -> None:
    loop.start()
    ended: list[bool] = []
    loop.on_stop(lambda: ended.append(loop.in_loop))
    apart = Apart(loop)
    apart.start()
    assert apart.began.wait(30)
    loop.stop()
    assert ended == [True]
    apart.go.set()
    until(lambda: not [each for each in threading.enumerate() if loop.name in each.name])


def test_function_apart_may_stop_the_loop(loop: Loop) -> None:
    loop.start()
    ended = threading.Event()

    def stop() -> None:
        loop.stop()
        ended.set()

    loop.call_soon(loop.run_apart, stop, lambda: None, lambda: None)
    assert ended.wait(30)
    assert not loop.running


def test_fault_of_a_function_apart_does_not_end_the_loop(loop: Loop) -> None:
    def broken() -> None:
        raise SystemExit

    loop.start()
    loop.call_soon(loop.run_apart, broken, lambda: None, lambda: None)
    until(lambda: loop.faults == 1)
    assert loop.run(lambda: "still here") == "still here"


def test_functions_apart_and_work_of_other_threads_take_turns(loop: Loop) -> None:
    loop.start()
    counted, stop = [0], threading.Event()

    def again() -> None:
        counted[0] += 1
        if not stop.is_set():
            loop.run_apart(lambda: None, again, again)

    loop.call_soon(again)
    for _ in range(200):
        loop.run(lambda: None)
    stop.set()
    assert counted[0] > 1


def test_loop_may_stop_before_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[object] = []
    monkeypatch.setattr(threading, "excepthook", faults.append)
    for _ in range(50):
        loop = Loop("zmqdist-test")
        apart = Apart(loop)
        apart.go.set()
        apart.start()
        loop.call_soon(loop.stop)
        loop.start()
    until(lambda: not [each for each in threading.enumerate() if each.name == "zmqdist-test-watch"])
    assert not faults

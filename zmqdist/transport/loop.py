"""One thread that owns sockets, descriptors, timers and an inbox.

Rules
    A socket registered here is used by the loop's thread alone; other threads hand functions in with `call_soon`.
    A callback that raises does not end the loop: it is logged with its traceback and counted in `faults`.

One turn
    1. wait, unless something was left over from the last turn
    2. input: every readable descriptor and socket, each bounded by its own callback
    3. the inbox: what was in it when its turn came
    4. timers that are due
    5. the end-of-turn hooks, if anything happened at all: there the shells send what they gathered

    Input comes before timers, so that a loop that was kept from running reads the beats that wait for it before it
    looks who is overdue. For the same reason timers are held back while a callback says that it stopped at its bound
    (at most HOLD_S), and for RECOVER_S after the loop notices that it woke far too late: then ZeroMQ's own thread was
    most likely stopped too (SIGSTOP, suspended machine) and first has to read from the network.

ZeroMQ's descriptor is edge-triggered: it tells that EVENTS must be asked, not that there is a message. So each socket
has a mark, `WatchedSocket.dirty`, and the loop sleeps only when EVENTS has been asked for every marked one and showed no
input. It is set by the descriptor, before each callback, and by whoever uses the socket elsewhere in the loop's thread. A
callback may take it away when EVENTS was the last that it asked, and showed none.

Not here: what the bytes mean (router.py, dealer.py), and threads for user code.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final, TypeVar

import zmq
from zmq.backend import zmq_poll

from zmqdist.background import in_background
from zmqdist.errors import DeadlineExceededError, FailedPreconditionError

log = logging.getLogger("zmqdist.transport")

HOLD_S: Final = 1.0
"""Timers are at most this late because of a backlog of input."""
OVERSLEPT_S: Final = 0.5
"""A wake-up that is this late means that the process was stopped, not that the machine is busy."""
RECOVER_S: Final = 0.25
"""So long input only is served after that."""
CONTEXT_ENDS_S: Final = 1.0
"""How long `stop` waits for the end of the context of a loop that never ran. Without a socket it is there at once."""
SLEEP_MAX_S: Final = 3600.0

_live_loops: Final[set[Loop]] = set()
"""Loops that have not been stopped, also those that were never started. Without a reference to it the garbage collector would run the
finalizers of a loop's sockets and context in any order and in any thread: ZeroMQ waits for ever for a context whose sockets are open,
and the collector with it; and the owner's finalizer, which stops the loop, would use the same sockets at the same time."""

_POLLIN: Final = int(zmq.POLLIN)
_READ: Final = select.EPOLLIN
_WRITE: Final = select.EPOLLOUT
_BROKEN: Final = select.EPOLLHUP | select.EPOLLERR

T = TypeVar("T")


def input_check(socket: zmq.Socket[bytes]) -> Callable[[], Any]:
    """A function that asks EVENTS of a socket, without the enums that `getsockopt` makes on its way: true when it has input."""
    return functools.partial(zmq_poll, [(socket, _POLLIN)], 0)


class WatchedSocket:
    """A socket in a loop.

    Attributes:
      has_input: asks EVENTS.
      dirty: EVENTS must be asked before the loop may sleep; set it at any use outside the socket's own callback.
    """

    __slots__ = ("dirty", "fd", "has_input", "on_readable", "socket")

    def __init__(self, socket: zmq.Socket[bytes], on_readable: Callable[[], object]) -> None:
        self.socket = socket
        self.on_readable = on_readable
        self.fd = int(socket.getsockopt(zmq.FD))
        self.has_input = input_check(socket)
        self.dirty = True


class _Descriptor:
    __slots__ = ("on_readable", "on_writable")

    def __init__(self, on_readable: Callable[[], object], on_writable: Callable[[], object] | None) -> None:
        self.on_readable = on_readable
        self.on_writable = on_writable


class Loop:
    """A daemon thread with its own ZeroMQ context. What is registered before `start` is served from then on.

    It lives until `stop`, whether it was started or not: what is registered with it must not refer to an owner whose finalizer stops it.

    Attributes:
      context: the loop's own; exactly one ZAP handler may live in it.
      faults: callbacks that raised. Zero in a program without bugs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.max_sockets = 65_536
        self.faults = 0
        self._sockets: dict[int, WatchedSocket] = {}
        self._descriptors: dict[int, _Descriptor] = {}
        self._timers: dict[Hashable, tuple[float, int, Callable[[], object]]] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._serial = itertools.count()
        self._hooks: list[Callable[[], object]] = []
        self._stop_functions: list[Callable[[], object]] = []
        self._inbox: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        # Re-entrant: a finalizer that the garbage collector runs under this lock may hand something in too.
        self._lock = threading.RLock()
        self._accepting = True
        self._stopping = False
        self._sleeping = False
        self._backlog_since: float | None = None
        self._hold_until = 0.0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, _READ)
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._started = False
        self._finished = threading.Event()
        _live_loops.add(self)

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; a second start does nothing.

        Raises:
          FailedPreconditionError: it has been stopped; make a new one.
        """
        with self._lock:
            if self._stopping:
                raise FailedPreconditionError(f"loop {self.name} has been stopped; make a new one")
            if self._started:
                return
            self._started = True
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread: run the inbox and the `on_stop` functions in it, close all sockets, end the context.

        May be called from any thread, the loop's own included (then it ends after the present callback), and again.
        Does not raise when a callback keeps the thread for longer than `timeout_s`; that is logged.
        """
        with self._lock:
            self._stopping = True
            never_started = not self._started
            self._started = True
        if never_started:
            self._finish()
            return
        if self.in_loop:
            return
        self._wake()
        if not self._finished.wait(timeout_s):
            log.warning("loop %s did not end within %.1f s: a callback keeps it", self.name, timeout_s)
            return
        if self._thread.ident is not None:  # else it was stopped before, and never started
            self._thread.join(timeout_s)

    @property
    def in_loop(self) -> bool:
        """Whether the caller is the loop's thread."""
        return threading.get_ident() == self._thread.ident

    @property
    def running(self) -> bool:
        """Whether the thread has been started and was not asked to stop."""
        return self._started and not self._stopping

    def now(self) -> float:
        """The clock of `set_timer`, in seconds."""
        return time.monotonic()

    # -- from any thread --------------------------------------------------------------------------------------------

    def call_soon(self, fn: Callable[..., object], *args: Any) -> None:
        """Have the loop call `fn(*args)`.

        What was accepted is called, also when the loop is stopped right after; by then its sockets may be closed.

        Raises:
          FailedPreconditionError: the loop has ended; `fn` will not be called.
        """
        with self._lock:
            if not self._accepting:
                raise FailedPreconditionError(f"loop {self.name} has ended")
            self._inbox.append((fn, args))
        if self._sleeping:
            self._wake()

    def run(self, fn: Callable[..., T], *args: Any, timeout_s: float = 10.0) -> T:
        """Have the loop call `fn(*args)` and return its result, or raise what it raised.

        Called directly in the loop's own thread, and before `start`.

        Raises:
          DeadlineExceededError: no result after `timeout_s`; the call may still happen.
          FailedPreconditionError: the loop has ended.
        """
        if self.in_loop or not self._started:
            return fn(*args)
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(fn(*args))
            except BaseException as error:
                future.set_exception(error)

        self.call_soon(call)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            if future.done():  # `fn` itself raised a TimeoutError
                raise
            raise DeadlineExceededError(
                f"loop {self.name} did not answer within {timeout_s} s: a callback keeps it"
            ) from None

    def _wake(self) -> None:
        with self._lock:  # else the number could belong to somebody else's file by now
            if self._wake_fd < 0:
                return
            try:
                os.eventfd_write(self._wake_fd, 1)
            except BlockingIOError:  # full: it wakes anyway
                pass

    # -- in the loop's thread, or before start ------------------------------------------------------------------------

    def add_socket(self, socket: zmq.Socket[bytes], on_readable: Callable[[], object]) -> WatchedSocket:
        """Call `on_readable` while the socket has input. The loop closes the socket when it stops.

        Args:
          on_readable: takes at most MESSAGES_PER_WAKE_MAX messages; returns True when it stopped at that bound.
        """
        watched = WatchedSocket(socket, on_readable)
        self._sockets[watched.fd] = watched
        self._epoll.register(watched.fd, _READ)
        return watched

    def remove_socket(self, socket: zmq.Socket[bytes]) -> None:
        """Forget a socket, before it is closed. One that is not registered is fine."""
        for fd, watched in self._sockets.items():
            if watched.socket is socket:
                del self._sockets[fd]
                self._epoll.unregister(fd)
                return

    def add_fd(
        self, fd: int, on_readable: Callable[[], object], on_writable: Callable[[], object] | None = None
    ) -> None:
        """Call `on_readable` while a descriptor has input, its end or an error.

        It should be non-blocking: after a number was closed and used again a callback can come with nothing to read.
        `on_writable` is called only while `watch_writable` asked for it.
        """
        self._descriptors[fd] = _Descriptor(on_readable, on_writable)
        self._epoll.register(fd, _READ)

    def watch_writable(self, fd: int, wanted: bool) -> None:
        """Switch the calls of `on_writable` on or off."""
        self._epoll.modify(fd, _READ | _WRITE if wanted else _READ)

    def remove_fd(self, fd: int) -> None:
        """Forget a descriptor, before it is closed. One that is not registered is fine."""
        if self._descriptors.pop(fd, None) is not None:
            try:
                self._epoll.unregister(fd)
            except OSError:  # already closed
                pass

    def set_timer(self, key: Hashable, at: float | None, fn: Callable[[], object]) -> None:
        """Call `fn` once, not before `at` on the clock of `now`; replaces the timer of that key, None cancels it."""
        if at is None:
            self._timers.pop(key, None)
            return
        present = self._timers.get(key)
        if present is not None and present[0] == at:
            self._timers[key] = (at, present[1], fn)
            return
        serial = next(self._serial)
        self._timers[key] = (at, serial, fn)
        heapq.heappush(self._heap, (at, serial, key))
        if len(self._heap) > 64 + 4 * len(self._timers):  # timers that were moved leave a dead entry each
            self._heap = [(when, number, name) for name, (when, number, _) in self._timers.items()]
            heapq.heapify(self._heap)

    def at_end_of_turn(self, fn: Callable[[], object]) -> None:
        """Call `fn` after each turn in which anything happened, in order of registration."""
        self._hooks.append(fn)

    def on_stop(self, fn: Callable[[], object]) -> None:
        """Call `fn` in the loop's thread when it ends; the last one registered first."""
        self._stop_functions.append(fn)

    # -- the turn -----------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._finish()

    def _turn(self) -> None:
        happened, backlog = self._read_input()
        if self._inbox:
            happened = True
            self._run_inbox()
        if self._heap and self._run_timers(backlog):
            happened = True
        if happened:
            for hook in self._hooks:
                self._guard(hook)

    def _read_input(self) -> tuple[bool, bool]:
        happened = backlog = False
        sockets = self._sockets
        for fd, mask in self._poll():
            watched = sockets.get(fd)
            if watched is not None:
                watched.dirty = True
            elif fd == self._wake_fd:
                os.eventfd_read(fd)
            else:
                happened = True
                self._serve(fd, mask)
        for watched in tuple(sockets.values()):
            if not watched.dirty:
                continue
            watched.dirty = False
            if watched.socket.closed or not watched.has_input():
                continue
            watched.dirty = happened = True
            if self._guard(watched.on_readable):
                backlog = True
        return happened, backlog

    def _left_over(self) -> bool:
        """Whether a marked socket has input; one that has none loses its mark."""
        for watched in self._sockets.values():
            if watched.dirty:
                if not watched.socket.closed and watched.has_input():
                    return True
                watched.dirty = False
        return False

    def _poll(self) -> list[tuple[int, int]]:
        if self._left_over():
            return self._epoll.poll(0)
        self._sleeping = True  # from here on `call_soon` wakes us; what it put in before that is seen now
        wait_s = 0.0 if self._inbox or self._stopping else self._until_timer()
        began = time.monotonic()
        ready = self._epoll.poll(wait_s)
        self._sleeping = False
        if (now := time.monotonic()) - began > wait_s + OVERSLEPT_S:
            self._hold_until = now + RECOVER_S
        return ready

    def _until_timer(self) -> float:
        while self._heap:
            at, serial, key = self._heap[0]
            timer = self._timers.get(key)
            if timer is not None and timer[1] == serial:
                return min(max(0.0, max(at, self._hold_until) - time.monotonic()), SLEEP_MAX_S)
            heapq.heappop(self._heap)
        return SLEEP_MAX_S

    def _serve(self, fd: int, mask: int) -> None:
        descriptor = self._descriptors.get(fd)
        if descriptor is None:  # removed by an earlier callback of this turn
            return
        if mask & (_READ | _BROKEN):
            self._guard(descriptor.on_readable)
        if mask & _WRITE and descriptor.on_writable is not None and self._descriptors.get(fd) is descriptor:
            self._guard(descriptor.on_writable)

    def _run_inbox(self) -> None:
        inbox = self._inbox
        for _ in range(len(inbox)):
            fn, args = inbox.popleft()
            self._guard(fn, *args)

    def _run_timers(self, backlog: bool) -> bool:
        now = time.monotonic()
        if self._heap[0][0] > now or now < self._hold_until:
            return False
        if backlog:
            if self._backlog_since is None:
                self._backlog_since = now
            if now - self._backlog_since < HOLD_S:
                return False
        self._backlog_since = None
        due = []  # first all, so that a timer that sets itself to a time in the past comes in the next turn
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap))
        ran = False
        for _, serial, key in due:
            timer = self._timers.get(key)
            if timer is not None and timer[1] == serial:
                del self._timers[key]
                ran = True
                self._guard(timer[2])
        return ran

    def _guard(self, fn: Callable[..., T], *args: Any) -> T | None:
        try:
            return fn(*args)
        except BaseException as error:
            if not (isinstance(error, Exception) or self.in_loop):
                raise  # from `stop` of a loop that never ran: it is the Ctrl-C of the caller's thread
            self.fault(f"callback {getattr(fn, '__qualname__', fn)!s}")
            return None

    def fault(self, what: str) -> None:
        """Count and log the exception that is being handled."""
        self.faults += 1
        log.exception("loop %s: %s failed; the loop goes on", self.name, what)

    def _end_context(self) -> None:
        """A loop that never ran ends in its maker's thread, perhaps because of a Ctrl-C while pyzmq made a socket: the traceback keeps
        that socket, nobody can close it, and the end of the context waits for it."""
        if self.in_loop:
            self.context.destroy(linger=None)
            return
        ended = threading.Event()

        def end() -> None:
            self.context.destroy(linger=None)
            ended.set()

        in_background(f"{self.name}-end", end)
        ended.wait(CONTEXT_ENDS_S)

    def _finish(self) -> None:
        try:
            self._run_inbox()
            while self._stop_functions:
                self._guard(self._stop_functions.pop())
            while self._accepting:
                self._run_inbox()
                with self._lock:
                    self._accepting = bool(self._inbox)
            for watched in tuple(self._sockets.values()):
                if not watched.socket.closed:
                    watched.socket.close(linger=0)
            self._end_context()
            self._epoll.close()
            with self._lock:
                os.close(self._wake_fd)
                self._wake_fd = -1
        finally:
            _live_loops.discard(self)
            self._finished.set()

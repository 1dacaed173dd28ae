"""One thread that owns sockets, descriptors, timers and an inbox.

Rules
    Only the thread that has the turn uses a socket that is registered here. This is the loop's
    thread, except while it sleeps: then `call_now` has a thread of a pool take the turn for one
    function. Other threads pass functions to the loop by `call_soon`. A callback that raises does
    not end the loop. The loop logs the traceback and counts the fault in `faults`.
    Functions of the program that probably take microseconds run in the loop's thread, but without
    the turn (`run_apart`), which spares two hand-overs between threads. When one takes longer than
    APART_MAX_S, a watching thread starts another thread, and that is the loop's from then on.

One turn
    1. wait for input, a timer or a function in the inbox, unless the last turn left unread input
    2. call the callback of each readable descriptor and socket; the callback itself bounds how much
       it reads
    3. call the functions that callbacks passed to `run_apart`
    4. call the functions that were in the inbox when this step began
    5. call the timers that are due
    6. if this turn did anything, call the end-of-turn hooks, in which the runtimes send the
       messages that they have gathered

    Input comes before timers, so that a loop that was stopped for a while reads the waiting
    heartbeats before it decides which peers are overdue. For the same reason the loop delays timers
    for at most HOLD_S while a callback reports that it stopped at its bound. It also delays timers
    for RECOVER_S after a wake-up that was far too late. Such a wake-up means that the process was
    probably stopped (SIGSTOP, a suspended host), and then ZeroMQ's own thread has to read the
    waiting heartbeats from the network first.

ZeroMQ's descriptor is edge-triggered: its input means that EVENTS must be queried, not that a
message is available. So each socket has a mark, `WatchedSocket.dirty`, and the loop sleeps only
after it has queried EVENTS of each marked socket and found no input. The loop sets the mark after
input of the descriptor and before it calls the socket's callback. Other code in the loop's thread
that uses the socket must set the mark. A callback may clear the mark if its last use of the socket
was a query of EVENTS that showed no input.

Not here: the meaning of the messages (router.py, dealer.py), and threads that run the program's
functions.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import zmq
from zmq.backend import zmq_poll

from zmqdist import clock as time
from zmqdist import platforms
from zmqdist.background import check_threads, in_background
from zmqdist.errors import DeadlineExceededError, FailedPreconditionError, naming_system_errors
from zmqdist.files import fill_standard_streams
from zmqdist.transport.memory_limits import check_descriptors_and_threads

log = logging.getLogger("zmqdist.transport")

HOLD_S: Final = 1.0
"""Longest time in seconds for which a backlog of input delays timers."""
OVERSLEPT_S: Final = 0.5
"""Seconds. A wake-up that is late by more than this means that the process was stopped, because a
busy host delays a wake-up by less."""
RECOVER_S: Final = 0.25
"""Seconds after a wake-up that was late by OVERSLEPT_S in which the loop serves input but no
timers."""
CONTEXT_ENDS_S: Final = 1.0
"""Seconds for which `stop` waits for the context of a loop that never ran. Without an open socket
the context ends at once."""
SLEEP_MAX_S: Final = 3600.0
APART_MAX_S: Final = 0.01
"""Seconds after which a function of `run_apart` loses the loop to another thread, at the latest after
twice that."""
QUIET_TICKS_MAX: Final = 10
"""The watching thread sleeps after so many times APART_MAX_S without a function of `run_apart`."""

_live_loops: Final[set[Loop]] = set()
"""Loops that have not been stopped, including loops that never started. Without this reference, the
garbage collector could finalize a loop's context before its sockets. Then ZeroMQ, and with it the
collector, would wait for ever for the sockets to close. The collector could also finalize a socket
in one thread while the finalizer of the loop's owner, which stops the loop, uses that socket in
another thread.
"""

# ints, because each use of an enum costs a microsecond or two
POLLIN: Final = int(zmq.POLLIN)
NOBLOCK: Final = int(zmq.NOBLOCK)
MORE: Final = int(zmq.SNDMORE) | NOBLOCK
_READ: Final = platforms.POLL_READ
_WRITE: Final = platforms.POLL_WRITE
_BROKEN: Final = platforms.POLL_BROKEN

T = TypeVar("T")


def input_check(socket: zmq.Socket[bytes]) -> Callable[[], Any]:
    """Return a function that queries EVENTS of a socket and returns a true value if it has input.
    The function is faster than `getsockopt`, because it makes no enums.
    """
    return functools.partial(zmq_poll, [(socket, POLLIN)], 0)


class WatchedSocket:
    """A socket that a loop serves.

    Attributes:
      has_input: a function that queries EVENTS, and returns a true value if the socket has input.
      dirty: whether the loop must query EVENTS before it may sleep. Set this mark after any use of
        the socket outside the socket's own callback.
    """

    __slots__ = ("dirty", "fd", "has_input", "on_readable", "socket")

    def __init__(self, socket: zmq.Socket[bytes], on_readable: Callable[[], object]) -> None:
        self.socket = socket
        self.on_readable = on_readable
        self.fd = int(socket.getsockopt(zmq.FD))
        self.has_input = input_check(socket)
        self.dirty = True


class Loop:
    """A daemon thread with a ZeroMQ context of its own. Sockets and timers may be registered before
    `start`.

    A loop keeps its callbacks alive until `stop`, even if it never starts. So a callback must not
    refer to an object whose finalizer stops the loop: the callback would keep this object alive,
    and the finalizer would never run.

    Attributes:
      context: the ZeroMQ context of this loop alone; at most one ZAP handler may exist in it.
      faults: number of callbacks that raised. 0 in a program without bugs.
    """

    def __init__(self, name: str) -> None:
        fill_standard_streams()
        check_descriptors_and_threads(f"the thread {name}")
        check_threads()
        self.name = name
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.max_sockets = 65_536
        self.faults = 0
        self._sockets: dict[int, WatchedSocket] = {}
        self._descriptors: dict[int, tuple[Callable[[], object], Callable[[], object] | None]] = {}
        """For each descriptor its `on_readable` and `on_writable`."""
        self._timers: dict[Hashable, tuple[float, int, Callable[[], object]]] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._serial = itertools.count()
        self._hooks: list[Callable[[], object]] = []
        self._stop_functions: dict[Callable[[], object], None] = {}
        self._inbox: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        # Re-entrant, because the garbage collector may run a finalizer under this lock, and the
        # finalizer may use `call_soon`.
        self._lock = threading.RLock()
        self._accepting = True
        self._stopping = False
        self._sleeping = False
        # held by the thread that has the turn
        self._turn_lock = threading.Lock()
        self._turn_thread = 0
        self._wakes_at = 0.0
        self._apart: deque[tuple[Callable[[], object], ...]] = deque()
        # how many functions of `run_apart` have begun; the running one has this number
        self._apart_count = self._apart_running = 0
        self._on_overdue: Callable[[], object] | None = None
        self._watched = False
        self._watch: SimpleQueue[bool] | None = None
        self._backlog_since: float | None = None
        self._hold_until = 0.0
        self._wake_fd = platforms.open_wake_fd()
        self._epoll = platforms.new_epoll()
        self._epoll.register(self._wake_fd, _READ)
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._started = False
        self._finished = threading.Event()
        _live_loops.add(self)

    # -- start and stop ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. A second call does nothing.

        Raises:
          FailedPreconditionError: the loop has been stopped.
        """
        with self._lock:
            if self._stopping:
                raise FailedPreconditionError(f"loop {self.name} has been stopped; make a new one")
            if self._started:
                return
            self._started = True
        try:
            with naming_system_errors():
                self._thread.start()
        except Exception:
            self._started = False  # there is no thread for which `stop` could wait
            raise

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread. Before it ends, it runs the inbox and the `on_stop` functions, closes all
        sockets and ends the context.

        Any thread may call `stop`, more than once. In the loop's own thread, the stop takes effect
        after the current callback. If a callback occupies the loop's thread for longer than
        `timeout_s`, `stop` logs a warning and returns.
        """
        with self._lock:
            self._stopping = True
            unused = not self._started
            self._started = True
        if unused:
            self._finish()
            return
        if self.in_loop:
            return
        self._wake()
        if not self._finished.wait(timeout_s):
            log.warning(
                "loop %s did not end within %.1f s, because a callback still runs",
                self.name,
                timeout_s,
            )
            return
        if self._thread.ident is not None:  # None if the loop never started
            self._thread.join(timeout_s)

    @property
    def in_loop(self) -> bool:
        """Whether the caller has the turn, in the loop's thread or by `call_now`."""
        return threading.get_ident() == self._turn_thread

    @property
    def running(self) -> bool:
        """Whether the thread has been started and `stop` has not been called."""
        return self._started and not self._stopping

    def now(self) -> float:
        """Return the time on the clock of `set_timer`, in seconds."""
        return time.monotonic()

    # -- from any thread ---------------------------------------------------------------------------

    def call_soon(self, fn: Callable[..., object], *args: Any) -> None:
        """Have the loop's thread call `fn(*args)` soon. Any thread may use this.

        An accepted function is called even if the loop is stopped right after; the loop's sockets
        may be closed by then.

        Raises:
          FailedPreconditionError: the loop has ended; `fn` will not be called.
        """
        with self._lock:
            if not self._accepting:
                raise FailedPreconditionError(f"loop {self.name} has ended")
            self._inbox.append((fn, args))
        if self._sleeping:
            self._wake()

    def call_now(self, fn: Callable[..., object], *args: Any) -> None:
        """Like `call_soon`, but if the loop sleeps, this thread takes the turn, calls `fn(*args)`
        and the end-of-turn hooks. This saves waking the loop's thread, 20 us or more.

        Not for the main thread, where a Ctrl-C could interrupt `fn` at any line.

        Raises:
          FailedPreconditionError: as `call_soon`.
        """
        if not self._sleeping or not self._turn_lock.acquire(False):
            self.call_soon(fn, *args)
            return
        wake = False
        try:
            # the loop may have woken, and waits for the lock: it would find the function at once
            if sleeps := self._sleeping and not self._stopping:
                self._turn_thread = threading.get_ident()
                self._guard(fn, *args)
                self._run_hooks()
                # `fn` may have stopped the loop
                wake = (
                    self._stopping
                    or bool(self._apart)
                    or self._left_over()
                    or (bool(self._heap) and self._heap[0][0] < self._wakes_at)
                )
        finally:
            self._turn_thread = 0
            self._turn_lock.release()
        if not sleeps:
            self.call_soon(fn, *args)
        elif wake:
            self._wake()

    def run(self, fn: Callable[..., T], *args: Any, timeout_s: float = 10.0) -> T:
        """Have the loop's thread call `fn(*args)`, wait until it returns, and return its result or
        raise its exception.

        In the loop's own thread, and before `start`, the function is called directly.

        Raises:
          DeadlineExceededError: `fn` has not returned within `timeout_s`. The loop still calls it,
            or continues it.
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
            if future.done():  # the function itself has raised a TimeoutError
                raise
            raise DeadlineExceededError(
                f"loop {self.name} did not finish the function within {timeout_s} s: it, or a "
                f"callback before it, still runs"
            ) from None

    def _wake(self) -> None:
        with self._lock:
            # without the lock, `stop` could close `_wake_fd` now, and its number could belong to
            # another file
            if self._wake_fd < 0:
                return
            with contextlib.suppress(BlockingIOError):  # the counter is full: the loop wakes anyway
                platforms.write_wake_fd(self._wake_fd, 1)

    # -- in the loop's thread, or before start -----------------------------------------------------

    def add_socket(
        self, socket: zmq.Socket[bytes], on_readable: Callable[[], object]
    ) -> WatchedSocket:
        """Have the loop call `on_readable` while the socket has input. The loop closes the socket
        when the loop stops.

        Args:
          on_readable: a function that reads at most MESSAGES_PER_WAKE_MAX messages, and returns
            True if it stopped at that bound.
        """
        watched = WatchedSocket(socket, on_readable)
        self._sockets[watched.fd] = watched
        self._epoll.register(watched.fd, _READ)
        return watched

    def remove_socket(self, socket: zmq.Socket[bytes]) -> None:
        """Forget a socket before it is closed. Do nothing if it is not registered."""
        for fd, watched in self._sockets.items():
            if watched.socket is socket:
                del self._sockets[fd]
                self._epoll.unregister(fd)
                return

    def add_fd(
        self,
        fd: int,
        on_readable: Callable[[], object],
        on_writable: Callable[[], object] | None = None,
    ) -> None:
        """Have the loop call `on_readable` while a descriptor has input, end of file or an error,
        and `on_writable` while the descriptor accepts output and `watch_writable` is on.

        The descriptor should be non-blocking, because a callback may find no input if the number
        was closed and reused in the meantime.
        """
        self._descriptors[fd] = on_readable, on_writable
        self._epoll.register(fd, _READ)

    def watch_writable(self, fd: int, enabled: bool) -> None:
        """Switch the calls of a descriptor's `on_writable` on or off."""
        self._epoll.modify(fd, _READ | _WRITE if enabled else _READ)

    def remove_fd(self, fd: int) -> None:
        """Forget a descriptor before it is closed. Do nothing if it is not registered."""
        if self._descriptors.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # the caller has closed the descriptor already
                self._epoll.unregister(fd)

    def set_timer(self, key: Hashable, at: float | None, fn: Callable[[], object]) -> None:
        """Have the loop call `fn` once, not before `at` on the clock of `now`. This replaces the
        timer of the same key; `at=None` only cancels that timer.
        """
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
        if len(self._heap) > 64 + 4 * len(self._timers):
            # drop the dead entries that replaced timers have left
            self._heap = [(when, number, name) for name, (when, number, _) in self._timers.items()]
            heapq.heapify(self._heap)

    def run_apart(
        self,
        fn: Callable[[], object],
        on_end: Callable[[], object],
        on_overdue: Callable[[], object],
    ) -> None:
        """Have the loop's thread call `fn()` in this turn or the next, but without the turn, as any
        other thread would. `fn` may wait for anything.

        Args:
          on_end: a function that the loop calls afterwards.
          on_overdue: a function that the loop calls instead if `fn` takes longer than APART_MAX_S.
            `fn` goes on, but its thread is no longer the loop's, and ends after it.
        """
        self._apart.append((fn, on_end, on_overdue))

    def at_end_of_turn(self, fn: Callable[[], object]) -> None:
        """Have the loop call `fn` after each turn that did anything. Several functions are called
        in the order of registration."""
        self._hooks.append(fn)

    def on_stop(self, fn: Callable[[], object]) -> None:
        """Have the loop call `fn` in its thread when the loop ends. Several functions are called in
        the reverse order of registration."""
        self._stop_functions[fn] = None

    def not_on_stop(self, fn: Callable[[], object]) -> None:
        """Take back an `on_stop`, because what it ends has ended; do nothing if there is none."""
        self._stop_functions.pop(fn, None)

    # -- the turn ----------------------------------------------------------------------------------

    def _main(self) -> None:
        is_mine = True
        if self._on_overdue is None:
            self._turn_lock.acquire()
        self._turn_thread = threading.get_ident()
        try:
            if self._on_overdue is not None:
                # this thread replaces another one, in the middle of a turn and with its lock
                self._guard(self._on_overdue)
                self._on_overdue = None
                self._run_hooks()
            while is_mine and not self._stopping:
                is_mine = self._turn()
        finally:
            if is_mine:
                self._finish()
                self._turn_thread = 0
                self._turn_lock.release()

    def _turn(self) -> bool:
        """Take a turn. Return whether this thread is still the loop's."""
        happened, backlog = self._read_input()
        if self._apart:
            happened = True
            if not self._run_apart():
                return False
        if self._inbox:
            happened = True
            self._run_inbox()
        if self._heap and self._run_timers(backlog):
            happened = True
        if happened:
            self._run_hooks()
        return True

    def _run_hooks(self) -> None:
        for hook in self._hooks:
            self._guard(hook)

    def _run_apart(self) -> bool:
        """Call the functions of `run_apart`. Return whether this thread is still the loop's."""
        for _ in range(len(self._apart)):
            fn, on_end, on_overdue = self._apart.popleft()
            # counted before the look, because the watching thread does it the other way round
            self._apart_count = number = self._apart_count + 1
            if not self._watched and not self._begin_watching():
                self._guard(on_overdue)
                continue
            self._on_overdue = on_overdue
            self._turn_thread = 0
            self._apart_running = number
            try:
                fn()
            except BaseException:
                self.fault(f"{getattr(fn, '__qualname__', fn)!s}, apart")
            with self._lock:
                if self._apart_running != number:
                    return False
                self._apart_running = 0
            self._turn_thread = threading.get_ident()
            self._on_overdue = None
            self._guard(on_end)
        return True

    def _begin_watching(self) -> bool:
        """Have the watching thread look. Return False if there can be no such thread now."""
        if self._watch is None:
            watch: SimpleQueue[bool] = SimpleQueue()
            name = f"{self.name}-watch"
            try:
                threading.Thread(
                    target=self._watch_apart, args=(watch,), name=name, daemon=True
                ).start()
            except RuntimeError:
                return False
            self._watch = watch
        self._watched = True
        self._watch.put(True)
        return True

    def _watch_apart(self, watch: SimpleQueue[bool]) -> None:
        """Replace the loop's thread when a function of `run_apart` is overdue. This runs in a thread
        of its own."""
        while watch.get():
            quiet_ticks, count = 0, self._apart_count
            while quiet_ticks < QUIET_TICKS_MAX and not self._finished.is_set():
                running, count = self._apart_running, self._apart_count
                time.sleep(APART_MAX_S)
                if running and running == self._apart_running:
                    self._replace_thread(running)
                quiet_ticks = 0 if running or count != self._apart_count else quiet_ticks + 1
            self._watched = False
            if count != self._apart_count:
                # one has begun since, and perhaps before the line above
                self._watched = True
                watch.put(True)

    def _replace_thread(self, running: int) -> None:
        with self._lock:
            if self._apart_running != running:
                return
            self._apart_running = 0
            thread = threading.Thread(target=self._main, name=self.name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads now: the next tick tries again
                self._apart_running = running
            else:
                self._thread = thread

    def _read_input(self) -> tuple[bool, bool]:
        happened = backlog = False
        sockets = self._sockets
        for fd, mask in self._poll():
            watched = sockets.get(fd)
            if watched is not None:
                watched.dirty = True
            elif fd == self._wake_fd:
                platforms.read_wake_fd(fd)
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
        """Return whether a socket that is marked as `dirty` has input. Remove the marks of sockets
        that have no input."""
        for watched in self._sockets.values():
            if watched.dirty:
                if not watched.socket.closed and watched.has_input():
                    return True
                watched.dirty = False
        return False

    def _poll(self) -> list[tuple[int, int]]:
        if self._left_over():
            return self._epoll.poll(0)
        # From now on `call_soon` wakes this thread. Functions that were added before are found by
        # the query of the inbox below.
        self._sleeping = True
        began = time.monotonic()
        wait_s = 0.0 if self._inbox or self._apart or self._stopping else self._until_timer()
        if wait_s:
            self._wakes_at = began + wait_s
            self._turn_thread = 0
            self._turn_lock.release()
            ready = self._epoll.poll(wait_s)
            self._turn_lock.acquire()
            self._turn_thread = threading.get_ident()
        else:
            ready = self._epoll.poll(0)
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
        callbacks = self._descriptors.get(fd)
        if callbacks is None:  # an earlier callback of this turn has removed this descriptor
            return
        on_readable, on_writable = callbacks
        if mask & (_READ | _BROKEN):
            self._guard(on_readable)
        if mask & _WRITE and on_writable and self._descriptors.get(fd) is callbacks:
            self._guard(on_writable)

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
        # all due timers are collected first, so that a timer that sets itself to a time in the past
        # waits for the next turn
        due = []
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
                # if the loop never ran, `stop` runs this in the thread of its caller, which must
                # get the Ctrl-C
                raise
            self.fault(f"callback {getattr(fn, '__qualname__', fn)!s}")
            return None

    def fault(self, source: str) -> None:
        """Log and count the current exception. `source` names the code that raised it."""
        self.faults += 1
        log.exception("loop %s: %s failed; the loop goes on", self.name, source)

    def _end_context(self) -> None:
        """End the ZeroMQ context. In the loop's thread, wait until it has ended. In another thread,
        wait at most CONTEXT_ENDS_S.

        A loop that never ran ends in the thread that calls `stop`, perhaps because of a Ctrl-C
        while pyzmq made a socket. Then only the traceback refers to that socket. So no code can
        close the socket, and the context would wait for it for ever.
        """
        if self.in_loop:
            self.context.destroy(linger=None)
            return
        finished_event = threading.Event()

        def end() -> None:
            self.context.destroy(linger=None)
            finished_event.set()

        in_background(f"{self.name}-end", end)
        finished_event.wait(CONTEXT_ENDS_S)

    def _finish(self) -> None:
        try:
            self._run_inbox()
            while self._stop_functions:
                self._guard(self._stop_functions.popitem()[0])
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
                platforms.close_wake_fd(self._wake_fd)
                self._wake_fd = -1
        finally:
            _live_loops.discard(self)
            self._finished.set()
            if self._watch is not None:
                self._watch.put(False)
            # A callback may refer to an object that refers to the loop, or whose finalizer stops it.
            self._timers.clear()
            self._heap.clear()
            self._hooks.clear()
            self._sockets.clear()
            self._descriptors.clear()

"""The client's end of questions and answers: many threads, one DEALER, no thread of its own in the normal case.

Theory of operation: leader and followers
    Whoever waits for an answer while nobody else does is the leader: it polls the descriptors and reads for everybody. Others
    who wait are followers: each sleeps on a lock of its own until its call has ended or it is promoted. Nobody waits, nobody
    reads: ZeroMQ queues. So a blocking call costs what the bare socket costs.

    A reader thread leads in the same way, but only when somebody needs what no waiting thread fetches: a callback is wanted,
    a call waits for a server to appear while its caller does something else, or its arguments are still leaving in chunks.

    Calls that no thread waits for gather and leave together (calls_machine.py): with the next use of the socket that finds or wants
    an answer, with every CHECK_EVERY_CALLS-th call, or by the reader thread, which wakes every GATHER_S while calls gather.

    A leader spins for SPIN_S before it sleeps, unless that was in vain or others wait: waking a thread takes as long as a quick answer.

Rules
    R1  Every use of the socket is under the lock, and before the lock is released EVENTS was asked last and showed no input,
        because ZeroMQ's descriptor tells of an edge only, and any use may eat it. Left out when no call is in flight. Who has
        sent and leads then may ask later, but before it sleeps, or leaves. While large transfers move the lock is released with
        input left, so that others have their turn; then the eventfd says so.
    R2  The leader polls outside the lock. Who ends the leader's own call for it writes the eventfd. Only the leader, or
        anybody while there is none, opens and closes sockets: so no descriptor changes its owner while it is polled.
    R3  A follower sleeps on its own lock, never on another's.
    R4  A leader that leaves, for whatever reason, promotes a follower, if there is one.
    R5  The thread that takes a follower out of `_followers` (`dict.pop` decides which) releases its lock.
    R6  A follower that wakes decides under the lock: ended? leader now? out of time?
    R7  While the main thread is inside, Ctrl-C sets a flag and wakes it; KeyboardInterrupt is raised outside the lock (interrupt_guard.py).
        Another handler than Python's own that raises in here may cost the answer that was being read, but no thread is left
        waiting without a leader.
    R8  No wait is longer than SLICE_S. What a slice finds that should have been announced is counted in `stalls`: a bug.

A channel must not be used from a signal handler or a finalizer: its lock may be held by the thread that they interrupt.

Not here: the socket and what arrives by it (client_connection.py), what becomes of a call (calls_machine.py), what a value is (rpc).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from _thread import LockType, allocate_lock, get_ident
from collections.abc import Callable
from math import inf
from os import sched_yield
from time import monotonic, sleep
from typing import Final, Literal

from zmqdist.background import in_background
from zmqdist.errors import CANCELLED, FAILED_PRECONDITION
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.client_connection import ClientConnection
from zmqdist.transport.figures import ClientSnapshot
from zmqdist.transport.interrupt_guard import InterruptGuard
from zmqdist.transport.security import ClientSecurity
from zmqdist.wire.hello import Hello

log = logging.getLogger("zmqdist.transport")

SLICE_S: Final = 1.0
GATHER_S: Final = 0.002
"""So long, or twice, calls that nobody asks about are kept for company."""
CHECK_EVERY_CALLS: Final = 32
"""So many calls gather between two looks whether an answer has come: a look costs as much as gathering a few."""
SPIN_S: Final = 0.0002
"""So long a leader looks before it sleeps: a round trip on one host, from answers that are ready at once."""
SPINS_IN_VAIN_MAX: Final = 4
"""After so many in a row answers take longer than that, and only every SPIN_AGAIN-th wait tries."""
SPIN_AGAIN: Final = 32
FRESH_S: Final = 0.0002
"""So long after a look at the connection a new call trusts that it is still there: a blocking call has just looked."""
YIELD_S: Final = 0.0001
"""A leader of a large transfer steps aside for this long when it has woken somebody."""
LINGER_S: Final = 0.5
"""What was sent right before `close` has this long to leave."""
_NO_THREAD: Final = 0
# Channels that owe callbacks: the collector must not take one whose reader sleeps.
_channels_with_callbacks: Final[set[Channel]] = set()


class _Sleeper:
    """A thread that sleeps in the channel. Its lock is held while it is in `_followers` or `_parked`."""

    __slots__ = ("call", "lock", "promoted", "thread")

    def __init__(self, call: ClientCall | None) -> None:
        self.call = call
        self.thread = get_ident()
        self.promoted = False
        self.lock = allocate_lock()
        self.lock.acquire()


def _release(sleepers: dict[_Sleeper, None], sleeper: _Sleeper) -> None:
    """R5. Also called by the handler of Ctrl-C, at any point of the main thread."""
    if sleepers.pop(sleeper, sleeper) is None:
        sleeper.lock.release()


class Channel:
    """Calls to one address, from any number of threads. Dropping it is as good as closing it.

    Attributes:
      address: "host:port".
      stalls: waits that ended by their slice although something was there (R8). Always 0.
    """

    def __init__(self, address: str, security: ClientSecurity, hello: Hello) -> None:
        """Begins to connect; does not wait for the server.

        Raises:
          InvalidArgumentError: not an address.
        """
        self.address = address
        self.stalls = 0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._connection = ClientConnection(address, security, hello, self._wake_fd)
        self._lock = allocate_lock()
        self._turnstile = allocate_lock()
        self._woke_waiters = False
        self._leader = _NO_THREAD
        self._leader_call: ClientCall | None = None
        self._followers: dict[_Sleeper, None] = {}
        self._parked: dict[_Sleeper, None] = {}
        self._reader: threading.Thread | None = None
        self._due_callbacks: list[tuple[Callable[[ClientCall], object], ClientCall]] = []
        self._calls_with_callbacks = 0
        self._checked_at = 0.0
        self._gathering = False
        self._spins_in_vain = 0
        self._guard = InterruptGuard(address, self._wake_fd)
        self._closed = False
        self._connection.maintain(monotonic())

    # -- what callers do ------------------------------------------------------------------------------------------------

    def submit(self, call: ClientCall) -> None:
        """Ask, and do not wait. Frames are copied before this returns, unless they are large (transfers.py): then they are the call's.

        A call on a closed channel ends at once with FAILED_PRECONDITION.

        Raises:
          FailedPreconditionError: the channel was made in another process, before a fork.
        """
        if self._gathering and not call.frames and self._gather(call):
            return
        with self._guard:
            self._submit(call, False)

    def call_and_wait(self, call: ClientCall) -> None:
        """Ask, and wait until the call has ended. Raises as `submit` does, and KeyboardInterrupt."""
        with self._guard as shielded:
            if self._submit(call, True):
                self._lead(call, shielded)
            elif not call.ended:
                self._wait(call, shielded)

    def wait(self, call: ClientCall) -> None:
        """Wait until the call has ended. From any thread, any number of them."""
        if call.ended:
            return
        with self._guard as shielded:
            self._wait(call, shielded)

    def poll(self, call: ClientCall) -> bool:
        """Whether the call has ended; reads what has arrived, but waits for nothing."""
        if call.ended:
            return True
        with self._guard, self._lock:
            now = monotonic()
            if not self._closed:
                self._connection.flush()
                if self._leader == _NO_THREAD:
                    self._check_connection(now)
            self._connection.expire(now)
            self._wake_waiters()
        return call.ended

    def cancel(self, call: ClientCall) -> bool:
        """End the call with CANCELLED and tell the server; False when it had ended before."""
        with self._guard, self._lock:
            if call.ended or self._closed:
                return False
            self._connection.cancel(call)
            self._wake_waiters()
            return True

    def add_done_callback(self, call: ClientCall, fn: Callable[[ClientCall], object]) -> None:
        """Have `fn(call)` called once when the call has ended: by the reader thread, or here when it has ended already."""
        with self._guard, self._lock:
            if not call.ended:
                if call.callbacks is None:
                    call.callbacks = []
                    self._calls_with_callbacks += 1
                    _channels_with_callbacks.add(self)
                call.callbacks.append(fn)
                if self._connection.table.waiting:
                    self._connection.flush()
                    self._wake_waiters()
                self._ensure_reader()
                return
        fn(call)

    def close(self) -> None:
        """End every pending call with CANCELLED, and the connection. What was just sent has LINGER_S to leave. Idempotent."""
        if self._guard.forked:
            return
        with self._guard, self._lock:
            if self._closed:
                return
            self._closed, self._gathering = True, False
            self._connection.flush()
            self._connection.fail(CANCELLED, f"the client of {self.address} was closed")
            self._wake_waiters()
            if self._leader == _NO_THREAD:
                self._connection.close(LINGER_S)
            else:
                os.eventfd_write(self._wake_fd, 1)
            self._wake_reader()

    def is_sent(self, call: ClientCall) -> bool:
        """Whether it has left: then it ends by itself when the connection does. Else it waits for a server, or for company."""
        return not self._connection.table.is_unsent(call)

    @property
    def shares_memory(self) -> bool:
        """Whether the server can open our shared memory, as far as is known here."""
        return self._connection.bulk.shares_memory

    def snapshot(self) -> ClientSnapshot:
        """Figures of now. Raises FailedPreconditionError after a fork."""
        with self._guard, self._lock:
            return self._connection.snapshot(len(self._followers) + (self._leader_call is not None), self.stalls)

    def __del__(self) -> None:
        if "_guard" in self.__dict__ and not self._guard.forked:
            # The finalizer of a stream in the same garbage may have given a thread a reference, and that may be inside.
            if not self._lock.acquire(False):
                in_background("zmqdist-client-close", self.close)
                return
            self._closed, self._gathering = True, False
            self._connection.finalize(LINGER_S)
            self._wake_reader()
            self._lock.release()
        if "_wake_fd" in self.__dict__:
            os.close(self._wake_fd)

    # -- sending --------------------------------------------------------------------------------------------------------

    def _gather(self, call: ClientCall) -> bool:
        """The short way of a call that can wait for company, without the socket and so without the gate."""
        self._guard.check()
        with self._lock:
            connection, table = self._connection, self._connection.table
            if not self._gathering or not table.in_flight or not table.incarnation:
                return False
            leave = table.submitted(call)
            if not leave and len(table.waiting) % CHECK_EVERY_CALLS:
                return True
        with self._guard, self._lock:
            if leave:
                connection.flush()
            elif self._leader == _NO_THREAD and not self._closed:
                connection.read_arrived()
            self._wake_waiters()
        return True

    def _submit(self, call: ClientCall, waits: bool) -> bool:
        """A new call; whether this thread leads now, which it can only if it `waits`."""
        now = monotonic()
        with self._turnstile, self._lock:
            if self._closed:
                call.end(FAILED_PRECONDITION, f"the client of {self.address} is closed")
                return False
            connection, table = self._connection, self._connection.table
            if self._leader == _NO_THREAD and (now - self._checked_at > FRESH_S or not table.incarnation):
                self._check_connection(now)
            connection.submit(call, waits)
            if table.waiting:
                if table.incarnation:
                    self._begin_gathering()
                else:
                    self._ensure_connecting(now, waits)
            if not waits and (table.held_back or (connection.bulk.tracked and connection.bulk.sending)):
                self._ensure_reader()  # for what the server acknowledges, lets in or answers
            lead = waits and self._leader == _NO_THREAD and not call.ended
            if lead:
                self._leader = get_ident()
                self._leader_call = call
            else:
                connection.read_arrived()
            if connection.ended:
                self._wake_waiters()
            return lead

    def _ensure_connecting(self, now: float, waits: bool) -> None:
        """A call waits for a server: somebody must see to the connection, now and later."""
        if self._leader == _NO_THREAD:
            self._connection.maintain(now)
        else:
            os.eventfd_write(self._wake_fd, 1)
        if not waits:
            self._ensure_reader()

    def _begin_gathering(self) -> None:
        """Calls have begun to gather: the reader sees to it that they leave soon."""
        if not self._gathering:
            self._gathering = True
            self._ensure_reader()
            if self._leader != _NO_THREAD and self._leader_call is None:  # the reader leads, and may be asleep
                os.eventfd_write(self._wake_fd, 1)

    # -- waiting --------------------------------------------------------------------------------------------------------

    def _wait(self, call: ClientCall, shielded: bool) -> None:
        me = None
        with self._turnstile, self._lock:
            if self._connection.table.waiting:
                self._connection.flush()
                self._wake_waiters()
            if call.ended:
                return
            if self._leader == _NO_THREAD:
                self._leader = get_ident()
                self._leader_call = call
            else:
                me = _Sleeper(call)
                self._followers[me] = None
                if call.waiters is None:
                    call.waiters = []
                call.waiters.append(me)
        if me is None or self._follow(me, call, shielded):
            self._lead(call, shielded)

    def _lead(self, call: ClientCall, shielded: bool) -> None:
        """Read for everybody until the call has ended."""
        slice_ms = 0.0  # first EVENTS must be asked, since this thread or another has sent (R1)
        try:
            while True:
                ready = self._connection.poll(slice_ms) if slice_ms else self._spin()
                if self._connection.bulk.tracked:
                    self._woke_waiters = _yield_to_others(self._turnstile, self._woke_waiters)
                with self._lock:
                    self._after_poll(ready, slice_ms)
                    if call.ended or (shielded and self._guard.interrupted):
                        self._step_down()
                        return
                slice_ms = self._slice_ms(call.due)
        except BaseException:  # from a signal handler of the user, or a bug: the others must have a leader (R4)
            with self._lock:
                if self._leader == get_ident():
                    self._connection.read_arrived()
                    self._wake_waiters(self._leader)
                    self._step_down()
            raise

    def _spin(self) -> list[tuple[int, int]]:
        """What comes within SPIN_S, if it is worth while to stay awake for it."""
        if self._followers:
            return []
        if self._spins_in_vain >= SPINS_IN_VAIN_MAX:
            self._spins_in_vain += 1
            if self._spins_in_vain % SPIN_AGAIN:
                return []
        poll = self._connection.poll
        end = monotonic() + SPIN_S
        while not (ready := poll(0)):
            if monotonic() >= end:
                self._spins_in_vain += 1
                return ready
            sched_yield()  # ZeroMQ's own thread may need this very core
        self._spins_in_vain = 0
        return ready

    def _follow(self, me: _Sleeper, call: ClientCall, shielded: bool) -> bool:
        """Sleep until the call has ended; True when this thread has become the leader instead."""
        if shielded:
            followers = self._followers
            self._guard.wake = lambda: _release(followers, me)
        try:
            while True:
                # A Ctrl-C that came before `wake` was set woke nobody.
                slice_s = 0.0 if shielded and self._guard.interrupted else SLICE_S
                me.lock.acquire(True, max(0.0, min(slice_s, call.due - monotonic())))
                with self._turnstile, self._lock:
                    if self._ends_sleep(me, call, shielded):
                        return me.promoted
        except BaseException:  # as in _lead
            with self._lock:
                self._leave_followers(me, call)
            raise
        finally:
            if shielded:
                self._guard.wake = None

    def _ends_sleep(self, me: _Sleeper, call: ClientCall, shielded: bool) -> bool:
        """R6: whether this follower's sleep is over. It leads then, if `promoted` is still set."""
        asleep = me in self._followers
        if call.ended or (shielded and self._guard.interrupted):
            self.stalls += call.ended and asleep
            self._leave_followers(me, call)
            return True
        if me.promoted:
            return True
        if self._leader == _NO_THREAD:
            self.stalls += asleep
            self._promote(me)
            return True
        self._connection.expire(monotonic())
        self._wake_waiters()
        if not call.ended and not asleep:  # woken by a Ctrl-C that was taken back
            self._followers[me] = None
        return call.ended

    def _leave_followers(self, me: _Sleeper, call: ClientCall) -> None:
        self._followers.pop(me, None)
        if call.waiters is not None and me in call.waiters:
            call.waiters.remove(me)
        if me.promoted:
            me.promoted = False
            if self._leader == me.thread:
                self._step_down()

    def _promote(self, follower: _Sleeper) -> None:
        follower.promoted = True
        self._leader, self._leader_call = follower.thread, follower.call
        _release(self._followers, follower)

    def _step_down(self) -> None:
        """R4."""
        self._leader = _NO_THREAD
        self._leader_call = None
        if self._followers:
            self._promote(next(reversed(self._followers)))
        elif self._closed:
            self._connection.close(LINGER_S)
        elif self._parked and self._reader_needed():
            self._wake_reader()

    def _slice_ms(self, due: float) -> float:
        """How long a leader may sleep: to the deadline, to the next step of connecting, at most a slice."""
        connection_due = self._connection.due
        due = due if connection_due is None else min(due, connection_due)
        return max(0.0, min(SLICE_S, due - monotonic()) * 1000)

    # -- under the lock ---------------------------------------------------------------------------------------------------

    def _after_poll(self, ready: list[tuple[int, int]], slept_ms: float) -> None:
        """What the leader does after each poll, which had so much time."""
        connection = self._connection
        if self._closed:
            return
        tend, announced = not connection.table.incarnation, False
        for fd, _ in ready:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif fd == connection.monitor_fd:
                tend = True
            else:
                announced = True
        # A shorter sleep often ends as something arrives, perhaps between this look and the question below.
        unannounced = not ready and slept_ms >= SLICE_S * 1000 and not connection.poll(0)
        if unannounced and self._leader_call is not None:
            self.stalls += self._leader_call.ended
        if connection.read_arrived(announced):
            self.stalls += unannounced
        now = self._checked_at = monotonic()
        if tend:
            connection.maintain(now)
        if now >= connection.table.deadline:
            connection.expire(now)
        if connection.ended:
            self._wake_waiters(self._leader)

    def _check_connection(self, now: float) -> None:
        """The same for somebody who does not lead and will not wait."""
        self._checked_at = now
        connection = self._connection
        connection.read_arrived()
        if not connection.table.incarnation or connection.poll(0):
            connection.maintain(now)

    def _wake_waiters(self, reader: int = _NO_THREAD) -> None:
        """Wake whoever waits for the calls that have ended. `reader` is the leader, when that is who calls this."""
        ended = self._connection.ended
        for call in ended:
            if call is self._leader_call and self._leader != reader:
                os.eventfd_write(self._wake_fd, 1)  # R2
            if call.waiters is not None:
                self._woke_waiters = True
                for follower in call.waiters:
                    _release(self._followers, follower)
                call.waiters = None
            if call.callbacks is not None:
                self._due_callbacks += [(fn, call) for fn in call.callbacks]
                call.callbacks = None
                self._calls_with_callbacks -= 1
                self._ensure_reader()
        ended.clear()

    # -- the reader thread ------------------------------------------------------------------------------------------------

    def _reader_needed(self) -> bool:
        connection, table = self._connection, self._connection.table
        waiting = table.held_back or (table.waiting and not table.incarnation)
        return bool(self._calls_with_callbacks or self._due_callbacks or waiting or connection.bulk.sending)

    def _ensure_reader(self) -> None:
        if self._reader is None:
            self._reader = threading.Thread(
                target=_reader_main, args=(weakref.ref(self),), name=f"zmqdist-reader-{self.address}", daemon=True
            )
            self._reader.start()
        else:
            self._wake_reader()

    def _wake_reader(self) -> None:
        for sleeper in tuple(self._parked):
            _release(self._parked, sleeper)

    def reader_turn(self, me: _Sleeper) -> float | None:
        """What the reader thread does between two sleeps: how long the next may be, in seconds; None: it is not needed any more."""
        with self._lock:
            to_call, self._due_callbacks = self._due_callbacks, []
        for fn, call in to_call:
            try:
                fn(call)
            except BaseException:  # this is the reader's thread: others wait for their callbacks
                log.exception("a callback of a call to %s raised", self.address)
        to_call.clear()
        with self._lock:
            if not (self._calls_with_callbacks or self._due_callbacks):
                _channels_with_callbacks.discard(self)
            woken = self._parked.pop(me, me) is me
            me.lock.acquire(False)  # it may have been released after the sleep had ended
            if not woken:
                self._send_gathered()
                self._connection.expire(monotonic())
                self._wake_waiters()
            if self._due_callbacks:
                return 0.0
            if self._closed:
                self._reader = None
                return None
            if self._leader == _NO_THREAD and self._reader_needed():
                self._leader = me.thread
            elif woken or self._gathering or self._reader_needed():
                self._parked[me] = None
                left_s = self._connection.table.deadline - monotonic()
                return max(0.0, min(GATHER_S if self._gathering else SLICE_S, left_s))
            else:
                self._reader = None
                return None
        self._lead_one_slice()
        return 0.0

    def _lead_one_slice(self) -> None:
        try:
            slice_ms = min(GATHER_S * 1000 if self._gathering else inf, self._slice_ms(self._connection.table.deadline))
            ready = self._connection.poll(slice_ms)
            if self._connection.bulk.tracked:
                self._woke_waiters = _yield_to_others(self._turnstile, self._woke_waiters)
            with self._lock:
                self._after_poll(ready, slice_ms)
                self._send_gathered()
                self._wake_waiters(self._leader)
        finally:
            with self._lock:
                self._step_down()

    def _send_gathered(self) -> None:
        """The reader's: send what has gathered. When nothing has, or no server is there to take it, it may sleep again."""
        table = self._connection.table
        if table.waiting and table.incarnation:
            if self._leader == _NO_THREAD:
                self._check_connection(monotonic())
            self._connection.flush()
        else:
            self._gathering = False


def _yield_to_others(turnstile: LockType, woke: bool) -> Literal[False]:
    """Who waits for the lock holds the turnstile: a leader that takes it again and again would starve others. The new value of `woke`."""
    if woke:  # whoever was woken would have to wait for the GIL for a whole switch interval
        sleep(YIELD_S)
    with turnstile:
        return False


def _reader_main(channel_ref: weakref.ref[Channel]) -> None:
    """The reader thread. It keeps the channel alive while it leads; while callbacks are owed the channel does so itself."""
    me = _Sleeper(None)
    while (channel := channel_ref()) is not None:
        sleep_s = channel.reader_turn(me)
        if sleep_s is None:
            return
        del channel
        if sleep_s:
            me.lock.acquire(True, sleep_s)

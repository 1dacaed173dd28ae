"""The client's end of questions and answers: many threads, one DEALER, no thread of its own in the normal case.

Theory of operation: leader and followers
    Whoever waits for an answer while nobody else does is the leader: it polls the descriptors and reads for everybody. Others
    who wait are followers: each sleeps on a lock of its own until its call has ended or it is promoted. Nobody waits, nobody
    reads: ZeroMQ queues. So a blocking call costs what the bare socket costs.

    A reader thread leads in the same way, but only when somebody needs what no waiting thread fetches: a callback is wanted,
    a call waits for a server to appear while its caller does something else, or its arguments are still leaving in chunks.

    Calls that nobody waits for gather and leave together (calls_machine.py). They leave with the next use of the socket that
    finds an answer or wants one; a look for answers comes with every LOOK_EVERY of them. If there is no such use, the reader
    thread sends them: while calls gather it takes naps of NAP_S instead of sleeping.

    A leader looks again and again for a short while (SPIN_S) before it sleeps: to be woken takes a thread as long as a quick
    answer does. It stops doing so where that was in vain, and while others of this process wait, too.

Rules
    R1  Every use of the socket is under the lock, and before the lock is released EVENTS was asked last and showed no input,
        because ZeroMQ's descriptor tells of an edge only, and any use may eat it. Left out when no call is in flight. Who has
        sent and leads then may ask later, but before it sleeps, or leaves. While large transfers move the lock is released with
        input left, so that others have their turn; then the eventfd says so.
    R2  The leader polls outside the lock. Who ends the leader's own call for it writes the eventfd. Only the leader, or
        anybody while there is none, opens and closes sockets: so no descriptor changes its owner while it is polled.
    R3  A follower sleeps on its own lock, never on another's.
    R4  A leader that leaves, for whatever reason, promotes a follower, if there is one.
    R5  Whoever takes a follower out of `_followers` releases its lock; `dict.pop` decides who that is.
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
NAP_S: Final = 0.002
"""So long, or twice, calls that nobody asks about are kept for company."""
LOOK_EVERY: Final = 32
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
_NOBODY: Final = 0
_owing: Final[set[Channel]] = set()  # channels that owe callbacks: the collector must not take one whose reader sleeps


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
        self._line = ClientConnection(address, security, hello, self._wake_fd)
        self._lock = allocate_lock()
        self._turnstile = allocate_lock()
        self._woke = False
        self._leader = _NOBODY
        self._leader_call: ClientCall | None = None
        self._followers: dict[_Sleeper, None] = {}
        self._parked: dict[_Sleeper, None] = {}
        self._reader: threading.Thread | None = None
        self._to_call: list[tuple[Callable[[ClientCall], object], ClientCall]] = []
        self._with_callbacks = 0
        self._looked_at = 0.0
        self._napping = False
        self._spins_in_vain = 0
        self._gate = InterruptGuard(address, self._wake_fd)
        self._closed = False
        self._line.tend(monotonic())

    # -- what callers do ------------------------------------------------------------------------------------------------

    def call(self, call: ClientCall) -> None:
        """Ask, and do not wait. Frames are copied before this returns, unless they are large (transfers.py): then they are the call's.

        A call on a closed channel ends at once with FAILED_PRECONDITION.

        Raises:
          FailedPreconditionError: the channel was made in another process, before a fork.
        """
        if self._napping and not call.frames and self._gather(call):
            return
        with self._gate:
            self._submit(call, False)

    def ask(self, call: ClientCall) -> None:
        """Ask, and wait until the call has ended. Raises as `call` does, and KeyboardInterrupt."""
        with self._gate as shielded:
            if self._submit(call, True):
                self._lead(call, shielded)
            elif not call.ended:
                self._wait(call, shielded)

    def wait(self, call: ClientCall) -> None:
        """Wait until the call has ended. From any thread, any number of them."""
        if call.ended:
            return
        with self._gate as shielded:
            self._wait(call, shielded)

    def poll(self, call: ClientCall) -> bool:
        """Whether the call has ended; reads what has arrived, but waits for nothing."""
        if call.ended:
            return True
        with self._gate, self._lock:
            now = monotonic()
            if not self._closed:
                self._line.flush()
                if self._leader == _NOBODY:
                    self._look(now)
            self._line.expire(now)
            self._tell()
        return call.ended

    def cancel(self, call: ClientCall) -> bool:
        """End the call with CANCELLED and tell the server; False when it had ended before."""
        with self._gate, self._lock:
            if call.ended or self._closed:
                return False
            self._line.cancel(call)
            self._tell()
            return True

    def add_done_callback(self, call: ClientCall, fn: Callable[[ClientCall], object]) -> None:
        """Have `fn(call)` called once when the call has ended: by the reader thread, or here when it has ended already."""
        with self._gate, self._lock:
            if not call.ended:
                if call.callbacks is None:
                    call.callbacks = []
                    self._with_callbacks += 1
                    _owing.add(self)
                call.callbacks.append(fn)
                if self._line.table.waiting:
                    self._line.flush()
                    self._tell()
                self._need_reader()
                return
        fn(call)

    def close(self) -> None:
        """End every pending call with CANCELLED, and the connection. What was just sent has LINGER_S to leave. Idempotent."""
        if self._gate.forked:
            return
        with self._gate, self._lock:
            if self._closed:
                return
            self._closed, self._napping = True, False
            self._line.flush()
            self._line.fail(CANCELLED, f"the client of {self.address} was closed")
            self._tell()
            if self._leader == _NOBODY:
                self._line.close(LINGER_S)
            else:
                os.eventfd_write(self._wake_fd, 1)
            self._wake_reader()

    def is_sent(self, call: ClientCall) -> bool:
        """Whether it has left: then it ends by itself when the connection does. Else it waits for a server, or for company."""
        return not self._line.table.waits(call)

    @property
    def lends(self) -> bool:
        """Whether the server can open our shared memory, as far as is known here."""
        return self._line.lanes.shares_memory

    def snapshot(self) -> ClientSnapshot:
        """Figures of now. Raises FailedPreconditionError after a fork."""
        with self._gate, self._lock:
            return self._line.snapshot(len(self._followers) + (self._leader_call is not None), self.stalls)

    def __del__(self) -> None:
        if "_gate" in self.__dict__ and not self._gate.forked:
            # The finalizer of a stream in the same garbage may have given a thread a reference, and that may be inside.
            if not self._lock.acquire(False):
                in_background("zmqdist-client-close", self.close)
                return
            self._closed, self._napping = True, False
            self._line.drop(LINGER_S)
            self._wake_reader()
            self._lock.release()
        if "_wake_fd" in self.__dict__:
            os.close(self._wake_fd)

    # -- sending --------------------------------------------------------------------------------------------------------

    def _gather(self, call: ClientCall) -> bool:
        """The short way of a call that can wait for company, without the socket and so without the gate."""
        self._gate.check()
        with self._lock:
            line, table = self._line, self._line.table
            if not self._napping or not table.in_flight or not table.incarnation:
                return False
            leave = table.asked(call)
            if not leave and len(table.waiting) % LOOK_EVERY:
                return True
        with self._gate, self._lock:
            if leave:
                line.flush()
            elif self._leader == _NOBODY and not self._closed:
                line.settle()
            self._tell()
        return True

    def _submit(self, call: ClientCall, waits: bool) -> bool:
        """A new call; whether this thread leads now, which it can only if it `waits`."""
        now = monotonic()
        with self._turnstile, self._lock:
            if self._closed:
                call.end(FAILED_PRECONDITION, f"the client of {self.address} is closed")
                return False
            line, table = self._line, self._line.table
            if self._leader == _NOBODY and (now - self._looked_at > FRESH_S or not table.incarnation):
                self._look(now)
            line.submit(call, waits)
            if table.waiting:
                if table.incarnation:
                    self._nap()
                else:
                    self._attend(now, waits)
            if not waits and (table.held_back or (line.lanes.tracked and line.lanes.sending)):
                self._need_reader()  # for what the server acknowledges, lets in or answers
            lead = waits and self._leader == _NOBODY and not call.ended
            if lead:
                self._leader = get_ident()
                self._leader_call = call
            else:
                line.settle()
            if line.ended:
                self._tell()
            return lead

    def _attend(self, now: float, waits: bool) -> None:
        """A call waits for a server: somebody must see to the connection, now and later."""
        if self._leader == _NOBODY:
            self._line.tend(now)
        else:
            os.eventfd_write(self._wake_fd, 1)
        if not waits:
            self._need_reader()

    def _nap(self) -> None:
        """Calls have begun to gather: the reader sees to it that they leave soon."""
        if not self._napping:
            self._napping = True
            self._need_reader()
            if self._leader != _NOBODY and self._leader_call is None:  # the reader leads, and may be asleep
                os.eventfd_write(self._wake_fd, 1)

    # -- waiting --------------------------------------------------------------------------------------------------------

    def _wait(self, call: ClientCall, shielded: bool) -> None:
        me = None
        with self._turnstile, self._lock:
            if self._line.table.waiting:
                self._line.flush()
                self._tell()
            if call.ended:
                return
            if self._leader == _NOBODY:
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
                ready = self._line.poll(slice_ms) if slice_ms else self._spin()
                if self._line.lanes.tracked:
                    self._woke = _let_others(self._turnstile, self._woke)
                with self._lock:
                    self._serve(ready, slice_ms)
                    if call.ended or (shielded and self._gate.interrupted):
                        self._step_down()
                        return
                slice_ms = self._slice_ms(call.due)
        except BaseException:  # from a signal handler of the user, or a bug: the others must have a leader (R4)
            with self._lock:
                if self._leader == get_ident():
                    self._line.settle()
                    self._tell(self._leader)
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
        poll = self._line.poll
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
            self._gate.wake = lambda: _release(followers, me)
        try:
            while True:
                # A Ctrl-C that came before `wake` was set woke nobody.
                slice_s = 0.0 if shielded and self._gate.interrupted else SLICE_S
                me.lock.acquire(True, max(0.0, min(slice_s, call.due - monotonic())))
                with self._turnstile, self._lock:
                    if self._decide(me, call, shielded):
                        return me.promoted
        except BaseException:  # as in _lead
            with self._lock:
                self._withdraw(me, call)
            raise
        finally:
            if shielded:
                self._gate.wake = None

    def _decide(self, me: _Sleeper, call: ClientCall, shielded: bool) -> bool:
        """R6: whether this follower's sleep is over. It leads then, if `promoted` is still set."""
        asleep = me in self._followers
        if call.ended or (shielded and self._gate.interrupted):
            self.stalls += call.ended and asleep
            self._withdraw(me, call)
            return True
        if me.promoted:
            return True
        if self._leader == _NOBODY:
            self.stalls += asleep
            self._promote(me)
            return True
        self._line.expire(monotonic())
        self._tell()
        if not call.ended and not asleep:  # woken by a Ctrl-C that was taken back
            self._followers[me] = None
        return call.ended

    def _withdraw(self, me: _Sleeper, call: ClientCall) -> None:
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
        self._leader = _NOBODY
        self._leader_call = None
        if self._followers:
            self._promote(next(reversed(self._followers)))
        elif self._closed:
            self._line.close(LINGER_S)
        elif self._parked and self._reader_needed():
            self._wake_reader()

    def _slice_ms(self, due: float) -> float:
        """How long a leader may sleep: to the deadline, to the next step of connecting, at most a slice."""
        line_due = self._line.due
        due = due if line_due is None else min(due, line_due)
        return max(0.0, min(SLICE_S, due - monotonic()) * 1000)

    # -- under the lock ---------------------------------------------------------------------------------------------------

    def _serve(self, ready: list[tuple[int, int]], slept_ms: float) -> None:
        """What the leader does after each poll, which had so much time."""
        line = self._line
        if self._closed:
            return
        tend, announced = not line.table.incarnation, False
        for fd, _ in ready:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif fd == line.monitor_fd:
                tend = True
            else:
                announced = True
        # A shorter sleep often ends as something arrives, perhaps between this look and the question below.
        unannounced = not ready and slept_ms >= SLICE_S * 1000 and not line.poll(0)
        if unannounced and self._leader_call is not None:
            self.stalls += self._leader_call.ended
        if line.settle(announced):
            self.stalls += unannounced
        now = self._looked_at = monotonic()
        if tend:
            line.tend(now)
        if now >= line.table.deadline:
            line.expire(now)
        if line.ended:
            self._tell(self._leader)

    def _look(self, now: float) -> None:
        """The same for somebody who does not lead and will not wait."""
        self._looked_at = now
        line = self._line
        line.settle()
        if not line.table.incarnation or line.poll(0):
            line.tend(now)

    def _tell(self, reader: int = _NOBODY) -> None:
        """Wake whoever waits for the calls that have ended. `reader` is the leader, when that is who calls this."""
        ended = self._line.ended
        for call in ended:
            if call is self._leader_call and self._leader != reader:
                os.eventfd_write(self._wake_fd, 1)  # R2
            if call.waiters is not None:
                self._woke = True
                for follower in call.waiters:
                    _release(self._followers, follower)
                call.waiters = None
            if call.callbacks is not None:
                self._to_call += [(fn, call) for fn in call.callbacks]
                call.callbacks = None
                self._with_callbacks -= 1
                self._need_reader()
        ended.clear()

    # -- the reader thread ------------------------------------------------------------------------------------------------

    def _reader_needed(self) -> bool:
        line, table = self._line, self._line.table
        waits_for_server = table.waiting and not table.incarnation
        return bool(self._with_callbacks or self._to_call or waits_for_server or table.held_back or line.lanes.sending)

    def _need_reader(self) -> None:
        if self._reader is None:
            self._reader = threading.Thread(
                target=_read_for_others, args=(weakref.ref(self),), name=f"zmqdist-reader-{self.address}", daemon=True
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
            to_call, self._to_call = self._to_call, []
        for fn, call in to_call:
            try:
                fn(call)
            except BaseException:  # this is the reader's thread: others wait for their callbacks
                log.exception("a callback of a call to %s raised", self.address)
        to_call.clear()
        with self._lock:
            if not (self._with_callbacks or self._to_call):
                _owing.discard(self)
            woken = self._parked.pop(me, me) is me
            me.lock.acquire(False)  # it may have been released after the sleep had ended
            if not woken:
                self._end_nap()
                self._line.expire(monotonic())
                self._tell()
            if self._to_call:
                return 0.0
            if self._closed:
                self._reader = None
                return None
            if self._leader == _NOBODY and self._reader_needed():
                self._leader = me.thread
            elif woken or self._napping or self._reader_needed():
                self._parked[me] = None
                return max(0.0, min(NAP_S if self._napping else SLICE_S, self._line.table.deadline - monotonic()))
            else:
                self._reader = None
                return None
        self._lead_a_slice()
        return 0.0

    def _lead_a_slice(self) -> None:
        try:
            slice_ms = min(NAP_S * 1000 if self._napping else inf, self._slice_ms(self._line.table.deadline))
            ready = self._line.poll(slice_ms)
            if self._line.lanes.tracked:
                self._woke = _let_others(self._turnstile, self._woke)
            with self._lock:
                self._serve(ready, slice_ms)
                self._end_nap()
                self._tell(self._leader)
        finally:
            with self._lock:
                self._step_down()

    def _end_nap(self) -> None:
        """The reader's: send what has gathered. When nothing has, or no server is there to take it, it may sleep again."""
        table = self._line.table
        if table.waiting and table.incarnation:
            if self._leader == _NOBODY:
                self._look(monotonic())
            self._line.flush()
        else:
            self._napping = False


def _let_others(turnstile: LockType, woke: bool) -> Literal[False]:
    """Who waits for the lock holds the turnstile: a leader that takes it again and again would starve others. The new value of `woke`."""
    if woke:  # whoever was woken would have to wait for the GIL for a whole switch interval
        sleep(YIELD_S)
    with turnstile:
        return False


def _read_for_others(channel_ref: weakref.ref[Channel]) -> None:
    """The reader thread. It keeps the channel alive while it leads; while callbacks are owed the channel does so itself."""
    me = _Sleeper(None)
    while (channel := channel_ref()) is not None:
        sleep_s = channel.reader_turn(me)
        if sleep_s is None:
            return
        del channel
        if sleep_s:
            me.lock.acquire(True, sleep_s)

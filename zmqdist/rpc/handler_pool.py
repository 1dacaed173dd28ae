"""Threads for handlers. The pool starts threads on demand, up to a bound. Further work waits, and
the clients that own it take turns.

Calls of short methods wait in the same queue, but for the loop's own thread, which runs them as if it
were a thread of the pool (`run_short`). It does so only while no call waits for a thread, so that
the clients' turns remain. When a call turns out to be long, the loop gets another thread, and the
waiting calls go to threads (`spread`).

The threads are daemons, because a handler that never ends must not keep the process from ending.
The pool does not use `concurrent.futures`, which joins its threads at exit, and makes a Future for
each call, although the pool needs none.

Not here: which work begins next, and how many bytes may wait (admission_machine.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from math import inf
from queue import SimpleQueue
from typing import Any, Final, TypeAlias, cast

from zmqdist import clock as time
from zmqdist.limits import CLIENT_PULLED_BYTES_MAX, CLIENT_UNASKED_BYTES_MAX
from zmqdist.rpc.admission_machine import FairAdmission, ShortMethod
from zmqdist.transport.memory_limits import usable_bytes

log = logging.getLogger("zmqdist.rpc")

SHARE: Final = 8
"""Pulled arguments of waiting calls take at most 1/SHARE of the usable memory, and so do unasked
arguments."""

TURN_S: Final = 0.002
"""Seconds of short calls after which the loop reads its sockets again."""

Work: TypeAlias = tuple[Callable[..., None], tuple[Any, ...], ShortMethod]
"""A function, its arguments, and whether calls of this kind are short."""
NEVER_SHORT: Final = ShortMethod(short_from=inf)
NO_WORK: Final[Work] = (lambda: None, (), NEVER_SHORT)


class HandlerPool:
    """A bounded pool of threads for handlers.

    Only one thread may call `submit` and `ready`, and not after `stop`. Any thread may call the
    other methods.

    Attributes:
      full: whether there was more unfinished work than `threads_max` when work was last added.
    """

    def __init__(
        self,
        name: str,
        threads_max: int,
        on_room: Callable[[], object] | None = None,
        on_short: Callable[[], object] = lambda: None,
    ) -> None:
        """Create a pool without threads.

        Args:
          on_room: a function that a thread of the pool calls when work begins and the large
            arguments of another call wait to be let in.
          on_short: a function that `ready` calls when short calls begin to wait. It must have
            `run_short` called.
        """
        self.full = False
        self._name = name
        self._threads_max = threads_max
        self._on_room = on_room
        self._on_short = on_short
        # entering the Condition instead of this lock would take several times as long
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        share = usable_bytes() // SHARE
        self._admission = FairAdmission(
            share, share, min(share, CLIENT_PULLED_BYTES_MAX), min(share, CLIENT_UNASKED_BYTES_MAX)
        )
        self._running: list[Work | None] = []
        # calls that lost the loop's thread, and the one that it runs
        self._overdue: list[Work] = []
        self._short: Work | None = None
        self._round: object = None
        self._for_threads = False
        self._busy = 0
        self._idle = 0
        self._ended_count = 0
        self._wake: SimpleQueue[bool] = SimpleQueue()

    # -- adding work -------------------------------------------------------------------------------

    def submit(self, fn: Callable[..., None], *args: Any) -> None:
        """Have a thread of the pool call `fn(*args)`. All work that is submitted in this way counts
        as work of one owner, and begins in the order of submission.
        """
        self.ready(None, object(), (fn, args, NEVER_SHORT))

    def ready(
        self, owner: Hashable, key: Hashable, work: Work, nbytes: int = 0, now: float = 0.0
    ) -> str:
        """Have a thread of the pool, or `run_short`, run `work` when it is the turn of `owner`.

        Args:
          owner: the client whose work it is, or None for work of the server itself. Owners take
            turns.
          key: the name of the work among the work of its owner, as `dropped` gets it.
          nbytes: bytes that the work holds and that no earlier call of `arrived` has counted.
          now: the time, which decides whether a method counts as short.

        Returns:
          Why the pool refuses the work (admission_machine.py, P5). "" means that the pool accepts
          the work.
        """
        with self._lock:
            if nbytes and (refused := self._admission.arrived(owner, key, nbytes)):
                return refused
            is_short = work[2].holds(now) and self._has_room_for_short()
            self._admission.ready(owner, key, work)
            if not is_short:
                self._for_threads = True
                self._bring_thread()
            elif self._admission.count == 1:
                self._on_short()
        return ""

    def _has_room_for_short(self) -> bool:
        """Return whether `run_short` may run a call that becomes ready now: not if another waits for
        a thread, because it would overtake that one."""
        if self._admission.count:
            return not self._for_threads
        self._for_threads = False
        return self._busy < self._threads_max

    def _bring_thread(self) -> None:
        """Have a thread come for waiting work. The caller has the lock."""
        unfinished = self._admission.count + self._busy
        self.full = unfinished > self._threads_max
        if self._idle and self._busy < self._threads_max:
            self._idle -= 1
            self._wake.put(True)
            return
        threads = len(self._running)
        if threads + len(self._overdue) >= min(unfinished, self._threads_max):
            # a thread that is about to be free, or that was just started, will take the work
            return
        self._running.append(None)
        name = f"{self._name}-{threads + 1}"
        threading.Thread(target=self._serve, args=(threads,), name=name, daemon=True).start()

    # -- short calls -------------------------------------------------------------------------------

    def run_short(self) -> bool:
        """Run short calls that wait in this thread, for about TURN_S. Return whether some are left for
        another call of `run_short`."""
        admission, lock = self._admission, self._lock
        this_round, work = object(), NO_WORK
        with lock:
            if self._for_threads or self._busy >= self._threads_max:
                self._spread()
                return False
            self._busy += 1
            self._round = this_round
        began = now = time.monotonic()
        while True:
            with lock:
                if self._round is not this_round or self._for_threads or not admission.count:
                    break
                if now > began + TURN_S:
                    break
                work = self._short = cast("Work", admission.next())
            self._run(work)
            before, now = now, time.monotonic()
            self._ended_count += 1
            if self._round is this_round:
                work[2].ran(now - before, now)
        with lock:
            self._busy -= 1
            self._notify_if_idle()
            if self._round is this_round:
                self._round = self._short = None
                return admission.count > 0
            # the loop has another thread, and this one ends
            self._overdue = [other for other in self._overdue if other is not work]
            self._spread()
            return False

    def spread(self) -> None:
        """Have threads run the short calls that have not begun, because the one that runs takes too
        long. The loop calls this in its new thread."""
        with self._lock:
            if self._short is not None:
                self._overdue.append(self._short)
                self._short[2].bar(time.monotonic())
            self._round = self._short = None
            self._spread()

    def _spread(self) -> None:
        self._for_threads = self._admission.count > 0
        for _ in range(min(self._admission.count, self._threads_max - self._busy)):
            self._bring_thread()

    def arrived(self, owner: Hashable, key: Hashable, nbytes: int) -> str:
        """Count work whose arguments were sent unasked (`FairAdmission.arrived`)."""
        with self._lock:
            return self._admission.arrived(owner, key, nbytes)

    def announced(self, owner: Hashable, key: Hashable, nbytes: int, item: Any) -> None:
        """Record work whose owner keeps the large arguments (`FairAdmission.announced`)."""
        with self._lock:
            self._admission.announced(owner, key, nbytes, item)

    def let_in(self) -> Any | None:
        """Return the next item whose arguments may be requested (`FairAdmission.let_in`)."""
        with self._lock:
            return self._admission.let_in() if self._admission.outside else None

    # -- removing work -----------------------------------------------------------------------------

    def dropped(self, owner: Hashable, key: Hashable) -> bool:
        """Remove work that the pool must not begin. Return whether the work waited
        (`FairAdmission.dropped`)."""
        with self._lock:
            was_waiting = self._admission.dropped(owner, key)
            self._notify_if_idle()
            return was_waiting

    def owner_lost(self, owner: Hashable) -> None:
        """Drop all waiting work of this owner."""
        with self._lock:
            self._admission.client_lost(owner)
            self._notify_if_idle()

    def cut_off(self, ready: bool) -> list[tuple[Any, Any, Any]]:
        """Drop all work whose arguments have not all arrived (`FairAdmission.cut_off`)."""
        with self._lock:
            calls = self._admission.cut_off(ready)
            self._notify_if_idle()
            return calls

    def stop(self) -> None:
        """Let the pool's threads end when no work is left. Waiting work still runs, but no more
        work may be added."""
        for _ in self._running:
            self._wake.put(False)

    # -- state -------------------------------------------------------------------------------------

    def waiting(self, owner: Hashable) -> list[Work]:
        """Return the work of one owner that waits for a thread."""
        with self._lock:
            return self._admission.waiting(owner)

    def counts(self) -> tuple[int, int, int, int]:
        """Return four numbers: pieces of waiting work, busy threads, threads, and the largest
        number of threads."""
        with self._lock:
            threads = len(self._running) + len(self._overdue)
            return self._admission.count, self._busy, threads, self._threads_max

    def held_bytes(self) -> int:
        """Return the bytes of arguments of calls that have not begun."""
        with self._lock:
            return self._admission.unasked + self._admission.pulled

    def progress(self) -> tuple[bool, int, list[Work]]:
        """Return whether there is more unfinished work than `threads_max`, how many pieces of work
        have ended so far, and the list of running work. The list is empty if the first item is
        False.
        """
        with self._lock:
            full = self.unfinished > self._threads_max
            running = [work for work in (*self._running, *self._overdue) if work is not None]
            return full, self._ended_count, running if full else []

    @property
    def unfinished(self) -> int:
        """Number of pieces of work that were added and have not ended."""
        return self._admission.count + self._busy

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait for at most `timeout_s` until all added work has ended. Return whether all has
        ended."""
        with self._lock:
            return self._quiet.wait_for(lambda: self.unfinished == 0, timeout_s)

    def _notify_if_idle(self) -> None:
        if not self._admission.count and not self._busy:
            self._quiet.notify_all()

    # -- in a thread of the pool -------------------------------------------------------------------

    def _serve(self, number: int) -> None:
        running, admission = self._running, self._admission
        while True:
            with self._lock:
                if running[number] is not None:
                    self._ended_count += 1
                    self._busy -= 1
                work = running[number] = admission.next() if admission.count else None
                if work is not None:
                    self._busy += 1
                else:
                    self._idle += 1
                    self._notify_if_idle()
            if work is None:
                if not self._wake.get():
                    return
                continue
            self._run(work)
            del work

    def _run(self, work: Work) -> None:
        try:
            if self._admission.outside and self._on_room is not None:
                self._on_room()
            work[0](*work[1])
        except BaseException:
            # an exception must not end this thread, because the pool would have one thread less
            # from now on
            log.exception("a bug in zmqdist: the work of a handler thread raised")

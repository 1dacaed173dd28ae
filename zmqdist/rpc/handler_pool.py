"""Threads for handlers. The pool starts threads on demand, up to a bound. Further work waits, and
the clients that own it take turns.

The threads are daemons, because a handler that never ends must not keep the process from ending.
The pool does not use `concurrent.futures`, which joins its threads at exit, and makes a Future for
each call, although the pool needs none.

Not here: which work begins next, and how many bytes may wait (admission_machine.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

from zmqdist.conditions import Condition
from zmqdist.limits import CLIENT_PULLED_BYTES_MAX, CLIENT_UNASKED_BYTES_MAX
from zmqdist.rpc.admission_machine import FairAdmission
from zmqdist.transport.memory_limits import usable_bytes

log = logging.getLogger("zmqdist.rpc")

SHARE: Final = 8
"""Pulled arguments of waiting calls take at most 1/SHARE of the usable memory, and so do unasked
arguments."""

Work: TypeAlias = tuple[Callable[..., object], tuple[Any, ...]]


class HandlerPool:
    """A bounded pool of threads for handlers.

    Only one thread may call `submit` and `ready`, and not after `stop`. Any thread may call the
    other methods.

    Attributes:
      full: whether there was more unfinished work than `threads_max` when work was last added.
    """

    def __init__(
        self, name: str, threads_max: int, on_room: Callable[[], object] | None = None
    ) -> None:
        """Create a pool without threads.

        Args:
          on_room: a function that a thread of the pool calls when work begins and the large
            arguments of another call wait to be let in.
        """
        self.full = False
        self._name = name
        self._threads_max = threads_max
        self._on_room = on_room
        self._lock = self._quiet = Condition()
        share = usable_bytes() // SHARE
        self._admission = FairAdmission(
            share, share, min(share, CLIENT_PULLED_BYTES_MAX), min(share, CLIENT_UNASKED_BYTES_MAX)
        )
        self._running: list[Work | None] = []
        self._overdue: list[Work] = []
        self._busy = 0
        self._idle = 0
        self._ended_count = 0
        self._wake: SimpleQueue[bool] = SimpleQueue()

    # -- adding work -------------------------------------------------------------------------------

    def submit(self, fn: Callable[..., None], *args: Any) -> None:
        """Have a thread of the pool call `fn(*args)`. All work that is submitted in this way counts
        as work of one owner, and begins in the order of submission.
        """
        self.ready(None, object(), (fn, args))

    def ready(self, owner: Hashable, key: Hashable, work: Work, nbytes: int = 0) -> str:
        """Have a thread of the pool run `work` when it is the turn of `owner`.

        Args:
          owner: the client whose work it is, or None for work of the server itself. Owners take
            turns.
          key: the name of the work among the work of its owner, as `dropped` gets it.
          nbytes: bytes that the work holds and that no earlier call of `arrived` has counted.

        Returns:
          Why the pool refuses the work (admission_machine.py, P5). "" means that the pool accepts
          the work.
        """
        with self._lock:
            if nbytes and (refused := self._admission.arrived(owner, key, nbytes)):
                return refused
            self._admission.ready(owner, key, work)
            self._bring_thread()
        return ""

    def _bring_thread(self) -> None:
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

    # -- threads that are not the pool's -----------------------------------------------------------

    def occupy(self) -> bool:
        """Count the calling thread as a busy one of the pool. Return False if the pool has no room
        for it, or has one thread, for which work waits: that keeps its order."""
        with self._lock:
            # With more threads it may overtake work that waits, or a method whose calls never end
            # all at once would stay in the pool for ever.
            in_order = self._threads_max == 1 and self._admission.count
            if in_order or self._busy >= self._threads_max:
                return False
            self._busy += 1
            return True

    def note_overdue(self, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Record the work of a thread that occupies the pool, because it takes long."""
        with self._lock:
            self._overdue.append((fn, args))

    def release(self, args: tuple[Any, ...] | None = None) -> None:
        """Take back `occupy`, and the `note_overdue` of the work with these arguments."""
        with self._lock:
            self._busy -= 1
            self._ended_count += 1
            self._overdue = [work for work in self._overdue if work[1] is not args]
            self._notify_if_idle()
            if self._admission.count:
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
        have ended so far, and the list of running work, of `note_overdue` as well. The list is
        empty if the first item is False.
        """
        with self._lock:
            full = self.unfinished > self._threads_max
            running = [*self._overdue, *(work for work in self._running if work is not None)]
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
                # work that a thread was woken for may have gone to another one meanwhile
                may_take = admission.count and self._busy < self._threads_max
                work = running[number] = admission.next() if may_take else None
                if work is not None:
                    self._busy += 1
                else:
                    self._idle += 1
                    self._notify_if_idle()
            if work is None:
                if not self._wake.get():
                    return
                continue
            try:
                if admission.outside and self._on_room is not None:
                    self._on_room()
                work[0](*work[1])
            except BaseException:
                # an exception must not end this thread, because the pool would have one thread less
                # from now on
                log.exception("a bug in zmqdist: the work of a handler thread raised")
            del work

"""Fetching large results from the workers that hold them: at once where they are in shared memory, else in threads of their own.

Rules
    A holder that does not answer may be dead: then the dispatcher finds out and the work runs again. So a fetch that failed is tried
    again for a while, and only then called unreachable. Meanwhile its thread fetches others.
    A fetch is given up as soon as its work has ended, or was submitted again: what a dispatcher has let go of since (this process was
    stopped for longer than a lease, say) is not waited for.
    The patience of a fetch is reckoned in the time that it was tried, not by the clock, which goes on while this process is stopped.
    Whatever a fetch raises is the end of its work, and of nothing else.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from zmqdist import errors, limits
from zmqdist.scheduling.worker import remote_results
from zmqdist.scheduling.worker.fetch import STALLED_S, Fetcher
from zmqdist.scheduling.worker.references import Held, Reference, decode_reference
from zmqdist.transport.credentials import Credentials

log = logging.getLogger("zmqdist.coordinator")

THREADS = 2
AGAIN_S = 0.5
PATIENCE_S = 3 * limits.LEASE_S
TRY_S = STALLED_S
"""More than this one try does not take of the patience: the rest of it something came, or this process was stopped."""


@dataclass(eq=False)
class _Job:
    """One result to be fetched.

    Attributes:
      spent_s: of the patience.
    """

    work: int
    attempt: int
    reference: Reference
    spent_s: float = 0.0


class Fetching:
    """Threads that fetch; started with the first large result from another host.

    Args:
      wanted: whether (work, attempt) is still what its work waits for; called in a fetching thread.
      fetched: gets (work, attempt, parts), in a fetching thread.
      failed: gets (work, attempt, problem).
    """

    def __init__(
        self,
        credentials: Credentials,
        dispatcher: str,
        wanted: Callable[[int, int], bool],
        fetched: Callable[[int, int, Any], None],
        failed: Callable[[int, int, str], None],
    ) -> None:
        self._fetcher = Fetcher(credentials, "submit", dispatcher)
        self._wanted = wanted
        self._fetched = fetched
        self._failed = failed
        self._changed = threading.Condition()
        self._jobs: list[tuple[float, int, _Job]] = []
        """A heap, by the time when each is due."""
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def ask(self, work: int, attempt: int, encoded: bytes) -> list[Any] | None:
        """The parts of a result, when they are all to be had at once; else they are fetched. From one thread."""
        reference = decode_reference(encoded)
        parts = self._fetcher.near.attach(reference)
        if not any(isinstance(part, Held) for part in parts):
            return parts
        job = _Job(work, attempt, reference)
        try:
            self._ensure_threads()
        except RuntimeError as error:  # the process can have no more
            self._fail(job, error)
        else:
            self._put(job, 0.0)
        return None

    def kept(self, encoded: bytes, name: str) -> Any:
        """A value that its worker keeps, in the caller's thread. It is not tried again. Raises as `dispatch.kept.fetch`."""
        return remote_results.fetch(self._fetcher, encoded, name)

    @property
    def memories(self) -> int:
        """Processes whose shared memory is open here."""
        return len(self._fetcher.near)

    @property
    def connections(self) -> int:
        """Connections to holders of results."""
        return len(self._fetcher.clients)

    def close(self) -> None:
        """End the threads; what is under way fails."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
        self._fetcher.close()
        for thread in self._threads:
            thread.join(5.0)

    def _ensure_threads(self) -> None:
        while len(self._threads) < THREADS:
            thread = threading.Thread(target=self._serve, name="zmqdist-fetch", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if self._threads:  # one does; the next result tries again to have another
                    return
                raise
            self._threads.append(thread)

    def _put(self, job: _Job, due: float) -> None:
        with self._changed:
            if not self._closed:
                heapq.heappush(self._jobs, (due, next(self._numbers), job))
                self._changed.notify()

    def _next(self) -> _Job | None:
        """The one that is due first, when it is; None at the end."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if self._jobs and self._jobs[0][0] <= now:
                    return heapq.heappop(self._jobs)[2]
                self._changed.wait(self._jobs[0][0] - now if self._jobs else None)
            return None

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            began = time.monotonic()
            try:
                if not self._wanted(job.work, job.attempt):
                    continue
                parts = self._fetcher.fetch(job.reference, partial(self._wanted, job.work, job.attempt))
            except errors.CancelledError:  # nobody waits for it any more
                pass
            except (errors.UnavailableError, errors.NotFoundError, errors.DeadlineExceededError) as error:
                job.spent_s += AGAIN_S + min(TRY_S, time.monotonic() - began)
                if job.spent_s < PATIENCE_S:
                    self._put(job, time.monotonic() + AGAIN_S)
                else:
                    self._fail(job, error)
            except BaseException as error:  # a MemoryError, say
                self._fail(job, error)
            else:
                self._deliver(job, parts)
                del parts
            del job

    def _deliver(self, job: _Job, parts: list[Any]) -> None:
        try:
            self._fetched(job.work, job.attempt, parts)
        except BaseException:  # this thread is ours, and others wait for what it fetches next
            log.exception("the result of work %d could not be handed on", job.work)

    def _fail(self, job: _Job, error: BaseException) -> None:
        if not self._closed:
            problem = error.message if isinstance(error, errors.OpError) else f"{type(error).__name__}: {error}"
            self._failed(job.work, job.attempt, f"its result is held at {job.reference.address}: {problem}")

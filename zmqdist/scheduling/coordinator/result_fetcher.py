"""ResultFetcher: fetches large results from the workers that hold them, at once from shared memory,
otherwise in threads.

Rules
    A holder that does not reply may have crashed, and then the dispatcher notices the crash and the
    work runs again. A failed fetch is therefore tried again for a while, during which its thread
    fetches other results. Only then is the result reported as unreachable. A fetch ends early when
    its work has ended or was submitted again, because the holder may then have released the result
    (for example after this process was stopped for longer than HEARTBEAT_TIMEOUT_S).
    The patience of a fetch counts the time spent on tries, not clock time, because clock time
    continues while this process is stopped. An exception during a fetch ends the work item of this
    result and no other work item.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from zmqdist import clock as time
from zmqdist import errors, limits
from zmqdist.conditions import Condition
from zmqdist.scheduling.shared import remote_results
from zmqdist.scheduling.shared.references import Held, Reference, decode_reference
from zmqdist.scheduling.shared.store import STALLED_S, Fetcher
from zmqdist.transport.credentials import Credentials

log = logging.getLogger("zmqdist.coordinator")

THREADS = 2
"""The number of threads that fetch results."""
AGAIN_S = 0.5
"""Seconds before a failed fetch is tried again."""
PATIENCE_S = 3 * limits.LEASE_S
"""Seconds after which a fetch is given up. This is longer than the dispatcher needs to notice that
a holder is lost."""
TRY_S = STALLED_S
"""The largest part of PATIENCE_S that one try uses up. If a try takes longer, data arrived or this
process was stopped meanwhile."""


@dataclass(eq=False)
class _Job:
    """A result that a thread must fetch.

    Attributes:
      spent_s: how much of PATIENCE_S is used up.
    """

    work: int
    attempt: int
    reference: Reference
    spent_s: float = 0.0


class ResultFetcher:
    """Fetches results. Its threads start with the first large result that is not in shared memory
    of this host.

    Args:
      wanted: called with (work, attempt) in a fetching thread; returns whether the work item still
        waits for the result of this attempt.
      fetched: called with (work, attempt, parts) in a fetching thread.
      failed: called with (work, attempt, problem), where the problem is a text.
      safe_only: whether to refuse kept values that are pickled.
    """

    def __init__(
        self,
        credentials: Credentials,
        dispatcher: str,
        is_wanted: Callable[[int, int], bool],
        fetched: Callable[[int, int, Any], None],
        failed: Callable[[int, int, str], None],
        *,
        safe_only: bool = False,
    ) -> None:
        self._fetcher = Fetcher(credentials, "submit", dispatcher)
        self._is_wanted = is_wanted
        self._fetched = fetched
        self._failed = failed
        self._safe_only = safe_only
        self._changed = Condition()
        self._jobs: list[tuple[float, int, _Job]] = []
        """A heap of jobs, ordered by the time at which each job is due."""
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def fetch(self, work: int, attempt: int, encoded: bytes) -> list[Any] | None:
        """Return the parts of a result if all of them are in shared memory. Otherwise have a thread
        fetch them, and return None.

        Only one thread may call this.
        """
        reference = decode_reference(encoded)
        parts = self._fetcher.memories.attach(reference)
        if not any(isinstance(part, Held) for part in parts):
            return parts
        job = _Job(work, attempt, reference)
        try:
            self._ensure_threads()
        except RuntimeError as error:  # the process cannot start a thread
            self._fail(job, error)
        else:
            self._put(job, 0.0)
        return None

    def fetch_kept(self, encoded: bytes, name: str) -> Any:
        """Fetch a kept value in the calling thread, with a single try. Raises the errors of
        `remote_results.fetch`."""
        return remote_results.fetch(self._fetcher, encoded, name, safe_only=self._safe_only)

    @property
    def memories(self) -> int:
        """The number of processes whose shared memory is mapped into this process."""
        return len(self._fetcher.memories)

    @property
    def connections(self) -> int:
        """The number of open connections to holders of results."""
        return len(self._fetcher.clients)

    def close(self) -> None:
        """End the threads. Fetches in progress fail without a report."""
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
                if self._threads:
                    # A thread that runs already will fetch this result. The next call of `fetch`
                    # tries again to start the missing thread.
                    return
                raise
            self._threads.append(thread)

    def _put(self, job: _Job, due: float) -> None:
        with self._changed:
            if not self._closed:
                heapq.heappush(self._jobs, (due, next(self._numbers), job))
                self._changed.notify()

    def _next(self) -> _Job | None:
        """Wait until a job is due, and return the job that was due first. Return None once the
        ResultFetcher is closed."""
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
                if not self._is_wanted(job.work, job.attempt):
                    continue
                parts = self._fetcher.fetch(
                    job.reference, partial(self._is_wanted, job.work, job.attempt)
                )
            except errors.CancelledError:  # the work item no longer waits for this result
                pass
            except (
                errors.UnavailableError,
                errors.NotFoundError,
                errors.DeadlineExceededError,
            ) as error:
                job.spent_s += AGAIN_S + min(TRY_S, time.monotonic() - began)
                if job.spent_s < PATIENCE_S:
                    self._put(job, time.monotonic() + AGAIN_S)
                else:
                    self._fail(job, error)
            except BaseException as error:
                # any other error, such as a MemoryError, ends this work item only
                self._fail(job, error)
            else:
                self._deliver(job, parts)
                del parts
            del job

    def _deliver(self, job: _Job, parts: list[Any]) -> None:
        try:
            self._fetched(job.work, job.attempt, parts)
        except BaseException:  # the thread must go on, because other results wait for this thread
            log.exception("the fetched result of work item %d could not be delivered", job.work)

    def _fail(self, job: _Job, error: BaseException) -> None:
        if not self._closed:
            problem = (
                error.message
                if isinstance(error, errors.OpError)
                else f"{type(error).__name__}: {error}"
            )
            self._failed(
                job.work, job.attempt, f"its result is held at {job.reference.address}: {problem}"
            )

"""Fetching large results from the workers that hold them: at once where they are in shared memory, else in threads of their own.

A holder that does not answer may be dead: then the dispatcher finds out and the work runs again, so a failed fetch is tried
again for a while and only then called unreachable.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from zmqdist import errors, limits
from zmqdist.dispatch import kept
from zmqdist.dispatch.fetch import Fetcher
from zmqdist.dispatch.references import Held, Reference, decode_reference
from zmqdist.net.credentials import Credentials

THREADS = 2
AGAIN_S = 0.5
PATIENCE_S = 3 * limits.LEASE_S


class Fetching:
    """Threads that fetch; started with the first large result from another host.

    Args:
      fetched: gets (work, attempt, parts), in a fetching thread.
      failed: gets (work, attempt, problem).
    """

    def __init__(
        self,
        credentials: Credentials,
        dispatcher: str,
        fetched: Callable[[int, int, Any], None],
        failed: Callable[[int, int, str], None],
    ) -> None:
        self._fetcher = Fetcher(credentials, "submit", dispatcher)
        self._fetched = fetched
        self._failed = failed
        self._jobs: queue.SimpleQueue[tuple[int, int, Reference] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def ask(self, work: int, attempt: int, encoded: bytes) -> list[Any] | None:
        """The parts of a result, when they are all to be had at once; else they are fetched. From one thread."""
        reference = decode_reference(encoded)
        parts = self._fetcher.near.attach(reference)
        if not any(isinstance(part, Held) for part in parts):
            return parts
        if not self._threads:
            for _ in range(THREADS):
                thread = threading.Thread(target=self._serve, name="zmqdist-fetch", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put((work, attempt, reference))
        return None

    def kept(self, encoded: bytes, name: str) -> Any:
        """A value that its worker keeps, in the caller's thread. It is not tried again. Raises as `dispatch.kept.fetch`."""
        return kept.fetch(self._fetcher, encoded, name)

    def close(self) -> None:
        """End the threads; what is under way fails."""
        self._closed.set()
        for _ in self._threads:
            self._jobs.put(None)
        self._fetcher.close()
        for thread in self._threads:
            thread.join(5.0)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, attempt, reference = job
            try:
                parts = self._fetch(reference)
            except Exception as error:  # also a MemoryError: it is the end of this work, and of nothing else
                if not self._closed.is_set():
                    told = error.message if isinstance(error, errors.OpError) else f"{type(error).__name__}: {error}"
                    self._failed(work, attempt, f"its result is held at {reference.address}: {told}")
                continue
            self._fetched(work, attempt, parts)
            del job, parts

    def _fetch(self, reference: Reference) -> list[Any]:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._fetcher.fetch(reference)
            except (errors.UnavailableError, errors.NotFoundError, errors.DeadlineExceededError):
                if time.monotonic() > until or self._closed.wait(AGAIN_S):
                    raise

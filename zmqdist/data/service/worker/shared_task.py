"""The runner of a task that all trainers share. It has a window of the latest elements, which are
encoded once for all trainers.

Rules
    Each trainer has a position of its own, and gets no element twice. A new trainer begins at the
    oldest element in the window. A trainer that has fallen behind the window continues at the
    oldest element too. A trainer at the end of the window waits for the next batch. The task
    computes that batch for the first waiting trainer, and sends it to all waiting trainers.
    A batch has at most as many elements as the first waiting trainer requests, and gets no further
    element when it has a 16th of the window's bytes. A trainer that is a little slower than the
    others therefore does not fall behind the window, unless elements are large. When the window
    exceeds its size in bytes, the oldest batches are dropped. An element larger than the window is
    an error. One trainer gets the error of an element, and the next request continues after the
    error. If the pipeline ends, all trainers get an error.

The window ends with the task. A restarted worker begins a new window.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from zmqdist import clock as time
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service.elements import pack, weigh
from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.worker.element_replies import (
    DescribeError,
    ElementReply,
    Packed,
    ReplySender,
    withdraw,
)
from zmqdist.data.service.worker.task_replies import GiveError, GiveSkip
from zmqdist.data.structure import invalid
from zmqdist.errors import CancelledError

BATCHES_IN_WINDOW: Final = 16
"""A batch gets no further element when it has the window's bytes divided by this number."""
BATCH_S: Final = 0.01
"""Seconds. The next batch has half the size if a batch took longer than this to compute, and twice
the size if it took less."""


class SharedRunner:
    """Runs a task that all trainers share.

    Attributes:
      misses: number of batches that were computed, each because one request needed it.
      nbytes: size of the window, in bytes.
    """

    def __init__(
        self,
        name: str,
        open: Callable[[], DatasetIterator],
        describe_error: DescribeError,
        limit: int,
    ) -> None:
        """Create the runner. Its thread starts with the first request.

        Args:
          open: a function that opens the pipeline. The runner's thread calls it.
          describe_error: a DescribeError (element_replies.py), which makes the errors that readers
            get.
          limit: largest size of the window, in bytes.
        """
        self._open = open
        self._describe_error = describe_error
        self._sender = ReplySender(describe_error)
        self._made = 0
        self._limit = limit
        self._window: deque[tuple[Packed, int]] = deque()
        self._first = 0
        """The number of the oldest batch in the window."""
        self._positions: dict[str, int] = {}
        self._waiting: deque[tuple[Wanted, ElementReply]] = deque()
        self._count = 1
        self._failure: BaseException | None = None
        """The error of the element after the last batch, until one request has got the error.
        Otherwise None."""
        self._woken = False
        """True while a call of `_serve` is scheduled. Until `_serve` has run, the thread computes
        no batch, because the window may already have the batch that the waiting requests need."""
        self._error: BaseException | None = None
        self._replies = self.misses = self.nbytes = 0
        self._lock = threading.Lock()
        self._needed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name=f"zmqdist-task-{name}", daemon=True)

    def ask(self, wanted: Wanted, reply: ElementReply) -> None:
        if not wanted.trainer:
            reply.fail(invalid("a cross-trainer cache requires a non-empty trainer ID"))
            return
        with self._lock:
            if not self._thread.ident:
                self._thread.start()
            self._waiting.append((wanted, reply))
        self._serve()

    def expire(self, reply: ElementReply) -> None:
        with self._lock:
            late = withdraw(self._waiting, reply)
        if late:
            self._sender.send(GiveSkip(reply))

    def close(self) -> None:
        self._end(CancelledError("the task was stopped"))

    def _serve(self) -> None:
        """Send all replies that are ready. Runs in the loop thread, so that the replies to a
        trainer keep their order."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            served: list[tuple[ElementReply, Packed]] = []
            failed: list[GiveError] = []
            for wanted, reply in waiting:
                try:
                    batch = self._find(wanted) if reply.wanted() else None
                except BaseException as error:
                    failed.append(GiveError(reply, self._sender.failure(error)))
                    continue
                if batch is not None:
                    served.append((reply, batch))
                elif reply.wanted():
                    self._waiting.append((wanted, reply))
            if self._error is not None:
                failed += [GiveError(reply, self._error) for _, reply in self._waiting]
                self._waiting.clear()
            elif self._failure is not None and self._waiting:
                failed.append(GiveError(self._waiting.popleft()[1], self._failure))
                self._failure = None
            self._replies += len(served)
            self._woken = False
            self._needed.notify()
        for reply, batch in served:
            self._sender.attempt(reply, partial(reply.packed, batch))
        for answer in failed:
            self._sender.send(answer)

    @property
    def hits(self) -> int:
        """Number of requests that got a batch which was computed for another request."""
        return self._replies - self.misses

    def _find(self, wanted: Wanted) -> Packed | None:
        """Return the next batch of the trainer that sent the request, and advance the trainer's
        position. Return None if the window does not have that batch yet. Call this with the lock
        held.
        """
        position = max(self._first, self._positions.get(wanted.trainer, 0))
        if position == self._first + len(self._window):
            return None
        self._positions[wanted.trainer] = position + 1
        return self._window[position - self._first][0]

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._open() as iterator:
                while (wanted := self._wait_for_need()) is not None:
                    elements, nbytes, failure = self._compute(iterator, wanted)
                    self._add(elements, nbytes, failure)
        except BaseException as error:
            self._end(error)

    def _wait_for_need(self) -> Wanted | None:
        """Wait until a request needs a batch that is not computed yet, and return the request.
        Return None if the task has ended."""
        with self._lock:
            while self._error is None:
                if self._waiting and not self._woken and self._failure is None:
                    return self._waiting[0][0]
                self._needed.wait()
        return None

    def _compute(
        self, iterator: DatasetIterator, wanted: Wanted
    ) -> tuple[list[Any], int, BaseException | None]:
        """Compute a batch. Return (elements, number of bytes, error of the element after these or
        None). Raises InvalidArgumentError at the end of the pipeline.
        """
        began, total = time.monotonic(), 0
        elements: list[Any] = []
        enough = max(1, min(wanted.bytes_max, self._limit // BATCHES_IN_WINDOW))
        failure: BaseException | None = None
        while (
            failure is None
            and len(elements) < min(self._count, wanted.elements_max)
            and total < enough
        ):
            try:
                element = next(iterator)
                total += self._weigh(element)
            except StopIteration:
                if elements:
                    break
                raise invalid(ENDED) from None
            except BaseException as error:
                failure = self._describe_error(error, f"element {self._made}")
            else:
                elements.append(element)
            self._made += 1
        quick = time.monotonic() - began < BATCH_S
        self._count = (
            min(wanted.elements_max, self._count * 2) if quick else max(1, self._count // 2)
        )
        return elements, total, failure

    def _weigh(self, element: Any) -> int:
        nbytes = weigh(element)
        if nbytes > self._limit:
            raise invalid(
                f"an element takes {nbytes} bytes, and the cross-trainer cache has room for "
                f"{self._limit}: give the worker a "
                "larger cross_trainer_cache_size_bytes"
            )
        return nbytes

    def _add(self, elements: list[Any], nbytes: int, failure: BaseException | None) -> None:
        batch = Packed(pack(elements)) if elements else None
        with self._lock:
            self._failure = failure
            if batch is not None:
                self.misses += 1
                self._window.append((batch, nbytes))
                self.nbytes += nbytes
            # Drop old batches. A trainer that needs a dropped batch continues at the oldest batch.
            while self.nbytes > self._limit:
                self.nbytes -= self._window.popleft()[1]
                self._first += 1
            self._wake()

    def _wake(self) -> None:
        """Schedule `_serve` if requests wait. Call this with the lock held."""
        if self._waiting:
            self._woken = True
            self._waiting[0][1].soon(self._serve)

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            self._needed.notify()
            self._wake()


def require_infinite(cardinality: int) -> None:
    """Raise InvalidArgumentError if the pipeline is known to end."""
    if cardinality >= 0:
        text = "Cross-trainer caching requires the input dataset to be infinite. Got input with cardinality "
        raise invalid(f"{text}{cardinality}.")


ENDED: Final = "Cross-trainer caching requires the input dataset to be infinite. However, it reached the end of sequence."

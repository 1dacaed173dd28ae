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

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from zmqdist import clock as time
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service.elements import pack, weigh
from zmqdist.data.service.reader.delivery import FAILED, SOME, Demand
from zmqdist.data.service.worker.task_replies import ServingMachine, TaskReply
from zmqdist.data.service.worker.task_runner import DescribeError, ElementReply, Packed, QueueRunner
from zmqdist.data.structure import invalid
from zmqdist.errors import CancelledError

BATCHES_IN_WINDOW: Final = 16
"""A batch gets no further element when it has the window's bytes divided by this number."""
BATCH_S: Final = 0.01
"""Seconds. The next batch has half the size if a batch took longer than this to compute, and twice
the size if it took less."""


class SharedWindow(ServingMachine):
    """The window of one task, and the requests of the trainers.

    Args:
      limit: largest size of the window, in bytes.

    Attributes:
      nbytes: size of the window, in bytes.
      batches_count: number of batches that were added to the window.
      replies_count: number of requests that got a batch.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.nbytes = self.batches_count = self.replies_count = 0
        self._limit = limit
        self._batches: deque[tuple[Packed, int]] = deque()
        self._first = 0
        """The number of the oldest batch in the window."""
        self._positions: dict[str, int] = {}
        self._failure: BaseException | None = None
        """The error of the element after the last batch, until one request has got the error.
        Otherwise None."""

    @property
    def needed_by(self) -> Demand | None:
        """The request that needs a batch which is not computed yet; None if there is none."""
        return self.waiting[0][0] if self.waiting and self._failure is None else None

    def add(self, batch: Packed | None, nbytes: int, failure: BaseException | None) -> None:
        """Add a computed batch, and the error of the element after it."""
        self._failure = failure
        if batch is not None:
            self.batches_count += 1
            self._batches.append((batch, nbytes))
            self.nbytes += nbytes
        # Drop old batches. A trainer that needs a dropped batch continues at the oldest batch.
        while self.nbytes > self._limit:
            self.nbytes -= self._batches.popleft()[1]
            self._first += 1

    def next_reply(self) -> TaskReply | None:
        for request in list(self.waiting):
            demand, reply = request
            # A trainer must not lose a batch to a request whose reader no longer waits.
            batch = self._find(demand) if reply.wanted() else None
            if batch is not None:
                self.waiting.remove(request)
                self.replies_count += 1
                return TaskReply(reply, SOME, batch)
            if not reply.wanted():
                self.waiting.remove(request)
        if not self.waiting:
            return None
        if self.error is not None:
            return TaskReply(self.waiting.popleft()[1], FAILED, self.error)
        # one trainer gets the error, and the others continue after it
        if self._failure is not None:
            failure, self._failure = self._failure, None
            return TaskReply(self.waiting.popleft()[1], FAILED, failure)
        return None

    def _find(self, demand: Demand) -> Packed | None:
        """Return the next batch of the trainer that sent the request, and advance the trainer's
        position. Return None if the window does not have that batch yet.
        """
        position = max(self._first, self._positions.get(demand.trainer, 0))
        if position == self._first + len(self._batches):
            return None
        self._positions[demand.trainer] = position + 1
        return self._batches[position - self._first][0]

    def close(self) -> None:
        """Refuse all requests that need a further batch, because the task was dropped."""
        self.end(CancelledError("the task was stopped"))


class SharedRunner(QueueRunner[SharedWindow]):
    """Runs a task that all trainers share."""

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
          describe_error: a DescribeError (task_runner.py), which makes the errors that readers
            get.
          limit: largest size of the window, in bytes.
        """
        super().__init__(name, open, describe_error, SharedWindow(limit))
        self.window = self._machine
        self._computed = 0
        self._limit = limit
        self._count = 1

    def ask(self, demand: Demand, reply: ElementReply) -> None:
        if demand.trainer:
            super().ask(demand, reply)
        else:
            reply.answer(FAILED, invalid("a cross-trainer cache requires a non-empty trainer ID"))

    def _note_served(self) -> None:
        with self._lock:
            self._changed.notify()

    # -- the thread --------------------------------------------------------------------------------

    def _compute(self) -> None:
        with self._open() as iterator:
            while (demand := self._wait_for_need()) is not None:
                elements, nbytes, failure = self._compute_batch(iterator, demand)
                batch = Packed(pack(elements)) if elements else None
                with self._lock:
                    self._machine.add(batch, nbytes, failure)
                self._wake()

    def _wait_for_need(self) -> Demand | None:
        """Wait until a request needs a batch that is not computed yet, and return the request.
        Return None if the task has ended."""
        with self._lock:
            while not self._machine.finished:
                # While `_serve` is scheduled, the window may already have the batch that the
                # waiting requests need.
                if not self._woken and (demand := self._machine.needed_by) is not None:
                    return demand
                self._changed.wait()
        return None

    def _compute_batch(
        self, iterator: DatasetIterator, demand: Demand
    ) -> tuple[list[Any], int, BaseException | None]:
        """Compute a batch. Return (elements, number of bytes, error of the element after these or
        None). Raises InvalidArgumentError at the end of the pipeline.
        """
        began, total = time.monotonic(), 0
        elements: list[Any] = []
        enough = max(1, min(demand.bytes_max, self._limit // BATCHES_IN_WINDOW))
        failure: BaseException | None = None
        while (
            failure is None
            and len(elements) < min(self._count, demand.elements_max)
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
                failure = self._describe_error(error, f"element {self._computed}")
            else:
                elements.append(element)
            self._computed += 1
        quick = time.monotonic() - began < BATCH_S
        self._count = (
            min(demand.elements_max, self._count * 2) if quick else max(1, self._count // 2)
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


def require_infinite(cardinality: int) -> None:
    """Raise InvalidArgumentError if the pipeline is known to end."""
    if cardinality >= 0:
        text = "Cross-trainer caching requires the input dataset to be infinite. Got input with cardinality "
        raise invalid(f"{text}{cardinality}.")


ENDED: Final = "Cross-trainer caching requires the input dataset to be infinite. However, it reached the end of sequence."

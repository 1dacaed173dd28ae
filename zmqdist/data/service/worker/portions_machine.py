"""The machine for the portions that a task computes for one reader. It decides how many portions
the task requests, how far the task may compute ahead, and which elements are in a reply.

An element is identified by (portion, offset). The pipeline of a portion produces the same elements
on every worker, so that another worker can continue a portion at the offset that the reader has
acknowledged.

Promises
    L1  Elements are sent portion after portion, and within a portion in the order of the pipeline.
        The offsets of a portion begin at the offset at which the task began the portion, and have
        no gap or repetition.
    L2  A reply consists of runs, which are consecutive elements of one portion. Only the run with
        the last element of a portion is marked as done. A portion without elements has one empty
        run.
    L3  If the computation of an element raises an error, the error takes the place and the offset
        of the element, and is a run of its own.
    L4  The number of elements in the buffer is bounded. The number of portions is bounded too,
        because portions may have no elements.
    L5  Each reply names the portions that the task holds for this reader. From this the reader
        knows which task has its next portion.

Tag of a reply
    (runs, bytes, portions in hand). In the tag, a run is (number, skip, first, count, done, code,
    text). The run has `count` elements of the portion `number`, from offset `first` on. The task
    began this portion at offset `skip`. A run with a `code` is the error of one element, and has no
    element in the batch.

One thread computes elements and other threads take them. The callers hold a lock while they call a
method of PortionsLane. Without the lock, the computing thread may only append to the elements of
its segment, up to `room`. This is safe because appending is atomic, and because the other threads
only remove elements from the left.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

from zmqdist.data.service.reader.delivery import END, FAILED, SOME, Demand
from zmqdist.data.service.worker.task_replies import BufferedMachine, TaskReply

GIVEN_MAX: Final = 64
"""The largest number of portions in one request to the dispatcher."""

QUICK_S: Final = 0.02
"""Seconds. If the task computed the portions of its last request in less time, its next request is
for twice as many portions."""

SEGMENTS_MAX: Final = 256
"""The largest number of portions in the buffer."""

Run: TypeAlias = tuple[int, int, int, int, bool, int, str]


class PortionError(NamedTuple):
    """Stands in the buffer in place of an element whose computation raised."""

    code: int
    text: str


class PortionSegment:
    """The elements of one portion in the buffer. `first` is the offset of the next element to be
    taken."""

    __slots__ = ("elements", "first", "is_complete", "number", "skip")

    def __init__(self, number: int, skip: int) -> None:
        self.number = number
        self.skip = self.first = skip
        self.elements: deque[Any] = deque()
        self.is_complete = False
        """Whether the portion's pipeline has ended. The computing thread sets it without the lock,
        after it has appended the last element."""


class PortionsLane(BufferedMachine):
    """The buffer with the portions that a task computes for one reader.

    Args:
      elements_min: how many elements may be computed ahead until the size of an element is known.
    """

    def __init__(self, elements_min: int) -> None:
        super().__init__(elements_min)
        self._limit = elements_min
        self._segments: deque[PortionSegment] = deque()
        self._coming: list[int] = []
        """The numbers of the portions that the dispatcher has given to this task and that the
        thread has not begun."""
        self._failures = self._taken_count = 0
        self._count = 1
        self._received_at = -inf

    # -- called by the thread that computes elements -----------------------------------------------

    def request_size(self, now: float) -> int:
        """Return how many portions to request now: twice the last number if those portions were
        computed quickly, otherwise half of it."""
        # few portions at a time leave the rest to other workers; many save requests
        quick = now - self._received_at < QUICK_S
        self._count = min(GIVEN_MAX, self._count * 2) if quick else max(1, self._count // 2)
        return self._count

    def portions_received(self, numbers: list[int], now: float) -> None:
        """Record the portions that the dispatcher has given to this task for the reader. The
        computing thread begins them in this order."""
        self._coming = numbers
        self._received_at = now

    def may_begin(self) -> bool:
        """Return whether the buffer has room for another portion."""
        return len(self._segments) < SEGMENTS_MAX and self._buffered() < self._limit

    def begin(self, number: int, skip: int) -> PortionSegment:
        """Begin a portion. Return the segment to which the thread appends its elements."""
        self._coming.remove(number)
        segment = PortionSegment(number, skip)
        self._segments.append(segment)
        self._make_room()
        return segment

    def may_add(self) -> bool:
        """Return whether the last segment, whose elements the thread computes, has room for another
        element."""
        self._make_room()
        return len(self._segments[-1].elements) < self.room

    def weighed(self, element_bytes: int, elements_max: int) -> None:
        super().weighed(element_bytes, elements_max)
        self._limit = elements_max
        self._make_room()

    def failed(self, segment: PortionSegment, code: int, text: str) -> None:
        """Record that computing the next element of a portion raised an error."""
        self._failures += 1
        segment.elements.append(PortionError(code, text))

    def close(self) -> None:
        super().close()
        self._segments.clear()
        self.room = 0

    def figures(self) -> tuple[int, int, int, int]:
        """Return the number of elements that were taken, their bytes (an estimate from the last
        weighed element), the number of elements in the buffer, and the largest number that it may
        have.
        """
        return (
            self._taken_count,
            self._taken_count * self.element_bytes,
            self._buffered(),
            self._limit,
        )

    def _buffered(self) -> int:
        return sum(len(segment.elements) for segment in self._segments)

    def _make_room(self) -> None:
        if self._segments:
            self.room = self._limit - self._buffered() + len(self._segments[-1].elements)

    # -- called by the threads that take elements --------------------------------------------------

    def next_reply(self) -> TaskReply | None:
        first = self._segments[0] if self._segments else None
        is_ready = first is not None and (first.is_complete or bool(first.elements))
        if not self.waiting or not (is_ready or self.finished):
            return None
        demand, reply = self.waiting.popleft()
        if is_ready:
            return self._take(demand, reply)
        if self.error is not None:
            return TaskReply(reply, FAILED, self.error)
        return TaskReply(reply, END)

    def _take(self, demand: Demand, reply: Any) -> TaskReply:
        left = min(demand.elements_max, max(1, demand.bytes_max // self.element_bytes))
        elements: list[Any] = []
        runs: list[Run] = []
        while self._segments and left > 0:
            segment = self._segments[0]
            # Promise L2: read `is_complete` before the elements, because the computing thread appends
            # elements meanwhile, and sets `is_complete` after the last.
            is_complete = segment.is_complete
            batch, failure = self._pop(segment.elements, left)
            elements += batch
            left -= len(batch)
            is_complete = is_complete and not segment.elements
            if batch or (is_complete and failure is None):
                whole = is_complete and failure is None
                run = (segment.number, segment.skip, segment.first, len(batch), whole, 0, "")
                runs.append(run)
                segment.first += len(batch)
            if failure is not None:
                left -= 1
                runs.append((segment.number, segment.skip, segment.first, 1, is_complete, *failure))
                segment.first += 1
            # promise L2: the last run of the portion is in the reply
            if is_complete:
                self._segments.popleft()
            elif failure is None:
                break
        self._taken_count += len(elements)
        in_hand = (*(following.number for following in self._segments), *self._coming)
        tag = tuple(runs), len(elements) * self.element_bytes, in_hand
        return TaskReply(reply, SOME, elements, tag)

    def _pop(self, buffer: deque[Any], count: int) -> tuple[list[Any], PortionError | None]:
        """Remove the next elements of a segment. Return them, and the error that follows them or
        None."""
        popleft = buffer.popleft
        if not self._failures:
            return [popleft() for _ in range(min(count, len(buffer)))], None
        batch: list[Any] = []
        while buffer and len(batch) < count:
            element = popleft()
            if type(element) is PortionError:
                self._failures -= 1
                return batch, element
            batch.append(element)
        return batch, None

"""The portions of one reader in a task that computes them: how many to request, how far the task may run ahead, what goes into a reply.

An element is identified by (portion, offset). The pipeline of a portion gives the same elements on every worker, so that another worker
can continue a portion at the offset that the reader has acknowledged.

Promises
    L1  Elements go out in the order of the pipelines: portion after portion, and in each the offsets from the one at which it was begun,
        without gap or repetition.
    L2  Only the run with the last element of a portion says that the portion is done; a portion without elements has a run as well.
    L3  An error takes the place of its element and has that element's offset. It is a run of its own.
    L4  The buffer is bounded, in elements and in portions, because portions without elements fill it as well.
    L5  Each reply names the portions that the task holds for this reader, so that the reader knows which task has the portion that it needs
        next.

Tag of a reply
    (runs, bytes, portions in hand). A run is (number, skip, first, count, done, code, text): `count` elements from offset `first` on, of a
    portion that was begun at offset `skip`. With a `code` the run is one element that raised, and has no element in the batch.

One thread computes elements and other threads take them. The callers hold a lock around each call of this class. Exception: between the
calls, the computing thread appends to the elements of its segment, up to `room`, without the lock. Appending is atomic, and no other thread
changes that end.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.worker.task_replies import GiveElements, GiveEnd, GiveError, TaskReply

GIVEN_MAX: Final = 64
"""The most portions in one request to the dispatcher."""

QUICK_S: Final = 0.02
"""When the last portions took less time than this, in seconds, the next request is for twice as many."""

SEGMENTS_MAX: Final = 256
"""The most portions in the buffer."""

Run: TypeAlias = tuple[int, int, int, int, bool, int, str]


class PortionError(NamedTuple):
    """Stands in the buffer in place of an element whose computation raised."""

    code: int
    text: str


class PortionSegment:
    """The elements of one portion in the buffer. `first` is the offset of the next element to be taken."""

    __slots__ = ("done", "elements", "first", "number", "skip")

    def __init__(self, number: int, skip: int) -> None:
        self.number = number
        self.skip = self.first = skip
        self.elements: deque[Any] = deque()
        self.done = False
        """The pipeline has ended. Set without the lock, after the last element was appended."""


class PortionsLane:
    """The buffer of one reader. `reply` is any object by which the caller identifies a request.

    Args:
      elements_min: how many elements may be computed ahead before the size of one is known.

    Attributes:
      room: how many elements the last segment may have.
      closed: the task was dropped: no further element is to be computed.
      waiting: the requests, the next one to be served first.
    """

    def __init__(self, elements_min: int) -> None:
        self.room = elements_min
        self.closed = False
        self._limit = elements_min
        self._element_bytes = 1
        self._segments: deque[PortionSegment] = deque()
        self._coming: list[int] = []
        """Numbers of the portions that the dispatcher has given and the thread has not begun."""
        self._failures = 0
        self.waiting: deque[tuple[Wanted, Any]] = deque()
        self._over = False
        self._error: BaseException | None = None
        self._count = 1
        self._received_at = -inf

    # -- called by the thread that computes elements ------------------------------------------------------------------------

    def portions_wanted(self, now: float) -> int:
        """Return how many portions to request now: twice as many as last time if those were computed quickly, otherwise half as many."""
        quick = now - self._received_at < QUICK_S
        self._count = min(GIVEN_MAX, self._count * 2) if quick else max(1, self._count // 2)
        return self._count

    def portions_received(self, numbers: list[int], now: float) -> None:
        """Note the portions that the dispatcher has given for this reader, in the order in which they are begun."""
        self._coming = numbers
        self._received_at = now

    def may_begin(self) -> bool:
        """Whether the buffer has room for another portion."""
        return len(self._segments) < SEGMENTS_MAX and self._made() < self._limit

    def begin(self, number: int, skip: int) -> PortionSegment:
        """Begin a portion. Return the segment that takes its elements."""
        self._coming.remove(number)
        segment = PortionSegment(number, skip)
        self._segments.append(segment)
        self._make_room()
        return segment

    def may_add(self) -> bool:
        """Whether the last segment has room for another element."""
        self._make_room()
        return len(self._segments[-1].elements) < self.room

    def weighed(self, element_bytes: int, elements_max: int) -> None:
        """Note the size of an element, and how many elements of this size may be in the buffer."""
        self._element_bytes = element_bytes
        self._limit = elements_max
        self._make_room()

    def failed(self, segment: PortionSegment, code: int, text: str) -> None:
        """Note that computing the next element of `segment` raised."""
        self._failures += 1
        segment.elements.append(PortionError(code, text))

    def end(self, error: BaseException | None = None) -> None:
        """Note that there are no more portions, or, with an error, that no further portion can be computed."""
        self._over = True
        self._error = error

    def close(self) -> None:
        """Drop the buffer, because the task was dropped."""
        self.closed = self._over = True
        self._segments.clear()
        self.room = 0

    def _made(self) -> int:
        return sum(len(each.elements) for each in self._segments)

    def _make_room(self) -> None:
        if self._segments:
            self.room = self._limit - self._made() + len(self._segments[-1].elements)

    # -- called by the threads that take elements ------------------------------------------------------------------------------

    def add_request(self, wanted: Wanted, reply: Any) -> None:
        """Add a request; `next_reply` returns its reply."""
        self.waiting.append((wanted, reply))

    def withdraw(self, reply: Any) -> bool:
        """Withdraw a request. Return whether it was waiting."""
        found = next((each for each in self.waiting if each[1] is reply), None)
        if found is not None:
            self.waiting.remove(found)
        return found is not None

    def next_reply(self) -> TaskReply | None:
        """Return the next reply to send; None if no request can be served now."""
        first = self._segments[0] if self._segments else None
        something = first is not None and (first.done or bool(first.elements))
        if not self.waiting or not (something or self._over):
            return None
        wanted, reply = self.waiting.popleft()
        if something:
            return self._take(wanted, reply)
        return GiveEnd(reply) if self._error is None else GiveError(reply, self._error)

    def _take(self, wanted: Wanted, reply: Any) -> GiveElements:
        left = min(wanted.elements_max, max(1, wanted.bytes_max // self._element_bytes))
        elements: list[Any] = []
        runs: list[Run] = []
        while self._segments and left > 0:
            segment = self._segments[0]
            # L2: read `done` before the elements. The other thread appends to them meanwhile, and sets `done` after the last one.
            done = segment.done
            taken, failure = self._pop(segment.elements, left)
            elements += taken
            left -= len(taken)
            done = done and not segment.elements
            if taken or (done and failure is None):
                runs.append((segment.number, segment.skip, segment.first, len(taken), done and failure is None, 0, ""))
                segment.first += len(taken)
            if failure is not None:
                left -= 1
                runs.append((segment.number, segment.skip, segment.first, 1, done, *failure))
                segment.first += 1
            if done:
                self._segments.popleft()
            elif failure is None:
                break
        in_hand = (*(each.number for each in self._segments), *self._coming)
        return GiveElements(reply, elements, (tuple(runs), len(elements) * self._element_bytes, in_hand))

    def _pop(self, buffer: deque[Any], count: int) -> tuple[list[Any], PortionError | None]:
        """Remove and return some elements, and the failure after them."""
        popleft = buffer.popleft
        if not self._failures:
            return [popleft() for _ in range(min(count, len(buffer)))], None
        taken: list[Any] = []
        while buffer and len(taken) < count:
            element = popleft()
            if type(element) is PortionError:
                self._failures -= 1
                return taken, element
            taken.append(element)
        return taken, None

"""The portions of one reader in a task that computes them: what is asked for, how far the task may be ahead, what goes into an answer.

Elements are known by (portion, offset): a portion's pipeline gives the same elements wherever it is run, so that another worker can go on
with a portion at the offset that the reader has acknowledged.

Promises
    L1  Elements go out as they were made: portion after portion, of each the offsets from that on at which it was begun, none left out
        and none twice.
    L2  Exactly the run with the last element of a portion says that the portion is done; one without elements has a run all the same.
    L3  An error costs its element, has its offset, and is the last in its run.
    L4  What is made and not taken is bounded: in elements, and in portions, because those without elements fill the buffer, too.
    L5  Each answer names the portions that were given and are not done with it: the reader knows where the one is whose turn it is.

Tag of an answer
    (runs, bytes, portions in hand). A run is (number, skip, first, count, done, code, text): `count` elements from offset `first` on of a
    portion that was begun at offset `skip`. With a `code` it is one element that raised, and has none in the batch.

One thread makes elements and others take them, with a lock around each call here. Between the calls the thread adds to the elements of its
segment, up to `room`, without the lock: appending is one step, and nobody else touches that end.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.worker.task_answers import GiveElements, GiveEnd, GiveError, TaskAnswer

GIVEN_MAX: Final = 64
"""Portions asked for at once."""

QUICK_S: Final = 0.02
"""Portions that are computed sooner are asked for in larger numbers."""

SEGMENTS_MAX: Final = 256
"""Portions in the buffer."""

Run: TypeAlias = tuple[int, int, int, int, bool, int, str]


class PortionError(NamedTuple):
    """An element that raised, in its place."""

    code: int
    text: str


class PortionSegment:
    """What is in the buffer of one portion; `first` is the offset of the element that is taken next."""

    __slots__ = ("done", "elements", "first", "number", "skip")

    def __init__(self, number: int, skip: int) -> None:
        self.number = number
        self.skip = self.first = skip
        self.elements: deque[Any] = deque()
        self.done = False
        """Its pipeline has ended; set without the lock, after its last element."""


class PortionsLane:
    """See the module's docstring. What stands for a question, `reply`, is the caller's.

    Args:
      elements_min: so many elements may be made ahead before any is weighed.

    Attributes:
      room: how many elements the last segment may have.
      closed: nothing more is to be made.
      waiting: the questions, the one that is answered next first.
    """

    def __init__(self, elements_min: int) -> None:
        self.room = elements_min
        self.closed = False
        self._limit = elements_min
        self._element_bytes = 1
        self._segments: deque[PortionSegment] = deque()
        self._coming: list[int] = []
        """Numbers of portions that were given and are not begun."""
        self._failures = 0
        self.waiting: deque[tuple[Wanted, Any]] = deque()
        self._over = False
        self._error: BaseException | None = None
        self._count = 1
        self._received_at = -inf

    # -- who makes elements -------------------------------------------------------------------------------------------------

    def portions_wanted(self, now: float) -> int:
        """How many portions to ask for now: more, where those before were done quickly."""
        quick = now - self._received_at < QUICK_S
        self._count = min(GIVEN_MAX, self._count * 2) if quick else max(1, self._count // 2)
        return self._count

    def given(self, numbers: list[int], now: float) -> None:
        """These portions were given out for this reader. They are begun in this order."""
        self._coming = numbers
        self._received_at = now

    def may_begin(self) -> bool:
        """Whether another portion fits."""
        return len(self._segments) < SEGMENTS_MAX and self._made() < self._limit

    def begin(self, number: int, skip: int) -> PortionSegment:
        """A portion is begun: put its elements into the segment."""
        self._coming.remove(number)
        segment = PortionSegment(number, skip)
        self._segments.append(segment)
        self._make_room()
        return segment

    def may_add(self) -> bool:
        """Whether another element of the last segment fits."""
        self._make_room()
        return len(self._segments[-1].elements) < self.room

    def weighed(self, element_bytes: int, elements_max: int) -> None:
        """What an element weighs; so many may be made ahead."""
        self._element_bytes = element_bytes
        self._limit = elements_max
        self._make_room()

    def failed(self, segment: PortionSegment, code: int, text: str) -> None:
        """Making the next element raised this."""
        self._failures += 1
        segment.elements.append(PortionError(code, text))

    def end(self, error: BaseException | None = None) -> None:
        """There are no more portions; with an error, none can be computed."""
        self._over = True
        self._error = error

    def close(self) -> None:
        """The task was dropped: what is here is nobody's."""
        self.closed = self._over = True
        self._segments.clear()
        self.room = 0

    def _made(self) -> int:
        return sum(len(each.elements) for each in self._segments)

    def _make_room(self) -> None:
        if self._segments:
            self.room = self._limit - self._made() + len(self._segments[-1].elements)

    # -- who takes them -----------------------------------------------------------------------------------------------------

    def asked(self, wanted: Wanted, reply: Any) -> None:
        """A question has come; `next_answer` answers it."""
        self.waiting.append((wanted, reply))

    def left(self, reply: Any) -> bool:
        """Nobody waits for an answer any more; return whether this one waited."""
        found = next((each for each in self.waiting if each[1] is reply), None)
        if found is not None:
            self.waiting.remove(found)
        return found is not None

    def next_answer(self) -> TaskAnswer | None:
        """Return what to answer now; None: nothing can be answered."""
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
            done = segment.done  # before its elements are looked at: the thread adds to them meanwhile
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
        """Some elements, and the failure behind them."""
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

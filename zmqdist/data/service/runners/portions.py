"""A task that computes portions: for each reader those that the dispatcher gives out for it, each by a pipeline of its own.

Theory
    Elements are known by (portion, offset): a portion's pipeline gives the same elements wherever it is run, so that another worker can go
    on with a portion at the offset that the reader has acknowledged.

    Each reader has a lane here: a thread that asks for portions, runs them one after the other, and puts their elements into a bounded
    buffer. Whoever asks takes what is there, however many portions it is of.

Tag of an answer
    (runs, bytes, portions in hand). A run is (number, skip, first, count, done, code, text): `count` elements from offset `first` on of a
    portion that was begun at offset `skip`; `done`, the portion has no more. With a `code` it is one element that raised, and has none in
    the batch.

An error costs its element, which has its offset as if it were there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Final, TypeAlias

from zmqdist.data.iterators import BufferedError, DatasetIterator
from zmqdist.data.service.delivery.interface import Wanted
from zmqdist.data.service.elements import weigh
from zmqdist.data.service.runners.base import ElementReply, Named, skip_late
from zmqdist.data.service.runners.fcfs import BUFFER_BYTES, BUFFER_ELEMENTS_MAX, BUFFER_ELEMENTS_MIN
from zmqdist.rpc.failures import told

Given: TypeAlias = tuple[int, int, int, int, int]
"""Number, repetition, first position, positions, elements to leave out."""

GIVEN_MAX: Final = 64
"""Portions asked for at once."""

QUICK_S: Final = 0.02
"""Portions that are computed sooner are asked for in larger numbers."""

SEGMENTS_MAX: Final = 256
"""Portions in the buffer: those without elements fill it, too."""


class PortionsRunner:
    """See the module's docstring."""

    def __init__(
        self,
        name: str,
        open: Callable[[int, int], DatasetIterator],
        named: Named,
        more: Callable[[int, int], list[Given]],
    ) -> None:
        """
        Args:
          open: `open(start, length)`, the pipeline over positions; called in a thread.
          named: see base.py.
          more: `more(client, count)`, the next portions for a client; waits; none: there are none any more. Called in a thread.
        """
        self._name = name
        self._open = open
        self._named = named
        self._more = more
        self._lanes: dict[int, _Lane] = {}
        self._closed = False

    def ask(self, wanted: Wanted, reply: ElementReply) -> None:
        lane = self._lanes.get(wanted.reader)
        if lane is None:
            if self._closed:
                reply.end()
                return
            lane = self._lanes[wanted.reader] = _Lane(self._name, wanted.reader, self._open, self._named, self._more)
        lane.ask(wanted, reply)

    def expire(self, reply: ElementReply) -> None:
        for lane in self._lanes.values():
            lane.expire(reply)

    def close(self) -> None:
        self._closed = True
        for lane in self._lanes.values():
            lane.close()


class _Segment:
    """What is in the buffer of one portion; `first` is the offset of the element that is taken next."""

    __slots__ = ("done", "elements", "first", "number", "skip")

    def __init__(self, number: int, skip: int) -> None:
        self.number = number
        self.skip = self.first = skip
        self.elements: deque[Any] = deque()
        self.done = False


class _Lane:
    """The portions of one reader."""

    def __init__(
        self,
        name: str,
        client: int,
        open: Callable[[int, int], DatasetIterator],
        named: Named,
        more: Callable[[int, int], list[Given]],
    ) -> None:
        self._client = client
        self._open = open
        self._named = named
        self._more = more
        self._segments: deque[_Segment] = deque()
        self._coming: list[int] = []
        """Numbers of portions that were given and are not begun."""
        self._failures = 0
        self._limit = self._room = BUFFER_ELEMENTS_MIN
        self._bytes = 1
        self._waiting: deque[tuple[Wanted, ElementReply]] = deque()
        self._woken = False
        self._lock = threading.Lock()
        self._taken = threading.Condition(self._lock)
        self._ended = self._closed = False
        self._dead: BaseException | None = None
        threading.Thread(target=self._run, name=f"zmqdist-task-{name}-{client}", daemon=True).start()

    def ask(self, wanted: Wanted, reply: ElementReply) -> None:
        with self._lock:
            self._waiting.append((wanted, reply))
        self._serve()

    def expire(self, reply: ElementReply) -> None:
        """The time of a question is over: it is skipped if it still waits."""
        skip_late(self._waiting, self._lock, reply)

    def close(self) -> None:
        with self._lock:
            self._closed = self._ended = True
            self._segments.clear()
            self._room = 0
            self._taken.notify_all()
        self._serve()

    # -- the thread ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        count, asked_at = 1, -inf
        try:
            while not self._closed:
                now = time.monotonic()
                count = min(GIVEN_MAX, count * 2) if now - asked_at < QUICK_S else max(1, count // 2)
                given = self._more(self._client, count)
                asked_at = time.monotonic()
                if not given:
                    break
                self._coming = [each[0] for each in given]
                for number, _, start, length, skip in given:
                    self._compute(number, start, length, skip)
        except BaseException as error:
            self._dead = error
        with self._lock:
            self._ended = True
        self._wake()
        self._serve()

    def _compute(self, number: int, start: int, length: int, skip: int) -> None:
        segment = _Segment(number, skip)
        elements = segment.elements
        if not self._has_room():
            return
        with self._lock:
            self._coming.remove(number)
            self._segments.append(segment)
            self._make_room()
        with self._open(start, length) as iterator:
            _leave_out(iterator, skip)
            while not self._closed:
                try:
                    for element in iterator:
                        elements.append(element)
                        if self._waiting and not self._woken:
                            self._wake()
                        if len(elements) >= self._room:
                            self._weigh(element)
                            if not self._wait_for_room():
                                return
                    break
                except BaseException as error:
                    with self._lock:
                        offset = segment.first + len(elements)
                    failure = self._named(error, f"element {offset} of positions {start} to {start + length - 1}")
                    with self._lock:
                        self._failures += 1
                        elements.append(BufferedError(failure))
                    self._wake()
                    if not self._wait_for_room():
                        return
        segment.done = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if not self._waiting or self._woken:
                return
            self._woken = True
            reply = self._waiting[0][1]
        reply.soon(self._serve)

    def _make_room(self) -> None:
        """How many elements the last segment may have. With the lock."""
        if not self._closed:
            self._room = (
                self._limit - sum(len(each.elements) for each in self._segments) + len(self._segments[-1].elements)
            )

    def _has_room(self) -> bool:
        """Wait until another portion may be begun; False when it is over."""
        with self._lock:
            while not self._closed and (
                len(self._segments) >= SEGMENTS_MAX or sum(len(each.elements) for each in self._segments) >= self._limit
            ):
                self._taken.wait()
            return not self._closed

    def _weigh(self, element: Any) -> None:
        """Reckon anew how many elements fit."""
        with self._lock:
            if not self._closed:
                self._bytes = max(1, weigh(element))
                self._limit = min(BUFFER_ELEMENTS_MAX, max(BUFFER_ELEMENTS_MIN, BUFFER_BYTES // self._bytes))
                self._make_room()

    def _wait_for_room(self) -> bool:
        """Wait until another element may be made; False when it is over."""
        with self._lock:
            while not self._closed and len(self._segments[-1].elements) >= self._room:
                self._taken.wait()
                if not self._closed:
                    self._make_room()
            return not self._closed

    # -- answers, in any thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._woken = False
                while self._waiting and not self._waiting[0][1].wanted():
                    self._waiting.popleft()
                first = self._segments[0] if self._segments else None
                something = first is not None and (first.done or bool(first.elements))
                if not self._waiting or not (something or self._ended):
                    return
                wanted, reply = self._waiting.popleft()
                taken = self._take(wanted) if something else None
            if taken is not None:
                reply.elements(*taken)
            elif self._dead is not None:
                reply.fail(self._dead)
            else:
                reply.end()

    def _take(self, wanted: Wanted) -> tuple[list[Any], tuple[Any, ...]]:
        """The next elements, and their tag. With the lock."""
        left = min(wanted.elements_max, max(1, wanted.bytes_max // self._bytes))
        elements: list[Any] = []
        runs: list[tuple[int, int, int, int, bool, int, str]] = []
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
                runs.append((segment.number, segment.skip, segment.first, 1, done, *told(failure.error)))
                segment.first += 1
            if done:
                self._segments.popleft()
            elif failure is None:
                break
        self._taken.notify()
        in_hand = (*(each.number for each in self._segments), *self._coming)
        return elements, (tuple(runs), len(elements) * self._bytes, in_hand)

    def _pop(self, buffer: deque[Any], count: int) -> tuple[list[Any], BufferedError | None]:
        """Some elements, and the failure behind them."""
        popleft = buffer.popleft
        if not self._failures:
            return [popleft() for _ in range(min(count, len(buffer)))], None
        taken: list[Any] = []
        while buffer and len(taken) < count:
            element = popleft()
            if type(element) is BufferedError:
                self._failures -= 1
                return taken, element
            taken.append(element)
        return taken, None


def _leave_out(iterator: DatasetIterator, count: int) -> None:
    """Pass over elements; one that raises is one, too."""
    for _ in range(count):
        try:
            next(iterator)
        except StopIteration:
            return
        except Exception:
            continue

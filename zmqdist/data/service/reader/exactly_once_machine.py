"""Reading in portions: each element once, in order if that is wanted, and a state from which another reader goes on.

Theory
    Elements are known by (portion, offset). The machine drops what is behind an offset that has arrived already. What is before it can only
    be there after a lost answer: the machine drops it, too, and has it computed again (`missed`).

    The machine acknowledges an element when the consumer asks for the one after it, and the runtime acknowledges the rest when the reader
    is closed: so a reader that dies before its consumer has done with an element does not lose it. Acknowledgments gather while one is on
    its way. A state counts what was handed over.

Promises
    X1  No element is delivered twice, whatever is answered twice or computed again.
    X2  The elements of a portion are delivered in their order and without a gap; with `ordered` so are the portions.
    X3  What the consumer has not done with is not acknowledged.
    X4  What it has done with is acknowledged in the end, although the dispatcher does not answer for a while.
    X5  After an answer was lost the dispatcher is told, so that its elements are computed again.
    X6  The end comes when the dispatcher has all acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from operator import length_hint
from typing import Any, Final, NamedTuple, TypeAlias

from zmqdist.data.service.dispatcher.machine import runs as sets
from zmqdist.data.service.reader.delivery import (
    END,
    SOME,
    Answered,
    Began,
    Deliver,
    Effect,
    Event,
    News,
    Over,
    Reported,
    TellDispatcher,
    Took,
    Waits,
    Works,
)
from zmqdist.data.service.reader.window_machine import TaskSource, TaskWindow
from zmqdist.data.service.retry import RETRIABLE, TRANSIENT
from zmqdist.errors import OpError, from_code

ACKNOWLEDGE: Final = "zmqdist.data.acknowledge"
MISSED: Final = "zmqdist.data.missed"

ACK_S: Final = 0.05
"""Acknowledgments gather for so long while the consumer has something to do;"""

ACK_S_MAX: Final = 1.0
"""for longer while it takes nothing."""

AGAIN_S: Final = 0.1
"""After a report that the dispatcher did not answer."""

LATER_BYTES_MAX: Final = 64 << 20
"""In order: when more than this waits for its turn, only those are asked who have what is next."""

Marks: TypeAlias = tuple[tuple[int, int, bool], ...]
"""What a consumer has done with: (portion, elements, whether that is all) each."""


class Consumed(NamedTuple):
    """What a consumer had: steps as runs, and (portion, elements) of those that it had begun."""

    done: Sequence[tuple[int, int]] = ()
    open: Sequence[tuple[int, int]] = ()


@dataclass(eq=False, slots=True)
class PortionBatch:
    """An answer. The consumer makes elements of it once, in its own thread, and keeps them here.

    Attributes:
      value: as it came; None once there are elements.
    """

    value: Any
    elements: Sequence[Any] = ()


@dataclass(eq=False, slots=True)
class PortionPiece:
    """Elements of one portion that follow each other: those from `start` to `stop` of a batch, or one error.

    Attributes:
      first: offset of the first one.
      done: the portion has no more.
      last: the place in the window that its batch has is free when the consumer has taken this piece.
    """

    batch: PortionBatch
    number: int
    first: int
    start: int
    stop: int
    done: bool
    error: OpError | None
    last: bool = False


class Consumption:
    """What a consumer has done with. The consumer and the delivery machine share it; `lock` guards what both change.

    Attributes:
      waits: the consumer has nothing to do.
      due: acknowledgments will be sent without a further event.
    """

    def __init__(self, lock: AbstractContextManager[Any], lanes: int, saved: Consumed) -> None:
        self.waits = self.due = False
        self._lock = lock
        self._lanes = lanes
        self._piece: tuple[PortionPiece, Iterator[Any], int] | None = None
        """What the consumer has in hand: its elements, and how many they were."""
        self._done: sets.Runs = []
        self._open = dict(saved.open)
        for start, stop in saved.done:
            sets.add(self._done, start, stop)
        self._marks: dict[int, tuple[int, bool]] = {}
        """What is to be acknowledged."""
        self._partial = (-1, 0)
        """What was acknowledged of the piece in hand."""

    @property
    def in_hand(self) -> bool:
        """Whether the consumer is at a piece."""
        return self._piece is not None

    def take(self, piece: PortionPiece, elements: Iterator[Any], count: int) -> None:
        """The consumer begins with a piece, and uses up these elements."""
        self._piece = piece, elements, count

    def finish(self) -> None:
        """The consumer asks for what is behind the piece in hand."""
        position = self._position()
        if position is not None:
            with self._lock:
                self._piece = None
                self._marks[position[0]] = position[1:]
            _note(self._done, self._open, self._lanes, *position)

    def forget(self) -> None:
        """In the child of a fork the piece in hand belongs to the parent."""
        self._piece = None

    def saved(self) -> Consumed:
        """Where the consumer is. In its thread."""
        done, open_ = list(self._done), dict(self._open)
        position = self._position()
        if position is not None:
            _note(done, open_, self._lanes, *position)
        return Consumed(done, sorted(open_.items()))

    def marks(self) -> Marks:
        """Take out what can be acknowledged now."""
        with self._lock:
            marks, self._marks = self._marks, {}
            position = self._position()
        if position is not None:
            partly = position[0], position[1] - 1  # not the one that the consumer may be at
            if partly[1] > 0 and partly != self._partial:
                self._partial = partly
                marks[partly[0]] = (partly[1], False)
        return tuple((number, *mark) for number, mark in marks.items())

    def put_back(self, marks: Marks) -> None:
        """They were not acknowledged."""
        with self._lock:
            for number, elements, done in marks:
                known = self._marks.get(number, (0, False))
                self._marks[number] = max(known[0], elements), known[1] or done

    def _position(self) -> tuple[int, int, bool] | None:
        """(portion, elements, whether that is all) of what was handed over of the piece in hand."""
        if self._piece is None:
            return None
        piece, iterator, count = self._piece
        if piece.error is not None:
            return piece.number, piece.first + 1, piece.done
        left = length_hint(iterator)
        return piece.number, piece.first + count - left, piece.done and not left


class ExactlyOnceDelivery:
    """See the module's docstring."""

    def __init__(
        self,
        window: TaskWindow,
        consumption: Consumption,
        lanes: int,
        first: int,
        ordered: bool,
        saved: Consumed,
    ) -> None:
        """
        Args:
          lanes: portions with one remainder by this number are of one lane, and a reader has one lane.
          first: the portion that comes first, in order.
        """
        self._window = window
        self._consumption = consumption
        self._lanes = lanes
        self._ordered = ordered
        self._next = first
        self._begun = self._finished = self._over = False
        self._arrived: dict[int, int] = dict(saved.open)
        """Of portions of which something is here, the offset that comes next; `_whole`: of which all is."""
        self._whole: sets.Runs = []
        for start, stop in saved.done:
            sets.add(self._whole, start, stop)
        self._later: dict[int, deque[PortionPiece]] = {}
        self._later_bytes: dict[int, int] = {}
        self._acknowledging = False
        self._pause_s = ACK_S
        self._acknowledge_at = inf
        self._missed: dict[int, float] = {}
        """Incarnation of a worker -> when the dispatcher is told again that an answer of it was lost."""

    @property
    def deadline(self) -> float:
        return min(self._window.deadline, self._acknowledge_at, *self._missed.values(), inf)

    def handle(self, event: Event, now: float) -> list[Effect]:
        window = self._window
        match event:
            case Answered():
                return self._answered(event, now) + self._next_requests()
            case Took():
                window.held -= 1
            case Waits():
                return self._acknowledge(now) + self._next_requests()
            case Works():
                self._acknowledge_later(now)
                return []
            case Reported(TellDispatcher(method, payload), code, message):
                if method == ACKNOWLEDGE:
                    return self._acknowledged(payload, code, message, now)
                if code in TRANSIENT:
                    self._missed[payload] = now + AGAIN_S
                return []
            case News():
                window.note(event)
                self._finished = event.finished
            case Began():
                self._begun = True
            case _:
                window.resume(now)
                return self._due(now) + self._next_requests()
        return self._next_requests()

    def standing(self) -> tuple[Any, ...]:
        return ()

    def awaited(self) -> str:
        return self._window.awaited()

    # -- what is asked ----------------------------------------------------------------------------------------------------

    def _next_requests(self) -> list[Effect]:
        if self._over:
            return []
        if self._finished:
            return self._end(None)
        if not self._begun:
            return []
        starving = self._ordered and self._consumption.waits
        effects: list[Effect] = [*self._window.questions(self._askable(), starving)]
        return effects + self._end(None) if self._window.exhausted else effects

    def _askable(self) -> list[TaskSource]:
        sources = self._window.askable()
        if not self._ordered or sum(self._later_bytes.values()) < LATER_BYTES_MAX:
            return sources
        return [each for each in sources if self._next in each.in_hand] or sources

    def _end(self, error: OpError | None) -> list[Effect]:
        self._over = True
        return [Over(error)]

    # -- what comes -------------------------------------------------------------------------------------------------------

    def _answered(self, event: Answered, now: float) -> list[Effect]:
        source, error = event.source, event.error
        source.in_flight -= 1
        if error is not None and error.error_code in RETRIABLE:
            self._window.fail(source, now)
            return [TellDispatcher(MISSED, source.incarnation)]
        if error is not None:  # the task cannot go on
            return self._end(error)
        if event.kind == SOME:
            self._window.succeed(source)
            return self._accept(source, event.value)
        self._window.held -= 1
        source.in_hand = ()
        source.ended = source.ended or event.kind == END
        return []

    def _accept(self, source: TaskSource, value: tuple[Any, ...]) -> list[Effect]:
        runs, bytes_, source.in_hand = value[2]
        batch = PortionBatch(value)
        index = 0
        pieces = []
        for number, skip, first, count, done, code, text in runs:
            stop = index if code else index + count
            offset = self._arrived.get(number, skip)
            if sets.end_of(self._whole, number // self._lanes) is None and first <= offset:
                duplicates = min(count, offset - first)
                if count > duplicates or done:
                    error = from_code(code, text) if code and count > duplicates else None
                    pieces.append(
                        PortionPiece(
                            batch, number, first + duplicates, min(stop, index + duplicates), stop, done, error
                        )
                    )
                    _note(self._whole, self._arrived, self._lanes, number, first + count, done)
            index = stop
        return self._offer(self._in_turn(pieces, bytes_) if self._ordered else pieces)

    def _in_turn(self, pieces: list[PortionPiece], bytes_: int) -> list[PortionPiece]:
        for piece in pieces:
            self._later.setdefault(piece.number, deque()).append(piece)
            self._later_bytes[piece.number] = self._later_bytes.get(piece.number, 0) + bytes_ // len(pieces)
        ready: list[PortionPiece] = []
        while self._next in self._later:
            waiting = self._later[self._next]
            ready += waiting
            waiting.clear()
            self._later_bytes[self._next] = 0
            if not ready or ready[-1].number != self._next or not ready[-1].done:
                break
            del self._later[self._next], self._later_bytes[self._next]
            self._next += self._lanes
            while (
                end := sets.end_of(self._whole, self._next // self._lanes)
            ) is not None and self._next not in self._later:
                self._next = end * self._lanes + self._next % self._lanes
        return ready

    def _offer(self, pieces: list[PortionPiece]) -> list[Effect]:
        """The answer that brought them counts as held until the consumer has taken the last of them."""
        if not pieces:
            self._window.held -= 1
            return []
        pieces[-1].last = True
        return [Deliver([*pieces])]

    # -- acknowledgments --------------------------------------------------------------------------------------------------

    def _due(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for incarnation in [incarnation for incarnation, at in self._missed.items() if at <= now]:
            del self._missed[incarnation]
            effects.append(TellDispatcher(MISSED, incarnation))
        return effects + self._acknowledge(now) if self._acknowledge_at <= now else effects

    def _acknowledge_later(self, now: float) -> None:
        self._consumption.due = True
        self._acknowledge_at = now + self._pause_s

    def _acknowledge(self, now: float) -> list[Effect]:
        """Say what the consumer has had; one such report is on its way at a time."""
        self._consumption.due = False
        self._acknowledge_at = inf
        if self._acknowledging:
            return []
        marks = self._consumption.marks()
        self._pause_s = ACK_S if marks else min(ACK_S_MAX, 2 * self._pause_s)
        if marks:
            self._acknowledging = True
            return [TellDispatcher(ACKNOWLEDGE, marks)]
        if self._consumption.in_hand:
            self._acknowledge_later(now)
        return []

    def _acknowledged(self, marks: Marks, code: int, message: str, now: float) -> list[Effect]:
        self._acknowledging = False
        if code in TRANSIENT:
            self._consumption.put_back(marks)
            self._pause_s = AGAIN_S
            self._acknowledge_later(now)
            return []
        if code:
            return self._end(from_code(code, message))
        if not self._consumption.waits:
            self._acknowledge_later(now)
            return []
        return self._acknowledge(now)


def _note(runs: sets.Runs, offsets: dict[int, int], lanes: int, number: int, elements: int, done: bool) -> None:
    """So many elements of a portion are past."""
    if done:
        offsets.pop(number, None)
        sets.add(runs, number // lanes, number // lanes + 1)
    else:
        offsets[number] = elements

"""The delivery machine of a reader of portions. It delivers each element once, in order if the user
wants that, and its state can be saved so that another reader continues from it.

Theory
    An element is identified by (portion, offset). The machine drops an element that it has already
    received. If a run of elements begins beyond the next offset of its portion, a reply was lost
    before, and the machine drops this run as well. When a request has failed, the machine reports
    to the dispatcher that the reply was lost (`missed`), so that the elements are computed again.

    The machine acknowledges an element only after the consumer has asked for the next element. An
    element is therefore not lost if the reader crashes before its consumer has finished the
    element. When the reader is closed, the runtime acknowledges all elements that the consumer has
    received. While one acknowledgment is in flight, further acknowledgments gather. A saved state
    contains the elements that the consumer has received, whether or not it has finished them.

Promises
    X1  No element is delivered twice, even if it arrives twice or is computed again.
    X2  The elements of a portion are delivered in order and without a gap. With `ordered`, the
        portions are delivered in order and without a gap too.
    X3  An element that the consumer has not finished is not acknowledged.
    X4  The machine acknowledges each element that the consumer has finished, and repeats the
        acknowledgment until the dispatcher replies.
    X5  When a reply was lost, the machine reports this to the dispatcher, so that the elements in
        the reply are computed again.
    X6  Reading ends when the dispatcher reports that all portions of the reader's lane are
        acknowledged, or with a permanent error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from math import inf
from operator import length_hint
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from zmqdist.data.service.dispatcher.machine import runs as sets
from zmqdist.data.service.reader.delivery import (
    END,
    SOME,
    ConsumerBusy,
    ConsumerStarved,
    Deliver,
    DispatcherReplied,
    Effect,
    Event,
    NotifyDispatcher,
    ReadingEnded,
    TaskReplied,
)
from zmqdist.data.service.reader.window_machine import TaskSource, TaskWindow, WindowDelivery
from zmqdist.data.service.retry import RETRIABLE, TRANSIENT
from zmqdist.errors import OpError, from_code
from zmqdist.events import Ticked

ACKNOWLEDGE: Final = "zmqdist.data.acknowledge"
MISSED: Final = "zmqdist.data.missed"

ACK_S: Final = 0.05
"""Seconds for which acknowledgments gather while the consumer takes elements."""

ACK_S_MAX: Final = 1.0
"""The longest time for which acknowledgments gather while the consumer takes no elements, in
seconds."""

AGAIN_S: Final = 0.1
"""Seconds after which the machine repeats a report to which the dispatcher did not reply."""

LATER_BYTES_MAX: Final = 64 << 20
"""With `ordered`, when this many bytes wait for an earlier portion, the machine sends requests only
to tasks that hold the next portion."""

Marks: TypeAlias = tuple[tuple[int, int, bool], ...]
"""The elements that a consumer has finished: for each portion (number of the portion, number of
elements, whether the portion is done)."""


class Consumed(NamedTuple):
    """The elements that a consumer has received.

    Attributes:
      done_runs: the complete portions of the consumer's lane, as runs (start, stop) of steps of the lane
        (records.py).
      open: (number of the portion, number of received elements) for each incomplete portion.
    """

    done_runs: Sequence[tuple[int, int]] = ()
    open: Sequence[tuple[int, int]] = ()


class PortionBatch(msgspec.Struct, eq=False):
    """The elements of one reply. The consumer unpacks `value` into `elements` once, in its own
    thread.

    Attributes:
      value: the reply as received; None once it is unpacked.
    """

    value: Any
    elements: Sequence[Any] = ()


class PortionPiece(msgspec.Struct, eq=False):
    """An item of the consumer's queue: consecutive elements of one portion, or one error in place
    of an element.

    Attributes:
      number: the number of the portion.
      first: the offset, in the portion, of the first element or of the error.
      start, stop: the elements are those at the indexes `start` to `stop` - 1 of the batch.
      completes: whether the portion ends with this piece.
      last: whether this is the last piece of its batch. Taking it frees the batch's place in the
        window.
    """

    batch: PortionBatch
    number: int
    first: int
    start: int
    stop: int
    completes: bool
    error: OpError | None
    last: bool = False


class Consumption:
    """Which elements a consumer has received, and which of these it has finished. The consumer and
    the delivery machine share this object. `lock` guards the fields that both of them change.

    Attributes:
      waits: whether the consumer waits at an empty queue.
      due: whether the machine has set a time at which it acknowledges, so that the runtime need not
        pass `ConsumerBusy`.
    """

    def __init__(self, lock: AbstractContextManager[Any], lanes: int, saved: Consumed) -> None:
        self.waits = self.due = False
        self._lock = lock
        self._lanes = lanes
        self._piece: tuple[PortionPiece, Iterator[Any], int] | None = None
        """(the piece from which the consumer takes elements, the iterator over its elements, the
        number of its elements); None between pieces."""
        self._done_runs: sets.Runs = []
        self._open = dict(saved.open)
        for start, stop in saved.done_runs:
            sets.add(self._done_runs, start, stop)
        self._marks: dict[int, tuple[int, bool]] = {}
        """Maps a portion to (finished elements, whether the portion is done), until these elements
        are acknowledged."""
        self._partial = (-1, 0)
        """The last (portion, finished elements) that `marks` returned for an unfinished piece, so
        that it does not return them again."""

    @property
    def in_hand(self) -> bool:
        """Whether the consumer has begun a piece of a portion and has not finished it."""
        return self._piece is not None

    def take(self, piece: PortionPiece, elements: Iterator[Any], count: int) -> None:
        """Record that the consumer begins a piece of a portion. It will take the piece's `count`
        elements from the iterator `elements`."""
        self._piece = piece, elements, count

    def finish(self) -> None:
        """Record that the consumer has finished its current piece."""
        position = self._position()
        if position is not None:
            with self._lock:
                self._piece = None
                self._marks[position[0]] = position[1:]
            _note(self._done_runs, self._open, self._lanes, *position)

    def forget(self) -> None:
        """Drop the current piece in a forked child process, because the piece belongs to the parent
        process."""
        self._piece = None

    def saved(self) -> Consumed:
        """Return the elements that the consumer has received so far. Call this in the consumer's
        thread."""
        done_runs, open_ = list(self._done_runs), dict(self._open)
        position = self._position()
        if position is not None:
            _note(done_runs, open_, self._lanes, *position)
        return Consumed(done_runs, sorted(open_.items()))

    def marks(self) -> Marks:
        """Remove and return the marks of finished elements that can be acknowledged now."""
        with self._lock:
            marks, self._marks = self._marks, {}
            position = self._position()
        if position is not None:
            # Promise X3: leave out the last element that the consumer took, because the consumer
            # may still use it.
            partly = position[0], position[1] - 1
            if partly[1] > 0 and partly != self._partial:
                self._partial = partly
                marks[partly[0]] = (partly[1], False)
        return tuple((number, *mark) for number, mark in marks.items())

    def put_back(self, marks: Marks) -> None:
        """Put back marks of finished elements that the dispatcher has not confirmed, so that
        `marks` returns them again."""
        with self._lock:
            for number, elements, is_complete in marks:
                mark = self._marks.get(number, (0, False))
                self._marks[number] = max(mark[0], elements), mark[1] or is_complete

    def _position(self) -> tuple[int, int, bool] | None:
        """Return the position of the consumer in its current piece: (portion, offset after the last
        element that the consumer took, whether the portion is done). Return None between two
        pieces.
        """
        if self._piece is None:
            return None
        piece, iterator, count = self._piece
        if piece.error is not None:
            return piece.number, piece.first + 1, piece.completes
        left = length_hint(iterator)
        return piece.number, piece.first + count - left, piece.completes and not left


class ExactlyOnceDelivery(WindowDelivery):
    """The delivery machine of a reader of portions. The docstring of the module says how it
    decides."""

    def __init__(
        self,
        window: TaskWindow,
        consumption: Consumption,
        lanes: int,
        first: int,
        ordered: bool,
        saved: Consumed,
    ) -> None:
        """Start without tasks. The event `News` adds them.

        Args:
          window: decides which tasks get requests.
          lanes: number of lanes. Portions whose numbers have the same remainder modulo `lanes` form
            a lane.
          first: with `ordered`, the number of the first portion that this reader delivers.
          saved: from a saved state, the elements that the consumer has received before.
        """
        super().__init__(window)
        self._consumption = consumption
        self._lanes = lanes
        self._ordered = ordered
        self._next = first
        self._arrived: dict[int, int] = dict(saved.open)
        """Maps each portion that has arrived in part to the offset of its next element. `_whole`
        has the steps of portions that have arrived completely."""
        self._whole: sets.Runs = []
        for start, stop in saved.done_runs:
            sets.add(self._whole, start, stop)
        self._later: dict[int, deque[PortionPiece]] = {}
        self._later_bytes: dict[int, int] = {}
        self._acknowledging = False
        self._pause_s = ACK_S
        self._acknowledge_at = inf
        self._missed: dict[int, float] = {}
        """Maps an incarnation of a worker to the time at which the machine reports again that one
        of the worker's replies was lost."""

    @property
    def deadline(self) -> float:
        return min(self._window.deadline, self._acknowledge_at, *self._missed.values(), inf)

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case TaskReplied():
                return self._answered(event, now) + self._next_requests()
            case ConsumerStarved():
                return self._acknowledge(now) + self._next_requests()
            case ConsumerBusy():
                self._acknowledge_later(now)
                return []
            case DispatcherReplied(NotifyDispatcher(method, payload), code, message):
                if method == ACKNOWLEDGE:
                    return self._acknowledged(payload, code, message, now)
                if code in TRANSIENT:
                    self._missed[payload] = now + AGAIN_S
                return []
            case Ticked():
                self._note(event, now)
                return self._due(now) + self._next_requests()
            case _:
                self._note(event, now)
                return self._next_requests()

    # -- requests ----------------------------------------------------------------------------------

    def _next_requests(self) -> list[Effect]:
        if self._over:
            return []
        if self._finished:
            return self._end(None)
        if not self._is_consuming:
            return []
        # the next portion in order may be at a task that the full window would leave out
        starving = self._ordered and self._consumption.waits
        effects: list[Effect] = [*self._window.requests(self._available(), starving)]
        return effects + self._end(None) if self._window.exhausted else effects

    def _available(self) -> list[TaskSource]:
        sources = self._window.available()
        if not self._ordered or sum(self._later_bytes.values()) < LATER_BYTES_MAX:
            return sources
        # Enough elements of later portions wait here already, so send requests only to the tasks
        # that have the next portion.
        return [source for source in sources if self._next in source.in_hand] or sources

    def _end(self, error: OpError | None) -> list[Effect]:
        self._over = True
        return [ReadingEnded(error)]

    # -- replies -----------------------------------------------------------------------------------

    def _answered(self, event: TaskReplied, now: float) -> list[Effect]:
        source, error = event.source, event.error
        source.in_flight -= 1
        if error is not None and error.error_code in RETRIABLE:
            self._window.fail(source, now)
            # Promise X5: the lost reply may have had elements, which must be computed again.
            return [NotifyDispatcher(MISSED, source.incarnation)]
        if error is not None:  # end the reading, because the error is permanent
            return self._end(error)
        if event.kind == SOME:
            self._window.succeed(source)
            return self._accept(source, event.value)
        self._window.outstanding -= 1
        source.in_hand = ()
        source.exhausted = source.exhausted or event.kind == END
        return []

    def _accept(self, source: TaskSource, value: tuple[Any, ...]) -> list[Effect]:
        runs, bytes_, source.in_hand = value[2]
        batch = PortionBatch(value)
        index = 0
        pieces = []
        for number, skip, first, count, is_complete, code, text in runs:
            stop = index if code else index + count
            offset = self._arrived.get(number, skip)
            # A run is a sequence of consecutive elements of one portion. Promises X1 and X2: skip
            # the run if its portion is already complete, or if elements before the run are missing.
            # Otherwise drop only those elements of the run that have arrived before.
            if sets.end_of(self._whole, number // self._lanes) is None and first <= offset:
                duplicates = min(count, offset - first)
                if count > duplicates or is_complete:
                    error = from_code(code, text) if code and count > duplicates else None
                    pieces.append(
                        PortionPiece(
                            batch,
                            number,
                            first + duplicates,
                            min(stop, index + duplicates),
                            stop,
                            is_complete,
                            error,
                        )
                    )
                    _note(
                        self._whole, self._arrived, self._lanes, number, first + count, is_complete
                    )
            index = stop
        return self._offer(self._in_turn(pieces, bytes_) if self._ordered else pieces)

    def _in_turn(self, pieces: list[PortionPiece], bytes_: int) -> list[PortionPiece]:
        """Return the pieces that are next in order, and keep the other pieces until the portions
        before them are complete."""
        for piece in pieces:
            self._later.setdefault(piece.number, deque()).append(piece)
            self._later_bytes[piece.number] = self._later_bytes.get(
                piece.number, 0
            ) + bytes_ // len(pieces)
        ready: list[PortionPiece] = []
        while self._next in self._later:
            waiting = self._later[self._next]
            ready += waiting
            waiting.clear()
            self._later_bytes[self._next] = 0
            if not ready or ready[-1].number != self._next or not ready[-1].completes:
                break
            del self._later[self._next], self._later_bytes[self._next]
            self._next += self._lanes
            while (
                end := sets.end_of(self._whole, self._next // self._lanes)
            ) is not None and self._next not in self._later:
                self._next = end * self._lanes + self._next % self._lanes
        return ready

    def _offer(self, pieces: list[PortionPiece]) -> list[Effect]:
        """Return the effect that delivers the pieces that became ready because of a reply. The
        reply counts as held in the window until the consumer has taken the last of these pieces.
        """
        if not pieces:
            self._window.outstanding -= 1
            return []
        pieces[-1].last = True
        return [Deliver([*pieces])]

    # -- acknowledgments ---------------------------------------------------------------------------

    def _due(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for incarnation in [incarnation for incarnation, at in self._missed.items() if at <= now]:
            del self._missed[incarnation]
            effects.append(NotifyDispatcher(MISSED, incarnation))
        return effects + self._acknowledge(now) if self._acknowledge_at <= now else effects

    def _acknowledge_later(self, now: float) -> None:
        self._consumption.due = True
        self._acknowledge_at = now + self._pause_s

    def _acknowledge(self, now: float) -> list[Effect]:
        """Send the dispatcher an acknowledgment of the elements that the consumer has finished,
        unless an acknowledgment is in flight."""
        self._consumption.due = False
        self._acknowledge_at = inf
        if self._acknowledging:
            return []
        marks = self._consumption.marks()
        self._pause_s = ACK_S if marks else min(ACK_S_MAX, 2 * self._pause_s)
        if marks:
            self._acknowledging = True
            return [NotifyDispatcher(ACKNOWLEDGE, marks)]
        if self._consumption.in_hand:
            self._acknowledge_later(now)
        return []

    def _acknowledged(self, marks: Marks, code: int, message: str, now: float) -> list[Effect]:
        self._acknowledging = False
        if code in TRANSIENT:  # promise X4: acknowledge these elements again later
            self._consumption.put_back(marks)
            self._pause_s = AGAIN_S
            self._acknowledge_later(now)
            return []
        if code:
            return self._end(from_code(code, message))
        # gather acknowledgments while the consumer is busy
        if not self._consumption.waits:
            self._acknowledge_later(now)
            return []
        return self._acknowledge(now)


def _note(
    runs: sets.Runs,
    offsets: dict[int, int],
    lanes: int,
    number: int,
    elements: int,
    is_complete: bool,
) -> None:
    """Record how much of a portion has arrived, or was finished by the consumer. `offsets` gets the
    number of elements, counted from the beginning of the portion. If the portion is done, `runs`
    gets its step instead.
    """
    if is_complete:
        offsets.pop(number, None)
        sets.add(runs, number // lanes, number // lanes + 1)
    else:
        offsets[number] = elements

"""Reading in portions: each element once, in order if that is wanted, and a state from which another reader goes on.

Theory
    What comes is known by (portion, offset). What is behind an offset that is here already is dropped; what is before it cannot be, except
    after a lost answer: that is dropped, too, and computed again (`missed`). In order, what has come waits here until it is its turn.

    An element is acknowledged when the consumer asks for the one after it, and when the reader is closed: so one that dies before it
    has done with an element does not lose it. Acknowledgements gather while one is on its way. A state counts what was handed over.

    The end is when the dispatcher has all acknowledged.

States
    {"version", "dispatcher", "iteration", "client", "cut", "lanes", "done": steps as runs, "open": [(portion, elements)]}, JSON.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from operator import length_hint
from typing import Any, Final

from zmqdist.data.iterators import Openings
from zmqdist.data.service.dealing import PATIENT, RETRIABLE
from zmqdist.data.service.elements import check_spec
from zmqdist.data.service.machine import runs as sets
from zmqdist.data.service.reading import Reader, TaskSource, Wish
from zmqdist.data.service.remote_reply import SOME
from zmqdist.data.service.sources import open_batch
from zmqdist.data.structure import invalid
from zmqdist.errors import ABORTED, OpError, from_code
from zmqdist.rpc import asking
from zmqdist.rpc.result import StatusOrResult
from zmqdist.transport.credentials import Credentials

STATE_VERSION: Final = 1

ACKNOWLEDGE: Final = "zmqdist.data.acknowledge"
MISSED: Final = "zmqdist.data.missed"

ACK_S: Final = 0.05
"""Acknowledgements gather for so long while the consumer has something to do;"""

ACK_S_MAX: Final = 1.0
"""for longer while it takes nothing."""

AGAIN_S: Final = 0.1
"""After a question that the dispatcher did not answer."""

LATER_BYTES_MAX: Final = 64 << 20
"""In order: when more than this waits for its turn, only those are asked who have what is next."""


def saved_of(state: dict[str, Any]) -> tuple[Any, ...]:
    """A state as a question to the dispatcher. Raises InvalidArgumentError for what is none."""
    try:
        if state["version"] != STATE_VERSION:
            raise invalid(f"a state of version {state['version']} of a reader, this is version {STATE_VERSION}")
        ends = (tuple(tuple(map(int, each)) for each in state[name]) for name in ("done", "open"))
        numbers = (int(state[name]) for name in ("dispatcher", "iteration", "client"))
        return (*numbers, tuple(map(int, state["cut"])), int(state["lanes"]), *ends)
    except (KeyError, TypeError, ValueError) as error:
        raise invalid(f"not the state of a reader in portions: {error!r}") from error


class _Batch:
    """An answer: its elements are made of it once, by the consumer."""

    def __init__(self, value: tuple[Any, ...], spec: Any) -> None:
        self._value: tuple[Any, ...] | None = value
        self._spec = spec
        self._elements: list[Any] = []

    def elements(self) -> list[Any]:
        if self._value is not None:
            elements = open_batch(self._value)
            check_spec(elements, self._spec)
            self._elements, self._value = elements, None
        return self._elements


class _Piece:
    """Elements of one portion that follow each other: those from `start` to `stop` of a batch, or one error.

    Attributes:
      first: offset of the first one.
      done: the portion has no more.
      last: of its batch.
    """

    __slots__ = ("batch", "done", "error", "first", "last", "number", "start", "stop")

    def __init__(
        self, batch: _Batch, number: int, first: int, start: int, stop: int, done: bool, error: OpError | None
    ) -> None:
        self.batch, self.number, self.first = batch, number, first
        self.start, self.stop, self.done, self.error = start, stop, done, error
        self.last = False


class PortionsReader(Reader):
    """See the module's docstring."""

    def __init__(self, wish: Wish, credentials: Credentials, openings: Openings) -> None:
        self._piece: tuple[_Piece, Iterator[Any], int] | None = None
        """What the consumer has in hand: its elements, and how many they were."""
        self._done: sets.Runs = []
        """Steps that the consumer has had."""
        self._open: dict[int, int] = {}
        """Of portions that it has begun, the elements that it has had."""
        self._marks: dict[int, tuple[int, bool]] = {}
        """What is to be acknowledged."""
        self._acknowledging = False
        self._ack_due = False
        self._arrived: dict[int, int] = {}
        """Of portions of which something is here, the offset that comes next; `_whole`: of which all is."""
        self._whole: sets.Runs = []
        self._lanes = max(1, wish.terms.num_consumers)
        self._ordered = wish.terms.ordered
        self._later: dict[int, deque[_Piece]] = {}
        self._later_bytes: dict[int, int] = {}
        self._in_hand: dict[int, tuple[int, ...]] = {}
        """Task -> portions that it had when it answered last."""
        if wish.saved is not None:
            *_, done, open_ = wish.saved
            for start, stop in done:
                sets.add(self._done, start, stop)
                sets.add(self._whole, start, stop)
            self._open, self._arrived = dict(open_), dict(open_)
        self._next = -1
        """In order: the portion that is next."""
        self._partial = (-1, 0)
        """What was acknowledged of the piece in hand."""
        self._pause_s = ACK_S
        super().__init__(wish, credentials, openings)

    def _watch(self) -> None:
        if self._next < 0:
            self._next = self._cut[3]
        super()._watch()

    # -- the consumer -------------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[Iterator[Any]]:
        """The elements: as iterators that are to be used up, one after the other. Raises as `batches`."""
        self._soon(self._begin)
        while True:
            self._have_had()
            if not self._queue:
                self._soon(self._acknowledge)
            piece: _Piece | None = self._take()
            if piece is None:
                return
            elements: list[Any] = []
            if piece.error is None:
                try:
                    elements = piece.batch.elements()
                except OpError as error:  # it is not acknowledged, and comes no other way
                    self._end(error)
                    raise
                if (piece.start, piece.stop) != (0, len(elements)):
                    elements = elements[piece.start : piece.stop]
            iterator, self._given = iter(elements), elements
            self._piece = piece, iterator, len(elements)
            if piece.last:
                self._soon(self._taken)
            if not self._ack_due:
                self._ack_due = True
                self._soon(self._acknowledge_later)
            if piece.error is not None:
                self._have_had()
                raise piece.error
            yield iterator

    def forked(self) -> None:
        super().forked()
        self._piece = None

    def _position(self) -> tuple[int, int, bool] | None:
        """(portion, elements, whether that is all) of what was handed over of the piece in hand."""
        if self._piece is None:
            return None
        piece, iterator, count = self._piece
        if piece.error is not None:
            return piece.number, piece.first + 1, piece.done
        left = length_hint(iterator)
        return piece.number, piece.first + count - left, piece.done and not left

    def _have_had(self) -> None:
        """The consumer asks for what is behind the piece in hand."""
        position = self._position()
        if position is not None:
            with self._ready:
                self._piece = None
                self._marks[position[0]] = position[1:]
            _note(self._done, self._open, self._lanes, *position)

    def state(self) -> dict[str, Any]:
        """Where the consumer is. In its thread."""
        assert self._opened is not None
        done, open_ = list(self._done), dict(self._open)
        position = self._position()
        if position is not None:
            _note(done, open_, self._lanes, *position)
        return {
            "version": STATE_VERSION,
            "dispatcher": self._opened[0],
            "iteration": self.iteration,
            "client": self._opened[1],
            "cut": list(self._cut[:3]),
            "lanes": self._lanes,
            "done": [list(run) for run in done],
            "open": sorted(map(list, open_.items())),
        }

    # -- in the loop: acknowledgements ------------------------------------------------------------------------------------------

    def _acknowledge_later(self) -> None:
        self._ack_due = True
        self._loop.set_timer("acknowledge", self._loop.now() + self._pause_s, self._acknowledge)

    def _acknowledge(self) -> None:
        """Say what the consumer has had; one such call is on its way at a time."""
        self._ack_due = False
        if self._acknowledging or self._opened is None:
            return
        marks = self._ripe()
        self._pause_s = ACK_S if marks else min(ACK_S_MAX, 2 * self._pause_s)
        if marks:
            self._acknowledging = True
            self._start(self._dispatcher, partial(self._acknowledged, marks), ACKNOWLEDGE, *self._opened, marks)
        elif self._piece is not None:
            self._acknowledge_later()

    def _ripe(self) -> tuple[tuple[int, int, bool], ...]:
        with self._ready:
            marks, self._marks = self._marks, {}
            position = self._position()
        if position is not None:
            partly = position[0], position[1] - 1  # not the one that the consumer may be at
            if partly[1] > 0 and partly != self._partial:
                self._partial = partly
                marks[partly[0]] = (partly[1], False)
        return tuple((number, *mark) for number, mark in marks.items())

    def _acknowledged(self, marks: tuple[tuple[int, int, bool], ...], call: StatusOrResult) -> None:
        self._acknowledging = False
        code, message = call.get_error()
        if code in PATIENT and code != ABORTED:
            with self._ready:
                for number, elements, done in marks:
                    known = self._marks.get(number, (0, False))
                    self._marks[number] = max(known[0], elements), known[1] or done
            self._pause_s = AGAIN_S
            self._trouble = f": {message}"
            self._acknowledge_later()
            return
        self._trouble = ""
        if code:
            self._end(from_code(code, message))
        elif self._queue:
            self._acknowledge_later()
        else:
            self._acknowledge()

    def _leave(self) -> None:
        """Closing says: I have had what I was given."""
        assert self._opened is not None
        self._have_had()
        if self._marks:
            marks = tuple((number, *mark) for number, mark in self._marks.items())
            asking.start(self._dispatcher, ACKNOWLEDGE, *self._opened, marks, waits_for_server=False)

    # -- in the loop: what comes --------------------------------------------------------------------------------------------------

    def _top_up(self) -> None:
        if self._finished:
            self._end(None)
        super()._top_up()

    def _may_ask(self, source: TaskSource) -> bool:
        if not super()._may_ask(source):
            return False
        if not self._ordered or sum(self._later_bytes.values()) < LATER_BYTES_MAX:
            return True
        having = {each.task for each in self._sources.values() if super(PortionsReader, self)._may_ask(each)}
        having = {task for task in having if self._next in self._in_hand.get(task, ())}
        return source.task in having or not having

    def _answered(self, source: TaskSource, kind: int, value: Any, error: OpError | None) -> None:
        if error is not None and error.error_code in RETRIABLE:
            self._missed(source.life)
        if kind != SOME and (error is None or error.error_code in RETRIABLE):
            super()._answered(source, kind, value, error)
            return
        source.asked -= 1
        if error is not None:
            self._end(error)  # the task cannot go on
            return
        source.pause_s = 0.0
        self._accept(source, value)
        self._top_up()

    def _missed(self, life: int) -> None:
        """An answer was lost: what was in it must be computed again."""
        assert self._opened is not None

        def then(call: StatusOrResult) -> None:
            code, _ = call.get_error()
            if code in PATIENT and code != ABORTED:
                self._loop.set_timer(("missed", life), self._loop.now() + AGAIN_S, partial(self._missed, life))

        self._start(self._dispatcher, then, MISSED, *self._opened, life)

    def _accept(self, source: TaskSource, value: tuple[Any, ...]) -> None:
        runs, bytes_, self._in_hand[source.task] = value[2]
        batch = _Batch(value, self._wish.spec)
        place = 0
        pieces = []
        for number, skip, first, count, done, code, text in runs:
            stop = place if code else place + count
            offset = self._arrived.get(number, skip)
            if sets.end_of(self._whole, number // self._lanes) is None and first <= offset:
                had = min(count, offset - first)
                if count > had or done:
                    error = from_code(code, text) if code and count > had else None
                    pieces.append(_Piece(batch, number, first + had, min(stop, place + had), stop, done, error))
                    _note(self._whole, self._arrived, self._lanes, number, first + count, done)
            place = stop
        if self._ordered:
            self._in_turn(pieces, bytes_)
        else:
            self._offer(pieces)

    def _in_turn(self, pieces: list[_Piece], bytes_: int) -> None:
        for piece in pieces:
            self._later.setdefault(piece.number, deque()).append(piece)
            self._later_bytes[piece.number] = self._later_bytes.get(piece.number, 0) + bytes_ // len(pieces)
        ready = []
        while self._next in self._later:
            waiting = self._later[self._next]
            while waiting:
                ready.append(waiting.popleft())
            self._later_bytes[self._next] = 0
            if not ready or ready[-1].number != self._next or not ready[-1].done:
                break
            del self._later[self._next], self._later_bytes[self._next]
            self._next += self._lanes
            while (
                end := sets.end_of(self._whole, self._next // self._lanes)
            ) is not None and self._next not in self._later:
                self._next = end * self._lanes + self._next % self._lanes
        self._offer(ready)

    def _offer(self, pieces: list[_Piece]) -> None:
        """Give them to the consumer. The answer that brought them counts as held until it has taken the last of them."""
        if not pieces:
            self._held -= 1
            return
        pieces[-1].last = True
        with self._ready:
            self._queue.extend(pieces)
            self._ready.notify_all()


def _note(runs: sets.Runs, offsets: dict[int, int], lanes: int, number: int, elements: int, done: bool) -> None:
    """So many elements of a portion are past."""
    if done:
        offsets.pop(number, None)
        sets.add(runs, number // lanes, number // lanes + 1)
    else:
        offsets[number] = elements

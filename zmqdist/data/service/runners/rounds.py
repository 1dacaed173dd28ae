"""A task that its consumers read in step: of each group of consecutive elements, consumer i gets the i-th.

Rules
    A round is served when all consumers have asked for it and the pipeline has the next group; when that does not come about within the
    time that one of them waits, all skip the round. The group stays for the next round, so that skipping loses nothing. A consumer
    that comes later is told how many rounds were skipped without it.
    An answer has as many rounds as there are groups, the same number for all. The thread makes groups ahead.
    After a restart of the task some may have a round that others have not: these get theirs as soon as all have asked for something,
    unless those ahead say that it was skipped.
    The same question again, after a lost answer, has the same answer.
    One question of each consumer waits. A newer one takes its place, and the older one is answered with an error: ABORTED when the same
    reader asks again, FAILED_PRECONDITION when another reader asks as the same consumer.
    An error of the pipeline, or its end, is the answer to this and every later question.

Tags: (next round of this consumer, the last round that all consumers have received). To ask for a round is to have received all before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service.delivery.interface import Wanted
from zmqdist.data.service.elements import weigh
from zmqdist.data.service.runners.base import ElementReply, Named
from zmqdist.errors import AbortedError, CancelledError, FailedPreconditionError, OpError

GROUPS_MAX: Final = 64
GROUPS_BYTES: Final = 16 << 20
"""So many groups are made ahead, at least one."""


@dataclass(slots=True)
class _Served:
    """The last answer of a consumer; no elements: skipped."""

    reader: int
    round: int
    next: int
    elements: list[Any] | None


class RoundsRunner:
    """See the module's docstring."""

    def __init__(self, name: str, open: Callable[[], DatasetIterator], named: Named, consumers: int) -> None:
        """`open` is called in the thread; `named`: see base.py."""
        self._open = open
        self._named = named
        self._made = 0
        self._consumers = consumers
        self._groups: deque[list[Any]] = deque()
        self._group_bytes = 1
        self._round: int | None = None
        """The next one that is served or skipped; None before the first."""
        self._waiting: dict[int, tuple[Wanted, ElementReply]] = {}
        self._asked: dict[int, int] = {}
        self._served: dict[int, _Served] = {}
        self._error: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name=f"zmqdist-task-{name}", daemon=True)

    def ask(self, wanted: Wanted, reply: ElementReply) -> None:
        with self._lock:
            if not self._thread.ident:
                self._thread.start()
            answer = self._note(wanted, reply)
        if answer is not None:
            answer()
        self._serve()

    def _note(self, wanted: Wanted, reply: ElementReply) -> Callable[[], None] | None:
        """Have a question wait. Return what can be answered at once: it, or the older question whose place it takes. With the lock."""
        consumer, asked = wanted.consumer, wanted.round
        if not 0 <= consumer < self._consumers:
            text = f"Requesting data for consumer index {consumer}, but the task has only {self._consumers} consumers"
            return partial(reply.fail, FailedPreconditionError(text))
        before = self._served.get(consumer)
        if before is not None and asked < before.next:
            if (before.reader, before.round) == (wanted.reader, asked):
                return partial(_give, reply, before.elements, (before.next, self._received_by_all()))
            return partial(reply.fail, FailedPreconditionError(restarted(consumer, asked, before.next)))
        self._asked[consumer] = asked
        if self._round is not None and asked < self._round:
            return self._skip(wanted, reply, self._round)
        replaced = self._waiting.get(consumer)
        self._waiting[consumer] = wanted, reply
        return None if replaced is None else partial(replaced[1].fail, displaced(replaced[0], wanted))

    def _received_by_all(self) -> int:
        return min(self._asked.values()) - 1 if len(self._asked) == self._consumers else -1

    def _skip(self, wanted: Wanted, reply: ElementReply, then: int) -> Callable[[], None]:
        self._served[wanted.consumer] = _Served(wanted.reader, wanted.round, then, None)
        return partial(_give, reply, None, (then, self._received_by_all()))

    def figures(self) -> tuple[Any, ...]:
        """The fields of a Report (machine/figures.py), from the weight of the last group; how long an element takes is not known."""
        with self._lock:
            groups = len(self._groups)
            taken = self._made - groups * self._consumers
            nbytes = taken * self._group_bytes // self._consumers
            return taken, nbytes, groups * self._consumers, self._groups_max() * self._consumers, 0.0

    def expire(self, reply: ElementReply) -> None:
        """The round that this question is for does not come about: all skip it."""
        answers = []
        with self._lock:
            late = next((wanted for wanted, each in self._waiting.values() if each is reply), None)
            if late is None:
                return
            for consumer, (wanted, each) in list(self._waiting.items()):
                if wanted.round <= late.round:
                    del self._waiting[consumer]
                    answers.append(self._skip(wanted, each, late.round + 1))
            self._round = max(self._round or 0, late.round + 1)
        for answer in answers:
            answer()
        self._serve()

    def close(self) -> None:
        self._end(CancelledError("the task was stopped"))

    # -- the thread ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._open() as iterator:
                while not self._closed:
                    group = self._next_group(iterator)
                    if len(group) < self._consumers:
                        raise FailedPreconditionError(ENDED)
                    self._add(group)
        except BaseException as error:
            self._end(error)

    def _next_group(self, iterator: DatasetIterator) -> list[Any]:
        group: list[Any] = []
        try:
            group.extend(islice(iterator, self._consumers))
        except BaseException as error:
            raise self._named(error, f"element {self._made + len(group)}") from None
        return group

    def _add(self, group: list[Any]) -> None:
        """Have a group served, and wait until there is room for another."""
        with self._lock:
            self._groups.append(group)
            self._made += len(group)
            self._group_bytes = max(1, sum(map(weigh, group)))
            reply = next((each for _, each in self._waiting.values()), None)
        if reply is not None:
            reply.soon(self._serve)
        with self._lock:
            while len(self._groups) >= self._groups_max() and not self._closed:
                self._room.wait()

    def _groups_max(self) -> int:
        """How many groups may be made ahead. With the lock."""
        return min(GROUPS_MAX, max(1, GROUPS_BYTES // self._group_bytes))

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            self._closed = True
            self._room.notify_all()
        self._serve()

    # -- answers, in any thread ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._lock:
                for consumer in [each for each, (_, reply) in self._waiting.items() if not reply.wanted()]:
                    del self._waiting[consumer]
                answers = self._next_answers()
            if not answers:
                return
            for answer in answers:
                answer()

    def _next_answers(self) -> list[Callable[[], None]]:
        """Of one round, or of some together; none when the time has not come. With the lock."""
        answers: list[Callable[[], None]]
        if self._error is not None and (not self._groups or type(self._error) is CancelledError):
            answers = [partial(reply.fail, self._error) for _, reply in self._waiting.values()]
            self._waiting.clear()
            return answers
        if len(self._waiting) < self._consumers:
            return []
        first = min(wanted.round for wanted, _ in self._waiting.values())
        ahead = [wanted for wanted, _ in self._waiting.values() if wanted.round > first]
        here = {consumer: each for consumer, each in self._waiting.items() if each[0].round == first}
        if any(wanted.skipped for wanted in ahead):
            count = 1
            answers = [self._skip(*each, first + 1) for each in here.values()]
        elif self._groups:
            count = 1 if ahead else self._count(here)
            groups = [self._groups.popleft() for _ in range(count)]
            self._room.notify()
            answers = [self._part(*each, groups) for each in here.values()]
        else:
            return []
        self._round = first + count
        for consumer in here:
            del self._waiting[consumer]
        return answers

    def _count(self, here: dict[int, tuple[Wanted, ElementReply]]) -> int:
        """How many rounds fit into one answer for each."""
        wishes = [wanted for wanted, _ in here.values()]
        fits = min(each.bytes_max for each in wishes) * self._consumers // self._group_bytes
        return max(1, min(len(self._groups), fits, *(each.elements_max for each in wishes)))

    def _part(self, wanted: Wanted, reply: ElementReply, groups: list[list[Any]]) -> Callable[[], None]:
        elements = [group[wanted.consumer] for group in groups]
        then = wanted.round + len(elements)
        self._served[wanted.consumer] = _Served(wanted.reader, wanted.round, then, elements)
        return partial(_give, reply, elements, (then, self._received_by_all()))


ENDED: Final = (
    "Encountered end of sequence on a round-robin read iterator. Please ensure that the dataset used for round-robin "
    "reading has infinite cardinality."
)


def require_infinite(cardinality: int) -> None:
    """Raises FailedPreconditionError for a pipeline that is known to end."""
    if cardinality >= 0:
        raise FailedPreconditionError(
            "Round robin reads require that the input dataset has infinite cardinality, but the dataset has cardinality "
            f"{cardinality}. Consider adding `.repeat()`",
        )


def restarted(consumer: int, asked: int, reached: int) -> str:
    """What a consumer is told that begins again while the others go on."""
    return (
        f"Consumer {consumer} requested data for round {asked}, but the current round has already reached {reached}. "
        "This may indicate that the consumer was restarted with the same job name."
    )


def displaced(older: Wanted, newer: Wanted) -> OpError:
    """What a question is answered with that waited when its consumer asked another one."""
    consumer = older.consumer
    if older.reader == newer.reader:
        text = f"the question of consumer {consumer} for round {newer.round} took the place of this one for round {older.round}"
        return AbortedError(text)
    text = (
        f"Another reader (client {newer.reader}) asks as consumer {consumer} for round {newer.round}, while this one (client "
        f"{older.reader}) waited for round {older.round}. This may indicate that two readers have the same consumer_index, or that the "
        "consumer was restarted with the same job name."
    )
    return FailedPreconditionError(text)


def _give(reply: ElementReply, elements: list[Any] | None, tag: tuple[int, int]) -> None:
    if elements is None:
        reply.skip(tag)
    else:
        reply.elements(elements, tag)

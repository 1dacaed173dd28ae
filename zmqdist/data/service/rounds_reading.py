"""What stands behind the iterator of one consumer of a coordinated read.

Theory
    A consumer reads the tasks in turn: each round all tasks that are in it, by their numbers. Each task is asked on its own, ahead of
    the turn; what it answers for a round waits until its turn comes. So the k-th element of every consumer is of the same group.

    An element is shown when it is known that all consumers have received their part of its group: with the answer to the next
    question, which came about because all asked it. Until then it is kept, and dropped when the task ends before its round. So
    all consumers show the same rounds of a task, even when its worker is killed while it answers them.

    Where this consumer stands is told to the dispatcher, and kept to, as data/service/machine/rounds.py says.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Final

from zmqdist.data.iterators import Openings
from zmqdist.data.service.dealing import FIRST_PAUSE_S, PAUSE_GROWS, RETRIABLE
from zmqdist.data.service.elements import check_spec
from zmqdist.data.service.reading import BATCH_BYTES, PAUSE_S_MAX, RELEASE, Reader, Wish
from zmqdist.data.service.remote_reply import SOME
from zmqdist.data.service.runners.base import Wanted
from zmqdist.data.service.sources import LocalSource, RemoteSource, open_batch
from zmqdist.errors import OpError
from zmqdist.transport.address import split_key
from zmqdist.transport.credentials import Credentials

SKIP_S: Final = 0.1
"""A round that does not come about is skipped by all after so long."""

ROUNDS_MAX: Final = 64
"""Rounds in one answer, and elements that wait for the user."""


@dataclass(eq=False)
class _Task:
    """One task, as this consumer sees it.

    Attributes:
      start, end: it is in the rounds from `start` on, before `end`.
      next: the first round that was not received.
      received: (round, element) of what was not shown yet; a round that is not there was skipped.
      common: the last round that all consumers are known to have received.
      there: the dispatcher says that its worker is there.
      lost: it does not answer; not to be asked before the dispatcher has said what becomes of it.
    """

    number: int
    start: int
    next: int
    end: float = inf
    received: deque[tuple[int, Any]] = field(default_factory=deque)
    common: int = -1
    at: LocalSource | RemoteSource | None = None
    where: str = ""
    """Its address, with the key of its worker."""
    there: bool = False
    asked: bool = False
    skipped: bool = False
    lost: bool = False
    pausing: bool = False
    pause_s: float = 0.0
    error: OpError | None = None


class RoundsReader(Reader):
    """See the module's docstring."""

    def __init__(self, wish: Wish, credentials: Credentials, openings: Openings) -> None:
        self._tasks: dict[int, _Task] = {}
        self._round = 0
        self._shown = -1
        """The last task whose turn in this round is over."""
        self._stop = -1
        """The round that is not to be begun; -1: none."""
        self._told: tuple[Any, ...] = (-1, {})
        self._limit = ROUNDS_MAX if wish.max_outstanding < 0 else wish.max_outstanding
        super().__init__(wish, credentials, openings)

    # -- what the dispatcher is told, and tells -------------------------------------------------------------------------------

    def _standing(self) -> tuple[Any, ...]:
        self._told = (self._stop, {each.number: each.next for each in self._tasks.values() if each.lost})
        return self._told

    def _tell(self) -> None:
        """Ask again where there is something to tell."""
        told = self._told
        if self._standing() != told:
            self._watch()

    def _note(self, tasks: list[tuple[Any, ...]], hold: bool, ended: dict[int, int]) -> None:
        for number, end in ended.items():
            if number in self._tasks:
                self._end_of(self._tasks[number], end)
        for number, _worker, where, life, _tags, start in tasks:
            task = self._tasks.setdefault(number, _Task(number, start, start))
            task.there = life >= 0
            task.pausing = task.pausing and task.there  # ask what cannot answer: its failure says so
            if task.there and where:
                task.lost = False
                if task.where != where:
                    task.where, task.at = where, self._at(number, where, life)
            elif not task.there and task.at is None:
                task.lost = True
        if not hold:
            self._stop = -1
        elif self._stop < 0:
            self._stop = self._round + 1
        self._show()

    def _end_of(self, task: _Task, end: int) -> None:
        task.end, task.lost = end, False
        while task.received and task.received[-1][0] >= end:
            task.received.pop()
        task.common = task.next
        if end <= self._round:
            del self._tasks[task.number]

    # -- elements -------------------------------------------------------------------------------------------------------------

    def _top_up(self) -> None:
        if self._over:
            return
        if self._finished:
            self._end(None)
            return
        full = sum(map(len, list(self._queue))) >= self._limit
        for task in list(self._tasks.values()):
            if task.asked or task.lost or task.pausing or task.at is None or task.error or task.next >= task.end:
                continue
            near = task.common < self._round or task.next - self._round < ROUNDS_MAX
            if (near and not full) or not task.there:
                self._ask_for_round(task)
        self._tell()

    def _ask_for_round(self, task: _Task) -> None:
        assert self._opened is not None
        assert task.at is not None
        task.asked = True
        wanted = Wanted(
            min(ROUNDS_MAX, self._limit),
            BATCH_BYTES,
            SKIP_S,
            self._opened[1],
            self._wish.consumer_index,
            task.next,
            task.skipped,
        )
        task.at.ask(wanted, partial(self._soon, self._answered_for_round, task))

    def _answered_for_round(self, task: _Task, kind: int, value: Any, error: OpError | None) -> None:
        task.asked = False
        if error is None:
            try:
                self._receive(task, kind, value)
            except OpError as problem:
                error = problem
        if error is not None:
            self._fail(task, error)
        self._show()
        self._top_up()

    def _receive(self, task: _Task, kind: int, value: Any) -> None:
        task.pause_s = 0.0
        if kind == SOME:
            elements = open_batch(value)
            check_spec(elements, self._wish.spec)
            task.received.extend(enumerate(elements, task.next))
        task.skipped = kind != SOME
        task.next, task.common = value[2]

    def _fail(self, task: _Task, error: OpError) -> None:
        if error.error_code not in RETRIABLE:
            task.error, task.common = error, task.next
        elif not task.there or task.pause_s >= PAUSE_S_MAX:
            task.lost = True
        else:
            task.pause_s = min(PAUSE_S_MAX, max(FIRST_PAUSE_S, task.pause_s * PAUSE_GROWS))
            task.pausing = True
            self._loop.set_timer(task, self._loop.now() + task.pause_s, partial(self._ask_again, task))

    def _ask_again(self, task: _Task) -> None:
        task.pausing = False
        self._top_up()

    # -- turns ----------------------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        """Give the consumer all whose turn has come."""
        shown: list[Any] = []
        while self._step(shown):
            pass
        if shown:
            self._put(shown)

    def _step(self, shown: list[Any]) -> bool:
        """One task's turn, or a new round; False: neither can be yet."""
        in_round = [each for each in self._tasks.values() if each.start <= self._round < each.end]
        task = min((each for each in in_round if each.number > self._shown), key=_number, default=None)
        if task is None:
            return self._begin_round()
        if task.next <= self._round:
            if task.error is not None:
                self._end(task.error)
            return False
        if task.received and task.received[0][0] == self._round:
            if self._round > task.common:
                return False
            shown.append(task.received.popleft()[1])
        self._shown = task.number
        return True

    def _begin_round(self) -> bool:
        """The next round that has tasks."""
        for task in [each for each in self._tasks.values() if each.end <= self._round + 1]:
            del self._tasks[task.number]
        following = min((max(each.start, self._round + 1) for each in self._tasks.values()), default=None)
        if following is None or 0 <= self._stop <= following:
            return False
        self._round, self._shown = following, -1
        return True

    def _end(self, error: OpError | None) -> None:
        """A consumer that cannot go on takes part in no decision any more."""
        if error is not None and self._opened is not None and not self._over:
            self._watching += 1
            self._start(self._dispatcher, lambda _: None, RELEASE, *self._opened)
        super()._end(error)

    def _opened_batch(self, value: Any) -> list[Any]:
        elements: list[Any] = value
        return elements

    def _waits_for(self, waited_s: float) -> str:
        names = ", ".join(
            sorted(split_key(each.where)[0] for each in list(self._tasks.values()) if each.next <= self._round)
        )
        return f"for {waited_s:.0f} s round {self._round} has not come from {names or 'any worker'}: all consumers must read"


def _number(task: _Task) -> int:
    return task.number

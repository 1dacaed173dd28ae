"""The delivery machine for one consumer of a coordinated read, in which the k-th elements of all
consumers belong to one group.

Theory
    In each round a consumer takes one element from each task of that round, in the order of the
    tasks' numbers. The machine requests the rounds of each task ahead, independently of the other
    tasks. A received element waits until it is its task's turn in its round.

    An element waits until the machine knows that all consumers have received their parts of the
    group. A later reply of the task says so. The task knows this from the consumers' requests,
    because a consumer requests a round of a task only after it has received all earlier rounds. If
    the dispatcher decides that the task ends before the element's round, the machine drops the
    element.

    The machine reports its position to the dispatcher, and does not move beyond that position until
    the dispatcher has replied. The rules are in data/service/dispatcher/machine/rounds.py.

Promises
    C1  Elements are delivered in the order of rounds, and within a round in the order of the tasks'
        numbers.
    C2  All consumers deliver the same rounds of a task, even if the task's worker is killed while
        it replies to the consumers.
    C3  A consumer does not begin the round that it reported as `stop_round`, from the time when the
        dispatcher has told it to stop until the dispatcher allows it to go on.
    C4  At most ROUNDS_MAX rounds of a task are received ahead of the current round. While the
        consumer's queue is full, the machine requests no rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from operator import attrgetter
from typing import Any, Final

import msgspec

from zmqdist.data.service.reader.delivery import (
    BATCH_BYTES,
    SOME,
    BatchTaken,
    Deliver,
    Delivery,
    Demand,
    Effect,
    Event,
    News,
    ReadingEnded,
    RequestElements,
    RequestNews,
    TaskReplied,
)
from zmqdist.data.service.retry import PAUSE_S_MAX, RETRIABLE, next_pause_s
from zmqdist.errors import OpError

SKIP_S: Final = 0.1
"""Seconds. If a task cannot serve a round to all consumers within this time, all consumers skip the
round."""

ROUNDS_MAX: Final = 64
"""The largest number of rounds in one reply, and of elements that wait for the consumer."""


class RoundsSource(msgspec.Struct, eq=False):
    """What a consumer knows of one task of a coordinated read.

    Attributes:
      start, end: the task takes part in rounds `start` to `end` - 1.
      next: the first round that the consumer has not received from the task.
      received: (round, element) for each element that was received and is not delivered yet. If a
        round before `next` has no element here, all consumers skipped this round of the task, or
        the element is already delivered.
      common: the last round that all consumers are known to have received.
      incarnation: the incarnation of the task's worker when the worker was last alive.
      worker_alive: whether the dispatcher reports that the worker is alive.
      skipped: whether the last reply of the task was SKIP.
      lost: whether the task has ceased to reply. The machine sends the task no further request
        until the dispatcher decides at which round the task ends, or reports a worker that serves
        the task.
      paused_until: the time until which the machine sends the task no request; negative infinity if
        the task is not paused.
    """

    task: int
    start: int
    next: int
    end: float = inf
    received: deque[tuple[int, Any]] = msgspec.field(default_factory=deque)
    common: int = -1
    location: str = ""
    address: str = ""
    incarnation: int = -1
    worker_alive: bool = False
    in_flight: bool = False
    skipped: bool = False
    lost: bool = False
    pause_s: float = 0.0
    paused_until: float = -inf
    error: OpError | None = None


class CoordinatedDelivery(Delivery):
    """The delivery machine of one consumer of a coordinated read. The docstring of the module says
    how it decides."""

    def __init__(
        self,
        reader: int,
        consumer: int,
        outstanding_max: int,
        elements_of: Callable[[Any], list[Any]],
    ) -> None:
        """Start without tasks. The event `News` adds them.

        Args:
          outstanding_max: the largest number of elements that may wait for the consumer. A negative
            number means ROUNDS_MAX.
          elements_of: a function that unpacks the elements of a reply. It may raise an OpError.
        """
        self._reader = reader
        self._consumer = consumer
        self._elements_of = elements_of
        self._limit = ROUNDS_MAX if outstanding_max < 0 else outstanding_max
        self._sources: dict[int, RoundsSource] = {}
        self._round = 0
        self._last_task = -1
        """Number of the last task whose turn in this round is over."""
        self._stop = -1
        """The round that this consumer must not begin; -1 if it may begin any round."""
        self._reported: tuple[Any, ...] = (-1, {})
        self._waiting: deque[int] = deque()
        """For each batch that the consumer has not taken, the number of its elements."""
        self._finished = self._over = False

    @property
    def deadline(self) -> float:
        return min(
            (
                source.paused_until
                for source in self._sources.values()
                if source.paused_until > -inf
            ),
            default=inf,
        )

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case News():
                self._note(event)
            case TaskReplied(source, kind, value, error):
                self._answered(source, kind, value, error, now)
            case BatchTaken():
                self._waiting.popleft()
            case _:
                for source in self._sources.values():
                    if source.paused_until <= now:
                        source.paused_until = -inf
        if self._over:
            return []
        delivered: list[Any] = []
        effects: list[Effect] = []
        while self._step(delivered, effects):
            pass
        if delivered:
            self._waiting.append(len(delivered))
            effects.insert(0, Deliver([delivered]))
        return effects + self._next_requests()

    def watch_args(self) -> tuple[Any, ...]:
        self._reported = self._current_watch_args()
        return self._reported

    def _current_watch_args(self) -> tuple[Any, ...]:
        return self._stop, {
            source.task: source.next for source in self._sources.values() if source.lost
        }

    def describe_wait(self) -> str:
        late = [
            source.address for source in list(self._sources.values()) if source.next <= self._round
        ]
        names = ", ".join(sorted(late)) or "any worker"
        return f"round {self._round} has not come from {names}: all consumers must read"

    # -- news of the dispatcher --------------------------------------------------------------------

    def _note(self, news: News) -> None:
        self._finished = news.finished
        for number, end in news.end_rounds.items():
            if number in self._sources:
                self._end_of(self._sources[number], end)
        for number, address, location, incarnation, start in news.tasks:
            source = self._sources.setdefault(number, RoundsSource(number, start, start))
            source.worker_alive = incarnation >= 0
            if not source.worker_alive:
                # End the pause, so that the next request is sent now. If that request fails too,
                # the task counts as lost.
                source.paused_until = -inf
            if source.worker_alive and location:
                source.lost = False
                source.location, source.address, source.incarnation = location, address, incarnation
            elif not source.worker_alive and not source.location:
                source.lost = True
        if not news.hold:
            self._stop = -1
        elif self._stop < 0:
            self._stop = self._round + 1

    def _end_of(self, source: RoundsSource, end: int) -> None:
        source.end, source.lost = end, False
        while source.received and source.received[-1][0] >= end:
            source.received.pop()
        source.common = source.next
        if end <= self._round:
            del self._sources[source.task]

    # -- elements ----------------------------------------------------------------------------------

    def _next_requests(self) -> list[Effect]:
        if self._over:
            return []
        # the dispatcher has ended the iteration for all consumers
        if self._finished:
            self._over = True
            return [ReadingEnded(None)]
        full = sum(self._waiting) >= self._limit
        effects: list[Effect] = []
        for source in self._sources.values():
            idle = not (
                source.in_flight or source.lost or source.paused_until > -inf or source.error
            )
            if not idle or not source.location or source.next >= source.end:
                continue
            near = source.common < self._round or source.next - self._round < ROUNDS_MAX
            if (near and not full) or not source.worker_alive:
                source.in_flight = True
                demand = Demand(
                    min(ROUNDS_MAX, self._limit),
                    BATCH_BYTES,
                    SKIP_S,
                    self._reader,
                    self._consumer,
                    source.next,
                    source.skipped,
                )
                effects.append(RequestElements(source, demand))
        if self._current_watch_args() != self._reported:
            effects.append(RequestNews())
        return effects

    def _answered(
        self, source: RoundsSource, kind: int, value: Any, error: OpError | None, now: float
    ) -> None:
        source.in_flight = False
        if error is None:
            try:
                self._receive(source, kind, value)
            except OpError as problem:
                error = problem
        if error is not None:
            self._fail(source, error, now)

    def _receive(self, source: RoundsSource, kind: int, value: Any) -> None:
        source.pause_s = 0.0
        if kind == SOME:
            source.received.extend(enumerate(self._elements_of(value), source.next))
        source.skipped = kind != SOME
        source.next, source.common = value[2]

    def _fail(self, source: RoundsSource, error: OpError, now: float) -> None:
        if error.error_code not in RETRIABLE:
            source.error, source.common = error, source.next
        # the dispatcher must let all consumers agree on the last round of the task
        elif not source.worker_alive or source.pause_s >= PAUSE_S_MAX:
            source.lost = True
        else:
            source.pause_s = next_pause_s(source.pause_s)
            source.paused_until = now + source.pause_s

    # -- turns -------------------------------------------------------------------------------------

    def _step(self, delivered: list[Any], effects: list[Effect]) -> bool:
        """Append to `delivered` the element of the task whose turn is next in this round. If the
        round has no further task, begin the next round. Return False if the machine has to wait
        instead.
        """
        in_round = [
            candidate
            for candidate in self._sources.values()
            if candidate.start <= self._round < candidate.end
        ]
        source = min(
            (candidate for candidate in in_round if candidate.task > self._last_task),
            key=attrgetter("task"),
            default=None,
        )
        if source is None:
            return self._begin_round()
        if source.next <= self._round:
            if source.error is not None:
                # raise the error now, because all elements before it have been delivered
                self._over = True
                effects.append(ReadingEnded(source.error))
            return False
        if source.received and source.received[0][0] == self._round:
            if self._round > source.common:
                # promise C2: wait, because another consumer may lack its part of this round
                return False
            delivered.append(source.received.popleft()[1])
        self._last_task = source.task
        return True

    def _begin_round(self) -> bool:
        """Begin the next round that has tasks. Return False when no such round exists, or when the
        dispatcher has told this consumer to stop.
        """
        for source in [
            candidate for candidate in self._sources.values() if candidate.end <= self._round + 1
        ]:
            del self._sources[source.task]
        following = min(
            (max(candidate.start, self._round + 1) for candidate in self._sources.values()),
            default=None,
        )
        if following is None or 0 <= self._stop <= following:
            return False
        self._round, self._last_task = following, -1
        return True

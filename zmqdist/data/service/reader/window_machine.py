"""Decide which tasks get a reader's next requests. The reader requests some batches ahead from each
task. It begins with the tasks that have the fewest requests in flight, and among these with the
task whose last request is the oldest.

Promises
    W1  A task gets no request after it has ended, after the dispatcher has ceased to list it, or
        during the pause after a failed request.
    W2  At most AHEAD requests to one task are in flight. The number of requests in flight and of
        batches that wait for the consumer never exceeds the window, so that a slow consumer does
        not fill the reader's memory. There is one exception. If the consumer needs a certain batch
        while the window is full of other batches, each task without a request in flight gets a
        request, because one of these tasks has the needed batch. If the user limits the elements,
        only one task at a time gets such a request.
    W3  A task in a new incarnation of its worker counts as a new task, even if it had ended or
        failed before. If a task returns to an incarnation whose earlier requests are still in
        flight, its new requests come after the earlier requests, so that its batches keep their
        order.

*Invariant*: 0 <= in_flight <= AHEAD for each task, and `outstanding` counts all requests in flight and all
batches that the consumer has not taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import inf
from operator import attrgetter
from typing import Any, Final

import msgspec

from zmqdist.data.service.reader.delivery import (
    BATCH_BYTES,
    ELEMENTS_MAX,
    BatchTaken,
    ConsumerBegan,
    Delivery,
    Demand,
    Event,
    News,
    RequestElements,
)
from zmqdist.data.service.retry import next_pause_s

AHEAD: Final = 2
"""The number of batches that the reader requests ahead from each task."""

TURN_S: Final = 0.02
"""If the user allows fewer requests than there are tasks, a task without elements replies SKIP
after this many seconds, so that another task gets a request."""

LONG_TURN_S: Final = 1.0
"""If the user's limit allows a request for every task, a task without elements replies SKIP after
this many seconds. A task must not hold a request for ever, because more tasks may appear."""

PAUSE_S_MAX: Final = 0.01
"""The longest pause before a task that did not reply gets another request, in seconds. The
dispatcher lists tasks before their workers have begun them, so that the first requests of each
iteration may fail, and a longer pause would delay its first elements.
"""


class TaskSource(msgspec.Struct, eq=False):
    """What a reader knows of one task in one incarnation of its worker.

    Attributes:
      in_flight: the number of requests without a reply.
      turn: the number of the task's last request among all requests. The task with the lowest turn
        comes first when there is not room for requests to all tasks.
      dropped: whether the dispatcher has ceased to list the task. Such a task gets no further
        requests, but its replies in flight still count.
      pause_s: length of the pause after the last failure, in seconds.
      paused_until: the time at which the pause ends; negative infinity if the task is not paused.
      in_hand: for a reader of portions, the portions that the task held when it sent its last
        reply. Empty after a lost reply, because the portions may have been lost with the reply.
    """

    task: int
    address: str
    incarnation: int
    in_flight: int = 0
    turn: int = 0
    exhausted: bool = False
    dropped: bool = False
    pause_s: float = 0.0
    paused_until: float = -inf
    in_hand: tuple[int, ...] = ()


class TaskWindow:
    """The tasks of one reader, and the number of requests that the reader may send to them now.

    Attributes:
      sources: the TaskSource of each task in its newest incarnation, by the task's number.
      outstanding: the number of requests in flight and of batches that the consumer has not taken.
    """

    def __init__(self, reader: int, trainer: str, outstanding_max: int) -> None:
        """Start without tasks. `outstanding_max` is the number of elements that may be requested
        ahead. A negative number means no limit except the window.
        """
        self.sources: dict[int, TaskSource] = {}
        self._former: dict[tuple[int, int], TaskSource] = {}
        """Maps (task, earlier incarnation of its worker) to its source, while requests of that
        source are in flight."""
        self.outstanding = 0
        self._reader = reader
        self._trainer = trainer
        self._limit = outstanding_max
        self._counter = itertools.count()
        self._others_exist = self._awaits_worker = False

    def note(self, news: News) -> None:
        """Update the tasks from the list of tasks in a reply of the dispatcher."""
        self._others_exist = news.others_exist
        self._awaits_worker = any(not location.location for location in news.tasks)
        listed = {location.task for location in news.tasks if location.location}
        for location in news.tasks:
            current = self.sources.get(location.task)
            if location.location and (
                current is None or current.incarnation != location.incarnation
            ):
                if current is not None:
                    self._former[current.task, current.incarnation] = current
                source = self._former.pop((location.task, location.incarnation), None)
                if source is None or not source.in_flight:
                    source = TaskSource(location.task, location.address, location.incarnation)
                else:
                    # promise W3: use the earlier source again, because its requests in flight come
                    # before new ones
                    source.address, source.exhausted, source.in_hand = location.address, False, ()
                    source.pause_s, source.paused_until = 0.0, -inf
                self.sources[location.task] = source
        for task, source in self.sources.items():
            source.dropped = task not in listed
        self._former = {key: earlier for key, earlier in self._former.items() if earlier.in_flight}

    @property
    def deadline(self) -> float:
        """Return the time at which the next pause of a task ends; infinite if no task is paused."""
        return min(
            (source.paused_until for source in self.sources.values() if source.paused_until > -inf),
            default=inf,
        )

    def resume(self, now: float) -> None:
        """End each pause whose time is over at `now`, so that its task can get requests again. A
        failed request begins a pause."""
        for source in self.sources.values():
            if source.paused_until <= now:
                source.paused_until = -inf

    def available(self) -> list[TaskSource]:
        """Return the tasks to which the reader may send a request."""
        return [
            source
            for source in self.sources.values()
            if not (source.exhausted or source.dropped or source.paused_until > -inf)
        ]

    def requests(
        self, sources: Sequence[TaskSource], starving: bool = False
    ) -> list[RequestElements]:
        """Return new requests for the tasks in `sources`, as many as the window has room for, and
        count them as in flight.

        The size of the window depends on all tasks that may get a request, and not only on
        `sources`, because requests to all of these tasks may be in flight.

        Args:
          starving: whether the consumer waits although batches have arrived, because the next batch
            in order is not among them.
        """
        sources = sorted(sources, key=attrgetter("in_flight", "turn"))
        limit, count = self._limit, len(self.available())
        if limit < 0:
            room, each_max, wait_s = AHEAD * (count + 1) - self.outstanding, ELEMENTS_MAX, None
        else:
            each_max = max(1, limit // max(1, AHEAD * count))
            room, wait_s = (
                limit // each_max - self.outstanding,
                LONG_TURN_S if limit >= count else TURN_S,
            )
        asks: list[RequestElements] = []
        for _ in range(AHEAD):
            for source in sources:
                # Promise W2: send a needed request even if the window is full, because one of these
                # tasks has the batch for which the consumer waits.
                needed = starving and not source.in_flight and (limit < 0 or not self.has_in_flight)
                if needed or (room > 0 and source.in_flight < AHEAD):
                    room -= 1
                    self.outstanding += 1
                    source.in_flight += 1
                    source.turn = next(self._counter)
                    demand = Demand(
                        each_max, BATCH_BYTES, wait_s, self._reader, trainer=self._trainer
                    )
                    asks.append(RequestElements(source, demand))
        return asks

    def succeed(self, source: TaskSource) -> None:
        """Record that a task has replied with elements. This ends the pause that an earlier failed
        request to the task has begun."""
        source.pause_s, source.paused_until = 0.0, -inf

    def fail(self, source: TaskSource, now: float) -> None:
        """Record that a request to a task has failed. A pause begins, in which the task gets no
        request."""
        self.outstanding -= 1
        source.in_hand = ()
        if source.paused_until == -inf:
            # lengthen the pause only once if two requests fail together
            source.pause_s = min(PAUSE_S_MAX, next_pause_s(source.pause_s))
            source.paused_until = now + source.pause_s

    @property
    def exhausted(self) -> bool:
        """Whether no further batch can arrive although the iteration has not ended. This is so if
        the reader reads only some of the tasks, these have ended, and no request is in flight.

        A dropped task counts as ended, because the dispatcher may drop a task after its last batch,
        before a further request could get END.
        """
        # a task may still come, or a reply bring elements
        if self.has_in_flight or not self._others_exist or self._awaits_worker or not self.sources:
            return False
        return all(source.exhausted or source.dropped for source in self.sources.values())

    @property
    def has_in_flight(self) -> bool:
        """Whether a request to any task is in flight."""
        return any(source.in_flight for source in self.sources.values())

    def describe_wait(self) -> str:
        """Return a text for the log that names the workers from which the reader waits for
        elements."""
        names = sorted(
            source.address for source in list(self.sources.values()) if not source.exhausted
        )
        return f"nothing has come from {', '.join(names) or 'a worker'}"


class WindowDelivery(Delivery):
    """Base class of the delivery machines that read from a TaskWindow."""

    def __init__(self, window: TaskWindow) -> None:
        self._window = window
        self._is_consuming = self._finished = self._over = False

    @property
    def deadline(self) -> float:
        return self._window.deadline

    def watch_args(self) -> tuple[Any, ...]:
        return ()

    def describe_wait(self) -> str:
        return self._window.describe_wait()

    def _note(self, event: Event, now: float) -> None:
        """Record an event that is no reply."""
        match event:
            case BatchTaken():
                self._window.outstanding -= 1
            case News():
                self._window.note(event)
                self._finished = event.finished
            case ConsumerBegan():
                self._is_consuming = True
            case _:
                self._window.resume(now)

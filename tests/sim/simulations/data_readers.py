"""Simulated readers of a data service: the real delivery machines, and a model of their runtime and
consumer. See data_service.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Protocol

from tests.sim.simulations.data_links import SimLink, SimRequest
from tests.sim.simulations.data_parts import DELAY_S, PartSurroundings, SimDataWorker
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.reader.delivery import (
    END,
    FAILED,
    SOME,
    BatchTaken,
    ConsumerBegan,
    ConsumerBusy,
    ConsumerStarved,
    Deliver,
    Delivery,
    Demand,
    DispatcherReplied,
    Event,
    News,
    NotifyDispatcher,
    ReadingEnded,
    RequestElements,
    RequestNews,
    TaskLocation,
    TaskReplied,
)
from zmqdist.data.service.reader.exactly_once_machine import (
    ACKNOWLEDGE,
    Consumed,
    Consumption,
    ExactlyOnceDelivery,
    Marks,
    PortionBatch,
    PortionPiece,
)
from zmqdist.data.service.reader.plain_machine import PlainDelivery
from zmqdist.data.service.reader.window_machine import AHEAD, TaskWindow
from zmqdist.data.service.worker.task_replies import TaskReply
from zmqdist.errors import NOT_FOUND, RESOURCE_EXHAUSTED, UNAVAILABLE, OpError, UnavailableError
from zmqdist.events import Ticked

QUICK_S, SLOW_S = 0.0005, 0.01
"""Seconds that a quick and a slow consumer need for an element. With a slow consumer elements wait
longer, so that more faults hit them."""


@dataclass(eq=False)
class SimTaskLink:
    """The requests of a reader to one task, in one incarnation of the task's worker. The machine
    gets the replies in order.

    Attributes:
      arrives_at: the arrival time of the last request. No later request arrives before it.
      last: the last element of this task that the consumer has taken.
    """

    incarnation: int
    answers: deque[list[TaskReplied]] = field(default_factory=deque)
    arrives_at: float = 0.0
    last: int = -1


class ReaderSurroundings(PartSurroundings, Protocol):
    """The simulated data service around a reader (data_service.py).

    Attributes:
      lose_answers: the fraction of the replies to readers that are lost.
    """

    workers: list[SimDataWorker]
    lose_answers: float

    def faulty(self) -> bool:
        """Return whether faults may still come."""

    def register(self, then: Callable[[], object]) -> None:
        """Register the dataset under its id; repeat the request until it succeeds, then call
        `then`."""

    def watch_worker(
        self, worker: SimDataWorker, fail: Callable[[], None], open_: Callable[[], bool]
    ) -> None:
        """Call `fail` some time after the death of a worker, if `open_()` is true at that time.
        This simulates the poll by which a waiting reader notices the death.
        """

    def lose_answer(self, reader: SimReader, elements: list[Any]) -> None:
        """Record that the reply with these elements was lost, so that the reader does not get
        them.
        """


class SimReader:
    """One reader with its consumer, which takes elements until the end of the iteration."""

    def __init__(
        self, sim: ReaderSurroundings, job: str | None, mode: int, repetition: int
    ) -> None:
        self.sim = sim
        self.mode = mode
        self.job = job or f"unnamed {sim.random.getrandbits(40)}"
        self.repetition = repetition
        self.alive = True
        self.got: list[int] = []
        self.ended = False
        self.error = 0
        self.state = self.client = self.iteration = 0
        self.failed = ""
        self.lost_answers = 0
        self.queue: deque[Any] = deque()
        self.delivery: Delivery
        self._link: SimLink | None = None
        self._links: dict[tuple[int, int], SimTaskLink] = {}
        self._version = 0
        self._finished = self._over = False
        self._consuming = False
        self._tick_at = inf
        self._element_s = sim.random.choice((QUICK_S, SLOW_S))
        self._request = sim.random.getrandbits(40)
        self._open()

    # -- the dispatcher ----------------------------------------------------------------------------

    def _dispatcher_link(self) -> SimLink | None:
        if self._link is None or not self._link.open:
            self._link = self.sim.dispatcher.connect()
        return self._link

    def _open(self) -> None:
        self.sim.dispatcher.ask(
            self._dispatcher_link(),
            lambda pending: self.opening(pending, self._request),
            self._opened,
        )

    def opening(self, pending: SimRequest, request: int) -> ev.OpenRequest:
        """Return the request that opens the iteration."""
        sources = (self.sim.count,) if self.mode == r.DYNAMIC else ()
        return ev.OpenRequest(
            pending, request, self.job, self.repetition, r.Terms("data", self.mode), sources
        )

    def made(self, first: int) -> Delivery:
        """Return the delivery machine of this simulated reader, whose portions begin with number
        `first`."""
        return PlainDelivery(self.client, "", -1)

    def _opened(self, value: Any, code: int) -> None:
        if not self.alive:
            return
        if code == NOT_FOUND:  # the dispatcher has lost its state: register the dataset again
            self.sim.register(lambda: self.sim.clock.after(0.05, self._open))
        elif code:
            self.sim.clock.after(0.05, self._open)
        else:
            self.client, self.iteration, self.state, cut = value
            self.delivery = self.made(cut[3] if cut else 0)
            self._watch()
            self.handle(ConsumerBegan())

    def _watch(self) -> None:
        def request_of(pending: SimRequest) -> ev.Request:
            return ev.WatchRequest(pending, self.state, self.client, self._version)

        self.sim.dispatcher.ask(self._dispatcher_link(), request_of, self._watched)

    def _watched(self, value: Any, code: int) -> None:
        if not self.alive or self.ended:
            return
        if code in (UNAVAILABLE, RESOURCE_EXHAUSTED):
            self.sim.clock.after(0.05, self._watch)
            return
        if code:
            self._end(code)
            return
        if value is not None:
            self._version, tasks, self._finished, hold, ended, self.failed = value
            if self.failed:
                self._end(UNAVAILABLE)
                return
            for task, _, where, incarnation, *_ in tasks:
                if where and (task, incarnation) not in self._links:
                    self._links[task, incarnation] = SimTaskLink(incarnation)
            places = [
                TaskLocation(task, where, where, incarnation, start)
                for task, _, where, incarnation, _, start in tasks
            ]
            self.handle(News(places, False, self._finished, hold, ended))
        if not self._finished:
            self._watch()

    # -- the machine -------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Have the machine handle an event, and carry out its effects as the runtime does."""
        if not self.alive or self.ended:
            return
        clock = self.sim.clock
        for effect in self.delivery.handle(event, clock.now):
            match effect:
                case RequestElements(source, wanted):
                    self._ask(source, wanted, self._links[source.task, source.incarnation])
                case Deliver(items):
                    self.queue += items
                    self.consume()
                case NotifyDispatcher():
                    self.report(effect)
                case RequestNews():
                    self._watch()
                case ReadingEnded(error):
                    self._end(0 if error is None else error.error_code)
        due = self.delivery.deadline
        if due < self._tick_at:
            self._tick_at = due
            clock.at(due, partial(self._tick, due))

    def _tick(self, due: float) -> None:
        if due == self._tick_at:
            self._tick_at = inf
            self.handle(Ticked())

    def _end(self, code: int) -> None:
        """End the iteration with this error code. The consumer first gets the elements in its
        queue."""
        self._over = True
        self.error = self.error or code
        self.look()

    def look(self) -> None:
        """Record whether the consumer has reached the end of the iteration."""
        if self._over and not self.queue and not self._consuming:
            self.ended = True

    def report(self, report: NotifyDispatcher) -> None:
        """Carry out a NotifyDispatcher of the machine. Only a reader of portions has a machine that
        sends one."""
        raise AssertionError(f"a reader that acknowledges nothing reports {report}")

    # -- workers -----------------------------------------------------------------------------------

    def _ask(self, source: Any, wanted: Demand, link: SimTaskLink) -> None:
        sim, incarnation = self.sim, link.incarnation
        worker = next((each for each in sim.workers if each.incarnation == incarnation), None)
        answer: list[TaskReplied] = []
        link.answers.append(answer)
        assert len(link.answers) <= AHEAD, f"W2: {len(link.answers)} requests are with one task"
        open_ = [True]

        def came(kind: int, value: Any, error: OpError | None) -> None:
            answer.append(TaskReplied(source, kind, value, error))
            while link.answers and link.answers[0]:
                (first,) = link.answers.popleft()
                if self.alive and not self.ended:
                    self.handle(first)
                elif first.kind == SOME:
                    sim.lose_answer(self, first.value[1])

        def fail() -> None:
            if open_:
                open_.clear()
                came(FAILED, None, UnavailableError("the worker does not reply"))

        def answered(answer_: TaskReply) -> None:
            batch: list[Any] = answer_.value if answer_.kind == SOME else []
            if not open_ or (sim.faulty() and sim.random.random() < sim.lose_answers):
                self.lost_answers += len(batch)
                sim.lose_answer(self, batch)
                sim.soon(fail)
            else:
                open_.clear()
                _, kind, value, tag = answer_
                if kind == SOME:
                    sim.soon(partial(came, SOME, (link, batch, tag), None))
                elif kind == FAILED:
                    assert isinstance(value, OpError), value
                    sim.soon(partial(came, FAILED, None, value))
                else:
                    sim.soon(partial(came, END, None, None))

        def arrive() -> None:
            at = None if worker is None or not worker.alive else worker.tasks.get(source.task)
            if worker is None or at is None or at.state != self.state:
                fail()
                return
            at.ask(wanted, answered)
            if open_:
                sim.watch_worker(worker, fail, lambda: bool(open_))

        link.arrives_at = max(sim.clock.now + sim.random.expovariate(1 / DELAY_S), link.arrives_at)
        sim.clock.at(link.arrives_at, arrive)

    # -- the consumer ------------------------------------------------------------------------------

    def consume(self) -> None:
        """Have the consumer take the next batch from the queue, unless it is busy."""
        if self._consuming or not self.alive:
            return
        if not self.queue:
            self.look()
            return
        self._consuming = True
        link, batch, _ = self.queue.popleft()
        for element in batch:
            assert self.mode == r.DYNAMIC or element > link.last, (
                "F1: the batches of a task arrived in another order"
            )
            link.last = element
        self.got += batch
        self.handle(BatchTaken())
        self.sim.clock.after(self.pause_s(), self._consumed)

    def pause_s(self) -> float:
        """Return the seconds that the consumer needs for the elements that it has taken."""
        return self.sim.random.expovariate(1 / (self._element_s if self.sim.faulty() else QUICK_S))

    def _consumed(self) -> None:
        self._consuming = False
        self.consume()

    def kill(self) -> None:
        """End the reader's process. The elements in its queue are lost."""
        self.alive = False
        self.lose_queue()
        if self._link is not None:
            self.sim.end_link(self._link)

    def lose_queue(self) -> None:
        """Record that the consumer does not get the elements in the queue."""
        for _, batch, _ in self.queue:
            self.sim.lose_answer(self, batch)


class SimPortionReader(SimReader):
    """A reader of portions, which acknowledges the elements that its consumer has finished.

    Attributes:
      acknowledged: the elements that the reader has acknowledged.
      confirmed: the elements whose acknowledgment the dispatcher has accepted.
    """

    def __init__(self, sim: ReaderSurroundings, job: str | None, ordered: bool) -> None:
        self.ordered = ordered
        self.confirmed: list[int] = []
        self.acknowledged: list[int] = []
        self._consumption = Consumption(nullcontext(), 1, Consumed())
        self._given: dict[int, list[int]] = {}
        """Portion -> its elements that the consumer has taken."""
        self._marked: dict[int, int] = {}
        self._skipped: dict[int, int] = {}
        """Portion -> the offset at which this reader began it."""
        self._hand: tuple[PortionPiece, Iterator[Any]] | None = None
        super().__init__(sim, job, r.DYNAMIC, 0)

    def opening(self, pending: SimRequest, request: int) -> ev.OpenRequest:
        terms = r.Terms("data", r.DYNAMIC, delivery="exactly_once", ordered=self.ordered)
        count = self.sim.count
        return ev.OpenRequest(pending, request, self.job, 0, terms, (count,), grain=(count, 1, 1))

    def made(self, first: int) -> Delivery:
        window = TaskWindow(self.client, "", -1)
        return ExactlyOnceDelivery(window, self._consumption, 1, first, self.ordered, Consumed())

    # -- the consumer ------------------------------------------------------------------------------

    def consume(self) -> None:
        """Have the consumer begin the next piece of a portion, unless it still has a piece."""
        if self._hand is None and self.alive:
            self._next_piece()

    def _next_piece(self) -> None:
        consumption = self._consumption
        consumption.finish()
        self._hand = None
        if not self.queue:
            if not consumption.waits:
                consumption.waits = True
                self.sim.clock.after(0.0, partial(self.handle, ConsumerStarved()))
            self.look()
            return
        consumption.waits = False
        piece: PortionPiece = self.queue.popleft()
        elements = iter(elements_of(piece))
        self._skipped.setdefault(piece.number, piece.first)
        had = self._skipped[piece.number] + len(self._given.setdefault(piece.number, []))
        assert piece.first == had, (
            f"X2: portion {piece.number} goes on at {piece.first} where {had} comes next"
        )
        consumption.take(piece, elements, piece.stop - piece.start)
        self._hand = piece, elements
        events: list[Event] = [BatchTaken()] if piece.last else []
        if not consumption.due:
            consumption.due = True
            events.append(ConsumerBusy())
        for event in events:
            self.sim.clock.after(0.0, partial(self.handle, event))
        self._next_element()

    def _next_element(self) -> None:
        """Have the consumer take its next element, and work on this element for some time."""
        if self._hand is None or not self.alive:
            return
        piece, elements = self._hand
        element = next(elements, None)
        if element is None:
            self._next_piece()
            return
        self.got.append(element)
        self._given[piece.number].append(element)
        self.sim.clock.after(self.pause_s(), self._next_element)

    def lose_queue(self) -> None:
        """Do nothing: elements that were not acknowledged are computed again."""

    # -- reports to the dispatcher -----------------------------------------------------------------

    def report(self, report: NotifyDispatcher) -> None:
        payload = report.payload

        def request_of(pending: SimRequest) -> ev.Request:
            if report.method == ACKNOWLEDGE:
                return ev.AcknowledgeRequest(pending, self.state, self.client, payload)
            return ev.MissedRequest(pending, self.state, self.client, payload)

        marked = self._note_marks(payload) if report.method == ACKNOWLEDGE else []

        def then(_: Any, code: int) -> None:
            if not code:
                self.confirmed += marked
            self.handle(DispatcherReplied(report, code, ""))

        self.sim.dispatcher.ask(self._dispatcher_link(), request_of, then)

    def _note_marks(self, marks: Marks) -> list[int]:
        """Check that marks acknowledge only elements that the consumer has finished. Return the
        acknowledged elements that were not yet confirmed.
        """
        found: list[int] = []
        for number, elements, _ in marks:
            skipped, given = self._skipped[number], self._given[number]
            had = skipped + len(given)
            at = (
                self._hand is not None
                and self._hand[0].number == number
                and self._consumption.in_hand
            )
            assert elements <= had - at, (
                f"X3: {elements} elements of portion {number} are acknowledged, and {had} were "
                f"given"
            )
            found += given[: elements - skipped]
        known = {*self.confirmed}
        fresh = [element for element in found if element not in known]
        self.acknowledged += [element for element in fresh if element not in self.acknowledged]
        return fresh


def elements_of(piece: PortionPiece) -> list[int]:
    """Return the elements that this piece of a batch has."""
    batch: PortionBatch = piece.batch
    elements: list[int] = batch.value[1]
    return elements[piece.start : piece.stop]

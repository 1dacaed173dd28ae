"""Coordinated reads in virtual time: the real delivery machines of all consumers, workers that are
killed and added, and lost replies.

The machines of the tasks (data/service/worker/rounds_machine.py) are real, too. The dispatcher is a
short model that keeps the promises of data/service/dispatcher/machine/rounds.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import Any

from tests.sim.simulations.clock import SimClock
from zmqdist.data.service.reader.coordinated_machine import CoordinatedDelivery
from zmqdist.data.service.reader.delivery import (
    END,
    FAILED,
    SKIP,
    SOME,
    BatchTaken,
    ConsumerBegan,
    Deliver,
    Demand,
    Event,
    News,
    ReadingEnded,
    RequestElements,
    RequestNews,
    TaskLocation,
    TaskReplied,
)
from zmqdist.data.service.worker.rounds_machine import RoundsMachine
from zmqdist.data.service.worker.task_replies import TaskReply
from zmqdist.errors import AbortedError, UnavailableError
from zmqdist.events import Ticked

DELAY_S = 0.002
MAKE_S = 0.008
GROUPS_MAX = 4
FAULTS_S = 3.0
END_S = 6.0

Reply = Callable[[int, Any], None]


@dataclass(eq=False)
class Question:
    """A request of a consumer at a task; `reply` gets the reply, unless it is lost."""

    wanted: Demand
    reply: Reply
    answered: bool = False


class SimRoundsTask:
    """A task: the real machine, and a model of the thread that makes groups. The k-th group has the
    element k for each consumer."""

    def __init__(self, sim: RoundsSim, number: int, start: int) -> None:
        self.sim, self.number, self.start = sim, number, start
        self.alive = self.listed = True
        self.end = inf
        self._machine = RoundsMachine(sim.count)
        self._made = 0
        self._wakes = False
        sim.soon(self._make)

    def ask(self, wanted: Demand, reply: Reply) -> None:
        question = Question(wanted, reply)
        assert wanted.wait_s is not None
        self.sim.clock.after(wanted.wait_s, partial(self._expire, question))
        self._perform(self._machine.add_request(wanted, question))

    def kill(self) -> None:
        self.alive = False
        for question in self._machine.waiting():
            self.sim.soon(partial(question.reply, FAILED, None))

    def _expire(self, question: Question) -> None:
        if self.alive:
            self._perform(self._machine.expired(question))

    def _make(self) -> None:
        """Make groups while there is room, and serve them a little later, so that several go out
        together."""
        sim = self.sim
        if not self.alive:
            return
        if self._machine.groups < GROUPS_MAX:
            self._machine.add([self._made] * sim.count, 1)
            self._made += 1
            if not self._wakes:
                self._wakes = True
                sim.soon(self._serve)
        sim.clock.after(sim.random.expovariate(1 / MAKE_S), self._make)

    def _serve(self) -> None:
        self._wakes = False
        if self.alive:
            self._perform(self._machine.serve())

    def _perform(self, effects: list[TaskReply]) -> None:
        sim = self.sim
        for effect in effects:
            question: Question = effect.reply
            assert not question.answered, "K: a request was answered twice"
            question.answered = True
            if effect.kind == FAILED:
                assert isinstance(effect.value, AbortedError), (
                    f"K5: consumer {question.wanted.consumer}: {effect.value}"
                )
                continue  # a newer request of this consumer has replaced it
            elements: list[Any] | None = None
            if effect.kind == SOME:
                first = question.wanted.round
                elements = [
                    (first + place, self.number, each) for place, each in enumerate(effect.value)
                ]
            assert effect.kind != END, "a task without an end has one"
            tag = effect.tag
            kind = SKIP if elements is None else SOME
            if sim.faulty() and sim.random.random() < sim.lose_answers:
                kind = FAILED
            sim.soon(partial(question.reply, kind, ("", elements, tag)))


class SimRoundsConsumer:
    """One consumer: the real machine, and a model of its runtime."""

    def __init__(self, sim: RoundsSim, number: int) -> None:
        self.sim, self.number = sim, number
        self.machine = CoordinatedDelivery(
            number + 1, number, sim.random.choice((-1, 1, 5)), lambda value: value[1]
        )
        self.got: list[tuple[int, int, int]] = []
        self.version = 0
        self._tick_at = inf
        self._arrives_at = 0.0

    def handle(self, event: Event) -> None:
        sim = self.sim
        for effect in self.machine.handle(event, sim.clock.now):
            match effect:
                case RequestElements(source, wanted):
                    sim.soon(partial(self._ask, source, wanted))
                case Deliver(items):
                    for batch in items:
                        self.got += batch
                        sim.clock.after(
                            sim.random.uniform(0.001, 0.03), partial(self.handle, BatchTaken())
                        )
                case RequestNews():
                    self.watch()
                case ReadingEnded(error):
                    raise AssertionError(f"C2: consumer {self.number} is at its end: {error}")
        if self.machine.deadline < self._tick_at:
            self._tick_at = self.machine.deadline
            sim.clock.at(self._tick_at, self._tick)

    def _tick(self) -> None:
        self._tick_at = inf
        self.handle(Ticked())

    def _ask(self, source: Any, wanted: Demand) -> None:
        def reply(kind: int, value: Any) -> None:
            error = UnavailableError("the worker does not answer") if kind == FAILED else None
            self.handle(TaskReplied(source, kind, value, error))

        task = self.sim.tasks[source.task]
        if task.alive:
            task.ask(wanted, reply)
        else:
            reply(FAILED, None)

    def watch(self) -> None:
        """Send a watch request. The consumer keeps to the position in it until the reply."""
        self._arrives_at = max(
            self._arrives_at, self.sim.clock.now + self.sim.random.expovariate(1 / DELAY_S)
        )
        stopped, lost = self.machine.watch_args()
        self.sim.clock.at(
            self._arrives_at, partial(self.sim.watched, self, self.version, stopped, lost)
        )

    def news(self, version: int, news: News) -> None:
        if version <= self.version:
            return  # a later watch request has got its reply
        self.version = version
        self.handle(news)
        self.watch()


class RoundsSim:
    """One run. It checks the promises C1 to C3 of CoordinatedDelivery, and that all consumers
    proceed at the end."""

    def __init__(self, seed: int, faults: int = 8) -> None:
        self.random = Random(seed)
        self.clock = SimClock()
        self.lose_answers = self.random.choice((0.0, 0.02, 0.1)) if faults else 0.0
        self.tasks: dict[int, SimRoundsTask] = {}
        self.consumers: list[SimRoundsConsumer] = []
        self._pending = 0
        self._version = 1
        self._watching: dict[int, tuple[int, dict[int, int]]] = {}
        self.count = self.random.randint(1, 4)
        for number in range(self.random.randint(1, 3)):
            self._begin(number, 0)
        for number in range(self.count):
            self.consumers.append(SimRoundsConsumer(self, number))
        for consumer in self.consumers:
            consumer.handle(ConsumerBegan())
            consumer.watch()
        for _ in range(faults):
            self.clock.after(self.random.uniform(0.1, FAULTS_S), self._fault)

    def soon(self, fn: Callable[[], object]) -> None:
        self.clock.after(self.random.expovariate(1 / DELAY_S), fn)

    def faulty(self) -> bool:
        return self.clock.now < FAULTS_S

    def _begin(self, number: int, start: int) -> None:
        self.tasks[number] = SimRoundsTask(self, number, start)

    def _fault(self) -> None:
        alive = [task for task in self.tasks.values() if task.alive]
        if self.random.random() < 0.5 and len(alive) > 1:
            victim = self.random.choice(alive)
            victim.kill()
            self.clock.after(self.random.uniform(0.0, 0.2), partial(self._give_up, victim))
        else:
            self._pending += 1
            self._change()

    def _give_up(self, task: SimRoundsTask) -> None:
        task.listed = False
        self._change()

    # -- the dispatcher ----------------------------------------------------------------------------

    def watched(
        self, consumer: SimRoundsConsumer, version: int, stopped: int, lost: dict[int, int]
    ) -> None:
        self._watching[consumer.number] = stopped, lost
        if version < self._version:
            self._answer(consumer)
        elif len(self._watching) == len(self.consumers):
            self._decide()

    def _decide(self) -> None:
        watch_args = list(self._watching.values())
        ended = [
            task
            for number, task in self.tasks.items()
            if task.end == inf and all(number in lost for _, lost in watch_args)
        ]
        for task in ended:
            task.end = min(lost[task.number] for _, lost in watch_args)
            task.kill()
        begins = self._pending and all(stopped >= 0 for stopped, _ in watch_args)
        if begins:
            start = max(stopped for stopped, _ in watch_args)
            seen = max(
                (consumer.got[-1][0] for consumer in self.consumers if consumer.got), default=-1
            )
            assert seen < start, (
                f"C3: round {seen} was begun by a consumer that is held, and a task begins at "
                f"{start}"
            )
            for _ in range(self._pending):
                self._begin(len(self.tasks), start)
            self._pending = 0
        if ended or begins:
            self._change()

    def _change(self) -> None:
        self._version += 1
        for consumer in self.consumers:
            if consumer.number in self._watching:
                self._answer(consumer)

    def _answer(self, consumer: SimRoundsConsumer) -> None:
        del self._watching[consumer.number]
        places = [
            TaskLocation(task.number, "host", "host", 7 if task.listed else -1, task.start)
            for task in self.tasks.values()
            if task.end == inf
        ]
        ended = {task.number: int(task.end) for task in self.tasks.values() if task.end < inf}
        self.soon(
            partial(
                consumer.news, self._version, News(places, False, False, bool(self._pending), ended)
            )
        )

    # -- checks at the end -------------------------------------------------------------------------

    def check(self, calm: list[int]) -> None:
        longest = max((consumer.got for consumer in self.consumers), key=len)
        for consumer, before in zip(self.consumers, calm, strict=True):
            order = [(round_, task) for round_, task, _ in consumer.got]
            assert order == sorted(set(order)), (
                f"C1: consumer {consumer.number} left the order of rounds and tasks"
            )
            assert consumer.got == longest[: len(consumer.got)], (
                f"C2: consumer {consumer.number} had other rounds"
            )
            assert len(consumer.got) > before, f"consumer {consumer.number} gets nothing any more"
        for number in self.tasks:
            groups = [group for _, task, group in longest if task == number]
            assert groups == list(range(len(groups))), (
                f"K2: the groups of task {number} came as {groups}"
            )


def simulate_rounds(seed: int, faults: int = 8) -> RoundsSim:
    """Run one seed with faults. Raise AssertionError, with the seed, if a promise is broken."""
    try:
        sim = RoundsSim(seed, faults)
        sim.clock.run(FAULTS_S + 1.5)
        calm = [len(consumer.got) for consumer in sim.consumers]
        sim.clock.run(END_S)
        sim.check(calm)
    except AssertionError as error:
        raise AssertionError(f"{error}\nreplay: simulate_rounds({seed})") from error
    return sim

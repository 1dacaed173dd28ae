"""Portions in random histories."""

from __future__ import annotations

import random
from typing import Any

from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine import runs as sets
from zmqdist.data.service.dispatcher.machine.machine import DataDispatcherMachine
from zmqdist.data.service.dispatcher.machine.state import DurableState
from zmqdist.data.service.dispatcher.machine.tables import Rules
from zmqdist.errors import NOT_FOUND, RESOURCE_EXHAUSTED

NUMBER = 77
NONE_YET = "none yet"


class World:
    """A machine with a journal that commits each record at once, unless it is `full`."""

    def __init__(
        self,
        positions: int = 20,
        repetitions: int = 1,
        grain: int = 1,
        ordered: bool = False,
        consumers: int = 0,
    ) -> None:
        self.rules = Rules(fault_tolerant=True)
        self.machine = DataDispatcherMachine(self.rules, NUMBER, 0.0)
        self.now = 0.0
        self.records: list[bytes] = []
        self.full = False
        self.answers: dict[int, Any] = {}
        self.tokens = 0
        self.terms = r.Terms("a", r.DYNAMIC, consumers, delivery=r.EXACTLY_ONCE, ordered=ordered)
        self.grain = (positions, repetitions, grain)
        self.handle(ev.RegisterRequest(self.token(), 1, "a", "print", "{}"))

    def token(self) -> int:
        self.tokens += 1
        return self.tokens

    def handle(self, event: ev.Event) -> None:
        effects = self.machine.handle(event, self.now)
        while effects:
            more: list[ev.Effect] = []
            for effect in effects:
                match effect:
                    case ev.ReplyToRequest(token, value):
                        self.answers[token] = value
                    case ev.FailRequest(token, code, message):
                        self.answers[token] = (code, message)
                    case ev.CommitJournal() if self.full:
                        more += self.machine.handle(
                            ev.JournalFailed(RESOURCE_EXHAUSTED, "disk full"), self.now
                        )
                    case ev.Reload():
                        self.machine.restore(self.replayed(), [], self.now)
                    case ev.CommitJournal(records):
                        self.records += records
                        more += self.machine.handle(ev.JournalCommitted(), self.now)
            effects = more

    def ask(self, kind: Any, *args: Any, **more: Any) -> int:
        token = self.token()
        self.handle(kind(token, *args, **more))
        return token

    def answer(self, token: int) -> Any:
        return self.answers.get(token, NONE_YET)

    def worker(self, incarnation: int) -> int:
        self.handle(ev.WorkerJoined(f"worker:{incarnation}", f"host:{incarnation}", incarnation))
        return incarnation

    def open(self, saved: ev.SavedRequest | None = None, consumer: int = -1, **more: Any) -> int:
        given = {"consumer": consumer, "grain": self.grain, "saved": saved, **more}
        token = self.ask(ev.OpenRequest, self.token(), "job", 0, self.terms, (20,), **given)
        told = self.answer(token)
        if isinstance(told[1], str):
            raise AssertionError(told)
        return int(told[0])

    def task(self, incarnation: int) -> int:
        number = next(
            each.number
            for each in self.machine.state.workers.values()
            if each.incarnation == incarnation
        )
        return next(each.id for each in self.machine.state.tasks.values() if each.worker == number)

    def want(
        self, incarnation: int, client: int, count: int = 1, request: int | None = None
    ) -> int:
        request = self.token() if request is None else request
        return self.ask(
            ev.PortionsRequest, NUMBER, self.task(incarnation), incarnation, client, request, count
        )

    def given(self, incarnation: int, client: int, count: int = 1) -> list[int]:
        told = self.answer(self.want(incarnation, client, count))
        return [] if told == NONE_YET else [each[0] for each in told]

    def acknowledge(self, client: int, *marks: tuple[int, int, bool]) -> Any:
        return self.answer(self.ask(ev.AcknowledgeRequest, NUMBER, client, marks))

    @property
    def iteration(self) -> r.Iteration:
        return next(iter(self.machine.state.iterations.values()))

    @property
    def portions(self) -> r.PortionsEntry:
        assert self.iteration.portions is not None
        return self.iteration.portions

    def saved(
        self,
        client: int,
        done: list[tuple[int, int]],
        open_: list[tuple[int, int]] = [],  # noqa: B006
    ) -> ev.SavedRequest:
        p = self.portions
        cut = p.positions, p.repetitions, p.length
        return ev.SavedRequest(
            NUMBER, self.iteration.id, client, cut, len(p.next), tuple(done), tuple(open_)
        )

    def replayed(self) -> DurableState:
        state = DurableState(number=NUMBER)
        for record in self.records:
            state.apply(r.decode(record))
        return state


class Reader:
    """A reader that acknowledges its elements, and can go back to an earlier state."""

    def __init__(self, client: int, had: dict[int, int], done: set[int]) -> None:
        self.client, self.had, self.done = client, had, done

    def state(self, world: World) -> ev.SavedRequest:
        runs: sets.Runs = []
        for number in self.done:
            sets.add(runs, number, number + 1)
        return world.saved(
            self.client, runs, [(n, count) for n, count in self.had.items() if n not in self.done]
        )


def size_of(number: int) -> int:
    return number * 7 % 4


def test_elements_are_delivered_once_in_random_histories(seed: int) -> None:
    chance = random.Random(seed)
    world = World(
        positions=chance.choice([1, 5, 40]),
        repetitions=chance.choice([1, 2]),
        ordered=chance.random() < 0.3,
    )
    lives = [world.worker(1)]
    reader = Reader(world.open(), {}, set())
    state = (reader.state(world), {}, set())
    outstanding: dict[int, int] = {}
    holds: dict[int, list[tuple[int, int]]] = {1: []}
    total = int(world.portions.total())
    for _ in range(5000):
        if world.iteration.state is r.IterationState.FINISHED and chance.random() < 0.7:
            break
        incarnation = chance.choice(lives)
        action = chance.random()
        if (
            action < 0.3
            and incarnation not in outstanding
            and world.iteration.state is not r.IterationState.FINISHED
        ):
            outstanding[incarnation] = world.want(
                incarnation, reader.client, chance.randrange(1, 5)
            )
        elif action < 0.6 and holds[incarnation]:
            number, skip = holds[incarnation].pop(0)
            if skip <= reader.had.get(number, 0) and number not in reader.done:
                # else a reply on it was lost
                stop = (
                    size_of(number)
                    if chance.random() < 0.8
                    else chance.randrange(skip, size_of(number) + 1)
                )
                reader.had[number] = max(reader.had.get(number, 0), stop)
                if reader.had[number] == size_of(number) and (stop == size_of(number)):
                    reader.done.add(number)
                if chance.random() < 0.7:
                    world.acknowledge(
                        reader.client, (number, reader.had[number], number in reader.done)
                    )
                if stop < size_of(number):
                    world.ask(ev.MissedRequest, NUMBER, reader.client, incarnation)
        elif action < 0.7:
            marks = [(n, count, n in reader.done) for n, count in reader.had.items()]
            world.acknowledge(
                reader.client, *marks, *((n, 0, True) for n in reader.done if n not in reader.had)
            )
        elif action < 0.75:
            world.handle(ev.WorkerGone(incarnation, left=chance.random() < 0.9))
            lives.remove(incarnation)
            outstanding.pop(incarnation, None)
            new = max(holds) + 1
            lives.append(world.worker(new))
            holds[new] = []
        elif action < 0.8:
            state = (reader.state(world), dict(reader.had), set(reader.done))
        elif action < 0.83:
            reader = Reader(world.open(state[0]), dict(state[1]), set(state[2]))
            outstanding, holds = {}, {each: [] for each in holds}
            state = (reader.state(world), dict(reader.had), set(reader.done))
        for asked, token in list(outstanding.items()):
            if (told := world.answer(token)) != NONE_YET:
                del outstanding[asked]
                if told[:1] == (NOT_FOUND,):
                    continue  # the iteration has ended
                holds[asked] += [(each[0], each[4]) for each in told]
                assert all(each[4] <= reader.had.get(each[0], 0) for each in told), (
                    "an element was left out that no reader had"
                )
        assert all(portion.client in (0, reader.client) for portion in world.portions.open.values())
        if world.portions.failed:
            break
    assert r.encode(world.replayed()) == r.encode(world.machine.state)
    if not world.portions.failed:
        assert world.iteration.state is r.IterationState.FINISHED, "the iteration never ended"
        assert reader.done == set(range(total))

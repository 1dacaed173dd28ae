"""Tasks that register, wait, die, return and give up in random order, against a simple checker.

The checker sees only the replies to calls, and knows for each task whether it waits. Bugs are
planted into the machine to show that the checker finds them.
"""

from __future__ import annotations

import itertools
import random
from math import inf
from typing import Any

import pytest

from tests.coordination.helpers import CONFIG, Call, Cluster, workers
from zmqdist.coordination.barriers_machine import Barriers, _Barrier
from zmqdist.coordination.machine import Coordination
from zmqdist.coordination.replies import Effect, ReplyValue, Task
from zmqdist.errors import CANCELLED, DEADLINE_EXCEEDED, INTERNAL, OK

STEPS = 150
SEEDS_TO_FIND_A_BUG = 60
NAMES = ("x", "y")


class Run:
    """A random history of one cluster; `go` raises AssertionError if a promise was broken."""

    def __init__(self, seed: int, machine: type[Coordination] = Coordination) -> None:
        self.dice = random.Random(seed)
        self.tasks = workers(3)
        self.there = Cluster(machine(self.tasks, CONFIG))
        self.next_life = 1000
        self.counters: dict[tuple[Task, str], int] = {}
        self.waits: dict[tuple[Task, str], Call] = {}
        self.due = dict.fromkeys(NAMES, inf)
        self.dead: set[Task] = set()
        self.polls: dict[Task, Call] = {}
        self.heard: dict[Task, list[int]] = {task: [] for task in self.tasks}
        for task in self.tasks:
            self.there.register(task)

    def go(self) -> None:
        for _ in range(STEPS):
            task = self.dice.choice(self.tasks)
            step = self.dice.choice(
                (self.call, self.call, self.call, self.give_up, self.die, self.back, self.pass_time)
            )
            step(task)
            self.look()
        self.finish()

    # -- events ------------------------------------------------------------------------------------

    def call(self, task: Task) -> None:
        name = self.dice.choice(NAMES)
        if task in self.dead or (task, name) in self.waits:
            return
        timeout_s = self.dice.choice((inf, 1.0, 3.0))
        if not any(where == name for _, where in self.waits):
            self.due[name] = inf
        counter = self.counters.get((task, name), 0)
        call = self.waits[task, name] = self.there.barrier(
            task, name=name, counter=counter, timeout_s=timeout_s
        )
        here = {other for other, where in self.waits if where == name}
        if call.done and call.code == OK:
            assert here == set(self.tasks), f"barrier {name} passed with {here} alone"
        if not call.done and self.due[name] == inf:
            self.due[name] = self.there.now + timeout_s  # the first deadline that is given holds

    def give_up(self, task: Task) -> None:
        for name in NAMES:
            waiting = self.waits.pop((task, name), None)
            if waiting is not None:
                self.there.machine.dropped(waiting)

    def die(self, task: Task) -> None:
        if task in self.dead or self.dice.random() < 0.5:
            return
        self.dead.add(task)
        self.give_up(task)
        if (poll := self.polls.pop(task, None)) is not None:
            self.there.machine.dropped(poll)
        life = self.there.life(task)
        if self.dice.random() < 0.5:
            self.there.tell(self.there.machine.lost(task, life, "killed", self.there.now))
            for (other, name), waiting in self.waits.items():
                assert waiting.done, f"{other} waits at {name} for {task}, which is lost"
        else:
            self.there.tell(self.there.machine.away(task, life, self.there.now))

    def back(self, task: Task) -> None:
        if task not in self.dead:
            return
        self.there.reset(task)
        self.next_life += 1
        assert self.there.register(task, self.next_life).code == OK
        self.dead.discard(task)
        for name in NAMES:
            self.counters.pop((task, name), None)

    def pass_time(self, _task: Task) -> None:
        for task in self.tasks:
            if task not in self.dead:
                self.there.beat(task)
        self.there.advance(self.dice.choice((0.1, 0.7)))

    # -- checks ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Check after each step: replies of one barrier at one moment are equal, no deadline passes
        without a reply, errors only grow."""
        told: dict[str, set[tuple[int, str]]] = {}
        for (task, name), call in list(self.waits.items()):
            if call.done:
                del self.waits[task, name]
                assert call.code in (OK, INTERNAL, DEADLINE_EXCEEDED, CANCELLED)
                assert call.counter >= self.counters.get((task, name), 0), (
                    "a round of which this task knew that it had ended"
                )
                self.counters[task, name] = call.counter + 1
                told.setdefault(name, set()).add((call.counter, call.message))
        for name, outcomes in told.items():
            rounds = [counter for counter, _ in outcomes]
            assert len(rounds) == len(set(rounds)), f"barrier {name} told {outcomes}"
        for task, name in self.waits:
            assert self.due[name] > self.there.now, f"{task} is overdue at {name}"
        for task in self.tasks:
            if task not in self.dead and self.there.state(task) == "up":
                self.ask(task)

    def ask(self, task: Task) -> None:
        poll = self.polls.get(task)
        if poll is not None and poll.done:
            if poll.code == OK:
                numbers = [error.number for error in poll.value]
                assert all(b == a + 1 for a, b in itertools.pairwise(numbers))
                before = self.heard[task]
                assert not before or not numbers or numbers[0] == before[-1] + 1, (
                    "an error was left out, or told twice"
                )
                before += numbers
            poll = None
        if poll is None:
            after = self.heard[task][-1] if self.heard[task] else 0
            self.polls[task] = self.there.poll(task, after)

    def finish(self) -> None:
        """Let all tasks return: the next rounds must pass, and nothing may be left of any task."""
        for task in self.tasks:
            self.give_up(task)
            self.dead.add(task)
            self.back(task)
        for name in NAMES:
            for _ in range(4):
                for task in self.tasks:
                    counter = self.counters.get((task, name), 0)
                    self.waits[task, name] = self.there.barrier(task, name=name, counter=counter)
                done = [self.waits[task, name] for task in self.tasks]
                codes = {call.code for call in done if call.done}
                self.look_at_last(name)
                if codes == {OK} and all(call.done for call in done):
                    break
            else:
                raise AssertionError(f"barrier {name} does not recover")
        for poll in self.polls.values():
            self.there.machine.dropped(poll)
        assert self.there.machine.waiting == 0

    def look_at_last(self, name: str) -> None:
        for task in self.tasks:
            call = self.waits.pop((task, name))
            if call.done:
                self.counters[task, name] = call.counter + 1
            else:
                self.there.machine.dropped(call)


def test_random_barriers_end_alike_for_all(seed: int) -> None:
    Run(seed).go()


def planted(**bugs: Any) -> type[Coordination]:
    """A machine whose barriers have these methods instead of their own."""
    barriers = type("PlantedBarriers", (Barriers,), bugs)

    class Planted(Coordination):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._barriers = barriers()

    return Planted


def _counts_those_who_have_gone(self: Barriers, ticket: Any) -> None:
    """The bug: a caller that has disconnected still counts."""


END = Barriers._end  # reach: two planted bugs change what it does


def _forgets_to_tell_one(
    self: Barriers, barrier: _Barrier, code: int, message: str
) -> list[Effect]:
    told = END(self, barrier, code, message)
    return told[1:] if len(told) > 2 else told


def _tells_only_the_first(
    self: Barriers, barrier: _Barrier, code: int, message: str
) -> list[Effect]:
    told = END(self, barrier, code, message)
    if code and len(told) > 1:
        last = told[-1]
        assert isinstance(last, ReplyValue)
        told[-1] = ReplyValue(last.ticket, last.value._replace(message="something else"))
    return told


def _one_is_enough_missing(self: Barriers, *args: Any) -> list[Effect]:
    told = Barriers.arrived(self, *args)
    barrier = self._barriers.get(args[1])
    if (
        barrier is not None
        and barrier.round is not None
        and len(barrier.round.arrived) == len(barrier.round.tasks) - 1
    ):
        return told + self._end(barrier, OK, "")
    return told


def _the_dead_are_waited_for(self: Barriers, task: Task, why: str) -> list[Effect]:
    return []


def _no_time_passes(self: Barriers, now: float) -> list[Effect]:
    self.deadline = inf
    return []


@pytest.mark.parametrize(
    "bugs",
    [
        {"dropped": _counts_those_who_have_gone},
        {"_end": _forgets_to_tell_one},
        {"_end": _tells_only_the_first},
        {"arrived": _one_is_enough_missing},
        {"task_failed": _the_dead_are_waited_for},
        {"ticked": _no_time_passes},
    ],
    ids=lambda bugs: next(iter(bugs.values())).__name__.strip("_"),
)
def test_planted_bug_is_found(bugs: dict[str, Any]) -> None:
    machine = planted(**bugs)
    for seed in range(SEEDS_TO_FIND_A_BUG):
        try:
            Run(seed, machine).go()
        except (AssertionError, KeyError):
            return
    pytest.fail("the checker did not see it")


def test_repeated_or_missing_errors_are_found() -> None:
    class Forgets(Coordination):
        def polled(
            self, ticket: Any, task: Task, incarnation: int, after: int, *args: Any
        ) -> list[Effect]:
            return super().polled(ticket, task, incarnation, after + 1, *args)

    class Repeats(Coordination):
        def polled(
            self, ticket: Any, task: Task, incarnation: int, after: int, *args: Any
        ) -> list[Effect]:
            return super().polled(ticket, task, incarnation, max(0, after - 1), *args)

    for machine in (Forgets, Repeats):
        with pytest.raises(AssertionError, match="an error was left out, or told twice"):
            run_many(machine)


def run_many(machine: type[Coordination]) -> None:
    for seed in range(SEEDS_TO_FIND_A_BUG):
        Run(seed, machine).go()

"""What a parameter server remembers of updates, steps and sessions, held to its promises, also over a network that loses and repeats."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from zmqdist.errors import InvalidArgumentError, ResourceExhaustedError
from zmqdist.variables import updates_machine as updates
from zmqdist.variables.updates_machine import (
    APPLIED,
    DONE,
    LATE,
    NEW,
    RUNNING,
    SETTLED,
    Keys,
    Sessions,
    Steps,
    UpdateLog,
)


def test_u2_a_question_that_comes_again_finds_the_answer() -> None:
    log = UpdateLog(8)
    assert log.begin(1, 1, 0) == (NEW, None)
    assert log.begin(1, 1, 0) == (RUNNING, None)
    log.end(1, 1, "five")
    assert log.begin(1, 1, 0) == (DONE, "five")
    assert log.begin(2, 1, 0) == (NEW, None)


def test_u1_what_is_settled_is_not_carried_out_when_it_comes_late() -> None:
    log = UpdateLog(8)
    log.begin(1, 1, 0)
    log.end(1, 1, "five")
    log.begin(1, 2, 1)
    assert len(log) == 1
    assert log.begin(1, 1, 0) == (SETTLED, None)


def test_u3_what_failed_may_be_asked_again() -> None:
    log = UpdateLog(8)
    log.begin(1, 1, 0)
    log.fail(1, 1)
    assert log.begin(1, 1, 0) == (NEW, None)


def test_u4_the_longest_silent_client_goes_first_and_none_that_is_carried_out() -> None:
    log = UpdateLog(2)
    for client in (1, 2):
        log.begin(client, 1, 0)
    log.end(2, 1, None)
    log.begin(3, 1, 0)
    assert log.clients == 2
    assert log.begin(1, 1, 0) == (RUNNING, None)


def test_u1_an_update_with_a_key_is_carried_out_once_and_keys_are_bounded() -> None:
    keys = Keys(2)
    assert keys.begin("a") == (NEW, None)
    assert keys.begin("a") == (RUNNING, None)
    keys.fail("a")
    assert keys.begin("a") == (NEW, None)
    keys.end("a", 1)
    assert keys.begin("a") == (DONE, 1)
    for key in ("b", "c"):
        keys.begin(key)
    assert len(keys) == 2
    assert keys.begin("b") == (RUNNING, None)


# -- steps ------------------------------------------------------------------------------------------------------------


def test_u5_a_step_is_applied_with_the_last_of_its_gradients_and_later_ones_are_late() -> None:
    steps = Steps(4)
    assert steps.push(0, "a", 2).verdict == ""
    pushed = steps.push(0, "b", 2)
    assert (pushed.verdict, pushed.applied) == (APPLIED, ("a", "b"))
    assert steps.push(0, "c", 2).verdict == LATE
    assert steps.waiting() == []


def test_u6_who_waits_in_an_earlier_step_is_late_when_a_later_one_is_applied() -> None:
    steps = Steps(4)
    steps.push(0, "a", 2)
    steps.push(1, "b", 2)
    pushed = steps.push(1, "c", 2)
    assert (pushed.applied, pushed.late, pushed.dropped) == (("b", "c"), ("a",), (0,))
    assert steps.applied == 1


def test_a_step_that_cannot_be_changes_nothing() -> None:
    steps = Steps(1)
    steps.push(0, "a", 2)
    for step, wanted, error in (
        (0, 3, InvalidArgumentError),
        (-1, 2, InvalidArgumentError),
        (1, 0, InvalidArgumentError),
        (1, 2, ResourceExhaustedError),
    ):
        with pytest.raises(error):
            steps.push(step, "b", wanted)
    assert steps.waiting() == ["a"]


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_u7_a_session_is_dropped_at_the_open_of_another_program_when_its_own_was_gone_for_long() -> None:
    sessions = Sessions(10)
    assert sessions.open(1, 100, 11, [11], 0.0) == []
    sessions.gone(11, 5.0)
    assert sessions.open(2, 200, 22, [22], 14.0) == []
    assert sessions.open(2, 201, 22, [22], 15.0) == [100]
    assert 100 not in sessions
    assert len(sessions) == 2


def test_u7_a_program_that_is_connected_again_keeps_its_session() -> None:
    sessions = Sessions(10)
    sessions.open(1, 100, 11, [11], 0.0)
    sessions.gone(11, 0.0)
    assert sessions.open(2, 200, 22, [11, 22], 50.0) == []
    assert sessions.open(2, 200, 22, [22], 55.0) == []
    assert sessions.close(100)
    assert not sessions.close(100)


# -- at random --------------------------------------------------------------------------------------------------------


class _World:
    """Clients that ask again what was not answered, a network that loses, repeats and reorders, and a ps that counts."""

    def __init__(self, seed: int, log: Any) -> None:
        self.random = random.Random(seed)
        self.log = log
        self.applied: Counter[tuple[int, int]] = Counter()
        self.running: list[tuple[int, int]] = []
        self.answers: dict[tuple[int, int], set[Any]] = {}
        self.open: dict[int, list[int]] = {client: [] for client in range(3)}
        self.last: dict[int, int] = dict.fromkeys(self.open, 0)
        self.network: list[tuple[str, int, int, Any]] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.random.choice((self.ask, self.ask_again, self.deliver, self.deliver, self.lose, self.finish))()
        while any(self.open.values()):
            self.ask_again()
            while self.network:
                self.deliver()
            while self.running:
                self.finish()
        for client, last in self.last.items():
            for number in range(1, last + 1):
                assert self.applied[client, number] == 1, f"{client}/{number}: {self.applied[client, number]} times"
                assert len(self.answers[client, number]) == 1
        for client, last in self.last.items():
            assert self.log.begin(client, last + 1, last) == (NEW, None)
        assert len(self.log) == len(self.last)

    def settled(self, client: int) -> int:
        return min(self.open[client], default=self.last[client] + 1) - 1

    def ask(self) -> None:
        client = self.random.randrange(3)
        self.last[client] += 1
        self.open[client].append(self.last[client])
        self.network.append(("ask", client, self.last[client], self.settled(client)))

    def ask_again(self) -> None:
        client = self.random.randrange(3)
        if self.open[client]:
            number = self.random.choice(self.open[client])
            self.network.append(("ask", client, number, self.settled(client)))

    def lose(self) -> None:
        if self.network and self.random.random() < 0.5:
            self.network.pop(self.random.randrange(len(self.network)))

    def deliver(self) -> None:
        if not self.network:
            return
        index = self.random.randrange(len(self.network))
        what, client, number, more = self.network[index]
        if self.random.random() < 0.8:
            self.network.pop(index)
        if what == "answer":
            self.answers.setdefault((client, number), set()).add(more)
            if number in self.open[client]:
                self.open[client].remove(number)
            return
        found, answer = self.log.begin(client, number, more)
        if found == NEW:
            self.running.append((client, number))
        elif found == DONE:
            self.network.append(("answer", client, number, answer))

    def finish(self) -> None:
        if not self.running:
            return
        client, number = self.running.pop(self.random.randrange(len(self.running)))
        if self.random.random() < 0.2:
            self.log.fail(client, number)
            return
        self.applied[client, number] += 1
        answer = self.random.random()
        self.log.end(client, number, answer)
        self.network.append(("answer", client, number, answer))


def test_u1_u2_u4_each_update_is_carried_out_once_whatever_the_network_does(seed: int) -> None:
    _World(seed, UpdateLog(8)).run(400)


class _ForgetsAnswers(UpdateLog):
    def end(self, client: int, sequence: int, answer: Any) -> None:
        self.fail(client, sequence)


class _SettlesTooMuch(UpdateLog):
    def begin(self, client: int, sequence: int, settled: int) -> tuple[str, Any]:
        return super().begin(client, sequence, settled + 1)


class _ForgetsWhatIsSettled(UpdateLog):
    def begin(self, client: int, sequence: int, settled: int) -> tuple[str, Any]:
        found = super().begin(client, sequence, settled)
        if found[0] == SETTLED:
            self._clients[client].answers[sequence] = updates._RUNNING  # reach: plants a bug
            return NEW, None
        return found


class _RunsTwice(UpdateLog):
    def begin(self, client: int, sequence: int, settled: int) -> tuple[str, Any]:
        found = super().begin(client, sequence, settled)
        return (NEW, None) if found[0] == RUNNING else found


class _KeepsAll(UpdateLog):
    def begin(self, client: int, sequence: int, settled: int) -> tuple[str, Any]:
        return super().begin(client, sequence, 0)


@pytest.mark.parametrize("planted", [_ForgetsAnswers, _SettlesTooMuch, _ForgetsWhatIsSettled, _RunsTwice, _KeepsAll])
def test_planted_bugs_are_found(planted: Callable[[int], UpdateLog]) -> None:
    def found(seed: int) -> bool:
        try:
            _Bounded(seed, planted(8)).run(400)
        except (AssertionError, KeyError, RecursionError):
            return True
        return False

    assert any(found(seed) for seed in range(30))


class _Bounded(_World):
    """One that gives up on a ps that never answers."""

    asked_again = 0

    def ask_again(self) -> None:
        self.asked_again += 1
        assert self.asked_again < 20_000, "no end"
        super().ask_again()


def test_u5_u6_in_any_order_each_step_is_of_exactly_k_and_everybody_has_one_verdict(seed: int) -> None:
    rng = random.Random(seed)
    wanted, steps = rng.randint(1, 3), Steps(100)
    pushes = [(step, (step, worker)) for step in range(6) for worker in range(rng.randint(0, 5))]
    rng.shuffle(pushes)
    verdicts: dict[Any, str] = {}
    applied: list[int] = []
    for step, ticket in pushes:
        pushed = steps.push(step, ticket, wanted)
        given = {**dict.fromkeys(pushed.applied, APPLIED), **dict.fromkeys(pushed.late, LATE)}
        if pushed.verdict == LATE:
            given[ticket] = LATE
        assert not given.keys() & verdicts.keys()
        verdicts |= given
        if pushed.verdict == APPLIED:
            applied.append(step)
            assert len(pushed.applied) == wanted
            assert {each[0] for each in pushed.applied} == {step}
    assert applied == sorted(set(applied))
    assert verdicts.keys() | set(steps.waiting()) == {ticket for _, ticket in pushes}
    assert all(ticket[0] > steps.applied for ticket in steps.waiting())  # type: ignore[index]

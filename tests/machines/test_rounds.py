"""The leader's decision, with no network: rule by rule, and whole groups under a random schedule with planted bugs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from zmqdist.errors import ABORTED, CANCELLED, DEADLINE_EXCEEDED, INVALID_ARGUMENT, UNAVAILABLE
from zmqdist.tasks.rounds_machine import Agreed, Announcement, Failed, Rounds, Verdict

NAMES = ["worker:0", "worker:1", "worker:2"]


def group(size: int = 3) -> Rounds:
    return Rounds([f"worker:{rank}" for rank in range(size)])


def one(rank: int, number: int = 1, what: str = "sum", **more: Any) -> Announcement:
    return Announcement(rank, more.pop("life", 100 + rank), number, what, what, **more)


def told(verdicts: list[Verdict]) -> tuple[list[int], int]:
    """(ranks, code) of one verdict; code 0 when they agreed."""
    assert len(verdicts) == 1
    verdict = verdicts[0]
    return [member.rank for member in verdict.members], 0 if isinstance(verdict, Agreed) else verdict.code


def come(rounds: Rounds, *ranks: int, number: int = 1) -> None:
    for rank in ranks:
        assert rounds.announced(one(rank, number)) == []


def test_they_agree_when_all_have_come_whatever_the_order() -> None:
    rounds = group()
    come(rounds, 2, 0)
    assert told(rounds.announced(one(1))) == ([0, 1, 2], 0)
    come(rounds, 1, 2, number=2)
    verdicts = rounds.announced(one(0, 2))
    assert isinstance(verdicts[0], Agreed)
    assert verdicts[0].round == 2


def test_different_things_are_an_error_of_all_that_says_who_brought_what() -> None:
    rounds = group()
    come(rounds, 0, 2)
    verdicts = rounds.announced(one(1, what="max"))
    assert told(verdicts) == ([0, 1, 2], INVALID_ARGUMENT)
    assert isinstance(verdicts[0], Failed)
    assert "worker:0, worker:2: sum; worker:1: max" in verdicts[0].message
    come(rounds, 0, 1, number=2)
    assert told(rounds.announced(one(2, 2))) == ([0, 1, 2], 0)


def test_the_time_of_one_is_the_end_for_all_that_came_and_for_those_that_come_late() -> None:
    rounds = group()
    rounds.announced(one(0, due=5.0))
    come(rounds, 1)
    assert rounds.deadline == 5.0
    assert rounds.ticked(4.9) == []
    verdicts = rounds.ticked(5.0)
    assert told(verdicts) == ([0, 1], DEADLINE_EXCEEDED)
    assert isinstance(verdicts[0], Failed)
    assert verdicts[0].message.endswith("1 of 3 members that have not come within the time: worker:2")
    late = rounds.announced(one(2))
    assert told(late) == ([2], DEADLINE_EXCEEDED)
    assert isinstance(late[0], Failed)
    assert late[0].message == verdicts[0].message
    come(rounds, 0, 1, number=2)
    assert told(rounds.announced(one(2, 2))) == ([0, 1, 2], 0)


def test_a_member_that_fails_or_cancels_ends_the_round_and_the_next_one_works() -> None:
    rounds = group()
    come(rounds, 0)
    assert told(rounds.announced(one(1, failure=(CANCELLED, "not now")))) == ([0, 1], CANCELLED)
    assert told(rounds.announced(one(2))) == ([2], CANCELLED)
    come(rounds, 0, 1, number=2)
    assert told(rounds.announced(one(2, 2))) == ([0, 1, 2], 0)


def test_a_member_that_goes_ends_the_round_and_is_welcome_in_its_next_life() -> None:
    rounds = group()
    come(rounds, 0, 1)
    assert told(rounds.gone(2, "worker:2 has gone")) == ([0, 1], UNAVAILABLE)
    assert rounds.gone(2, "worker:2 has gone") == []
    come(rounds, 0, 1, number=2)
    assert told(rounds.announced(one(2, 1, life=7))) == ([0, 1, 2], 0)
    come(rounds, 0, 1, number=3)
    assert told(rounds.announced(one(2, 2, life=7))) == ([0, 1, 2], 0)


def test_a_leader_that_has_begun_a_new_life_goes_on_where_the_members_are() -> None:
    rounds = group()
    come(rounds, 1, 2, number=58)
    assert told(rounds.announced(one(0, 58))) == ([0, 1, 2], 0)
    come(rounds, 1, 2, number=59)
    assert rounds.deadline == float("inf")


def test_a_member_that_has_given_up_a_round_ends_it_for_the_others() -> None:
    rounds = group()
    come(rounds, 0, 1)
    assert told(rounds.announced(one(2))) == ([0, 1, 2], 0)
    come(rounds, 0, number=2)
    verdicts = rounds.announced(one(2, 3))  # its number 2 never arrived here
    assert told(verdicts) == ([0], ABORTED)
    assert told(rounds.announced(one(1, 2))) == ([1], ABORTED)
    come(rounds, 0, number=3)
    assert told(rounds.announced(one(1, 3))) == ([0, 1, 2], 0)


def test_who_does_not_wait_any_more_ends_the_round() -> None:
    rounds = group()
    token = object()
    come(rounds, 1)
    rounds.announced(one(0, token=token))
    assert rounds.withdrew(object()) == []
    assert told(rounds.withdrew(token)) == ([0, 1], UNAVAILABLE)
    assert rounds.withdrew(token) == []


def test_after_an_abort_everything_fails_at_once_until_the_reset() -> None:
    rounds = group()
    come(rounds, 0)
    assert told(rounds.aborted(UNAVAILABLE, "peer down")) == ([0], UNAVAILABLE)
    assert rounds.aborted(CANCELLED, "again") == []
    for number in (1, 2, 3):
        assert told(rounds.announced(one(1, number))) == ([1], UNAVAILABLE)
    rounds.reset()
    come(rounds, 0, number=2)
    come(rounds, 1, number=4)
    assert told(rounds.announced(one(2, 1))) == ([0, 1, 2], 0)
    come(rounds, 0, number=3)
    come(rounds, 1, number=5)
    assert told(rounds.announced(one(2, 2))) == ([0, 1, 2], 0)


# -- whole groups under a random schedule ------------------------------------------------------------------------------


class Member:
    """A member that calls one operation after the other, each with the number of the step as its value."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.life = 1 + rank
        self.number = 0
        self.waits: Announcement | None = None
        self.alive = True


class World:
    """Members and a leader; what is announced arrives in any order, members die and come back, time passes."""

    def __init__(self, chance: random.Random, make: Callable[[list[str]], Rounds]) -> None:
        self.chance = chance
        self.size = chance.randint(1, 5)
        self.rounds = make([f"worker:{rank}" for rank in range(self.size)])
        self.members = [Member(rank) for rank in range(self.size)]
        self.now = 0.0
        self.lives = 100
        self.apart: dict[tuple[int, int], int] = {}
        self.agreed = 0

    def run(self, steps: int, faults: bool) -> None:
        for _ in range(steps):
            member = self.chance.choice(self.members)
            what = self.chance.choices(["call", "die", "tick", "mismatch", "cancel"], [20, 1, 2, 1, 1])[0]
            if member.waits is None and member.alive and (what in ("call", "mismatch", "cancel") or not faults):
                self._call(member, what if faults else "call")
            elif what == "die" and faults and member.alive and self.size > 1:
                member.alive, member.waits = False, None
                self._tell(self.rounds.gone(member.rank, f"worker:{member.rank} has gone"))
            elif not member.alive:
                self.lives += 1
                self.members[member.rank] = Member(member.rank)
                self.members[member.rank].life = self.lives
            elif what == "tick" and faults:
                self.now = min(self.now + self.chance.random() * 10, max(self.now, self.rounds.deadline))
                self._tell(self.rounds.ticked(self.now))

    def _call(self, member: Member, what: str) -> None:
        member.number += 1
        failure = (CANCELLED, "cancelled") if what == "cancel" else None
        told = "max" if what == "mismatch" else "sum"
        member.waits = Announcement(
            member.rank, member.life, member.number, told, told, self.now + 5.0, failure=failure
        )
        self._tell(self.rounds.announced(member.waits))

    def _tell(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            waited = [self.members[each.rank].waits for each in verdict.members]
            assert all(one is each for one, each in zip(waited, verdict.members, strict=True) if one is not None), (
                "told twice"
            )
            if isinstance(verdict, Agreed):
                self.agreed += 1
                assert [each.rank for each in verdict.members] == list(range(self.size)), "agreed without all"
                assert len({each.what for each in verdict.members}) == 1, "agreed on different things"
                assert all(each.failure is None for each in verdict.members), "agreed with one that failed"
                for each in verdict.members:  # nothing gets lost here: who was together stays together
                    first = verdict.members[0]
                    apart = self.apart.setdefault((first.life, each.life), each.number - first.number)
                    assert apart == each.number - first.number, "agreed with one of another round"
                assert all(each.due >= self.now for each in verdict.members), "agreed too late"
            for each in verdict.members:
                self.members[each.rank].waits = None

    def quiet(self) -> None:
        """Safety first, then liveness: without faults everybody agrees again, after one round for each at most."""
        for member in list(self.members):
            if not member.alive:
                self.lives += 1
                self.members[member.rank] = Member(member.rank)
                self.members[member.rank].life = self.lives
        before = self.agreed
        self.now += 100.0
        self._tell(self.rounds.ticked(self.now))
        self.run(self.size * 60, faults=False)
        assert self.agreed >= before + 3, "the group does not work any more"
        assert self.rounds.deadline > self.now


def simulate(seed: int, make: Callable[[list[str]], Rounds] = Rounds) -> None:
    world = World(random.Random(seed), make)
    world.run(300, faults=True)
    world.quiet()


def test_a_group_keeps_its_promises_under_any_schedule(seed: int) -> None:
    simulate(seed)


class WithoutDeadlines(Rounds):
    __slots__ = ()

    def ticked(self, now: float) -> list[Verdict]:
        return []


class AgreesOnAnything(Rounds):
    __slots__ = ()

    def _verdict(self) -> Verdict:
        for each in self.come.values():
            each.told = ""
        agreed = Agreed(self.round, self._in_order())
        self.come, self.round = {}, self.round + 1
        return agreed


class TakesLateOnesIn(Rounds):
    __slots__ = ()

    def _shift_of(self, one: Announcement) -> int:
        return self.round - one.number


class TellsOnlyOne(Rounds):
    __slots__ = ()

    def _fail(self, code: int, message: str) -> list[Verdict]:
        members = self._in_order()[:1]
        self.come = {}
        self.round += 1
        return [Failed(members, code, message)]


@pytest.mark.parametrize("bug", [WithoutDeadlines, AgreesOnAnything, TakesLateOnesIn, TellsOnlyOne])
def test_planted_bugs_are_found(bug: type[Rounds]) -> None:
    found = 0
    for number in range(60):
        try:
            simulate(number, bug)
        except AssertionError:
            found += 1
    assert found


def test_members_that_were_told_of_an_error_meet_again_wherever_each_was() -> None:
    """One failed in the middle of operation 1, which the others have ended, and those in 2."""
    rounds = group()
    come(rounds, 0, 1)
    assert told(rounds.announced(one(2))) == ([0, 1, 2], 0)
    come(rounds, 1, 2, number=2)
    assert told(rounds.gone(0, "worker:0 has gone")) == ([1, 2], UNAVAILABLE)
    assert rounds.announced(one(1, 3, anew=True)) == []
    assert rounds.announced(one(2, 3, anew=True)) == []
    assert told(rounds.announced(one(0, 2, anew=True))) == ([0, 1, 2], 0)
    come(rounds, 0, number=3)
    come(rounds, 1, number=4)
    assert told(rounds.announced(one(2, 4))) == ([0, 1, 2], 0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["leader first", "member first"])
def test_a_leader_in_a_new_life_meets_members_that_go_on_counting(order: tuple[int, int]) -> None:
    rounds = group()
    for rank in order:
        come(rounds, rank, number=58 if rank else 1)
    assert told(rounds.announced(one(2, 58))) == ([0, 1, 2], 0)
    come(rounds, 0, number=2)
    come(rounds, 1, number=59)
    assert told(rounds.announced(one(2, 59))) == ([0, 1, 2], 0)

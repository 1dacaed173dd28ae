"""The leader's decision rule by rule, with no network; whole groups under faults are in
tests/sim/test_tasks.py."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from zmqdist.errors import (
    ABORTED,
    CANCELLED,
    DEADLINE_EXCEEDED,
    INVALID_ARGUMENT,
    OK,
    UNAVAILABLE,
    InvalidArgumentError,
)
from zmqdist.tasks.agreement_machine import Agreed, Agreements, Announcement, Disagreed, Verdict

TASKS = [("worker", rank) for rank in range(3)]


class Group:
    """Three tasks that announce operations, each one after the other."""

    def __init__(self) -> None:
        self.leader = Agreements()

    def announce(
        self, rank: int, counter: int | None = 0, what: str = "sum", **more: Any
    ) -> list[Verdict]:
        return self.leader.announced("g", TASKS, Announcement(rank, counter, what, **more))

    def come(self, *ranks: int, counter: int | None = 0) -> None:
        for rank in ranks:
            assert self.announce(rank, counter) == []

    def agree(self, *counters: int | None) -> int:
        """Have all members announce, each for its own round. Return the number of the round on
        which they agree."""
        for rank, counter in enumerate(counters[:-1]):
            self.come(rank, counter=counter)
        (verdict,) = self.announce(len(counters) - 1, counters[-1])
        assert isinstance(verdict, Agreed)
        assert [one.rank for one in verdict.members] == list(range(len(counters)))
        return verdict.counter


def ended(verdicts: list[Verdict]) -> tuple[list[int], int]:
    """Return (ranks, code) of the only verdict; the code is OK if the members agreed."""
    (verdict,) = verdicts
    return [one.rank for one in verdict.members], OK if isinstance(
        verdict, Agreed
    ) else verdict.code


def message(verdicts: list[Verdict]) -> str:
    (verdict,) = verdicts
    assert isinstance(verdict, Disagreed)
    return verdict.message


def test_members_agree_when_all_have_announced_in_any_order() -> None:
    group = Group()
    group.come(2, 0)
    assert ended(group.announce(1)) == ([0, 1, 2], OK)
    assert group.agree(1, 1, 1) == 1


def test_different_operations_are_an_error_for_all_that_lists_each_member_and_its_operation() -> (
    None
):
    group = Group()
    group.come(0, 2)
    verdicts = group.announce(1, what="max")
    assert ended(verdicts) == ([0, 1, 2], INVALID_ARGUMENT)
    assert "worker:0, worker:2: sum; worker:1: max" in message(verdicts)
    assert group.agree(None, None, None) == 1


def test_the_time_out_of_one_member_ends_the_round_for_all_even_for_late_ones() -> None:
    group = Group()
    group.come(1)
    group.announce(0, due=5.0)
    assert group.leader.deadline == 5.0
    assert group.leader.ticked(4.9) == []
    verdicts = group.leader.ticked(5.0)
    assert ended(verdicts) == ([0, 1], DEADLINE_EXCEEDED)
    assert (
        message(verdicts)
        == "sum timed out: 2/3 tasks came, the first was worker:1; missing: worker:2"
    )
    late = group.announce(2)
    assert (ended(late), message(late)) == (([2], DEADLINE_EXCEEDED), message(verdicts))
    assert group.agree(None, None, None) == 1
    assert group.leader.deadline == inf


def test_the_shortest_deadline_of_all_members_counts() -> None:
    group = Group()
    group.announce(0, due=9.0)
    group.announce(1, due=5.0)
    assert group.leader.deadline == 5.0


def test_a_member_that_fails_or_cancels_ends_the_round_and_the_next_one_works() -> None:
    group = Group()
    group.come(0)
    verdicts = group.announce(1, failure=(CANCELLED, "not now"))
    assert (ended(verdicts), message(verdicts)) == (([0, 1], CANCELLED), "not now")
    assert ended(group.announce(2)) == ([2], CANCELLED)
    assert group.agree(None, 1, None) == 1


def test_a_member_that_fails_first_ends_the_round_for_those_that_come_after_it() -> None:
    group = Group()
    assert ended(group.announce(1, failure=(CANCELLED, "not now"))) == ([1], CANCELLED)
    assert ended(group.announce(0)) == ([0], CANCELLED)
    assert ended(group.announce(2)) == ([2], CANCELLED)
    assert group.agree(None, 1, None) == 1


def test_a_member_that_ends_fails_the_round_and_its_next_incarnation_joins_the_next() -> None:
    group = Group()
    assert group.agree(0, 0, 0) == 0
    group.come(0, 1, counter=1)
    assert ended(group.leader.member_gone(TASKS[2], "worker:2 has gone")) == ([0, 1], UNAVAILABLE)
    assert group.leader.member_gone(TASKS[2], "worker:2 has gone") == []
    assert group.agree(None, None, None) == 2
    assert group.agree(3, 3, 3) == 3


@pytest.mark.parametrize(
    "counters", [(0, 58, 58), (58, 58, 0)], ids=["leader first", "leader last"]
)
def test_a_new_incarnation_of_the_leader_agrees_with_members_that_continue_counting(
    counters: tuple[int | None, ...],
) -> None:
    group = Group()
    assert group.agree(*counters) == 58
    assert group.agree(59, 59, 59) == 59


def test_a_member_that_is_ahead_of_the_others_never_joins_their_round() -> None:
    """The message of its failure in round 1 was lost: no member may get the sum of two different
    steps."""
    group = Group()
    assert group.agree(0, 0, 0) == 0
    group.come(0, counter=1)
    verdicts = group.announce(2, counter=2)
    assert ended(verdicts) == ([0, 2], ABORTED)
    assert "worker:2 came to round 2 of sum, the others to round 1" in message(verdicts)
    assert ended(group.announce(1, counter=1)) == ([1], ABORTED)
    assert group.agree(None, None, None) == 2


def test_a_member_that_fails_in_the_place_of_an_operation_that_has_failed_already_ends_no_other_one() -> (
    None
):
    group = Group()
    assert group.agree(0, 0, 0) == 0
    group.announce(1, 1, failure=(CANCELLED, "not now"))
    assert ended(group.announce(0, None, failure=(CANCELLED, "nor I"))) == ([0], CANCELLED)
    assert ended(group.announce(2, 1)) == ([2], CANCELLED)
    assert group.agree(None, 2, None) == 2


def test_two_late_failures_of_one_member_end_no_other_round() -> None:
    group = Group()
    assert group.agree(0, 0, 0) == 0
    for counter in (1, 2):
        assert ended(group.announce(0, counter, failure=(CANCELLED, "not now"))) == ([0], CANCELLED)
    group.come(0, counter=3)
    for counter in (1, 2):
        assert ended(group.announce(1, counter, failure=(CANCELLED, "late"))) == ([1], CANCELLED)
        assert ended(group.announce(2, counter, failure=(CANCELLED, "late"))) == ([2], CANCELLED)
    group.come(1, counter=3)
    assert ended(group.announce(2, counter=3)) == ([0, 1, 2], OK)


def test_a_member_that_got_another_error_is_not_told_again_of_the_one_that_it_missed() -> None:
    """The leader's new incarnation counts from 0. A member that is ahead learns this, and its next
    failure ends the right round."""
    group = Group()
    assert ended(group.announce(2, None, failure=(CANCELLED, "not now"))) == ([2], CANCELLED)
    (verdict,) = group.announce(1, 2)
    assert isinstance(verdict, Disagreed)
    assert (verdict.code, verdict.counter) == (ABORTED, 0)
    group.come(2, counter=1)
    assert ended(group.announce(1, 1, failure=(CANCELLED, "nor I"))) == ([1, 2], CANCELLED)


def test_a_late_failure_ends_no_round_of_the_next_incarnation_of_the_leader() -> None:
    """That incarnation knows of no round before the first one that is announced to it."""
    group = Group()
    group.come(1, counter=8)
    assert ended(group.announce(2, 7, failure=(CANCELLED, "late"))) == ([2], CANCELLED)
    group.come(2, counter=8)
    assert ended(group.announce(0, 0)) == ([0, 1, 2], OK)


def test_an_error_says_which_round_has_ended_with_it_but_for_that_of_an_abort() -> None:
    group = Group()
    group.come(0)
    (failed,) = group.announce(1, failure=(CANCELLED, "not now"))
    (late,) = group.announce(2)
    (aborted,) = [*group.announce(0, 1), *group.leader.aborted("g", TASKS, CANCELLED, "aborted")]
    (while_aborted,) = group.announce(1, 1)
    verdicts = (failed, late, aborted, while_aborted)
    assert all(isinstance(verdict, Disagreed) for verdict in verdicts)
    assert [verdict.counter for verdict in verdicts] == [0, 0, None, None]


def test_the_first_operation_of_a_member_that_announces_too_late_fails() -> None:
    group = Group()
    group.announce(0, due=1.0)
    assert ended(group.leader.ticked(1.0)) == ([0], DEADLINE_EXCEEDED)
    assert ended(group.announce(1)) == ([1], DEADLINE_EXCEEDED)
    assert ended(group.announce(2)) == ([2], DEADLINE_EXCEEDED)
    assert group.agree(None, None, None) == 1


def test_a_member_in_its_next_incarnation_is_not_told_what_the_earlier_one_has_missed() -> None:
    group = Group()
    group.come(0, 1)
    assert ended(group.leader.member_gone(TASKS[2], "worker:2 has gone")) == ([0, 1], UNAVAILABLE)
    assert group.agree(None, None, 0) == 1


def test_a_caller_that_does_not_wait_any_more_ends_the_round() -> None:
    group, token = Group(), object()
    group.come(1)
    group.announce(0, token=token)
    assert group.leader.announcement_withdrawn("g", object()) == []
    assert ended(group.leader.announcement_withdrawn("g", token)) == ([0, 1], UNAVAILABLE)
    assert group.leader.announcement_withdrawn("g", token) == []


def test_after_an_abort_each_operation_fails_at_once_until_the_reset() -> None:
    group = Group()
    assert group.agree(0, 0, 0) == 0
    group.come(0, counter=1)
    assert ended(group.leader.aborted("g", TASKS, UNAVAILABLE, "peer down")) == ([0], UNAVAILABLE)
    assert group.leader.aborted("g", TASKS, CANCELLED, "again") == []
    for _ in range(3):
        assert ended(group.announce(1, 1)) == ([1], UNAVAILABLE)
    group.leader.reset("g")
    assert group.agree(None, None, 1) == 1
    assert group.agree(2, 2, 2) == 2


def test_members_that_got_an_error_agree_again_wherever_each_was() -> None:
    """One member failed during operation 0, which the others have ended; these failed during
    operation 1."""
    group = Group()
    assert group.agree(0, 0, 0) == 0
    group.come(1, 2, counter=1)
    assert ended(group.leader.member_gone(TASKS[0], "worker:0 has gone")) == ([1, 2], UNAVAILABLE)
    assert group.agree(None, None, None) == 2
    assert group.agree(3, 3, 3) == 3


def test_a_member_that_announces_again_gets_an_error_for_the_first_and_waits_with_the_second() -> (
    None
):
    group = Group()
    group.come(0, 1)
    assert ended(group.announce(1)) == ([1], CANCELLED)
    assert ended(group.announce(2)) == ([0, 1, 2], OK)


def test_a_round_that_has_passed_is_not_passed_again_by_one_member_alone() -> None:
    group = Group()
    assert [group.agree(0, 0, 0), group.agree(1, 1, 1)] == [0, 1]
    assert ended(group.announce(1, counter=1)) == ([1], ABORTED)


def test_groups_are_separate_and_a_name_with_other_members_is_refused() -> None:
    group = Group()
    group.come(0)
    other = TASKS[:2]
    assert group.leader.announced("other", other, Announcement(0, None, "max")) == []
    assert ended(group.leader.announced("other", other, Announcement(1, None, "max"))) == (
        [0, 1],
        OK,
    )
    with pytest.raises(
        InvalidArgumentError, match="group g has the members worker:0, worker:1, worker:2, not"
    ):
        group.leader.announced("g", other, Announcement(1, None, "max"))
    assert group.leader.waiting() == {"g": ([TASKS[0]], TASKS[1:])}


def test_the_end_of_the_leader_ends_all_waiting_announcements() -> None:
    group = Group()
    group.come(0, 2)
    assert ended(group.leader.stopped("the server was stopped")) == ([0, 2], CANCELLED)
    assert group.leader.waiting() == {}

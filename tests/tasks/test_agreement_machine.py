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


def test_members_agree_in_any_order() -> None:
    group = Group()
    group.come(2, 0)
    assert ended(group.announce(1)) == ([0, 1, 2], OK)
    assert group.agree(1, 1, 1) == 1


def test_different_operations_fail_with_list() -> None:
    group = Group()
    group.come(0, 2)
    verdicts = group.announce(1, what="max")
    assert ended(verdicts) == ([0, 1, 2], INVALID_ARGUMENT)
    assert "worker:0, worker:2: sum; worker:1: max" in message(verdicts)
    assert group.agree(None, None, None) == 1


def test_time_out_of_one_member_ends_round() -> None:
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


def test_shortest_deadline_counts() -> None:
    group = Group()
    group.announce(0, due=9.0)
    group.announce(1, due=5.0)
    assert group.leader.deadline == 5.0


def test_failed_member_ends_only_its_round() -> None:
    group = Group()
    group.come(0)
    verdicts = group.announce(1, failure=(CANCELLED, "not now"))
    assert (ended(verdicts), message(verdicts)) == (([0, 1], CANCELLED), "not now")
    assert ended(group.announce(2)) == ([2], CANCELLED)
    assert group.agree(None, 1, None) == 1


def test_early_failure_reaches_late_members() -> None:
    group = Group()
    assert ended(group.announce(1, failure=(CANCELLED, "not now"))) == ([1], CANCELLED)
    assert ended(group.announce(0)) == ([0], CANCELLED)
    assert ended(group.announce(2)) == ([2], CANCELLED)
    assert group.agree(None, 1, None) == 1


def test_ended_member_fails_only_its_round() -> None:
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
def test_restarted_leader_joins_counting_members(
    counters: tuple[int | None, ...],
) -> None:
    group = Group()
    assert group.agree(*counters) == 58
    assert group.agree(59, 59, 59) == 59


def test_member_ahead_waits_alone() -> None:
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


def test_failure_in_failed_round_ends_no_other() -> None:
    group = Group()
    assert group.agree(0, 0, 0) == 0
    group.announce(1, 1, failure=(CANCELLED, "not now"))
    assert ended(group.announce(0, None, failure=(CANCELLED, "nor I"))) == ([0], CANCELLED)
    assert ended(group.announce(2, 1)) == ([2], CANCELLED)
    assert group.agree(None, 2, None) == 2


def test_two_late_failures_end_no_round() -> None:
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


def test_missed_error_is_not_repeated() -> None:
    """The leader's new incarnation counts from 0. A member that is ahead learns this, and its next
    failure ends the right round."""
    group = Group()
    assert ended(group.announce(2, None, failure=(CANCELLED, "not now"))) == ([2], CANCELLED)
    (verdict,) = group.announce(1, 2)
    assert isinstance(verdict, Disagreed)
    assert (verdict.code, verdict.counter) == (ABORTED, 0)
    group.come(2, counter=1)
    assert ended(group.announce(1, 1, failure=(CANCELLED, "nor I"))) == ([1, 2], CANCELLED)


def test_late_failure_at_restarted_leader() -> None:
    """That incarnation knows of no round before the first one that is announced to it."""
    group = Group()
    group.come(1, counter=8)
    assert ended(group.announce(2, 7, failure=(CANCELLED, "late"))) == ([2], CANCELLED)
    group.come(2, counter=8)
    assert ended(group.announce(0, 0)) == ([0, 1, 2], OK)


def test_error_names_its_round_unless_aborted() -> None:
    group = Group()
    group.come(0)
    (failed,) = group.announce(1, failure=(CANCELLED, "not now"))
    (late,) = group.announce(2)
    (aborted,) = [*group.announce(0, 1), *group.leader.aborted("g", TASKS, CANCELLED, "aborted")]
    (while_aborted,) = group.announce(1, 1)
    verdicts = (failed, late, aborted, while_aborted)
    assert all(isinstance(verdict, Disagreed) for verdict in verdicts)
    assert [verdict.counter for verdict in verdicts] == [0, 0, None, None]


def test_first_announcement_too_late_fails() -> None:
    group = Group()
    group.announce(0, due=1.0)
    assert ended(group.leader.ticked(1.0)) == ([0], DEADLINE_EXCEEDED)
    assert ended(group.announce(1)) == ([1], DEADLINE_EXCEEDED)
    assert ended(group.announce(2)) == ([2], DEADLINE_EXCEEDED)
    assert group.agree(None, None, None) == 1


def test_restarted_member_gets_no_earlier_error() -> None:
    group = Group()
    group.come(0, 1)
    assert ended(group.leader.member_gone(TASKS[2], "worker:2 has gone")) == ([0, 1], UNAVAILABLE)
    assert group.agree(None, None, 0) == 1


def test_withdrawn_announcement_ends_round() -> None:
    group, token = Group(), object()
    group.come(1)
    group.announce(0, token=token)
    assert group.leader.announcement_withdrawn("g", object()) == []
    assert ended(group.leader.announcement_withdrawn("g", token)) == ([0, 1], UNAVAILABLE)
    assert group.leader.announcement_withdrawn("g", token) == []


def test_abort_lasts_until_reset() -> None:
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


def test_members_agree_again_after_errors() -> None:
    """One member failed during operation 0, which the others have ended; these failed during
    operation 1."""
    group = Group()
    assert group.agree(0, 0, 0) == 0
    group.come(1, 2, counter=1)
    assert ended(group.leader.member_gone(TASKS[0], "worker:0 has gone")) == ([1, 2], UNAVAILABLE)
    assert group.agree(None, None, None) == 2
    assert group.agree(3, 3, 3) == 3


def test_second_announcement_replaces_first() -> None:
    group = Group()
    group.come(0, 1)
    assert ended(group.announce(1)) == ([1], CANCELLED)
    assert ended(group.announce(2)) == ([0, 1, 2], OK)


def test_passed_round_needs_all_members_again() -> None:
    group = Group()
    assert [group.agree(0, 0, 0), group.agree(1, 1, 1)] == [0, 1]
    assert ended(group.announce(1, counter=1)) == ([1], ABORTED)


def test_group_refuses_other_members() -> None:
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


def test_end_of_leader_ends_announcements() -> None:
    group = Group()
    group.come(0, 2)
    assert ended(group.leader.stopped("the server was stopped")) == ([0, 2], CANCELLED)
    assert group.leader.waiting() == {}

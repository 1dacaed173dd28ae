"""The members of the cluster: how a worker joins, returns, is lost, and leaves."""

from __future__ import annotations

import pytest

from zmqdist import errors
from zmqdist.events import Heard, PeerGone, ProcessExited, Send, Ticked
from zmqdist.limits import WORKERS_MAX
from zmqdist.messages import Beat, Goodbye, Leave, Refused, Register, Registered
from zmqdist.scheduling.dispatcher.membership_and_leases import (
    LOSSES_KEPT,
    Change,
    LossRecord,
    Member,
    MemberAway,
    MemberBack,
    MemberJoined,
    MemberLeaving,
    MemberLost,
    Membership,
)

LEASE_S, BACK_S, CUT_S = 10.0, 1.0, 5.0


@pytest.fixture
def membership() -> Membership:
    return Membership(LEASE_S, BACK_S, CUT_S)


def asks(
    incarnation: int = 1, index: int = 0, *, slots: int = 2, pid: int = 100, job: str = "worker"
) -> Register:
    return Register(incarnation, job, index, slots, [], [], pid, "host")


def join(
    membership: Membership,
    peer: str = "a",
    register: Register | None = None,
    now: float = 0.0,
    *,
    watched: bool = True,
) -> Member:
    """Register a worker, which is accepted."""
    register = register or asks()
    changes = membership.handle(Heard(peer, register), now, watched=watched)
    (joined,) = (change for change in changes if isinstance(change, MemberJoined))
    return joined.member


def refused(changes: list[Change | Send]) -> tuple[int, str]:
    """Return the code and the text of the only reply."""
    (answer,) = changes
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Refused)
    return answer.message.code, answer.message.message


# -- joining ---------------------------------------------------------------------------------------


def test_registered_worker_joins(membership: Membership) -> None:
    register = asks(index=3)
    changes = membership.handle(Heard("a", register), 5.0)
    member = membership.members["worker", 3]
    assert changes == [
        Send("a", Registered(3, 1.0, LEASE_S, CUT_S)),
        MemberJoined(member, register),
    ]
    assert (member.name, member.slots, member.pid, member.host) == ("worker:3", 2, 100, "host")
    assert (member.joined_at, member.heard_at, member.peer) == (5.0, 5.0, "a")


def test_worker_without_index_gets_lowest_free(
    membership: Membership,
) -> None:
    join(membership, "a", asks(1, index=0))
    join(membership, "b", asks(2, index=2))
    indexes = [
        join(membership, peer, asks(life, index=-1)).index for peer, life in [("c", 3), ("d", 4)]
    ]
    assert indexes == [1, 3]
    assert join(membership, "e", asks(5, index=-1, job="other")).index == 0
    membership.handle(Heard("c", Goodbye("")), 0.0)
    again = [
        join(membership, peer, asks(life, index=-1)).index for peer, life in [("f", 6), ("g", 7)]
    ]
    assert again == [1, 4], "the index of a worker that left is free again"


@pytest.mark.parametrize(
    ("workers", "lease_s", "beat_s"),
    [(1, 10.0, 1.0), (200, 10.0, 2.0), (1000, 10.0, 2.5), (1, 2.0, 0.5)],
    ids=["few", "two hundred", "never less often than four times a lease", "a short lease"],
)
def test_beats_are_rarer_with_more_workers(workers: int, lease_s: float, beat_s: float) -> None:
    membership = Membership(lease_s, BACK_S, CUT_S)
    for index in range(workers):
        changes = membership.handle(Heard(f"w{index}", asks(index, index=index)), 0.0)
    assert changes[0] == Send(f"w{workers - 1}", Registered(workers - 1, beat_s, lease_s, CUT_S))


def test_p1_second_worker_of_name_is_refused(
    membership: Membership,
) -> None:
    member = join(membership, "a", asks(1, pid=100))
    code, text = refused(membership.handle(Heard("b", asks(2, pid=200)), 1.0))
    assert code == errors.ALREADY_EXISTS
    assert "worker:0 is registered already (pid 100 on host)" in text
    assert membership.members == {("worker", 0): member}
    assert membership.by_peer == {"a": member}


def test_p1_chosen_index_replaces_no_member(
    membership: Membership,
) -> None:
    """Another dispatcher gave it the index: it is another worker than the one that has the index
    now, which may only be disconnected."""
    first = join(membership, "a", asks(1, index=-1))
    membership.handle(PeerGone("a"), 1.0)
    register = Register(2, "worker", first.index, 2, [], [], 200, "host", index_given=True)
    assert refused(membership.handle(Heard("b", register), 1.5))[0] == errors.ALREADY_EXISTS
    assert membership.members == {("worker", 0): first}
    assert membership.handle(Heard("c", asks(1)), 1.6)[1] == MemberBack(first, asks(1))


def test_p1_successor_replaces_member_that_is_away(
    membership: Membership,
) -> None:
    first = join(membership, "a", asks(1))
    membership.handle(PeerGone("a"), 1.0)
    register = asks(2, pid=200)
    changes = membership.handle(Heard("b", register), 1.5)
    second = membership.members["worker", 0]
    assert changes == [
        MemberLost(first, "another process registered in its place", None, "", settled=False),
        Send("b", Registered(0, 1.0, LEASE_S, CUT_S)),
        MemberJoined(second, register),
    ]
    assert second.pid == 200
    assert membership.handle(Ticked(), 100.0) == [], "P2: the first is lost once"


@pytest.mark.parametrize(
    ("register", "code", "problem"),
    [
        (asks(2, index=1, slots=0), errors.INVALID_ARGUMENT, "slots is 0, wants 1 to 4096"),
        (asks(2, index=1, slots=-3), errors.INVALID_ARGUMENT, "slots is -3, wants 1 to 4096"),
        (asks(2, index=1), errors.FAILED_PRECONDITION, "registered as another worker"),
        (asks(1, index=1), errors.FAILED_PRECONDITION, "registered as another worker"),
        (asks(1, index=0, job="other"), errors.FAILED_PRECONDITION, "registered as another worker"),
    ],
    ids=["no slots", "fewer than none", "another life", "another index", "another job"],
)
def test_invalid_registration_changes_nothing(
    membership: Membership, register: Register, code: int, problem: str
) -> None:
    member = join(membership, "a", asks(1))
    found, text = refused(membership.handle(Heard("a", register), 1.0))
    assert (found, problem in text) == (code, True), text
    assert membership.members == {("worker", 0): member}
    assert membership.by_peer == {"a": member}


def test_full_dispatcher_takes_back_its_members(membership: Membership) -> None:
    for index in range(WORKERS_MAX):
        membership.handle(Heard(f"w{index}", asks(index, index=index)), 0.0)
    code, text = refused(
        membership.handle(Heard("late", asks(WORKERS_MAX, index=WORKERS_MAX)), 0.0)
    )
    assert code == errors.RESOURCE_EXHAUSTED
    assert str(WORKERS_MAX) in text
    assert isinstance(membership.handle(Heard("again", asks(7, index=7)), 0.0)[1], MemberBack)


# -- disconnecting and returning -------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, -1], ids=["by its index", "by its incarnation alone"])
def test_p3_worker_back_in_time_is_the_same_member(membership: Membership, index: int) -> None:
    member = join(membership, "a")
    assert membership.handle(PeerGone("a"), 1.0) == [MemberAway(member)]
    assert membership.deadline == 2.0
    register = asks(index=index)
    changes = membership.handle(Heard("b", register), 1.9)
    assert changes == [Send("b", Registered(0, 1.0, LEASE_S, CUT_S)), MemberBack(member, register)]
    assert (member.peer, membership.deadline) == ("b", None)
    assert membership.handle(Ticked(), 100.0) == []


def test_registered_has_serial_of_register(membership: Membership) -> None:
    join(membership, "a")
    again = Register(1, "worker", 0, 2, [], [], 100, "host", serial=1)
    (welcome, _) = membership.handle(Heard("a", again), 1.0)
    assert welcome == Send("a", Registered(0, 1.0, LEASE_S, CUT_S, 1))


def test_p3_absent_worker_is_lost_after_its_grace(
    membership: Membership,
) -> None:
    member = join(membership)
    membership.handle(PeerGone("a"), 1.0)
    assert membership.handle(Ticked(), 1.99) == []
    lost = MemberLost(
        member, "its connection ended and it did not come back", None, "", settled=False
    )
    assert membership.handle(Ticked(), 2.0) == [lost]
    assert (membership.members, membership.deadline) == ({}, None)
    assert membership.handle(Ticked(), 3.0) == [], "P2: it is lost once"


def test_new_connection_may_precede_end_of_old(membership: Membership) -> None:
    member = join(membership, "a")
    membership.handle(Heard("b", asks()), 1.0)
    assert membership.handle(PeerGone("a"), 1.1) == []
    assert (member.peer, membership.by_peer, membership.deadline) == ("b", {"b": member}, None)


def test_lost_incarnation_joins_as_new_member(membership: Membership) -> None:
    first = join(membership, "a")
    membership.handle(PeerGone("a"), 1.0)
    membership.handle(Ticked(), 2.0)
    assert join(membership, "b", asks(), 3.0) is not first


def test_p4_watched_worker_may_be_silent(membership: Membership) -> None:
    member = join(membership)
    assert membership.deadline is None
    assert membership.handle(Ticked(), 1e9) == []
    assert membership.members == {("worker", 0): member}


def test_unwatched_worker_is_lost_after_silent_lease(
    membership: Membership,
) -> None:
    member = join(membership, watched=False)
    assert membership.deadline == LEASE_S
    assert membership.note_message("a", 4.0) is member
    assert membership.deadline == 4.0 + LEASE_S
    assert membership.handle(Ticked(), 13.9) == []
    lost = MemberLost(member, "it was silent for a lease", None, "", settled=False)
    assert membership.handle(Ticked(), 14.0) == [lost]
    assert membership.deadline is None


def test_unwatched_worker_is_lost_by_its_connection(
    membership: Membership,
) -> None:
    member = join(membership, watched=False)
    membership.handle(PeerGone("a"), 9.5)
    (lost,) = membership.handle(Ticked(), 10.5)
    assert isinstance(lost, MemberLost)
    assert lost.member is member
    assert membership.handle(Ticked(), 100.0) == [], "P2: it is lost once"


# -- being lost ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "away", "settled"),
    [
        (Heard("a", Goodbye()), False, True),
        (ProcessExited(100, -9, "log", peer="a"), False, True),
        (ProcessExited(100, -9, "log", job="worker", index=0), False, True),
        (ProcessExited(100, -9, "log", peer="a"), True, True),
        (ProcessExited(100, -9, "log", job="worker", index=0), True, True),
        (Ticked(), True, False),
    ],
    ids=[
        "goodbye",
        "seen by the kernel",
        "seen by its parent",
        "kernel, away",
        "parent, away",
        "never seen again",
    ],
)
def test_p5_loss_is_settled_by_end_of_process(
    membership: Membership, event: Heard | ProcessExited | Ticked, away: bool, settled: bool
) -> None:
    member = join(membership)
    if away:
        membership.handle(PeerGone("a"), 1.0)
    (lost,) = membership.handle(event, 3.0)
    assert isinstance(lost, MemberLost)
    assert (lost.member, lost.settled, member.peer) == (member, settled, None)
    assert (membership.members, membership.by_peer, membership.deadline) == ({}, {}, None)
    for again in (event, PeerGone("a"), Ticked()):  # P2: it is lost once
        assert membership.handle(again, 4.0) == []


def test_loss_has_exit_code_of_process(membership: Membership) -> None:
    member = join(membership)
    lost = MemberLost(member, "its process ended", -9, "last words", settled=True)
    assert membership.handle(ProcessExited(100, -9, "last words", peer="a"), 3.0) == [lost]
    assert membership.losses == [LossRecord("worker:0", "its process ended", -9, 3.0)]


@pytest.mark.parametrize(
    "event",
    [
        ProcessExited(99, 1, job="worker", index=0),
        ProcessExited(99, 1, peer="a"),
        ProcessExited(100, 1, job="worker", index=1),
        ProcessExited(100, 1, peer="stranger"),
    ],
    ids=[
        "its predecessor",
        "another process of its connection",
        "another index",
        "another connection",
    ],
)
def test_exit_of_other_process_changes_nothing(
    membership: Membership, event: ProcessExited
) -> None:
    join(membership)
    assert membership.handle(event, 3.0) == []
    assert ("worker", 0) in membership.members


def test_late_exit_code_is_added_to_history(
    membership: Membership,
) -> None:
    join(membership)
    membership.handle(PeerGone("a"), 1.0)
    membership.handle(Ticked(), 2.0)
    assert membership.handle(ProcessExited(100, 7, job="worker", index=0), 3.0) == []
    assert [(loss.name, loss.exit_code) for loss in membership.losses] == [("worker:0", 7)]


def test_goodbye_is_no_loss(membership: Membership) -> None:
    member = join(membership)
    lost = MemberLost(member, "said goodbye", 0, "", settled=True)
    assert membership.handle(Heard("a", Goodbye()), 1.0) == [lost]
    assert (membership.losses, membership.losses_count) == ([], 0)


def test_history_holds_last_losses(membership: Membership) -> None:
    for life in range(1, LOSSES_KEPT + 6):
        join(membership, "a", asks(life, pid=life), now=life)
        membership.handle(ProcessExited(life, life, peer="a"), life)
    assert membership.losses_count == LOSSES_KEPT + 5
    assert [loss.exit_code for loss in membership.losses] == list(range(6, LOSSES_KEPT + 6))


# -- leaving, and messages that the membership ignores ---------------------------------------------


def test_member_gets_one_leave(membership: Membership) -> None:
    member = join(membership)
    assert membership.leave(member, 3.0) == [MemberLeaving(member), Send("a", Leave(3.0))]
    assert membership.leave(member, 3.0) == []


def test_member_that_was_away_gets_leave(membership: Membership) -> None:
    member = join(membership)
    membership.handle(PeerGone("a"), 1.0)
    assert membership.leave(member, 3.0) == [MemberLeaving(member)]
    back = membership.handle(Heard("b", asks()), 1.5)
    assert back[1:] == [MemberBack(member, asks()), Send("b", Leave(3.0))]


def test_leaving_member_gets_no_leave(membership: Membership) -> None:
    member = join(membership)
    assert membership.handle(Heard("a", Leave(0.0)), 1.0) == [MemberLeaving(member)]
    assert membership.handle(Heard("a", Leave(0.0)), 1.0) == []
    assert membership.leave(member, 3.0) == []
    membership.handle(PeerGone("a"), 2.0)
    assert membership.handle(Heard("b", asks()), 2.5)[1:] == [MemberBack(member, asks())]


def test_confirmed_leave_is_not_repeated(
    membership: Membership,
) -> None:
    member = join(membership)
    membership.leave(member, 3.0)
    assert membership.handle(Heard("a", Leave(0.0)), 1.0) == []
    membership.handle(PeerGone("a"), 2.0)
    assert membership.handle(Heard("b", asks()), 2.5)[1:] == [MemberBack(member, asks())]


def test_strangers_change_nothing(membership: Membership) -> None:
    assert membership.handle(Heard("stranger", Goodbye()), 0.0) == []
    assert membership.handle(Heard("stranger", Leave(0.0)), 0.0) == []
    assert membership.handle(PeerGone("stranger"), 0.0) == []
    assert membership.note_message("stranger", 0.0) is None
    member = join(membership)
    assert membership.handle(Heard("a", Beat()), 1.0) == []
    assert membership.members == {("worker", 0): member}

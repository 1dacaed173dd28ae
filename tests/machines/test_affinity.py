"""What a coordinator remembers of work with options, and of the present workers:
scheduling/coordinator/affinity.py, with closures.py."""

from __future__ import annotations

import pytest

from tests.machines.test_closures import (
    AGAIN,
    CUT_S,
    LOST_S,
    ME,
    QUEUE_MAX,
    do,
    end_result,
    hear,
    schedule,
    submitted,
    to_dispatcher,
)
from zmqdist.events import Send, Ticked
from zmqdist.messages import (
    CANCELLED,
    ERROR,
    VALUE,
    CancelWork,
    CoordinatorRegistered,
    EndRound,
    Forget,
    Members,
    RegisterCoordinator,
    RoundEnded,
    StartsLost,
    Submit,
    Workers,
)
from zmqdist.scheduling.coordinator.affinity import MembersChanged, Scheduled, WorkOptions
from zmqdist.scheduling.coordinator.closures import Closures
from zmqdist.scheduling.coordinator.coordinator_events import (
    CancelRequested,
    DispatcherDown,
    DispatcherUp,
    EndRoundRequested,
    ForgetRequested,
    FunctionsDefined,
)
from zmqdist.scheduling.coordinator.dependencies_and_retries import UNAVAILABLE
from zmqdist.scheduling.coordinator.effects import Effect, Resolve, RoomMade, RoundSettled

MISSED_S = 20.0
ONE = ("worker:1", 11, 101, "host")
TWO = ("worker:2", 12, 102, "host")
APART = WorkOptions("worker:1", 0, True)


@pytest.fixture
def closures() -> Closures:
    """A coordinator that watches the members, with function 7, a dispatcher and worker 1."""
    closures = Closures(
        coordinator=ME,
        queue_max=QUEUE_MAX,
        cancel_grace_s=CUT_S,
        lost_limit_s=LOST_S,
        now=0.0,
        recovery_limit_s=MISSED_S,
    )
    do(closures, FunctionsDefined([(7, b"f")]))
    assert meet(closures, ONE)[-1] == MembersChanged([ONE], [])
    return closures


def meet(closures: Closures, *members: tuple[str, int, int, str], now: float = 0.0) -> list[Effect]:
    """Connect the coordinator to a dispatcher that has these workers."""
    effects = do(closures, DispatcherUp(), now=now)
    effects += hear(closures, CoordinatorRegistered(3, len(members)), now)
    return effects + hear(closures, Members(list(members), []), now)


def plan(
    closures: Closures, *works: int, options: WorkOptions = APART, now: float = 0.0
) -> list[Effect]:
    items = [(work, 7, b"%d" % work) for work in works]
    return do(closures, Scheduled(items, options=dict.fromkeys(works, options)), now=now)


def sent(options: WorkOptions, *works: int, round: int = 1, attempt: int = 0) -> Send:
    items = [(work, attempt, 0, 7, b"%d" % work) for work in works]
    return to_dispatcher(Submit(round, items, *options))


def missed(work: int, worker: str) -> Resolve:
    return Resolve(
        [(work, UNAVAILABLE, f"it is pinned to {worker}, which was absent for 20 s".encode())]
    )


# -- P9: options -----------------------------------------------------------------------------------


def test_p9_work_is_submitted_with_its_options_in_messages_of_their_own(closures: Closures) -> None:
    first, urgent = WorkOptions("worker:1"), WorkOptions("", 5)
    items = [(work, 7, b"%d" % work) for work in range(1, 6)]
    effects = do(closures, Scheduled(items, options={1: first, 2: urgent, 4: urgent}))
    assert effects[:3] == [sent(first, 1), sent(urgent, 2, 4), submitted(3, 5)]


def test_p9_work_is_submitted_with_the_same_options_to_the_next_dispatcher(
    closures: Closures,
) -> None:
    plan(closures, 1, options=WorkOptions("worker:1", -3))
    schedule(closures, 2)
    do(closures, DispatcherDown())
    effects = do(closures, DispatcherUp(), now=1.0) + hear(
        closures, CoordinatorRegistered(3, 1), 1.0
    )
    assert effects[0] == to_dispatcher(
        RegisterCoordinator(ME, QUEUE_MAX, 1, previous_dispatcher=True, watch_members=True)
    )
    assert effects[-2:] == [
        sent(WorkOptions("worker:1", -3), 1, attempt=AGAIN),
        submitted(2, attempt=AGAIN),
    ]


def test_options_are_forgotten_with_their_work(closures: Closures) -> None:
    plan(closures, 1, 2)
    end_result(closures, 1)
    do(closures, CancelRequested([2]))
    end_result(closures, 2, CANCELLED)
    pins = closures.affinity
    assert (pins.options, pins.detached, pins._pinned) == (
        {},
        set(),
        {},
    )  # reach: a leak shows nowhere else


# -- P10: detached work ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [VALUE, ERROR, UNAVAILABLE])
def test_p10_the_end_of_detached_work_says_that_it_is_detached(
    closures: Closures, kind: int
) -> None:
    plan(closures, 1)
    schedule(closures, 2)
    assert end_result(closures, 1, kind) == [Resolve([(1, kind, b"r")], detached=(1,))]
    assert end_result(closures, 2, kind) == [Resolve([(2, kind, b"r")])]


def test_p10_the_loss_of_all_starts_of_detached_work_says_so_too(closures: Closures) -> None:
    plan(closures, 1)
    (effect,) = hear(closures, StartsLost([(1, 0, "worker:1", -9, "", True)]))
    assert isinstance(effect, Resolve)
    assert effect.detached == (1,)


def test_p10_detached_work_goes_on_when_a_round_ends(closures: Closures) -> None:
    plan(closures, 1)
    schedule(closures, 2, 3)
    end_result(closures, 2, ERROR)
    do(closures, EndRoundRequested(1))
    ended = hear(closures, RoundEnded(1))
    assert ended == [Resolve([(3, CANCELLED, b"")]), RoundSettled(1)]
    assert end_result(closures, 1) == [Resolve([(1, VALUE, b"r")], detached=(1,))]


def test_p10_detached_work_that_is_scheduled_while_a_round_ends_is_submitted_after_it(
    closures: Closures,
) -> None:
    schedule(closures, 1)
    end_result(closures, 1, ERROR)
    do(closures, EndRoundRequested(1))
    assert plan(closures, 2) == []
    assert hear(closures, RoundEnded(1)) == [RoundSettled(1), sent(APART, 2, round=2)]


def test_p10_without_a_dispatcher_a_round_that_has_only_detached_work_ends_at_once(
    closures: Closures,
) -> None:
    schedule(closures, 1)
    plan(closures, 2)
    end_result(closures, 1, ERROR)
    do(closures, DispatcherDown())
    assert do(closures, EndRoundRequested(1)) == [RoundSettled(1)]
    assert sent(APART, 2, round=2, attempt=AGAIN) in meet(closures, ONE, now=1.0)


def test_p10_detached_work_takes_no_room_in_the_queue_whether_it_was_sent_or_not(
    closures: Closures,
) -> None:
    assert RoomMade() not in plan(closures, *range(1, QUEUE_MAX + 1))
    assert closures.queued == 0
    do(closures, DispatcherDown())
    plan(closures, 100)
    assert closures.queued == 0
    schedule(closures, 200)
    assert closures.queued == 1


def test_p6_detached_work_ends_like_any_other_when_the_cluster_is_lost(closures: Closures) -> None:
    plan(closures, 1)
    do(closures, DispatcherDown(), now=1.0)
    effects = do(closures, Ticked(), now=1.0 + LOST_S)
    assert [(work, kind) for work, kind, _ in effects[0].items] == [(1, UNAVAILABLE)]


def test_p6_detached_work_is_withdrawn_when_all_workers_are_lost(closures: Closures) -> None:
    plan(closures, 1)
    hear(closures, Members([], [("worker:1", 11, "gone")]), 1.0)
    hear(closures, Workers(0), 1.0)
    effects = do(closures, Ticked(), now=1.0 + LOST_S)
    assert effects[:2] == [to_dispatcher(EndRound(1, CUT_S)), to_dispatcher(CancelWork([1], CUT_S))]


# -- P11: missed workers ---------------------------------------------------------------------------


def test_p11_work_for_a_worker_that_never_comes_fails_and_is_withdrawn(closures: Closures) -> None:
    plan(closures, 1, options=WorkOptions("worker:9"), now=5.0)
    assert closures.deadline == 5.0 + MISSED_S
    assert do(closures, Ticked(), now=24.9) == []
    effects = do(closures, Ticked(), now=25.0)
    assert effects == [missed(1, "worker:9"), to_dispatcher(CancelWork([1], CUT_S))]
    assert closures.deadline is None


def test_p11_a_worker_that_leaves_is_missed_from_then_on(closures: Closures) -> None:
    hear(closures, Members([TWO], []))
    plan(closures, 1, options=WorkOptions("worker:1"))
    assert closures.deadline is None
    hear(closures, Members([], [("worker:1", 11, "killed")]), 7.0)
    plan(closures, 2, options=WorkOptions("worker:1"), now=20.0)
    assert closures.deadline == 7.0 + MISSED_S, "new work does not postpone it"
    hear(closures, Members([("worker:1", 15, 105, "host")], []), 26.0)
    assert closures.deadline is None


def test_p11_a_worker_without_waiting_work_is_not_missed(closures: Closures) -> None:
    hear(closures, Members([TWO], []))
    plan(closures, 1, options=WorkOptions("worker:1"))
    hear(closures, Members([], [("worker:1", 11, "killed")]), 7.0)
    end_result(closures, 1)
    assert closures.deadline is None


def test_p11_without_any_worker_none_is_missed_and_later_the_clocks_start_again(
    closures: Closures,
) -> None:
    plan(closures, 1, options=WorkOptions("worker:2"))
    hear(closures, Workers(0), 5.0)
    hear(closures, Members([], [("worker:1", 11, "killed")]), 5.0)
    assert closures.deadline == 5.0 + LOST_S
    hear(closures, Workers(1), 50.0)
    hear(closures, Members([ONE], []), 50.0)
    assert closures.deadline == 50.0 + MISSED_S


# -- P12: members ----------------------------------------------------------------------------------


def test_p12_a_repeated_list_of_members_is_no_news(closures: Closures) -> None:
    do(closures, DispatcherDown())
    assert not [effect for effect in meet(closures, ONE) if isinstance(effect, MembersChanged)]


def test_p12_a_worker_that_is_absent_at_the_next_dispatcher_has_left(closures: Closures) -> None:
    do(closures, DispatcherDown())
    (changed,) = [effect for effect in meet(closures, TWO) if isinstance(effect, MembersChanged)]
    assert changed == MembersChanged(
        [TWO], [("worker:1", 11, "the dispatcher does not know it any more")]
    )


def test_p12_another_incarnation_of_a_worker_is_another_worker(closures: Closures) -> None:
    anew = ("worker:1", 15, 105, "host")
    do(closures, DispatcherDown())
    (changed,) = [effect for effect in meet(closures, anew) if isinstance(effect, MembersChanged)]
    assert (changed.joined, [left[:2] for left in changed.left]) == ([anew], [("worker:1", 11)])


def test_p12_the_late_news_that_an_earlier_incarnation_is_lost_changes_nothing(
    closures: Closures,
) -> None:
    assert hear(closures, Members([], [("worker:1", 10, "killed")])) == []
    assert hear(closures, Members([], [("worker:1", 11, "killed")])) == [
        MembersChanged([], [("worker:1", 11, "killed")])
    ]


def test_an_empty_list_of_workers_is_reported_the_first_time() -> None:
    closures = Closures(
        coordinator=ME,
        queue_max=1,
        cancel_grace_s=1.0,
        lost_limit_s=9.0,
        now=0.0,
        recovery_limit_s=9.0,
    )
    assert not closures.affinity.members_known
    assert meet(closures)[-1] == MembersChanged([], [])
    assert closures.affinity.members_known


# -- forgetting everywhere -------------------------------------------------------------------------


def test_a_resource_to_forget_is_reported_to_the_dispatcher_or_to_the_next_one(
    closures: Closures,
) -> None:
    assert do(closures, ForgetRequested([40])) == [to_dispatcher(Forget(ME, [40], everywhere=True))]
    do(closures, DispatcherDown())
    assert do(closures, ForgetRequested([41]), ForgetRequested([42])) == []
    assert to_dispatcher(Forget(ME, [41, 42], everywhere=True)) in meet(closures, ONE)

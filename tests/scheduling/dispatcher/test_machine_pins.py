"""Pinned work, priorities and detached work; which coordinators hear of members; which resources
all workers forget."""

from __future__ import annotations

import pytest

from tests.scheduling.dispatcher.dispatched import (
    LEASE_S,
    SEEN,
    begin,
    cancelled,
    coordinator,
    done,
    end,
    given,
    hear,
    leases_of,
    submit,
    worker,
)
from zmqdist.events import PeerGone, Send, Ticked
from zmqdist.messages import (
    ALL_NUMBERS,
    BULK,
    CANCELLED,
    VALUE,
    AbortLeases,
    Assign,
    CancelWork,
    CoordinatorRegistered,
    Define,
    Forget,
    Goodbye,
    LeasesReturned,
    Members,
    Refused,
    Register,
    RegisterCoordinator,
    ResultReceived,
    Results,
    RoundEnded,
    StealRequest,
    Submit,
)
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.shared.broker_settings import BrokerSettings


@pytest.fixture
def broker() -> Broker:
    """A dispatcher with coordinator 1 at "c", and no worker."""
    broker = Broker(BrokerSettings(lease_s=LEASE_S))
    coordinator(broker)
    return broker


def pin(
    broker: Broker,
    *works: int,
    to: str = "worker:0",
    priority: int = 0,
    apart: bool = False,
    peer: str = "c",
) -> list[Send]:
    return hear(
        broker,
        peer,
        Submit(1, [(work, 0, 0, 7, b"%d" % work) for work in works], to, priority, apart),
    )


def works(effects: list[Send], *, careful: bool = False) -> list[int]:
    return [work for _, _, work, _ in given(effects, careful=careful)]


def sent(effects: list[Send], kind: type) -> list[tuple[str, object]]:
    return [
        (str(effect.to), effect.message) for effect in effects if isinstance(effect.message, kind)
    ]


# -- P12 -------------------------------------------------------------------------------------------


def test_p12_pinned_work_waits_until_its_worker_is_present(broker: Broker) -> None:
    worker(broker, "w1", 1)
    assert given(pin(broker, 1)) == []
    assert works(submit(broker, 2)) == [2], "other work continues"
    assert [(peer, work) for peer, _, work, _ in given(worker(broker, "w0", 0))] == [("w0", 1)]
    assert broker.snapshot().queued == 0


def test_p12_pinned_work_is_assigned_before_any_other_work(broker: Broker) -> None:
    submit(broker, 1, 2, 3)
    pin(broker, 4)
    assert works(worker(broker)) == [4, 1]


def test_p12_pinned_work_stays_within_the_window_and_the_rest_waits(broker: Broker) -> None:
    worker(broker, "w0", 0)
    worker(broker, "w1", 1)
    assert works(pin(broker, 1, 2, 3)) == [1, 2], "w1 is idle, and gets no work"
    assert works(done(broker, 1, peer="w0")) == [3]


def test_p12_pinned_work_runs_before_the_work_that_its_worker_holds(broker: Broker) -> None:
    worker(broker, "w0", 0)
    assert [message.pinned for _, message in sent(submit(broker, 1, 2, 3), Assign)] == [False]
    effects = pin(broker, 4, 5)
    assert ([message.pinned for _, message in sent(effects, Assign)], works(effects)) == (
        [True],
        [4],
    )


def test_p12_pinned_work_is_not_recalled_for_an_idle_worker(broker: Broker) -> None:
    worker(broker, "w0", 0)
    begin(broker, *leases_of(pin(broker, 1, 2))[:1], peer="w0")
    assert sent(worker(broker, "w1", 1, now=5.0), StealRequest) == []


def test_other_work_is_recalled_from_a_worker_that_runs_pinned_work(broker: Broker) -> None:
    worker(broker, "w0", 0)
    begin(broker, *leases_of(pin(broker, 1)), peer="w0")
    assert works(submit(broker, 2)) == [2]
    assert sent(worker(broker, "w1", 1, now=5.0), StealRequest) == [("w0", StealRequest([2]))]


@pytest.mark.parametrize("begun", [False, True], ids=["not begun", "charged"])
def test_p12_pinned_work_of_a_lost_worker_waits_as_careful_work_for_the_next_of_its_name(
    broker: Broker, begun: bool
) -> None:
    worker(broker, "w0", 0)
    worker(broker, "w1", 1)
    leases = leases_of(pin(broker, 1))
    if begun:
        begin(broker, *leases, peer="w0")
    assert given(broker.handle(SEEN, 1.0), careful=True) == []
    effects = worker(broker, "v0", 0, life=9, now=2.0)
    assert [(peer, work, attempt) for peer, _, work, attempt in given(effects, careful=True)] == [
        ("v0", 1, 1)
    ]


def test_p12_pinned_work_that_its_worker_gives_back_goes_to_no_other_worker(broker: Broker) -> None:
    worker(broker, "w0", 0)
    worker(broker, "w1", 1)
    leases = leases_of(pin(broker, 1))
    broker.leave("worker", 0, 5.0, 0.0)
    assert given(hear(broker, "w0", LeasesReturned(leases))) == []
    hear(broker, "w0", Goodbye())
    assert works(worker(broker, "v0", 0, life=9)) == [1]


def test_p3_attempts_max_applies_to_pinned_work(broker: Broker) -> None:
    for life in range(1, 4):
        leases = leases_of(
            [*worker(broker, f"w{life}", 0, life=life), *(pin(broker, 1) if life == 1 else [])]
        )
        leases = leases or [
            lease for hands in broker.dispatch.loads.values() for lease in hands.leases
        ]
        begin(broker, *leases, peer=f"w{life}")
        effects = broker.handle(SEEN, 1.0)
    assert [message.items[0][-1] for _, message in sent(effects, type(effects[0].message))] == [
        True
    ]
    assert broker.snapshot().queued == 0


def test_p10_two_coordinators_with_work_for_the_same_worker_take_turns(broker: Broker) -> None:
    coordinator(broker, "d", 2)
    pin(broker, 1, 2, 3)
    pin(broker, 11, 12, 13, peer="d")
    served = works(worker(broker))
    while len(served) < 6:
        served += works(done(broker, len(served) - 1))
    assert served == [1, 11, 2, 12, 3, 13]


def test_waiting_work_for_a_worker_that_is_away_does_not_keep_idle_ones_from_being_served(
    broker: Broker,
) -> None:
    worker(broker, "w1", 1)
    pin(broker, 1)
    submit(broker, 2)
    begin(broker, 1, peer="w1")
    assert works(submit(broker, 3)) == [3]
    assert sent(worker(broker, "w2", 2, now=5.0), StealRequest) == [("w1", StealRequest([2]))], (
        "3 is recalled"
    )


def test_pinned_work_is_withdrawn_and_ends_with_its_round_and_coordinator_like_other_work(
    broker: Broker,
) -> None:
    pin(broker, 1, 2, 3)
    assert hear(broker, "c", CancelWork([(2, 0)], 1.0)) == [cancelled(2)]
    assert end(broker) == [Send("c", RoundEnded(1))]
    assert broker.snapshot().queued == 0
    hear(broker, "c", Submit(2, [(4, 0, 0, 7, b"4")], "worker:0"))
    broker.handle(PeerGone("c"), 1.0)
    assert broker.snapshot().queued == 0
    assert given(worker(broker)) == []


def test_queues_of_workers_are_forgotten_when_they_are_empty(broker: Broker) -> None:
    worker(broker)
    pin(broker, 1)
    pin(broker, 2, to="worker:7")
    session = broker.dispatch.sessions["c"]
    assert set(session.queues) == {"worker:7"}
    hear(broker, "c", CancelWork([(2, 0)], 1.0))
    assert not session.queues
    assert pin(broker, to="worker:8") == []
    assert not session.queues, "a message without work makes none"


# -- P13 -------------------------------------------------------------------------------------------


def test_p13_the_highest_priority_runs_first_and_within_it_the_oldest_work(broker: Broker) -> None:
    submit(broker, 1, 2)
    pin(broker, 3, 4, to="", priority=5)
    pin(broker, 5, to="", priority=-1)
    pin(broker, 6, to="", priority=5)
    served = works(worker(broker))
    while len(served) < 6:
        served += works(done(broker, len(served) - 1))
    assert served == [3, 4, 6, 1, 2, 5]


def test_p13_returned_work_is_the_first_of_its_priority(broker: Broker) -> None:
    worker(broker)
    begin(broker, *leases_of(submit(broker, 1)))
    pin(broker, 2, to="", priority=1)
    pin(broker, 3, to="", priority=1)
    pin(broker, 4, to="", priority=2)
    hear(broker, "w", LeasesReturned([2]))
    assert works(done(broker, 1)) + works(done(broker, 3)) == [2, 3]


def test_p13_priorities_apply_among_the_pinned_work_of_one_worker(broker: Broker) -> None:
    pin(broker, 1)
    pin(broker, 2, priority=1)
    submit(broker, 3)
    assert works(worker(broker)) == [2, 1]


# -- P14 -------------------------------------------------------------------------------------------


def test_p14_the_end_of_a_round_neither_ends_detached_work_nor_waits_for_it(broker: Broker) -> None:
    worker(broker)
    pin(broker, 1, apart=True)
    pin(broker, 2, to="worker:7", apart=True)
    submit(broker, 3)
    effects = end(broker)
    assert sent(effects, AbortLeases) == [("w", AbortLeases([2], 2.0))]
    assert sent(hear(broker, "w", LeasesReturned([2])), RoundEnded) == [("c", RoundEnded(1))], (
        "1 still runs"
    )
    assert done(broker, 1) == [Send("c", Results([(1, 0, VALUE, b"r")]))]
    assert works(worker(broker, "w7", 7)) == [2]


def test_p14_a_bulk_result_of_detached_work_survives_the_end_of_a_round(broker: Broker) -> None:
    worker(broker)
    pin(broker, 1, apart=True)
    done(broker, 1, kind=BULK)
    assert end(broker) == [Send("c", RoundEnded(1))]
    assert [
        type(effect.message).__name__ for effect in hear(broker, "c", ResultReceived([(1, 0)]))
    ] == ["FreeResult"]


def test_p14_detached_work_is_withdrawn_like_other_work(broker: Broker) -> None:
    worker(broker)
    pin(broker, 1, apart=True)
    pin(broker, 2, to="worker:7", apart=True)
    effects = hear(broker, "c", CancelWork([(1, 0), (2, 0)], 1.0))
    assert effects == [cancelled(2), Send("w", AbortLeases([1], 1.0))]


def test_p14_detached_work_ends_with_its_session(broker: Broker) -> None:
    worker(broker)
    pin(broker, 1, apart=True)
    pin(broker, 2, to="worker:7", apart=True)
    assert sent(broker.handle(PeerGone("c"), 0.0), AbortLeases) == [("w", AbortLeases([1], 0.0))]
    assert broker.snapshot().queued == 0


def test_detached_work_is_not_counted_in_the_queue(broker: Broker) -> None:
    coordinator(broker, "d", 2, queue_max=1)
    assert pin(broker, *range(1, 2000), to="worker:9", apart=True, peer="d") == []
    effects = submit(broker, 5000, peer="d")
    assert sent(effects, Refused) == []
    assert [
        effect.message.left_queue
        for effect in worker(broker)
        if type(effect.message).__name__ == "QueueProgress"
    ] == [1]


# -- P15 -------------------------------------------------------------------------------------------


def test_p15_a_watching_coordinator_hears_of_all_members_and_then_of_each_change(
    broker: Broker,
) -> None:
    worker(broker, "w0", 0)
    there = ("worker:0", 1, 100, "host")
    effects = hear(broker, "d", RegisterCoordinator(2, 10, 1, False, watch_members=True))
    assert effects == [Send("d", CoordinatorRegistered(3, 1)), Send("d", Members([there], []))]
    effects = worker(broker, "w1", 1)
    assert sent(effects, Members) == [("d", Members([("worker:1", 2, 101, "host")], []))], (
        "c does not watch"
    )
    effects = broker.handle(SEEN, 1.0)
    assert sent(effects, Members) == [("d", Members([], [("worker:0", 1, "its process ended")]))]


def test_p15_a_loss_is_reported_before_its_effects_on_work(broker: Broker) -> None:
    hear(broker, "d", RegisterCoordinator(2, 10, 1, False, watch_members=True))
    hear(broker, "d", Define([(7, b"f")]))
    worker(broker, "w", 0)
    pin(broker, 1, peer="d")
    hear(broker, "d", CancelWork([(1, 0)], 5.0))
    to_coordinator = [effect.message for effect in broker.handle(SEEN, 1.0) if effect.to == "d"]
    assert to_coordinator[0] == Members([], [("worker:0", 1, "its process ended")])
    assert Results([(1, 0, CANCELLED, b"")]) in to_coordinator


def test_p15_a_successor_under_the_same_name_is_reported_after_the_loss_of_the_earlier(
    broker: Broker,
) -> None:
    hear(broker, "d", RegisterCoordinator(2, 10, 1, False, watch_members=True))
    worker(broker, "w0", 0)
    broker.handle(PeerGone("w0"), 0.1)
    effects = sent(worker(broker, "v0", 0, life=9, now=0.2), Members)
    left, joined = (
        Members([], [("worker:0", 1, "another process registered in its place")]),
        Members([("worker:0", 9, 100, "host")], []),
    )
    assert effects == [("d", left), ("d", joined)]


def test_p15_a_worker_whose_connection_breaks_for_a_moment_is_no_news(broker: Broker) -> None:
    hear(broker, "d", RegisterCoordinator(2, 10, 1, False, watch_members=True))
    worker(broker, "w0", 0)
    assert sent(broker.handle(PeerGone("w0"), 0.1), Members) == []
    assert sent(worker(broker, "w0b", 0, now=0.2), Members) == []


# -- P16 -------------------------------------------------------------------------------------------


def test_p16_all_workers_forget_a_resource_even_one_that_was_away(broker: Broker) -> None:
    for index in range(3):
        worker(broker, f"w{index}", index)
    broker.handle(PeerGone("w2"), 0.1)
    forget = Forget(1, [40], everywhere=True)
    assert hear(broker, "c", forget, 0.2) == [Send("w0", forget), Send("w1", forget)]
    register = Register(3, "worker", 2, 1, [], [], 102, "host")
    assert sent(hear(broker, "w2b", register, 0.3), Forget) == [("w2b", forget)]


def test_p16_resources_of_a_coordinator_are_forgotten_when_it_leaves(broker: Broker) -> None:
    worker(broker)
    done(broker, *leases_of(pin(broker, 1, apart=True)))
    assert ("w", Forget(1, [ALL_NUMBERS], everywhere=True)) in sent(
        hear(broker, "c", Goodbye()), Forget
    )


@pytest.mark.parametrize("back", [False, True])
def test_p16_resources_of_a_coordinator_are_forgotten_a_lease_after_its_connection_ended(
    broker: Broker, back: bool
) -> None:
    worker(broker)
    done(broker, *leases_of(pin(broker, 1, apart=True)))
    assert (("w", Forget(1, [ALL_NUMBERS], everywhere=True))) not in sent(
        broker.handle(PeerGone("c"), 1.0), Forget
    )
    if back:
        coordinator(broker, "c2", now=2.0)
    assert broker.deadline == (None if back else 1.0 + LEASE_S)
    forgotten = sent(broker.handle(Ticked(), 1.0 + LEASE_S), Forget)
    assert forgotten == ([] if back else [("w", Forget(1, [ALL_NUMBERS], everywhere=True))])
    assert broker.deadline is None


def test_a_coordinator_without_detached_work_leaves_nothing_to_forget(broker: Broker) -> None:
    worker(broker)
    submit(broker, 1)
    effects = hear(broker, "c", Goodbye())
    assert sent(effects, Forget) == [("w", Forget(1, [7]))]

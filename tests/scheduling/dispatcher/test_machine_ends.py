"""The dispatcher as one machine: withdrawing, the ends of rounds and sessions, and what is refused.

In these tests the payload of a work item is its number, and every work item is for function 7. The
other half of the tests is in test_dispatch.py.
"""

from __future__ import annotations

import pytest

from tests.scheduling.dispatcher.dispatched import (
    BACK_S,
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
from zmqdist import errors
from zmqdist.errors import InternalError
from zmqdist.events import Heard, PeerGone, ProcessExited, Send, Ticked
from zmqdist.limits import BATCH_ITEMS_MAX
from zmqdist.messages import (
    BULK,
    ERROR,
    VALUE,
    AbortLeases,
    Beat,
    CancelWork,
    CoordinatorRegistered,
    Define,
    Done,
    EndRound,
    Forget,
    FreeResult,
    Goodbye,
    LeasesReturned,
    Leave,
    Message,
    QueueProgress,
    Refused,
    Register,
    RegisterCoordinator,
    Registered,
    ResultReceived,
    Results,
    RoundEnded,
    SlotsLost,
    StealRequest,
    Submit,
    Workers,
)
from zmqdist.scheduling.dispatcher import machine
from zmqdist.scheduling.dispatcher.machine import SLOTS_END_S, Broker
from zmqdist.scheduling.dispatcher.records import CoordinatorSession, Lease, LeaseState

ENDED = Send("c", RoundEnded(1))


# -- withdrawing -----------------------------------------------------------------------------------


def test_waiting_work_that_is_withdrawn_is_cancelled_at_once_and_other_work_stays(
    broker: Broker,
) -> None:
    coordinator(broker)
    submit(broker, 1, 2, 3)
    assert hear(broker, "c", CancelWork([(3, 0), (1, 0), (99, 0)], 2.0)) == [cancelled(1, 3)]
    assert [work for _, _, work, _ in given(worker(broker))] == [2]


@pytest.mark.parametrize(
    ("message", "more"),
    [
        (LeasesReturned([1]), []),
        (Done([(1, VALUE, b"r")], [1]), []),
        (Done([(1, ERROR, b"r")], [1]), []),
        (Done([(1, BULK, b"r")], [1]), [Send("w", FreeResult([1]))]),
        (SlotsLost([(1, -9, "")]), []),
    ],
    ids=["given back", "a value", "an error", "a bulk value", "its slot died"],
)
def test_assigned_work_that_is_withdrawn_is_aborted_and_cancelled_however_it_ends(
    broker: Broker, message: Message, more: list[Send]
) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41)
    assert hear(broker, "c", CancelWork([(41, 0)], 2.0)) == [Send("w", AbortLeases([1], 2.0))]
    assert hear(broker, "w", message) == [cancelled(41), *more]
    assert (broker.snapshot().queued, broker.snapshot().coordinators[0].out) == (0, 0)


@pytest.mark.parametrize("started", [True, False])
def test_withdrawn_work_does_not_run_again_when_its_worker_is_lost(
    broker: Broker, started: bool
) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41)
    begin(broker, *([1] if started else []))
    hear(broker, "c", CancelWork([(41, 0)], 2.0))
    assert broker.handle(SEEN, 1.0) == [cancelled(41), Send("c", Workers(0))]


def test_withdrawn_work_with_a_bulk_result_does_not_run_again_when_its_worker_is_lost(
    broker: Broker,
) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41)
    done(broker, 1, kind=BULK)
    assert hear(broker, "c", CancelWork([(41, 0)], 2.0)) == [], "it may still be fetched"
    assert broker.handle(SEEN, 1.0) == [cancelled(41), Send("c", Workers(0))]


@pytest.mark.parametrize("kind", [VALUE, BULK])
def test_p17_work_that_ended_before_it_was_taken_back_is_not_cancelled(
    broker: Broker, kind: int
) -> None:
    """The lease was unwanted when its outcome arrived, and its worker had not reported the start.
    A bulk result that is then lost is computed again."""
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41)
    assert hear(broker, "c", CancelWork([(41, 0)], 2.0, unless_begun=True)) == [
        Send("w", StealRequest([1]))
    ]
    assert done(broker, 1, kind=kind) == [Send("c", Results([(41, 0, kind, b"r")]))]
    assert broker.handle(SEEN, 1.0) == [Send("c", Workers(0))]
    assert broker.snapshot().queued == (kind == BULK)


def test_a_lease_has_only_the_transitions_of_its_table() -> None:
    session = CoordinatorSession(1, "c", 1000)
    lease = Lease(session, session.queue_for("").band(0), (41, 0, 0, 7, b""))
    lease.enter(LeaseState.HELD)
    with pytest.raises(InternalError, match="the lease of work 41 cannot go from HELD to BEGUN"):
        lease.enter(LeaseState.BEGUN)


def test_one_coordinator_cannot_withdraw_the_work_of_another(broker: Broker) -> None:
    coordinator(broker, "c", 1)
    coordinator(broker, "d", 2)
    worker(broker, "w")
    submit(broker, 1, 2, 3, peer="d")
    assert hear(broker, "c", CancelWork([(1, 0), (2, 0), (3, 0)], 2.0)) == []


# -- the end of a round ----------------------------------------------------------------------------


def test_p5_a_round_without_assigned_work_ends_at_once_and_its_queue_is_dropped(
    broker: Broker,
) -> None:
    coordinator(broker)
    submit(broker, 1, 2)
    assert end(broker) == [ENDED]
    assert given(worker(broker)) == []


def test_work_of_an_ended_round_that_arrives_late_is_dropped(broker: Broker) -> None:
    coordinator(broker)
    worker(broker)
    end(broker)
    assert submit(broker, 1) == []
    assert broker.snapshot().queued == 0
    assert len(hear(broker, "c", Submit(2, [(2, 0, 0, 7, b"2")]))) == 1


@pytest.mark.parametrize(
    "message",
    [Done([(1, VALUE, b"r")], []), LeasesReturned([1]), SlotsLost([(1, -9, "")])],
    ids=["an outcome", "given back", "its slot died"],
)
def test_p5_the_end_waits_for_leases(broker: Broker, message: Message) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41, 42, 43)
    assert end(broker) == [Send("w", AbortLeases([1, 2], 2.0))]
    assert done(broker, 2) == [cancelled(42)]
    assert broker.deadline is None, "time alone ends nothing"
    assert hear(broker, "w", message) == [cancelled(41), ENDED]


def test_p5_the_end_waits_a_lease_for_a_worker_whose_process_may_still_run(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41)
    begin(broker, 1, now=3.0)
    broker.handle(PeerGone("w"), 4.0)
    assert end(broker, now=4.0) == []
    assert broker.handle(Ticked(), 4.0 + BACK_S) == [cancelled(41), Send("c", Workers(0))]
    assert broker.deadline == 3.0 + LEASE_S
    assert broker.handle(Ticked(), 2.9 + LEASE_S) == []
    assert broker.handle(Ticked(), 3.0 + LEASE_S) == [ENDED]
    assert broker.deadline is None


def test_p5_the_end_waits_a_moment_for_the_slots_of_a_worker_whose_process_has_ended(
    broker: Broker,
) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41)
    end(broker)
    assert broker.handle(SEEN, 1.0) == [cancelled(41), Send("c", Workers(0))]
    assert broker.deadline == 1.0 + SLOTS_END_S
    assert broker.handle(Ticked(), 1.0 + SLOTS_END_S) == [ENDED]


def test_p5_the_end_waits_for_work_of_an_earlier_connection(broker: Broker) -> None:
    coordinator(broker, "c0")
    worker(broker, "w")
    submit(broker, 41, peer="c0")
    broker.handle(PeerGone("c0"), 1.0)
    coordinator(broker, "c", now=2.0)
    assert end(broker, now=2.0) == []
    assert broker.deadline is None
    assert done(broker, 1, now=3.0) == [ENDED], "and the outcome is dropped"


def test_p5_the_end_waits_for_work_of_an_earlier_connection_whose_worker_may_still_run(
    broker: Broker,
) -> None:
    coordinator(broker, "c0")
    worker(broker, "w")
    submit(broker, 41, peer="c0")
    broker.handle(PeerGone("c0"), 1.0)
    coordinator(broker, "c", now=2.0)
    end(broker, now=2.0)
    broker.handle(PeerGone("w"), 3.0)
    broker.handle(Ticked(), 3.0 + BACK_S)
    assert broker.deadline == LEASE_S
    assert broker.handle(Ticked(), LEASE_S) == [ENDED]


def test_p5_the_end_waits_a_lease_if_an_earlier_dispatcher_had_assigned_work(
    broker: Broker,
) -> None:
    coordinator(broker, former=True, now=5.0)
    assert end(broker, now=6.0) == []
    assert broker.deadline == 5.0 + LEASE_S
    assert broker.handle(Ticked(), 5.0 + LEASE_S) == [ENDED]


@pytest.mark.parametrize("joins_first", [True, False])
def test_p5_the_end_waits_for_threads_that_an_earlier_dispatcher_started(
    broker: Broker, joins_first: bool
) -> None:
    coordinator(broker)
    if joins_first:
        worker(broker, "w", leftover=[(55, 1)])
    else:
        worker(broker, "w")
        worker(broker, "w2", leftover=[(55, 1)])
    peer = "w" if joins_first else "w2"
    assert end(broker) == []
    assert broker.deadline is None
    assert hear(broker, peer, LeasesReturned([55])) == [ENDED]


def test_p5_a_lost_worker_may_go_on_with_such_threads_for_its_lease(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w", leftover=[(55, 1)])
    end(broker)
    broker.handle(PeerGone("w"), 1.0)
    assert broker.handle(Ticked(), 1.0 + BACK_S) == [Send("c", Workers(0))]
    assert broker.deadline == LEASE_S
    assert broker.handle(Ticked(), LEASE_S) == [ENDED]


def test_p5_the_end_does_not_wait_for_threads_and_leases_of_other_coordinators(
    broker: Broker,
) -> None:
    coordinator(broker, "c", 1)
    coordinator(broker, "d", 2)
    worker(broker, "w", leftover=[(55, 2)])
    submit(broker, 1, peer="d")
    assert end(broker) == [ENDED]


# -- sessions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [PeerGone("c"), Heard("c", Goodbye()), Heard("c2", RegisterCoordinator(1, 1000, 1, True))],
    ids=["gone", "goodbye", "enlisted over another connection"],
)
def test_p1_the_work_of_a_disconnected_coordinator_is_dropped(
    broker: Broker, how: Heard | PeerGone
) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 1, 2, 3)
    effects = broker.handle(how, 1.0)
    assert effects[:2] == [Send("w", AbortLeases([1, 2], 0.0)), Send("w", Forget(1, [7]))]
    assert broker.snapshot().queued == 0
    assert done(broker, 1, now=1.0) == []
    assert hear(broker, "w", SlotsLost([(2, -9, "")]), 1.0) == []
    assert given(worker(broker, "v", 1, now=1.0)) == []


def test_a_disconnected_coordinator_is_not_told_of_the_end_of_its_round(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 1)
    end(broker)
    broker.handle(PeerGone("c"), 1.0)
    assert done(broker, 1, now=1.0) == []
    assert broker.deadline is None


def test_coordinators_are_told_when_there_is_a_first_worker_and_when_there_is_none(
    broker: Broker,
) -> None:
    coordinator(broker, "c", 1)
    coordinator(broker, "d", 2)
    some, none = [[Send(peer, Workers(count)) for peer in ("c", "d")] for count in (1, 0)]
    assert worker(broker, "w")[1:] == some
    assert worker(broker, "v", 1)[1:] == []
    assert coordinator(broker, "e", 3) == [Send("e", CoordinatorRegistered(3, 2))]
    broker.handle(PeerGone("e"), 0.0)
    assert broker.handle(SEEN, 1.0) == []
    assert hear(broker, "v", Goodbye(), 1.0) == none


@pytest.mark.parametrize(
    ("queue_max", "works", "reported", "later"),
    [(10, 3, [], []), (4, 4, [2], []), (2, 3, [2], []), (1, 4, [2], [3])],
    ids=["never full", "full", "over-full", "still full"],
)
def test_the_coordinator_that_filled_the_queue_hears_of_progress_until_it_is_not_full(
    broker: Broker, queue_max: int, works: int, reported: list[int], later: list[int]
) -> None:
    coordinator(broker, queue_max=queue_max)
    assert submit(broker, *range(works)) == []
    effects = worker(broker)
    assert [
        effect.message.left_queue for effect in effects if isinstance(effect.message, QueueProgress)
    ] == reported
    effects = done(broker, 1)
    assert [
        effect.message.left_queue for effect in effects if isinstance(effect.message, QueueProgress)
    ] == later


def test_the_end_of_a_round_makes_room_in_a_full_queue(broker: Broker) -> None:
    coordinator(broker, queue_max=2)
    submit(broker, 1, 2)
    assert end(broker) == [ENDED, Send("c", QueueProgress(2))]


def test_p10_a_new_round_does_not_get_the_turns_of_the_old_one_too(broker: Broker) -> None:
    for number in (1, 2):
        coordinator(broker, f"c{number}", number)
    submit(broker, 0, peer="c1")
    end(broker, "c1")
    hear(broker, "c1", Submit(2, [(work, 0, 0, 7, b"%d" % work) for work in range(100, 104)]))
    submit(broker, *range(200, 204), peer="c2")
    effects = worker(broker)
    order: list[int] = []
    while leases := leases_of(effects):
        order += [work // 100 for _, _, work, _ in given(effects)]
        effects = [effect for lease in leases for effect in done(broker, lease, now=1.0)]
    assert order == [1, 2] * 4


# -- refusals, beats, snapshots --------------------------------------------------------------------


FROM_COORDINATORS = [
    Submit(1, []),
    Define([]),
    Forget(1, []),
    ResultReceived([]),
    CancelWork([], 0.0),
    EndRound(1, 0.0),
]
FROM_WORKERS = [Done([], []), LeasesReturned([]), SlotsLost([]), Beat(), Leave(0.0)]
NEWCOMER = "a peer that has not registered as a worker or coordinator"
FROM_NOBODY = [Refused(1, ""), RoundEnded(1), Registered(0, 1.0, 1.0, 1.0)]


@pytest.mark.parametrize(
    ("peer", "who", "messages"),
    [
        ("x", NEWCOMER, [*FROM_COORDINATORS, *FROM_WORKERS, *FROM_NOBODY]),
        (
            "c",
            "a coordinator",
            [*FROM_WORKERS, *FROM_NOBODY, Register(9, "worker", 9, 1, [], [], 1, "host")],
        ),
        ("w", "a worker", [*FROM_COORDINATORS, *FROM_NOBODY, RegisterCoordinator(9, 10, 1, False)]),
    ],
    ids=["a newcomer", "a coordinator", "a worker"],
)
def test_a_message_from_the_wrong_peer_is_refused_and_changes_nothing(
    broker: Broker, peer: str, who: str, messages: list[Message]
) -> None:
    coordinator(broker)
    worker(broker, "w")
    before = broker.snapshot()
    for message in messages:
        refusal = Refused(errors.FAILED_PRECONDITION, f"{type(message).__name__} from {who}")
        assert hear(broker, peer, message) == [Send(peer, refusal)]
    assert broker.snapshot() == before


def test_a_peer_may_say_goodbye_before_it_registers(broker: Broker) -> None:
    assert hear(broker, "x", Goodbye()) == []
    assert broker.handle(PeerGone("x"), 0.0) == []
    assert broker.handle(ProcessExited(1, 0, peer="x"), 0.0) == []
    assert broker.deadline is None


def test_a_submission_for_an_undefined_function_is_refused_as_a_whole(broker: Broker) -> None:
    coordinator(broker)
    (refusal,) = hear(broker, "c", Submit(1, [(1, 0, 0, 7, b""), (2, 0, 0, 8, b"")]))
    assert refusal == Send(
        "c", Refused(errors.FAILED_PRECONDITION, "work for functions [8] that were never defined")
    )
    assert broker.snapshot().queued == 0


def test_a_coordinator_that_submits_although_its_queue_is_full_is_refused(broker: Broker) -> None:
    coordinator(broker, queue_max=10)
    fits = 2 * 10 + BATCH_ITEMS_MAX
    assert submit(broker, *range(fits)) == []
    (refusal,) = submit(broker, fits)
    assert isinstance(refusal.message, Refused)
    assert (refusal.message.code, "queue_max=10" in refusal.message.message) == (
        errors.RESOURCE_EXHAUSTED,
        True,
    )
    assert broker.snapshot().queued == fits


def test_coordinators_above_the_bound_are_refused(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "COORDINATORS_MAX", 1)
    coordinator(broker, "c", 1)
    (refusal,) = hear(broker, "d", RegisterCoordinator(2, 10, 1, False))
    assert refusal == Send(
        "d", Refused(errors.RESOURCE_EXHAUSTED, "this dispatcher has 1 coordinators")
    )
    assert [row.coordinator for row in broker.snapshot().coordinators] == [1]


def test_a_coordinator_that_is_back_before_it_was_missed_does_not_count_twice(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "COORDINATORS_MAX", 1)
    coordinator(broker, "c", 1)
    reported, enlisted = hear(broker, "d", RegisterCoordinator(1, 10, 1, False))
    assert enlisted == Send("d", CoordinatorRegistered(3, 0))
    # or another coordinator has taken its number
    assert reported == Send("c", Refused(errors.ABORTED, machine.DISPLACED, final=True))
    assert list(broker.dispatch.sessions) == ["d"]
    assert hear(broker, "d", RegisterCoordinator(1, 10, 1, False)) == [
        Send("d", CoordinatorRegistered(3, 0))
    ]


def test_a_beat_is_echoed(broker: Broker) -> None:
    worker(broker, "w")
    assert hear(broker, "w", Beat(), 4.0) == [Send("w", Beat())]
    assert broker.snapshot().workers[0].heard_at == 4.0


def test_a_snapshot_counts_waiting_assigned_and_lost_work(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w")
    worker(broker, "v", 1)
    submit(broker, 1, 2, 3, 4, 5)
    begin(broker, 2, peer="v")
    broker.handle(SEEN, 1.0)
    assert done(broker, 2, peer="v", kind=BULK, now=1.0)[0] == Send(
        "c", Results([(2, 0, BULK, b"r")])
    )
    snapshot = broker.snapshot()
    (row,) = snapshot.workers
    assert (row.name, row.state, row.slots, row.leases, row.running, row.window, row.done) == (
        "worker:1", "alive", 1, 2, 0, 2, 1,
    )  # fmt: skip
    (session,) = snapshot.coordinators
    assert (session.queued, session.out, session.held, session.submitted, session.finished, session.functions) == (
        2, 2, 1, 5, 0, 1,
    )  # fmt: skip
    assert (snapshot.queued, snapshot.losses_count) == (2, 1)
    assert snapshot.losses == (("worker:0", "its process ended", -9, 1.0),)


def test_work_whose_function_was_forgotten_has_ended_and_is_not_handed_out_again(
    broker: Broker,
) -> None:
    """Its coordinator has the bulk result. Before it could report this, the worker came back
    without the result."""
    coordinator(broker)
    submit(broker, 1, 2)
    hear(broker, "c", Define([(8, b"g")]))
    hear(broker, "c", Submit(1, [(3, 0, 0, 8, b"3")]))
    hear(broker, "c", Forget(1, [7]))
    assert [work for _, _, work, _ in given(worker(broker, slots=3))] == [3]
    (session,) = broker.dispatch.sessions.values()
    assert (broker.dispatch.placement.queued, session.queued, session.outstanding) == (0, 0, 1)

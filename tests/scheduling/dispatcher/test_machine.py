"""The dispatcher as one machine: which worker gets which work when, and what a loss costs.

In these tests the payload of a work item is its number, and every work item is for function 7. The
ends of rounds, withdrawing and refusals are in test_dispatch_ends.py.
"""

from __future__ import annotations

import pytest

from tests.scheduling.dispatcher.dispatched import (
    SEEN,
    WELCOME,
    begin,
    coordinator,
    done,
    given,
    hear,
    leases_of,
    submit,
    worker,
)
from zmqdist import errors
from zmqdist.events import Heard, PeerGone, ProcessExited, Send, Ticked
from zmqdist.limits import BATCH_ITEMS_MAX
from zmqdist.messages import (
    BULK,
    ERROR,
    VALUE,
    AbortLeases,
    Assign,
    Beat,
    CancelWork,
    CoordinatorRegistered,
    Define,
    EndRound,
    Forget,
    FreeResult,
    Goodbye,
    LeasesReturned,
    Leave,
    Refused,
    RegisterCoordinator,
    ResultReceived,
    Results,
    RoundEnded,
    SlotsLost,
    StartsLost,
    StealRequest,
    Submit,
    Workers,
)
from zmqdist.scheduling.dispatcher import placement
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.dispatcher.records import WorkerLoad

# -- work and its results --------------------------------------------------------------------------


def test_p1_p8_work_waits_for_a_worker_and_its_result_goes_to_its_coordinator_once(
    broker: Broker,
) -> None:
    assert coordinator(broker) == [Send("c", CoordinatorRegistered(3, 0))]
    assert submit(broker, 41, 42) == []
    assign = Assign([(1, 7, b"f")], [(1, 1, 0, 7, b"41"), (2, 1, 0, 7, b"42")], workers=1)
    assert worker(broker) == [Send("w", WELCOME), Send("c", Workers(1)), Send("w", assign)]
    assert done(broker, 1) == [Send("c", Results([(41, 0, VALUE, b"r")]))]
    assert done(broker, 2, kind=ERROR) == [Send("c", Results([(42, 0, ERROR, b"r")]))]
    assert done(broker, 1, 2) == []


@pytest.mark.parametrize(
    ("peer", "lease"),
    [("v", 1), ("w", 99)],
    ids=["a worker that does not hold it", "a lease that never was"],
)
def test_p2_an_outcome_counts_only_from_the_worker_that_holds_the_lease(
    broker: Broker, peer: str, lease: int
) -> None:
    coordinator(broker)
    worker(broker, "w")
    worker(broker, "v", 1)
    submit(broker, 41)
    assert done(broker, lease, peer=peer) == []
    assert done(broker, 1) == [Send("c", Results([(41, 0, VALUE, b"r")]))]


def test_p2_an_outcome_of_a_lost_incarnation_is_dropped_and_what_it_runs_is_cut_off(
    broker: Broker,
) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41)
    broker.handle(PeerGone("w"), 1.0)
    broker.handle(Ticked(), 2.0)
    effects = worker(broker, "v", life=1, held=[1], now=3.0)
    assert Send("v", AbortLeases([1], 0.0)) in effects
    assert given(effects, careful=True) == [("v", 2, 41, 1)]
    assert done(broker, 1, peer="v", now=3.0) == []


def test_lease_numbers_begin_where_the_runtime_says(broker: Broker) -> None:
    later = Broker(broker.settings, first_lease=1000)
    coordinator(later)
    worker(later)
    assert given(submit(later, 41, 42)) == [("w", 1000, 41, 0), ("w", 1001, 42, 0)]


def test_p7_every_queue_empties_although_a_worker_is_lost(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w", 0, slots=4)
    worker(broker, "v", 1, slots=4)
    effects = submit(broker, *range(50)) + broker.handle(SEEN, 0.5)
    left = [
        lease for peer, lease, _, _ in given(effects) + given(effects, careful=True) if peer == "v"
    ]
    ended: list[int] = []
    while left:
        effects = done(broker, left.pop(0), peer="v", now=1.0)
        ended += [
            item[0] for e in effects if isinstance(e.message, Results) for item in e.message.items
        ]
        left += leases_of(effects) + [lease for _, lease, _, _ in given(effects, careful=True)]
    assert sorted(ended) == list(range(50))
    assert (broker.snapshot().queued, broker.snapshot().coordinators[0].finished) == (0, 50)


def test_p8_a_function_is_sent_once_to_each_worker_and_again_over_a_new_connection(
    broker: Broker,
) -> None:
    coordinator(broker)
    worker(broker, "w")
    functions = [(1, 7, b"f")]
    assert submit(broker, 1) == [Send("w", Assign(functions, [(1, 1, 0, 7, b"1")], workers=1))]
    assert submit(broker, 2) == [Send("w", Assign([], [(2, 1, 0, 7, b"2")], workers=1))]
    worker(broker, "w2", held=[1, 2])
    assert done(broker, 1, 2, peer="w2") == [
        Send("c", Results([(1, 0, VALUE, b"r"), (2, 0, VALUE, b"r")]))
    ]
    assert submit(broker, 3) == [Send("w2", Assign(functions, [(3, 1, 0, 7, b"3")], workers=1))]


def test_p8_a_forgotten_function_is_forgotten_by_the_workers_that_have_it(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w")
    worker(broker, "v", 1)
    submit(broker, 1)
    done(broker, 1)
    assert hear(broker, "c", Forget(1, [7, 8])) == [Send("w", Forget(1, [7]))]
    (refusal,) = submit(broker, 2)
    assert refusal.message == Refused(
        errors.FAILED_PRECONDITION, "work for functions [7] that were never defined"
    )
    hear(broker, "c", Define([(7, b"g")]))
    assigns = [effect.message for effect in submit(broker, 2, 3)]
    assert [assign.functions for assign in assigns] == [[(1, 7, b"g")]] * 2


@pytest.mark.parametrize(
    ("count", "payload_bytes", "parts"),
    [(2 * BATCH_ITEMS_MAX + 1, 1, [BATCH_ITEMS_MAX, BATCH_ITEMS_MAX, 1]), (100, 1024, [64, 36])],
    ids=["by count", "by bytes"],
)
def test_much_work_for_one_worker_is_split_and_the_functions_are_in_the_first_message(
    broker: Broker, count: int, payload_bytes: int, parts: list[int]
) -> None:
    hear(broker, "c", RegisterCoordinator(1, 10_000, 1, False))
    hear(broker, "c", Define([(7, b"f")]))
    hear(broker, "c", Submit(1, [(work, 0, 0, 7, bytes(payload_bytes)) for work in range(count)]))
    assigns = [
        effect.message
        for effect in worker(broker, slots=count)
        if isinstance(effect.message, Assign)
    ]
    assert [len(assign.items) for assign in assigns] == parts
    assert [assign.functions for assign in assigns] == [[(1, 7, b"f")]] + [[]] * (len(parts) - 1)


# -- which worker gets which work ------------------------------------------------------------------


def test_idle_workers_come_before_those_that_only_have_room(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w")
    worker(broker, "v", 1)
    assert given(submit(broker, 1, 2)) == [("w", 1, 1, 0), ("v", 2, 2, 0)]
    assert given(submit(broker, 3, 4, 5)) == [("w", 3, 3, 0), ("v", 4, 4, 0)]
    assert broker.snapshot().queued == 1


def test_p6_a_worker_holds_two_for_a_slot_at_first_and_more_as_its_window_grows(
    broker: Broker,
) -> None:
    coordinator(broker)
    effects = submit(broker, *range(400)) + worker(broker)
    left = leases_of(effects)
    assert left == [1, 2]
    now, most = 0.0, 0
    while left:
        now += 0.001
        left += leases_of(done(broker, left.pop(0), now=now, busy_s=0.001))
        row = broker.snapshot().workers[0]
        assert row.leases == len(left) <= row.window
        most = max(most, row.leases)
    assert most > 10, "1,000 a second are 50 in the horizon"


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_p10_coordinators_with_waiting_work_are_served_in_turn(broker: Broker, slots: int) -> None:
    coordinator(broker, "c1", 1)
    coordinator(broker, "c2", 2)
    submit(broker, *range(500), peer="c1")
    submit(broker, *range(1000, 1004), peer="c2")
    effects = worker(broker, slots=slots)
    order = [work for _, _, work, _ in given(effects)]
    left = leases_of(effects)
    while len(order) < 16:
        effects = done(broker, left.pop(0), now=1.0)
        order += [work for _, _, work, _ in given(effects)]
        left += leases_of(effects)
    assert {1000, 1001, 1002, 1003} <= set(order[:16]), (
        "the one with four did not wait for the one with 500"
    )
    assert [work for work in order if work < 1000] == list(range(len(order) - 4)), (
        "each in its own order"
    )
    assert 1000 in order[: 2 * slots]


def test_p10_coordinators_take_strict_turns_for_single_slots(broker: Broker) -> None:
    for number in (1, 2, 3):
        coordinator(broker, f"c{number}", number)
        submit(broker, *range(number * 100, number * 100 + 3), peer=f"c{number}")
    effects = worker(broker)
    order: list[int] = []
    while leases := leases_of(effects):
        order += [work for _, _, work, _ in given(effects)]
        effects = [effect for lease in leases for effect in done(broker, lease, now=1.0)]
    assert [work // 100 for work in order] == [1, 2, 3] * 3


def test_work_that_a_worker_has_not_begun_is_recalled_for_an_idle_worker(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 1, 2)
    assert worker(broker, "v", 1)[1:] == [Send("w", StealRequest([2]))]
    assert hear(broker, "v", Beat()) == [Send("v", Beat())], "it is recalled once"
    assert hear(broker, "w", LeasesReturned([])) == [Send("w", StealRequest([2]))], (
        "and again after the worker has returned nothing"
    )
    back = hear(broker, "w", LeasesReturned([2]))
    assert given(back) == [("v", 3, 2, 1)]


def test_for_one_idle_slot_work_of_one_worker_is_recalled(broker: Broker) -> None:
    coordinator(broker)
    for index in range(4):
        worker(broker, f"w{index}", index)
    submit(broker, *range(8))
    effects = worker(broker, "v", 4)
    for now in (0.1, 0.2, 0.3):
        effects += broker.handle(Ticked(), now)
    assert effects[1:] == [Send("w0", StealRequest([5]))]
    assert broker.deadline is None, "time alone changes nothing until the worker has replied"


def test_work_that_will_begin_at_once_is_not_recalled(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w")
    left = leases_of(submit(broker, *range(300)))
    now = 0.0
    while broker.snapshot().queued:
        now += 0.0005
        left += leases_of(done(broker, left.pop(0), now=now, busy_s=0.0005))
    while len(left) > 5:  # five at 2,000 a second are 2.5 ms
        now += 0.0005
        done(broker, left.pop(0), now=now, busy_s=0.0005)
    assert worker(broker, "v", 1, now=now)[1:] == []
    overdue = broker.deadline
    assert overdue is not None
    assert broker.handle(Ticked(), overdue - 0.001) == []
    assert broker.handle(Ticked(), overdue) == [Send("w", StealRequest(left[3:]))], (
        "it should have begun by then"
    )
    assert broker.deadline is None


def test_an_event_looks_at_no_more_workers_than_it_is_about(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[WorkerLoad] = []

    def in_a_while(hands: WorkerLoad) -> float:
        looked_at.append(hands)
        return 1.0

    monkeypatch.setattr(placement, "_worth_stealing_at", in_a_while)
    coordinator(broker)
    for index in range(50):
        worker(broker, f"w{index}", index)
    submit(broker, *range(100))
    worker(broker, "v", 50)
    assert len(looked_at) == 50, (
        "a slot is idle: what could each worker give back, and from when on"
    )
    for index in range(50):
        hear(broker, f"w{index}", Beat())
    assert (len(looked_at), broker.deadline) == (50, 1.0)
    done(broker, 1, peer="w0")
    assert len(looked_at) == 50, "it holds no more than it can begin"
    assert Send("w1", StealRequest([52])) in broker.handle(Ticked(), 1.0)


def test_work_that_has_begun_is_not_recalled(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w", slots=2)
    submit(broker, 1, 2, 3)
    begin(broker, 1, 2, 3)
    assert worker(broker, "v", 1)[1:] == []


def test_a_drained_worker_gets_no_more_work_and_its_returned_work_goes_elsewhere(
    broker: Broker,
) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 1, 2)
    begin(broker, 1)
    assert broker.leave("worker", 0, 3.0, 0.0) == [Send("w", Leave(3.0))]
    assert submit(broker, 3) == []
    assert broker.snapshot().workers[0].state == "leaving"
    assert given(worker(broker, "v", 1)) == [("v", 3, 3, 0)]
    assert given(hear(broker, "w", LeasesReturned([2]))) == [("v", 4, 2, 1)]
    assert done(broker, 1) == [Send("c", Results([(1, 0, VALUE, b"r")]))]
    assert hear(broker, "w", Goodbye()) == []
    assert [row.name for row in broker.snapshot().workers] == ["worker:1"]


def test_a_worker_that_announces_that_it_leaves_gets_no_more_work(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w")
    assert hear(broker, "w", Leave(0.0)) == []
    assert submit(broker, 1) == []
    assert broker.snapshot().workers[0].state == "leaving"


def test_an_unknown_worker_cannot_be_drained(broker: Broker) -> None:
    assert broker.leave("worker", 0, 3.0, 0.0) is None


# -- losses ----------------------------------------------------------------------------------------


def test_slots_that_died_are_counted_with_the_last_of_them(broker: Broker) -> None:
    assert (broker.snapshot().slot_deaths, broker.snapshot().last_slot_death) == (0, None)
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41)
    begin(broker, 1)
    hear(broker, "w", SlotsLost([(1, -9, "log")]), 2.5)
    snapshot = broker.snapshot()
    assert (snapshot.slot_deaths, snapshot.last_slot_death) == (1, ("worker:0", -9, 2.5))
    assert [row.slot_deaths for row in snapshot.workers] == [1]


@pytest.mark.parametrize(
    "how", [SEEN, Heard("w", SlotsLost([(1, -9, "log")]))], ids=["worker", "slot"]
)
def test_p3_a_lost_start_is_charged_and_the_work_runs_again_as_careful_work(
    broker: Broker, how: ProcessExited | Heard
) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41)
    begin(broker, 1)
    effects = broker.handle(how, 1.0) + worker(broker, "v", 1, now=1.0)
    assert Send("c", StartsLost([(41, 0, "worker:0", -9, "log", False)])) in effects
    assert [(lease, work, attempt) for _, lease, work, attempt in given(effects, careful=True)] == [
        (2, 41, 1)
    ]
    assert given(effects) == []


def test_work_that_has_lost_a_start_runs_again_after_the_waiting_work(broker: Broker) -> None:
    """It may be the function that never ends, or that kills its process."""
    coordinator(broker)
    worker(broker, "w")
    submit(broker, *range(1, 9))
    begin(broker, 1)
    broker.handle(SEEN, 1.0)
    effects = worker(broker, "v", 1, slots=20, now=1.0)
    sent = [
        work
        for message in effects
        if isinstance(message.message, Assign)
        for _, _, work, _ in given([message]) + given([message], careful=True)
    ]
    assert sent[-1] == 1
    assert sorted(sent) == list(range(1, 9))


@pytest.mark.parametrize(("lost_before", "starts"), [(0, 3), (1, 2), (2, 1)])
def test_p3_work_fails_when_attempts_max_starts_were_lost_those_under_other_dispatchers_included(
    broker: Broker, lost_before: int, starts: int
) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41, lost=lost_before)
    messages = []
    for lease in range(1, starts + 1):
        effects = hear(broker, "w", SlotsLost([(lease, -11, "")]))
        messages += [effect.message for effect in effects if effect.to == "c"]
    assert messages == [
        StartsLost([(41, attempt, "worker:0", -11, "", attempt == starts - 1)])
        for attempt in range(starts)
    ]
    row = broker.snapshot().coordinators[0]
    assert (row.queued, row.out, row.finished) == (0, 0, 1)


def test_p4_work_that_had_not_started_goes_back_uncharged_to_the_front(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w", slots=2)
    submit(broker, 1, 2, 3, 4, 5)
    assert hear(broker, "w", LeasesReturned([2, 3])) == [
        Send("w", Assign([], [(5, 1, 1, 7, b"2"), (6, 1, 1, 7, b"3")], workers=1)),
    ], "before work 5"


def test_p4_work_of_a_lost_worker_that_had_not_started_is_handed_out_carefully_and_uncharged(
    broker: Broker,
) -> None:
    coordinator(broker)
    worker(broker, "w", slots=2)
    submit(broker, 1, 2, 3, 4, 5)
    begin(broker, 1)
    lost = broker.handle(SEEN, 1.0)
    assert lost == [
        Send("c", StartsLost([(1, 0, "worker:0", -9, "log", False)])),
        Send("c", Workers(0)),
    ]
    effects = worker(broker, "v", 1, slots=3, now=1.0)
    careful = [work for _, _, work, _ in given(effects, careful=True)]
    assert (sorted(careful), [work for _, _, work, _ in given(effects)]) == ([1, 2, 3, 4], [5])


def test_a_worker_that_is_back_keeps_the_work_that_it_holds_and_the_rest_is_assigned_again(
    broker: Broker,
) -> None:
    coordinator(broker)
    worker(broker, "w", slots=2)
    submit(broker, 1, 2, 3)
    assert broker.handle(PeerGone("w"), 1.0) == []
    assert broker.snapshot().workers[0].state == "away"
    hear(broker, "c", CancelWork([(3, 0)], 2.0), 1.1)
    effects = worker(broker, "w2", slots=2, held=[1, 3, 77], now=1.5)
    assert effects == [
        Send("w2", WELCOME),
        Send("w2", AbortLeases([77], 0.0)),
        Send("w2", AbortLeases([3], 0.0)),
        Send("w2", Assign([(1, 7, b"f")], [(4, 1, 1, 7, b"2")], workers=1)),
    ]
    assert done(broker, 1, peer="w2", now=1.6) == [Send("c", Results([(1, 0, VALUE, b"r")]))]


def test_work_that_a_worker_does_not_name_when_it_registers_again_is_assigned_again(
    broker: Broker,
) -> None:
    """It stopped all its work after it had sent the first registration, and accepted none before
    the reply to the second."""
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 1)
    broker.handle(PeerGone("w"), 1.0)
    worker(broker, "w2", held=[1], now=1.5)
    assert worker(broker, "w2", held=[], now=1.6) == [
        Send("w2", WELCOME),
        Send("w2", Assign([(1, 7, b"f")], [(2, 1, 1, 7, b"1")], workers=1)),
    ]


def test_a_disconnected_worker_gets_no_work(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w")
    broker.handle(PeerGone("w"), 1.0)
    assert submit(broker, 1, now=1.0) == []


# -- bulk results ----------------------------------------------------------------------------------


def test_p9_work_whose_bulk_result_was_not_fetched_runs_again_when_its_worker_is_lost(
    broker: Broker,
) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41)
    assert done(broker, 1, kind=BULK) == [Send("c", Results([(41, 0, BULK, b"r")]))]
    assert broker.snapshot().coordinators[0].held == 1
    broker.handle(SEEN, 1.0)
    assert given(worker(broker, "v", 1, now=1.0)) == [("v", 2, 41, 1)]
    hear(broker, "c", ResultReceived([(41, 0)]))  # from the lost worker: it is too late
    assert done(broker, 2, peer="v", now=1.0) == [Send("c", Results([(41, 1, VALUE, b"r")]))]


def test_p9_work_whose_bulk_result_was_fetched_is_finished(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41)
    done(broker, 1, kind=BULK)
    assert hear(broker, "c", ResultReceived([(41, 0)])) == [Send("w", FreeResult([1]))]
    row = broker.snapshot().coordinators[0]
    assert (row.held, row.finished) == (0, 1)
    assert broker.handle(SEEN, 1.0) == [Send("c", Workers(0))]
    assert given(worker(broker, "v", 1, now=1.0)) == []


def test_p9_work_runs_again_when_its_worker_is_back_without_the_bulk_result(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41, 42)
    done(broker, 1, 2, kind=BULK)
    assert given(worker(broker, "w2", held=[1])) == [("w2", 3, 42, 1)]


@pytest.mark.parametrize(
    "how", [Heard("c", EndRound(1, 0.0)), PeerGone("c"), Heard("c", Goodbye())]
)
def test_a_bulk_result_is_released_with_its_round_or_its_coordinator(
    broker: Broker, how: Heard | PeerGone
) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41)
    done(broker, 1, kind=BULK)
    assert Send("w", FreeResult([1])) in broker.handle(how, 1.0)
    broker.handle(SEEN, 2.0)
    assert given(worker(broker, "v", 1, now=2.0)) == []


# -- kept results ----------------------------------------------------------------------------------


def keep(broker: Broker, *works: int) -> None:
    """Have worker "w" run work 41, 42, ... and keep the results under leases 1, 2, ..."""
    coordinator(broker)
    worker(broker, "w")
    submit(broker, *works)
    done(broker, *range(1, len(works) + 1), kind=BULK)
    assert hear(broker, "c", ResultReceived([(work, 0) for work in works], keep=True)) == []


def test_p11_work_with_a_kept_result_is_finished_and_the_result_is_released_when_it_is_taken(
    broker: Broker,
) -> None:
    keep(broker, 41, 42)
    row = broker.snapshot().coordinators[0]
    assert (row.held, row.finished) == (2, 2)
    assert hear(broker, "c", ResultReceived([(42, 0)])) == [Send("w", FreeResult([2]))]
    row = broker.snapshot().coordinators[0]
    assert (row.held, row.finished) == (1, 2)
    assert hear(broker, "c", ResultReceived([(42, 0)])) == []


def test_p11_a_kept_result_is_not_recomputed_when_its_worker_is_lost(broker: Broker) -> None:
    keep(broker, 41)
    assert broker.handle(SEEN, 1.0) == [Send("c", Workers(0))]
    assert given(worker(broker, "v", 1, now=1.0)) == []
    assert hear(broker, "c", ResultReceived([(41, 0)])) == []
    row = broker.snapshot().coordinators[0]
    assert (row.held, row.out, row.finished) == (0, 0, 1)


def test_p11_a_worker_that_is_back_continues_to_hold_kept_results(broker: Broker) -> None:
    keep(broker, 41, 42)
    effects = worker(broker, "w2", held=[1])
    assert not [effect for effect in effects if isinstance(effect.message, AbortLeases | Assign)]
    assert hear(broker, "c", ResultReceived([(41, 0), (42, 0)])) == [Send("w2", FreeResult([1]))], (
        "42 was lost with the connection"
    )


def test_p11_a_kept_result_outlives_its_round(broker: Broker) -> None:
    keep(broker, 41)
    submit(broker, 42)
    done(broker, 2, kind=BULK)
    effects = hear(broker, "c", EndRound(1, 0.0))
    assert effects == [Send("w", FreeResult([2])), Send("c", RoundEnded(1))]
    assert hear(broker, "c", ResultReceived([(41, 0)])) == [Send("w", FreeResult([1]))]


@pytest.mark.parametrize("how", [PeerGone("c"), Heard("c", Goodbye())])
def test_p11_a_kept_result_is_released_with_its_coordinator(
    broker: Broker, how: Heard | PeerGone
) -> None:
    keep(broker, 41)
    assert Send("w", FreeResult([1])) in broker.handle(how, 1.0)


def test_work_with_keep_whose_result_was_lost_before_its_end_runs_again(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w")
    submit(broker, 41)
    done(broker, 1, kind=BULK)
    broker.handle(SEEN, 1.0)
    assert hear(broker, "c", ResultReceived([(41, 0)], keep=True)) == []
    assert given(worker(broker, "v", 1, now=1.0)) == [("v", 2, 41, 1)]

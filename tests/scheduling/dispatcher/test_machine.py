"""The dispatcher's machine, scenario by scenario: each file of transcripts/, which scripted.py reads;
and the rules that take too many events for a transcript.

After a change of the machine `make transcripts` writes all effects anew; read the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scheduling.dispatcher.helpers import (
    SEEN,
    assigned_work,
    coordinator,
    finish,
    hear,
    leases_of,
    submit,
    worker,
)
from tests.scheduling.dispatcher.scripted import Script
from tests.transcripts import check, promises_of, promises_shown
from zmqdist import errors
from zmqdist.errors import InternalError
from zmqdist.events import Send, Ticked
from zmqdist.limits import BATCH_ITEMS_MAX
from zmqdist.messages import (
    Assign,
    Beat,
    CoordinatorRegistered,
    Define,
    Refused,
    RegisterCoordinator,
    Results,
    StealRequest,
    Submit,
)
from zmqdist.scheduling.dispatcher import children, machine, placement
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.dispatcher.records import CoordinatorSession, Lease, LeaseState, WorkerLoad

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript_has_the_effects_of_the_machine(path: Path) -> None:
    check(path, Script())


def test_promise_of_machine_has_transcript() -> None:
    """P6 and P7 are tested below."""
    promises = promises_of(machine.__doc__) | promises_of(children.__doc__)
    assert promises - promises_shown(TRANSCRIPTS) == {"P6", "P7"}


def test_queue_empties_although_worker_is_lost(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w", 0, slots=4)
    worker(broker, "v", 1, slots=4)
    effects = submit(broker, *range(50)) + broker.handle(SEEN, 0.5)
    left = [
        lease
        for peer, lease, _, _ in assigned_work(effects) + assigned_work(effects, careful=True)
        if peer == "v"
    ]
    ended: list[int] = []
    while left:
        effects = finish(broker, left.pop(0), peer="v", now=1.0)
        ended += [
            item[0] for e in effects if isinstance(e.message, Results) for item in e.message.items
        ]
        left += leases_of(effects) + [
            lease for _, lease, _, _ in assigned_work(effects, careful=True)
        ]
    assert sorted(ended) == list(range(50))
    assert (broker.snapshot().queued, broker.snapshot().coordinators[0].finished) == (0, 50)


@pytest.mark.parametrize(
    ("count", "payload_bytes", "parts"),
    [(2 * BATCH_ITEMS_MAX + 1, 1, [BATCH_ITEMS_MAX, BATCH_ITEMS_MAX, 1]), (100, 1024, [64, 36])],
    ids=["by count", "by bytes"],
)
def test_much_work_is_split_after_its_functions(
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


def test_window_grows_from_two_per_slot(
    broker: Broker,
) -> None:
    coordinator(broker)
    effects = submit(broker, *range(400)) + worker(broker)
    left = leases_of(effects)
    assert left == [1, 2]
    now, most = 0.0, 0
    while left:
        now += 0.001
        left += leases_of(finish(broker, left.pop(0), now=now, busy_s=0.001))
        row = broker.snapshot().workers[0]
        assert row.leases == len(left) <= row.window
        most = max(most, row.leases)
    assert most > 10, "1,000 a second are 50 in the horizon"


def test_work_about_to_begin_stays(broker: Broker) -> None:
    coordinator(broker)
    worker(broker, "w")
    left = leases_of(submit(broker, *range(300)))
    now = 0.0
    while broker.snapshot().queued:
        now += 0.0005
        left += leases_of(finish(broker, left.pop(0), now=now, busy_s=0.0005))
    while len(left) > 5:  # five at 2,000 a second are 2.5 ms
        now += 0.0005
        finish(broker, left.pop(0), now=now, busy_s=0.0005)
    assert worker(broker, "v", 1, now=now)[1:] == []
    overdue = broker.deadline
    assert overdue is not None
    assert broker.handle(Ticked(), overdue - 0.001) == []
    assert broker.handle(Ticked(), overdue) == [Send("w", StealRequest(left[3:]))], (
        "it should have begun by then"
    )
    assert broker.deadline is None


def test_cost_of_event_is_independent_of_workers(
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
    finish(broker, 1, peer="w0")
    assert len(looked_at) == 50, "it holds no more than it can begin"
    assert Send("w1", StealRequest([52])) in broker.handle(Ticked(), 1.0)


def test_lease_has_only_the_transitions_of_its_table() -> None:
    session = CoordinatorSession(1, "c", 1000)
    lease = Lease(session, session.queue_for("").band(0), (41, 0, 0, 7, b""))
    lease.enter(LeaseState.HELD)
    with pytest.raises(InternalError, match="the lease of work 41 cannot go from HELD to BEGUN"):
        lease.enter(LeaseState.BEGUN)


def test_submission_with_undefined_function_is_refused(broker: Broker) -> None:
    coordinator(broker)
    (refusal,) = hear(broker, "c", Submit(1, [(1, 0, 0, 7, b""), (2, 0, 0, 8, b"")]))
    assert refusal == Send(
        "c", Refused(errors.FAILED_PRECONDITION, "work for functions [8] that were never defined")
    )
    assert broker.snapshot().queued == 0


def test_coordinators_above_bound_are_refused(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "COORDINATORS_MAX", 1)
    coordinator(broker, "c", 1)
    (refusal,) = hear(broker, "d", RegisterCoordinator(2, 10, 1, False))
    assert refusal == Send(
        "d", Refused(errors.RESOURCE_EXHAUSTED, "this dispatcher has 1 coordinators")
    )
    assert [row.coordinator for row in broker.snapshot().coordinators] == [1]


def test_reconnected_coordinator_counts_once(
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

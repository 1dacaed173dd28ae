"""The worker's machine, scenario by scenario: each file of transcripts/, which scripted.py reads; and
the rules that take too many events for a transcript.

After a change of the machine `make transcripts` writes all effects anew; read the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scheduling.worker.helpers import (
    LEASE_S,
    LIFE,
    WELCOME,
    assign,
    finish,
    handle,
    hear,
    new_machine,
    outcome,
    ready,
    registration,
    say,
    welcome,
)
from tests.scheduling.worker.scripted import Script
from tests.transcripts import check, promises_of, promises_shown
from zmqdist import errors
from zmqdist.events import Send, Ticked
from zmqdist.limits import BATCH_ITEMS_MAX
from zmqdist.messages import BULK, Beat, FreeResult, Refused
from zmqdist.scheduling.worker import machine, nested_slots
from zmqdist.scheduling.worker.machine import STUCK_S, WorkerMachine
from zmqdist.scheduling.worker.worker_events import (
    DispatcherConnected,
    DispatcherDisconnected,
    Exit,
)

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript_has_the_effects_of_the_machine(path: Path) -> None:
    check(path, Script())


def test_promise_of_machine_has_transcript() -> None:
    promises = promises_of(machine.__doc__) | promises_of(nested_slots.__doc__)
    assert promises == promises_shown(TRANSCRIPTS)


def test_lasting_refusal_ends_worker_after_its_leases() -> None:
    worker = new_machine()
    handle(worker, DispatcherConnected(LIFE))
    now, refusals, effects = 0.0, 0, []
    while worker.exit is None:
        effects = hear(worker, Refused(errors.ALREADY_EXISTS, "is here already"), now)
        refusals += 1
        if worker.exit is None:
            now = worker.deadline or 0.0
            assert handle(worker, Ticked(), now=now) == [
                registration(index=-1, serial=refusals + 1)
            ]
    assert effects[-1] == Exit(errors.ALREADY_EXISTS, "is here already")
    assert LEASE_S < now < 2 * LEASE_S


def test_registration_says_who_chose_index() -> None:
    for named in (False, True):
        worker = new_machine(index=3 if named else -1)
        handle(worker, DispatcherConnected(LIFE))
        hear(worker, WELCOME)
        (again,) = handle(worker, DispatcherDisconnected(), DispatcherConnected(LIFE + 1))
        assert again == registration(index=3, named=named)
        assert (again.message.index, again.message.named) == (3, named)


def test_accepted_registration_resets_refusals(worker: WorkerMachine) -> None:
    now = 0.0
    for round_ in range(3):
        for refusal in range(1, 31):
            assert hear(worker, Refused(errors.FAILED_PRECONDITION, "who?"), now) == []
            now += 0.25
            assert registration(index=3, serial=30 * round_ + refusal + 1) in handle(
                worker, Ticked(), now=now
            )
        hear(worker, welcome(30 * (round_ + 1) + 1), now)


def test_messages_refused_together_count_once(worker: WorkerMachine) -> None:
    """Another process has registered as this worker, so the dispatcher refuses each report that was
    in flight."""
    for _ in range(1000):
        assert (
            hear(
                worker,
                Refused(errors.FAILED_PRECONDITION, "Done from somebody who has not registered"),
            )
            == []
        )
    assert handle(worker, Ticked(), now=0.25) == [registration(index=3, serial=2)]


def test_many_outcomes_take_several_messages(worker: WorkerMachine) -> None:
    count = BATCH_ITEMS_MAX + 1
    assign(worker, *range(1, count + 1))
    handle(worker, DispatcherDisconnected())
    for position in range(1, count + 1):
        assert not [effect for effect in finish(worker, position) if isinstance(effect, Send)]
    handle(worker, DispatcherConnected(LIFE))
    sizes = [len(e.message.outcomes) for e in hear(worker, WELCOME) if isinstance(e, Send)]
    assert sizes == [BATCH_ITEMS_MAX, 1]


def test_silent_slot_is_stuck(worker: WorkerMachine) -> None:
    worker = ready(2)
    assign(worker, 1, 2)
    finish(worker, 1)
    assign(worker, 3, 4, 5)
    finish(worker, 2)  # that is lease 3, and lease 5 replaces it
    assert finish(worker, 1, slot=1, now=0.01) == [outcome(2)]
    assert worker.deadline == STUCK_S
    finish(worker, 3, now=0.015)
    assign(worker, 6, now=0.015)
    assert handle(worker, Ticked(), now=STUCK_S) == []


def test_idle_worker_beats_rarely() -> None:
    """The dispatcher's echo says how rarely. Work, a result, and an actor need each beat."""
    worker = ready()
    assert say(Beat()) in handle(worker, Ticked(), now=1.0)
    hear(worker, Beat(200.0), now=1.0)
    assert worker.deadline == 201.0
    assign(worker, 5, now=50.0)
    assert worker.deadline == 51.0
    assert say(Beat()) in handle(worker, Ticked(), now=51.0)
    hear(worker, Beat(200.0), now=51.0)
    assert worker.deadline == 52.0
    finish(worker, 1, kind=BULK, now=51.5)
    handle(worker, Ticked(), now=52.0)
    hear(worker, Beat(200.0), now=52.0)
    assert worker.deadline == 53.0
    hear(worker, FreeResult([5]), now=52.5)
    handle(worker, Ticked(), now=53.0)
    hear(worker, Beat(200.0), now=53.0)
    assert worker.deadline == 253.0

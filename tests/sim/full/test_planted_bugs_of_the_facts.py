"""Does the simulation of the facts find wrong figures? One bug is planted at a time; within
SEEDS_MAX seeds the record must disagree with what has happened.

A row has the name of the bug, the patch that plants it, and the start of the simulation's report.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.sim.planted import Plant, around, expect_report, heard
from tests.sim.simulations.facts import simulate_facts
from zmqdist.messages import ERROR, ServerFacts, WorkerFacts
from zmqdist.scheduling.dispatcher import facts_record
from zmqdist.scheduling.dispatcher.facts import Facts
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.dispatcher.membership_and_leases import Member
from zmqdist.scheduling.dispatcher.records import Lease
from zmqdist.scheduling.dispatcher.run_times import RunTimes, Spans
from zmqdist.scheduling.dispatcher.servers import Servers

SEEDS_MAX = 200


def stale_reasons(former: Any, dispatch: Any) -> Any:
    """The reasons are those of the question before."""
    now = former(dispatch)
    before = vars(dispatch).setdefault("reasons_before", now)
    dispatch.reasons_before = now
    return before


def without_final(former: Any, self: Facts, lease: Lease, member: Member, *_: Any) -> None:
    former(self, lease, member, 10**9, 0.0)


def of_first_attempt(former: Any, self: RunTimes, coordinator: int, work: int, _: int) -> Any:
    return former(self, coordinator, work, 0)


def in_spans(former: Any, self: RunTimes, *args: Any, retried: int) -> None:
    former(self, *args)


def of_another_lease(former: Any, self: Facts, member: Member, events: Any, *args: Any) -> None:
    former(self, member, [replace(event, lease=event.lease - 1) for event in events], *args)


def told_apart(former: Any, self: Servers, reporter: Any, facts: ServerFacts, now: float) -> None:
    former(self, reporter, replace(facts, incarnation=hash(reporter)), now)


def reported_again(former: Any, self: Facts, member: Member, events: Any, *args: Any) -> None:
    """Failures count in the timeline, too."""
    former(self, member, events, *args)
    for row in self.functions.values():
        row.failed += sum(event.kind == ERROR for event in events)


BUGS: list[tuple[str, Plant, str]] = [
    (
        "the figures of a function count twice",
        heard(
            Broker, WorkerFacts, lambda message: replace(message, functions=message.functions * 2)
        ),
        "runs",
    ),
    ("a failure counts twice", around(Facts, "note_runs", reported_again), "runs"),
    (
        "figures of a worker that is lost are taken back",
        around(
            Facts,
            "lost",
            lambda former, self, member: (former(self, member), self.functions.clear()),
        ),
        "runs",
    ),
    (
        "work that dies too often is no failure",
        around(Facts, "note_lost_start", without_final),
        "runs",
    ),
    (
        "a death of a slot is not recorded",
        around(Facts, "note_slot_death", lambda former, self, *args: None),
        "deaths",
    ),
    (
        "the reason why work waits is stale",
        around(facts_record, "waiting_rows", stale_reasons),
        "waiting",
    ),
    (
        "a run in the timeline is of another attempt",
        around(Facts, "note_runs", of_another_lease),
        "timeline",
    ),
    (
        "a retry was submitted when its work was",
        around(RunTimes, "submitted", of_first_attempt),
        "timeline",
    ),
    (
        "a retry comes with the first submissions",
        around(RunTimes, "note_submitted", in_spans),
        "timeline",
    ),
    (
        "a run was handed out with the lease before",
        around(Spans, "time_of", lambda former, self, number: former(self, number - 1)),
        "timeline",
    ),
    (
        "the waiting for inputs is left out",
        around(
            RunTimes,
            "note_submitted",
            lambda former, self, coordinator, items, waited, now, **rest: former(
                self, coordinator, items, dict.fromkeys(waited, 0.0), now, **rest
            ),
        ),
        "timeline",
    ),
    ("a server counts for each of its programs", around(Servers, "take", told_apart), "servers"),
    (
        "a server outlives its programs",
        around(Servers, "reporter_gone", lambda former, self, reporter: None),
        "servers",
    ),
]


def complaint(seed: int) -> str | None:
    try:
        simulate_facts(seed)
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("bug", "plant", "promise"), BUGS, ids=[row[0] for row in BUGS])
def test_planted_bug_of_the_facts_is_found(
    bug: str, plant: Plant, promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    expect_report(complaint, SEEDS_MAX, bug, promise)

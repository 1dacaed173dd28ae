"""The facts of a dispatcher's machine (facts.py, facts_record.py, wait_reasons.py), without sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.scheduling.dispatcher import helpers
from tests.scheduling.dispatcher.helpers import begin, coordinator, finish, hear, submit, worker
from zmqdist.events import PeerGone, Ticked
from zmqdist.limits import (
    EVENTS_KEPT,
    FAILURE_MESSAGE_CHARS_MAX,
    FAILURES_SHOWN_MAX,
    FUNCTION_NAME_CHARS_MAX,
    FUNCTIONS_SHOWN_MAX,
    GROWTH_LIMIT_S,
    OBSERVED_S,
    TRACEBACK_CHARS_MAX,
)
from zmqdist.messages import (
    ERROR,
    VALUE,
    Assign,
    Define,
    Done,
    EndRound,
    FailureFacts,
    FunctionFacts,
    Goodbye,
    Observe,
    ProgramFacts,
    RegisterCoordinator,
    SlotFacts,
    SlotsLost,
    Submit,
    TaskEvent,
    WorkerFacts,
    WorkerFigures,
)
from zmqdist.observe.wait_reasons import REASONS, sentence
from zmqdist.scheduling.dispatcher.facts import percentile
from zmqdist.scheduling.dispatcher.facts_record import FactsRecord
from zmqdist.scheduling.dispatcher.machine import Broker


def record(broker: Broker, since: int = 0, *, timeline: bool = False, now: float = 0.0) -> Any:
    made = FactsRecord(broker).make(since, timeline=timeline, now=now, to_unix_s=1000.0)
    return json.loads(json.dumps(made))


def named(broker: Broker, name: str = "job.f", peer: str = "c", number: int = 1) -> None:
    hear(broker, peer, RegisterCoordinator(number, 1000, 1, False))
    hear(broker, peer, Define([(7, b"f")], [name]))


def runs(count: int = 3, failed: int = 0, **changes: Any) -> FunctionFacts:
    fields = {"coordinator": 1, "fn": 7, "method": "", "count": count, "failed": failed}
    fields |= {"sum_s": 0.3, "max_s": 0.2, "cpu_s": 0.1, "bytes_in": 10, "bytes_out": 20}
    return FunctionFacts(**{**fields, "buckets": [(40, count)], **changes})


def failure(lease: int = 1, **changes: Any) -> FailureFacts:
    fields = {
        "pid": 9,
        "error": "ValueError",
        "message": "bad",
        "traceback": "Traceback",
        **changes,
    }
    return FailureFacts(lease, **fields)


def function_row(broker: Broker, name: str = "job.f") -> dict[str, Any]:
    (row,) = [row for row in record(broker)["functions"] if row["name"] == name]
    return dict(row)


# -- functions -------------------------------------------------------------------------------------


def test_figures_of_function_are_summed_over_workers(broker: Broker) -> None:
    named(broker)
    worker(broker, "w", 0)
    worker(broker, "v", 1)
    hear(broker, "w", WorkerFacts(functions=[runs(3, 1)]))
    hear(broker, "v", WorkerFacts(functions=[runs(5, max_s=0.9)]))
    row = function_row(broker)
    assert (row["count"], row["failed"], row["max_s"]) == (8, 1, 0.9)
    assert (row["bytes_in"], row["bytes_out"]) == (20, 40)
    assert row["mean_s"] == pytest.approx(0.6 / 8)
    assert [entry["failed"] for entry in record(broker)["workers"]] == [1, 0]


def test_same_function_of_two_programs_is_one_row(broker: Broker) -> None:
    named(broker, peer="c", number=1)
    named(broker, peer="d", number=2)
    worker(broker)
    hear(broker, "w", WorkerFacts(functions=[runs(3), runs(4, coordinator=2)]))
    assert function_row(broker)["count"] == 7


def test_figures_after_end_of_program_have_its_name(broker: Broker) -> None:
    named(broker)
    worker(broker)
    hear(broker, "c", Goodbye())
    hear(broker, "w", WorkerFacts(functions=[runs(3)]))
    assert function_row(broker)["count"] == 3


def test_figures_survive_their_worker(broker: Broker) -> None:
    named(broker)
    worker(broker)
    hear(broker, "w", WorkerFacts(functions=[runs(3)]))
    broker.handle(helpers.SEEN, 1.0)
    assert function_row(broker)["count"] == 3


def test_running_and_queued_are_counted_by_function(broker: Broker) -> None:
    named(broker)
    worker(broker)
    submit(broker, *range(10))
    begin(broker, 1)
    row = function_row(broker)
    assert (row["running"], row["queued"]) == (1, 8)


def test_functions_beyond_the_bound_count_together(broker: Broker) -> None:
    worker(broker)
    methods = [runs(1, method=f"A.m{number}") for number in range(FUNCTIONS_SHOWN_MAX + 50)]
    hear(broker, "w", WorkerFacts(functions=methods))
    rows = record(broker)["functions"]
    assert len(rows) <= FUNCTIONS_SHOWN_MAX + 1
    assert sum(row["count"] for row in rows) == FUNCTIONS_SHOWN_MAX + 50


@pytest.mark.parametrize(
    ("buckets", "share", "seconds"),
    [
        ({}, 0.5, 0.0),
        ({0: 1}, 0.5, 2e-6),
        ({40: 99, 80: 1}, 0.5, 2e-6 * 2**10),
        ({40: 99, 80: 2}, 0.99, 2e-6 * 2**20),
    ],
)
def test_percentile_is_within_a_tenth(
    buckets: dict[int, int], share: float, seconds: float
) -> None:
    assert percentile(buckets, share) == pytest.approx(seconds, rel=0.1)


# -- slots -----------------------------------------------------------------------------------------


def test_slot_row_says_what_runs_and_since_when(broker: Broker) -> None:
    named(broker)
    worker(broker)
    submit(broker, 50)
    begin(broker, 1)
    slot = SlotFacts(0, 77, "running", 1, 2.0, 4096, 50.0)
    hear(broker, "w", WorkerFacts(WorkerFigures(rss_bytes=8192), [slot]), 10.0)
    (row,) = record(broker, now=13.0)["workers"]
    assert row["rss_bytes"] == 8192
    assert row["slots_now"] == [
        {
            "slot": 0,
            "pid": 77,
            "state": "running",
            "function": "job.f",
            "coordinator": 1,
            "work": 50,
            "attempt": 0,
            "since_s": 5.0,
            "rss_bytes": 4096,
            "cpu_percent": 50.0,
        }
    ]


def test_slot_whose_function_has_ended_since_is_idle(broker: Broker) -> None:
    named(broker)
    worker(broker)
    submit(broker, 50)
    hear(broker, "w", WorkerFacts(WorkerFigures(), [SlotFacts(0, 77, "running", 1, 2.0)]))
    finish(broker, 1)
    (slot,) = record(broker)["workers"][0]["slots_now"]
    assert (slot["state"], slot["function"], slot["since_s"]) == ("idle", "", 0.0)


# -- failures, deaths, refusals --------------------------------------------------------------------


def test_failure_names_its_work(broker: Broker) -> None:
    named(broker)
    worker(broker)
    submit(broker, 50)
    hear(broker, "w", WorkerFacts(failures=[failure()]), 5.0)
    (entry,) = record(broker, now=6.0)["failures"]
    assert (entry["function"], entry["worker"], entry["work"]) == ("job.f", "worker:0", 50)
    assert (entry["seq"], entry["at"], entry["pid"]) == (1, 1005.0, 9)
    assert (entry["error"], entry["message"], entry["host"]) == ("ValueError", "bad", "host")


def test_failure_of_lease_that_has_ended_is_left_out(broker: Broker) -> None:
    named(broker)
    worker(broker)
    submit(broker, 50)
    finish(broker, 1, kind=ERROR)
    hear(broker, "w", WorkerFacts(failures=[failure()]))
    assert record(broker)["failures"] == []


def test_long_texts_of_failure_are_cut(broker: Broker) -> None:
    named(broker, name="n" * 1000)
    worker(broker)
    submit(broker, 50)
    long = failure(error="e" * 10_000, message="m" * 10_000, traceback="t" * 100_000)
    hear(broker, "w", WorkerFacts(failures=[long]))
    (entry,) = record(broker)["failures"]
    assert len(entry["function"]) == len(entry["error"]) == FUNCTION_NAME_CHARS_MAX
    assert len(entry["message"]) == FAILURE_MESSAGE_CHARS_MAX
    assert len(entry["traceback"]) == TRACEBACK_CHARS_MAX


def test_ring_keeps_the_last_failures(broker: Broker) -> None:
    worker(broker)
    calls = [failure(0, method="A.m", work=n) for n in range(FAILURES_SHOWN_MAX + 10)]
    hear(broker, "w", WorkerFacts(failures=calls))
    assert [entry["work"] for entry in record(broker)["failures"]] == list(
        range(10, FAILURES_SHOWN_MAX + 10)
    )


def test_since_returns_later_entries_only(broker: Broker) -> None:
    worker(broker)
    hear(broker, "w", WorkerFacts(failures=[failure(0, method="A.m", work=1)]))
    seen = record(broker)["next"]
    assert record(broker, seen)["failures"] == []
    hear(broker, "w", WorkerFacts(failures=[failure(0, method="A.m", work=2)]))
    assert [entry["work"] for entry in record(broker, seen)["failures"]] == [2]


def test_slot_death_has_function_and_last_lines(broker: Broker) -> None:
    named(broker)
    worker(broker)
    submit(broker, 50)
    hear(broker, "w", WorkerFacts(WorkerFigures(), [SlotFacts(0, 77, "running", 1)]))
    begin(broker, 1)
    hear(broker, "w", SlotsLost([(1, -11, "last words")]))
    (death,) = record(broker)["slot_deaths"]
    assert (death["function"], death["exit_code"], death["pid"]) == ("job.f", -11, 77)
    assert death["last_lines"] == "last words"
    assert record(broker)["totals"]["lost_starts"] == 1


def test_function_that_loses_every_start_is_a_failure(broker: Broker) -> None:
    named(broker)
    worker(broker)
    hear(broker, "c", Submit(1, [(50, 0, broker.dispatch.attempts_max - 1, 7, b"50")]))
    begin(broker, 1)
    hear(broker, "w", SlotsLost([(1, -9, "")]))
    (entry,) = record(broker)["failures"]
    assert (entry["error"], entry["work"]) == ("WorkerLost", 50)
    assert record(broker)["totals"]["failed"] == 1
    assert (function_row(broker)["count"], function_row(broker)["failed"]) == (1, 1)
    assert record(broker)["workers"][0]["failed"] == 1


def test_lost_start_that_runs_again_is_no_failure(broker: Broker) -> None:
    named(broker)
    worker(broker)
    submit(broker, 50)
    begin(broker, 1)
    hear(broker, "w", SlotsLost([(1, -9, "")]))
    assert record(broker)["totals"]["failed"] == 0


def test_work_that_no_worker_can_run_is_a_failure(broker: Broker) -> None:
    named(broker)
    worker(broker)
    items = [(work, 0, 0, 7, b"1") for work in (1, 2, 3)]
    hear(broker, "c", Submit(1, items, resources=(("gpu", 2000),)))
    assert record(broker)["failures"] == []
    broker.handle(Ticked(), GROWTH_LIMIT_S)
    (entry,) = record(broker, now=GROWTH_LIMIT_S)["failures"]
    assert (entry["error"], entry["function"], entry["worker"]) == ("UnavailableError", "job.f", "")
    assert entry["message"].startswith("3 did not begin: it needs gpu 2, which is more than ")
    assert (function_row(broker)["failed"], record(broker)["totals"]["failed"]) == (3, 3)


# -- why work waits --------------------------------------------------------------------------------


def no_worker(broker: Broker) -> None:
    submit(broker, 1, 2)


def all_busy(broker: Broker) -> None:
    worker(broker)
    submit(broker, 1, 2, 3, 4)
    begin(broker, 1)


def handed_out(broker: Broker) -> None:
    worker(broker)
    submit(broker, 1, 2)
    begin(broker, 1)


def pinned(broker: Broker) -> None:
    hear(broker, "c", Submit(1, [(1, 0, 0, 7, b"1")], "worker:3"))


def too_much(broker: Broker) -> None:
    worker(broker)
    hear(broker, "c", Submit(1, [(1, 0, 0, 7, b"1")], resources=(("gpu", 2000),)))


def worker_away(broker: Broker) -> None:
    worker(broker)
    submit(broker, 1, 2)
    begin(broker, 1)
    broker.handle(PeerGone("w"), 0.0)


def ending(broker: Broker) -> None:
    worker(broker)
    submit(broker, 1)
    begin(broker, 1)
    hear(broker, "c", EndRound(1, 5.0))


def inputs(broker: Broker) -> None:
    hear(broker, "c", ProgramFacts(7, 4096))


@pytest.mark.parametrize(
    ("arrange", "count", "reason", "detail"),
    [
        (inputs, 7, "input", ""),
        (no_worker, 2, "no_worker", ""),
        (all_busy, 2, "all_busy", ""),
        (handed_out, 1, "window", ""),
        (pinned, 1, "pinned", "worker:3, which is not there"),
        (
            too_much,
            1,
            "resources",
            "each needs gpu 2; no worker has so much: worker:0 has nothing",
        ),
        (worker_away, 1, "away", "worker:0"),
        (ending, 1, "ending_round", ""),
    ],
)
def test_reason_why_work_waits(
    broker: Broker, arrange: Any, count: int, reason: str, detail: str
) -> None:
    named(broker)
    arrange(broker)
    rows = record(broker)["waiting"]
    assert {"coordinator": 1, "count": count, "reason": reason, "detail": detail} in rows
    assert sentence(rows[0]).startswith(REASONS[rows[0]["reason"]])


# -- the timeline ----------------------------------------------------------------------------------


def run_report(lease: int) -> Done:
    return Done([(lease, VALUE, b"r")], [], runs=[TaskEvent(lease, 2, 0.5, 0.25, VALUE)])


def test_timeline_has_runs_of_ended_leases(broker: Broker) -> None:
    named(broker)
    worker(broker)
    submit(broker, 50)
    assert [type(effect.message) for effect in broker.observe(0.0)] == [Observe]
    hear(broker, "w", run_report(1), 2.0)
    timeline = record(broker, timeline=True, now=2.0)["timeline"]
    (run,) = timeline["events"]
    assert run[1:7] == [1, 50, 0, "job.f", "worker:0", 2]
    assert run[9:13] == [1001.25, 1001.5, "value", "task"]
    assert timeline["dropped"] == 0


@pytest.mark.parametrize(("now", "count"), [(1.0, 1), (OBSERVED_S + 1.0, 0)])
def test_worker_that_joins_is_watched_before_it_works(
    broker: Broker, now: float, count: int
) -> None:
    named(broker)
    submit(broker, 50)
    broker.observe(0.0)
    kinds = [type(effect.message) for effect in worker(broker, now=now)]
    assert kinds.count(Observe) == count
    assert Observe not in kinds[kinds.index(Assign) :]


def test_run_says_when_it_came_and_was_handed_out(broker: Broker) -> None:
    named(broker)
    broker.observe(0.0)
    hear(broker, "c", Submit(1, [(50, 0, 0, 7, b"")], waited={50: 0.5}), 1.0)
    worker(broker, now=2.0)
    hear(broker, "w", run_report(1), 3.5)
    (run,) = record(broker, timeline=True, now=3.5)["timeline"]["events"]
    assert (run[7], run[13], run[8]) == (1000.5, 1001.0, 1002.0)


def test_run_of_work_from_before_the_watcher_lacks_times(broker: Broker) -> None:
    named(broker)
    worker(broker)
    submit(broker, 50)
    broker.observe(0.0)
    hear(broker, "w", run_report(1), 2.0)
    (run,) = record(broker, timeline=True, now=2.0)["timeline"]["events"]
    assert (run[7], run[8], run[13]) == (0, 0, 0)


def test_runs_are_ignored_while_nobody_watches(broker: Broker) -> None:
    named(broker)
    worker(broker)
    submit(broker, 50)
    broker.observe(0.0)
    hear(broker, "w", run_report(1), OBSERVED_S + 0.1)
    assert record(broker, timeline=True)["timeline"]["events"] == []


def test_workers_hear_once_a_second_of_a_watcher(broker: Broker) -> None:
    worker(broker)
    sent = [len(broker.observe(now)) for now in (0.0, 0.5, 0.9, 1.1, 1.5)]
    assert sent == [1, 0, 0, 1, 0]


def test_timeline_is_bounded(broker: Broker) -> None:
    worker(broker)
    broker.observe(0.0)
    call = TaskEvent(0, 0, 0.0, 0.0, VALUE, "A.m", 1, 2, 3)
    for _ in range(EVENTS_KEPT // 1000 + 1):
        hear(broker, "w", WorkerFacts(events=[call] * 1000))
    timeline = record(broker, timeline=True)["timeline"]
    assert (len(timeline["events"]), timeline["dropped"]) == (EVENTS_KEPT, 1000)


# -- who may say what ------------------------------------------------------------------------------


def test_report_of_coordinator_is_refused(broker: Broker) -> None:
    coordinator(broker)
    (refusal,) = hear(broker, "c", WorkerFacts(functions=[runs()]))
    assert "WorkerFacts from a coordinator" in str(refusal.message)


def test_report_sends_nothing_and_changes_no_work(broker: Broker) -> None:
    named(broker)
    worker(broker)
    submit(broker, 50)
    before = broker.snapshot().workers[0].leases
    report = WorkerFacts(WorkerFigures(), [SlotFacts(9, 1, "?", 99)], [runs()], [failure(99)])
    assert hear(broker, "w", report) == []
    assert broker.snapshot().workers[0].leases == before

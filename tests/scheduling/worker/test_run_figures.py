"""The table of runs that a slot shares with its worker, without processes."""

from __future__ import annotations

import pytest

from zmqdist.limits import BUCKETS, FUNCTIONS_TOLD_APART_MAX
from zmqdist.messages import VALUE
from zmqdist.scheduling.worker.run_figures import (
    TABLE_BYTES,
    Allowance,
    RunReader,
    RunTable,
)


@pytest.fixture
def table() -> tuple[RunTable, RunReader]:
    memory = bytearray(TABLE_BYTES)
    return RunTable(memory), RunReader(memory)


def test_reader_finds_what_was_added(table: tuple[RunTable, RunReader]) -> None:
    writer, reader = table
    writer.add(5, 7, [0.25, 0.5], 1, 10, 20, 1.0)
    (facts,) = reader.added()
    assert (facts.coordinator, facts.fn, facts.count, facts.failed) == (5, 7, 2, 1)
    assert (facts.sum_s, facts.max_s) == (0.75, 0.5)
    assert (facts.bytes_in, facts.bytes_out) == (10, 20)
    assert [count for _, count in facts.buckets] == [1, 1]
    assert reader.added() == []
    writer.add(5, 7, [1.0], 0, 0, 0, 1.0)
    (facts,) = reader.added()
    assert (facts.count, facts.sum_s, facts.max_s) == (1, 1.0, 1.0)
    assert (reader.count, reader.failed) == (3, 1)


@pytest.mark.parametrize(
    ("duration", "bucket"),
    [(0.0, 0), (2e-6, 0), (2.1e-6, 1), (2e-6 * 2**10, 40), (1e9, BUCKETS - 1)],
)
def test_bucket_of_duration(
    table: tuple[RunTable, RunReader], duration: float, bucket: int
) -> None:
    writer, reader = table
    writer.add(1, 1, [duration], 0, 0, 0, 1.0)
    assert reader.added()[0].buckets == [(bucket, 1)]


def test_functions_beyond_the_rows_count_together(table: tuple[RunTable, RunReader]) -> None:
    writer, reader = table
    for fn in range(1, FUNCTIONS_TOLD_APART_MAX + 4):
        writer.add(1, fn, [1.0], 0, 0, 0, 1.0)
    facts = reader.added()
    assert len(facts) == FUNCTIONS_TOLD_APART_MAX + 1
    assert [row.count for row in facts if row.fn == 0] == [3]


def test_dropped_function_gives_its_row_to_another(table: tuple[RunTable, RunReader]) -> None:
    writer, reader = table
    for fn in range(1, FUNCTIONS_TOLD_APART_MAX + 1):
        writer.add(1, fn, [1.0, 1.0], 0, 0, 0, 1.0)
    reader.added()
    writer.forget([(1, 3)])
    writer.add(1, 999, [1.0], 0, 0, 0, 1.0)
    (facts,) = reader.added()
    assert (facts.fn, facts.count, facts.sum_s) == (999, 1, 1.0)


def test_many_runs_have_the_same_buckets_as_few(table: tuple[RunTable, RunReader]) -> None:
    writer, reader = table
    durations = [1.3e-6 * 1.17**number for number in range(100)]
    for duration in durations:
        writer.add(1, 1, [duration], 0, 0, 0, 1.0)
    writer.add(1, 2, durations, 0, 0, 0, 1.0)
    few, many = reader.added()
    assert few.buckets == many.buckets
    assert (few.count, few.max_s) == (many.count, many.max_s)


def test_long_wait_uses_no_processor_time(table: tuple[RunTable, RunReader]) -> None:
    writer, reader = table
    writer.add(1, 1, [1e-5], 0, 0, 0, 1.0)
    writer.add(1, 2, [3600.0], 0, 0, 0, 3601.0)
    short, long = reader.added()
    assert short.cpu_s == 1e-5
    assert long.cpu_s < 60


def test_runs_are_reported_only_while_observed(table: tuple[RunTable, RunReader]) -> None:
    writer, reader = table
    assert not writer.watches_runs
    reader.observe(10)
    assert writer.watches_runs
    reader.observe(0)
    assert not writer.watches_runs


def test_reports_are_taken_once(table: tuple[RunTable, RunReader]) -> None:
    writer, _ = table
    writer.runs.append((3, 1.0, 2.0, VALUE))
    writer.note_failure(3, ("ValueError", "bad", "Traceback"))
    writer.note_failure(4, None)
    failure = (3, "ValueError", "bad", "Traceback")
    assert writer.take_reports() == ([failure], [(3, 1.0, 2.0, VALUE)])
    assert writer.take_reports() == ([], [])


def test_runs_beyond_the_bound_are_counted(table: tuple[RunTable, RunReader]) -> None:
    writer, reader = table
    reader.observe(10)
    assert writer.watches_runs
    assert [writer.may_report_run(1.0, 4) for _ in range(11)] == [True] * 10 + [False]
    assert (reader.take_left_out(), reader.take_left_out()) == (5, 0)


def test_allowance_refills_with_time() -> None:
    allowance = Allowance(2.0, 3)
    taken = [allowance.take(now) for now in (10.0, 10.0, 10.0, 10.0, 10.5, 10.5, 99.0)]
    assert taken == [True, True, True, False, True, False, True]

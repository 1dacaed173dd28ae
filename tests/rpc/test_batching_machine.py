"""Which calls run together: the promises at the head of rpc/batching_machine.py."""

from __future__ import annotations

import random
from math import inf

from zmqdist.rpc.batching_machine import Batches


def test_calls_gather_until_first_has_waited() -> None:
    batches: Batches[str] = Batches(10, 1.0)
    assert batches.deadline == inf
    batches.arrived("a", "kind", 2, 5.0)
    batches.arrived("b", "kind", 3, 5.5)
    assert batches.deadline == 6.0
    assert batches.ready(5.9) == []
    assert batches.ready(6.0) == ["a", "b"]
    assert batches.ready(9.0) == []
    assert batches.deadline == inf


def test_full_batch_does_not_wait() -> None:
    batches: Batches[str] = Batches(4, 1.0)
    batches.arrived("a", "kind", 3, 0.0)
    batches.arrived("b", "kind", 1, 0.0)
    assert batches.deadline == -inf
    assert batches.ready(0.0) == ["a", "b"]


def test_call_that_does_not_fit_closes_batch() -> None:
    batches: Batches[str] = Batches(4, 1.0)
    batches.arrived("a", "kind", 3, 0.0)
    batches.arrived("b", "kind", 2, 0.5)
    assert batches.ready(0.5) == ["a"]
    assert batches.ready(0.5) == []
    assert batches.deadline == 1.5


def test_oversized_call_runs_alone_at_once() -> None:
    batches: Batches[str] = Batches(4, 1.0)
    batches.arrived("a", "kind", 1, 0.0)
    batches.arrived("large", "kind", 100, 0.0)
    batches.arrived("b", "kind", 1, 0.0)
    assert [batches.ready(0.0), batches.ready(0.0), batches.ready(0.0)] == [["a"], ["large"], []]
    assert batches.ready(1.0) == ["b"]


def test_oldest_batch_of_kinds_runs_first() -> None:
    batches: Batches[str] = Batches(2, 1.0)
    batches.arrived("slow", "one", 1, 0.0)
    batches.arrived("a", "two", 1, 0.5)
    batches.arrived("b", "two", 1, 0.6)
    assert batches.ready(1.0) == ["slow"], "full batches of other kinds do not delay it"
    assert batches.ready(1.0) == ["a", "b"]


def test_first_opened_batch_runs_before_full_batch() -> None:
    batches: Batches[str] = Batches(2, 1.0)
    batches.arrived("a", "one", 1, 0.0)
    batches.arrived("b", "two", 1, 0.1)
    batches.arrived("c", "two", 1, 0.2)
    batches.arrived("d", "one", 1, 0.3)
    assert [batches.ready(0.4), batches.ready(0.4), batches.ready(0.4)] == [
        ["a", "d"],
        ["b", "c"],
        [],
    ]


def test_full_batch_without_calls_does_not_run() -> None:
    batches: Batches[str] = Batches(1, 1.0)
    given = {name: batches.arrived(name, "kind", 1, now) for now, name in enumerate("abc")}
    for name in "ba":
        batches.dropped(name, given[name])
    assert len(batches) == 1
    assert batches.ready(3.0) == ["c"]
    assert batches.deadline == inf


def test_calls_without_rows_fill_no_batch() -> None:
    batches: Batches[int] = Batches(2, 1.0)
    for number in range(5):
        batches.arrived(number, "kind", 0, 0.0)
    assert batches.ready(0.0) == []
    assert batches.ready(1.0) == [0, 1, 2, 3, 4]


def test_zero_delay_means_no_wait() -> None:
    batches: Batches[str] = Batches(8, 0.0)
    batches.arrived("a", "kind", 1, 3.0)
    assert batches.ready(3.0) == ["a"]


def test_dropped_call_takes_no_rows() -> None:
    batches: Batches[str] = Batches(3, 1.0)
    for call, kind in (("a", "k"), ("b", "k"), ("alone", "other")):
        batch = batches.arrived(call, kind, 1, 0.0)
        if call != "b":
            batches.dropped(call, batch)
    batches.arrived("c", "k", 2, 0.0)
    assert batches.ready(0.0) == ["b", "c"]
    assert batches.deadline == inf
    full = batches.arrived("full", "k", 3, 0.0)
    batches.dropped("full", full)
    assert batches.deadline == inf
    assert batches.ready(9.0) == []
    assert batches.drain() == []
    late = batches.arrived("late", "k", 3, 0.0)
    assert batches.ready(0.0) == ["late"]
    batches.dropped("late", late)  # the batch runs
    assert batches.deadline == inf


def test_batches_at_random_keep_order_and_bounds(seed: int) -> None:
    rng = random.Random(seed)
    rows_max, delay_s = rng.randrange(1, 8), rng.choice([0.0, 0.5, 2.0])
    batches: Batches[tuple[int, int, int, float]] = Batches(rows_max, delay_s)
    seen: list[list[tuple[int, int, int, float]]] = []
    now, dropped = 0.0, 0
    for number in range(200):
        now += rng.random() * 0.3
        while batches.deadline <= now:
            seen.append(batches.ready(max(now - 0.3, batches.deadline)))
            assert seen[-1]
        kind, rows = rng.randrange(3), rng.randrange(10)
        call = (number, kind, rows, now)
        batch = batches.arrived(call, kind, rows, now)
        if rng.random() < 0.2:
            batches.dropped(call, batch)
            dropped += 1
    seen += batches.drain()
    assert batches.deadline == inf
    assert sorted(call for batch in seen for call in batch) == sorted(
        {call for batch in seen for call in batch}
    )
    assert len([call for batch in seen for call in batch]) == 200 - dropped
    for batch in seen:
        assert len({kind for _, kind, _, _ in batch}) == 1
        assert batch == sorted(batch)
        assert len(batch) == 1 or sum(rows for _, _, rows, _ in batch) <= rows_max

"""The rows of the durable state: how data are cut into portions, and what older journals hold."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine import runs as sets
from zmqdist.data.service.dispatcher.machine.state import DurableState, decode_state
from zmqdist.errors import InternalError


def test_new_state_is_empty() -> None:
    assert decode_state(r.encode(DurableState(number=3))) == DurableState(number=3)


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ([4000, 2000, 1, False], r.DataTaskState.RUNNING),
        ([4000, 2000, 1, False, -1], r.DataTaskState.PENDING),
        ([4000, 2000, 1, True, 0, {}, False], r.DataTaskState.FINISHED),
        ([4000, 2000, 1, True, -1, {}, True], r.DataTaskState.INTERRUPTED),
        ([2000, 5000, 0, [], [], [], False, False], r.IterationState.OPEN),
        ([2000, 5000, 0, [], [], [], True, False], r.IterationState.FINISHED),
        ([2000, 5000, 0, [], [], [], False, True], r.IterationState.COLLECTED),
    ],
)
def test_bools_of_older_journal_become_states(row: list[Any], state: Any) -> None:
    kind = r.TaskEntry if isinstance(state, r.DataTaskState) else r.Iteration
    assert msgspec.msgpack.decode(r.encode(row), type=kind).state is state


def test_states_have_only_listed_transitions() -> None:
    task = r.TaskEntry(4000, 2000, 1)
    task.enter(r.DataTaskState.INTERRUPTED)
    with pytest.raises(InternalError, match="data task 4000 cannot go from INTERRUPTED to RUNN"):
        task.enter(r.DataTaskState.RUNNING)
    iteration = r.Iteration(2000, 5000, 0, [], state=r.IterationState.COLLECTED)
    with pytest.raises(InternalError, match="iteration 2000 cannot go from COLLECTED to OPEN"):
        iteration.enter(r.IterationState.OPEN)
    portion = r.Portion(3000)
    portion.pass_to(3000, 11, 1)
    with pytest.raises(InternalError, match="portion of client 3000 cannot go from COMPUTED to C"):
        portion.pass_to(3000, 12, 2)


@pytest.mark.parametrize(
    ("positions", "grain", "length"),
    [
        (10, 1, 1),
        (256, 1, 1),
        (1024, 1, 4),
        (1024, 3, 3),
        (10**9, 1, 1024),
        (10**9, 100, 1000),
        (10, 5000, 5000),
        (-1, 1, 256),
    ],
)
def test_portion_length_is_bounded_multiple_of_grain(
    positions: int, grain: int, length: int
) -> None:
    assert r.PortionsEntry.cut(positions, 1, grain, 1).length == length


def test_portions_cover_each_position_of_each_repetition_once() -> None:
    portions = r.PortionsEntry.cut(1000, 3, 7, 1)
    places = [portions.place_of(number) for number in range(int(portions.total()))]
    covered = [
        (repetition, position)
        for repetition, start, length in places
        for position in range(start, start + length)
    ]
    assert covered == [
        (repetition, position) for repetition in range(3) for position in range(1000)
    ]


def test_portion_of_older_journal_can_be_read() -> None:
    row = msgspec.msgpack.encode([5, 6, 7, 8, ["worker:1 (fell over)"], 9, {10: "worker:2"}])
    portion = msgspec.msgpack.decode(row, type=r.Portion)
    assert (portion.charged, portion.missed) == (["worker:1 (fell over)", "worker:2"], [])


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize(
    ("positions", "repetitions", "grain"), [(0, 3, 1), (5, 1, 2), (700, 5, 7), (701, 4, 3)]
)
def test_positions_left_are_those_not_given_out(
    positions: int, repetitions: int, grain: int, lanes: int
) -> None:
    chance = random.Random(positions + lanes)
    portions = r.PortionsEntry.cut(positions, repetitions, grain, lanes)
    portions.length *= 3
    last = int(portions.total())
    assert portions.positions_left() == positions * repetitions
    for lane in range(lanes):
        steps = len(range(lane, last, lanes))
        portions.next[lane] = chance.randint(0, steps)
        portions.skip[lane] = [
            (start, start + 2) for start in range(portions.next[lane] + 1, steps - 2, 7)
        ]
    waiting = [
        number
        for number in range(last)
        if number // lanes >= portions.next[number % lanes]
        and sets.end_of(portions.skip[number % lanes], number // lanes) is None
    ]
    left = sum(portions.place_of(number)[2] for number in waiting)
    assert portions.positions_left() == left


def test_positions_left_of_endless_data_are_unknown() -> None:
    assert r.PortionsEntry.cut(r.INFINITE, 1, 1, 2).positions_left() is None
    assert r.PortionsEntry.cut(5, r.INFINITE, 1, 2).positions_left() is None

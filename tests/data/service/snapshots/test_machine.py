"""The machine of one snapshot: its decisions, and the records that must be written before they
apply."""

from __future__ import annotations

import pytest

from zmqdist.data.service.snapshots.machine import (
    OwnerChanged,
    PositionRun,
    PositionsGiven,
    Record,
    SnapshotCompleted,
    SnapshotFailed,
    SnapshotMachine,
    SnapshotMode,
    StreamAssignment,
    StreamCompleted,
    StreamState,
    begin_order,
)
from zmqdist.errors import (
    CancelledError,
    DataLossError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
)


def machine_of(
    *records: Record, counts: tuple[int, ...] = (10,), repetitions: tuple[int, ...] = (1,)
) -> SnapshotMachine:
    made = SnapshotMachine("/s", counts, repetitions)
    for record in records:
        made.apply(record)
    return made


TWO = OwnerChanged(0, "a"), OwnerChanged(1, "b")


def test_decision_takes_effect_with_its_record() -> None:
    machine = machine_of()
    for _ in range(2):
        assert machine.assign("a") == (0, [OwnerChanged(0, "a")])
    machine.apply(OwnerChanged(0, "a"))
    given = PositionsGiven(0, 0, 0, PositionRun(0, 0, 2))
    for _ in range(2):
        assert machine.hand_out("a", 0, 0, 0, 0, 99) == ((0, 2), [given])
    machine.apply(given)
    assert machine.hand_out("a", 0, 0, 0, 0, 99) == ((0, 2), []), "the request is repeated"
    assert machine.hand_out("a", 0, 0, 0, 2, 99)[0] == (2, 2)


def test_worker_gets_own_stream_then_orphan_then_new() -> None:
    machine = machine_of(*TWO)
    assert machine.assign("a") == (0, [])
    assert machine.assign("c", may_begin=False) == (None, [])
    machine.worker_lost("b")
    assert machine.owners() == {"a"}
    assert machine.assign("c") == (1, [OwnerChanged(1, "c")])
    assert machine.assign("b") == (1, []), "it is the first worker to return"
    assert machine.assign("c") == (2, [OwnerChanged(2, "c")])


def test_last_stream_completes_snapshot() -> None:
    machine = machine_of(*TWO)
    assert machine.finished("a", 0) == [StreamCompleted(0)]
    machine.apply(StreamCompleted(0))
    assert machine.mode is SnapshotMode.WINDING_DOWN
    assert machine.assign("c") == (None, [])
    assert machine.finished("b", 1) == [StreamCompleted(1), SnapshotCompleted()]
    machine.apply(StreamCompleted(1))
    machine.apply(SnapshotCompleted())
    assert machine.mode is SnapshotMode.DONE
    assert (
        machine.finished("b", 1)
        == machine.cancel()
        == machine.failed("b", 1, DataLossError("late"))
        == []
    )


def test_unwritten_end_still_ends_snapshot() -> None:
    full = ResourceExhaustedError("no space left")
    machine = machine_of(*TWO[:1], StreamCompleted(0))
    assert machine.not_written(SnapshotCompleted(), full) == [SnapshotFailed(full)]
    assert (machine.mode, machine.error) == (SnapshotMode.ERROR, full)
    machine = machine_of(*TWO)
    (record,) = machine.cancel()
    assert isinstance(record, SnapshotFailed)
    assert isinstance(record.error, CancelledError)
    assert machine.not_written(record, full) == []
    assert machine.mode is SnapshotMode.ERROR
    machine = machine_of(*TWO)
    assert machine.not_written(OwnerChanged(2, "c"), full) == []
    assert machine.mode is SnapshotMode.ACTIVE


REFUSED = {
    "another's stream": ((), ("a", 1, 0, 0, 0), InternalError, "worker a writes stream 1"),
    "no such stream": ((), ("a", 7, 0, 0, 0), InternalError, "worker a writes stream 7"),
    "no such source": ((), ("a", 0, 1, 0, 0), InvalidArgumentError, "no source 1"),
    "a repetition below 0": ((), ("a", 0, 0, -1, 0), InvalidArgumentError, "no repetition -1"),
    "what it never had": (
        (),
        ("a", 0, 0, 0, 3),
        InvalidArgumentError,
        "has got 0 positions of source 0, fewer than the 3",
    ),
    "whole": ((SnapshotCompleted(),), ("a", 0, 0, 0, 0), FailedPreconditionError, "it is complete"),
    "failed": (
        (SnapshotFailed(DataLossError("bad")),),
        ("a", 0, 0, 0, 0),
        FailedPreconditionError,
        "bad",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_positions_that_a_worker_must_not_have_are_refused(case: str) -> None:
    records, question, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        machine_of(*TWO, *records).hand_out(*question, 1)  # type: ignore[arg-type]


def test_restored_machine_writes_missing_end() -> None:
    def restored(*states: StreamState, failures: tuple[DataLossError, ...] = ()) -> list[Record]:
        streams = [
            StreamAssignment(number, f"w{number}", state) for number, state in enumerate(states)
        ]
        return machine_of().restore(streams, False, None, failures)

    bad = DataLossError("bad")
    assert restored() == restored(StreamState.DONE, StreamState.ASSIGNED) == []
    assert restored(StreamState.DONE, StreamState.DONE) == [SnapshotCompleted()]
    assert restored(StreamState.DONE, StreamState.ASSIGNED, failures=(bad,)) == [
        SnapshotFailed(bad)
    ]
    machine = machine_of()
    assert machine.restore([], False, bad, ()) == []
    assert (machine.mode, machine.error) == (SnapshotMode.ERROR, bad)


def test_sources_without_an_end_have_positions_without_an_end() -> None:
    machine = machine_of(*TWO, counts=(-1,), repetitions=(-1,))
    assert machine.hand_out("a", 0, 0, 7, 0, 500)[0] == (0, 500)
    assert machine.figures()["positions"] == -1
    assert machine_of(counts=(3, 4), repetitions=(2, 1)).figures()["positions"] == 10


def test_snapshot_with_fewest_workers_is_first() -> None:
    owners = {"x": {"a", "b"}, "y": set(), "z": {"c"}}
    assert begin_order(owners, {}, 3) == ["y", "z", "x"]
    assert begin_order(owners, {"y": 0}, 3) == ["z", "x"]
    assert begin_order(owners, {"y": 0}, 1) == []

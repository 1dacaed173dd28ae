"""Does the simulation of snapshots find bugs? One bug is planted at a time; within SEEDS_MAX seeds
it must report a broken promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.sim.simulations import snapshots
from tests.sim.simulations.snapshots import Broken, simulate_snapshots
from zmqdist.data.service.snapshots import machine as m
from zmqdist.data.service.snapshots.machine import SnapshotMachine

SEEDS_MAX = 1000

Plant = Callable[[pytest.MonkeyPatch], None]


def instead(name: str, make: Callable[[Any], Any], owner: Any = SnapshotMachine) -> Plant:
    """Replace a method by `make(method)`."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def forgets(kind: type) -> Callable[[Any], Any]:
    """Return an `apply` that ignores one kind of record."""
    return lambda apply: (
        lambda self, record: None if isinstance(record, kind) else apply(self, record)
    )


def asked_again_gets_more(hand_out: Any) -> Any:
    def spoiled(
        self: Any, worker: str, stream: int, source: int, repetition: int, local: int, count: int
    ) -> Any:
        runs = self.streams[stream].runs.get((source, repetition), [])
        had = runs[-1].local + runs[-1].count if runs else 0
        return hand_out(self, worker, stream, source, repetition, max(local, had), count)

    return spoiled


def gives_the_last_twice(more: Any) -> Any:
    def spoiled(self: Any, source: int, repetition: int, count: int) -> Any:
        start, number = more(self, source, repetition, count)
        return (start - 1, number) if start and number else (start, number)

    return spoiled


def does_not_write_the_owner(assign: Any) -> Any:
    def spoiled(self: Any, worker: str, may_begin: bool = True) -> Any:
        stream, records = assign(self, worker, may_begin)
        for record in records:
            self.apply(record)
        return stream, []

    return spoiled


def begins_though_it_has_one(assign: Any) -> Any:
    def spoiled(self: Any, worker: str, may_begin: bool = True) -> Any:
        if self.mode is m.SnapshotMode.ACTIVE:
            return (
                (len(self.streams), [m.OwnerChanged(len(self.streams), worker)])
                if may_begin
                else (None, [])
            )
        return assign(self, worker, may_begin)

    return spoiled


def done_with_the_first(finished: Any) -> Any:
    def spoiled(self: Any, worker: str, stream: int) -> Any:
        records = finished(self, worker, stream)
        return [*records[:1], m.SnapshotCompleted()] if records else []

    return spoiled


def restored_without_places(restore: Any) -> Any:
    def spoiled(self: Any, *args: Any) -> Any:
        records = restore(self, *args)
        self._next.clear()  # reach: the planted bug loses it
        return records

    return spoiled


def any_worker(_: Any) -> Any:
    return lambda self, worker, index: self.streams[index]


def over_is_forgotten(owned: Any) -> Any:
    def spoiled(self: Any, worker: str, index: int) -> Any:
        mode, self.mode = self.mode, m.SnapshotMode.ACTIVE
        try:
            return owned(self, worker, index)
        finally:
            self.mode = mode

    return spoiled


def takes_what_is_written(assign: Any) -> Any:
    """Assign another worker's stream without a record in the folder."""

    def spoiled(self: Any, worker: str, may_begin: bool = True) -> Any:
        stream, records = assign(self, worker, may_begin)
        orphan = any(
            isinstance(each, m.OwnerChanged) and each.stream < len(self.streams) for each in records
        )
        return (stream, []) if orphan else (stream, records)

    return spoiled


BUGS: dict[str, tuple[Plant, str]] = {
    "positions are not noted": (instead("apply", forgets(m.PositionsGiven)), "P1"),
    "asked again, a stream gets other positions": (
        instead("hand_out", asked_again_gets_more),
        "P1",
    ),
    "the last position is given again": (instead("_more", gives_the_last_twice), "P1"),
    "a restart forgets what was handed out": (instead("restore", restored_without_places), "P1"),
    "the owner is not written": (instead("assign", does_not_write_the_owner), "P4"),
    "an orphan's new owner is not written": (instead("assign", takes_what_is_written), "P4"),
    "a worker gets a second stream": (instead("assign", begins_though_it_has_one), "P2"),
    "any worker gets positions of a stream": (instead("_owned", any_worker), "P[23]"),
    "no worker has too many streams": (
        instead("begin_order", lambda order: lambda owners, has, most: order(owners, has, 99), m),
        "P2",
    ),
    "done with the first stream": (instead("finished", done_with_the_first), "P3"),
    "handed out after the end": (instead("_owned", over_is_forgotten), "P3"),
    "a lost worker keeps its stream": (
        instead("worker_lost", lambda _: lambda self, worker: None),
        "P5",
    ),
    "a restart does not end what was whole": (
        instead("restore", lambda restore: lambda self, *args: restore(self, *args)[1:]),
        "P5",
    ),
    "an end that cannot be written is none": (
        instead("not_written", lambda _: lambda self, record, error: []),
        "P5",
    ),
    "an end is not noted": (instead("apply", forgets(m.SnapshotCompleted)), "P5"),
}


def simulate_all() -> None:
    for seed in range(SEEDS_MAX):
        simulate_snapshots(seed)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, promise = BUGS[bug]
    plant(monkeypatch)
    monkeypatch.setattr(snapshots, "STEPS_MAX", 2500)
    with pytest.raises(Broken, match=promise):
        simulate_all()

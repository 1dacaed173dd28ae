"""Does the simulation of snapshots find bugs? One bug is planted at a time; within SEEDS_MAX seeds
it must report a broken promise."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.sim.planted import Plant, around
from tests.sim.simulations import snapshots
from tests.sim.simulations.snapshots import Broken, simulate_snapshots
from zmqdist.data.service.snapshots import machine as m
from zmqdist.data.service.snapshots.machine import SnapshotMachine as Machine

SEEDS_MAX = 1000


def forgets(kind: type) -> Plant:
    """Records of this kind are not applied."""
    return around(
        Machine,
        "apply",
        lambda former, self, record: None if isinstance(record, kind) else former(self, record),
    )


def asked_again_gets_more(
    former: Any, self: Any, worker: str, stream: int, source: int, repetition: int, *rest: int
) -> Any:
    runs = self.streams[stream].runs.get((source, repetition), [])
    had = runs[-1].local + runs[-1].count if runs else 0
    local, count = rest
    return former(self, worker, stream, source, repetition, max(local, had), count)


def gives_the_last_twice(former: Any, self: Any, *args: Any) -> Any:
    (start, number), records = former(self, *args)
    if start and records:
        start -= 1
        records = [replace(each, run=replace(each.run, start=start)) for each in records]
    return (start, number), records


def does_not_write_the_owner(former: Any, self: Any, *args: Any, **options: Any) -> Any:
    stream, records = former(self, *args, **options)
    for record in records:
        self.apply(record)
    return stream, []


def begins_though_it_has_one(former: Any, self: Any, worker: str, may_begin: bool = True) -> Any:
    if self.mode is not m.SnapshotMode.ACTIVE:
        return former(self, worker, may_begin)
    new = len(self.streams)
    return (new, [m.OwnerChanged(new, worker)]) if may_begin else (None, [])


def done_with_the_first(former: Any, self: Any, *args: Any) -> Any:
    records = former(self, *args)
    return [*records[:1], m.SnapshotCompleted()] if records else []


def restored_without_positions(former: Any, self: Any, streams: Any, *rest: Any) -> Any:
    return former(self, [replace(each, runs={}) for each in streams], *rest)


def any_worker(former: Any, self: Any, worker: str, stream: int, *rest: Any) -> Any:
    return former(self, self.streams[stream].owner, stream, *rest)


def over_is_forgotten(former: Any, self: Any, *args: Any) -> Any:
    mode, self.mode = self.mode, m.SnapshotMode.ACTIVE
    try:
        return former(self, *args)
    finally:
        self.mode = mode


def takes_what_is_written(former: Any, self: Any, *args: Any, **options: Any) -> Any:
    """Assign another worker's stream without a record in the folder."""
    stream, records = former(self, *args, **options)
    return stream, [each for each in records if each.stream >= len(self.streams)]


BUGS: dict[str, tuple[Plant, str]] = {
    "positions are not noted": (forgets(m.PositionsGiven), "P1"),
    "asked again, a stream gets other positions": (
        around(Machine, "hand_out", asked_again_gets_more),
        "P1",
    ),
    "the last position is given again": (around(Machine, "hand_out", gives_the_last_twice), "P1"),
    "a restart forgets what was handed out": (
        around(Machine, "restore", restored_without_positions),
        "P1",
    ),
    "the owner is not written": (around(Machine, "assign", does_not_write_the_owner), "P4"),
    "an orphan's new owner is not written": (
        around(Machine, "assign", takes_what_is_written),
        "P4",
    ),
    "a worker gets a second stream": (around(Machine, "assign", begins_though_it_has_one), "P2"),
    "any worker gets positions of a stream": (around(Machine, "hand_out", any_worker), "P[23]"),
    "no worker has too many streams": (
        around(m, "begin_order", lambda former, owners, has, most: former(owners, has, 99)),
        "P2",
    ),
    "done with the first stream": (around(Machine, "finished", done_with_the_first), "P3"),
    "handed out after the end": (around(Machine, "hand_out", over_is_forgotten), "P[35]"),
    "a lost worker keeps its stream": (
        around(Machine, "worker_lost", lambda former, self, worker: None),
        "P5",
    ),
    "a restart does not end what was whole": (
        around(Machine, "restore", lambda former, self, *args: former(self, *args)[1:]),
        "P5",
    ),
    "an end that cannot be written is none": (
        around(Machine, "not_written", lambda former, self, record, error: []),
        "P5",
    ),
    "an end is not noted": (forgets(m.SnapshotCompleted), "P5"),
}


def simulate_all() -> None:
    for seed in range(SEEDS_MAX):
        simulate_snapshots(seed)


@pytest.mark.parametrize("bug", BUGS)
def test_simulation_finds_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, promise = BUGS[bug]
    plant(monkeypatch)
    monkeypatch.setattr(snapshots, "STEPS_MAX", 2500)
    with pytest.raises(Broken, match=promise):
        simulate_all()

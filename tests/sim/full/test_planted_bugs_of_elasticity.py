"""Does the simulation of elasticity find bugs? One is planted at a time; within SEEDS_MAX seeds a
promise must be seen broken."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.sim.planted import Plant, around, effects, events, unheard
from tests.sim.simulations.elasticity import simulate_elasticity
from zmqdist.events import Ticked
from zmqdist.launch.elasticity_machine import (
    BACKLOG_S,
    AcceptSize,
    Closing,
    ClusterSeen,
    DrainWorker,
    Elasticity,
    KillWorker,
    RefuseSize,
    RegisteredChanged,
    SizeRequested,
    StartWorker,
    StopWorker,
    WorkerEnded,
)

pytestmark = pytest.mark.timeout(300)

SEEDS_MAX = 500


def altered(kind: type, **fields: Any) -> Plant:
    """Events of this kind have other fields."""
    return events(
        Elasticity,
        lambda self, event: replace(event, **fields) if isinstance(event, kind) else event,
    )


def seen(**fields: Any) -> Plant:
    """What is seen of each worker has other fields."""

    def alter(self: Elasticity, event: Any) -> Any:
        if not isinstance(event, ClusterSeen):
            return event
        return replace(event, seen=tuple(replace(worker, **fields) for worker in event.seen))

    return events(Elasticity, alter)


def bounded(kind: type, **fields: Any) -> Plant:
    """The bounds are others while an event of this kind is handled."""

    def handle(former: Any, self: Elasticity, event: Any, now: float) -> Any:
        if not isinstance(event, kind):
            return former(self, event, now)
        bounds = self.bounds
        self.bounds = replace(bounds, **fields)
        try:
            return former(self, event, now)
        finally:
            self.bounds = bounds

    return around(Elasticity, "handle", handle)


def doubled(*kinds: type) -> Plant:
    return effects(
        Elasticity,
        lambda self, event, returned: [
            copy for effect in returned for copy in [effect] * (1 + isinstance(effect, kinds))
        ],
    )


def below_min(former: Any, self: Elasticity, event: Any, now: float) -> Any:
    before = self.wanted
    returned = former(self, event, now)
    drained = isinstance(event, WorkerEnded) and not event.restarts and event.in_order
    if drained and self.wanted == before == self.bounds.min:
        self.wanted -= 1
    return returned


def too_many(self: Elasticity, event: Any, returned: list[Any]) -> list[Any]:
    running = any(isinstance(effect, StartWorker) for effect in returned)
    return [*returned, StartWorker(50)] if running else returned


def into_used_indices(self: Elasticity, event: Any, returned: list[Any]) -> list[Any]:
    used = self.leaving
    return [
        StartWorker(used[0]) if used and isinstance(effect, StartWorker) else effect
        for effect in returned
    ]


def killed_at_once(former: Any, self: Elasticity, event: Any, now: float) -> Any:
    if not isinstance(event, SizeRequested):
        return former(self, event, now)
    returned = former(self, replace(event, grace_s=-10.0), now)
    return [
        replace(effect, grace_s=event.grace_s) if isinstance(effect, DrainWorker) else effect
        for effect in returned
    ]


def grows_at_once(former: Any, self: Elasticity, event: Any, now: float) -> Any:
    if isinstance(event, ClusterSeen) and event.queued:
        former(self, ClusterSeen(event.queued, ()), now - 2 * BACKLOG_S)
    return former(self, event, now)


def no_reply(self: Elasticity, event: Any, returned: list[Any]) -> list[Any]:
    return [effect for effect in returned if not isinstance(effect, AcceptSize | RefuseSize)]


def refused_and_changed(self: Elasticity, event: Any, returned: list[Any]) -> list[Any]:
    if any(isinstance(effect, RefuseSize) and effect.refused for effect in returned):
        self.wanted = event.count
    return returned


def keeps_idle_times(patch: pytest.MonkeyPatch) -> None:
    """A worker that was lost and registers again counts as registered all the time."""
    last: dict[Elasticity, frozenset[int]] = {}

    def alter(self: Elasticity, event: Any) -> Any:
        if not isinstance(event, RegisteredChanged):
            return event
        last[self] = event.indices | (last.get(self, event.indices) - {*self.leaving})
        return RegisteredChanged(last[self])

    events(Elasticity, alter)(patch)


BUGS: list[tuple[str, Plant, str]] = [
    ("any size is accepted", bounded(SizeRequested, least=1, most=99, room=None), "P"),
    ("drained workers take the size below min", around(Elasticity, "handle", below_min), "P1"),
    ("more processes than there is room for", bounded(WorkerEnded, room=None), "P2"),
    ("more workers than are wanted", effects(Elasticity, too_many), "P"),
    ("an index starts while its worker leaves", effects(Elasticity, into_used_indices), "P"),
    ("a worker is told to leave twice", doubled(DrainWorker, StopWorker), "P4"),
    ("a worker that hangs is never killed", unheard(Elasticity, Ticked), "P4"),
    ("a worker is killed twice", doubled(KillWorker), "P4"),
    ("a worker is killed within its grace", around(Elasticity, "handle", killed_at_once), "P4"),
    ("refusals are ignored", altered(SizeRequested, force=True), "P5"),
    ("any worker leaves", altered(SizeRequested, seen=()), "P5"),
    ("what a worker keeps is ignored", seen(burden=0), "P6"),
    ("work between two looks is not seen", seen(done=0), "P6"),
    ("workers leave while work waits", altered(ClusterSeen, queued=0), "P6"),
    ("idle times outlive a process", keeps_idle_times, "P6"),
    ("the size grows at once", around(Elasticity, "handle", grows_at_once), "P7"),
    ("a request gets no reply", effects(Elasticity, no_reply), "P8"),
    ("a refused request changes the size", effects(Elasticity, refused_and_changed), "P8"),
    ("it goes on while the cluster closes", unheard(Elasticity, Closing), "P9"),
    ("a worker that has ended is not replaced", bounded(WorkerEnded, room=0), "P10"),
]


@pytest.mark.parametrize(("bug_text", "plant", "promise"), BUGS, ids=[bug[0] for bug in BUGS])
def test_simulation_finds_bug(
    bug_text: str, plant: Plant, promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    message = None
    for seed in range(SEEDS_MAX):
        try:
            simulate_elasticity(seed)
        except (AssertionError, KeyError, IndexError) as error:
            message = str(error)
            break
    assert message is not None, f"no promise was seen broken in {SEEDS_MAX} seeds: {bug_text}"
    assert message.startswith(promise)

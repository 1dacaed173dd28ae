"""Does the simulation of elasticity find bugs? One is planted at a time; within SEEDS_MAX seeds a
promise must be seen broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.sim.simulations.elasticity import simulate_elasticity
from zmqdist.launch import elasticity_machine
from zmqdist.launch.elasticity_machine import (
    Elasticity,
    ElasticityEffect,
    KillWorker,
    SizeRequested,
    StartWorker,
    WorkerEnded,
)

pytestmark = pytest.mark.timeout(300)

SEEDS_MAX = 500

CHOOSE = vars(Elasticity)["_choose"]
ENDED = vars(Elasticity)["_ended"]
FILL = vars(Elasticity)["_fill"]
HANDLE = Elasticity.handle
KILL = vars(Elasticity)["_kill_overdue"]
LEAVE = vars(Elasticity)["_leave"]
LOOK = vars(Elasticity)["_look"]
NOTE = vars(Elasticity)["_note_idle"]
PROBLEM = vars(Elasticity)["_problem"]
REQUEST = vars(Elasticity)["_request"]


def every_size(self: Elasticity, size: int) -> str:
    return "" if size else PROBLEM(self, size)


def below_min(self: Elasticity, event: WorkerEnded) -> list[ElasticityEffect]:
    before = self.wanted
    effects: list[ElasticityEffect] = ENDED(self, event)
    if not event.restarts and event.in_order and self.wanted == before == self.bounds.min:
        self.wanted -= 1
    return effects


def without_regard_to_room(self: Elasticity) -> list[ElasticityEffect]:
    bounds = self.bounds
    self.bounds = replace(bounds, room=None)
    try:
        return FILL(self)  # type: ignore[no-any-return]
    finally:
        self.bounds = bounds


def into_used_indices(self: Elasticity) -> list[ElasticityEffect]:
    leaving, self._leaving = self._leaving, {}
    try:
        return FILL(self)  # type: ignore[no-any-return]
    finally:
        self._leaving = leaving


def too_many(self: Elasticity) -> list[ElasticityEffect]:
    effects: list[ElasticityEffect] = FILL(self)
    return [*effects, StartWorker(50)] if effects else effects


def told_twice(self: Elasticity, index: int, *args: Any) -> list[ElasticityEffect]:
    return 2 * LEAVE(self, index, *args)  # type: ignore[no-any-return]


def never_killed(self: Elasticity, now: float) -> list[ElasticityEffect]:
    return []


def killed_again(self: Elasticity, now: float) -> list[ElasticityEffect]:
    return [KillWorker(index) for index, each in self._leaving.items() if each.kill_at <= now]


def killed_at_once(
    self: Elasticity, index: int, grace_s: float, now: float
) -> list[ElasticityEffect]:
    return LEAVE(self, index, -10.0, now)  # type: ignore[no-any-return]


def whatever_is_lost(self: Elasticity, event: SizeRequested, now: float) -> list[ElasticityEffect]:
    return REQUEST(self, replace(event, force=True), now)  # type: ignore[no-any-return]


def any_that_leaves(self: Elasticity, how_many: int, seen: Any) -> list[int]:
    return sorted(self._held, reverse=True)[: max(0, how_many)]


def with_burdens(self: Elasticity, seen: Any, now: float) -> None:
    NOTE(self, replace(seen, burden=0), now)


def busy_between_looks(self: Elasticity, seen: Any, now: float) -> None:
    if seen.index in self._held:
        self._held[seen.index].done = seen.done
    NOTE(self, seen, now)


def while_work_waits(self: Elasticity, event: Any, now: float) -> list[ElasticityEffect]:
    return [*LOOK(self, event, now), *self._shrink(now)]


def grows_at_once(self: Elasticity, event: Any, now: float) -> list[ElasticityEffect]:
    self._backlog_since = 0.0
    return LOOK(self, event, now)  # type: ignore[no-any-return]


def no_reply(self: Elasticity, event: SizeRequested, now: float) -> list[ElasticityEffect]:
    return REQUEST(self, event, now)[:-1]  # type: ignore[no-any-return]


def refused_and_changed(
    self: Elasticity, event: SizeRequested, now: float
) -> list[ElasticityEffect]:
    if not PROBLEM(self, event.count):
        self.wanted = event.count
    return REQUEST(self, event, now)  # type: ignore[no-any-return]


def goes_on(self: Elasticity, event: Any, now: float) -> list[ElasticityEffect]:
    effects = HANDLE(self, event, now)
    self._closing = False
    return effects


def never_replaced(self: Elasticity, event: WorkerEnded) -> list[ElasticityEffect]:
    bounds = self.bounds
    self.bounds = replace(bounds, room=0)
    try:
        return ENDED(self, event)  # type: ignore[no-any-return]
    finally:
        self.bounds = bounds


def keeps_idle_times(self: Elasticity, event: Any, now: float) -> list[ElasticityEffect]:
    before = {index: each.idle_since for index, each in self._held.items()}
    effects = HANDLE(self, event, now)
    if isinstance(event, elasticity_machine.RegisteredChanged):
        for index, idle_since in before.items():
            self._held[index].idle_since = idle_since
    return effects


BUGS: list[tuple[str, str, Callable[..., Any], str]] = [
    ("any size is accepted", "_problem", every_size, "P"),
    ("drained workers take the size below min", "_ended", below_min, "P1"),
    ("more processes than there is room for", "_fill", without_regard_to_room, "P2"),
    ("more workers than are wanted", "_fill", too_many, "P"),
    ("an index starts while its worker leaves", "_fill", into_used_indices, "P"),
    ("a worker is told to leave twice", "_leave", told_twice, "P4"),
    ("a worker that hangs is never killed", "_kill_overdue", never_killed, "P4"),
    ("a worker is killed twice", "_kill_overdue", killed_again, "P4"),
    ("a worker is killed within its grace", "_leave", killed_at_once, "P4"),
    ("refusals are ignored", "_request", whatever_is_lost, "P5"),
    ("any worker leaves", "_choose", any_that_leaves, "P5"),
    ("what a worker keeps is ignored", "_note_idle", with_burdens, "P6"),
    ("work between two looks is not seen", "_note_idle", busy_between_looks, "P6"),
    ("workers leave while work waits", "_look", while_work_waits, "P6"),
    ("idle times outlive a process", "handle", keeps_idle_times, "P6"),
    ("the size grows at once", "_look", grows_at_once, "P7"),
    ("a request gets no reply", "_request", no_reply, "P8"),
    ("a refused request changes the size", "_request", refused_and_changed, "P8"),
    ("it goes on while the cluster closes", "handle", goes_on, "P9"),
    ("a worker that has ended is not replaced", "_ended", never_replaced, "P10"),
]


@pytest.mark.parametrize(("what", "name", "bug", "said"), BUGS, ids=[bug[0] for bug in BUGS])
def test_the_simulation_finds_that(
    what: str, name: str, bug: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Elasticity, name, bug)
    found = None
    for seed in range(SEEDS_MAX):
        try:
            simulate_elasticity(seed)
        except (AssertionError, KeyError, IndexError) as error:
            found = str(error)
            break
    assert found is not None, f"no promise was seen broken in {SEEDS_MAX} seeds: {what}"
    assert found.startswith(said)

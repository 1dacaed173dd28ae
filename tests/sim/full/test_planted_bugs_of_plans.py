"""Does the simulation find bugs of plans and of the first error of a round? One bug is planted at a
time.

A row has the name of the bug, the patch that plants it, and the start of the simulation's report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.sim.full.test_planted_bugs import Plant, after, first_complaint, instead
from zmqdist.messages import ERROR
from zmqdist.scheduling.coordinator import machine
from zmqdist.scheduling.coordinator.dependencies_and_retries import (
    CancelAttempts,
    Dependencies,
    DropFunctions,
    End,
    Free,
)
from zmqdist.scheduling.coordinator.effects import KeepInput, Resolve
from zmqdist.scheduling.coordinator.machine import CoordinatorMachine

pytestmark = pytest.mark.timeout(300)

SEEDS_MAX = 300

REAL = {
    name: Dependencies.__dict__[name]
    for name in (
        "_hand_in_when_ready",
        "_ended",
        "_notify_waiting",
        "_end",
        "_input_lost",
        "_recompute",
    )
}


def without(*kinds: type) -> Callable[[Any, list[Any]], list[Any]]:
    return lambda self, effects: [effect for effect in effects if not isinstance(effect, kinds)]


def hands_in_at_once(self: Any, plan: Any, effects: list[Any]) -> None:
    plan.missing.clear()
    REAL["_hand_in_when_ready"](self, plan, effects)


def hands_in_while_ending(self: Any, work: int, well: bool, effects: list[Any]) -> None:
    ending, self._ending = self._ending, False
    REAL["_notify_waiting"](self, work, well, effects)
    self._ending = ending


def tries_for_ever(self: Any, number: int, kind: int, lost: int, effects: list[Any]) -> None:
    plan = self._attempts.get(number)
    if plan is not None and kind == ERROR:
        plan.retries += 1
    REAL["_ended"](self, number, kind, lost, effects)


def never_tries_again(self: Any, number: int, kind: int, lost: int, effects: list[Any]) -> None:
    plan = self._attempts.get(number)
    if plan is not None:
        plan.retries = 0
    REAL["_ended"](self, number, kind, lost, effects)


def tells_all_is_well(self: Any, work: int, well: bool, effects: list[Any]) -> None:
    REAL["_notify_waiting"](self, work, True, effects)


def makes_again_for_ever(self: Any, plan: Any, effects: list[Any]) -> None:
    plan.recomputations = 0
    REAL["_recompute"](self, plan, effects)


def fails_by_a_retried_error(
    self: CoordinatorMachine, number: int, kind: int, payload: Any, now: float
) -> None:
    if kind == ERROR and self._rounds and self.failed is None:
        self.failed = self.user_of(number)
    END_OF(self, number, kind, payload, now)


END_OF = CoordinatorMachine.__dict__["_end_of"]


def of_the_attempt(self: CoordinatorMachine, effects: list[Any]) -> list[Any]:
    """Free a value again that was freed already."""
    return [*effects, *(effect for effect in effects if isinstance(effect, Free))]


def the_last_one(self: CoordinatorMachine, effects: list[Any]) -> list[Any]:
    for effect in effects:
        if isinstance(effect, Resolve) and effect.failures:
            self.failed = [work for work, _, _ in effect.items if work in effect.failures][-1]
    return effects


def inputs_last(self: CoordinatorMachine, effects: list[Any]) -> list[Any]:
    return sorted(effects, key=lambda effect: isinstance(effect, KeepInput))


def only_errors_fail(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "FAILURES", frozenset({ERROR}))


def drops_what_is_in_use(self: Any, functions: Any, effects: list[Any]) -> None:
    gone = [fn for fn in functions if fn in self._unused]
    self._unused.difference_update(gone)
    if gone:
        effects.append(DropFunctions(gone))


def names_the_asker(self: Any, effects: list[Any]) -> list[Any]:
    return [replace(e, cause=e.work) if isinstance(e, End) and e.cause else e for e in effects]


BUGS: list[tuple[str, Plant, str | tuple[str, ...]]] = [
    (
        "a plan does not wait for its inputs",
        instead(Dependencies, "_hand_in_when_ready", hands_in_at_once),
        ("dependencies G2", "coordinator C3", ""),
    ),
    (
        "a plan is handed in while its round ends",
        instead(Dependencies, "_notify_waiting", hands_in_while_ending),
        "dependencies G5",
    ),
    (
        "an error is tried again for ever",
        instead(Dependencies, "_ended", tries_for_ever),
        "dependencies G4",
    ),
    (
        "an error is never tried again",
        instead(Dependencies, "_ended", never_tries_again),
        "dependencies G4",
    ),
    (
        "a failed input counts like a good one",
        instead(Dependencies, "_notify_waiting", tells_all_is_well),
        ("dependencies G", ""),
    ),
    (
        "the wrong input is named",
        after(Dependencies, "handle", names_the_asker),
        ("dependencies G3", ""),
    ),
    (
        "no time-out is kept",
        instead(Dependencies, "deadline", property(lambda self: None)),
        "dependencies G6",
    ),
    (
        "a lost value is not made again",
        instead(Dependencies, "_value_lost", lambda self, *args: None),
        "dispatch P7",
    ),
    (
        "a lost value is made again too often",
        instead(Dependencies, "_recompute", makes_again_for_ever),
        "dependencies G7",
    ),
    (
        "a function is forgotten while a plan needs it",
        instead(Dependencies, "_drop", drops_what_is_in_use),
        ("dependencies G8", ""),
    ),
    (
        "what a plan holds is freed twice",
        after(CoordinatorMachine, "handle", of_the_attempt),
        "dependencies G9",
    ),
    (
        "what a plan holds is not freed",
        after(Dependencies, "handle", without(Free)),
        "dependencies G",
    ),
    (
        "the attempts of what has ended go on",
        after(Dependencies, "handle", without(CancelAttempts)),
        "dependencies G6",
    ),
    (
        "a round fails by an error that is tried again",
        instead(CoordinatorMachine, "_end_of", fails_by_a_retried_error),
        "coordinator C2",
    ),
    (
        "a round fails by the last error",
        after(CoordinatorMachine, "handle", the_last_one),
        "coordinator C2",
    ),
    ("a time-out fails no round", only_errors_fail, "coordinator C2"),
    (
        "an input is here after who needs it was handed in",
        after(CoordinatorMachine, "handle", inputs_last),
        "coordinator C3",
    ),
]


@pytest.mark.parametrize(("what", "plant", "said"), BUGS, ids=[bug[0] for bug in BUGS])
def test_the_simulation_finds_of_plans_that(
    what: str, plant: Plant, said: str | tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = next(
        (found for seed in range(SEEDS_MAX) if (found := first_complaint(seed)) is not None), None
    )
    assert found is not None, f"{SEEDS_MAX} seeds did not find that {what}"
    assert found.startswith(said), found[:200]

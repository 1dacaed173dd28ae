"""Does the simulation of nested work find bugs? One bug is planted at a time; within SEEDS_MAX seeds
the simulation must report a broken promise.

A row has the name of the bug, the patch that plants it, and the start of the simulation's report.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.sim.planted import Plant, around, expect_report, heard
from tests.sim.simulations.nested import simulate_nested
from zmqdist.messages import RegisterCoordinator, SlotsWaiting
from zmqdist.scheduling.dispatcher.children import Nesting
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.dispatcher.records import WorkerLoad
from zmqdist.scheduling.worker.nested_slots import NestedSlots

pytestmark = pytest.mark.timeout(300)  # some are found after hundreds of seeds

SEEDS_MAX = 300


BUGS: list[tuple[str, Plant, str | tuple[str, ...]]] = [
    (
        "a function that waits does not give its place back at the worker",
        around(NestedSlots, "begin_wait", lambda former, self, slot, position, depth: ""),
        "dispatch P7",
    ),
    (
        "a function that waits counts as busy at the dispatcher",
        heard(Broker, SlotsWaiting, lambda message: None),
        "dispatch P",
    ),
    (
        "a function ends before its work",
        around(Nesting, "is_quiet", lambda former, self, lease, now: True),
        "dispatch P21",
    ),
    (
        "the work of a function that has ended goes on",
        around(Nesting, "unfenced", lambda former, self, lease: []),
        "dispatch P",
    ),
    (
        "the session of a function belongs to no function",
        heard(Broker, RegisterCoordinator, lambda message: replace(message, parent=0)),
        ("dispatch P21", "dispatch P5"),
    ),
    (
        "a full worker begins work of any depth",
        around(WorkerLoad, "admits", lambda former, self, depth: True),
        "dispatch P18",
    ),
    (
        "a full worker begins work that is no deeper than what waits there",
        around(
            NestedSlots,
            "begin_wait",
            lambda former, self, slot, position, depth: former(self, slot, position, -1),
        ),
        "worker P18",
    ),
    (
        "a wait has no end at the worker",
        around(NestedSlots, "end_wait", lambda former, self, slot: None),
        ("worker P", "dispatch P", "list index out of range"),
    ),
]


def complaint(seed: int) -> str | None:
    try:
        simulate_nested(seed, can_kill=seed % 4 != 3, works=20)
    except Exception as error:
        return str(error) or type(error).__name__
    return None


@pytest.mark.parametrize(("bug", "plant", "promise"), BUGS, ids=[row[0] for row in BUGS])
def test_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, bug: str, plant: Plant, promise: str | tuple[str, ...]
) -> None:
    plant(monkeypatch)
    expect_report(complaint, SEEDS_MAX, bug, promise)


def test_bug_is_found_only_if_planted() -> None:
    for seed in range(30):
        assert complaint(seed) is None, seed

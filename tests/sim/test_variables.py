"""Updates of variables at a parameter server whose requests are repeated until there is a reply, in
virtual time, with seeded faults.

The faults and the checks are in tests/sim/simulations/variables.py.
"""

from __future__ import annotations

import pytest

from tests.sim.simulations.variables import simulate_variables


def test_updates_are_applied_once_despite_faults(seed: int) -> None:
    simulate_variables(seed)


def test_seed_replays_same_run() -> None:
    assert (
        simulate_variables(7).server.sessions.popitem()[1].value
        == simulate_variables(7).server.sessions.popitem()[1].value
    )


def test_simulation_reaches_its_events() -> None:
    """Over some seeds updates are refused, steps are applied, servers are lost and their values
    come back."""
    worlds = [simulate_variables(seed) for seed in range(25)]
    assert sum(world.answers for world in worlds) > 1000
    assert sum(world.steps for world in worlds) > 100
    assert sum(world.refusals for world in worlds) > 20
    assert sum(world.servers > 1 and world.saved[0] > 1 for world in worlds) > 5


def test_broken_promise_names_seed_and_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "zmqdist.variables.updates_machine.Updates.ended",
        lambda self, update, result: self.failed(update),
    )
    with pytest.raises(AssertionError, match=r"(?s)U\d.*pytest tests/sim --seed 4"):
        simulate_variables(4)

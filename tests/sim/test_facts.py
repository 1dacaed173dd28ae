"""The record of a dispatcher agrees with what happens in its cluster, in any order of events."""

from __future__ import annotations

import pytest

from tests.sim.simulations.facts import simulate_facts


@pytest.mark.parametrize("block", range(4))
def test_record_agrees_with_what_happened(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        simulate_facts(seed)


def test_simulation_reaches_its_events() -> None:
    """A simulation without these events would find no bugs."""
    worlds = [simulate_facts(seed) for seed in range(25)]
    assert sum(world.deaths for world in worlds) > 50
    assert sum(world.losses for world in worlds) > 25
    assert sum(world.failed.total() for world in worlds) > 50
    assert sum(len(world.seen) for world in worlds) > 200
    assert sum(submission > 0 for world in worlds for _, submission in world.times) > 50
    assert sum(bool(world.server_calls) for world in worlds) > 20

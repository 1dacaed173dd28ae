"""Functions that schedule functions, in virtual time, with seeded faults and deaths of slots,
workers, the dispatcher and the programs outside.

The faults and the checks are in tests/sim/simulations/nested.py.
"""

from __future__ import annotations

from tests.sim.simulations.nested import simulate_nested


def test_nested_work_ends_with_its_function_despite_faults(seed: int) -> None:
    simulate_nested(seed, can_kill=seed % 4 != 3)


def test_functions_that_wait_for_each_other_end(seed: int) -> None:
    simulate_nested(seed, faults=0, programs=3)


def test_seed_replays_same_run() -> None:
    assert simulate_nested(7).ended == simulate_nested(7).ended


def test_simulation_reaches_its_events() -> None:
    """Over some seeds functions wait, are refused to wait, and wait where only deeper work may
    begin."""
    clusters = [simulate_nested(seed, works=30) for seed in range(20)]
    assert sum(cluster.waits for cluster in clusters) > 300
    assert sum(cluster.refusals for cluster in clusters) > 3
    assert sum(cluster.full for cluster in clusters) > 30
    assert sum(len(cluster.programs) for cluster in clusters) > 300

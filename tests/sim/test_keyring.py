"""The simulation of the keyring reaches the events that it is made for; tests/sim/test_tasks.py
runs its seeds with the others."""

from __future__ import annotations

from tests.sim.simulations.keyring import simulate_keyring


def test_simulation_reaches_its_events() -> None:
    """A simulation without these events would find no bugs."""
    runs = [simulate_keyring(seed) for seed in range(25)]
    assert sum(run.joins for run in runs) > 100
    assert sum(run.revocations for run in runs) > 50
    assert sum(run.restarts for run in runs) > 50
    assert sum(run.forgotten for run in runs) > 25

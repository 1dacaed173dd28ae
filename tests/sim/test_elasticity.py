"""The simulation of elasticity meets what it is about; tests/sim/test_tasks.py runs its seeds with
the others."""

from __future__ import annotations

from tests.sim.simulations.elasticity import simulate_elasticity


def test_simulation_reaches_its_events() -> None:
    """A simulation in which nothing of this happens would find nothing."""
    runs = [simulate_elasticity(seed) for seed in range(50)]
    assert sum(run.requests for run in runs) > 300
    assert sum(run.refusals for run in runs) > 100
    assert sum(run.kills for run in runs) > 20
    assert sum(run.grown for run in runs) > 20
    assert sum(run.hosts_lost for run in runs) > 20
    assert sum(run.shrunk for run in runs) > 5

"""The simulation of actors meets what it is about; tests/sim/test_tasks.py runs its seeds with the
others."""

from __future__ import annotations

from tests.sim.simulations.actors import simulate_actors
from zmqdist.scheduling.shared.actors import ActorState


def test_simulation_reaches_its_events() -> None:
    """A simulation in which nothing of this happens would find nothing."""
    runs = [simulate_actors(seed) for seed in range(40)]
    heard = [len(numbers) for run in runs for numbers in run.oracle.heard.values()]
    assert sum(count > 1 for count in heard) > 30, "actors begin again"
    assert sum(run.dispatcher > 1 for run in runs) > 20, "dispatchers are replaced"
    assert sum(len(run.oracle.ended) for run in runs) > 100
    assert sum(run.oracle.impossible for run in runs) > 5, "no worker has enough"
    assert sum(run.oracle.found for run in runs) > 5, "names are found"
    groups = {group for run in runs for group in run.oracle.groups.values()}
    assert len(groups) > 10
    states = {
        actor.state for run in runs if run.broker for actor in run.broker.actors.actors.values()
    }
    assert states == {ActorState.LIVE, ActorState.PENDING}


def test_actors_serve_once_without_faults() -> None:
    for seed in range(5):
        run = simulate_actors(seed, faults=0)
        assert all(len(numbers) == 1 for numbers in run.oracle.heard.values())

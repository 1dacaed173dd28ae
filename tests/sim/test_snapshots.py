"""The machine of snapshots with models of folders and workers around it, with seeded faults: see
simulations/snapshots.py.

pytest tests/sim --seed 1234      replays one seed exactly
"""

from __future__ import annotations

from collections import Counter

from tests.sim.simulations.snapshots import simulate_snapshots


def test_snapshot_has_positions_once_despite_faults(seed: int) -> None:
    simulate_snapshots(seed)


def test_snapshots_are_completed_without_faults(seed: int) -> None:
    world = simulate_snapshots(seed, faults=0.0)
    assert all(folder.done for folder in world.folders.values())


def test_seed_replays_same_run() -> None:
    first, second = simulate_snapshots(11), simulate_snapshots(11)
    assert first.trace == second.trace
    assert [folder.records for folder in first.folders.values()] == [
        folder.records for folder in second.folders.values()
    ]


def test_simulation_reaches_its_events() -> None:
    """A simulation without these faults would find no bugs."""
    met: Counter[str] = Counter()
    whole = failed = 0
    for seed in range(160):
        world = simulate_snapshots(seed)
        met += world.met
        whole += sum(folder.done for folder in world.folders.values())
        failed += sum(folder.error is not None for folder in world.folders.values())
    assert whole > 50
    assert failed > 5
    for event in (
        "a former writer is refused",
        "a pipeline raises",
        "a worker dies",
        "a worker is thought lost",
        "an answer is lost",
        "the dispatcher dies",
        "writing fails",
    ):
        assert met[event] > 2, event

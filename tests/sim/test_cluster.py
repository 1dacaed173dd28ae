"""The machines of the dispatcher, the workers and the coordinators as one cluster, in virtual time,
with seeded faults.

The faults and the checks are in tests/sim/simulations/cluster.py; the promises are numbered in
the machines' modules.

    pytest tests/sim --seed 1234      replays one seed exactly
    pytest tests/sim --seeds 5000     a long run
"""

from __future__ import annotations

import pytest

from tests.sim.simulations.cluster import SimCluster, simulate
from zmqdist.scheduling.coordinator.machine import CoordinatorMachine


def test_promises_hold_despite_faults(seed: int) -> None:
    simulate(seed, can_kill=seed % 4 != 3)


def test_seed_replays_same_run() -> None:
    first, second = simulate(7), simulate(7)
    assert first.trace == second.trace
    assert len(first.trace) > 5
    assert first.oracle.runs == second.oracle.runs
    assert [c.outcomes for c in first.coordinators] == [c.outcomes for c in second.coordinators]


def test_input_for_work_that_ends_in_the_same_event_is_dropped() -> None:
    """One message brings the value of one input, and the error of another."""
    simulate(701_119, can_kill=False)


def test_recomputation_of_a_dropped_value_is_not_submitted() -> None:
    """It is queued, and unsent, when the program drops the value."""
    simulate(2_108_125)


def test_functions_run_once_without_faults() -> None:
    cluster = simulate(3, faults=0, works=200)
    assert len(cluster.oracle.runs) == 400
    assert len(set(cluster.oracle.runs.values())) == 400


def test_simulation_reaches_its_events() -> None:
    """Over some seeds work ends in each possible way, rounds end, and work runs more than once: a
    mild simulation would find no bugs."""
    outcomes: set[int] = set()
    rounds = repeated = retried = remade = 0
    for seed in range(25):
        cluster: SimCluster = simulate(seed)
        for coordinator in cluster.coordinators:
            outcomes |= set(coordinator.outcomes.values())
            rounds += coordinator.round_count
            plans = coordinator.plans.plans.values()
            retried += sum(len(plan.attempts) > 1 and not plan.lineage for plan in plans)
            remade += sum(plan.replaced for plan in plans)
        repeated += len(cluster.oracle.runs) - len(set(cluster.oracle.runs.values()))
    assert outcomes >= {0, 1, 3, 4, 10, 12, 13}, (
        "a value, an error, a cancellation, a kept one, a lost one, an input, a time-out"
    )
    assert rounds > 10
    assert min(retried, remade) > 5
    assert repeated > 20


def test_broken_promise_names_seed_and_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoordinatorMachine, "_submit", lambda self: [])
    with pytest.raises(
        AssertionError, match=r"(?s)dispatch P7.*pytest tests/sim --seed 5.*dispatcher starts"
    ):
        simulate(5)

"""The coordinators that call actors, the actors' processes and the dispatcher's directory, in virtual
time, with seeded faults.

The faults and the checks are in tests/sim/simulations/actor_calls.py. The promises are numbered in
called_actors.py (K), actor_calls_machine.py (C), actors_machine.py (A) and machine.py (P).

    pytest tests/sim --seed 1234      replays one seed exactly
    pytest tests/sim --seeds 5000     a long run
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.simulations.actor_calls import FAULTS, simulate_actor_calls
from zmqdist.messages import CANCELLED, ERROR, VALUE
from zmqdist.scheduling.coordinator.called_actors import CalledActors
from zmqdist.scheduling.coordinator.work import ACTOR_LOST, INPUT_FAILED, TIMED_OUT, UNAVAILABLE


def test_promises_of_calls_hold_despite_faults(seed: int) -> None:
    simulate_actor_calls(seed)


def test_seed_replays_same_calls() -> None:
    first, second = simulate_actor_calls(7), simulate_actor_calls(7)
    assert first.trace == second.trace
    assert len(first.trace) > 50


def test_calls_of_live_actors_succeed_without_faults() -> None:
    for seed in range(5):
        outcomes = simulate_actor_calls(seed, faults=0).outcomes
        assert outcomes[VALUE] > 10
        assert outcomes[UNAVAILABLE] == 0


def test_simulation_of_calls_reaches_its_events() -> None:
    """A simulation without these events would find no bugs."""
    worlds = [simulate_actor_calls(seed) for seed in range(25)]
    outcomes: Counter[int] = sum((world.outcomes for world in worlds), Counter())
    kinds = (VALUE, ERROR, CANCELLED, TIMED_OUT, ACTOR_LOST, INPUT_FAILED, UNAVAILABLE)
    assert min(outcomes[kind] for kind in kinds) > 5, outcomes
    trace = [line for world in worlds for line in world.trace]
    assert not [kind for kind in FAULTS if not any(line.endswith(kind) for line in trace)]
    assert sum("True)" in line for line in trace) > 50, "calls that may have been executed"
    assert sum(len(world.executed) for world in worlds) > 1000


def test_broken_promise_names_seed_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CalledActors, "send_calls", lambda self: self.touched.clear())
    with pytest.raises(
        AssertionError, match=r"(?s)never ends: .*pytest tests/sim --seed 5.*(kill|cut|freeze)"
    ):
        simulate_actor_calls(5)

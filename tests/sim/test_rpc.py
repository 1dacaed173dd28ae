"""The machines of RPC at both ends, in virtual time, with seeded faults: call tables, turns,
batches, bulk channels and paces.

The faults and the checks are in tests/sim/simulations/rpc.py.

pytest tests/sim --seed 1234      replays one seed exactly
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.simulations.rpc import FAULTS, simulate_rpc
from zmqdist.errors import CANCELLED, DEADLINE_EXCEEDED, OK, RESOURCE_EXHAUSTED, UNAVAILABLE
from zmqdist.rpc.admission_machine import FairAdmission


def test_calls_end_once_despite_faults(seed: int) -> None:
    simulate_rpc(seed)


def test_accepted_calls_have_values_without_faults(seed: int) -> None:
    sim = simulate_rpc(seed, faults=0)
    codes = Counter(question.code for question in sim.questions)
    assert set(codes) <= {OK, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED}
    assert all(
        question.code != DEADLINE_EXCEEDED or question.due < 20.0 for question in sim.questions
    )
    assert codes[OK] > 0


def test_seed_replays_same_run() -> None:
    first, second = simulate_rpc(7), simulate_rpc(7)
    assert first.trace == second.trace
    assert [question.code for question in first.questions] == [
        question.code for question in second.questions
    ]


def test_simulation_reaches_its_events() -> None:
    """A simulation without these events would find no bugs."""
    sims = [simulate_rpc(seed) for seed in range(40)]
    trace = " ".join(line for sim in sims for line in sim.trace)
    assert not [kind for kind in FAULTS if f"fault: {kind}" not in trace]
    questions = [question for sim in sims for question in sim.questions]
    codes = Counter(question.code for question in questions)
    assert (
        min(
            codes[code]
            for code in (OK, CANCELLED, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNAVAILABLE)
        )
        > 100
    )
    values = [question for question in questions if question.code == OK]
    assert sum(sum(question.sizes) > 512 * 1024 for question in values) > 50, "large arguments"
    assert sum(sum(question.result_sizes) > 512 * 1024 for question in values) > 50, "large results"
    assert sum(question.begun and question.code != OK for question in questions) > 100, (
        "replies without a waiting caller"
    )
    assert sum(sim.held for sim in sims) > 50, "arguments that are admitted"


def test_broken_promise_names_seed_and_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairAdmission, "next", lambda self: None)
    with pytest.raises(
        AssertionError,
        match=r"(?s)calls P1: .* never end.*pytest tests/sim --seed 5.*server 1 starts",
    ):
        simulate_rpc(5)

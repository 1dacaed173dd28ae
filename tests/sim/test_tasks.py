"""The machines by which the tasks of a cluster work together, in virtual time, with seeded faults:
barriers and keys, locks and queues, groups, messages, actors, and how many workers there are.

The faults and the checks are in
tests/sim/simulations/{actors,elasticity,keeper,groups,keyring,mail,primitives,recruitment,watches}.py. The
machines' modules number the promises.

    pytest tests/sim --seed 1234      replays one seed exactly
    pytest tests/sim --seeds 5000     a long run
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.sim.simulations.actors import simulate_actors
from tests.sim.simulations.elasticity import simulate_elasticity
from tests.sim.simulations.groups import simulate_group
from tests.sim.simulations.keeper import simulate_keeper
from tests.sim.simulations.keyring import simulate_keyring
from tests.sim.simulations.mail import simulate_mail
from tests.sim.simulations.primitives import simulate_primitives
from tests.sim.simulations.recruitment import simulate_recruitment
from tests.sim.simulations.watches import simulate_watches

ALL: list[Callable[..., Any]] = [
    simulate_actors,
    simulate_elasticity,
    simulate_keeper,
    simulate_group,
    simulate_keyring,
    simulate_mail,
    simulate_primitives,
    simulate_recruitment,
    simulate_watches,
]


@pytest.mark.parametrize("simulate", ALL)
def test_promises_hold_despite_faults(simulate: Callable[..., Any], seed: int) -> None:
    simulate(seed)


@pytest.mark.parametrize("simulate", ALL)
def test_seed_replays_same_run(simulate: Callable[..., Any]) -> None:
    first, second = simulate(7), simulate(7)
    assert first.trace == second.trace
    assert len(first.trace) > 5


def test_operations_succeed_without_faults() -> None:
    for seed in range(5):
        group, mail, keeper = (
            simulate_group(seed, faults=0),
            simulate_mail(seed, faults=0),
            simulate_keeper(seed, faults=0),
        )
        assert {operation.code for operation in group.operations if operation.code is not None} <= {
            0,
            4,
        }, "but for deadlines at the end"
        assert {letter.code for letter in mail.letters.values()} <= {0, 8}, "but for a full mailbox"
        assert keeper.rounds > 50


def test_simulations_reach_their_events() -> None:
    """Over some seeds members agree, disagree and exchange, rounds pass despite faults, and
    messages are lost: a mild run finds no bugs."""
    codes: set[int | None] = set()
    agreements = rounds = lost = 0
    for seed in range(25):
        group, mail, keeper = simulate_group(seed), simulate_mail(seed), simulate_keeper(seed)
        codes |= {operation.code for operation in group.operations}
        agreements += group.agreements - group.agreed_in_calm
        rounds += keeper.rounds - keeper.rounds_in_calm
        lost += sum(letter.code != 0 for letter in mail.letters.values())
    assert codes >= {0, 1, 3, 4, 10, 14}, "agreed, cancelled, different, late, aborted, gone"
    assert agreements > 100
    assert rounds > 100
    assert lost > 100


def test_simulated_primitives_are_used_despite_faults() -> None:
    worlds = [simulate_primitives(seed) for seed in range(6)]
    assert sum(world.takes - world.takes_in_calm for world in worlds) > 100
    assert sum(world.restarts for world in worlds) > 2
    assert sum(len(world.received) for world in worlds) > 300
    calm = simulate_primitives(0, faults=0)
    assert calm.confirmed == calm.received == {*calm.accepted}


def test_late_message_of_given_up_client_frees_no_place() -> None:
    simulate_primitives(3500577)


def test_broken_promise_names_seed_and_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmqdist.tasks.mailbox_machine.Mailbox.returned", lambda self, wait: [])
    with pytest.raises(AssertionError, match=r"(?s)mailbox P1.*pytest tests/sim --seed 5.*got"):
        simulate_mail(5)

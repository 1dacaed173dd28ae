"""The machines of the data service's dispatcher, workers, tasks and readers in virtual time, with
seeded faults.

pytest tests/sim --seed 1234      replays one seed exactly
"""

from __future__ import annotations

from tests.sim.simulations.data_rounds import simulate_rounds
from tests.sim.simulations.data_service import simulate_data_service
from zmqdist.data.service.dispatcher.machine import records as r


def test_readers_get_promised_elements_despite_faults(seed: int) -> None:
    simulate_data_service(seed)


def test_readers_end_despite_coinciding_faults(seed: int) -> None:
    simulate_data_service(seed, faults=50)


def test_coordinated_consumers_stay_in_step_despite_faults(seed: int) -> None:
    simulate_rounds(seed)


def test_elements_are_delivered_once_without_faults(seed: int) -> None:
    simulate_data_service(seed, faults=0)


def test_seed_replays_same_run() -> None:
    first, second = simulate_data_service(11), simulate_data_service(11)
    assert first.trace == second.trace
    assert [reader.got for reader in first.readers] == [reader.got for reader in second.readers]


def test_simulation_reaches_its_events() -> None:
    """A simulation without these faults would find no bugs."""
    sims = [simulate_data_service(seed) for seed in range(40)]
    trace = " ".join(line for sim in sims for line in sim.trace)
    for event in (
        "is killed",
        "is back at",
        "loses its connection",
        "is added",
        "dispatcher",
        "reader is killed",
        "journal",
    ):
        assert event in trace
    readers = [reader for sim in sims for reader in sim.readers]
    assert {reader.mode for reader in readers} == {r.OFF, r.DYNAMIC}
    assert sum(reader.error != 0 for reader in readers) > 1, "states are lost"
    assert sum(sim.answers_lost for sim in sims) > 20
    partly = [
        sim
        for sim in sims
        for reader in sim.readers
        if reader.mode == r.DYNAMIC and 0 < len(reader.got) < sim.count
    ]
    assert len(partly) > 10

"""Every machine is driven by a simulation: a module that decides is executed when each simulation
runs a seed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from tests.house.test_structure import MACHINES, name_of
from tests.sim.simulations.actor_calls import simulate_actor_calls
from tests.sim.simulations.actors import simulate_actors
from tests.sim.simulations.cluster import simulate
from tests.sim.simulations.data_rounds import simulate_rounds
from tests.sim.simulations.data_service import simulate_data_service
from tests.sim.simulations.elasticity import simulate_elasticity
from tests.sim.simulations.groups import simulate_group
from tests.sim.simulations.keeper import simulate_keeper
from tests.sim.simulations.keyring import simulate_keyring
from tests.sim.simulations.mail import simulate_mail
from tests.sim.simulations.nested import simulate_nested
from tests.sim.simulations.primitives import simulate_primitives
from tests.sim.simulations.recruitment import simulate_recruitment
from tests.sim.simulations.rpc import simulate_rpc
from tests.sim.simulations.snapshots import simulate_snapshots
from tests.sim.simulations.variables import simulate_variables
from tests.sim.simulations.watches import simulate_watches

SIMULATIONS: tuple[Callable[[int], Any], ...] = (
    partial(simulate, works=20),
    simulate_actor_calls,
    simulate_actors,
    simulate_data_service,
    simulate_elasticity,
    simulate_group,
    simulate_keeper,
    simulate_keyring,
    simulate_mail,
    simulate_nested,
    simulate_primitives,
    simulate_recruitment,
    simulate_rounds,
    simulate_rpc,
    simulate_snapshots,
    simulate_variables,
    simulate_watches,
)

SEEDS = range(1, 3)


def methods(path: Any) -> bool:
    """Whether functions of the module do anything: one of records and protocols alone is driven by
    those that use them."""
    functions = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
    ]
    return any(len(each.body) > 1 or ast.get_docstring(each) is None for each in functions)


def executed() -> set[str]:
    """The files of which a function was called by a simulation."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    for run in SIMULATIONS:
        # what is imported on first use is executed by that, and this says nothing
        run(0)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for run in SIMULATIONS:
            for seed in SEEDS:
                run(seed)
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.timeout(120)
def test_simulation_drives_every_machine() -> None:
    driven = executed()
    deciding = [path for path in MACHINES if methods(path)]
    undriven = {name_of(path) for path in deciding if str(path) not in driven}
    assert undriven == set(), "write a simulation, see tests/sim/simulations"

"""Tools for tests of distributed programs: processes for the tasks of a cluster, reserved ports, and the simulation of a whole cluster in
virtual time.

    from zmqdist.testing import create_cluster_spec, get_barrier, run
    run(fn, create_cluster_spec(has_chief=True, num_workers=2)).return_value    # fn ran in three processes

    from zmqdist.testing import simulate
    simulate(seed=1234)        # raises AssertionError when a machine breaks one of its promises

`check_resolver(resolver)` raises AssertionError when a cluster resolver breaks a rule of resolvers.

Each name is imported on first use. docs/testing.md says how to use them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zmqdist.testing.conformance import check_resolver
    from zmqdist.testing.runner.barrier import get_barrier
    from zmqdist.testing.runner.errors import (
        MultiProcessRunnerResult,
        SubprocessTimeoutError,
        UnexpectedSubprocessExitError,
    )
    from zmqdist.testing.runner.in_process import create_in_process_cluster
    from zmqdist.testing.runner.pool import MultiProcessPoolRunner
    from zmqdist.testing.runner.ports import create_cluster_spec
    from zmqdist.testing.runner.runner import MultiProcessRunner, run
    from zmqdist.testing.runner.shared import manager
    from zmqdist.testing.simulation.clock import SimClock
    from zmqdist.testing.simulation.cluster import SimCluster, simulate
    from zmqdist.testing.simulation.data_service import DataSim, simulate_data_service
    from zmqdist.testing.simulation.network import SimConnection, SimProcess

_MODULES = {
    "DataSim": "simulation.data_service",
    "MultiProcessPoolRunner": "runner.pool",
    "MultiProcessRunner": "runner.runner",
    "MultiProcessRunnerResult": "runner.errors",
    "SimClock": "simulation.clock",
    "SimCluster": "simulation.cluster",
    "SimConnection": "simulation.network",
    "SimProcess": "simulation.network",
    "SubprocessTimeoutError": "runner.errors",
    "UnexpectedSubprocessExitError": "runner.errors",
    "check_resolver": "conformance",
    "create_cluster_spec": "runner.ports",
    "create_in_process_cluster": "runner.in_process",
    "get_barrier": "runner.barrier",
    "manager": "runner.shared",
    "run": "runner.runner",
    "simulate": "simulation.cluster",
    "simulate_data_service": "simulation.data_service",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'zmqdist.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"zmqdist.testing.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "MultiProcessRunner",
    "MultiProcessPoolRunner",
    "run",
    "create_cluster_spec",
    "create_in_process_cluster",
    "get_barrier",
    "manager",
    "MultiProcessRunnerResult",
    "SubprocessTimeoutError",
    "UnexpectedSubprocessExitError",
    "DataSim",
    "SimClock",
    "SimCluster",
    "SimConnection",
    "SimProcess",
    "check_resolver",
    "simulate",
    "simulate_data_service",
]

"""Tools for tests of distributed programs: processes for the tasks of a cluster, and reserved
ports.

    from zmqdist.testing import create_cluster_spec, get_barrier, run
    run(fn, create_cluster_spec(has_chief=True, num_workers=2)).return_value    # fn ran in three processes

`check_resolver(resolver)` raises AssertionError when a cluster resolver breaks a rule of resolvers.

Each name is imported on first use. docs/testing.md says how to use them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqdist.lazy_names import lazy_names

if TYPE_CHECKING:
    from zmqdist.testing.conformance import check_resolver
    from zmqdist.testing.runner.barrier import get_barrier
    from zmqdist.testing.runner.clusters import create_cluster_spec, create_in_process_cluster
    from zmqdist.testing.runner.pool import MultiProcessPoolRunner
    from zmqdist.testing.runner.process_pool import (
        MultiProcessRunnerResult,
        SubprocessTimeoutError,
        UnexpectedSubprocessExitError,
    )
    from zmqdist.testing.runner.runner import MultiProcessRunner, run
    from zmqdist.testing.runner.shared import manager

_MODULES = {
    "MultiProcessPoolRunner": "zmqdist.testing.runner.pool",
    "MultiProcessRunner": "zmqdist.testing.runner.runner",
    "MultiProcessRunnerResult": "zmqdist.testing.runner.process_pool",
    "SubprocessTimeoutError": "zmqdist.testing.runner.process_pool",
    "UnexpectedSubprocessExitError": "zmqdist.testing.runner.process_pool",
    "check_resolver": "zmqdist.testing.conformance",
    "create_cluster_spec": "zmqdist.testing.runner.clusters",
    "create_in_process_cluster": "zmqdist.testing.runner.clusters",
    "get_barrier": "zmqdist.testing.runner.barrier",
    "manager": "zmqdist.testing.runner.shared",
    "run": "zmqdist.testing.runner.runner",
}


if not TYPE_CHECKING:  # a wrong name is an error for type checkers
    __getattr__ = lazy_names("zmqdist.testing", _MODULES)

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
    "check_resolver",
]
__dir__ = __all__.copy  # dir() and completion show no other names

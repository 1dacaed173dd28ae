"""TensorFlow's distribution services for plain Python and NumPy, over ZeroMQ.

The first use of a name of this module imports the part of zmqdist that defines it, so that `import zmqdist` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zmqdist._version import __version__

if TYPE_CHECKING:
    from zmqdist import (
        checkpoint,
        cluster,
        collectives,
        coordinator,
        data,
        errors,
        nest,
        optimizers,
        partitioners,
        random,
        resolvers,
        rpc,
        testing,
    )
    from zmqdist.cluster import ClusterConfig, ClusterDef, ClusterSpec, JobDef, ServerDef
    from zmqdist.indexed_slices import IndexedSlices
    from zmqdist.launch.local_cluster import local_cluster
    from zmqdist.scheduling.coordinator.executor import Executor
    from zmqdist.scheduling.dispatcher.runtime import DispatchServer
    from zmqdist.scheduling.worker.runtime import WorkerServer
    from zmqdist.specs import TensorSpec, function
    from zmqdist.task_context import cancelled
    from zmqdist.tasks.connect import check_alive, connect_to_cluster, connect_to_host
    from zmqdist.tasks.server import Server
    from zmqdist.tasks.session import Session
    from zmqdist.training.read_cache import cache_variable_reads
    from zmqdist.training.sharded import ShardedVariable
    from zmqdist.training.strategy import ParameterServerStrategy
    from zmqdist.training.variable import Variable
    from zmqdist.transport.arrays import empty, empty_like, freeze

_WHERE = {
    "ClusterConfig": "zmqdist.cluster",
    "ClusterDef": "zmqdist.cluster",
    "ClusterSpec": "zmqdist.cluster",
    "DispatchServer": "zmqdist.scheduling.dispatcher.runtime",
    "Executor": "zmqdist.scheduling.coordinator.executor",
    "IndexedSlices": "zmqdist.indexed_slices",
    "JobDef": "zmqdist.cluster",
    "ParameterServerStrategy": "zmqdist.training.strategy",
    "Server": "zmqdist.tasks.server",
    "ServerDef": "zmqdist.cluster",
    "Session": "zmqdist.tasks.session",
    "ShardedVariable": "zmqdist.training.sharded",
    "TensorSpec": "zmqdist.specs",
    "Variable": "zmqdist.training.variable",
    "WorkerServer": "zmqdist.scheduling.worker.runtime",
    "cache_variable_reads": "zmqdist.training.read_cache",
    "cancelled": "zmqdist.task_context",
    "check_alive": "zmqdist.tasks.connect",
    "connect_to_cluster": "zmqdist.tasks.connect",
    "connect_to_host": "zmqdist.tasks.connect",
    "empty": "zmqdist.transport.arrays",
    "empty_like": "zmqdist.transport.arrays",
    "freeze": "zmqdist.transport.arrays",
    "function": "zmqdist.specs",
    "local_cluster": "zmqdist.launch.local_cluster",
}
_MODULES = (
    "checkpoint",
    "cluster",
    "collectives",
    "coordinator",
    "data",
    "errors",
    "nest",
    "optimizers",
    "partitioners",
    "random",
    "resolvers",
    "rpc",
    "testing",
)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"zmqdist.{name}")
    else:
        raise AttributeError(f"module 'zmqdist' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "ClusterConfig",
    "ClusterDef",
    "ClusterSpec",
    "DispatchServer",
    "Executor",
    "IndexedSlices",
    "JobDef",
    "ParameterServerStrategy",
    "Server",
    "ServerDef",
    "Session",
    "ShardedVariable",
    "TensorSpec",
    "Variable",
    "WorkerServer",
    "__version__",
    "cache_variable_reads",
    "cancelled",
    "check_alive",
    "checkpoint",
    "cluster",
    "collectives",
    "connect_to_cluster",
    "connect_to_host",
    "coordinator",
    "data",
    "empty",
    "empty_like",
    "errors",
    "freeze",
    "function",
    "local_cluster",
    "nest",
    "optimizers",
    "partitioners",
    "random",
    "resolvers",
    "rpc",
    "testing",
]

"""TensorFlow's distribution services for plain Python and NumPy, over ZeroMQ.

The names of this module load their parts on first use, so that `import zmqdist` costs little.
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
    from zmqdist.coordinator.executor import Executor
    from zmqdist.dispatch.server import DispatchServer
    from zmqdist.dispatch.worker import WorkerServer
    from zmqdist.indexed_slices import IndexedSlices
    from zmqdist.launch.local_cluster import local_cluster
    from zmqdist.net.arrays import empty, empty_like, freeze
    from zmqdist.parameter_server.caching import cache_variable_reads
    from zmqdist.parameter_server.sharded import ShardedVariable
    from zmqdist.parameter_server.strategy import ParameterServerStrategy
    from zmqdist.parameter_server.variable import Variable
    from zmqdist.running import cancelled
    from zmqdist.server.connect import check_alive, connect_to_cluster, connect_to_host
    from zmqdist.server.server import Server
    from zmqdist.server.session import Session
    from zmqdist.specs import TensorSpec, function

_WHERE = {
    "ClusterConfig": "zmqdist.cluster",
    "ClusterDef": "zmqdist.cluster",
    "ClusterSpec": "zmqdist.cluster",
    "DispatchServer": "zmqdist.dispatch.server",
    "Executor": "zmqdist.coordinator.executor",
    "IndexedSlices": "zmqdist.indexed_slices",
    "JobDef": "zmqdist.cluster",
    "ParameterServerStrategy": "zmqdist.parameter_server.strategy",
    "Server": "zmqdist.server.server",
    "ServerDef": "zmqdist.cluster",
    "Session": "zmqdist.server.session",
    "ShardedVariable": "zmqdist.parameter_server.sharded",
    "TensorSpec": "zmqdist.specs",
    "Variable": "zmqdist.parameter_server.variable",
    "WorkerServer": "zmqdist.dispatch.worker",
    "cache_variable_reads": "zmqdist.parameter_server.caching",
    "cancelled": "zmqdist.running",
    "check_alive": "zmqdist.server.connect",
    "connect_to_cluster": "zmqdist.server.connect",
    "connect_to_host": "zmqdist.server.connect",
    "empty": "zmqdist.net.arrays",
    "empty_like": "zmqdist.net.arrays",
    "freeze": "zmqdist.net.arrays",
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

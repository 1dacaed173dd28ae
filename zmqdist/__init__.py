"""Run Python functions, services, parameter servers and input pipelines on many processes or hosts.

    >>> import zmqdist as zd
    >>> with zd.local_cluster(workers=2, processes=False) as cluster:
    ...     with zd.Executor(cluster) as executor:
    ...         print(list(executor.map(abs, [-1, 2, -3])))
    [1, 2, 3]

The first use of a name imports the part of zmqdist that defines it, so that `import zmqdist` is
fast. `__all__` and `dir` list the names of every program, and `from zmqdist import *` imports
these. Names that only TensorFlow's users want are in `zmqdist.tf`. They may also be written
`zmqdist.JobDef`, for example, but `dir` does not list them here, nor `dask_scheduler`, which needs
dask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqdist._version import __version__
from zmqdist.lazy_names import lazy_names

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
        parameter_server,
        partitioners,
        random,
        resolvers,
        rpc,
        testing,
        tf,
    )
    from zmqdist.cluster import ClusterConfig, ClusterSpec
    from zmqdist.cluster import ClusterDef as ClusterDef
    from zmqdist.cluster import JobDef as JobDef
    from zmqdist.cluster import ServerDef as ServerDef
    from zmqdist.integrations.dask import dask_scheduler as dask_scheduler
    from zmqdist.launch.connection import connect
    from zmqdist.launch.executor import Executor
    from zmqdist.launch.local_cluster import local_cluster
    from zmqdist.observe.progress import progress
    from zmqdist.scheduling.coordinator.coordinator import ClusterCoordinator
    from zmqdist.scheduling.coordinator.options import Retries
    from zmqdist.scheduling.coordinator.primitives import Event, Lock, Queue, Semaphore
    from zmqdist.scheduling.coordinator.remote_value import RemoteValue
    from zmqdist.servers.dispatch_server import DispatchServer
    from zmqdist.servers.worker_server import WorkerServer
    from zmqdist.specs import IndexedSlices, TensorSpec, function
    from zmqdist.task_context import cancelled
    from zmqdist.tasks.connect import check_alive as check_alive
    from zmqdist.tasks.connect import connect_to_cluster as connect_to_cluster
    from zmqdist.tasks.connect import connect_to_host as connect_to_host
    from zmqdist.tasks.current_actor import current_actor
    from zmqdist.tasks.server import Server
    from zmqdist.tasks.session import Session as Session
    from zmqdist.training.read_cache import cache_variable_reads as cache_variable_reads
    from zmqdist.training.sharded import ShardedVariable
    from zmqdist.training.strategy import ParameterServerStrategy
    from zmqdist.training.variable import Variable
    from zmqdist.transport.arrays import empty, empty_like, freeze

_WHERE = {
    "ClusterConfig": "zmqdist.cluster",
    "ClusterCoordinator": "zmqdist.scheduling.coordinator.coordinator",
    "ClusterDef": "zmqdist.cluster",
    "ClusterSpec": "zmqdist.cluster",
    "DispatchServer": "zmqdist.servers.dispatch_server",
    "Event": "zmqdist.scheduling.coordinator.primitives",
    "Executor": "zmqdist.launch.executor",
    "IndexedSlices": "zmqdist.specs",
    "JobDef": "zmqdist.cluster",
    "Lock": "zmqdist.scheduling.coordinator.primitives",
    "ParameterServerStrategy": "zmqdist.training.strategy",
    "Queue": "zmqdist.scheduling.coordinator.primitives",
    "RemoteValue": "zmqdist.scheduling.coordinator.remote_value",
    "Retries": "zmqdist.scheduling.coordinator.options",
    "Semaphore": "zmqdist.scheduling.coordinator.primitives",
    "Server": "zmqdist.tasks.server",
    "ServerDef": "zmqdist.cluster",
    "Session": "zmqdist.tasks.session",
    "ShardedVariable": "zmqdist.training.sharded",
    "TensorSpec": "zmqdist.specs",
    "Variable": "zmqdist.training.variable",
    "WorkerServer": "zmqdist.servers.worker_server",
    "cache_variable_reads": "zmqdist.training.read_cache",
    "cancelled": "zmqdist.task_context",
    "check_alive": "zmqdist.tasks.connect",
    "connect": "zmqdist.launch.connection",
    "connect_to_cluster": "zmqdist.tasks.connect",
    "connect_to_host": "zmqdist.tasks.connect",
    "current_actor": "zmqdist.tasks.current_actor",
    "dask_scheduler": "zmqdist.integrations.dask",
    "empty": "zmqdist.transport.arrays",
    "empty_like": "zmqdist.transport.arrays",
    "freeze": "zmqdist.transport.arrays",
    "function": "zmqdist.specs",
    "local_cluster": "zmqdist.launch.local_cluster",
    "progress": "zmqdist.observe.progress",
}
_LINUX_ONLY = ("DispatchServer", "WorkerServer", "local_cluster")
_MODULES = (
    "checkpoint",
    "cluster",
    "collectives",
    "coordinator",
    "data",
    "errors",
    "nest",
    "optimizers",
    "parameter_server",
    "partitioners",
    "random",
    "resolvers",
    "rpc",
    "testing",
    "tf",
)


if not TYPE_CHECKING:  # a wrong name is an error for type checkers
    __getattr__ = lazy_names("zmqdist", _WHERE, _MODULES, _LINUX_ONLY)

__all__ = [
    "ClusterConfig",
    "ClusterCoordinator",
    "ClusterSpec",
    "DispatchServer",
    "Event",
    "Executor",
    "IndexedSlices",
    "Lock",
    "ParameterServerStrategy",
    "Queue",
    "RemoteValue",
    "Retries",
    "Semaphore",
    "Server",
    "ShardedVariable",
    "TensorSpec",
    "Variable",
    "WorkerServer",
    "__version__",
    "cancelled",
    "checkpoint",
    "cluster",
    "collectives",
    "connect",
    "coordinator",
    "current_actor",
    "data",
    "empty",
    "empty_like",
    "errors",
    "freeze",
    "function",
    "local_cluster",
    "nest",
    "optimizers",
    "parameter_server",
    "partitioners",
    "progress",
    "random",
    "resolvers",
    "rpc",
    "testing",
    "tf",
]
__dir__ = __all__.copy  # dir() and completion show no other names

"""The names of TensorFlow's distribution API, for programs that come from TensorFlow, in one
module.

    >>> import zmqdist as zd
    >>> zd.tf.ClusterSpec({"worker": ["host1:5000", "host2:5000"]}).num_tasks("worker")
    2

`import zmqdist.tf` imports all of them, `import zmqdist` none. Each is the same object as under its
own name in zmqdist; docs/tensorflow.md lists the arguments that have no effect.
"""

from zmqdist.cluster.defs import ClusterDef, ClusterDeviceFilters, JobDef, ServerDef
from zmqdist.cluster.resolvers.base import ClusterResolver
from zmqdist.cluster.resolvers.kubernetes import KubernetesClusterResolver
from zmqdist.cluster.resolvers.simple import SimpleClusterResolver
from zmqdist.cluster.resolvers.slurm import SlurmClusterResolver
from zmqdist.cluster.resolvers.tf_config import TFConfigClusterResolver
from zmqdist.cluster.resolvers.union import UnionResolver
from zmqdist.cluster.spec import ClusterSpec
from zmqdist.collectives import CollectiveHints, CommunicationOptions, CrossDeviceOps, ReduceOp
from zmqdist.scheduling.coordinator.coordinator import ClusterCoordinator
from zmqdist.scheduling.coordinator.per_worker import PerWorkerValues
from zmqdist.scheduling.coordinator.remote_value import RemoteValue, RemoteValueStatus
from zmqdist.specs import IndexedSlices, TensorSpec, function
from zmqdist.task_context import get_current_worker_index
from zmqdist.tasks.connect import check_alive, connect_to_cluster, connect_to_host
from zmqdist.tasks.server import Server
from zmqdist.tasks.session import Session
from zmqdist.training.aggregation import VariableAggregation, VariableSynchronization
from zmqdist.training.context import (
    ReplicaContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    variable_creator_scope,
)
from zmqdist.training.distributed_dataset import InputContext
from zmqdist.training.read_cache import cache_variable_reads
from zmqdist.training.sharded import ShardedVariable
from zmqdist.training.strategy import ParameterServerStrategy
from zmqdist.training.variable import Variable

experimental_connect_to_cluster = connect_to_cluster
experimental_connect_to_host = connect_to_host
experimental_get_current_worker_index = get_current_worker_index

__all__ = [
    "ClusterCoordinator",
    "ClusterDef",
    "ClusterDeviceFilters",
    "ClusterResolver",
    "ClusterSpec",
    "CollectiveHints",
    "CommunicationOptions",
    "CrossDeviceOps",
    "IndexedSlices",
    "InputContext",
    "JobDef",
    "KubernetesClusterResolver",
    "ParameterServerStrategy",
    "PerWorkerValues",
    "ReduceOp",
    "RemoteValue",
    "RemoteValueStatus",
    "ReplicaContext",
    "Server",
    "ServerDef",
    "Session",
    "ShardedVariable",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TensorSpec",
    "UnionResolver",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "cache_variable_reads",
    "check_alive",
    "connect_to_cluster",
    "connect_to_host",
    "experimental_connect_to_cluster",
    "experimental_connect_to_host",
    "experimental_get_current_worker_index",
    "function",
    "get_current_worker_index",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "variable_creator_scope",
]
__dir__ = __all__.copy  # dir() and completion show no other names

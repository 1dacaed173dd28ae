"""Training with parameter servers: a strategy, variables on servers, and the replica context of a
step."""

from __future__ import annotations

from zmqdist.collectives import ReduceOp
from zmqdist.training.aggregation import VariableAggregation, VariableSynchronization
from zmqdist.training.context import (
    ReplicaContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    variable_creator_scope,
)
from zmqdist.training.distributed_dataset import InputContext, ValueContext
from zmqdist.training.embedding import embedding_lookup_sparse, safe_embedding_lookup_sparse
from zmqdist.training.per_replica import PerReplica
from zmqdist.training.read_cache import cache_variable_reads
from zmqdist.training.sharded import ShardedVariable
from zmqdist.training.strategy import ParameterServerStrategy
from zmqdist.training.variable import Variable

__all__ = [
    "InputContext",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "ShardedVariable",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "cache_variable_reads",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "variable_creator_scope",
    "embedding_lookup_sparse",
    "safe_embedding_lookup_sparse",
]
__dir__ = __all__.copy  # dir() and completion show no other names

"""Training with parameter servers: a strategy, variables on servers, and what a step does in its replicas."""

from __future__ import annotations

from zmqdist.parameter_server.aggregation import ReduceOp, VariableAggregation, VariableSynchronization
from zmqdist.parameter_server.caching import cache_variable_reads
from zmqdist.parameter_server.context import (
    ReplicaContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    variable_creator_scope,
)
from zmqdist.parameter_server.distributed import InputContext, ValueContext
from zmqdist.parameter_server.replicas import PerReplica
from zmqdist.parameter_server.sharded import ShardedVariable
from zmqdist.parameter_server.strategy import ParameterServerStrategy
from zmqdist.parameter_server.variable import Variable

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
]

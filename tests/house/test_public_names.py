"""The names that users type are pinned: one goes only by a decision, and one comes only with its line here."""

from __future__ import annotations

import importlib

import pytest

PINNED: dict[str, frozenset[str]] = {
    # module -> exactly what its __all__ holds. Names of later work are added with it.
    "zmqdist": frozenset(
        {
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
        }
    ),
    "zmqdist.checkpoint": frozenset(
        {
            "Checkpoint",
            "CheckpointManager",
            "Recovered",
            "Recovery",
            "checkpoints_iterator",
            "latest_checkpoint",
            "load",
            "restore",
            "save",
        }
    ),
    "zmqdist.partitioners": frozenset(
        {"FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"}
    ),
    "zmqdist.coordinator": frozenset(
        {
            "ClusterCoordinator",
            "PerWorkerValue",
            "PerWorkerValues",
            "RemoteValue",
            "RemoteValueStatus",
            "experimental_get_current_worker_index",
            "get_current_worker_index",
            "get_num_workers",
        }
    ),
    "zmqdist.data": frozenset(
        {
            "AUTOTUNE",
            "Dataset",
            "FixedLengthRecordDataset",
            "INFINITE_CARDINALITY",
            "Options",
            "ParquetDataset",
            "Ragged",
            "Sparse",
            "TFRecordDataset",
            "TextLineDataset",
            "UNKNOWN_CARDINALITY",
            "experimental",
            "progress",
            "service",
        }
    ),
    "zmqdist.optimizers": frozenset({"Adagrad", "Adam", "Momentum", "Optimizer", "SGD"}),
    "zmqdist.random": frozenset({"set_seed"}),
    "zmqdist.data.service": frozenset(
        {
            "CrossTrainerCache",
            "DispatchServer",
            "DispatcherConfig",
            "ShardingPolicy",
            "WorkerConfig",
            "WorkerServer",
            "distribute",
            "distributed_save",
            "from_dataset_id",
            "register_dataset",
        }
    ),
    "zmqdist.resolvers": frozenset(
        {
            "ClusterResolver",
            "ExecutableLocation",
            "KubernetesClusterResolver",
            "SimpleClusterResolver",
            "SlurmClusterResolver",
            "TFConfigClusterResolver",
            "UnionResolver",
        }
    ),
    "zmqdist.testing": frozenset(
        {
            "DataSim",
            "MultiProcessPoolRunner",
            "MultiProcessRunner",
            "MultiProcessRunnerResult",
            "SimClock",
            "SimCluster",
            "SimConnection",
            "SimProcess",
            "SubprocessTimeoutError",
            "UnexpectedSubprocessExitError",
            "check_resolver",
            "create_cluster_spec",
            "create_in_process_cluster",
            "get_barrier",
            "manager",
            "run",
            "simulate",
            "simulate_data_service",
        }
    ),
    "zmqdist.rpc": frozenset({"Client", "MethodInfo", "Server", "StatusOrResult", "Stream", "ZmqClient", "ZmqServer"}),
}


@pytest.mark.parametrize("name", PINNED)
def test_the_public_names_are_the_pinned_ones(name: str) -> None:
    module = importlib.import_module(name)
    assert set(module.__all__) == PINNED[name]
    assert len(module.__all__) == len(PINNED[name]), "a name stands twice in __all__"


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in PINNED for name in sorted(PINNED[module])])
def test_every_public_name_is_there_and_says_what_it_is(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    assert value.__doc__, f"{module}.{name} has no docstring"
    assert name in dir(importlib.import_module(module))

"""The names that users type are pinned: one goes only by a decision, and one comes only with its line here."""

from __future__ import annotations

import importlib

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
            "RecoverySnapshot",
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
            "send_by_value",
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
            "RankClusterResolver",
            "SlurmClusterResolver",
            "TFConfigClusterResolver",
            "UnionResolver",
        }
    ),
    "zmqdist.testing": frozenset(
        {
            "MultiProcessPoolRunner",
            "MultiProcessRunner",
            "MultiProcessRunnerResult",
            "SubprocessTimeoutError",
            "UnexpectedSubprocessExitError",
            "check_resolver",
            "create_cluster_spec",
            "create_in_process_cluster",
            "get_barrier",
            "manager",
            "run",
        }
    ),
    "zmqdist.rpc": frozenset(
        {
            "Client",
            "ClientSnapshot",
            "MethodInfo",
            "Server",
            "ServerSnapshot",
            "StatusOrResult",
            "Stream",
            "ZmqClient",
            "ZmqServer",
        }
    ),
}


def test_the_public_names_are_the_pinned_ones() -> None:
    for name, pinned in PINNED.items():
        module = importlib.import_module(name)
        assert set(module.__all__) == pinned, name
        assert len(module.__all__) == len(pinned), f"a name stands twice in __all__ of {name}"


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    for module_name, pinned in PINNED.items():
        module = importlib.import_module(module_name)
        for name in sorted(pinned):
            assert getattr(module, name).__doc__, f"{module_name}.{name} has no docstring"
            assert name in dir(module), f"{module_name}.{name} is not in dir()"

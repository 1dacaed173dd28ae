"""The names that users type are pinned: one goes only by a decision, and one comes only with its
line here."""

from __future__ import annotations

import importlib

import zmqdist as zd

PINNED: dict[str, frozenset[str]] = {
    # module -> exactly what its __all__ holds. Names of later work are added with it.
    "zmqdist": frozenset(
        {
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
            "current_actor",
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
            "ActorGroup",
            "ActorHandle",
            "ClusterCoordinator",
            "AsCompleted",
            "PerSlot",
            "PerWorkerValue",
            "PerWorkerValues",
            "RemoteValue",
            "RemoteValueStatus",
            "Submitter",
            "experimental_get_current_worker_index",
            "get_current_worker_index",
            "get_num_workers",
            "metrics",
            "send_by_value",
            "utils",
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
    "zmqdist.optimizers": frozenset(
        {"Adagrad", "Adam", "Momentum", "Optimizer", "RMSprop", "SGD", "schedules"}
    ),
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
            "Interface",
            "MethodInfo",
            "Server",
            "ServerSnapshot",
            "StatusOrResult",
            "Stream",
            "ZmqClient",
            "ZmqServer",
            "connect",
            "serve",
        }
    ),
}

LISTED = (
    *PINNED,
    *(
        f"zmqdist.{name}"
        for name in ("cluster", "errors", "nest", "collectives", "parameter_server", "tf")
    ),
)
"""The modules that users complete."""

TENSORFLOWS: frozenset[str] = frozenset(
    {
        "ClusterDef",
        "JobDef",
        "ServerDef",
        "Session",
        "cache_variable_reads",
        "check_alive",
        "connect_to_cluster",
        "connect_to_host",
    }
)
"""Names of the root that programs may go on to write, and that stand in `zmqdist.tf`."""


def test_public_names_are_pinned() -> None:
    for name, pinned in PINNED.items():
        module = importlib.import_module(name)
        assert set(module.__all__) == pinned, name
        assert len(module.__all__) == len(pinned), f"a name stands twice in __all__ of {name}"


def test_public_names_exist_with_docstring() -> None:
    for module_name in LISTED:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            assert getattr(module, name).__doc__, f"{module_name}.{name} has no docstring"


def test_completion_shows_public_names_only() -> None:
    for module_name in LISTED:
        module = importlib.import_module(module_name)
        assert dir(module) == sorted(module.__all__), module_name


def test_tensorflow_names_work_at_root() -> None:
    for name in sorted(TENSORFLOWS):
        assert getattr(zd, name) is getattr(zd.tf, name), name
        assert name not in dir(zd), name

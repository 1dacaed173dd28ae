"""A public function that gets an argument of a wrong kind names the parameter, before it sends,
starts or opens anything."""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final

import numpy as np
import pytest

import zmqdist as zd
from zmqdist import cluster, errors
from zmqdist.data import Dataset, Options

MODULES = (
    "zmqdist",
    "zmqdist.checkpoint",
    "zmqdist.cluster",
    "zmqdist.collectives",
    "zmqdist.coordinator",
    "zmqdist.data",
    "zmqdist.data.experimental",
    "zmqdist.data.service",
    "zmqdist.optimizers",
    "zmqdist.parameter_server",
    "zmqdist.partitioners",
    "zmqdist.random",
    "zmqdist.resolvers",
    "zmqdist.rpc",
    "zmqdist.testing",
)


def identity(*args: Any) -> Any:
    return args[0] if args else None


TEN = Dataset.range(10)
SPEC = {"worker": ["localhost:1"], "ps": ["localhost:2"]}
NOWHERE = "/nowhere/at/all"


class Objects:
    """An object of each class whose methods are called."""

    def __init__(self, undo: contextlib.ExitStack) -> None:
        self._enter = undo.enter_context
        for name in dir(type(self)):
            getattr(self, name)

    @cached_property
    def local_cluster(self) -> Any:
        return self._enter(zd.local_cluster(workers=1, ps=1, processes=False))

    @cached_property
    def ClusterCoordinator(self) -> Any:
        return self._enter(zd.coordinator.ClusterCoordinator(self.local_cluster))

    @cached_property
    def RemoteValue(self) -> Any:
        value = self.ClusterCoordinator.schedule(int)
        value.get()
        return value

    @cached_property
    def Executor(self) -> Any:
        return self._enter(zd.Executor(self.local_cluster))

    @cached_property
    def DispatchServer(self) -> Any:
        return self.local_cluster.dispatcher

    @cached_property
    def WorkerServer(self) -> Any:
        return self.local_cluster.servers[0]

    @cached_property
    def Server(self) -> Any:
        server = zd.Server.create_local_server()
        self._enter(contextlib.ExitStack()).callback(server.stop)
        return server

    @cached_property
    def Session(self) -> Any:
        return self._enter(zd.Session(self.Server))

    @cached_property
    def rpc_ZmqServer(self) -> Any:
        return zd.rpc.Server.create("zmq", "localhost:0")

    @cached_property
    def rpc_ZmqClient(self) -> Any:
        server = zd.rpc.Server.create("zmq", "localhost:0")
        server.register("same", identity)
        return self._enter(zd.rpc.Client.create("zmq", self._enter(server).address))

    @cached_property
    def rpc_StatusOrResult(self) -> Any:
        return self.rpc_ZmqClient.call("same", [1])

    @cached_property
    def Dataset(self) -> Any:
        return TEN

    @cached_property
    def ParameterServerStrategy(self) -> Any:
        cluster = self._enter(zd.testing.create_in_process_cluster(1, 1))
        return self._enter(zd.ParameterServerStrategy(cluster))

    @cached_property
    def Variable(self) -> Any:
        with self.ParameterServerStrategy.scope():
            return zd.Variable(np.zeros((4, 2), np.float32))

    @cached_property
    def ClusterSpec(self) -> Any:
        return zd.ClusterSpec(SPEC)

    @cached_property
    def SimpleClusterResolver(self) -> Any:
        return zd.resolvers.SimpleClusterResolver(zd.ClusterSpec(SPEC))

    @cached_property
    def Checkpoint(self) -> Any:
        return zd.checkpoint.Checkpoint(x=1)

    @cached_property
    def CheckpointManager(self) -> Any:
        return zd.checkpoint.CheckpointManager(self.Checkpoint, NOWHERE)

    @cached_property
    def MultiProcessRunner(self) -> Any:
        return zd.testing.MultiProcessRunner(identity, SPEC)

    @cached_property
    def InputContext(self) -> Any:
        return zd.parameter_server.InputContext()


VALID: Final[dict[str, Any]] = {
    # By the name of the parameter, or by function and parameter. The others keep their default.
    "address": "localhost:0",
    "args": (),
    "as_task_id": 0,
    "as_task_type": "worker",
    "axis": 0,
    "batch_size": 2,
    "bucket_batch_sizes": [1, 2],
    "bucket_boundaries": [3],
    "buffer_size": 4,
    "checkpoint": {},
    "choice_dataset": TEN,
    "class_func": identity,
    "cluster": SPEC,
    "cluster_resolver": SPEC,
    "cluster_spec": SPEC,
    "cluster_spec_or_resolver": SPEC,
    "count": 2,
    "data_service_address": "localhost:1",
    "dataset": TEN,
    "dataset_fn": TEN,
    "dataset_id": b"x",
    "datasets": [TEN, TEN],
    "device": "/job:ps/task:0",
    "device_filters": ["/job:ps"],
    "directory": NOWHERE,
    "dispatcher_address": "localhost:1",
    "dst": "localhost:0",
    "element_length_func": identity,
    "file_pattern": __file__,
    "filenames": [__file__],
    "TFRecordWriter.filename": "/dev/null",
    "record_defaults": [str],
    "fn": identity,
    "func": identity,
    "generator": identity,
    "global_batch_size": 4,
    "grace_s": 0,
    "grads_and_vars": [],
    "index": 0,
    "initial_state": 0,
    "job": "worker",
    "job_name": "worker",
    "key_func": identity,
    "map_func": identity,
    "max_shard_bytes": 10,
    "method_name": "same",
    "name": "x",
    "num_ps": 0,
    "num_shards": 2,
    "num_workers": 1,
    "options": Options(),
    "path": NOWHERE,
    "predicate": identity,
    "processing_mode": "parallel_epochs",
    "record_bytes": 1,
    "reduce_func": identity,
    "reduce_op": "sum",
    "remote_host": "localhost:1",
    "rpc_layer": "zmq",
    "scan_func": identity,
    "seed": 1,
    "serialized": b"{}",
    "server": None,
    "server_or_cluster_def": SPEC,
    "service": "localhost:1",
    "shape": (2,),
    "size": 2,
    "source": [1],
    "src": "localhost:0",
    "strategy": None,
    "tag": "x",
    "target_dist": [0.5, 0.5],
    "task": "localhost:0",
    "task_id": 0,
    "task_index": 0,
    "task_type": "worker",
    "tensors": np.arange(3),
    "times": 3,
    "trainer_id": "x",
    "transformation_func": identity,
    "value": 1.0,
    "value_fn": identity,
    "values": [],
    "variables": {},
    "worker": 0,
    "delta": np.zeros((4, 2), np.float32),
    "grad": np.zeros((4, 2), np.float32),
    "indices": np.zeros(1, np.int64),
    "sparse_delta": zd.IndexedSlices(np.ones((1, 2), np.float32), np.zeros(1, np.int64)),
    "sp_ids": [[0]],
    "sparse_ids": [[0]],
    "x": np.ones(2),
    "ParameterServerStrategy.distribute_datasets_from_function.dataset_fn": identity,
    "ParameterServerStrategy.experimental_distribute_datasets_from_function.dataset_fn": identity,
    "ShardedVariable.variables": [zd.Variable(np.zeros((4, 2), np.float32))],
    "params": zd.Variable(np.zeros((4, 2), np.float32)),
    "embedding_weights": zd.Variable(np.zeros((4, 2), np.float32)),
    "ClusterCoordinator.map.*": ([1],),
    "ClusterCoordinator.imap.*": ([1],),
    "Dataset.range.*": (3,),
    "IndexedSlices.values": np.zeros((1, 2)),
    "Variable.initial_value": np.zeros(2),
    "Variable.assign.value": np.zeros((4, 2), np.float32),
    "Variable.compare_and_set.value": np.zeros((4, 2), np.float32),
    "Variable.gather_nd.indices": np.zeros((1, 1), np.int64),
    "WorkerConfig.dispatcher_address": "localhost:1",
    "Dataset.from_generator.output_types": np.int64,
    "Dataset.from_generator.output_shapes": (),
    "Dataset.group_by_window.window_size": 2,
    "SimpleClusterResolver.cluster_spec": zd.ClusterSpec(SPEC),
}

MADE_BY_ZMQDIST: Final = {
    *(
        "ActorGroup",
        "ActorHandle",
        "ClientSnapshot",
        "MethodInfo",
        "MultiProcessRunnerResult",
        "PerReplica",
        "PerSlot",
        "PerWorkerValue",
        "PerWorkerValues",
    ),
    *(
        "Ragged",
        "Recovered",
        "Recovery",
        "RecoverySnapshot",
        "RemoteValue",
        "ReplicaContext",
        "ServerSnapshot",
        "Sparse",
    ),
    *("StatusOrResult", "Stream", "Submitter", "ValueContext"),
}
"""Classes whose objects users get and do not make."""

SECTIONS: Final = {name for name in cluster.__all__ if name.endswith(("Config", "Job"))}
"""The parts of a cluster file, which are checked when the file is read."""

FOR_ZMQDIST: Final = {
    *("Dataset", "Dataset.rewrite", "DispatchServer.wait_for", "DispatchServer.watch_members"),
    "rpc_ZmqClient.stubs",
    *(
        "RemoteValue.copied",
        "RemoteValue.release_at_end",
        "RemoteValue.settle",
        "RemoteValue.settle_at_end",
    ),
    *(f"Variable.start_{kind}" for kind in ("apply", "read", "rows", "scatter", "update")),
}
"""Constructors and methods that only zmqdist calls."""

ANYTHING: Final = {
    *(
        "delta",
        "expected",
        "grad",
        "initial_value",
        "other",
        "val",
        "value",
        "x",
    ),  # values, which the texts of errors describe
    *("keep", "lineage"),  # their truth counts, because `schedule` is called very often
    *("read_value", "use_locking"),  # TensorFlow's, without effect
}
"""Parameters that take an object of any kind."""

DUCKS: Final = {
    "Checkpoint.root": "variables are added to the structure later: `save` checks it",
    "CheckpointManager.checkpoint": "variables are added to the structure later: `save` checks it",
    "ClusterCoordinator.gather.values": "any structure with RemoteValues",
    "ClusterCoordinator.scale_workers.count": "the launcher checks it",
    "ClusterCoordinator.stream.ahead": "fn cannot be given by name; test_function_stream checks it",
    "CrossDeviceOps.group": "the operations check it",
    "CrossDeviceOps.server": "any object with the operations of a CollectiveMember",
    "KubernetesClusterResolver.override_client": "a client of the user's own class",
    "ParameterServerStrategy.apply.optimizer": "also a function or a class of the user: the ps "
    "checks it",
    "ParameterServerStrategy.experimental_distribute_dataset.dataset": "any iterable: the workers check it",
    "ParameterServerStrategy.read.variables": "any structure with variables",
    "WorkerServer.zygote": "for zmqdist",
    "check_resolver.resolver": "what is no resolver breaks the first rule that the function checks",
    "distribute.service": "checked when the transformation is applied, because the service may be "
    "started until then",
    "rpc_ZmqServer.register.max_delay_ms": "checked if there are batches",
    "rpc_ZmqClient.call.args": "the text counts the arguments",
    "rpc_ZmqClient.security": "for zmqdist",
    **{f"Variable.{method}.name": "TensorFlow's, without effect" for method in dir(zd.Variable)},
}
"""Other parameters that take any object, and why."""

SYNONYMS: Final = {
    "checkpoint_number": "step",
    **dict.fromkeys(("dst", "src"), "task"),
    **dict.fromkeys(("embedding_weights", "params"), "table"),
    **dict.fromkeys(
        ("max_run_time", "operation_timeout_in_ms", "timeout", "timeout_in_ms", "timeout_s"),
        "time-out",
    ),
    **dict.fromkeys(("sp_ids", "sparse_ids"), "ids"),
    **dict.fromkeys(("sp_weights", "sparse_weights"), "weights"),
}
"""What the texts call parameters whose names differ from one function to the next."""


def public() -> dict[str, Any]:
    """Every public class and function of the modules by its name, and the methods of the classes
    that have an object here."""
    found: dict[str, Any] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            is_class = inspect.isclass(value)
            if not callable(value) or (is_class and issubclass(value, (BaseException, enum.Enum))):
                continue
            name = f"rpc_{name}" if module is zd.rpc else name
            if name.removeprefix("rpc_") not in MADE_BY_ZMQDIST | SECTIONS:
                found[name] = value
            if is_class and hasattr(Objects, name):
                methods = [method for method in dir(value) if not method.startswith("_")]
                found |= {
                    f"{name}.{method}": value
                    for method in methods
                    if inspect.isroutine(getattr(value, method))
                }
    return {name: value for name, value in found.items() if name not in FOR_ZMQDIST}


PUBLIC: Final = public()


@pytest.fixture(scope="module")
def objects() -> Iterator[Objects]:
    with contextlib.ExitStack() as undo:
        yield Objects(undo)


def wrong_values(parameter: inspect.Parameter, valid: Any) -> list[Any]:
    annotation = str(parameter.annotation)
    wrong: list[Any] = [object()]
    if {"int", "float"} & {*annotation.split(" | ")} and "str" not in annotation:
        wrong.append("seven")
    return [*wrong, 5] if isinstance(valid, str) else wrong


@pytest.mark.shares_cluster
@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_wrong_argument_is_named(objects: Objects, name: str) -> None:
    owner, _, method = name.partition(".")
    call = getattr(getattr(objects, owner), method) if method else PUBLIC[name]
    parameters = [
        each
        for each in inspect.signature(call).parameters.values()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]

    def valid(parameter: inspect.Parameter) -> Any:
        fallback = (
            VALID.get(parameter.name) if parameter.default is parameter.empty else parameter.default
        )
        return VALID.get(f"{name}.{parameter.name}", fallback)

    faults = []
    for tried in parameters:
        if tried.name in ANYTHING or f"{name}.{tried.name}" in DUCKS:
            continue
        for wrong in wrong_values(tried, valid(tried)):
            values = {each.name: wrong if each is tried else valid(each) for each in parameters}
            items = VALID.get(f"{name}.*", ())
            by_position = [
                each.name
                for each in parameters
                if items and each.kind is each.POSITIONAL_OR_KEYWORD
            ]
            positional = [values.pop(each) for each in by_position]
            try:
                call(*positional, *items, **values)
            except (TypeError, ValueError, errors.OpError) as error:
                if not any(
                    each in str(error)
                    for each in (tried.name, SYNONYMS.get(tried.name, tried.name))
                ):
                    faults.append(f"{tried.name}={wrong!r}: {type(error).__name__}: {error}")
            else:
                faults.append(f"{tried.name}={wrong!r} was accepted")
    assert not faults, "\n".join(faults)

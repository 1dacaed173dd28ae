"""ParameterServerStrategy: variables on parameter servers, functions on workers.

What users call. Rules
    Inside `scope()` variables go to the parameter servers (shard_placement.py), cut into shards where the partitioner says so.
    A strategy has one ClusterCoordinator, made by the user or at the first `scope()`.
    It pickles as a stub, which does on a worker what belongs there: `run`, `reduce`, `gather` and the like. A stub makes no variables.
    Several strategies may use one cluster at the same time; each has variables, counters and a coordinator of its own.

Not here: finding the cluster (cluster_connection.py), what `run` does (replicas.py), sessions at the servers (sessions.py).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from zmqdist import nest, task_context
from zmqdist.cluster.devices import device_of
from zmqdist.errors import InvalidArgumentError
from zmqdist.limits import CONNECT_TIMEOUT_S
from zmqdist.scheduling.coordinator.coordinator import ClusterCoordinator
from zmqdist.training import context, distributed_dataset, per_replica, per_worker_variable, replicas
from zmqdist.training.batches import apply_all, read_all
from zmqdist.training.cluster_connection import connect
from zmqdist.training.partition import Initial, offsets_of, shards_of
from zmqdist.training.sessions import StrategySession
from zmqdist.training.shard_placement import Placed, Rule, ShardPlacement
from zmqdist.training.sharded import ShardedVariable
from zmqdist.training.strategy_coordinator import CoordinatorSlot, StrategyCoordinator
from zmqdist.training.variable_storage import RemoteStorage
from zmqdist.transport.credentials import Credentials

log = logging.getLogger("zmqdist.training")


class OnWorkers:
    """What a strategy does where functions run; the program's own strategy can do it, too, for trying things out.

    Attributes:
      session: its number, the same on all workers.
      num_replicas_in_sync: replicas on one worker; not the number of workers.
    """

    session: int
    num_replicas_in_sync: int

    def run(
        self,
        fn: Callable[..., Any],
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call `fn(*args, **kwargs)` in each replica of this worker, in its replica context.

        Args:
          options: None. TensorFlow's RunOptions are for its compilers, so any other value is refused.

        Returns:
          What it returned; of several replicas, with a PerReplica at each leaf. PerReplica among the arguments give each replica its own.

        Raises:
          InvalidArgumentError: `options` are given.
          Exception: what `fn` raises.
        """
        _refuse_options("run", options)
        self._used("run")
        return replicas.run_replicas(self, self.num_replicas_in_sync, fn, args, kwargs)

    def reduce(self, reduce_op: Any, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Bring the replicas' values together.

        Args:
          reduce_op: "SUM" or "MEAN", in any case, or a ReduceOp.
          value: what `run` returned, or any structure.
          axis: None: only across replicas; else along these axes of each value, too. Then a mean is of all elements, however many each has.

        Raises:
          ValueError: no such operation; the sum of a value that the replicas did not make.
        """
        self._used("reduce")
        return per_replica.reduce_replicas(reduce_op, value, axis, self.num_replicas_in_sync)

    def gather(self, value: Any, axis: int) -> Any:
        """The replicas' arrays one behind the other along `axis`; of one replica its value."""
        self._used("gather")
        return per_replica.gather_replicas(value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """One value for each replica, as a tuple; structures give a tuple of structures."""
        if any(isinstance(leaf, per_replica.PerReplica) for leaf in nest.flatten(value)):
            return tuple(per_replica.select(value, replica) for replica in range(self.num_replicas_in_sync))
        return (value,)

    def experimental_distribute_dataset(
        self, dataset: Any, options: Any = None
    ) -> distributed_dataset.DistributedDataset:
        """Have each batch cut into parts for the replicas of a worker: for a per-worker dataset. `options` is None, as for `run`."""
        _refuse_options("experimental_distribute_dataset", options)
        return distributed_dataset.DistributedDataset(dataset, self.num_replicas_in_sync)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[distributed_dataset.InputContext], Any], options: Any = None
    ) -> distributed_dataset.DistributedDatasetsFromFunction:
        """Have each replica take an element of its own of what `dataset_fn(InputContext)` gives: for a per-worker dataset.

        `options` is None, as for `run`.
        """
        _refuse_options("distribute_datasets_from_function", options)
        return distributed_dataset.DistributedDatasetsFromFunction(dataset_fn, self.num_replicas_in_sync)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[distributed_dataset.ValueContext], Any]
    ) -> Any:
        """`value_fn(ValueContext)` for each replica, as `run` takes it."""
        return distributed_dataset.per_replica(value_fn, self.num_replicas_in_sync)

    @property
    def extended(self) -> Extended:
        """What is rarely needed."""
        raise NotImplementedError

    def _used(self, method: str) -> None:
        """It is called; a stub has nothing to say about that."""


def _refuse_options(method: str, options: Any) -> None:
    if options is not None:
        text = f"{method} has no options here: TensorFlow's are for its compilers and accelerators. Leave `options` out, got {options!r}"
        raise InvalidArgumentError(text)


class Extended:
    """`strategy.extended`: what TensorFlow has there and programs use.

    Attributes:
      _allow_run_without_coordinator: True: no warnings about `run` outside scheduled functions; for tests.
    """

    def __init__(self, strategy: OnWorkers, workers: int, servers: int) -> None:
        self._strategy = strategy
        self._num_workers = workers
        self._num_ps = servers
        self._allow_run_without_coordinator = False

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """One for each worker."""
        return tuple(device_of("worker", index) for index in range(self._num_workers))

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """One for each parameter server."""
        return tuple(device_of("ps", index) for index in range(self._num_ps))

    @property
    def _variable_count(self) -> int:
        placement = getattr(self._strategy, "_placement", None)
        return placement.count if isinstance(placement, ShardPlacement) else 0

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """While this is open, variables go where that one is, in one piece, and are not counted. Raises ValueError for one that is cut, or
        of another strategy."""
        if getattr(getattr(colocate_with_variable, "storage", None), "session", -1) != self._strategy.session:
            raise ValueError(f"{colocate_with_variable!r} is no variable of this strategy in one piece")
        return context.colocated_with(colocate_with_variable)


class ParameterServerStrategy(OnWorkers):
    """Variables on the parameter servers of a cluster, functions on its workers.

    Args:
      cluster_resolver: a resolver, ClusterSpec or dict of jobs: workers and ps that run as `zmqdist.Server`; a `local_cluster(ps=...)`;
        None in a program that `zmqdist launch` has started.
      variable_partitioner: into how many shards a variable is cut: `zmqdist.partitioners`, or a function of shape and dtype; None: none.
      replicas_per_worker: how often `run` calls its function on a worker, in threads.
      placement: "round_robin", "least_bytes", or `fn(name, shape, dtype, loads)`, which gives the index of a ps.
      connect_timeout_s: how long to wait for the tasks.
      aggregate: "async": gradients of `apply` count as they come. "sync": those of one step are averaged, and applied once. A function
        that runs again, because its worker was lost after its gradient had left, counts twice where the first, and once in the second.
      workers_per_step: of how many, in synchronous mode; fewer than there are workers leaves out the slowest. None: as many as there are.
      recovery_s: how long who uses a variable waits when its ps was lost, for `zmqdist.checkpoint` to bring it back; 0: it is an error.

    Waits until all workers and ps are there. Close it, or use it in a with-statement.

    Attributes:
      cluster, ps_session, coordinator_slot: the connection to the cluster, the session at the parameter servers, and the place of the only
        coordinator; for the rest of the package.

    Raises:
      ValueError: a cluster that cannot be, or an argument that is none of these.
      UnavailableError: tasks did not answer within `connect_timeout_s`; it names them.
    """

    def __init__(
        self,
        cluster_resolver: Any,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        replicas_per_worker: int = 1,
        placement: str | Rule = "round_robin",
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        aggregate: str = "async",
        workers_per_step: int | None = None,
        recovery_s: float = 0.0,
    ) -> None:
        if replicas_per_worker < 1:
            raise ValueError(f"replicas_per_worker is {replicas_per_worker}, wants 1 or more")
        if aggregate not in ("async", "sync"):
            raise ValueError(f'aggregate is "async" or "sync", not {aggregate!r}')
        if workers_per_step is not None and (aggregate == "async" or workers_per_step < 1):
            raise ValueError(f'workers_per_step is {workers_per_step}: it wants 1 or more, and aggregate="sync"')
        if (
            isinstance(recovery_s, bool)
            or not isinstance(recovery_s, (int, float, np.integer, np.floating))
            or not recovery_s >= 0
        ):
            raise ValueError(f"recovery_s is {recovery_s!r}, wants seconds, 0 or more")
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise ValueError(f"variable_partitioner is a function of shape and dtype, not {variable_partitioner!r}")
        ShardPlacement(placement, 1)  # what is wrong with it is said before anybody is waited for
        self.num_replicas_in_sync = replicas_per_worker
        self.aggregate = aggregate
        self._partitioner = variable_partitioner
        self._resolver = cluster_resolver
        self.coordinator_slot = CoordinatorSlot()
        self.recoveries: list[Any] = []  # what zmqdist.checkpoint.Recovery has brought back
        self._names: dict[str, int] = {}
        self._naming = threading.Lock()
        self.cluster = connect(cluster_resolver, connect_timeout_s=connect_timeout_s)
        try:
            workers = len(self.cluster.workers)
            steps = 0 if aggregate == "async" else workers_per_step or workers
            if steps > workers:
                log.warning(
                    "a step takes the gradients of %d workers and there are %d: it waits for more, or for several functions of one",
                    steps,
                    workers,
                )
            self.ps_session = StrategySession(self.cluster.ps, self.cluster.credentials, steps, float(recovery_s))
        except BaseException:
            self.cluster.close()
            raise
        self.session = self.ps_session.number
        self._placement = ShardPlacement(placement, len(self.cluster.ps))
        self._extended = Extended(self, workers, len(self.cluster.ps))
        log.info("a strategy with %d workers and %d parameter servers", workers, len(self.cluster.ps))

    # -- the cluster ----------------------------------------------------------------------------------------------------

    @property
    def cluster_resolver(self) -> Any:
        """As it was given."""
        return self._resolver

    @property
    def target(self) -> str:
        """The dispatcher, as ClusterCoordinator takes it."""
        return self.cluster.target

    @property
    def credentials(self) -> Credentials:
        """Where the secrets of the cluster are."""
        return self.cluster.credentials

    @property
    def extended(self) -> Extended:
        """`colocate_vars_with`, `worker_devices` and the like."""
        return self._extended

    @property
    def placement(self) -> list[Placed]:
        """Every variable and shard so far, and where it is."""
        return self._placement.log

    def task_states(self) -> Any:
        """How the workers are, by index, then the ps: None, or an UnavailableError that names the task."""
        return self.cluster.task_states()

    def close(self, shutdown_cluster: bool = False) -> None:
        """Close its coordinator, drop its variables, let go of the cluster, whose workers are free for the next program. Idempotent.

        Args:
          shutdown_cluster: have workers and ps end, too, wherever they run: `Server.join` returns there. A `local_cluster` is closed.
        """
        with self.coordinator_slot.lock:
            coordinator = self.coordinator_slot.coordinator
        if coordinator is not None:
            coordinator.close()
        self.ps_session.close()
        self.cluster.close(shutdown_cluster)

    def __enter__(self) -> ParameterServerStrategy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- variables ------------------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self) -> Iterator[ParameterServerStrategy]:
        """Variables that are made inside go to the parameter servers. It nests, but not with another strategy's.

        Raises:
          RuntimeError: inside another strategy's scope.
        """
        context.check_not_in_another(self)
        self.coordinator  # noqa: B018  it is made now
        with context.in_scope(self, self._create):
            yield self

    def apply(self, optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], step: int | None = None) -> None:
        """`variable.apply(optimizer, grad)` for all of them, in one message to each parameter server, all of which are asked at once.

        Args:
          grads_and_vars: pairs of a gradient (an array, or IndexedSlices) and its variable, which may be in shards; a gradient that is
            None is left out.

        Raises: as `Variable.apply`. What belongs to one server is applied as a whole or not at all.
        """
        apply_all(optimizer, grads_and_vars, step)

    def read(self, variables: Any) -> Any:
        """The values of a structure of variables, in one message to each parameter server. Raises as `Variable.numpy`."""
        return read_all(variables)

    def _create(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """The creator of the scope: says where a variable goes, and cuts it."""
        name = self._unique(kwargs.get("name") or "Variable")
        if kwargs.pop("per_worker_variable", False):
            return per_worker_variable.create(self.coordinator, name, kwargs)
        initial = Initial.of(name, kwargs.get("initial_value"), kwargs.get("shape"), kwargs.get("dtype"))
        kwargs.update(shape=initial.shape, dtype=initial.dtype)
        beside = context.thread_state.colocated
        shards = 1 if beside is not None else shards_of(self._partitioner, initial.shape, initial.dtype)
        if shards > 1:
            return self._sharded(next_creator, name, initial, shards, kwargs)
        kwargs.update(name=name, initial_value=initial.source)
        kwargs["device"] = self._place(name, initial.shape, initial.dtype) if beside is None else beside.device
        return next_creator(**kwargs)

    def _sharded(
        self, next_creator: Callable[..., Any], name: str, initial: Initial, shards: int, kwargs: dict[str, Any]
    ) -> Any:
        initial.warn_of_size()
        offsets = offsets_of(initial.shape[0], shards)
        parts = []
        for index in range(shards):
            rows = initial.rows(offsets[index], offsets[index + 1])
            shape = (offsets[index + 1] - offsets[index], *initial.shape[1:])
            part = f"{name}/part_{index}"
            device = self._place(part, shape, initial.dtype)
            parts.append(
                next_creator(**{**kwargs, "name": part, "initial_value": rows, "shape": shape, "device": device})
            )
        return ShardedVariable(parts, name=name)

    def _place(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
        return device_of("ps", self._placement.place(name, shape, dtype))

    def make_variable(self, name: str, initial: Initial, ps: int) -> RemoteStorage:
        """Where creators end: make it there."""
        if not 0 <= ps < len(self.cluster.ps):
            raise ValueError(f"variable {name!r} is to go to ps:{ps}; there are {len(self.cluster.ps)}")
        storage = self.ps_session.create_variable(name, initial, ps)
        self._placement.placed(name, initial.shape, initial.dtype, ps)
        return storage

    def _unique(self, name: str) -> str:
        with self._naming:
            count = self._names[name] = self._names.get(name, -1) + 1
        return name if count == 0 else self._unique(f"{name}_{count}")

    def per_worker_resource(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `fn(*args, **kwargs)` makes on each worker for functions that capture it; see `create_per_worker_resource`."""
        return self.coordinator.create_per_worker_resource(fn, args, kwargs)

    @property
    def coordinator(self) -> ClusterCoordinator:
        """Its ClusterCoordinator; made now if there is none."""
        return ClusterCoordinator(self)

    def _allocate_coordinator(self) -> StrategyCoordinator:
        """What `ClusterCoordinator(strategy)` asks for."""
        return self.coordinator_slot.allocate(self)

    # -- as it is used --------------------------------------------------------------------------------------------------

    def _used(self, method: str) -> None:
        if not task_context.scheduled() and not self._extended._allow_run_without_coordinator:
            log.warning(
                "strategy.%s was invoked without ClusterCoordinator.schedule: it runs in this process, not on a worker",
                method,
            )

    def __reduce__(self) -> Any:
        return _stub, (self.session, self.num_replicas_in_sync, self._extended._num_workers, self._extended._num_ps)


class StrategyStub(OnWorkers):
    """A strategy on a worker."""

    def __init__(self, session: int, replicas_in_sync: int, workers: int, servers: int) -> None:
        self.session = session
        self.num_replicas_in_sync = replicas_in_sync
        self._extended = Extended(self, workers, servers)

    @property
    def extended(self) -> Extended:
        """As of the program's own, but for counts of variables."""
        return self._extended

    @contextmanager
    def scope(self) -> Iterator[StrategyStub]:
        """The cross-replica context; variables cannot be made in it."""
        with context.in_scope(self, lambda next_creator, **kwargs: next_creator(**kwargs)):
            yield self

    apply = ParameterServerStrategy.apply
    read = ParameterServerStrategy.read

    def __reduce__(self) -> Any:
        return _stub, (self.session, self.num_replicas_in_sync, self._extended._num_workers, self._extended._num_ps)


_stubs: weakref.WeakValueDictionary[int, StrategyStub] = weakref.WeakValueDictionary()


def _stub(session: int, replicas_in_sync: int, workers: int, servers: int) -> StrategyStub:
    """The stub of this process."""
    stub = StrategyStub(session, replicas_in_sync, workers, servers)
    return _stubs.setdefault(session, stub)

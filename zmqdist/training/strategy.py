"""ParameterServerStrategy: variables on parameter servers, functions on workers.

Rules
    Variables that are created inside `scope()` are placed on the parameter servers
    (shard_placement.py). The partitioner decides whether a variable is cut into shards.
    A strategy has one ClusterCoordinator, made by the user, by the first `scope()` or by the first
    access to `coordinator`. A strategy pickles as a stub, which functions on workers use. The stub
    has `run`, `reduce`, `gather` and the other methods of OnWorkers, but makes no variables.
    Several strategies may use one cluster at the same time. Each strategy has its own variables,
    counters and coordinator.

Not here: finding the cluster (cluster_connection.py), what `run` does (replicas.py), sessions at
the servers (sessions.py).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import numpy as np

from zmqdist import task_context
from zmqdist.clock import duration
from zmqdist.cluster.devices import device_of
from zmqdist.errors import InvalidArgumentError
from zmqdist.field_types import checked, checks_options, safe_repr
from zmqdist.html_repr import HtmlRows, html_repr
from zmqdist.limits import CONNECT_TIMEOUT_S
from zmqdist.scheduling.coordinator.coordinator import ClusterCoordinator
from zmqdist.training import (
    context,
    distributed_dataset,
    per_replica,
    per_worker_variable,
    replicas,
)
from zmqdist.training.batches import apply_all, read_all
from zmqdist.training.cluster_connection import ClusterConnection, connect
from zmqdist.training.partition import Initial, offsets_of, shards_of
from zmqdist.training.sessions import StrategySession
from zmqdist.training.shard_placement import Placed, Rule, ShardPlacement
from zmqdist.training.sharded import ShardedVariable
from zmqdist.training.strategy_coordinator import CoordinatorSlot, StrategyCoordinator

log = logging.getLogger("zmqdist.training")


@checked
class OnWorkers:
    """The methods of a strategy that functions on workers use. The program may call them as well,
    to try out a function.

    Attributes:
      session: number of the strategy, the same on all workers.
      num_replicas_in_sync: number of replicas on one worker, which is not the number of workers.
      extended: settings and figures that programs rarely need, as in TensorFlow:
        `colocate_vars_with`, `worker_devices` and `parameter_devices`.
    """

    session: int
    num_replicas_in_sync: int
    extended: Extended

    def run(
        self,
        fn: Callable[..., Any],
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call `fn(*args, **kwargs)` in each replica of this worker, in its replica context. Blocks
        until all replicas have ended.

        >>> strategy.run(lambda x: x + 1, args=(1,))
        2

        Args:
          args, kwargs: arguments of `fn`. They may contain a PerReplica at any leaf of a structure.
            Each replica then gets its own value of the PerReplica.
          options: must be None, because TensorFlow's RunOptions are for its compilers.

        Returns:
          With one replica, the result of `fn`. With several replicas, a structure of the form of
          the results, with a PerReplica at each leaf. A leaf that is None in all replicas stays
          None.

        Raises:
          InvalidArgumentError: `options` is not None.
          TypeError, ValueError: the replicas' results differ in form.
          Exception: the error that `fn` has raised.
        """
        _refuse_options("run", options)
        self._used("run")
        return replicas.run_replicas(self, self.num_replicas_in_sync, fn, args, kwargs)

    def reduce(self, reduce_op: Any, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Combine the values of the replicas of this worker.

        >>> int(strategy.reduce("sum", strategy.run(lambda: 3), axis=None))
        3

        Args:
          reduce_op: "SUM" or "MEAN", in upper or lower case, or a ReduceOp.
          value: the result of `run`, or any structure.
          axis: the axes of each value along which elements are combined, too. A mean is then the
            mean of all elements, even if the replicas have different numbers of elements. None
            combines across replicas only.

        Raises:
          ValueError: `reduce_op` is unknown, or there are several replicas and the sum is requested
            of a leaf that is neither a PerReplica nor 0. Such a leaf is one value for all replicas.
        """
        self._used("reduce")
        return per_replica.reduce_replicas(reduce_op, value, axis, self.num_replicas_in_sync)

    def gather(self, value: Any, axis: int) -> Any:
        """Return the replicas' arrays concatenated along `axis`. With one replica, return its value
        unchanged.

        >>> strategy.gather(strategy.run(lambda: np.arange(2)), axis=0)
        array([0, 1])
        """
        self._used("gather")
        return per_replica.gather_replicas(value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple with the value of each replica. From a structure with PerReplica leaves,
        the tuple has one structure for each replica. For a value without PerReplica leaves, return
        a tuple of this value only.

        >>> strategy.experimental_local_results(strategy.run(lambda: 3))
        (3,)
        """
        if per_replica.select(value, 0) is value:
            return (value,)
        return tuple(
            per_replica.select(value, replica) for replica in range(self.num_replicas_in_sync)
        )

    def experimental_distribute_dataset(
        self, dataset: Any, options: Any = None
    ) -> distributed_dataset.DistributedDataset:
        """Return a dataset for `create_per_worker_dataset` that splits each batch of `dataset`
        between the replicas of a worker. `options` must be None.

        >>> batches = strategy.experimental_distribute_dataset(Dataset.range(4).batch(2))
        >>> per_worker = coordinator.create_per_worker_dataset(batches)
        >>> coordinator.submit(next, iter(per_worker)).result()
        array([0, 1])
        """
        _refuse_options("experimental_distribute_dataset", options)
        return distributed_dataset.DistributedDataset(dataset, self.num_replicas_in_sync)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[distributed_dataset.InputContext], Any], options: Any = None
    ) -> distributed_dataset.DistributedDatasetsFromFunction:
        """Return a dataset for `create_per_worker_dataset` in which each replica of a worker gets
        an element of its own. The elements are those of the dataset that `dataset_fn(InputContext)`
        returns. `options` must be None.

        >>> numbers = strategy.distribute_datasets_from_function(lambda context: Dataset.range(2))
        >>> per_worker = coordinator.create_per_worker_dataset(numbers)
        >>> int(coordinator.submit(next, iter(per_worker)).result())
        0
        """
        _refuse_options("distribute_datasets_from_function", options)
        return distributed_dataset.DistributedDatasetsFromFunction(
            dataset_fn, self.num_replicas_in_sync
        )

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[distributed_dataset.ValueContext], Any]
    ) -> Any:
        """Call `value_fn(ValueContext)` once for each replica. Return the results as a value that
        can be passed to `run`.

        >>> values = strategy.experimental_distribute_values_from_function(lambda context: 7)
        >>> strategy.run(lambda x: x + 1, args=(values,))
        8
        """
        return distributed_dataset.per_replica(value_fn, self.num_replicas_in_sync)

    def _used(self, method: str) -> None:
        """Check where `method` was called. The program's strategy logs a warning outside scheduled
        functions. A stub does nothing."""

    def __reduce__(self) -> Any:
        return _stub, (
            self.session,
            self.num_replicas_in_sync,
            self.extended._num_workers,
            self.extended._num_ps,
        )


def _refuse_options(method: str, options: Any) -> None:
    if options is not None:
        raise InvalidArgumentError(
            f"{method} has no options: those of TensorFlow are for its compilers and "
            f"accelerators. Leave `options` out, got {options!r}"
        )


class Extended:
    """`strategy.extended`: the part of TensorFlow's `extended` that programs use.

    Attributes:
      _allow_run_without_coordinator: if True, `run` outside scheduled functions logs no warning.
        Tests set this.
    """

    def __init__(self, strategy: OnWorkers, workers: int, servers: int) -> None:
        self._strategy = strategy
        self._num_workers = workers
        self._num_ps = servers
        self._allow_run_without_coordinator = False

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """One device name for each worker that the cluster had when the strategy was made."""
        return tuple(device_of("worker", index) for index in range(self._num_workers))

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """One device name for each parameter server."""
        return tuple(device_of("ps", index) for index in range(self._num_ps))

    @property
    def _variable_count(self) -> int:
        placement = getattr(self._strategy, "shard_placement", None)
        return placement.count if isinstance(placement, ShardPlacement) else 0

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """Return a context manager. While it is open, new variables are placed on the server of
        `colocate_with_variable`, in one piece, and the placement rule does not count them. Raises
        ValueError if the variable is sharded, or belongs to another strategy.
        """
        if (
            getattr(getattr(colocate_with_variable, "storage", None), "session", -1)
            != self._strategy.session
        ):
            raise ValueError(
                f"{colocate_with_variable!r} is no variable of this strategy, or it is sharded: "
                f"pass an unsharded variable, or a shard"
            )
        return context.entered(colocated=colocate_with_variable)


@checked
class ParameterServerStrategy(OnWorkers):
    """Variables on the parameter servers (ps) of a cluster, functions on its workers.

    >>> with strategy.scope():  # strategy = zd.ParameterServerStrategy(cluster)
    ...     weights = zd.Variable(np.zeros(2), name="weights")
    >>> weights.apply(zd.optimizers.SGD(0.5), np.ones(2))
    >>> weights.numpy()
    array([-0.5, -0.5])

    The constructor blocks until all workers and ps have answered. Close a strategy, or use it in a
    with-statement.

    Args:
      cluster_resolver: a resolver, ClusterSpec or dict of jobs, whose workers and ps run as
        `zmqdist.Server`; a `local_cluster(ps=...)`; or None in a program that `zmqdist launch` has
        started.
      variable_partitioner: one of `zmqdist.partitioners`, or another function of shape and dtype,
        which decides into how many shards a variable is cut. None means that variables are not cut.
      replicas_per_worker: number of replicas in which `run` calls its function on a worker, each in
        a thread.
      placement: "round_robin", "least_bytes", or `fn(name, shape, dtype, loads)`, which returns the
        index of a ps.
      timeout: how long to wait for the tasks, in seconds.
      aggregate: with "async", the ps apply each gradient of `apply` on arrival. With "sync", the ps
        average the gradients of a step, and apply the mean once. If a worker is lost after it has
        sent a gradient, its function runs again and sends another gradient. Then both gradients
        count with "async", and only one of them counts with "sync", or with `schedule(once=True)`.
      workers_per_step: number of gradients in a synchronous step. If it is below the number of
        workers, a step does not wait for the slowest workers. None means the number of workers.
      recovery_s: how long, in seconds, an access to a variable waits after its ps was lost, so that
        `zmqdist.checkpoint.Recovery` can restore the variable. With 0 the access fails at once if
        the host refuses the connection, otherwise after PS_PATIENCE_S.

    Attributes:
      cluster, ps_session, coordinator_slot, shard_placement: the connection to the cluster, the
        session at the parameter servers, the holder of the only coordinator, and the choice of a
        ps for each variable. Only zmqdist itself uses these attributes.
      target: address of the dispatcher, in the form that ClusterCoordinator takes.
      credentials: the places where the processes of the cluster find the cluster's secrets.
      recoveries: list with a `zmqdist.checkpoint.Recovered` for each recovery of a ps.

    Raises:
      ValueError: the cluster lacks workers or ps, or an argument is out of range.
      UnavailableError: tasks did not answer within `timeout`. The error text names them.
      AlreadyExistsError: a worker works for another program.
      OpError: keys are missing, a secret is refused, a ps is another task, or the dispatcher's port
        cannot be bound.
    """

    @checks_options("ParameterServerStrategy()")
    def __init__(
        self,
        cluster_resolver: Any,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        replicas_per_worker: int = 1,
        placement: str | Rule = "round_robin",
        timeout: float = CONNECT_TIMEOUT_S,
        aggregate: str = "async",
        workers_per_step: int | None = None,
        recovery_s: float = 0.0,
    ) -> None:
        if replicas_per_worker < 1:
            raise ValueError(f"replicas_per_worker is {replicas_per_worker}, wants 1 or more")
        if aggregate not in ("async", "sync"):
            raise ValueError(f'aggregate is "async" or "sync", not {aggregate!r}')
        if workers_per_step is not None and (aggregate == "async" or workers_per_step < 1):
            raise ValueError(
                f'workers_per_step is {workers_per_step}: it wants 1 or more, and aggregate="sync"'
            )
        recovery_s = duration("recovery_s", recovery_s)
        # Check `placement` before the wait for the cluster, so that a bad value raises at once.
        ShardPlacement(placement, 1)
        self.num_replicas_in_sync = replicas_per_worker
        self.aggregate = aggregate
        self._partitioner = variable_partitioner
        self.cluster_resolver = cluster_resolver
        # a local_cluster that closes ends the work of coordinators and Executors of this strategy
        self._coordinators = getattr(cluster_resolver, "_coordinators", None)
        self._executors = getattr(cluster_resolver, "_executors", None)
        self.coordinator_slot = CoordinatorSlot()
        # one Recovered for each recovery of a ps by zmqdist.checkpoint.Recovery
        self.recoveries: list[Any] = []
        self._names: dict[str, int] = {}
        self._naming = threading.Lock()
        self.cluster = connect(cluster_resolver, timeout=timeout)
        try:
            workers = len(self.cluster.workers)
            steps = 0 if aggregate == "async" else workers_per_step or workers
            if steps > workers:
                log.warning(
                    "a step takes the gradients of %d workers, but there are %d: it ends only if "
                    "workers send several gradients for it, "
                    "or more workers join",
                    steps,
                    workers,
                )
            self.ps_session = StrategySession(
                self.cluster.ps, self.cluster.credentials, steps, recovery_s
            )
            for ps, ps_client in enumerate(self.ps_session.clients):
                ps_client.ask_when_lost(partial(_why_gone, weakref.ref(self.cluster), ps))
        except BaseException:
            self.cluster.close()
            raise
        self.session = self.ps_session.number
        self.target = self.cluster.target
        self.credentials = self.cluster.credentials
        self.shard_placement = ShardPlacement(placement, len(self.cluster.ps))
        self.extended = Extended(self, workers, len(self.cluster.ps))
        log.info(
            "a strategy with %d workers and %d parameter servers", workers, len(self.cluster.ps)
        )

    # -- the cluster -------------------------------------------------------------------------------

    @property
    def placement(self) -> list[Placed]:
        """Every variable and shard made so far, in the order of creation, with the index of its
        ps.
        """
        return self.shard_placement.log

    def task_states(self) -> Any:
        """Return a list with the state of each worker by index, then of each ps. The state of a
        live task is None. The state of any other task is an UnavailableError that names the task.
        Blocks for up to a few seconds if a task does not answer.

        >>> strategy.task_states()
        [None, None, None, None]
        """
        return self.cluster.task_states()

    @safe_repr
    def __repr__(self) -> str:
        return f"of {self.cluster.target}, workers={len(self.cluster.workers)}, ps={len(self.cluster.ps)}"

    @html_repr
    def _repr_html_(self) -> HtmlRows:
        return [
            ("dispatcher", self.cluster.target),
            ("workers", ", ".join(map(str, self.cluster.workers))),
            ("parameter servers", ", ".join(map(str, self.cluster.ps))),
        ]

    def close(self, shutdown_cluster: bool = False) -> None:
        """Close the coordinator, drop the variables, and release the cluster, so that another
        program can use the workers. A second call does nothing.

        >>> with zd.local_cluster(workers=1, ps=1, processes=False) as other:
        ...     zd.ParameterServerStrategy(other).close()

        Args:
          shutdown_cluster: also stop the servers of workers and ps, wherever they run, so that
            their `Server.join` returns. A `local_cluster` is closed. The launcher of `zmqdist
            launch` stops the workers when this program ends.
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

    # -- variables ---------------------------------------------------------------------------------

    @contextmanager
    def scope(self) -> Iterator[ParameterServerStrategy]:
        """Return a context manager inside which new variables are placed on the parameter servers.
        Scopes of one strategy nest, but scopes of different strategies do not.

        >>> with strategy.scope():
        ...     bias = zd.Variable(0.0, name="bias")
        >>> bias.task in ("ps:0", "ps:1")
        True

        Raises:
          RuntimeError: inside another strategy's scope or `run`.
          FailedPreconditionError: the strategy was closed.
        """
        context.check_one_strategy(self)
        self.coordinator  # noqa: B018  makes the coordinator
        with context.in_scope(self, self._create):
            yield self

    def apply(
        self, optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], step: int | None = None
    ) -> None:
        """Apply gradients to several variables. This has the effect of `variable.apply(optimizer,
        grad)` for each pair, but sends only one message to each parameter server. Blocks until all
        servers have replied.

        >>> with strategy.scope():
        ...     a, b = zd.Variable(1.0), zd.Variable(2.0)
        >>> strategy.apply(zd.optimizers.SGD(0.5), [(1.0, a), (1.0, b)])
        >>> float(a.numpy()), float(b.numpy())
        (0.5, 1.5)

        Args:
          grads_and_vars: pairs of a gradient (an array, or IndexedSlices) and its variable, which
            may be sharded. A pair whose gradient is None is skipped.
          step: in synchronous mode, the number of the step that the gradients belong to.

        Raises: as `Variable.apply`; TypeError if a pair has no variable; InvalidArgumentError if a
          variable occurs twice. A server applies all of its updates or none.
        """
        apply_all(optimizer, grads_and_vars, step)

    def read(self, variables: Any) -> Any:
        """Return the structure `variables` with each variable replaced by its value. This sends one
        message to each parameter server that has some of the variables. Raises as `Variable.numpy`.

        >>> with strategy.scope():
        ...     a, b = zd.Variable([1, 2]), zd.Variable([3])
        >>> strategy.read({"a": a, "b": b})
        {'a': array([1, 2]), 'b': array([3])}
        """
        return read_all(variables)

    def _create(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """Choose the parameter server of a new variable, and cut the variable into shards if the
        partitioner returns more than one. `scope` enters this method as a creator.
        """
        name = self._unique(kwargs.get("name") or "Variable")
        if kwargs.pop("per_worker_variable", False):
            return per_worker_variable.create(self.coordinator, name, kwargs)
        initial = Initial.of(
            name, kwargs.get("initial_value"), kwargs.get("shape"), kwargs.get("dtype")
        )
        kwargs.update(shape=initial.shape, dtype=initial.dtype)
        beside = context.thread_state.colocated
        shards = (
            1 if beside is not None else shards_of(self._partitioner, initial.shape, initial.dtype)
        )
        if shards > 1:
            return self._sharded(next_creator, name, initial, shards, kwargs)
        kwargs.update(name=name, initial_value=initial.source)
        kwargs["device"] = (
            self._ps_device(name, initial.shape, initial.dtype) if beside is None else beside.device
        )
        return next_creator(**kwargs)

    def _sharded(
        self,
        next_creator: Callable[..., Any],
        name: str,
        initial: Initial,
        shards: int,
        kwargs: dict[str, Any],
    ) -> Any:
        initial.warn_of_size()
        offsets = offsets_of(initial.shape[0], shards)
        parts = []
        for index in range(shards):
            rows = initial.rows(offsets[index], offsets[index + 1])
            shape = (offsets[index + 1] - offsets[index], *initial.shape[1:])
            part = f"{name}/part_{index}"
            device = self._ps_device(part, shape, initial.dtype)
            parts.append(
                next_creator(
                    **{
                        **kwargs,
                        "name": part,
                        "initial_value": rows,
                        "shape": shape,
                        "device": device,
                    }
                )
            )
        return ShardedVariable(parts, name=name)

    def _ps_device(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
        return device_of("ps", self.shard_placement.place(name, shape, dtype))

    def _unique(self, name: str) -> str:
        with self._naming:
            count = self._names[name] = self._names.get(name, -1) + 1
        return name if count == 0 else self._unique(f"{name}_{count}")

    def per_worker_resource(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Have each worker build a resource `fn(*args, **kwargs)`, as `create_per_worker_resource`
        does. A function that captures the result gets the resource of the worker that runs it.

        >>> lists = strategy.per_worker_resource(list, "ab")
        >>> coordinator.submit(len, lists).result()
        2
        """
        return self.coordinator.create_per_worker_resource(fn, args, kwargs)

    @property
    def coordinator(self) -> StrategyCoordinator:
        """The strategy's ClusterCoordinator. It is made at the first access."""
        return cast(StrategyCoordinator, ClusterCoordinator(self))

    def _allocate_coordinator(self) -> StrategyCoordinator:
        """Return the object that `ClusterCoordinator(strategy)` returns.
        `ClusterCoordinator.__new__` calls this method."""
        return self.coordinator_slot.allocate(self)

    # -- on workers --------------------------------------------------------------------------------

    def _used(self, method: str) -> None:
        if not task_context.scheduled() and not self.extended._allow_run_without_coordinator:
            log.warning(
                "strategy.%s was invoked without ClusterCoordinator.schedule: it runs in this "
                "process, not on a worker",
                method,
            )


class StrategyStub(OnWorkers):
    """The object that a strategy becomes when it is unpickled on a worker."""

    def __init__(self, session: int, replicas_in_sync: int, workers: int, servers: int) -> None:
        self.session = session
        self.num_replicas_in_sync = replicas_in_sync
        self.extended = Extended(self, workers, servers)

    @contextmanager
    def scope(self) -> Iterator[StrategyStub]:
        """Return a context manager that enters the cross-replica context. No variables can be made
        inside it."""
        with context.in_scope(self, lambda next_creator, **kwargs: next_creator(**kwargs)):
            yield self

    apply = ParameterServerStrategy.apply
    read = ParameterServerStrategy.read


_stubs: weakref.WeakValueDictionary[int, StrategyStub] = weakref.WeakValueDictionary()


def _stub(session: int, replicas_in_sync: int, workers: int, servers: int) -> StrategyStub:
    """Return this process's stub of the strategy with this session number. Make the stub if the
    process does not have it."""
    return _stubs.setdefault(session, StrategyStub(session, replicas_in_sync, workers, servers))


def _why_gone(cluster: weakref.ref[ClusterConnection], ps: int) -> str:
    # the clients of parameter servers, which outlive a strategy, must not keep its cluster open
    alive = cluster()
    return "" if alive is None else alive.why_gone(ps)

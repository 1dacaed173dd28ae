"""The coordinator of a strategy.

`ClusterCoordinator(strategy)` returns a StrategyCoordinator. It schedules as any other
ClusterCoordinator (scheduling/coordinator/coordinator.py), with these additional rules.
    A strategy has one coordinator. Every `ClusterCoordinator(strategy)` returns this object, until
    it is closed. A call with other options than those with which the coordinator was created raises
    an error.
    Inside another strategy's scope no function can be scheduled.
    A function that is scheduled inside `cache_variable_reads()` runs inside such a scope on the
    worker.
    Workers are added and removed by the strategy's connection (cluster_connection.py), which
    invites, starts or dismisses them. The coordinator pickles as a stub that has the strategy and
    schedules nothing.
    When a parameter server is lost, the round that is unfinished at that moment fails, even if its
    functions do not use the server. Each loss fails one round only.
    Each function that is scheduled with `once=True` has a key. By this key the parameter servers
    recognize a repeated run of the function, and skip the updates that an earlier run has made.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from typing import Any, NamedTuple, NoReturn

from zmqdist import task_context
from zmqdist.errors import InvalidArgumentError, PSUnavailableError
from zmqdist.limits import GRACE_S
from zmqdist.scheduling.coordinator.coordinator import ClusterCoordinator
from zmqdist.scheduling.coordinator.machine import ROUND
from zmqdist.scheduling.coordinator.options import worker_name
from zmqdist.scheduling.coordinator.remote_value import RemoteValue
from zmqdist.scheduling.coordinator.submitter import FunctionSnapshot
from zmqdist.training import context, read_cache


class CoordinatorSlot:
    """Holds the only coordinator of a strategy.

    Attributes:
      lock: protects `coordinator`. A thread holds it while it makes or replaces the coordinator.
      coordinator: the coordinator; None until the first coordinator is made.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.coordinator: StrategyCoordinator | None = None

    def allocate(self, strategy: Any) -> StrategyCoordinator:
        """Return the object for `ClusterCoordinator(strategy)`. This is the existing coordinator,
        or a new coordinator if there was none before or it was closed.

        Raises:
          FailedPreconditionError: the strategy was closed.
        """
        with self.lock:
            coordinator = self.coordinator
            if coordinator is None or (coordinator._initialized and coordinator._runtime.closed):
                strategy.ps_session.check_open()
                coordinator = self.coordinator = object.__new__(StrategyCoordinator)
            return coordinator


class StrategyCoordinator(ClusterCoordinator):
    """The ClusterCoordinator of a ParameterServerStrategy."""

    _initialized = False
    _options: Mapping[str, Any] = {}

    def __init__(self, strategy: Any, **options: Any) -> None:
        with strategy.coordinator_slot.lock:
            if self._initialized:
                # `ClusterCoordinator(strategy)` was called again, and returns the same coordinator
                # unless the options differ.
                if options and options != self._options:
                    raise InvalidArgumentError(
                        f"the strategy already has its coordinator, made with "
                        f"{self._options or 'no options'}, not with {options}"
                    )
                return
            self._options = options
            try:
                super().__init__(strategy, **options)
            except BaseException:
                strategy.coordinator_slot.coordinator = None
                raise
            strategy.ps_session.add_coordinator(self._runtime)
            self._onces = itertools.count(1)
            self._raised_losses: set[str] = set()
            lost = weakref.WeakMethod(self._lost)
            strategy.ps_session.watch(
                lambda error: (report := lost()) is not None and report(error)
            )
            self._initialized = True

    @property
    def strategy(self) -> Any:
        """The strategy of this coordinator."""
        return self._scheduled_on

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        once: bool | None = None,
        **how: Any,
    ) -> RemoteValue:
        """Schedule a function, as `ClusterCoordinator.schedule` does. Raises RuntimeError inside
        another strategy's scope.

        Args:
          once: if True, each update of the function takes effect once, even if the function runs
            again after a worker's crash or because of `retries`. If the n-th update of a variable
            in the function was made in an earlier run, the parameter server skips the update and
            repeats its earlier reply. Each server remembers the last 65,536 of these updates. Reads
            return current values in each run. None means True in synchronous mode, where a gradient
            that arrived twice would take the place of another worker's gradient; otherwise it means
            False.
        """
        marked: Any = fn if once is None or not callable(fn) else _Chosen(fn, once)
        return super().schedule(marked, args, kwargs, **how)

    def _schedule(self, fn: Any, args: tuple[Any, ...], *how: Any) -> RemoteValue:
        if context.thread_state.scopes:
            context.check_one_strategy(self._scheduled_on)
        fn, once = fn if isinstance(fn, _Chosen) else (fn, self._is_once(None))
        if callable(fn):
            if once:
                args = f"{self._runtime.machine.coordinator:x}-{next(self._onces)}", *args
            if not isinstance(fn, FunctionSnapshot):
                fn = self._wrapped(fn, once)
        return super()._schedule(fn, args, *how)

    def _snapshot_of(self, fn: Callable[..., Any]) -> FunctionSnapshot:
        return super()._snapshot_of(self._wrapped(fn, self._is_once(None)) if callable(fn) else fn)

    def _is_once(self, once: bool | None) -> bool:
        return self.strategy.aggregate == "sync" if once is None else once

    def _wrapped(self, fn: Callable[..., Any], once: bool) -> Callable[..., Any]:
        fn = read_cache.with_caching(fn)
        return _Once(fn) if once else fn

    def _lost(self, error: PSUnavailableError) -> None:
        runtime = self._runtime
        with runtime.lock:
            # `join` may have raised this loss already as the error of a function. Then the loss
            # must not fail the next round, too.
            if (
                error.address not in self._raised_losses
                and runtime.progress.scheduled > runtime.progress.resolved
            ):
                runtime.failures.add(ROUND, partial(copy, error))
                runtime.changed.notify_all()

    def _end_round(self, until: float | None = None, timeout: float | None = None) -> None:
        try:
            super()._end_round(until, timeout)
        except Exception as error:
            self._raised_losses.update(
                failure.address
                for failure in (error, *getattr(error, "failures", ()))
                if isinstance(failure, PSUnavailableError)
            )
            raise

    def add_worker(self, address: str = "", index: int | None = None) -> int:
        """Add a task as a worker of this program. The worker builds the per-worker values before it
        gets work. This method does not wait for the task, except in a `local_cluster`, which starts
        the task.

        Args:
          address: "host:port" of a `zmqdist.Server` that runs or will run. With "" a
            `local_cluster` starts a process.
          index: index of the new worker. The index of a removed or lost worker may be reused. None
            means the highest index so far + 1.

        Returns:
          The index.

        Raises:
          ValueError, InvalidArgumentError: `address` or `index` is malformed, or this kind of
            cluster does not accept it.
          FailedPreconditionError: under `zmqdist launch`, where workers join by themselves (the
            text says how), or this coordinator was closed.
        """
        self._runtime.check_open()
        return int(self.strategy.cluster.add_worker(address, index))

    def remove_worker(
        self, worker: int | str, grace_s: float = GRACE_S, *, force: bool = False
    ) -> None:
        """Remove a worker, as `ClusterCoordinator.remove_worker` does. An invited task can then
        work for another program.

        Raises:
          ValueError: there is no such worker.
          DrainRefusedError: values or work would be lost, and `force` is False. The error has their
            names.
          UnavailableError: the dispatcher does not answer.
        """
        self.strategy.cluster.remove_worker(
            int(worker_name(worker).rpartition(":")[2]), grace_s, force=force
        )

    def close(self, shutdown_cluster: bool = False) -> None:
        """Close the coordinator, as `ClusterCoordinator.close` does.

        Args:
          shutdown_cluster: also close the strategy, and stop workers and ps, as
            `ParameterServerStrategy.close` does with this argument.
        """
        super().close()
        if shutdown_cluster:
            self.strategy.close(shutdown_cluster=True)

    def __reduce__(self) -> Any:
        return CoordinatorStub, (self._scheduled_on,)


class _Chosen(NamedTuple):
    """A function for which the program has chosen `once`."""

    fn: Callable[..., Any]
    once: bool


class _Once(read_cache.WrappedFunction):
    """A callable that takes an update key and the arguments of the user's function, and calls the
    function in a context with this key. It has the module and the name of the function."""

    def __call__(self, key: str, /, *args: Any, **kwargs: Any) -> Any:
        with task_context.update_key(key):
            return self._fn(*args, **kwargs)


class CoordinatorStub:
    """The object that a strategy's coordinator becomes when it is unpickled on a worker. All of its
    methods raise RuntimeError.

    Attributes:
      strategy: the stub of the strategy.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "this is a worker: only the program that made the ClusterCoordinator can schedule, "
            "join or fetch with it"
        )

    schedule = submit = options = run = map = join = done = fetch = gather = wait = as_completed = (
        _refuse
    )
    cancel_all = close = _refuse
    create_per_worker_dataset = create_per_worker_resource = add_worker = remove_worker = _refuse

    def __reduce__(self) -> Any:
        return CoordinatorStub, (self.strategy,)

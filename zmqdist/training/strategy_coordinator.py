"""The coordinator of a strategy: the one that there is for it, whoever asks first.

`ClusterCoordinator(strategy)` gives this class (scheduling/coordinator/coordinator.py); it schedules as any other, but for these rules
    There is one for a strategy. The second construction gives the first object; options that differ from those of the first are refused.
    Nothing is scheduled for one strategy inside another's scope.
    A function that is scheduled inside `cache_variable_reads()` runs inside one.
    Who works for it is the strategy's to say: workers that are added or removed are invited, started or dismissed by cluster_connection.py.
    It pickles as a stub that knows its strategy and schedules nothing.
    The loss of a parameter server fails the round that is unfinished then, whatever its functions do, and each loss one round.
    A function that is scheduled with `once=True` is known by a key to the parameter servers: they pass over what it did in an earlier run.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from typing import Any, NoReturn, Protocol

from zmqdist import task_context
from zmqdist.errors import InvalidArgumentError, PSUnavailableError
from zmqdist.limits import GRACE_S
from zmqdist.scheduling.coordinator.coordinator import ClusterCoordinator, worker_name
from zmqdist.scheduling.coordinator.function_snapshot import FunctionSnapshot
from zmqdist.scheduling.coordinator.machine import ROUND
from zmqdist.scheduling.coordinator.remote_value import RemoteValue
from zmqdist.training import context, read_cache
from zmqdist.training.cluster_connection import ClusterConnection
from zmqdist.training.failure_watch import watch
from zmqdist.training.sessions import StrategySession


class CoordinatorSlot:
    """Where a strategy keeps its only coordinator.

    Attributes:
      lock: held by whoever makes or replaces it.
      coordinator: None before the first was made.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.coordinator: StrategyCoordinator | None = None

    def allocate(self, strategy: CoordinatedStrategy) -> StrategyCoordinator:
        """The object for `ClusterCoordinator(strategy)`; one that was made before, and not closed.

        Raises:
          FailedPreconditionError: the strategy was closed.
        """
        with self.lock:
            known = self.coordinator
            if known is None or (known._initialized and known._runtime.closed):
                strategy.ps_session.check_open()
                known = self.coordinator = object.__new__(StrategyCoordinator)
            return known


class CoordinatedStrategy(Protocol):
    """As much of a ParameterServerStrategy as its coordinator needs; see there."""

    @property
    def session(self) -> int: ...

    @property
    def aggregate(self) -> str: ...

    @property
    def coordinator_slot(self) -> CoordinatorSlot: ...

    @property
    def ps_session(self) -> StrategySession: ...

    @property
    def cluster(self) -> ClusterConnection: ...

    def close(self, shutdown_cluster: bool = False) -> None: ...


class StrategyCoordinator(ClusterCoordinator):
    """Of one strategy; see ClusterCoordinator."""

    _initialized = False
    _options: Mapping[str, Any] = {}

    def __init__(self, strategy: CoordinatedStrategy, **options: Any) -> None:
        with strategy.coordinator_slot.lock:
            if self._initialized:
                if options and options != self._options:
                    text = f"the strategy has its coordinator already, made with {self._options or 'no options'}: not with {options}"
                    raise InvalidArgumentError(text)
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
            watch(strategy.ps_session, lambda error: (found := lost()) is not None and found(error))
            self._initialized = True

    @property
    def strategy(self) -> CoordinatedStrategy:
        """That it was made for."""
        strategy: CoordinatedStrategy = self._scheduled_on
        return strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        once: bool | None = None,
        **how: Any,
    ) -> RemoteValue:
        """As of ClusterCoordinator; RuntimeError inside another strategy's scope.

        Args:
          once: if the function has to be run again, because its worker died or for `retries`, the parameter servers pass over those updates
            that it has made already, and answer what they answered then: the n-th of a variable is the same each time. They remember the
            last 65,536 of a strategy. What is read is as it is now. None: only in synchronous mode, where a gradient that came twice would
            stand for one of another worker.
        """
        if context.thread_state.scopes:
            context.check_not_in_another(self._scheduled_on)
        if callable(fn):
            once = self._is_once(once)
            if once:
                args = f"{self._runtime.number:x}-{next(self._onces)}", *(() if args is None else args)
            if not isinstance(fn, FunctionSnapshot):
                fn = self._wrapped(fn, once)
        return super().schedule(fn, args, kwargs, **how)

    def _taken(self, fn: Callable[..., Any]) -> FunctionSnapshot:
        return super()._taken(self._wrapped(fn, self._is_once(None)) if callable(fn) else fn)

    def _is_once(self, once: bool | None) -> bool:
        return self.strategy.aggregate == "sync" if once is None else once

    def _wrapped(self, fn: Callable[..., Any], once: bool) -> Callable[..., Any]:
        fn = read_cache.with_caching(fn)
        return _Once(fn) if once else fn

    def _lost(self, error: PSUnavailableError) -> None:
        runtime = self._runtime
        with runtime.lock:
            if error.address not in self._raised_losses and runtime.scheduled > runtime.resolved:
                runtime.failures.add(ROUND, partial(copy, error))
                runtime.changed.notify_all()

    def _end_round(self, until: float | None = None, timeout: float | None = None) -> None:
        try:
            super()._end_round(until, timeout)
        except Exception as error:
            self._raised_losses.update(
                each.address
                for each in (error, *getattr(error, "failures", ()))
                if isinstance(each, PSUnavailableError)
            )
            raise

    def add_worker(self, address: str = "", index: int | None = None) -> int:
        """Have one more worker work for this program from now on: what was made per worker is built there before it takes work.

        Args:
          address: "host:port" of a `zmqdist.Server` that runs or will run; "" has a `local_cluster` start a process.
          index: which worker it becomes, also in place of one that has gone; None: the highest so far, and one more.

        Returns:
          Its index.

        Raises:
          ValueError, InvalidArgumentError: no such address, or an index that cannot be.
          FailedPreconditionError: under `zmqdist launch`, where a worker joins by itself; the text says how. Or this was closed.
        """
        self._check_open()
        return self.strategy.cluster.add_worker(address, index)

    def remove_worker(self, worker: int | str, grace_s: float = GRACE_S) -> None:
        """As of ClusterCoordinator; a task that was invited is free for others then.

        Raises:
          ValueError: there is no such worker.
          UnavailableError: the dispatcher does not answer.
        """
        self.strategy.cluster.remove_worker(int(worker_name(worker).rpartition(":")[2]), grace_s)

    def close(self, shutdown_cluster: bool = False) -> None:
        """As of ClusterCoordinator.

        Args:
          shutdown_cluster: close the strategy, too, and have workers and ps end, wherever they run; see `ParameterServerStrategy.close`.
        """
        super().close()
        if shutdown_cluster:
            self.strategy.close(shutdown_cluster=True)

    def __reduce__(self) -> Any:
        return CoordinatorStub, (self._scheduled_on,)


class _Once:
    """Runs a function with its key; pickles as its function does."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.__module__ = getattr(fn, "__module__", type(fn).__module__)

    def __call__(self, key: str, /, *args: Any, **kwargs: Any) -> Any:
        with task_context.once(key):
            return self._fn(*args, **kwargs)


class CoordinatorStub:
    """A coordinator on a worker.

    Attributes:
      strategy: its stub.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "this is a worker: only the program that made the ClusterCoordinator can schedule, join or fetch with it"
        )

    schedule = join = done = fetch = map = as_completed = close = _refuse
    create_per_worker_dataset = create_per_worker_resource = add_worker = remove_worker = _refuse

    def __reduce__(self) -> Any:
        return CoordinatorStub, (self.strategy,)

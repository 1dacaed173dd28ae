"""The coordinator of a strategy: the one that there is for it, whoever asks first.

`ClusterCoordinator(strategy)` gives this class (coordinator/coordinator.py); it schedules as any other, but for these rules
    There is one for a strategy. The second construction gives the first object, and its options do not matter any more.
    Nothing is scheduled for one strategy inside another's scope.
    A function that is scheduled inside `cache_variable_reads()` runs inside one.
    It pickles as a stub that knows its strategy and schedules nothing.
    The loss of a parameter server fails the round that is unfinished then, whatever its functions do, and each loss one round.
    A function that is scheduled with `once=True` is known by a key to the parameter servers: they pass over what it did in an earlier run.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from typing import Any, NoReturn

from zmqdist import running
from zmqdist.coordinator import ClusterCoordinator, RemoteValue
from zmqdist.errors import PSUnavailableError
from zmqdist.parameter_server import caching, context
from zmqdist.parameter_server.strategy import ParameterServerStrategy
from zmqdist.parameter_server.watching import watch


class StrategyCoordinator(ClusterCoordinator):
    """Of one strategy; see ClusterCoordinator."""

    _made = False

    def __init__(self, strategy: ParameterServerStrategy, **options: Any) -> None:
        with strategy._coordinating:
            if self._made:
                return
            try:
                super().__init__(strategy, **options)
            except BaseException:
                strategy._coordinator = None
                raise
            self._onces = itertools.count(1)
            self._told: set[str] = set()
            lost = weakref.WeakMethod(self._lost)
            watch(strategy._session, lambda error: (found := lost()) is not None and found(error))
            self._made = True

    @property
    def strategy(self) -> ParameterServerStrategy:
        """That it was made for."""
        strategy: ParameterServerStrategy = self._scheduled_on
        return strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        once: bool = False,
        **how: Any,
    ) -> RemoteValue:
        """As of ClusterCoordinator; RuntimeError inside another strategy's scope.

        Args:
          once: if the function has to be run again, because its worker died or for `retries`, the parameter servers pass over those updates
            that it has made already, and answer what they answered then: the n-th of a variable is the same each time. They remember the
            last 65,536 of a strategy. What is read is as it is now.
        """
        if context.here.scopes:
            context.check_not_in_another(self._scheduled_on)
        if callable(fn):
            fn = caching.with_caching(fn)
            if once:
                args = f"{self._shell.number:x}-{next(self._onces)}", *(() if args is None else args)
                fn = _Once(fn)
        return super().schedule(fn, args, kwargs, **how)

    def _lost(self, error: PSUnavailableError) -> None:
        shell = self._shell
        with shell.lock:
            if error.address not in self._told and shell.scheduled > shell.resolved:
                shell.fail_round(partial(copy, error))
                shell.changed.notify_all()

    def _end_round(self) -> None:
        try:
            super()._end_round()
        except Exception as error:
            self._told.update(
                each.address
                for each in (error, *getattr(error, "failures", ()))
                if isinstance(each, PSUnavailableError)
            )
            raise

    def __reduce__(self) -> Any:
        return CoordinatorStub, (self._scheduled_on,)


class _Once:
    """Runs a function with its key; pickles as its function does."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.__module__ = getattr(fn, "__module__", type(fn).__module__)

    def __call__(self, key: str, /, *args: Any, **kwargs: Any) -> Any:
        with running.once(key):
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
    create_per_worker_dataset = create_per_worker_resource = _refuse

    def __reduce__(self) -> Any:
        return CoordinatorStub, (self.strategy,)


def allocate(strategy: ParameterServerStrategy) -> StrategyCoordinator:
    """The object for `ClusterCoordinator(strategy)`; one that was made before, and not closed."""
    with strategy._coordinating:
        known = strategy._coordinator
        if known is None or (known._made and known._shell.closed):
            known = strategy._coordinator = object.__new__(StrategyCoordinator)
        return known

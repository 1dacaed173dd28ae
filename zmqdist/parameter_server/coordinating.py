"""The coordinator of a strategy: the one that there is for it, whoever asks first.

`ClusterCoordinator(strategy)` gives this class (coordinator/coordinator.py); it schedules as any other, but for these rules
    There is one for a strategy. The second construction gives the first object, and its options do not matter any more.
    Nothing is scheduled for one strategy inside another's scope.
    A function that is scheduled inside `cache_variable_reads()` runs inside one.
    Who works for it is the strategy's to say: workers that are added or removed are invited, started or dismissed there (connecting.py).
    It pickles as a stub that knows its strategy and schedules nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from zmqdist.coordinator import ClusterCoordinator, RemoteValue
from zmqdist.coordinator.coordinator import worker_name
from zmqdist.limits import GRACE_S
from zmqdist.parameter_server import caching, context
from zmqdist.parameter_server.strategy import ParameterServerStrategy


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
        **how: Any,
    ) -> RemoteValue:
        """As of ClusterCoordinator; RuntimeError inside another strategy's scope."""
        if context.here.scopes:
            context.check_not_in_another(self._scheduled_on)
        return super().schedule(caching.with_caching(fn) if callable(fn) else fn, args, kwargs, **how)

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
        return self.strategy._connected.add_worker(address, index)

    def remove_worker(self, worker: int | str, grace_s: float = GRACE_S) -> None:
        """As of ClusterCoordinator; a task that was invited is free for others then.

        Raises:
          ValueError: there is no such worker.
          UnavailableError: the dispatcher does not answer.
        """
        self.strategy._connected.remove_worker(int(worker_name(worker).rpartition(":")[2]), grace_s)

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


def allocate(strategy: ParameterServerStrategy) -> StrategyCoordinator:
    """The object for `ClusterCoordinator(strategy)`; one that was made before, and not closed.

    Raises:
      FailedPreconditionError: the strategy was closed.
    """
    with strategy._coordinating:
        known = strategy._coordinator
        if known is None or (known._made and known._shell.closed):
            strategy._session.check_open()
            known = strategy._coordinator = object.__new__(StrategyCoordinator)
        return known

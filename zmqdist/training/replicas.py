"""Runs a function in each replica of one worker, and lets the replicas act together.

Rules
    A single replica runs in the caller's thread, and its values are not wrapped. Several replicas
    run in threads at the same time. A leaf of a structure whose values differ between replicas is a
    PerReplica.
    Replicas that call `merge_call` wait for each other. If a replica raises an error, or ends
    without calling `merge_call`, the other replicas stop waiting. `run` raises the first error that
    is not a consequence of the failure of another replica.

Not here: scheduling, and the warning about `run` outside scheduled functions (strategy.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from zmqdist.conditions import Condition
from zmqdist.futures import Future, ReadyValue
from zmqdist.specs import IndexedSlices, plain_array
from zmqdist.training import context
from zmqdist.training.aggregation import aggregated
from zmqdist.training.context import ReplicaContext
from zmqdist.training.per_replica import PerReplica, regroup, select


def run_replicas(
    strategy: Any,
    replicas: int,
    fn: Callable[..., Any],
    args: Iterable[Any],
    kwargs: Mapping[str, Any] | None,
) -> Any:
    """Call `fn` once in each replica, with the replica's part of the arguments. Return the results
    combined by `regroup`. Raises an error that `fn` raises.
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    if replicas == 1:
        with context.in_replica(ReplicaContext(strategy, 0, 1)):
            return fn(*select(args, 0), **select(kwargs, 0))
    rendezvous = Rendezvous(strategy, replicas)
    enter = context.inherit()

    def run(replica: int) -> None:
        enter()
        with context.in_replica(ReplicaContext(strategy, replica, replicas, rendezvous)):
            try:
                result = fn(*select(args, replica), **select(kwargs, replica))
            except BaseException as error:
                rendezvous.failed(replica, error)
            else:
                rendezvous.ended(replica, result)

    threads = [
        threading.Thread(
            target=run, args=(replica,), name=f"zmqdist-replica-{replica}", daemon=True
        )
        for replica in range(replicas)
    ]
    running = []
    for replica, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError as error:
            # no thread can be started, so let the other replicas stop waiting
            rendezvous.failed(replica, error)
            break
        running.append(thread)
    for thread in running:
        thread.join()
    return regroup(rendezvous.results())


class _Abandoned(RuntimeError):
    """The error in a replica that waits in `merge_call` or in an assignment after another replica
    has ended without reaching that point."""


class Rendezvous:
    """The object at which the replicas of one `run` wait for each other."""

    def __init__(self, strategy: Any, replicas: int) -> None:
        self._strategy = strategy
        self._replicas = replicas
        self._changed = Condition()
        self._round = 0
        self._waiting: dict[int, tuple[Any, Any, Any]] = {}
        self._results: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._merged: tuple[Any, BaseException | None] = (None, None)

    def merge(self, replica: int, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._changed:
            self._waiting[replica] = fn, tuple(args), dict(kwargs)
            my_round = self._round
            # the last replica to come merges for all
            if len(self._waiting) == self._replicas:
                self._merge()
            else:
                self._notify_if_incomplete()
                self._changed.wait_for(lambda: self._round != my_round or bool(self._results))
            if self._round == my_round:
                raise _Abandoned(
                    "another replica ended, or raised an error, without making this merge_call or "
                    "assignment"
                )
            value, error = self._merged
        if error is not None:
            raise error
        return select(value, replica)

    def _merge(self) -> None:
        """Call the merge function once for all replicas. The replica that arrives last calls this
        method, with the lock held."""
        calls = [self._waiting[replica] for replica in range(self._replicas)]
        try:
            with context.in_replica(None):
                args = regroup([args for _, args, _ in calls])
                kwargs = regroup([kwargs for _, _, kwargs in calls])
                self._merged = calls[0][0](self._strategy, *args, **kwargs), None
        except BaseException as error:
            self._merged = None, error
        self._waiting.clear()
        self._round += 1
        self._changed.notify_all()

    def _notify_if_incomplete(self) -> None:
        # once a replica has ended, no merge can be complete
        if self._results:
            self._changed.notify_all()

    def ended(self, replica: int, result: Any) -> None:
        with self._changed:
            self._results[replica] = result
            self._notify_if_incomplete()

    def failed(self, replica: int, error: BaseException) -> None:
        with self._changed:
            # the first error that is no consequence of another replica's failure is raised
            if self._error is None or (
                isinstance(self._error, _Abandoned) and not isinstance(error, _Abandoned)
            ):
                self._error = error
            self._results[replica] = None
            self._notify_if_incomplete()

    def results(self) -> list[Any]:
        if self._error is not None:
            raise self._error
        return [self._results[replica] for replica in range(self._replicas)]


def once_for_all(variable: Any, value: Any, start: Callable[[Any], Future]) -> Future:
    """Start the change `start(value)` of `variable`. In the context of several replicas, make the
    change once for all replicas, with the aggregate of their values, and block until the change is
    made.

    Raises:
      ValueError: there are several replicas, and the variable has no aggregation.
      RuntimeError: another replica changes another variable at this point.
    """
    replica = context.thread_state.replica
    if replica is None or replica.num_replicas_in_sync == 1:
        return start(value)

    def merge(_strategy: Any, variables: PerReplica, per_replica_values: PerReplica) -> None:
        for handle in variables.values:
            if handle is not variable:
                raise RuntimeError(
                    f"replicas change variables {variable.name!r} and {handle.name!r} at the same "
                    f"time: all replicas have to make the same "
                    "changes in the same order, because their changes are combined into one"
                )
        start(
            aggregated(per_replica_values.values, variable.aggregation, variable.name)
        ).get_value()

    replica.merge_call(
        merge,
        (
            variable,
            value if isinstance(value, IndexedSlices) else plain_array(value, variable.label),
        ),
    )
    return ReadyValue()

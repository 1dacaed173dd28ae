"""Which strategy's scope, and which replica, the calling thread is in.

Rules
    Inside `strategy.scope()` is the cross-replica context. Inside a function that `strategy.run` calls is a replica context, one for each
    replica. A program without a strategy is in the default replica context, with a single replica.
    Scopes nest for one strategy only: inside a scope, entering another strategy's scope and scheduling for another strategy are refused.
    The state belongs to the thread. Code that starts threads for a user function passes it on with `inherit`.

Not here: what strategies do with the contexts (strategy.py), which server a variable goes to (shard_placement.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from zmqdist import task_context
from zmqdist.training.per_replica import reduce_replicas

Creator = Callable[..., Any]
"""`creator(next_creator, **kwargs)` makes a variable, usually by `next_creator(**kwargs)`."""


class Strategy(Protocol):
    """The part of a strategy that a context uses: its number, which its stubs on workers have as well."""

    @property
    def session(self) -> int: ...


class Rendezvous(Protocol):
    """Where the replicas of one `run` wait for each other (replicas.py)."""

    def merge(self, replica: int, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


class ReplicaContext:
    """The context of one replica while `strategy.run` calls its function.

    Attributes:
      strategy: the strategy of the `run`; None outside any.
      replica_id_in_sync_group: index of the replica, from 0.
      num_replicas_in_sync: number of replicas on this worker.
    """

    def __init__(self, strategy: Any, replica: int, replicas: int, rendezvous: Rendezvous | None = None) -> None:
        self.strategy = strategy
        self.replica_id_in_sync_group = replica
        self.num_replicas_in_sync = replicas
        self._rendezvous = rendezvous

    def merge_call(self, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Call `merge_fn(strategy, *args, **kwargs)` once for all replicas. Blocks until all of them have called this method.

        `merge_fn` runs in the cross-replica context. Each of its arguments is a PerReplica with those of all replicas.

        Returns:
          The replica's part of what `merge_fn` returned.

        Raises:
          RuntimeError: another replica ended without calling this.
          Exception: what `merge_fn` raised, in all replicas.
        """
        if self._rendezvous is not None:
            return self._rendezvous.merge(self.replica_id_in_sync_group, merge_fn, args, kwargs or {})
        with in_replica(None):
            return merge_fn(self.strategy, *args, **(kwargs or {}))

    def all_reduce(self, reduce_op: Any, value: Any) -> Any:
        """Return the sum or the mean of the replicas' values (arrays, or structures of them), the same in each replica. Blocks as
        `merge_call`.
        """
        return self.merge_call(lambda strategy, values: reduce_replicas(reduce_op, values, None), (value,))

    def __repr__(self) -> str:
        return f"<replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}>"


class _ThreadState(threading.local):
    """The contexts of one thread; the class attributes are the defaults."""

    scopes: tuple[Any, ...] = ()
    """The strategies whose scopes were entered, outermost first."""
    replica: ReplicaContext | None = None
    creators: tuple[Creator, ...] = ()
    """Outermost first. A strategy's creator is among them: those before it can change where it puts a variable, those after it cannot."""
    colocated: Any = None
    """New variables go where this variable is; None: no constraint."""


thread_state = _ThreadState()
_DEFAULT_CONTEXT = ReplicaContext(None, 0, 1)


def get_strategy() -> Any:
    """Return the strategy of the innermost scope or `run` that the calling thread is in; None outside."""
    if thread_state.replica is not None:
        return thread_state.replica.strategy
    return thread_state.scopes[-1] if thread_state.scopes else None


def has_strategy() -> bool:
    """Return whether the calling thread is in the scope or the `run` of a strategy."""
    return get_strategy() is not None


def get_replica_context() -> ReplicaContext | None:
    """Return the replica context of the calling thread. Inside `strategy.run` it is that of the current replica, inside `strategy.scope()`
    it is None (cross-replica context), elsewhere it is a default context with a single replica.
    """
    if thread_state.replica is not None:
        return thread_state.replica
    return None if thread_state.scopes else _DEFAULT_CONTEXT


def in_cross_replica_context() -> bool:
    """Return whether the calling thread is inside a scope and in no replica."""
    return thread_state.replica is None and bool(thread_state.scopes)


@contextmanager
def in_replica(replica: ReplicaContext | None) -> Iterator[None]:
    """Enter the context of a replica; None: the cross-replica context of the current replica's strategy."""
    before, scopes = thread_state.replica, thread_state.scopes
    if replica is None and before is not None and before.strategy is not None:
        thread_state.scopes = (*scopes, before.strategy)
    thread_state.replica = replica
    try:
        yield
    finally:
        thread_state.replica, thread_state.scopes = before, scopes


@contextmanager
def in_scope(strategy: Strategy, creator: Creator) -> Iterator[None]:
    """Enter the scope of a strategy. Raises RuntimeError inside another strategy's scope."""
    check_not_in_another(strategy)
    before, replica, creators = thread_state.scopes, thread_state.replica, thread_state.creators
    thread_state.scopes, thread_state.replica, thread_state.creators = (*before, strategy), None, (*creators, creator)
    try:
        yield
    finally:
        thread_state.scopes, thread_state.replica, thread_state.creators = before, replica, creators


def check_not_in_another(strategy: Strategy) -> None:
    """Raise RuntimeError inside another strategy's scope."""
    current = get_strategy()
    if current is not None and current.session != strategy.session:
        raise RuntimeError(
            "strategies cannot be mixed: this is inside the scope of another ParameterServerStrategy; leave it first"
        )


@contextmanager
def variable_creator_scope(creator: Creator) -> Iterator[None]:
    """Return a context manager. While it is open, `creator(next_creator, **kwargs)` makes the variables, and may change `kwargs` and the
    result.

    For a creator that was entered outside the strategy's scope, `kwargs["device"]` says where the strategy puts the variable, and the
    creator may change it. For one entered inside the scope, the strategy decides.
    """
    before = thread_state.creators
    thread_state.creators = (*before, creator)
    try:
        yield
    finally:
        thread_state.creators = before


@contextmanager
def colocated_with(variable: Any) -> Iterator[None]:
    """Place new variables where `variable` is."""
    before, thread_state.colocated = thread_state.colocated, variable
    try:
        yield
    finally:
        thread_state.colocated = before


def inherit() -> Callable[[], None]:
    """Return a function that puts the thread that calls it into the contexts of the thread that called `inherit`; for the threads of
    replicas.
    """
    state = thread_state.scopes, thread_state.replica, thread_state.creators, thread_state.colocated
    enter_running = task_context.inherit()

    def enter() -> None:
        enter_running()
        thread_state.scopes, thread_state.replica, thread_state.creators, thread_state.colocated = state

    return enter

"""Where the present thread is: in whose scope, and in which replica.

Rules
    Inside `strategy.scope()` is the cross-replica context; in what `strategy.run` calls is the replica context, once for each replica. A
    program without a strategy is in the replica context of its only replica.
    Scopes nest for one strategy only: another one's is refused, and so is scheduling for another one.
    All of this is the thread's own; what starts threads for a function hands it on.

Not here: what strategies do with it (strategy.py), and where variables go (shard_placement.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from zmqdist import task_context
from zmqdist.training.per_replica import reduce_replicas

Creator = Callable[..., Any]
"""`creator(next_creator, **kwargs)`: makes a variable, as a rule by `next_creator(**kwargs)`."""


class Strategy(Protocol):
    """As much of a strategy as a context needs: its number, which its stubs on workers have, too."""

    @property
    def session(self) -> int: ...


class Rendezvous(Protocol):
    """What replicas meet in (replicas.py)."""

    def merge(self, replica: int, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


class ReplicaContext:
    """Of one replica while `strategy.run` calls its function.

    Attributes:
      strategy: whose `run` it is; None outside any.
      replica_id_in_sync_group: 0, 1, ...
      num_replicas_in_sync: how many there are on this worker.
    """

    def __init__(self, strategy: Any, replica: int, replicas: int, rendezvous: Rendezvous | None = None) -> None:
        self.strategy = strategy
        self.replica_id_in_sync_group = replica
        self.num_replicas_in_sync = replicas
        self._rendezvous = rendezvous

    def merge_call(self, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Wait until all replicas have called this; then `merge_fn(strategy, *args, **kwargs)` is called once.

        It is called in the cross-replica context; its arguments are those of all replicas, each a PerReplica. Of what it returns, each
        replica gets its part.

        Raises:
          RuntimeError: another replica ended without it.
          Exception: what `merge_fn` raised, in all replicas.
        """
        if self._rendezvous is not None:
            return self._rendezvous.merge(self.replica_id_in_sync_group, merge_fn, args, kwargs or {})
        with in_replica(None):
            return merge_fn(self.strategy, *args, **(kwargs or {}))

    def all_reduce(self, reduce_op: Any, value: Any) -> Any:
        """The sum or the mean of the replicas' values (arrays, or structures of them), the same in each."""
        return self.merge_call(lambda strategy, values: reduce_replicas(reduce_op, values, None), (value,))

    def __repr__(self) -> str:
        return f"<replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}>"


class _ThreadState(threading.local):
    """The state of one thread; these are the defaults."""

    scopes: tuple[Any, ...] = ()
    """The strategies whose scopes were entered, outermost first."""
    replica: ReplicaContext | None = None
    creators: tuple[Creator, ...] = ()
    """Outermost first. A strategy's is among them: those before it act on where it puts a variable, those after it do not."""
    colocated: Any = None
    """A variable beside which new ones go."""


thread_state = _ThreadState()
_DEFAULT_CONTEXT = ReplicaContext(None, 0, 1)


def get_strategy() -> Any:
    """The strategy of the innermost scope, or of the `run` that this is in; None outside."""
    if thread_state.replica is not None:
        return thread_state.replica.strategy
    return thread_state.scopes[-1] if thread_state.scopes else None


def has_strategy() -> bool:
    """Whether this is inside the scope or the `run` of a strategy."""
    return get_strategy() is not None


def get_replica_context() -> ReplicaContext | None:
    """That of the present replica; None in the cross-replica context; outside of both that of the only replica there is."""
    if thread_state.replica is not None:
        return thread_state.replica
    return None if thread_state.scopes else _DEFAULT_CONTEXT


def in_cross_replica_context() -> bool:
    """Whether this is inside a scope, and in no replica."""
    return thread_state.replica is None and bool(thread_state.scopes)


@contextmanager
def in_replica(replica: ReplicaContext | None) -> Iterator[None]:
    """In the context of that replica, or in the cross-replica context of the strategy of the present one."""
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
    """In the scope of a strategy. Raises RuntimeError in another one's."""
    check_not_in_another(strategy)
    before, replica, creators = thread_state.scopes, thread_state.replica, thread_state.creators
    thread_state.scopes, thread_state.replica, thread_state.creators = (*before, strategy), None, (*creators, creator)
    try:
        yield
    finally:
        thread_state.scopes, thread_state.replica, thread_state.creators = before, replica, creators


def check_not_in_another(strategy: Strategy) -> None:
    """Raises RuntimeError inside another strategy's scope."""
    current = get_strategy()
    if current is not None and current.session != strategy.session:
        raise RuntimeError(
            "strategies cannot be mixed: this is inside the scope of another ParameterServerStrategy; leave it first"
        )


@contextmanager
def variable_creator_scope(creator: Creator) -> Iterator[None]:
    """While this is open, variables are made by `creator(next_creator, **kwargs)`, which may change `kwargs` and what comes out.

    Outside a strategy's scope, `kwargs` has a "device", where the strategy would put the variable, and another one is obeyed; inside a
    scope the strategy decides.
    """
    before = thread_state.creators
    thread_state.creators = (*before, creator)
    try:
        yield
    finally:
        thread_state.creators = before


@contextmanager
def colocated_with(variable: Any) -> Iterator[None]:
    """New variables go where `variable` is."""
    before, thread_state.colocated = thread_state.colocated, variable
    try:
        yield
    finally:
        thread_state.colocated = before


def inherit() -> Callable[[], None]:
    """For the threads of replicas: called in one of them, it is where this thread is."""
    state = thread_state.scopes, thread_state.replica, thread_state.creators, thread_state.colocated
    enter_running = task_context.inherit()

    def enter() -> None:
        enter_running()
        thread_state.scopes, thread_state.replica, thread_state.creators, thread_state.colocated = state

    return enter

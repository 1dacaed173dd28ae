"""The contexts of the calling thread: the strategy whose scope it has entered, and the replica that
it runs.

Rules
    Inside `strategy.scope()` a thread is in the cross-replica context. Inside a function that
    `strategy.run` calls it is in the replica context of its replica. A program without a strategy
    is in the default replica context, with a single replica. Scopes of one strategy nest. Inside a
    scope, the scope of another strategy cannot be entered, and no function can be scheduled for
    another strategy.
    Each thread has contexts of its own. Code that starts threads for a user function copies the
    starting thread's contexts to the new threads with `inherit`.

Not here: what strategies do with the contexts (strategy.py), which server holds a variable
(shard_placement.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from zmqdist import task_context
from zmqdist.field_types import checked
from zmqdist.training.per_replica import reduce_replicas

Creator = Callable[..., Any]
"""`creator(next_creator, **kwargs)` makes a variable, usually by a call of
`next_creator(**kwargs)`."""


class ReplicaContext:
    """The context of one replica while `strategy.run` calls its function.

    >>> strategy.run(lambda: zd.tf.get_replica_context().num_replicas_in_sync > 0)
    True

    Attributes:
      strategy: the strategy whose `run` calls the function. It is None in the default context.
      replica_id_in_sync_group: index of the replica, from 0.
      num_replicas_in_sync: number of replicas on this worker.
    """

    def __init__(self, strategy: Any, replica: int, replicas: int, rendezvous: Any = None) -> None:
        self.strategy = strategy
        self.replica_id_in_sync_group = replica
        self.num_replicas_in_sync = replicas
        self._rendezvous = rendezvous

    def merge_call(self, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Call `merge_fn(strategy, *args, **kwargs)` once for all replicas. Blocks until all of
        them have called this method.

        >>> def add(strategy, value):
        ...     return value
        >>> strategy.run(lambda: zd.tf.get_replica_context().merge_call(add, args=(3,)))
        3

        `merge_fn` runs in the cross-replica context. With several replicas, each leaf of its
        arguments is a PerReplica of the leaves that the replicas have passed. A single replica's
        arguments are passed unchanged.

        Returns:
          The part for this replica of the result of `merge_fn`.

        Raises:
          RuntimeError: another replica ended without calling this method.
          Exception: the error that `merge_fn` raised. It is raised in all replicas.
        """
        if self._rendezvous is not None:
            return self._rendezvous.merge(
                self.replica_id_in_sync_group, merge_fn, args, kwargs or {}
            )
        with in_replica(None):
            return merge_fn(self.strategy, *args, **(kwargs or {}))

    def all_reduce(self, reduce_op: Any, value: Any) -> Any:
        """Return the sum or the mean of the replicas' values, which are arrays or structures of
        arrays. The result is the same in each replica. Blocks as `merge_call`.

        >>> def total():
        ...     return zd.tf.get_replica_context().all_reduce("sum", np.float64(3))
        >>> float(strategy.run(total))
        3.0
        """
        return self.merge_call(
            lambda strategy, values: reduce_replicas(reduce_op, values, None), (value,)
        )

    def __repr__(self) -> str:
        return f"<replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}>"


class _ThreadState(threading.local):
    """The contexts of one thread. The class attributes are the defaults."""

    scopes: tuple[Any, ...] = ()
    """The strategies whose scopes were entered, outermost first."""
    replica: ReplicaContext | None = None
    creators: tuple[Creator, ...] = ()
    """The creators that were entered, outermost first. The scope of a strategy is one of these
    creators. A creator outside the scope can change the device that the strategy has chosen, but a
    creator inside the scope cannot."""
    colocated: Any = None
    """New variables are placed on the server of this variable. None means that the strategy chooses
    the server."""
    cache: dict[Hashable, np.ndarray[Any, Any]] | None = None
    """The values that were read in the scope `cache_variable_reads` of this thread; None outside
    such a scope."""


thread_state = _ThreadState()


@contextmanager
def entered(**changes: Any) -> Iterator[None]:
    """Return a context manager that changes attributes of `thread_state`, and restores them."""
    before = {name: getattr(thread_state, name) for name in changes}
    vars(thread_state).update(changes)
    try:
        yield
    finally:
        vars(thread_state).update(before)


_DEFAULT_CONTEXT = ReplicaContext(None, 0, 1)


def get_strategy() -> Any:
    """Return the strategy of the innermost scope or `run` in which the calling thread is. Return
    None if the thread is in no scope and no `run`.

    >>> with strategy.scope():
    ...     print(zd.tf.get_strategy() is strategy)
    True
    """
    if thread_state.replica is not None:
        return thread_state.replica.strategy
    return thread_state.scopes[-1] if thread_state.scopes else None


def has_strategy() -> bool:
    """Return whether the calling thread is in the scope or the `run` of a strategy.

    >>> zd.tf.has_strategy()
    False
    >>> with strategy.scope():
    ...     print(zd.tf.has_strategy())
    True
    """
    return get_strategy() is not None


def get_replica_context() -> ReplicaContext | None:
    """Return the replica context of the calling thread. Inside `strategy.run` this is the context
    of the current replica. Inside `strategy.scope()` it is None (cross-replica context). Elsewhere
    it is a default context with a single replica.

    >>> strategy.run(lambda: zd.tf.get_replica_context().replica_id_in_sync_group)
    0
    """
    if thread_state.replica is not None:
        return thread_state.replica
    return None if thread_state.scopes else _DEFAULT_CONTEXT


def in_cross_replica_context() -> bool:
    """Return whether the calling thread is inside a scope and in no replica.

    >>> with strategy.scope():
    ...     print(zd.tf.in_cross_replica_context())
    True
    """
    return thread_state.replica is None and bool(thread_state.scopes)


@contextmanager
def in_replica(replica: ReplicaContext | None) -> Iterator[None]:
    """Return a context manager that enters the context of a replica. If `replica` is None, it
    enters the cross-replica context of the current replica's strategy."""
    scopes, before = thread_state.scopes, thread_state.replica
    # the cross-replica context of `merge_call` is inside the strategy's scope
    if replica is None and before is not None and before.strategy is not None:
        scopes = (*scopes, before.strategy)
    with entered(replica=replica, scopes=scopes):
        yield


@contextmanager
def in_scope(strategy: Any, creator: Creator) -> Iterator[None]:
    """Return a context manager that enters the scope of a strategy. Raises RuntimeError inside
    another strategy's scope."""
    check_one_strategy(strategy)
    scopes, creators = (*thread_state.scopes, strategy), (*thread_state.creators, creator)
    with entered(scopes=scopes, replica=None, creators=creators):
        yield


def check_one_strategy(strategy: Any) -> None:
    """Raise RuntimeError if the calling thread is in the scope or the `run` of another strategy."""
    current = get_strategy()
    if current is not None and current.session != strategy.session:
        raise RuntimeError(
            "strategies cannot be mixed: this is inside the scope of another "
            "ParameterServerStrategy; leave it first"
        )


@checked
@contextmanager
def variable_creator_scope(creator: Callable[..., Any]) -> Iterator[None]:
    """Return a context manager. While it is open, each new variable is made by
    `creator(next_creator, **kwargs)`, which may change `kwargs` and the result.

    >>> def doubled(next_creator, **options):
    ...     options["initial_value"] = options["initial_value"] * 2
    ...     return next_creator(**options)
    >>> with strategy.scope(), zd.tf.variable_creator_scope(doubled):
    ...     print(zd.Variable(np.ones(2)).numpy())
    [2. 2.]

    If this context manager is entered outside the strategy's scope, `kwargs["device"]` is the
    device that the strategy has chosen, and `creator` may change it. If it is entered inside that
    scope, `creator` is called before the strategy chooses a device.
    """
    with entered(creators=(*thread_state.creators, creator)):
        yield


def inherit() -> Callable[[], None]:
    """Copy the contexts of this thread. Return a function that sets them in the thread that calls
    it, such as the thread of a replica."""
    state = dict(vars(thread_state))
    enter_running = task_context.inherit()

    def enter() -> None:
        enter_running()
        vars(thread_state).update(state)

    return enter

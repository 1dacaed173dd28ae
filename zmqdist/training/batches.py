"""Reads or updates several variables with one message to each parameter server. The messages are in
flight at the same time.

A message belongs to one session, so variables of two strategies are never in one message.

Not here: operations on a single variable (variable.py), or on all shards of a sharded variable
(sharded.py).
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any, TypeAlias

from zmqdist import nest, task_context
from zmqdist.errors import InvalidArgumentError
from zmqdist.futures import Future, Gathered, all_values
from zmqdist.specs import IndexedSlices, joined, plain_array
from zmqdist.training.aggregation import aggregated
from zmqdist.training.constraint import constrained
from zmqdist.training.context import thread_state
from zmqdist.training.per_replica import PerReplica
from zmqdist.training.sharded import ShardedVariable
from zmqdist.training.variable import Variable
from zmqdist.training.variable_storage import LocalStorage, RemoteStorage
from zmqdist.variables import client

Destination: TypeAlias = tuple[client.PsClient, int]
"""(client of a parameter server, number of the session at this server). The variables of one
destination share a message."""


def read_all(variables: Any) -> Any:
    """Return `variables` with each variable replaced by its value. Does not use the caches of
    `cache_variable_reads`."""
    if isinstance(variables, (Iterator, KeysView, ValuesView, ItemsView)):
        variables = list(variables)
    parts: dict[Any, Variable] = {}

    def note(leaf: Any) -> Any:
        parts.update((part.storage.key, part) for part in _parts(leaf))
        return leaf

    nest.map_contents(note, variables)
    by_session: dict[Destination, list[Variable]] = {}
    values: dict[Any, Any] = {}
    for key, part in parts.items():
        if isinstance(part.storage, RemoteStorage):
            by_session.setdefault((part.storage.client, part.storage.session), []).append(part)
        else:
            values[key] = part.numpy()
    reads = [ps.read([part.storage.ref for part in group]) for (ps, _), group in by_session.items()]
    for group, versions_and_values in zip(by_session.values(), all_values(reads), strict=True):
        for part, (_, value) in zip(group, versions_and_values, strict=True):
            values[part.storage.key] = value if value.shape else value[()]

    def value_of(leaf: Any) -> Any:
        shards = [values[part.storage.key] for part in _parts(leaf)]
        return leaf if not shards else shards[0] if len(shards) == 1 else joined(shards)

    return nest.map_contents(value_of, variables)


def apply_all(optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], step: int | None) -> None:
    """Apply gradients to several variables, as `ParameterServerStrategy.apply` describes. In the
    context of several replicas, the gradients of all replicas for a variable are first combined by
    the variable's aggregation, and then applied once.
    """
    pairs = [(grad, variable) for grad, variable in grads_and_vars if grad is not None]
    for _, variable in pairs:
        if not isinstance(variable, (Variable, ShardedVariable)):
            raise TypeError(
                f"apply() takes pairs (gradient, variable), but {type(variable).__name__} is not "
                f"a variable"
            )
    replica = thread_state.replica
    if replica is None or replica.num_replicas_in_sync == 1:
        _apply(optimizer, pairs, step)
        return

    def merge(_strategy: Any, grads: list[PerReplica]) -> None:
        merged = [
            (aggregated(grad.values, variable.aggregation, variable.name), variable)
            for grad, (_, variable) in zip(grads, pairs, strict=True)
        ]
        _apply(optimizer, merged, step)

    grads = [
        grad if isinstance(grad, IndexedSlices) else plain_array(grad, to.label)
        for grad, to in pairs
    ]
    replica.merge_call(merge, (grads,))


def _apply(optimizer: Any, pairs: list[tuple[Any, Any]], step: int | None) -> None:
    """Apply each gradient to its variable. All pairs are checked before the first message is
    sent.
    """
    by_session: dict[Destination, list[tuple[RemoteStorage, client.Change]]] = {}
    local: list[tuple[LocalStorage, client.Change, Any]] = []
    keys = set()
    for grad, variable in pairs:
        shares = variable.shares(grad) if isinstance(variable, ShardedVariable) else [grad]
        for part, share in zip(_parts(variable), shares, strict=True):
            # a server would refuse the second, when the first has changed the variable already
            if part.storage.key in keys:
                raise InvalidArgumentError(
                    f"{part.storage.ref} occurs twice in grads_and_vars: add up its "
                    f"gradients, so that it makes one step"
                )
            keys.add(part.storage.key)
            rule = constrained(optimizer, part.constraint)
            change = client.apply(part.storage.ref, rule, share)
            if isinstance(part.storage, RemoteStorage):
                by_session.setdefault((part.storage.client, part.storage.session), []).append(
                    (part.storage, change)
                )
            else:
                local.append((part.storage, change, rule))
    # a missing `step` raises before the first request is sent
    steps = [group[0][0].in_step(step) for group in by_session.values()]
    changes: list[Future] = [storage.change(change, rule) for storage, change, rule in local]
    for ((ps, _), group), how in zip(by_session.items(), steps, strict=True):
        changes.append(ps.update([(storage.ref, change) for storage, change in group], **how))
    if step is None:
        task_context.leave_in_flight(Gathered(changes))
    else:
        all_values(changes)


def _parts(leaf: Any) -> list[Variable]:
    """Return a list of the Variable `leaf`, or of the shards of a ShardedVariable. Return an empty
    list for any other leaf."""
    if isinstance(leaf, ShardedVariable):
        return leaf.variables
    return [leaf] if isinstance(leaf, Variable) else []

"""Several variables in one message to each parameter server; all servers are asked at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from zmqdist import nest
from zmqdist.indexed_slices import IndexedSlices
from zmqdist.parameter_server.homes import RemoteHome
from zmqdist.parameter_server.pending import Pending, all_values
from zmqdist.parameter_server.variable import Variable
from zmqdist.variables import client


def parts_of(variable: Any) -> list[Variable]:
    """The shards of a variable, or itself."""
    return [variable] if isinstance(variable, Variable) else list(variable.variables)


def read_all(variables: Any) -> Any:
    """The structure with values in place of variables; what is no variable stays."""
    leaves = nest.flatten(variables)
    parts = [parts_of(leaf) if _is_variable(leaf) else [] for leaf in leaves]
    by_client: dict[client.PsClient, list[Variable]] = {}
    values: dict[Any, Any] = {}
    for part in {part._home.key: part for each in parts for part in each}.values():
        if isinstance(part._home, RemoteHome):
            by_client.setdefault(part._home.client, []).append(part)
        else:
            values[part._home.key] = part.numpy()
    asked = [each.read([part._home.ref for part in wanted]) for each, wanted in by_client.items()]
    for wanted, told in zip(by_client.values(), all_values(asked), strict=True):
        values.update({part._home.key: value for part, (_, value) in zip(wanted, told, strict=True)})
    read = []
    for leaf, each in zip(leaves, parts, strict=True):
        if not each:
            read.append(leaf)
        elif len(each) == 1:
            value = values[each[0]._home.key]
            read.append(value if value.shape else value[()])
        else:
            read.append(np.concatenate([values[part._home.key] for part in each]))
    return nest.pack_sequence_as(variables, read)


def apply_all(optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], step: int | None) -> None:
    """See `ParameterServerStrategy.apply`. Everything is checked before anything is sent."""
    by_client: dict[client.PsClient, list[tuple[RemoteHome, client.Change]]] = {}
    started: list[Pending] = []
    local = []
    for grad, variable in grads_and_vars:
        if grad is None:
            continue
        parts = parts_of(variable)
        for part, share in zip(parts, shares_of(grad, parts), strict=True):
            home = part._home
            if share is None:
                continue
            if isinstance(home, RemoteHome):
                change = client.apply(home.ref, optimizer, share)
                by_client.setdefault(home.client, []).append((home, change))
            else:
                local.append((home, share))
    steps = {each: wanted[0][0].in_step(step) for each, wanted in by_client.items()}
    started = [home.apply(optimizer, share, step) for home, share in local]
    started += [
        each.update([(home.ref, change) for home, change in wanted], **steps[each])
        for each, wanted in by_client.items()
    ]
    all_values(started)


def shares_of(grad: Any, parts: list[Variable]) -> list[Any]:
    """A gradient cut as a variable is; None for a shard of which it names no row."""
    if len(parts) == 1:
        return [grad]
    shares: list[Any] = []
    start = 0
    if not isinstance(grad, IndexedSlices):
        grad = np.asarray(grad)
    rows = sum(part.shape[0] for part in parts)
    if not isinstance(grad, IndexedSlices) and (grad.ndim == 0 or len(grad) != rows):
        raise ValueError(
            f"the gradient of {parts[0].name!r} and its other shards has {grad.shape}, they have {rows} rows"
        )
    if (
        isinstance(grad, IndexedSlices)
        and grad.indices.size
        and not 0 <= grad.indices.min() <= grad.indices.max() < rows
    ):
        raise ValueError(
            f"the gradient of {parts[0].name!r} and its other shards names a row that is not among their {rows}"
        )
    for part in parts:
        stop = start + part.shape[0]
        if isinstance(grad, IndexedSlices):
            mine = (grad.indices >= start) & (grad.indices < stop)
            share = IndexedSlices(grad.values[mine], grad.indices[mine] - start)
            shares.append(share)
        else:
            shares.append(grad[start:stop])
        start = stop
    return shares


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, Variable) or isinstance(getattr(leaf, "variables", None), list)

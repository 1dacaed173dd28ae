"""Several variables in one message to each parameter server; all servers are asked at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from zmqdist import nest
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
        shares = [grad] if isinstance(variable, Variable) else variable._shares(grad)
        for part, share in zip(parts_of(variable), shares, strict=True):
            home = part._home
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


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, Variable) or isinstance(getattr(leaf, "variables", None), list)

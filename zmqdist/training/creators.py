"""How a variable is made: the chain of creators, and `make`, the function at its end.

Rules
    `Variable(...)` calls the innermost creator, and each creator calls the next creator outwards. A
    strategy's scope adds a creator, which chooses the device and cuts a variable into shards.
    Creators outside the scope therefore see the strategy's choices, and may change these choices.
    On a worker, only functions that build per-worker resources can make variables, which stay in
    the process that makes them. A scheduled function cannot make variables, because it would make
    another variable in each run.

Not here: where the strategy places variables (strategy.py, shard_placement.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from zmqdist import task_context
from zmqdist.cluster.devices import Device, device_of
from zmqdist.training.aggregation import VariableAggregation, VariableSynchronization, member
from zmqdist.training.context import get_strategy, thread_state
from zmqdist.training.partition import Initial
from zmqdist.training.variable_storage import LocalStorage

CHIEF = device_of("chief", 0)


def create(handle: Callable[..., Any], **kwargs: Any) -> Any:
    """Make a variable through the chain of creators. The constructor of `Variable` calls this, and
    documents the arguments.

    Args:
      handle: the function that makes a Variable from its storage (variable.py).
    """
    being_built = task_context.resource_kind()
    if being_built == "dataset":
        raise ValueError(
            "a dataset function cannot make a Variable: make it under strategy.scope() in the "
            "program"
        )
    if being_built is not None:
        return make(
            handle,
            **{**kwargs, "device": device_of("worker", task_context.get_current_worker_index())},
        )
    if task_context.scheduled():
        raise RuntimeError(
            "a Variable cannot be made in a scheduled function, which may run again and on any "
            "worker: make it under strategy.scope() in "
            "the program and let the function use it, or make it in a per-worker resource"
        )
    next_creator: Callable[..., Any] = partial(make, handle)
    for creator in thread_state.creators:
        next_creator = partial(creator, next_creator)
    return next_creator(**kwargs)


def make(
    handle: Callable[..., Any],
    *,
    initial_value: Any = None,
    trainable: bool | None = None,
    name: str | None = None,
    dtype: Any = None,
    shape: Any = None,
    aggregation: Any = None,
    synchronization: Any = None,
    per_worker_variable: bool = False,
    device: str | None = None,
) -> Any:
    """Make the storage of a variable on `device`, by default in this process. Return the Variable
    that `handle` makes from the storage."""
    if per_worker_variable:
        raise ValueError(
            "per_worker_variable=True needs a strategy: make it inside strategy.scope()"
        )
    name = name or "Variable"
    how = (
        member(VariableAggregation, "aggregation", aggregation),
        member(VariableSynchronization, "synchronization", synchronization),
    )
    initial = Initial.of(name, initial_value, shape, dtype)
    if trainable is None:
        trainable = initial.dtype.kind in "fc"
    described = (bool(trainable), *how)
    target = None if device is None else Device.parse(device).canonical()
    if target is None or target.job != "ps":
        value = initial.value()
        array = np.array(value() if callable(value) else value, order="C")
        storage = LocalStorage(name, array, CHIEF if target is None else str(target))
        return handle(storage, *described)
    strategy = get_strategy()
    if strategy is None:
        raise ValueError(
            f"variable {name!r} is to be placed on {device}, but there is no strategy: make it "
            f"inside strategy.scope()"
        )
    ps, servers = target.task or 0, len(strategy.cluster.ps)
    if ps >= servers:
        raise ValueError(
            f"variable {name!r} is to be placed on ps:{ps}, but the cluster has {servers} ps"
        )
    storage = strategy.ps_session.create_variable(name, initial, ps)
    strategy.shard_placement.placed(name, initial.shape, initial.dtype, ps)
    return handle(storage, *described)

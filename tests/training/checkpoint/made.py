"""Variables for the tests of checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqdist.parameter_server import ShardedVariable, Variable
from zmqdist.training.checkpoint.manifest import Part
from zmqdist.training.checkpoint.structure import shards_of


def variable(value: Any, name: str = "v") -> Variable:
    """A variable of this process."""
    made: Variable = Variable(value, name=name)
    return made


def sharded(whole: Any, shards: int, name: str = "v") -> ShardedVariable:
    """One that is cut into so many shards."""
    pieces = np.array_split(np.asarray(whole), shards)
    return ShardedVariable(
        [Variable(piece, name=f"{name}/part_{i}") for i, piece in enumerate(pieces)], name
    )


def slots_of(each: Variable) -> dict[str, NDArray[Any]]:
    """The slots of an unsharded variable."""
    [shard] = shards_of(each)
    return shard.read().slots


def set_slots(each: Variable, **slots: Any) -> None:
    """Give a variable, or its only shard, these slots: `Adam__m` for "Adam/m"."""
    [shard] = shards_of(each)
    arrays = {name.replace("__", "/"): np.asarray(array) for name, array in slots.items()}
    shard.start_writing(Part(each.numpy(), arrays)).get_value()

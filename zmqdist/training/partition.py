"""How a variable is cut into shards: the number of shards, the rows of each shard, and how the
first value of each shard is made.

Rules
    A shard is a range of whole rows ("div" in TensorFlow). All shards have the same number of rows.
    If the rows cannot be divided evenly, the first shards have one row more.
    If the initial value is an array, the program cuts the array and sends each shard its rows. If
    the initial value is a function, and shape and dtype are given, the function runs at the server
    of each shard.
    If this function has parameters for the part to make, the server calls it for the shard's part
    only, so that no process needs memory for the whole value. Otherwise the function makes the
    whole value for each shard, and the shard keeps only its own rows. If shape or dtype is missing,
    the program calls the function, and cuts the result.

Not here: which parameter server holds a shard (shard_placement.py), how many shards a variable
should have (partitioners.py).
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zmqdist.field_types import converted
from zmqdist.specs import plain_array
from zmqdist.variables.hosted_variable import cast

log = logging.getLogger("zmqdist.training")

ELEMENTS_WHOLE_MAX = 10**9
"""If a process has to make more elements than this in one piece, which takes several GB of memory,
a warning is logged."""


class ShardInfo(NamedTuple):
    """The part of a variable that an initializer with a parameter `shard_info` has to make.

    Attributes:
      shape: shape of the part.
      offset: position of the part in the whole, along each axis.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def offsets_of(rows: int, shards: int) -> tuple[int, ...]:
    """Return the offsets of shards: shard i has the rows from offsets[i] up to, but not including,
    offsets[i + 1]. There is one more offset than there are shards.
    """
    size, more = divmod(rows, shards)
    return tuple(index * size + min(index, more) for index in range(shards + 1))


def shards_of(
    partitioner: Callable[..., Any] | None, shape: Sequence[int], dtype: DTypeLike
) -> int:
    """Return the number of shards into which a partitioner cuts a variable. The number 1 means that
    the variable is not cut.

    Raises:
      ValueError: the partitioner returned no number of 1 or more for the first axis, or it cuts
        another axis.
    """
    if partitioner is None or not len(shape):
        return 1
    counts = partitioner(shape=tuple(shape), dtype=np.dtype(dtype))
    text = f"variable_partitioner returned {counts!r} for a variable of shape {tuple(shape)}:"
    if counts is None or not len(counts) or int(counts[0]) < 1:
        raise ValueError(
            f"{text} it must return a list that begins with the number of shards, such as [2, 1]"
        )
    if any(number != 1 for number in counts[1:]):
        raise ValueError(
            f"{text} only the first axis can be cut, so all numbers but the first must be 1"
        )
    return max(1, min(int(counts[0]), int(shape[0])))


def _sizes(shape: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in shape)


@dataclass(frozen=True)
class Initial:
    """The first value of a variable.

    Attributes:
      name: name of the variable, for error texts.
      source: the whole value, or the function that makes it at the variable's server.
      shape, dtype: shape and dtype of the whole value.
    """

    name: str
    source: NDArray[Any] | Callable[..., Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(
        cls, name: str, initial_value: Any, shape: Sequence[int] | None, dtype: DTypeLike | None
    ) -> Initial:
        """Return the initial value that the user's arguments describe. If `initial_value` is a
        function, this method calls it only if shape or dtype is missing.

        Args:
          initial_value: a value that NumPy can convert to an array, or a function that returns such
            a value.
          shape, dtype: shape and dtype of the variable. None means the shape or dtype of the value.

        Raises:
          ValueError: `initial_value` is missing, has another shape, or is not an array of numbers
            or text.
        """
        if initial_value is None:
            raise ValueError(
                f"variable {name!r} needs an initial_value: an array, or a function that makes one"
            )
        shape = None if shape is None else converted("shape", _sizes, shape)
        dtype = None if dtype is None else converted("dtype", np.dtype, dtype)
        if callable(initial_value) and shape is not None and dtype is not None:
            return cls(name, initial_value, shape, dtype)
        value = _array(name, initial_value() if callable(initial_value) else initial_value, dtype)
        if shape not in (None, value.shape):
            raise ValueError(
                f"variable {name!r} has the argument shape={shape}, but its initial_value has "
                f"shape {value.shape}"
            )
        return cls(name, value, value.shape, value.dtype)

    def rows(self, start: int, stop: int) -> NDArray[Any] | RowsOfInitial:
        """Return the first value of the shard with these rows: an array, or a callable that makes
        the array at the parameter server."""
        if isinstance(self.source, np.ndarray):
            return self.source[start:stop]
        return RowsOfInitial(self, start, stop)

    def value(self) -> NDArray[Any] | RowsOfInitial:
        """Return the whole value, or, if a function makes an array, an object that makes it."""
        return self.rows(0, self.shape[0]) if self.shape else self.whole()

    def whole(self) -> NDArray[Any]:
        """Return the whole first value."""
        return _array(
            self.name, self.source() if callable(self.source) else self.source, self.dtype
        )

    def warn_of_size(self) -> None:
        """Log a warning if the variable is very large, and a process has to make the whole value
        before it can be cut. Call this function once for each sharded variable."""
        whole = isinstance(self.source, np.ndarray) or not _ways_to_ask(self.source)
        if whole and math.prod(self.shape) > ELEMENTS_WHOLE_MAX:
            log.warning(
                "variable %r is cut into shards, but its %d elements are made in one piece first: "
                "give shape and dtype, and an "
                "initial_value that is a function with the parameters partition_shape and "
                "partition_offset, or shard_info",
                self.name,
                math.prod(self.shape),
            )


@dataclass(frozen=True)
class RowsOfInitial:
    """A callable that makes the first value of one shard. The program pickles it, and the shard's
    parameter server calls it."""

    initial: Initial
    start: int
    stop: int

    def __call__(self) -> NDArray[Any]:
        """Call the user's function, and return the rows of this shard.

        Raises:
          ValueError: the user's function returned neither the requested part nor the whole value.
          Exception: the error that the user's function raised.
        """
        initial = self.initial
        assert not isinstance(initial.source, np.ndarray)
        part = ShardInfo(
            (self.stop - self.start, *initial.shape[1:]),
            (self.start, *[0] * (len(initial.shape) - 1)),
        )
        ways = _ways_to_ask(initial.source)
        if "shard_info" in ways:
            result = initial.source(shard_info=part)
        elif ways:
            result = initial.source(partition_shape=part.shape, partition_offset=part.offset)
        else:
            result = initial.source()
        value = _array(initial.name, result, initial.dtype)
        if value.shape == part.shape:
            return value
        if value.shape == initial.shape:
            return value[self.start : self.stop]
        raise ValueError(
            f"the initial_value of variable {initial.name!r} returned shape {value.shape}: wanted "
            f"{part.shape} for rows {self.start} to "
            f"{self.stop}, or {initial.shape} for the whole variable"
        )


def _ways_to_ask(function: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments that tell a function which part to make. The result is
    empty if the function can only make the whole value.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtin functions have no signature
        return set()
    by_name = {
        name
        for name, parameter in parameters.items()
        if parameter.kind
        in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    }
    if "shard_info" in by_name:
        return {"shard_info"}
    part_parameters = {"partition_shape", "partition_offset"}
    has_kwargs = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    return part_parameters if has_kwargs or part_parameters <= by_name else set()


def _array(name: str, value: Any, dtype: DTypeLike | None) -> NDArray[Any]:
    label = f"variable {name!r}"
    array = plain_array(value, label)
    if dtype is not None:  # lists keep their Python numbers, which cast converts by their values
        array = cast(
            value if isinstance(value, (list, tuple)) or np.isscalar(value) else array,
            np.dtype(dtype),
            label,
        )
    if array.dtype.hasobject:
        raise ValueError(
            f"variable {name!r} cannot hold {type(value).__name__}: that is no array of numbers "
            f"or text"
        )
    return array

"""Where pipelines begin: the methods of the class `Dataset` that make one of something else."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from zmqdist.data.ops import sources
from zmqdist.data.ops.base import PickledFunction
from zmqdist.data.structure import without_attrs
from zmqdist.data.tree import Tree
from zmqdist.random import operation_seed

D = TypeVar("D", bound="Creation")


def user_function(value: Any, method: str) -> PickledFunction:
    """What an operator keeps of a function. Raises TypeError for anything else; `what` is whose argument it was."""
    if not callable(value):
        raise TypeError(f"{method} takes a function, not {type(value).__name__}")
    return PickledFunction(value)


def _plain(number: Any) -> int | float:
    """A number as JSON has it. Raises TypeError for what is none."""
    value = np.asarray(number).item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a number is expected, not {number!r}")
    return value


def _is_iterable_of_torch(source: Any) -> bool:
    """torch's IterableDataset inherits a `__getitem__` that only raises, and may have a length. Who has one has imported torch."""
    torch = sys.modules.get("torch.utils.data")
    return torch is not None and isinstance(source, torch.IterableDataset)


class Creation(Tree):
    """The part of `Dataset` that makes datasets of arrays, files and functions."""

    __slots__ = ()

    @classmethod
    def range(cls: type[D], *args: Any, output_type: Any = np.int64, name: str | None = None) -> D:
        """Numbers as Python's `range(stop)`, `range(start, stop)`, `range(start, stop, step)` gives them, as `output_type`.

        Raises:
          InvalidArgumentError: the step is 0, or `output_type` does not hold the numbers.
          ValueError: none or more than three arguments.
        """
        if not 1 <= len(args) <= 3:
            raise ValueError(f"range takes one to three numbers, not {len(args)}")
        numbers = [_plain(one) for one in args]
        start, stop, step = (
            numbers * 2 if len(numbers) == 3 else [0, *numbers, 1] if len(numbers) == 1 else [*numbers, 1]
        )[:3]
        return cls(sources.Range.build(start, stop, step, output_type))

    @classmethod
    def from_tensors(cls: type[D], tensors: Any, name: str | None = None) -> D:
        """One element. Arrays are not copied."""
        return cls(sources.Tensors.build(tensors))

    @classmethod
    def from_tensor_slices(cls: type[D], tensors: Any, name: str | None = None) -> D:
        """What lies along axis 0 of each leaf. Arrays are not copied: the elements are read-only views of them.

        Raises:
          ValueError: a leaf is a scalar, or they differ in length.
        """
        return cls(sources.Slices.build(tensors))

    @classmethod
    def from_generator(
        cls: type[D],
        generator: Callable[..., Any],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Any = (),
        output_signature: Any = None,
        name: str | None = None,
    ) -> D:
        """What `generator(*args)` yields; it is called for each iterator.

        Without `output_signature` (or `output_types`, with `output_shapes`) the spec is that of the first item, and nothing is
        checked. A state of an iterator over it is a count: a load calls the generator again and skips.

        Raises:
          TypeError: `generator` is not callable. Reading raises InvalidArgumentError for an item that does not fit the signature.
        """
        spec = without_attrs(output_signature)
        if spec is None and output_types is not None:
            spec = sources.spec_from(output_types, output_shapes)
        return cls(sources.Generator(user_function(generator, "from_generator"), tuple(args or ()), spec))

    @classmethod
    def from_source(cls: type[D], source: Any, output_signature: Any = None, name: str | None = None) -> D:
        """The items of any iterable, or of anything with items by position: lists, torch and Hugging Face datasets, Grain sources.

        An object with `len(source)` and `source[position]` is read by position: it can be dealt out, and a state of an iterator is a
        number. Any other is read as `from_generator` reads, from the beginning for each iterator (`iter(source)`); where what that
        gives can tell its place (`get_state` or `state_dict`), a state holds that.

        Raises:
          TypeError: it is an iterator, which can be read once only, a mapping, or nothing that can be read.
        """
        spec = without_attrs(output_signature)
        if isinstance(source, Mapping):
            raise TypeError("a mapping has no order of items: from_tensor_slices takes a dict of arrays")
        if hasattr(source, "__next__"):
            raise TypeError(
                f"{type(source).__name__} can be read once only: give from_generator a function that makes it"
            )
        if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not _is_iterable_of_torch(source):
            return cls(sources.Source(PickledFunction(source), len(source), spec))
        if not hasattr(source, "__iter__"):
            raise TypeError(
                f"a source is iterable, or has a length and items by position; {type(source).__name__} is neither"
            )
        return cls(sources.Generator(PickledFunction(functools.partial(iter, source)), (), spec, kept=True))

    @classmethod
    def random(
        cls: type[D], seed: int | None = None, rerandomize_each_iteration: bool | None = None, name: str | None = None
    ) -> D:
        """int64 in [0, 2**32) without end; the same for each iterator unless `rerandomize_each_iteration`."""
        return cls(sources.Random(operation_seed(seed), bool(rerandomize_each_iteration)))

    @classmethod
    def counter(cls: type[D], start: Any = 0, step: Any = 1, dtype: Any = np.int64, name: str | None = None) -> D:
        """start, start + step, ... without end."""
        return cls(sources.Counter(_plain(start), _plain(step), np.dtype(dtype).str))

"""The methods of `Dataset` that create a dataset from arrays, generators and other sources."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from zmqdist.data.ops import sources
from zmqdist.data.ops.base import PickledFunction
from zmqdist.data.structure import declared_spec
from zmqdist.data.tree import Tree
from zmqdist.field_types import checked, converted
from zmqdist.random import operation_seed

D = TypeVar("D", bound="DatasetConstructors")


def floats_of(values: Any) -> tuple[float, ...]:
    """Return numbers as floats. Raises TypeError or ValueError for other values."""
    return tuple(map(float, np.ravel(values)))


def _plain(number: Any, argument: str = "args") -> int | float:
    """Return a number as a JSON type. Raises TypeError, which names the argument, for other
    values.
    """
    value = np.asarray(number).item() if np.ndim(number) == 0 else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument}: expected a number, not {number!r}")
    return value


def _is_iterable_of_torch(source: Any) -> bool:
    """Return whether `source` is a torch IterableDataset. Such a dataset must be read by `iter`,
    because its `__getitem__` always raises.

    Does not import torch, because a program with such an object has already imported it.
    """
    torch = sys.modules.get("torch.utils.data")
    return torch is not None and isinstance(source, torch.IterableDataset)


@checked
class DatasetConstructors(Tree):
    """The part of `Dataset` that creates datasets from arrays, generators and sources."""

    __slots__ = ()

    @classmethod
    def range(cls: type[D], *args: Any, output_type: Any = np.int64, name: str | None = None) -> D:
        """Return a dataset of the numbers of Python's `range(stop)`, `range(start, stop)` or
        `range(start, stop, step)`, with the dtype `output_type`. The arguments may be floats. An
        integer `output_type` cuts off the fractions of the numbers.

        >>> print(*Dataset.range(2, 10, 3))
        2 5 8

        Raises:
          InvalidArgumentError: the step is 0, an argument is not finite, or an integer
            `output_type` cannot hold the numbers.
          ValueError: there are no arguments, or more than three.
          TypeError: an argument is not a number.
        """
        if not 1 <= len(args) <= 3:
            raise ValueError(f"range takes one to three numbers, not {len(args)}")
        numbers = [_plain(one) for one in args]
        start, stop, step = (
            numbers * 2
            if len(numbers) == 3
            else [0, *numbers, 1]
            if len(numbers) == 1
            else [*numbers, 1]
        )[:3]
        return cls(sources.Range.build(start, stop, step, output_type))

    @classmethod
    def from_tensors(cls: type[D], tensors: Any, name: str | None = None) -> D:
        """Return a dataset of one element, `tensors`. Arrays are not copied, and the element has
        read-only views of them.

        >>> print(*Dataset.from_tensors([[1, 2], [3, 4]]))
        [[1 2] [3 4]]
        """
        return cls(converted("tensors", sources.Tensors.build, tensors))

    @classmethod
    def from_tensor_slices(cls: type[D], tensors: Any, name: str | None = None) -> D:
        """Return a dataset of the slices of each leaf along axis 0. Arrays are not copied, and the
        elements have read-only views of them.

        >>> print(*Dataset.from_tensor_slices([[1, 2], [3, 4]]))
        [1 2] [3 4]

        Raises:
          ValueError: a leaf is a scalar, a Ragged or a Sparse, or the leaves differ in length.
        """
        return cls(converted("tensors", sources.Slices.build, tensors))

    @classmethod
    def from_generator(
        cls: type[D],
        generator: Callable[..., Any],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Iterable[Any] | None = (),
        output_signature: Any = None,
        name: str | None = None,
    ) -> D:
        """Return a dataset of the items that `generator(*args)` yields. Each iterator calls
        `generator`.

        >>> words = Dataset.from_generator(lambda: iter("abc"))
        >>> print(*words)
        a b c

        If neither `output_signature` nor `output_types` is passed, the first item determines the
        spec, and the other items are not checked. The state of an iterator is a number of items.
        Loading the state calls the generator again and skips this number of items. If the result of
        `generator` can save its position, the state contains that position instead, as for
        `from_source`.

        Raises:
          TypeError: `generator` is not callable, or both `output_signature` and `output_types` were
            passed.
          InvalidArgumentError: while iterating, an item does not fit the signature.
        """
        spec = declared_spec("output_signature", output_signature)
        if spec is not None and output_types is not None:
            raise TypeError("from_generator takes output_signature or output_types, not both")
        if output_types is not None:
            spec = converted(
                "output_types and output_shapes", sources.spec_from, output_types, output_shapes
            )
        return cls(sources.Generator(PickledFunction(generator), tuple(args or ()), spec))

    @classmethod
    def from_source(
        cls: type[D], source: Any, output_signature: Any = None, name: str | None = None
    ) -> D:
        """Return a dataset of the items of an iterable, or of an object with items by position: a
        list, a torch or Hugging Face dataset, a Grain source.

        >>> print(*Dataset.from_source(["a", "b", "c"]))
        a b c

        An object with `len(source)` and `source[position]` is read by position. A data service can
        split it among workers, and the state of an iterator is a position. For any other object,
        each iterator calls `iter(source)`. If the result can save its position (`get_state` or
        `state_dict`), the state of the iterator contains that position. Otherwise the state is a
        number of items, as for `from_generator`.

        Args:
          output_signature: the spec of the items. Without a signature, the first item determines
            the spec.

        Raises:
          TypeError: `source` is an iterator, which can be read only once, or a mapping, or is
            neither iterable nor readable by position.
        """
        spec = declared_spec("output_signature", output_signature)
        if isinstance(source, Mapping):
            raise TypeError(
                "the items of a mapping have no order: pass a list, or call from_tensor_slices() "
                "for a dict of arrays"
            )
        if hasattr(source, "__next__"):
            raise TypeError(
                f"{type(source).__name__} can be read only once: pass from_generator a function "
                f"that makes it"
            )
        if (
            hasattr(source, "__len__")
            and hasattr(source, "__getitem__")
            and not _is_iterable_of_torch(source)
        ):
            return cls(sources.Source(PickledFunction(source), len(source), spec))
        if not hasattr(source, "__iter__"):
            raise TypeError(
                f"a source is iterable, or has a length and items by position; "
                f"{type(source).__name__} is neither"
            )
        return cls(
            sources.Generator(PickledFunction(functools.partial(iter, source)), (), spec, kept=True)
        )

    @classmethod
    def random(
        cls: type[D],
        seed: int | None = None,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> D:
        """Return a dataset of random int64 numbers in [0, 2**32), without end. Each iterator yields
        the same numbers, unless `rerandomize_each_iteration` is True.

        >>> numbers = Dataset.random(seed=7).take(2)
        >>> list(numbers) == list(numbers)
        True
        """
        return cls(sources.Random(operation_seed(seed), bool(rerandomize_each_iteration)))

    @classmethod
    def counter(
        cls: type[D], start: Any = 0, step: Any = 1, dtype: Any = np.int64, name: str | None = None
    ) -> D:
        """Return a dataset of the numbers start, start + step, start + 2 * step, ..., without end.

        >>> print(*Dataset.counter(10, 5).take(3))
        10 15 20
        """
        return cls(
            sources.Counter(
                _plain(start, "start"),
                _plain(step, "step"),
                converted("dtype", np.dtype, dtype).str,
            )
        )

"""The class `Dataset`, which has the operators as methods, with the names and arguments of tf.data.

Rules
    Each method returns a new Dataset, and checks its arguments as far as this is possible without
    reading elements. No operator runs before the dataset is iterated, or `element_spec` needs its
    first element. A value with which no element can be computed, such as a batch size of 0, raises
    InvalidArgumentError. An argument of the wrong kind raises ValueError or TypeError, as in
    tf.data. Every method accepts `name` and ignores it.

    A user function gets the parts of a tuple as separate arguments. Every other element (dicts and
    namedtuples included) is one argument. The functions of `scan` and `reduce` get (state,
    element), and their element is one argument even if it is a tuple.

Not here: the facts about a pipeline that are known without running it (tree.py), the work of each
operator (ops/).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from zmqdist import nest
from zmqdist.data import interfaces
from zmqdist.data.constants import AUTOTUNE
from zmqdist.data.interfaces import dataset_class
from zmqdist.data.iterators import stopped_error
from zmqdist.data.ops import (
    background,
    batching,
    caching,
    combining,
    elementwise,
    randomness,
    readers,
    saving,
    sources,
    windows,
)
from zmqdist.data.ops.base import Op, PickledFunction
from zmqdist.data.options import Options
from zmqdist.data.sharding import common_shard, unread
from zmqdist.data.structure import (
    UNKNOWN_SPEC,
    checked_int,
    common_spec,
    declared_spec,
    element,
    invalid,
    is_dataset,
    spec_of,
    without_attrs,
)
from zmqdist.data.tree import Tree
from zmqdist.field_types import checked, converted
from zmqdist.random import operation_seed
from zmqdist.specs import TensorSpec
from zmqdist.type_variables import T_co

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    Leaf: TypeAlias = np.generic | NDArray[Any] | str | bytes
    Truth: TypeAlias = bool | np.bool_

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
D = TypeVar("D", bound="Dataset")
N = TypeVar("N", bound=np.generic)
E = TypeVar("E", bound="Leaf | tuple[Leaf, ...] | Mapping[str, Leaf] | Dataset")
"""What a function may return that becomes an element as it is: other numbers and lists are
converted."""


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


def _checked_inputs(datasets: Any, argument: str = "datasets") -> tuple[Dataset, ...]:
    """Return `datasets` as a tuple. Raises ValueError if there are no datasets, and TypeError if a
    value is not a Dataset or the elements of two datasets differ in type.
    """
    inputs = tuple(datasets)
    if not inputs:
        raise ValueError("`datasets` is empty: pass one dataset or more")
    if not all(map(is_dataset, inputs)):
        raise TypeError(f"`{argument}` must hold Datasets only")
    specs = [dataset.known_spec for dataset in inputs if dataset.known_spec is not UNKNOWN_SPEC]
    for spec in specs[1:]:
        common_spec(specs[0], spec)
    return inputs


@dataset_class
@checked
class Dataset(Tree[T_co]):
    """A pipeline whose elements are computed while it is iterated: `for element in dataset`.

    >>> dataset = Dataset.range(10).filter(lambda x: x % 2 == 0).map(lambda x: x * x)
    >>> print(*dataset)
    0 4 16 36 64

    A dataset is immutable and can be iterated any number of times. Each iterator starts at the
    beginning.
    """

    __slots__ = ()

    def _then(self, op: Op, *more_inputs: Tree) -> Dataset:
        return Dataset(op, (self, *more_inputs))

    def __reduce__(self) -> tuple[Any, ...]:
        return deserialize, (self.serialize(),)

    def _common_shard(self, count: int, index: int, entropy: tuple[int, int]) -> Dataset:
        """Return every `count`-th element, from `index` on, in the order that all workers with the
        same `entropy` have in common.

        Per-worker datasets look for this method (scheduling/shared/datasets.py), because they
        accept any iterable and import no dataset.
        """
        return common_shard(unread(self), count, index, entropy)

    # -- sources --

    @overload
    @classmethod
    def range(cls, *args: Any, name: str | None = None) -> Dataset[np.int64]: ...

    @overload
    @classmethod
    def range(cls, *args: Any, output_type: Any, name: str | None = None) -> Dataset: ...

    @classmethod
    def range(cls, *args: Any, output_type: Any = np.int64, name: str | None = None) -> Dataset:
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
        numbers = [_plain(number) for number in args]
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
          ValueError: a leaf is a scalar, or the leaves differ in length.
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
        return cls(randomness.Random(operation_seed(seed), bool(rerandomize_each_iteration)))

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

    # -- from files --

    @staticmethod
    def list_files(
        file_pattern: Any,
        shuffle: bool | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset[str]:
        """Return a dataset of the names of the files and folders that match `file_pattern`. Each
        iterator shuffles the names. With `shuffle=False` they are sorted.

        >>> Dataset.range(3).save(f"{folder}/listed")
        >>> len(Dataset.list_files(f"{folder}/listed/*")) > 0
        True

        The files are listed once, in this call. Raises InvalidArgumentError if no file matches.
        """
        files = sources.files_matching(file_pattern)
        dataset = Dataset(sources.Slices.build(files))
        return dataset if shuffle is False else dataset.shuffle(len(files), seed)

    @staticmethod
    def load(
        path: str,
        element_spec: Any = None,
        compression: str | None = None,
        reader_func: Callable[[Dataset], Dataset] | None = None,
        wait: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Return the dataset that `save` or `distributed_save` wrote to `path`.

        >>> Dataset.range(3).save(f"{folder}/loaded")
        >>> print(*Dataset.load(f"{folder}/loaded"))
        0 1 2

        A `distributed_save` can be loaded before it is complete. Iterators then yield its elements
        as the chunks are committed.

        Args:
          path: a folder. For `distributed_save` it may also be the URL of a folder (which needs the
            package fsspec).
          element_spec: the expected spec; None accepts any spec.
          compression: the expected compression; None accepts any compression.
          reader_func: a function that gets a dataset with one dataset per file, and returns the
            dataset to read.
          wait: whether to block until a saved dataset appears at `path`. The call looks for it at
            least every 5 seconds.

        Raises:
          NotFoundError: there is no saved dataset at `path`.
          ValueError: the saved dataset has another `element_spec`, or its `distributed_save` failed
            or used another compression.
          DataLossError: `save` used another compression, or the file that describes the saved
            dataset is damaged.
          OpError: while iterating, a `distributed_save` that was still running has failed with this
            error.
        """
        dataset: Dataset = saving.load(
            os.fspath(path),
            declared_spec("element_spec", element_spec),
            compression,
            reader_func,
            wait,
        )
        return dataset

    # -- element by element --

    @overload
    def map(
        self: Dataset[tuple[A, B]],
        map_func: Callable[[A, B], E],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        synchronous: bool | None = None,
        use_unbounded_threadpool: bool = False,
        output_signature: None = None,
        name: str | None = None,
    ) -> Dataset[E]: ...

    @overload
    def map(
        self: Dataset[tuple[Any, ...]],
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        synchronous: bool | None = None,
        use_unbounded_threadpool: bool = False,
        output_signature: Any = None,
        name: str | None = None,
    ) -> Dataset[Any]: ...

    @overload
    def map(
        self,
        map_func: Callable[[T_co], E],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        synchronous: bool | None = None,
        use_unbounded_threadpool: bool = False,
        output_signature: None = None,
        name: str | None = None,
    ) -> Dataset[E]: ...

    @overload
    def map(
        self,
        map_func: Callable[[T_co], Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        synchronous: bool | None = None,
        use_unbounded_threadpool: bool = False,
        output_signature: Any = None,
        name: str | None = None,
    ) -> Dataset[Any]: ...

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        synchronous: bool | None = None,
        use_unbounded_threadpool: bool = False,
        output_signature: Any = None,
        name: str | None = None,
    ) -> Dataset:
        """Return a dataset of `map_func(element)`. An iterator raises the error of a failed call,
        and then continues with the next element.

        >>> print(*Dataset.range(4).map(lambda x: x + 10))
        10 11 12 13

        Args:
          num_parallel_calls: the number of threads that call `map_func`. AUTOTUNE means one thread
            per processor. With None, the thread that reads the dataset calls `map_func`.
          deterministic: False yields results in the order in which they are ready. With None, the
            options decide.
          synchronous, use_unbounded_threadpool: accepted and ignored.
          output_signature: the spec of the results, with None for sizes that vary. Python numbers
            and lists are converted to the dtypes of the signature, and iterating raises
            InvalidArgumentError for a result that does not fit. Without a signature, `element_spec`
            computes the first element to learn the spec.
        """
        function, calls = PickledFunction(map_func), background.checked_parallel(num_parallel_calls)
        return self._then(
            elementwise.Map(
                function, declared_spec("output_signature", output_signature), calls, deterministic
            )
        )

    def scan(
        self, initial_state: Any, scan_func: Callable[..., Any], name: str | None = None
    ) -> Dataset:
        """Map with a state. `scan_func(state, element)` returns (next state, output element), and
        `initial_state` is the first state. States may differ in shape.

        >>> print(*Dataset.range(5).scan(0, lambda total, x: (total + x, total + x)))
        0 1 3 6 10
        """
        return self._then(
            elementwise.Scan(
                converted("initial_state", element, initial_state), PickledFunction(scan_func)
            )
        )

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset[tuple[np.int64, T_co]]:
        """Return a dataset of (number, element), numbered from `start`.

        >>> [(int(number), x) for number, x in Dataset.from_source(["a", "b"]).enumerate(start=1)]
        [(1, 'a'), (2, 'b')]
        """
        return self._then(elementwise.Enumerate(checked_int(start, "start")))

    def with_options(self, options: Options, name: str | None = None) -> Dataset[T_co]:
        """Set how the pipeline runs. An option that a later call sets overrides the option of an
        earlier call.

        >>> options = zd.data.Options()
        >>> options.deterministic = False
        >>> int(sum(Dataset.range(4).map(abs, num_parallel_calls=2).with_options(options)))
        6
        """
        if not isinstance(options, Options):
            raise TypeError(f"with_options takes Options, not {type(options).__name__}")
        return self._then(elementwise.WithOptions(options.as_dict()))

    @overload
    def filter(
        self: Dataset[tuple[A, B]], predicate: Callable[[A, B], Truth], name: str | None = None
    ) -> Dataset[tuple[A, B]]: ...

    @overload
    def filter(
        self: Dataset[tuple[Any, ...]], predicate: Callable[..., Truth], name: str | None = None
    ) -> Dataset[T_co]: ...

    @overload
    def filter(
        self, predicate: Callable[[T_co], Truth], name: str | None = None
    ) -> Dataset[T_co]: ...

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """Keep the elements for which `predicate` returns True. Iterating raises TypeError for a
        result that is not a bool.

        >>> print(*Dataset.range(6).filter(lambda x: x % 2 == 1))
        1 3 5
        """
        return self._then(elementwise.Filter(PickledFunction(predicate)))

    def take(self, count: int, name: str | None = None) -> Dataset[T_co]:
        """Keep the first `count` elements, or all elements if `count` is negative.

        >>> print(*Dataset.range(10).take(3))
        0 1 2
        """
        return self._then(elementwise.Take(checked_int(count, "count")))

    def skip(self, count: int, name: str | None = None) -> Dataset[T_co]:
        """Drop the first `count` elements, or all elements if `count` is negative.

        >>> print(*Dataset.range(5).skip(3))
        3 4
        """
        return self._then(elementwise.Skip(checked_int(count, "count")))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset[T_co]:
        """Keep the elements at positions `index`, `index + num_shards`, `index + 2 * num_shards`,
        ...

        >>> print(*Dataset.range(7).shard(3, 1))
        1 4
        """
        return self._then(
            elementwise.ShardOp.build(
                checked_int(num_shards, "num_shards"), checked_int(index, "index")
            )
        )

    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset[T_co]:
        """Keep the elements before the first element for which `predicate` returns False.

        >>> print(*Dataset.range(10).take_while(lambda x: x < 3))
        0 1 2
        """
        return self._then(elementwise.TakeWhile(PickledFunction(predicate)))

    def unique(self, name: str | None = None) -> Dataset[T_co]:
        """Keep the first of equal numbers or strings. An iterator holds each distinct value, and
        raises TypeError for other elements.

        >>> print(*Dataset.from_source([3, 1, 3, 2, 1]).unique())
        3 1 2
        """
        return self._then(elementwise.Unique())

    def ignore_errors(self, log_warning: bool = False, name: str | None = None) -> Dataset[T_co]:
        """Leave out elements whose computation raises an error. With `log_warning`, log a warning
        for each error.

        >>> print(*Dataset.from_source([1, 0, 2]).map(lambda x: 2 // int(x)).ignore_errors())
        2 1
        """
        return self._then(elementwise.IgnoreErrors(bool(log_warning)))

    # -- batches, shuffles and windows --

    @overload
    def batch(
        self: Dataset[tuple[Any, ...] | Mapping[str, Any] | str | bytes],
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset[Any]: ...

    @overload
    def batch(
        self: Dataset[N],
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset[NDArray[N]]: ...

    @overload
    def batch(
        self: Dataset[NDArray[N]],
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset[NDArray[N]]: ...

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Stack each `batch_size` consecutive elements along a new axis 0. Iterating raises
        InvalidArgumentError if their shapes differ.

        >>> print(*Dataset.range(5).batch(2))
        [0 1] [2 3] [4]

        Args:
          drop_remainder: whether to leave out a last batch that is smaller.
          num_parallel_calls, deterministic: as for `map`. The threads stack the elements, which
            saves time for large arrays.
        """
        calls = background.checked_parallel(num_parallel_calls)
        size = batching.BatchOp.checked(batch_size)
        return self._then(batching.BatchOp(size, bool(drop_remainder), calls, deterministic))

    def unbatch(self, name: str | None = None) -> Dataset:
        """Split each element along axis 0. Raises ValueError if the spec shows that an element
        cannot be split.

        >>> print(*Dataset.from_source([[0, 1], [2, 3]]).unbatch())
        0 1 2 3
        """
        spec, declared = self.known_spec, self.declared_spec
        if spec is not UNKNOWN_SPEC:
            batching.rows_in(spec)
        return self._then(
            batching.Unbatch(None if declared is UNKNOWN_SPEC else batching.rows_in(declared))
        )

    def rebatch(
        self, batch_size: Any, drop_remainder: bool = False, name: str | None = None
    ) -> Dataset[T_co]:
        """Split batches, and stack the rows to batches of another size. If `batch_size` is a list,
        its sizes are used in turn. A batch of size 0 has no rows.

        >>> print(*Dataset.range(6).batch(3).rebatch([4, 2]))
        [0 1 2 3] [4 5]

        Raises:
          InvalidArgumentError: a size is negative, no size is positive, or the sizes are no list.
          ValueError: the spec shows that an element cannot be split.
        """
        if np.ndim(batch_size) > 1:
            raise invalid(f"batch_size must be a number or a list of numbers, not {batch_size}")
        sizes = tuple(checked_int(size, "batch_size") for size in np.ravel(batch_size))
        if min(sizes, default=0) < 0 or not any(sizes):
            raise invalid(f"Batch sizes must be greater than zero, not {batch_size}")
        if self.known_spec is not UNKNOWN_SPEC:
            batching.rows_in(self.known_spec)
        return self._then(batching.Rebatch(sizes, bool(drop_remainder)))

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
        name: str | None = None,
    ) -> Dataset[T_co]:
        """Shuffle elements through a buffer of `buffer_size` elements. The buffer yields a random
        element, which the next input element replaces. A size of -2 buffers all elements.

        >>> shuffled = Dataset.range(10).shuffle(10, seed=7)
        >>> sorted(shuffled) == list(range(10))
        True

        Each iterator, and each epoch of a later `repeat`, yields another order, unless
        `reshuffle_each_iteration=False`.
        """
        reshuffle = True if reshuffle_each_iteration is None else bool(reshuffle_each_iteration)
        return self._then(
            randomness.Shuffle(
                randomness.Shuffle.checked(buffer_size), operation_seed(seed), reshuffle
            )
        )

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Batch elements that differ in size. Each element is padded to `padded_shapes`, or to the
        largest size in its batch.

        >>> spec = zd.TensorSpec((None,), np.int64)
        >>> rows = Dataset.range(1, 3).map(np.arange, output_signature=spec)
        >>> print(*rows.padded_batch(2, padding_values=-1))
        [[ 0 -1] [ 0 1]]

        Args:
          padded_shapes: a shape for each leaf. None or -1 in a shape stands for the largest size in
            the batch.
          padding_values: a value for each leaf, or one value for all leaves. None stands for 0,
            False or "".

        Raises:
          ValueError: a rank is unknown, or there is another number of `padded_shapes` or
            `padding_values` than of leaves.
          TypeError: a padding value has another type than its leaf, or an element contains a Ragged
            or Sparse.
          DataLossError: while iterating, an element is larger than its shape in `padded_shapes`.
          InvalidArgumentError: while iterating, elements of a batch differ in structure, dtype or
            rank, or in rank from `padded_shapes`.
        """
        size = batching.BatchOp.checked(batch_size)
        declared = batching.declared_shapes(self.declared_spec, padded_shapes)
        op = batching.PaddedBatch(
            size, bool(drop_remainder), padded_shapes, padding_values, declared
        )
        op.check(self.known_spec)
        return self._then(op)

    def ragged_batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        row_splits_dtype: Any = np.int64,
        name: str | None = None,
    ) -> Dataset:
        """Batch elements that differ in size along axis 0. Each leaf of a batch is a
        `Ragged(values, row_splits)`. Scalars are stacked.

        >>> spec = zd.TensorSpec((None,), np.int64)
        >>> rows = Dataset.range(1, 3).map(np.arange, output_signature=spec)
        >>> next(iter(rows.ragged_batch(2))).to_list()
        [[0], [0, 1]]
        """
        size = batching.BatchOp.checked(batch_size)
        return self._then(
            batching.RaggedBatch(
                size,
                bool(drop_remainder),
                converted("row_splits_dtype", np.dtype, row_splits_dtype).str,
            )
        )

    def sparse_batch(self, batch_size: int, row_shape: Any, name: str | None = None) -> Dataset:
        """Join each `batch_size` consecutive arrays, which may differ in size, to one
        `zd.data.Sparse` of shape (number of arrays, *row_shape). It holds all of their values.

        >>> spec = zd.TensorSpec((None,), np.int64)
        >>> rows = Dataset.range(1, 3).map(np.arange, output_signature=spec)
        >>> next(iter(rows.sparse_batch(2, [4]))).to_dense().tolist()
        [[0, 0, 0, 0], [0, 1, 0, 0]]

        Args:
          row_shape: the shape of a row; None or -1 in it stands for the largest size in the batch.

        Raises:
          TypeError: an element is not one array.
          InvalidArgumentError: while iterating, arrays differ in dtype, or in rank from
            `row_shape`.
          DataLossError: while iterating, an array is larger than `row_shape`.
        """
        size, shape = (
            batching.BatchOp.checked(batch_size),
            batching.checked_shape(row_shape, "row_shape"),
        )
        op = batching.SparseBatch(size, False, shape)
        if self.known_spec is not UNKNOWN_SPEC:
            op.element_spec((self.known_spec,))
        return self._then(op)

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Iterable[int],
        bucket_batch_sizes: Iterable[int],
        padded_shapes: Any = None,
        padding_values: Any = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Batch elements of similar length. Bucket i takes elements of lengths in
        [bucket_boundaries[i - 1], bucket_boundaries[i]).

        >>> spec = zd.TensorSpec((None,), np.int64)
        >>> rows = Dataset.range(1, 5).map(np.arange, output_signature=spec)
        >>> buckets = rows.bucket_by_sequence_length(len, [3], [2, 2])
        >>> [batch.shape for batch in buckets]
        [(2, 2), (2, 4)]

        Args:
          element_length_func: a function that returns the length of an element.
          bucket_batch_sizes: a batch size for each bucket. There is one more bucket than
            boundaries.
          pad_to_bucket_boundary: whether to pad to the longest length that the bucket takes. An
            element whose length reaches the last boundary then raises InvalidArgumentError. Without
            `padded_shapes`, the first axis of every leaf is padded to that length. With
            `padded_shapes`, each axis that is None there is padded to that length.
          no_padding: whether to batch without padding. Then `pad_to_bucket_boundary` has no effect.

        Raises:
          ValueError: the number of batch sizes is wrong; also as for `padded_batch`.
          TypeError: as for `padded_batch`.
        """
        boundaries = [checked_int(number, "bucket_boundaries") for number in bucket_boundaries]
        sizes = [checked_int(number, "bucket_batch_sizes") for number in bucket_batch_sizes]
        if len(sizes) != len(boundaries) + 1:
            raise ValueError(
                f"bucket_batch_sizes has {len(sizes)} sizes for {len(boundaries) + 1} buckets"
            )
        if not no_padding:
            batching.PaddedBatch(1, False, padded_shapes, padding_values).check(self.known_spec)
        key = batching.Bucket(element_length_func, boundaries)
        pad_to = boundaries if pad_to_bucket_boundary else None
        make = batching.BucketBatch(
            sizes, padded_shapes, padding_values, pad_to, not no_padding, drop_remainder
        )
        return self.group_by_window(key, make, window_size_func=batching.BucketSize(sizes))

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset[Dataset[T_co]]:
        """Return a dataset of windows, which are datasets of `size` elements. A window starts every
        `shift` elements (default: `size`).

        >>> for window in Dataset.range(4).window(2, shift=1, drop_remainder=True):
        ...     print(*window)
        0 1
        1 2
        2 3

        If the elements are tuples or dicts, a window is such a structure with a dataset for each
        leaf.

        Args:
          stride: the distance, in elements, between two elements of one window.
          drop_remainder: whether to leave out windows at the end that are not full.

        Raises:
          InvalidArgumentError: a number is not positive.
        """
        return self._then(windows.Window.build(size, shift, stride, drop_remainder))

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[..., Any],
        window_size: int | None = None,
        window_size_func: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Group elements by key, and return a dataset of the elements of all datasets that
        `reduce_func(key, dataset)` returns.

        >>> numbers = Dataset.range(6)
        >>> print(*numbers.group_by_window(lambda x: x % 2, lambda key, group: group.batch(3), 3))
        [0 2 4] [1 3 5]

        `reduce_func` is called as soon as a key has `window_size` elements, and at the end of the
        input with the remaining elements of each key.

        Raises:
          ValueError: not exactly one of `window_size` and `window_size_func` was passed. While
            iterating: a key is not an integer.
          InvalidArgumentError: a window size is not positive.
          TypeError: while iterating, `reduce_func` does not return a Dataset.
        """
        if (window_size is None) == (window_size_func is None):
            raise ValueError(
                "group_by_window takes exactly one of window_size and window_size_func"
            )
        size = None if window_size is None else checked_int(window_size, "window_size")
        if size is not None and size < 1:
            raise invalid(f"Window size must be greater than zero, not {window_size}")
        size_func = None if window_size_func is None else PickledFunction(window_size_func)
        keys, reduces = PickledFunction(key_func), PickledFunction(reduce_func)
        return self._then(windows.GroupByWindow(keys, reduces, size, size_func))

    # -- reading ahead and keeping elements --

    def prefetch(self, buffer_size: int | None, name: str | None = None) -> Dataset[T_co]:
        """Let a thread read `buffer_size` elements ahead. With 0 no thread reads ahead. AUTOTUNE
        or None means 8 elements, or more if elements are computed quickly.

        >>> print(*Dataset.range(4).prefetch(2))
        0 1 2 3
        """
        size = AUTOTUNE if buffer_size is None else background.Prefetch.checked(buffer_size)
        return self._then(background.Prefetch(size))

    def cache(self, filename: str = "", name: str | None = None) -> Dataset[T_co]:
        """Cache the elements of the first complete iteration in memory, or in a file whose name
        begins with `filename`.

        >>> cached = Dataset.range(3).cache()
        >>> print(*cached, *cached)
        0 1 2 0 1 2

        Iterating raises AlreadyExistsError while another iterator writes the same file, or if a
        crash has left `<filename>.data.part`.
        """
        return self._then(caching.FileCache(str(filename)) if filename else caching.Cache())

    def snapshot(
        self,
        path: str,
        compression: str | None = "AUTO",
        reader_func: Callable[..., Any] | None = None,
        shard_func: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> Dataset[T_co]:
        """Store the elements of a complete iteration on disk, in a folder below `path`. Later
        iterators read them from the folder.

        >>> stored = Dataset.range(3).snapshot(f"{folder}/snapshot")
        >>> print(*stored, *stored)
        0 1 2 0 1 2

        The folder is named after the pipeline's fingerprint, so that a changed pipeline gets
        another folder. The `compression` is "GZIP", "ZLIB" or "SNAPPY", which is zlib at level 1.
        With "AUTO" or None the files are not compressed. `reader_func` and `shard_func` are as for `load` and `save`.

        Raises:
          FailedPreconditionError: a function in the pipeline cannot be pickled, so that the
            pipeline has no fingerprint.
        """
        names = {"AUTO": "", "SNAPPY": "SNAPPY"}
        codec = names.get(compression or "") or readers.checked_compression(
            None if compression == "AUTO" else compression
        )
        functions = [
            None if function is None else PickledFunction(function)
            for function in (reader_func, shard_func)
        ]
        return self._then(
            saving.Snapshot(os.path.join(os.fspath(path), self.fingerprint()), codec, *functions)
        )

    # -- combining datasets --

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset[T_co]:
        """Repeat the dataset `count` times, or without end if `count` is None or negative.

        >>> print(*Dataset.range(2).repeat(3))
        0 1 0 1 0 1
        """
        return self._then(combining.Repeat(-1 if count is None else checked_int(count, "count")))

    @overload
    @staticmethod
    def zip(
        a: Dataset[A], b: Dataset[B], /, *, name: str | None = None
    ) -> Dataset[tuple[A, B]]: ...

    @overload
    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> Dataset: ...

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> Dataset:
        """Join elements of several datasets until the shortest ends: `zip(a, b)`, `zip((a, b))` or
        `zip({"x": a, "y": b})`.

        >>> numbers = Dataset.range(3)
        >>> [(int(x), int(y)) for x, y in Dataset.zip(numbers, numbers.skip(1))]
        [(0, 1), (1, 2)]
        """
        if datasets is None:
            datasets = args[0] if len(args) == 1 else args
        elif args:
            raise TypeError("zip takes its datasets as arguments or as `datasets`, not both")
        datasets = without_attrs(datasets)
        leaves = nest.flatten(datasets)
        if isinstance(datasets, list) or not leaves or not all(map(is_dataset, leaves)):
            raise TypeError("zip takes Datasets in tuples, namedtuples and dicts as `datasets`")
        form = nest.pack_sequence_as(datasets, [None] * len(leaves))
        return Dataset(combining.Zip(form), leaves)

    def concatenate(self, dataset: Dataset[T], name: str | None = None) -> Dataset[T_co | T]:
        """Append the elements of another dataset. Raises TypeError if the elements of the datasets
        differ in structure or dtype.

        >>> print(*Dataset.range(2).concatenate(Dataset.range(7, 9)))
        0 1 7 8
        """
        _checked_inputs((dataset,), "dataset")
        specs = self.known_spec, dataset.known_spec
        if UNKNOWN_SPEC not in specs:
            common_spec(*specs)
        return self._then(combining.Concatenate(), dataset)

    @overload
    def flat_map(
        self: Dataset[tuple[Any, ...]], map_func: Callable[..., Dataset[T]], name: str | None = None
    ) -> Dataset[T]: ...

    @overload
    def flat_map(
        self, map_func: Callable[[T_co], Dataset[T]], name: str | None = None
    ) -> Dataset[T]: ...

    def flat_map(self, map_func: Callable[..., Any], name: str | None = None) -> Dataset:
        """Map each element to a dataset, and return a dataset of the elements of these datasets,
        one dataset after the other.

        >>> print(*Dataset.range(4).flat_map(lambda n: Dataset.range(n)))
        0 0 1 0 1 2
        """
        return self._then(combining.Interleave(PickledFunction(map_func)))

    def interleave(
        self,
        map_func: Callable[..., Dataset[T]],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset[T]:
        """Map each element to a dataset, have `cycle_length` of these datasets open, and yield
        `block_length` elements from each open dataset in turn.

        >>> print(*Dataset.range(2).interleave(lambda n: Dataset.range(n * 10, n * 10 + 3), 2))
        0 10 1 11 2 12

        Args:
          cycle_length: None or AUTOTUNE means the number of processors, or `num_parallel_calls` if
            that is less. If `num_parallel_calls` is AUTOTUNE, the cycle length is a third of the
            number of processors, rounded up.
          num_parallel_calls: the number of open datasets that are read at the same time. A thread
            reads each of them, and calls `map_func` for it.
          deterministic: True yields the elements in the same order as without threads. False yields
            the next element of any open dataset as soon as it is ready. With None, the options
            decide.

        Raises:
          InvalidArgumentError: a length is not positive.
        """
        if cycle_length is None or cycle_length == AUTOTUNE:
            cycle_length = combining.default_cycle_length(num_parallel_calls)
        cycle_length = checked_int(cycle_length, "cycle_length")
        block_length = 1 if block_length is None else checked_int(block_length, "block_length")
        if cycle_length < 1 or block_length < 1:
            raise invalid(
                f"`cycle_length` and `block_length` must be > 0, not {cycle_length} and "
                f"{block_length}"
            )
        calls = background.checked_parallel(num_parallel_calls)
        function = PickledFunction(map_func)
        return self._then(
            combining.Interleave(function, cycle_length, block_length, calls, deterministic)
        )

    @staticmethod
    def choose_from_datasets(
        datasets: Iterable[Dataset[T]],
        choice_dataset: Dataset,
        stop_on_empty_dataset: bool = True,
        name: str | None = None,
    ) -> Dataset[T]:
        """Take each element from the dataset whose index comes next in `choice_dataset`.

        >>> datasets = [Dataset.range(10, 13), Dataset.range(20, 23)]
        >>> print(*Dataset.choose_from_datasets(datasets, Dataset.from_source([0, 1, 1, 0])))
        10 20 21 11

        Args:
          stop_on_empty_dataset: True ends the iteration when a chosen dataset has ended. False
            skips choices of datasets that have ended.

        Raises:
          ValueError: there are no datasets.
          TypeError: the choices are not int64 scalars, or the elements differ in type.
          InvalidArgumentError: while iterating, an index is out of range.
        """
        inputs = _checked_inputs(datasets)
        choice_spec = _checked_inputs((choice_dataset,), "choice_dataset")[0].known_spec
        if choice_spec is not UNKNOWN_SPEC and choice_spec != TensorSpec((), np.int64):
            raise TypeError(
                f"the elements of `choice_dataset` must be int64 scalars, not {choice_spec}"
            )
        return Dataset(combining.Choose(bool(stop_on_empty_dataset)), (choice_dataset, *inputs))

    @staticmethod
    def sample_from_datasets(
        datasets: Iterable[Dataset[T]],
        weights: Any = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset[T]:
        """Take each element from a dataset that is drawn at random, in proportion to `weights`.
        Draws of datasets that have ended are skipped.

        >>> datasets = [Dataset.range(3), Dataset.range(10, 13)]
        >>> print(*sorted(Dataset.sample_from_datasets(datasets, seed=1)))
        0 1 2 10 11 12

        Args:
          weights: float32 or float64 values, or a dataset of such vectors; None means equal
            weights. A dataset with weight 0 is never read.
          stop_on_empty_dataset: whether to end as soon as a drawn dataset has ended.
          rerandomize_each_iteration: whether each iterator draws another sequence.

        Raises:
          ValueError: there are no datasets, or the number of weights is wrong.
          TypeError: the weights are not floats, or the elements differ in type.
        """
        inputs = _checked_inputs(datasets)
        seeds = operation_seed(seed), bool(rerandomize_each_iteration)
        if is_dataset(weights):
            selector = Dataset(randomness.Selector(None, *seeds), (weights,))
            return Dataset(combining.Choose(bool(stop_on_empty_dataset)), (selector, *inputs))
        shares = np.full(len(inputs), 1 / len(inputs)) if weights is None else np.asarray(weights)
        if shares.dtype not in (np.float32, np.float64):
            raise TypeError(f"weights are float32 or float64, not {shares.dtype}")
        if shares.shape != (len(inputs),):
            raise ValueError(
                f"there are {len(inputs)} datasets, but the weights have the shape {shares.shape}"
            )
        weighted = [
            (float(share), dataset)
            for share, dataset in zip(shares, inputs, strict=True)
            if share > 0
        ]
        if not weighted:
            return inputs[0].take(0)
        selector = Dataset(randomness.Selector(tuple(share for share, _ in weighted), *seeds))
        return Dataset(
            combining.Choose(bool(stop_on_empty_dataset)),
            (selector, *(dataset for _, dataset in weighted)),
        )

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Any,
        initial_dist: Any = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Return a dataset of (class, element) that leaves out random elements, so that the classes
        occur in the proportions of `target_dist`.

        >>> numbers = Dataset.range(100)
        >>> balanced = numbers.rejection_resample(lambda x: int(x >= 90), [0.5, 0.5], [0.9, 0.1])
        >>> 5 < len(list(balanced)) < 50
        True

        Args:
          class_func: a function that returns the class of an element, in [0, len(target_dist)).
          initial_dist: the proportions of the classes in the input. With None they are estimated
            from the elements seen so far.

        Raises:
          ValueError: the two distributions differ in length. While iterating: a class is not an
            integer.
          InvalidArgumentError: while iterating, a class is outside of [0, len(target_dist)).
        """
        target = converted("target_dist", floats_of, target_dist)
        initial = (
            None if initial_dist is None else converted("initial_dist", floats_of, initial_dist)
        )
        if initial is not None and len(initial) != len(target):
            raise ValueError(f"target_dist has {len(target)} classes, initial_dist {len(initial)}")
        function = PickledFunction(class_func)
        return self._then(
            randomness.RejectionResample(function, target, initial, operation_seed(seed))
        )

    def apply(
        self,
        transformation_func: Callable[[Dataset[T_co]], Dataset[T]],
        name: str | None = None,
    ) -> Dataset[T]:
        """Return `transformation_func(self)`, for use in a chain of methods. Raises TypeError if
        the result is not a Dataset.

        >>> print(*Dataset.range(6).apply(lambda dataset: dataset.skip(2).batch(2)))
        [2 3] [4 5]
        """
        dataset = transformation_func(self)
        if not is_dataset(dataset):
            raise TypeError(
                f"the function of apply must return a Dataset, not {type(dataset).__name__}"
            )
        return dataset

    # -- results --

    def reduce(
        self, initial_state: Any, reduce_func: Callable[..., Any], name: str | None = None
    ) -> Any:
        """Compute `state = reduce_func(state, element)` for each element, beginning with
        `initial_state`, and return the last state.

        >>> int(Dataset.range(5).reduce(0, lambda total, x: total + x))
        10

        Raises:
          TypeError: the state changes its structure or dtype.
        """
        state = converted("initial_state", element, initial_state)
        spec = elementwise.without_shapes(spec_of(state))
        for x in self:
            try:
                state = element(reduce_func(state, x))
            except StopIteration as error:
                raise stopped_error("reduce") from error
            elementwise.check_state(state, spec, "reduce")
        return state

    def save(
        self,
        path: str,
        compression: str | None = None,
        shard_func: Callable[..., Any] | None = None,
        checkpoint_args: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Write all elements to the folder `path`. Saving again to the folder adds a newer copy,
        and `load` reads the newest copy.

        >>> Dataset.range(3).save(f"{folder}/saved")
        >>> print(*Dataset.load(f"{folder}/saved"))
        0 1 2

        Args:
          compression: None, "GZIP" or "ZLIB".
          shard_func: a function that returns, for an element, the number of the file into which the
            element is written.
          checkpoint_args: {"directory": folder, "checkpoint_interval": number of elements}. After
            every interval (1,000 elements by default), `save` writes a checkpoint to `directory`.
            If `save` is interrupted, a second call with the same arguments continues from the
            checkpoint. The keys "max_to_keep" and "step_counter" are accepted and ignored.

        Raises:
          InvalidArgumentError: the dataset is infinite.
          ValueError: `compression` or `checkpoint_args` is invalid, or `shard_func` does not return
            an integer.
          UnimplementedError: `checkpoint_args` were passed, and the pipeline has an operator
            without a state.
          FailedPreconditionError: the dataset is empty and its spec is unknown. With
            `checkpoint_args` also: the checkpoint in `directory` belongs to another dataset, path
            or compression, or the dataset cannot be serialized.
        """
        checkpoints = saving.Checkpoints.of(checkpoint_args)
        saving.save(
            self, os.fspath(path), readers.checked_compression(compression), shard_func, checkpoints
        )

    def get_single_element(self, name: str | None = None) -> T_co:
        """Return the only element.

        >>> int(Dataset.range(5).batch(5).map(np.sum).get_single_element())
        10

        Raises:
          InvalidArgumentError: there is no element, or more than one.
        """
        with iter(self) as iterator:
            x: T_co
            for x in iterator:
                for _ in iterator:
                    raise invalid("Dataset had more than one element.")
                return x
        raise invalid("Dataset was empty.")


def deserialize(text: str) -> Dataset:
    """Return the dataset that `serialize` described. This does not unpickle functions. A function
    is unpickled when an iterator or `element_spec` first needs it, which runs code that the sender
    of the description has chosen.

    Raises:
      InvalidArgumentError: `text` is not such a description, has another version, or names an
        unknown operator.
    """
    dataset: Dataset = interfaces.deserialize(text)
    return dataset

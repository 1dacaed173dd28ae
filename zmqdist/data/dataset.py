"""`Dataset`: the operators as methods, under the names and with the arguments of tf.data.

Rules
    Each method makes a new Dataset and checks what can be checked now; nothing runs. Arguments that no elements can satisfy are
    InvalidArgumentError; of the wrong kind, ValueError or TypeError, as in tf.data. `name` is accepted and ignored everywhere.

    Functions get the parts of a tuple as arguments, and everything else (dicts, namedtuples too) as one.

What a pipeline can be asked beside that is in tree.py, where one begins in constructors.py, what ends one in reductions.py, what an
operator does in ops/.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from zmqdist import nest
from zmqdist.data import interfaces
from zmqdist.data.constants import AUTOTUNE
from zmqdist.data.constructors import Creation, user_function
from zmqdist.data.interfaces import dataset_class
from zmqdist.data.ops import (
    background,
    batching,
    caching,
    combining,
    elementwise,
    filtering,
    padding,
    readers,
    resampling,
    saving,
    shuffling,
    sources,
    windows,
)
from zmqdist.data.ops.base import Op
from zmqdist.data.options import Options
from zmqdist.data.reductions import DatasetResults
from zmqdist.data.structure import UNKNOWN_SPEC, checked_int, common_spec, element, invalid, is_dataset, without_attrs
from zmqdist.data.tree import Tree
from zmqdist.random import operation_seed
from zmqdist.specs import TensorSpec


def _checked_inputs(datasets: Any) -> tuple[Dataset, ...]:
    """Inputs of one kind. Raises ValueError for none, TypeError where they differ in type."""
    inputs = tuple(datasets)
    if not inputs:
        raise ValueError("at least one dataset is needed")
    if not all(map(is_dataset, inputs)):
        raise TypeError("Datasets are expected")
    known = [each.known_spec for each in inputs if each.known_spec is not UNKNOWN_SPEC]
    for one in known[1:]:
        common_spec(known[0], one)
    return inputs


@dataset_class
class Dataset(Creation, DatasetResults):
    """Elements that are computed when somebody reads them: `for element in dataset`.

    A dataset never changes and can be read any number of times; each iterator starts anew.
    """

    __slots__ = ()

    def _then(self, op: Op, *more_inputs: Tree) -> Dataset:
        return Dataset(op, (self, *more_inputs))

    def __reduce__(self) -> tuple[Any, ...]:
        return deserialize, (self.serialize(),)

    # -- from files --

    @staticmethod
    def list_files(
        file_pattern: Any, shuffle: bool | None = None, seed: int | None = None, name: str | None = None
    ) -> Dataset:
        """The names of the files that match, sorted; shuffled, anew for each iterator, unless `shuffle=False`.

        Raises:
          InvalidArgumentError: no file matches.
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
        """What `save` wrote, or `distributed_save`; the latter also while it is being written: elements come as they are committed.

        Args:
          path: a folder, or for what `distributed_save` wrote a URL of a folder (extra `zmqdist[fsspec]`).
          reader_func: makes the dataset from the datasets of the files.
          wait: look again, at least every 5 seconds, until something was saved.

        Raises:
          NotFoundError: nothing was saved there. ValueError: it has another `element_spec`; `distributed_save` failed, or used another
            compression. DataLossError: `save` used another compression. Reading raises the error of a `distributed_save` that
            fails meanwhile.
        """
        made: Dataset = saving.load(os.fspath(path), without_attrs(element_spec), compression, reader_func, wait)
        return made

    # -- one by one --

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
        """`map_func` of each element. An exception in it costs that element only.

        Args:
          num_parallel_calls: threads; AUTOTUNE: one for each processor. None: none, it is called where somebody reads.
          deterministic: False lets elements leave in the order in which they are ready; None: as the options say.
          synchronous, use_unbounded_threadpool: accepted.
          output_signature: the spec of what it returns, None for sizes that vary; Python's numbers and lists take its dtypes, and reading
            raises InvalidArgumentError for an element that does not fit. Without it the first element is computed when somebody asks
            for `element_spec`.
        """
        function, calls = user_function(map_func, "map"), background.checked_parallel(num_parallel_calls)
        return self._then(elementwise.Map(function, without_attrs(output_signature), calls, deterministic))

    def scan(self, initial_state: Any, scan_func: Callable[..., Any], name: str | None = None) -> Dataset:
        """`scan_func(state, element)` gives (next state, element out)."""
        return self._then(elementwise.Scan(element(initial_state), user_function(scan_func, "scan")))

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """(number, element)."""
        return self._then(elementwise.Enumerate(checked_int(start, "start")))

    def with_options(self, options: Options, name: str | None = None) -> Dataset:
        """Says how the pipeline runs; later ones win."""
        if not isinstance(options, Options):
            raise TypeError(f"with_options takes Options, not {type(options).__name__}")
        return self._then(elementwise.WithOptions(options.as_dict()))

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """Elements for which `predicate` says True."""
        return self._then(filtering.Filter(user_function(predicate, "filter")))

    def take(self, count: int, name: str | None = None) -> Dataset:
        """The first `count` elements; all where it is negative."""
        return self._then(filtering.Take(checked_int(count, "count")))

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """What follows the first `count` elements; nothing where it is negative."""
        return self._then(filtering.Skip(checked_int(count, "count")))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Elements number `index`, `index + num_shards`, ..."""
        return self._then(filtering.ShardOp.build(checked_int(num_shards, "num_shards"), checked_int(index, "index")))

    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """Elements before the first for which `predicate` says False."""
        return self._then(filtering.TakeWhile(user_function(predicate, "take_while")))

    def unique(self, name: str | None = None) -> Dataset:
        """The first of equal scalars; remembers all of them."""
        return self._then(filtering.Unique())

    def ignore_errors(self, log_warning: bool = False, name: str | None = None) -> Dataset:
        """Leaves out elements whose computation fails."""
        return self._then(filtering.IgnoreErrors(bool(log_warning)))

    # -- several as one --

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Stacks `batch_size` elements on a new axis 0. Reading raises InvalidArgumentError where their shapes differ.

        Args:
          num_parallel_calls, deterministic: as of `map`: threads that stack, which pays for large arrays.
        """
        calls = background.checked_parallel(num_parallel_calls)
        size = batching.BatchOp.checked(batch_size)
        return self._then(batching.BatchOp(size, bool(drop_remainder), calls, deterministic))

    def unbatch(self, name: str | None = None) -> Dataset:
        """Takes elements apart along axis 0. Raises ValueError where a spec says that they cannot be."""
        spec = self.known_spec
        return self._then(batching.Unbatch(None if spec is UNKNOWN_SPEC else batching.rows_in(spec)))

    def rebatch(self, batch_size: Any, drop_remainder: bool = False, name: str | None = None) -> Dataset:
        """Batches of another size; of several sizes in turn, where it is a list."""
        sizes = tuple(checked_int(size, "batch_size") for size in np.ravel(batch_size))
        if not sizes or min(sizes) < 1:
            raise invalid(f"Batch sizes must be greater than zero, not {batch_size}")
        return self._then(batching.Rebatch(sizes, bool(drop_remainder)))

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
        name: str | None = None,
    ) -> Dataset:
        """Keeps `buffer_size` elements, and gives one of them at random for each that comes; -2: all of them.

        Each iterator, and each epoch of a later `repeat`, has another order, unless `reshuffle_each_iteration=False`.
        """
        reshuffle = True if reshuffle_each_iteration is None else bool(reshuffle_each_iteration)
        return self._then(shuffling.Shuffle(shuffling.Shuffle.checked(buffer_size), operation_seed(seed), reshuffle))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """As `batch`, of elements that differ in size: filled up to `padded_shapes`, or to the largest of the batch.

        Args:
          padded_shapes: a shape for each leaf, None (or -1) for sizes that shall be the largest of the batch.
          padding_values: one for each leaf, or one for all; 0, False or "" where it is None.

        Raises:
          ValueError: a rank is unknown. TypeError: a padding value of another type, or elements that are Ragged or Sparse. Reading
            raises DataLossError for an element that is larger than its shape.
        """
        size = batching.BatchOp.checked(batch_size)
        op = padding.PaddedBatch(size, bool(drop_remainder), padded_shapes, padding_values)
        op.check(self.known_spec)
        return self._then(op)

    def ragged_batch(
        self, batch_size: int, drop_remainder: bool = False, row_splits_dtype: Any = np.int64, name: str | None = None
    ) -> Dataset:
        """As `batch`, of elements that differ along their first axis: a `Ragged(values, row_splits)` for each leaf."""
        size = batching.BatchOp.checked(batch_size)
        return self._then(padding.RaggedBatch(size, bool(drop_remainder), np.dtype(row_splits_dtype).str))

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Any,
        bucket_batch_sizes: Any,
        padded_shapes: Any = None,
        padding_values: Any = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Batches of elements of similar length: bucket i has those below `bucket_boundaries[i]` and none of the buckets before it.

        Args:
          bucket_batch_sizes: one for each bucket, one more than boundaries.
          pad_to_bucket_boundary: pad to the longest that a bucket can hold; an element beyond the last boundary is an
            InvalidArgumentError. Without `padded_shapes` that is the first axis of every leaf.

        Raises:
          ValueError: another number of batch sizes. TypeError: as of `padded_batch`.
        """
        boundaries = [checked_int(one, "bucket_boundaries") for one in bucket_boundaries]
        sizes = [checked_int(one, "bucket_batch_sizes") for one in bucket_batch_sizes]
        if len(sizes) != len(boundaries) + 1:
            raise ValueError(f"{len(boundaries)} boundaries make {len(boundaries) + 1} buckets, not {len(sizes)}")
        if not no_padding:
            padding.PaddedBatch(1, False, padded_shapes, padding_values).check(self.known_spec)
        key = padding.Bucket(element_length_func, boundaries)
        pad_to = boundaries if pad_to_bucket_boundary else None
        make = padding.BucketBatch(sizes, padded_shapes, padding_values, pad_to, not no_padding, drop_remainder)
        return self.group_by_window(key, make, window_size_func=padding.BucketSize(sizes))

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Datasets of `size` elements, a new one every `shift` (by default `size`); one dataset for each leaf of the elements.

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
        """The elements of `reduce_func(key, dataset)`, called for each `window_size` elements of one key; at the end for the rest.

        Raises:
          ValueError: both sizes or none. Reading raises ValueError for a key that is no integer.
        """
        if (window_size is None) == (window_size_func is None):
            raise ValueError("group_by_window takes either window_size or window_size_func")
        size = None if window_size is None else checked_int(window_size, "window_size")
        if size is not None and size < 1:
            raise invalid(f"Window size must be greater than zero, not {window_size}")
        size_func = None if window_size_func is None else user_function(window_size_func, "group_by_window")
        keys, reduces = user_function(key_func, "group_by_window"), user_function(reduce_func, "group_by_window")
        return self._then(windows.GroupByWindow(keys, reduces, size, size_func))

    # -- where and when --

    def prefetch(self, buffer_size: int, name: str | None = None) -> Dataset:
        """A thread reads `buffer_size` elements ahead; AUTOTUNE: some; 0: no thread."""
        return self._then(background.Prefetch(background.Prefetch.checked(buffer_size)))

    def cache(self, filename: str = "", name: str | None = None) -> Dataset:
        """Keeps the elements of the first complete pass, in memory or in files that begin with `filename`.

        Reading raises AlreadyExistsError while another writes the same file.
        """
        return self._then(caching.FileCache(str(filename)) if filename else caching.Cache())

    def snapshot(
        self,
        path: str,
        compression: str | None = "AUTO",
        reader_func: Callable[..., Any] | None = None,
        shard_func: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Keeps a complete pass in a folder below `path` that belongs to this pipeline alone: another pipeline has another.

        Raises:
          FailedPreconditionError: a function of the pipeline cannot be pickled, so that nobody can tell it from others.
        """
        codec = "" if compression == "AUTO" else readers.checked_compression(compression)
        functions = [None if one is None else user_function(one, "snapshot") for one in (reader_func, shard_func)]
        return self._then(saving.Snapshot(os.path.join(os.fspath(path), self.fingerprint()), codec, *functions))

    # -- several datasets --

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """The whole dataset `count` times; for ever where it is None or negative."""
        return self._then(combining.Repeat(-1 if count is None else checked_int(count, "count")))

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> Dataset:
        """Rows of one element of each; ends with the shortest. `zip(a, b)`, `zip((a, b))` or `zip({"x": a, "y": b})`."""
        if datasets is None:
            datasets = args[0] if len(args) == 1 else args
        elif args:
            raise TypeError("zip takes its datasets as arguments or as `datasets`, not both")
        datasets = without_attrs(datasets)
        leaves = nest.flatten(datasets)
        if isinstance(datasets, list) or not leaves or not all(map(is_dataset, leaves)):
            raise TypeError("zip takes Datasets in tuples, namedtuples and dicts")
        form = nest.pack_sequence_as(datasets, [None] * len(leaves))
        return Dataset(combining.Zip(form), leaves)

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """This dataset, then the other.

        Raises:
          TypeError: their elements differ in structure or dtype.
        """
        if not is_dataset(dataset):
            raise TypeError(f"concatenate takes a Dataset, not {type(dataset).__name__}")
        specs = self.known_spec, dataset.known_spec
        if UNKNOWN_SPEC not in specs:
            common_spec(*specs)
        return self._then(combining.Concatenate(), dataset)

    def flat_map(self, map_func: Callable[..., Any], name: str | None = None) -> Dataset:
        """The elements of the datasets that `map_func` makes of the elements, one after the other."""
        return self._then(combining.Interleave(user_function(map_func, "flat_map")))

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """As `flat_map` with `cycle_length` datasets open, of which each in turn gives `block_length` elements.

        Args:
          cycle_length: as many as there are processors, where it is None or AUTOTUNE.
          num_parallel_calls: how many of the open datasets are opened and read at once, each in a thread of its own, where the function
            is called, too; elements keep the order that they have without threads.
          deterministic: False takes from whichever has something ready; None: as the options say.

        Raises:
          InvalidArgumentError: a length is not positive.
        """
        if cycle_length is None or cycle_length == AUTOTUNE:
            cycle_length = combining.default_cycle_length(num_parallel_calls)
        cycle_length = checked_int(cycle_length, "cycle_length")
        block_length = 1 if block_length is None else checked_int(block_length, "block_length")
        if cycle_length < 1 or block_length < 1:
            raise invalid(f"`cycle_length` and `block_length` must be > 0, not {cycle_length} and {block_length}")
        calls = background.checked_parallel(num_parallel_calls)
        function = user_function(map_func, "interleave")
        return self._then(combining.Interleave(function, cycle_length, block_length, calls, deterministic))

    @staticmethod
    def choose_from_datasets(
        datasets: Any, choice_dataset: Dataset, stop_on_empty_dataset: bool = True, name: str | None = None
    ) -> Dataset:
        """From the dataset whose number `choice_dataset` gives, one element each time.

        Raises:
          ValueError: no datasets. TypeError: the choices are no int64 scalars, or the elements differ in type. Reading raises
            InvalidArgumentError for a number that no dataset has.
        """
        inputs = _checked_inputs(datasets)
        known = choice_dataset.known_spec
        if known is not UNKNOWN_SPEC and known != TensorSpec((), np.int64):
            raise TypeError(f"`choice_dataset` gives int64 scalars, not {known}")
        return Dataset(combining.Choose(bool(stop_on_empty_dataset)), (choice_dataset, *inputs))

    @staticmethod
    def sample_from_datasets(
        datasets: Any,
        weights: Any = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """From a dataset chosen at random by weight, one element each time; those that have ended are skipped.

        Args:
          weights: floats, or a dataset of vectors; None: all alike. Datasets with weight 0 are left out.
          rerandomize_each_iteration: whether each iterator chooses otherwise.

        Raises:
          ValueError: no datasets, or another number of weights. TypeError: weights that are no floats.
        """
        inputs = _checked_inputs(datasets)
        seeds = operation_seed(seed), bool(rerandomize_each_iteration)
        if is_dataset(weights):
            selector = Dataset(combining.Selector(None, *seeds), (weights,))
            return Dataset(combining.Choose(bool(stop_on_empty_dataset)), (selector, *inputs))
        shares = np.full(len(inputs), 1 / len(inputs)) if weights is None else np.asarray(weights)
        if shares.dtype not in (np.float32, np.float64):
            raise TypeError(f"weights are float32 or float64, not {shares.dtype}")
        if shares.shape != (len(inputs),):
            raise ValueError(f"{len(inputs)} datasets need as many weights, not {shares.shape}")
        chosen = [(float(share), each) for share, each in zip(shares, inputs, strict=True) if share > 0]
        if not chosen:
            return inputs[0].take(0)
        selector = Dataset(combining.Selector(tuple(share for share, _ in chosen), *seeds))
        return Dataset(combining.Choose(bool(stop_on_empty_dataset)), (selector, *(each for _, each in chosen)))

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Any,
        initial_dist: Any = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """(class, element), leaving out elements so that classes come in the shares of `target_dist`.

        Args:
          initial_dist: the shares in which they come now; where it is None, what was seen so far.

        Raises:
          ValueError: the two differ in length.
        """
        target = tuple(float(one) for one in np.ravel(target_dist))
        initial = None if initial_dist is None else tuple(float(one) for one in np.ravel(initial_dist))
        if initial is not None and len(initial) != len(target):
            raise ValueError(f"target_dist has {len(target)} classes, initial_dist {len(initial)}")
        function = user_function(class_func, "rejection_resample")
        return self._then(resampling.RejectionResample(function, target, initial, operation_seed(seed)))

    def apply(self, transformation_func: Callable[[Dataset], Dataset], name: str | None = None) -> Dataset:
        """`transformation_func(self)`, in a chain. Raises TypeError where it is no Dataset."""
        made = transformation_func(self)
        if not is_dataset(made):
            raise TypeError(f"apply takes a function that returns a Dataset, not {type(made).__name__}")
        return made


def deserialize(text: str) -> Dataset:
    """The dataset that `serialize` described. Unpickles nothing: a function is unpickled where it is first called.

    Raises:
      InvalidArgumentError: not such a description, or of another version, or with an operator that is not known here.
    """
    made: Dataset = interfaces.deserialize(text)
    return made

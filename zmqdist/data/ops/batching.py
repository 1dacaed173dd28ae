"""batch, unbatch, rebatch, padded_batch, ragged_batch and bucket_by_sequence_length: operators that
join several elements to one element, or split elements.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from zmqdist import nest
from zmqdist.data.composites import COMPOSITES, Ragged, Sparse, batched_spec, sparse_spec
from zmqdist.data.constants import UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import DatasetLike, operator
from zmqdist.data.iterators import Context, OperatorNode
from zmqdist.data.ops.background import ParallelNode
from zmqdist.data.ops.base import Op, finite
from zmqdist.data.ops.windows import int_scalar
from zmqdist.data.structure import (
    UNKNOWN_SPEC,
    batched,
    check_end,
    check_leaves,
    checked_int,
    element,
    invalid,
    leaves_of,
    length_of,
    map_specs,
    plain_dtype,
    rows_of,
    spec_of,
    stack,
    unbatched,
)
from zmqdist.errors import DataLossError
from zmqdist.field_types import converted
from zmqdist.specs import TensorSpec, joined


class _BatchesNode(OperatorNode):
    """Collects each `size` consecutive elements in `partial_batch`.

    After an error of the input, `partial_batch` has all elements before the failed element, so that
    only the failed element is lost.
    """

    element_fields = ("partial_batch",)
    state_keys = {"partial_batch": "held"}
    partial_batch: list[Any]

    def batches(self) -> Iterator[list[Any]]:
        """Yield lists of `size` elements, and a shorter last one unless the operator drops it."""
        size, source = self.op.size, self.source()
        while True:
            # If the input raises, no element is lost, because `extend` has added the elements
            # before the error to `partial_batch`.
            self.partial_batch.extend(islice(source, size - len(self.partial_batch)))
            batch = self.partial_batch
            if not batch or (len(batch) < size and self.op.drop_remainder):
                return
            # empty `partial_batch` before the yield, so that a batch that cannot be joined is not
            # joined again
            self.partial_batch = []
            yield batch


class GatheringNode(_BatchesNode):
    """Runs an operator that joins each `size` consecutive elements."""

    def join(self, elements: list[Any]) -> Any:
        """Join several elements to one element."""
        return stack(elements)

    def run(self) -> Iterator[Any]:
        return map(self.join, self.batches())


@dataclass(frozen=True)
class Gathering(Op):
    """Base class of the operators that join each `size` consecutive elements to one element."""

    size: int
    drop_remainder: bool = False

    @classmethod
    def checked(cls, size: Any) -> int:
        """Return the batch size as an int. Raises InvalidArgumentError if it is not positive, and
        TypeError if it is not an integer."""
        count = checked_int(size, "batch_size")
        if count < 1:
            raise invalid(f"batch_size must be greater than zero, not {size}")
        return count

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        if not finite(inputs[0]):
            return inputs[0]
        return inputs[0] // self.size if self.drop_remainder else -(-inputs[0] // self.size)

    def per_split(self) -> Fraction | None:
        return Fraction(1, self.size)

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return batched(inputs[0], self.size if self.drop_remainder else None)


class _ParallelBatchNode(ParallelNode, _BatchesNode):
    """Runs a parallel `batch`: has threads stack the batches."""

    def feed(self) -> Iterator[Any]:
        return self.batches()

    def function(self) -> Callable[[Any], Any]:
        return stack


@operator("batch", GatheringNode)
class BatchOp(Gathering):
    """Stacks elements of one shape, in `parallel` threads. With 0, the thread that reads the
    dataset stacks them."""

    parallel: int = 0
    deterministic: bool | None = None

    def open(self, dataset: DatasetLike, context: Context) -> OperatorNode:
        parallel = self.parallel and not context.probing
        return _ParallelBatchNode(dataset, context) if parallel else GatheringNode(dataset, context)


class _UnbatchNode(OperatorNode):
    """Runs `unbatch`. `batch` has the batch whose rows are yielded, or nothing."""

    plain_fields: ClassVar[tuple[str, ...]] = ("position",)
    element_fields: ClassVar[tuple[str, ...]] = ("batch",)
    batch: list[Any]
    position = 0

    def run(self) -> Iterator[Any]:
        if self.batch:
            yield from self._rest()
        for batch in self.source():
            try:
                length_of(batch)
            except ValueError as error:
                raise invalid(f"cannot unbatch: {error}") from None
            self.batch, self.position = [batch], 0
            yield from self._rest()

    def _rest(self) -> Iterator[Any]:
        for row in islice(rows_of(self.batch[0]), self.position, None):
            self.position += 1
            yield element(row)
        self.batch = []


@operator("unbatch", _UnbatchNode)
class Unbatch(Op):
    """Splits elements along axis 0."""

    known: int | None = None
    """The number of rows in each input element; None if the spec does not determine it."""

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        if self.known is None or inputs[0] == UNKNOWN_CARDINALITY:
            return UNKNOWN_CARDINALITY
        return inputs[0] * self.known if finite(inputs[0]) else inputs[0]

    def per_split(self) -> Fraction | None:
        return None if self.known is None else Fraction(self.known)

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return unbatched(inputs[0])


def rows_in(spec: Any) -> int | None:
    """Return the length along axis 0 that a spec states for all leaves, or None if the length of a
    leaf is unknown. Raises ValueError for scalars and different lengths.
    """
    sizes: set[int | None] = set()
    for leaf in leaves_of(spec):
        if type(leaf) in COMPOSITES:
            sizes.add(None)
        if isinstance(leaf, TensorSpec) and leaf.shape is not None:
            if leaf.shape == ():
                raise ValueError("a scalar has no axis 0 to split along")
            sizes.add(leaf.shape[0])
    lengths = {size for size in sizes if size is not None}
    if len(lengths) > 1:
        raise ValueError(f"the leaves differ in length along axis 0: {sorted(lengths)}")
    return lengths.pop() if lengths and None not in sizes else None


class _RebatchNode(_UnbatchNode):
    """Runs `rebatch`: collects the rows of batches in `partial_batch`, and stacks them again.
    `turn` counts the yielded batches, to select the next size.
    """

    plain_fields = ("position", "turn")
    element_fields = ("batch", "partial_batch")
    state_keys = {"partial_batch": "held"}
    partial_batch: list[Any]
    turn = 0

    def run(self) -> Iterator[Any]:
        sizes = self.op.sizes
        rows = super().run()
        while True:
            size = sizes[self.turn % len(sizes)]
            self.partial_batch.extend(islice(rows, size - len(self.partial_batch)))
            batch = self.partial_batch
            if len(batch) < size:
                break
            self.partial_batch, self.turn = [], self.turn + 1
            yield stack(batch) if batch else self._no_rows()
        if batch and not self.op.drop_remainder:
            self.partial_batch = []
            yield stack(batch)

    def _no_rows(self) -> Any:
        """Return a batch of size 0. Axes of unknown size are empty, too."""

        def empty(leaf: Any) -> Any:
            if not isinstance(leaf, TensorSpec) or leaf.shape is None:
                raise invalid(f"a batch of size 0 needs arrays whose rank is known, not {leaf}")
            return np.empty((0, *(size or 0 for size in leaf.shape[1:])), leaf.dtype)

        return map_specs(empty, self.dataset.inputs[0].element_spec)


@operator("rebatch", _RebatchNode)
class Rebatch(Op):
    """Stacks the rows of batches to batches of other sizes. The sizes are used in turn."""

    result_count = UNKNOWN_CARDINALITY

    sizes: tuple[int, ...]
    drop_remainder: bool = False

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        rows, size = rows_in(inputs[0]), self.sizes[0]
        fixed = len(set(self.sizes)) == 1 and (
            self.drop_remainder or (rows is not None and rows % size == 0)
        )
        return batched(unbatched(inputs[0]), size if fixed else None)


# -- elements that differ in length ----------------------------------------------------------------


def pad(leaves: Sequence[Any], shape: Sequence[int | None], value: Any) -> Any:
    """Stack leaves of one rank on a new axis 0. Each leaf is padded at the end of each axis to
    `shape`, in which None means the largest size.

    Raises:
      InvalidArgumentError: the ranks or dtypes differ. DataLossError: a leaf is larger than
        `shape`.
    """
    check_leaves(leaves)
    arrays = [np.asarray(leaf) for leaf in leaves]
    dtype = arrays[0].dtype
    if dtype.kind in "SU":
        for leaf in leaves:
            check_end(leaf)
        strings = [array for array in arrays if array.dtype.kind == dtype.kind]
        # The longest string determines the dtype, and it may be the padding value.
        dtype = np.result_type(*strings, *([] if value is None else [np.asarray(value)]))
    for array in arrays:
        if array.ndim != len(shape) or plain_dtype(array.dtype) != plain_dtype(dtype):
            raise invalid(
                f"cannot pad {array.dtype} of shape {array.shape} to shape {tuple(shape)} of "
                f"{dtype}"
            )
    largest = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    sizes = [
        most if target is None else target for most, target in zip(largest, shape, strict=True)
    ]
    if any(most > size for most, size in zip(largest, sizes, strict=True)):
        raise DataLossError(
            f"Attempted to pad to a smaller size than the input element: {tuple(largest)} to "
            f"{tuple(sizes)}"
        )
    if value is None:
        value = {"U": "", "S": b"", "b": False}.get(dtype.kind, 0)
    batch = np.full((len(arrays), *sizes), value, dtype)
    for row, array in enumerate(arrays):
        region: Any = (row, *map(slice, array.shape))
        batch[region] = array
    return batch


class _LeafColumn:
    """Holds the leaves that several elements have at the same place in their structure.
    `nest.flatten` takes this object for one leaf."""

    __slots__ = ("leaves",)

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.leaves = leaves


class _PaddedNode(GatheringNode):
    def join(self, elements: list[Any]) -> Any:
        first = elements[0]
        spec = spec_of(first)
        _check_arrays(spec)
        shapes = _shapes(self.op.shapes, spec)
        values = _values(self.op.values, nest.flatten(spec))
        columns = nest.flatten(stack(elements, _LeafColumn))
        padded = [
            None if column is None else pad(column.leaves, *to)
            for column, *to in zip(columns, shapes, values, strict=True)
        ]
        return nest.pack_sequence_as(first, padded)


def _check_arrays(spec: Any) -> None:
    """Raise TypeError if a spec has leaves that cannot be padded, which are Ragged, Sparse and
    datasets."""
    for leaf_spec in leaves_of(spec):
        if not isinstance(leaf_spec, TensorSpec):
            raise TypeError(
                "padded_batch fills up arrays, and the elements hold a "
                f"{type(leaf_spec).__name__}: apply to_dense() or unbatch() first,"
                " or batch() if the elements have one shape"
            )


def _shapes(shapes: Any, spec: Any) -> list[Any]:
    """Return a padded shape for each leaf of the spec. Raises ValueError if `shapes` has another
    structure, or if the rank of a leaf is unknown.
    """
    leaves = nest.flatten(spec)
    if shapes is None:
        leaf_shapes: list[Any] = [None] * len(leaves)
    elif isinstance(spec, dict) and isinstance(shapes, dict) and shapes.keys() == spec.keys():
        leaf_shapes = [shape for key in sorted(spec) for shape in _shapes(shapes[key], spec[key])]
    elif isinstance(spec, tuple) and isinstance(shapes, (tuple, list)) and len(spec) == len(shapes):
        leaf_shapes = [
            shape
            for part_shapes, part in zip(shapes, spec, strict=True)
            for shape in _shapes(part_shapes, part)
        ]
    elif isinstance(spec, (dict, tuple)):
        raise ValueError(f"padded_shapes {shapes!r} has another structure than the elements")
    else:
        leaf_shapes = [checked_shape(shapes)]
    for number, (shape, leaf) in enumerate(zip(leaf_shapes, leaves, strict=True)):
        if shape is None and leaf is not None:
            if leaf.shape is None:
                raise ValueError("the rank of an element is unknown: give padded_shapes")
            leaf_shapes[number] = (None,) * len(leaf.shape)
    return leaf_shapes


def declared_shapes(spec: Any, shapes: Any) -> Any:
    """Return the padded shapes that the declared spec of the input tells if `shapes` is None.
    Raises ValueError for `shapes` that no element can have.
    """
    leaves = list(leaves_of(spec))
    if spec is UNKNOWN_SPEC or not all(
        isinstance(leaf, TensorSpec) and leaf.shape is not None for leaf in leaves
    ):
        return None
    if shapes is None:
        return map_specs(lambda leaf: list(leaf.shape), spec)
    for shape, leaf in zip(_shapes(shapes, spec), nest.flatten(spec), strict=True):
        if leaf is None:
            continue
        too_small = any(
            None not in (size, most) and size < most
            for size, most in zip(shape, leaf.shape, strict=False)
        )
        if len(shape) != len(leaf.shape) or too_small:
            raise ValueError(
                f"the padded shape {shape} does not fit elements of the shape {leaf.shape}"
            )
    return None


def checked_shape(shape: Any, argument: str = "padded_shapes") -> Any:
    """Return a padded shape as a tuple, with None for the largest size. Raises ValueError or
    TypeError, which name the argument, for other values."""
    sizes = [shape] if isinstance(shape, (int, np.integer)) else converted(argument, list, shape)
    counts = [None if size is None else checked_int(size, argument) for size in sizes]
    if any(count is not None and count < -1 for count in counts):
        raise ValueError(
            f"a size in {argument} is positive or 0, or None or -1 for the largest, not "
            f"{min(filter(None, counts))}"
        )
    return tuple(None if count is None or count < 0 else count for count in counts)


def _values(values: Any, leaves: Sequence[Any]) -> list[Any]:
    """Return a padding value for each leaf. None in `values` stands for the default. Raises
    TypeError if a value has another type than its leaf, and ValueError if there is another number
    of values than of leaves.
    """
    leaf_values = (
        nest.flatten(values) if isinstance(values, (tuple, dict)) else [values] * len(leaves)
    )
    if len(leaf_values) != len(leaves):
        raise ValueError(
            f"there are {len(leaf_values)} padding_values, but an element has {len(leaves)} leaves"
        )
    for value, leaf in zip(leaf_values, leaves, strict=True):
        if value is None or leaf is None:
            continue
        array, dtype = np.asarray(value), leaf.dtype
        if array.shape:
            raise ValueError(f"a padding value is a scalar, not of shape {array.shape}")
        weak = isinstance(value, (bool, int, float)) and not isinstance(value, np.generic)
        fits = array.dtype.kind == dtype.kind or (
            weak and array.dtype.kind == "i" and dtype.kind in "uf"
        )
        if not fits or (not weak and plain_dtype(array.dtype) != plain_dtype(dtype)):
            raise TypeError(
                f"padding_values: padding value {value!r} ({array.dtype}) does not fit elements "
                f"of {dtype}"
            )
        if dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            raise TypeError(
                f"padding_values: padding value {value!r} does not fit elements of {dtype}"
            )
        check_end(value)
    return leaf_values


@operator("padded_batch", _PaddedNode)
class PaddedBatch(Gathering):
    """Pads elements to one shape, and stacks them."""

    shapes: Any = None
    values: Any = None
    declared: Any = None
    """The padded shapes that the spec of the elements has if `shapes` is None; None if nothing is
    known."""

    def check(self, spec: Any) -> None:
        """Check the arguments against the spec of the input. Raises the errors of `_check_arrays`,
        `_shapes` and `_values`."""
        if spec is not UNKNOWN_SPEC:
            _check_arrays(spec)
            _shapes(self.shapes, spec)
            _values(self.values, nest.flatten(spec))

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        _check_arrays(inputs[0])
        size = self.size if self.drop_remainder else None
        shapes = _shapes(self.declared if self.shapes is None else self.shapes, inputs[0])
        specs = [
            None if leaf is None else TensorSpec((size, *shape), leaf.dtype)
            for shape, leaf in zip(shapes, nest.flatten(inputs[0]), strict=True)
        ]
        return nest.pack_sequence_as(inputs[0], specs)


class _RaggedNode(GatheringNode):
    def join(self, elements: list[Any]) -> Any:
        return stack(elements, self._ragged)

    def _ragged(self, leaves: Sequence[Any]) -> Any:
        check_leaves(leaves)
        arrays = [np.asarray(leaf) for leaf in leaves]
        if len({plain_dtype(array.dtype) for array in arrays}) > 1:
            raise invalid(
                f"cannot batch {arrays[0].dtype} with other dtypes: rows of a ragged batch have "
                f"one dtype"
            )
        if any(
            array.shape[1:] != arrays[0].shape[1:] or array.ndim != arrays[0].ndim
            for array in arrays
        ):
            raise invalid("rows of a ragged batch may differ along their first axis only")
        if not arrays[0].ndim:
            return stack(leaves)
        splits = np.cumsum([0, *map(len, arrays)], dtype=self.op.row_splits_dtype)
        return Ragged(joined(arrays), splits)


@operator("ragged_batch", _RaggedNode)
class RaggedBatch(Gathering):
    """Joins each `size` consecutive elements. Each leaf of the result is a Ragged with a row for
    each element. Scalars are stacked."""

    row_splits_dtype: str = "<i8"

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        size = self.size if self.drop_remainder else None

        def rows(leaf: Any) -> Any:
            if type(leaf) in COMPOSITES:
                return batched_spec(leaf, size)
            if leaf.shape is None:
                raise ValueError(
                    "ragged_batch needs the rank of the elements, which is unknown: give "
                    "output_signature"
                )
            if leaf.shape == ():
                return TensorSpec((size,), leaf.dtype)
            splits = TensorSpec((None if size is None else size + 1,), self.row_splits_dtype)
            return Ragged(TensorSpec((None, *leaf.shape[1:]), leaf.dtype), splits)

        return map_specs(rows, inputs[0])


class _SparseNode(GatheringNode):
    def join(self, elements: list[Any]) -> Any:
        check_leaves(elements)
        arrays = list(map(np.asarray, elements))
        shape, dtype = self.op.row_shape, arrays[0].dtype
        for array in arrays:
            if array.ndim != len(shape) or plain_dtype(array.dtype) != plain_dtype(dtype):
                raise invalid(
                    f"sparse_batch: {array.dtype} of shape {array.shape} does not fit {dtype} of "
                    f"the row_shape {shape}"
                )
            if any(
                most is not None and size > most
                for size, most in zip(array.shape, shape, strict=True)
            ):
                raise DataLossError(f"shape {array.shape} is larger than the row_shape {shape}")
        largest = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
        sizes = [most if size is None else size for most, size in zip(largest, shape, strict=True)]
        places = [np.indices(array.shape).reshape(array.ndim, array.size).T for array in arrays]
        numbers = np.repeat(np.arange(len(arrays)), list(map(len, places)))
        return Sparse(
            np.column_stack([numbers, np.concatenate(places)]).astype(np.int64),
            joined([array.reshape(-1) for array in arrays]),
            np.array([len(arrays), *sizes], np.int64),
        )


@operator("sparse_batch", _SparseNode)
class SparseBatch(Gathering):
    """Joins each `size` consecutive arrays to a Sparse that holds all of their values."""

    row_shape: Any = ()

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        if not isinstance(inputs[0], TensorSpec):
            raise TypeError(
                f"sparse_batch joins elements of one array, not {type(inputs[0]).__name__}"
            )
        return sparse_spec(len(self.row_shape) + 1, inputs[0].dtype)


class Bucket:
    """A picklable function that returns the bucket of an element: the number of boundaries that the
    element's length has reached."""

    def __init__(self, length_function: Any, boundaries: Sequence[int]) -> None:
        self.length_function = length_function
        self.boundaries = list(boundaries)

    def __call__(self, *element: Any) -> Any:
        length = int_scalar(self.length_function(*element), "element_length_func")
        return np.int64(bisect_right(self.boundaries, length))


class BucketSize:
    """A picklable function that returns the batch size for the number of a bucket."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)

    def __call__(self, bucket: Any) -> Any:
        return np.int64(self.sizes[int(bucket)])


class BucketBatch:
    """A picklable function that returns the batch of a bucket's elements.

    Attributes:
      boundaries: a boundary for each bucket except the last. A batch is padded to the boundary of
        its bucket minus 1, which is the longest length in the bucket. If `boundaries` is None, the
        batch is padded to its longest element.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        shapes: Any,
        values: Any,
        boundaries: Sequence[int] | None,
        padded: bool,
        drop: bool,
    ) -> None:
        self.sizes = list(sizes)
        self.shapes, self.values, self.padded, self.drop = shapes, values, padded, drop
        self.boundaries = None if boundaries is None else list(boundaries)

    def __call__(self, bucket: Any, window: Any) -> Any:
        size = self.sizes[int(bucket)]
        if not self.padded:
            return window.batch(size, drop_remainder=self.drop)
        shapes = self.shapes
        if self.boundaries is not None:
            if int(bucket) >= len(self.boundaries):
                raise invalid(
                    "pad_to_bucket_boundary: the length of an element reaches or exceeds the last "
                    "boundary"
                )
            shapes = _to_boundary(self.boundaries[int(bucket)] - 1, shapes, window.element_spec)
        return window.padded_batch(size, shapes, self.values, drop_remainder=self.drop)


def _to_boundary(target: int, shapes: Any, spec: Any) -> Any:
    """Return `shapes` with `target` in place of each None. If `shapes` is None, return for each
    leaf of `spec` a shape whose first axis has the size `target`.
    """
    _check_arrays(spec)
    if shapes is None:
        filled = [
            (target, *(None,) * (len(shape) - 1)) if shape else () for shape in _shapes(None, spec)
        ]
    else:
        filled = [
            tuple(target if size is None else size for size in shape)
            for shape in _shapes(shapes, spec)
        ]
    return nest.pack_sequence_as(spec, filled)

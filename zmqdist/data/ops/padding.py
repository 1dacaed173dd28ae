"""padded_batch, ragged_batch, bucket_by_sequence_length: batches of elements that differ in
length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqdist import nest
from zmqdist.data.composites import COMPOSITES, Ragged, batched_spec
from zmqdist.data.interfaces import operator
from zmqdist.data.ops.batching import Gathering, GatheringNode
from zmqdist.data.ops.windows import int_scalar
from zmqdist.data.structure import (
    UNKNOWN_SPEC,
    check_end,
    check_leaves,
    checked_int,
    invalid,
    leaves_of,
    map_specs,
    plain_dtype,
    spec_of,
    stack,
)
from zmqdist.errors import DataLossError
from zmqdist.field_types import converted
from zmqdist.specs import TensorSpec, joined


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
            pad(column.leaves, *to) for column, *to in zip(columns, shapes, values, strict=True)
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
        leaf_shapes = [_shape(shapes)]
    for number, (shape, leaf) in enumerate(zip(leaf_shapes, leaves, strict=True)):
        if shape is None:
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
        too_small = any(
            None not in (size, most) and size < most
            for size, most in zip(shape, leaf.shape, strict=False)
        )
        if len(shape) != len(leaf.shape) or too_small:
            raise ValueError(
                f"the padded shape {shape} does not fit elements of the shape {leaf.shape}"
            )
    return None


def _shape(shape: Any) -> Any:
    sizes = (
        [shape] if isinstance(shape, (int, np.integer)) else converted("padded_shapes", list, shape)
    )
    counts = [None if size is None else checked_int(size, "padded_shapes") for size in sizes]
    if any(count is not None and count < -1 for count in counts):
        raise ValueError(
            f"a size in padded_shapes is positive or 0, or None or -1 for the largest, not "
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
        if value is None:
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
            TensorSpec((size, *shape), leaf.dtype)
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
                return batched_spec(leaf)
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

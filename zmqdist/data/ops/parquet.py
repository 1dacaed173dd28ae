"""Rows of Parquet files, read by pyarrow (extra `parquet`).

Rules
    The elements of the input are row groups, as (path, number), or paths of whole files. A row
    group is read as a whole, and is one position for a data service. A state is a row group, and
    the number of its elements that were yielded.

    An element is a row as a dict of columns, or a batch as a dict of arrays of `batch` rows. A
    batch never has rows of two row groups. Columns of numbers, bools and times are converted
    without a Python step per row. A missing value is an error, because an array cannot contain it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from zmqdist.data.constants import UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import DatasetLike, operator
from zmqdist.data.ops.base import Op
from zmqdist.data.ops.readers import ReaderNode
from zmqdist.data.structure import UNKNOWN_SPEC, batched, element, invalid, map_specs, stack
from zmqdist.errors import DataLossError, InvalidArgumentError, NotFoundError, needs
from zmqdist.specs import TensorSpec


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ImportError(needs("ParquetDataset", "pyarrow")) from None
    return pyarrow


def opened(path: str) -> Any:
    """Open a file as a pyarrow ParquetFile. Raises NotFoundError if it does not exist,
    DataLossError if it is no Parquet file."""
    arrow = _pyarrow()
    try:
        return arrow.parquet.ParquetFile(path)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: No such file") from None
    except arrow.ArrowInvalid as error:
        raise DataLossError(f"{path}: {error}") from error


class _ParquetNode(ReaderNode):
    """Runs `Parquet`. A part is a (path, row group)."""

    state_keys = {"part": "place", "elements_read": "done"}
    part = None


@operator("parquet", _ParquetNode)
class Parquet(Op):
    """Yields rows, or batches of rows, of the row groups that the input names.

    Attributes:
      batch: the number of rows in an element. With 0 an element is a single row, without an axis
        for rows.
      spec: the spec of the elements; None if the schema does not determine the spec.
      groups, count: the number of row groups in the input when the dataset was created, and the
        number of elements in them; 0 if unknown.
    """

    spec_field = "spec"
    ratio = None
    is_reader: ClassVar[bool] = True

    columns: tuple[str, ...] | None
    batch: int = 0
    spec: Any = None
    groups: int = 0
    count: int = 0

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return self.count if self.groups and inputs[0] == self.groups else UNKNOWN_CARDINALITY

    def infer(self, dataset: DatasetLike) -> Any:
        spec = super().infer(dataset)
        if not self.batch or spec is UNKNOWN_SPEC:
            return spec
        # The number of rows is None, because the last batch of a row group may be shorter.
        return map_specs(lambda leaf: TensorSpec((None, *leaf.shape[1:]), leaf.dtype), spec)

    def part_of(self, item: Any) -> tuple[str, int]:
        """Return the row group that an element of the input names; the group is -1 for a path
        alone."""
        path, group = item if isinstance(item, tuple) else (item, -1)
        return str(path), int(group)

    def elements(self, part: tuple[str, int]) -> Iterator[Any]:
        """Yield the elements of a row group, or of the whole file if the group is negative."""
        path, group = part
        with opened(path) as file:
            names = checked_columns(file, self.columns, path)
            for number in range(file.num_row_groups) if group < 0 else (group,):
                table = file.read_row_group(number, columns=names)
                yield from self._elements(
                    names, [_values(table[name], name, path) for name in names]
                )

    def _elements(self, names: Sequence[str], columns: Sequence[Any]) -> Iterator[Any]:
        if not self.batch:
            for row in zip(*columns, strict=True):
                yield dict(zip(names, row, strict=True))
            return
        for start in range(0, len(columns[0]) if columns else 0, self.batch):
            parts = [column[start : start + self.batch] for column in columns]
            joined = [stack(part) if type(part) is list else part for part in parts]
            yield dict(zip(names, joined, strict=True))


def checked_columns(file: Any, columns: Sequence[str] | None, path: str) -> list[str]:
    """Return the columns to read. Raises InvalidArgumentError if a column does not exist."""
    available = file.schema_arrow.names
    missing = [name for name in columns or () if name not in available]
    if missing:
        raise invalid(
            f"{path} has no column {', '.join(map(repr, missing))}: it has "
            f"{', '.join(map(repr, available))}"
        )
    return list(available if columns is None else columns)


def _values(column: Any, name: str, path: str) -> Any:
    """Return a column of numbers, bools or times as an array, and any other column as a list of
    elements.

    Raises:
      InvalidArgumentError: a value is missing, or cannot be in an array.
    """
    if column.null_count:
        raise invalid(
            f"{path}: column {name!r} lacks {column.null_count} values: fill them in, or omit the "
            f"column"
        )
    types = _pyarrow().types
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_primitive(column.type):
        values = column.to_numpy()
        if not values.dtype.hasobject:
            return values
    try:
        return [element(value) for value in column.to_pylist()]
    except InvalidArgumentError as error:
        raise invalid(f"{path}: column {name!r}, {column.type}: {error.message}") from None


def spec_of_schema(schema: Any, names: Sequence[str], batch: int) -> Any:
    """Return the spec of elements of these columns, or None if the types of the columns do not
    determine the spec."""
    types = _pyarrow().types
    spec = {}
    for name in names:
        kind = schema.field(name).type
        if types.is_string(kind) or types.is_large_string(kind):
            dtype: Any = np.str_
        elif types.is_binary(kind) or types.is_large_binary(kind):
            dtype = np.bytes_
        elif types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            dtype = kind.to_pandas_dtype()
        else:
            return None
        spec[name] = TensorSpec((), dtype)
    return batched(spec, None) if batch else spec

"""Rows of CSV files (RFC 4180), and the functions that make elements of them.

The operator yields a row as a tuple of str. Its values are converted by a `map` behind it, so that
after a bad value reading continues with the next row; after bad quotes, with the next file.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final

import numpy as np

from zmqdist.data.interfaces import operator
from zmqdist.data.ops.readers import FileReader, ReaderNode
from zmqdist.data.structure import UNKNOWN_SPEC, invalid

DTYPES: Final = tuple(map(np.dtype, ("int32", "int64", "float32", "float64", "str")))
"""The dtypes of columns, the narrowest first."""


@operator("csv_rows", ReaderNode)
class CsvRows(FileReader):
    """Yields the rows of CSV files that are not empty, without the first row of each file if it is
    a `header`."""

    header: bool = False
    delimiter: str = ","
    quoted: bool = True
    encoding: str = "utf-8"

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return UNKNOWN_SPEC

    def records(self, file: IO[bytes], path: str) -> Iterator[Any]:
        text = io.TextIOWrapper(file, self.encoding, newline="")
        rows = csv.reader(
            text,
            delimiter=self.delimiter,
            quoting=csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE,
            strict=True,
        )
        try:
            for number, row in enumerate(rows):
                if row and not (self.header and number == 0):
                    yield tuple(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise invalid(f"{path}, line {rows.line_num}: {error}") from None
        finally:
            text.detach()  # the caller closes the file


class RowConverter:
    """A picklable function that converts a row to a tuple of values.

    Args:
      defaults: for each value its dtype and its default. A default of None means that the value
        must be there.
      columns: the positions of the values in a row; None means all.
    """

    def __init__(
        self,
        defaults: Sequence[tuple[np.dtype[Any], Any]],
        columns: Sequence[int] | None,
        na_value: str,
    ) -> None:
        self.defaults, self.columns, self.na_value = list(defaults), columns, na_value

    def __call__(self, *row: str) -> tuple[Any, ...]:
        columns = range(len(self.defaults)) if self.columns is None else self.columns
        if len(row) <= max(columns) or (self.columns is None and len(row) != len(columns)):
            raise invalid(
                f"a row has {len(row)} fields, where {len(columns)} are expected: {row!r:.80}"
            )
        return tuple(
            self._value(column, row[column], *default)
            for column, default in zip(columns, self.defaults, strict=True)
        )

    def _value(self, column: int, text: str, dtype: np.dtype[Any], default: Any) -> Any:
        if text in ("", self.na_value):
            if default is None:
                raise invalid(f"field {column} is missing, and has no default")
            return default
        if dtype.kind == "U":
            return text
        try:
            if dtype.kind in "iu":
                bounds = np.iinfo(dtype)
                if not bounds.min <= int(text) <= bounds.max:  # NumPy 1 would wrap it
                    raise OverflowError
            with np.errstate(over="raise"):
                return dtype.type(text)
        except (ValueError, ArithmeticError):
            raise invalid(f"field {column} is no {dtype}: {text!r:.80}") from None


class ColumnsByName:
    """A picklable function that makes a dict of the columns of a batch. The column `label` is
    returned beside the dict."""

    def __init__(self, names: Sequence[str], label: str | None) -> None:
        self.names, self.label = list(names), label

    def __call__(self, *columns: Any) -> Any:
        features = dict(zip(self.names, columns, strict=True))
        return features if self.label is None else (features, features.pop(self.label))


def dtype_of(text: str, narrowest: int) -> int:
    """Return the number of the first of DTYPES, from the number `narrowest` on, that holds the
    value of a field."""
    for number in range(narrowest, len(DTYPES) - 1):
        dtype = DTYPES[number]
        try:
            if dtype.kind == "i" and np.iinfo(dtype).min <= int(text) <= np.iinfo(dtype).max:
                return number
            if dtype.kind == "f" and abs(float(text)) <= float(np.finfo(dtype).max):
                return number
        except ValueError:
            continue
    return len(DTYPES) - 1

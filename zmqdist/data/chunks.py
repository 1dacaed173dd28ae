"""Elements in a file that other tools can read. The file consists of blocks of columns, and each
column is an array in NumPy's own file format.

File format
    A block is a line of JSON, followed by arrays in the format of `numpy.save`. An example of such
    a line:

        {"rows": 3, "arrays": [["<f4", [3, 28]], ["|u1", [12]], ["<i8", [3]]], "element": ["dict",
        ["x", "array"], ["t", "str"]]}

    `rows` is the number of elements in the block. `arrays` has the dtype and shape of each array
    that follows. `element` is the structure of an element, with the kind of each leaf:
      array, scalar   one array with a row for each element. A row of an `array` is an array, and a row of a `scalar` is a NumPy scalar.
      none            no array: the leaf is None in each row
      str, bytes      two arrays: the bytes of all strings joined (text as UTF-8), and the position at which each string ends
    A tuple is ["tuple", ...], a namedtuple ["namedtuple", name, [field, ...], ...], a dict ["dict",
    [key, ...], ...].

    *Invariant*: the rows of a block have the same structure, dtypes and shapes. An element that
    differs from them begins another block. The whole file may be compressed, as gzip or as a zlib
    stream. It contains no pickle. NumPy's files do not know the dtypes of ml_dtypes, nor all dtypes
    with fields, so arrays of these dtypes are stored as raw data.

    The line repeats the dtypes and shapes, so that readers can skip the headers of the arrays. A
    header is a Python literal, which takes longer to parse than a small array takes to read, and
    which Python 3.11 cannot parse in two threads at once.

A spec of elements is JSON of the same form as `element`, with {"shape": ..., "dtype": ...} as
leaves.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from types import SimpleNamespace
from typing import IO, Any

import numpy as np

from zmqdist.data import storage
from zmqdist.data.structure import DatasetSpec, invalid, stack_leaves
from zmqdist.errors import DataLossError, UnimplementedError
from zmqdist.specs import TensorSpec
from zmqdist.wire.arrays import BadArray, dtype_from_json, dtype_to_json
from zmqdist.wire.namedtuples import generic_namedtuple

ROWS_MAX = 1024
"""The largest number of elements in a block. Blocks must be small, because a reader has a whole
block in memory. They must not be too small, because each block has a line of JSON and array
headers."""

BLOCK_BYTES_MAX = 2**20
"""A block is written as soon as it has so many bytes. The number is small because an element that
was read shares memory with its block, so that the whole block stays in memory as long as the
element does."""

# -- structures as JSON ----------------------------------------------------------------------------


def structure_to_json(structure: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a structure as JSON types. `leaf` converts each leaf, and must not return a list,
    because a list stands for a structure.

    Raises:
      InvalidArgumentError: a dict has keys that are neither text nor numbers.
    """
    if isinstance(structure, dict):
        if not all(type(key) in (str, int, float, bool) for key in structure):
            raise invalid(
                f"a dict with keys {list(structure)} cannot be written: each key must be text or "
                f"a number"
            )
        return ["dict", *([key, structure_to_json(item, leaf)] for key, item in structure.items())]
    if isinstance(structure, tuple):
        items = [structure_to_json(item, leaf) for item in structure]
        if hasattr(structure, "_fields"):
            return [
                "namedtuple",
                type(structure).__name__,
                *map(list, zip(structure._fields, items, strict=True)),
            ]
        return ["tuple", *items]
    return leaf(structure)


def structure_from_json(text: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return the structure from the result of `structure_to_json`. `leaf` converts each leaf back.
    Raises ValueError or TypeError for other values.
    """
    match text:
        case ["dict", *items]:
            return {key: structure_from_json(item, leaf) for key, item in items}
        case ["namedtuple", str(name), *items]:
            return generic_namedtuple(name, tuple(key for key, _ in items))(
                *(structure_from_json(item, leaf) for _, item in items)
            )
        case ["tuple", *items]:
            return tuple(structure_from_json(item, leaf) for item in items)
        case list():
            raise ValueError(f"{text} does not describe a structure")
    return leaf(text)


def spec_to_json(spec: Any) -> Any:
    """Return a spec as JSON types. Raises UnimplementedError if elements hold datasets."""

    def leaf(leaf_spec: Any) -> Any:
        if leaf_spec is None:
            return None
        if isinstance(leaf_spec, DatasetSpec):
            raise UnimplementedError(
                "elements that hold datasets cannot be written: apply batch() or flat_map() first"
            )
        return {
            "shape": None if leaf_spec.shape is None else list(leaf_spec.shape),
            "dtype": _dtype_to_json(np.dtype(leaf_spec.dtype)),
        }

    return structure_to_json(spec, leaf)


def spec_from_json(text: Any) -> Any:
    """Return the spec from the result of `spec_to_json`. Raises DataLossError for other values."""

    def leaf(leaf_text: Any) -> TensorSpec | None:
        if leaf_text is None:
            return None
        return TensorSpec(
            None if leaf_text["shape"] is None else tuple(leaf_text["shape"]),
            dtype_from_json(leaf_text["dtype"]),
        )

    try:
        return structure_from_json(text, leaf)
    except (ValueError, TypeError, KeyError, BadArray) as error:
        raise DataLossError(f"not the spec of a dataset: {error}") from None


# -- writing ---------------------------------------------------------------------------------------

_SCALAR = frozenset({str, bytes})


def _flatten(x: Any, leaves: list[Any]) -> Any:
    """Append the leaves of an element to `leaves`. Return the element's layout: its structure, and
    the dtype and shape of each leaf. All elements of a block have equal layouts.
    """
    cls = type(x)
    if cls is np.ndarray:
        leaves.append(x)
        return x.dtype, x.shape
    if cls is dict:
        return dict, *((key, _flatten(item, leaves)) for key, item in x.items())
    if isinstance(x, tuple):
        return cls, *(_flatten(item, leaves) for item in x)
    if x is None:
        return None
    leaves.append(x)
    if cls in _SCALAR:
        return cls
    if isinstance(x, np.generic):
        return cls, x.dtype
    raise UnimplementedError(
        f"an element holds {cls.__name__}, which cannot be written: apply batch() or flat_map() "
        f"to windows first"
    )


def _leaf_bytes(leaf: Any) -> int:
    return int(leaf.nbytes) if isinstance(leaf, (np.ndarray, np.generic)) else len(leaf)


def _dtype_to_json(dtype: np.dtype[Any]) -> Any:
    try:
        return dtype_to_json(dtype)
    except BadArray as error:
        raise invalid(f"an element cannot be written: {error}") from None


def _column(first: Any, leaves: Sequence[Any], arrays: list[Any]) -> str:
    """Convert the values of one leaf in all rows of a block to arrays, and append these to
    `arrays`. Return the leaf's kind, such as "str".

    Args:
      first: the value in the first row.
      leaves: the values in all rows.
    """
    if isinstance(first, (str, bytes)):
        parts = [
            leaf.encode("utf-8", "surrogatepass") if isinstance(leaf, str) else leaf
            for leaf in leaves
        ]
        arrays.append(np.frombuffer(b"".join(parts), np.uint8))
        arrays.append(np.cumsum([len(part) for part in parts], dtype=np.int64))
        return "str" if isinstance(first, str) else "bytes"
    kind = "array" if isinstance(first, np.ndarray) else "scalar"
    arrays.append(np.ascontiguousarray(stack_leaves(leaves)))
    return kind


class ElementsFile:
    """A file of elements that is being written, block by block. Its methods raise OSError if the
    disk fails.

    Attributes:
      nbytes: the number of bytes, before compression, of all elements so far. It includes elements
        whose block is not written yet.
    """

    def __init__(self, path: str, compression: str, append: bool = False) -> None:
        """Create the file, or append to it. Appending to a compressed file begins another
        compressed stream. Readers join the streams."""
        self._file = storage.open_write(path, append)
        self._compressed = storage.compressing(self._file, compression)
        self._first: Any = None
        self._layout: Any = None
        self._rows: list[list[Any]] = []
        self._pending_bytes = 0
        self.nbytes = 0

    def write(self, x: Any) -> None:
        """Append an element, without a copy of its arrays. The caller must not change the arrays
        until the block is written. The block is written by `flush`, by a `write` that makes it
        1,024 elements or a mebibyte long, or by a `write` of an element of another layout.

        Raises:
          UnimplementedError: the element holds a dataset.
          OSError: writing to the file failed.
        """
        leaves: list[Any] = []
        layout = _flatten(x, leaves)
        if self._rows and layout != self._layout:
            # begin another block, because all rows of a block have one layout
            self._write_block()
        if not self._rows:
            self._first, self._layout = x, layout
        size = sum(map(_leaf_bytes, leaves))
        self._rows.append(leaves)
        self._pending_bytes += size
        self.nbytes += size
        if len(self._rows) == ROWS_MAX or self._pending_bytes >= BLOCK_BYTES_MAX:
            self._write_block()

    def _write_block(self) -> None:
        """Write the current block, if it has elements."""
        rows, self._rows, self._pending_bytes = self._rows, [], 0
        if not rows:
            return
        arrays: list[Any] = []
        columns = iter(zip(*rows, strict=True))
        element = structure_to_json(
            self._first,
            lambda leaf: "none" if leaf is None else _column(leaf, next(columns), arrays),
        )
        kinds = [[_dtype_to_json(array.dtype), array.shape] for array in arrays]
        head = json.dumps(
            {"rows": len(rows), "arrays": kinds, "element": element}, separators=(",", ":")
        )
        self._compressed.write(head.encode() + b"\n")
        # With a real file, NumPy's `write_array` would bypass the file's buffer.
        sink: Any = SimpleNamespace(write=self._compressed.write)
        for array in arrays:
            # Write arrays of ml_dtypes, and of fields, as raw data, because NumPy's header cannot
            # describe all of their dtypes.
            named = array.dtype.type.__module__ == "numpy" and not array.dtype.names
            plain = array if named else array.view(f"V{array.dtype.itemsize}")
            np.lib.format.write_array(sink, plain, allow_pickle=False)

    def flush(self) -> None:
        """Write the elements so far to the file, so that a reader of an uncompressed file can see
        them."""
        self._write_block()
        self._file.flush()

    def close(self) -> None:
        """Complete the file. It is on the disk when `close` returns."""
        try:
            self._write_block()
            if self._compressed is not self._file:
                self._compressed.close()
            storage.sync(self._file)
        except BaseException:
            self.abort()
            raise
        self._file.close()

    def abort(self) -> None:
        """Close the file without completing it. Does nothing if the file is closed."""
        for file in (self._compressed, self._file):
            with contextlib.suppress(OSError, ValueError):
                file.close()


# -- reading ---------------------------------------------------------------------------------------


def read_elements(file: IO[bytes], path: str) -> Iterator[Any]:
    """Yield the elements from the current position to the end of a file. Their arrays are writable.
    Arrays of one block share memory.

    Raises:
      DataLossError: the file is truncated, or not a file of elements.
    """
    try:
        while line := file.readline(2**20):
            block = json.loads(line)
            arrays = [_read_array(file, dtype, shape) for dtype, shape in block["arrays"]]
            column = partial(_column_of, iter(arrays))
            yield from _rows_of(structure_from_json(block["element"], column), block["rows"])
    except (
        ValueError,
        TypeError,
        KeyError,
        EOFError,
        OSError,
        RuntimeError,
        MemoryError,
        BadArray,
        zlib.error,
    ) as error:
        raise DataLossError(f"{path}: corrupted record: {error}") from error


_MAGIC = b"\x93NUMPY"


def _read_array(file: IO[bytes], dtype: Any, shape: Sequence[int]) -> Any:
    """Read an array in NumPy's file format. Its header is skipped, because the block's line of JSON
    has the same `dtype` and `shape`."""
    start = file.read(8)
    if len(start) < 8 or start[:6] != _MAGIC:
        raise ValueError("an array is missing")
    length = file.read(2 if start[6] == 1 else 4)
    file.read(int.from_bytes(length, "little"))
    array = np.empty(tuple(shape), dtype_from_json(dtype))
    flat: Any = array.reshape(-1).view(np.uint8) if array.nbytes else b""
    left = memoryview(flat)
    while left:
        count = file.readinto(left)  # type: ignore[attr-defined]
        if not count:
            raise EOFError("the file is truncated")
        left = left[count:]
    return array


class _Column:
    """An iterable over the values of one leaf in all rows of a block."""

    def __init__(self, columns: Iterator[Any], kind: Any) -> None:
        if kind not in ("array", "scalar", "str", "bytes"):
            raise ValueError(f"unknown kind of leaf: {kind!r}")
        self._kind = kind
        self._values: Any = next(columns, None)
        self._ends = next(columns, None) if kind in ("str", "bytes") else None
        if self._values is None:
            raise ValueError("an array is missing")

    def __iter__(self) -> Iterator[Any]:
        if self._ends is not None:
            data, start = self._values.tobytes(), 0
            for end in self._ends.tolist():
                part = data[start:end]
                yield part if self._kind == "bytes" else part.decode("utf-8", "surrogatepass")
                start = end
        elif self._kind == "array" and self._values.ndim == 1:
            for row in range(len(self._values)):
                yield self._values[row : row + 1].reshape(())
        else:
            yield from self._values


def _column_of(arrays: Iterator[Any], kind: Any) -> _Column | None:
    return None if kind == "none" else _Column(arrays, kind)


def _rows_of(structure: Any, rows: int) -> Iterator[Any]:
    if structure is None:
        return repeat(None, rows)
    if isinstance(structure, dict):
        if not structure:
            return repeat({}, rows)
        keys = list(structure)
        columns = [_rows_of(structure[key], rows) for key in keys]
        return (dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True))
    if isinstance(structure, tuple):
        if not structure:
            return repeat(structure, rows)
        tuples = zip(*(_rows_of(item, rows) for item in structure), strict=True)
        return (
            (type(structure)(*row) for row in tuples) if hasattr(structure, "_fields") else tuples
        )
    return iter(structure)

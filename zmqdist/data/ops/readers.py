"""Operators that read the files that their input names: lines, records of one length, TFRecord
files, saved elements.

Rules
    A reader takes names from its input, one after another, and reads each file to its end. With
    `parallel`, that many files are open at the same time. A thread reads each open file, and the
    operator yields one record of each in turn. FILE sharding of a data service looks for an
    operator with `is_reader`, and divides the file names in its input.

    A state is the current file, and the number of its records that were read. A load reads and
    discards this number of records, because a compressed file cannot seek. After a damaged record,
    reading continues with the next file.

Lines are str, decoded from UTF-8 with invalid bytes kept as surrogates. Records are bytes.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import IO, Any, ClassVar

import numpy as np

from zmqdist.data import storage
from zmqdist.data.constants import AUTOTUNE, UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import DatasetLike, make, operator
from zmqdist.data.iterators import Context, OperatorNode
from zmqdist.data.ops.base import Op
from zmqdist.data.ops.combining import InterleaveNode, default_cycle_length
from zmqdist.data.ops.sources import Tensors
from zmqdist.data.structure import invalid
from zmqdist.errors import DataLossError, NotFoundError, needs
from zmqdist.specs import TensorSpec

COMPRESSIONS = ("", "GZIP", "ZLIB")


def checked_compression(compression: Any, argument: str = "compression") -> str:
    """Return the name of a compression, or "" for None. Raises ValueError for an unknown name."""
    name = compression or ""
    if name not in COMPRESSIONS:
        raise ValueError(
            f"Invalid `{argument}` argument: {compression}. Must be one of {list(COMPRESSIONS)} "
            f"or None."
        )
    return str(name)


def open_file(path: str, compression: str) -> IO[bytes]:
    """Open a file for reading, and decompress its content. Raises NotFoundError if the file does
    not exist."""
    try:
        return storage.decompressing(storage.open_read(path), compression)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: No such file") from None


class ReaderNode(OperatorNode):
    """Runs a reader without `parallel`: reads one file, or one part of a file, after another.

    Attributes:
      part: what the operator's method `elements` reads at present; empty between two parts.
      elements_read: how many elements of this part were yielded.
    """

    plain_fields = ("part", "elements_read")
    state_keys = {"part": "path", "elements_read": "done"}
    part: Any = ""
    elements_read = 0

    def run(self) -> Iterator[Any]:
        if self.part:
            yield from self._rest()
        for item in self.source():
            self.part, self.elements_read = self.op.part_of(item), 0
            yield from self._rest()

    def _rest(self) -> Iterator[Any]:
        # Clear `part` first, so that after an error the node continues with the next part.
        part, nothing = self.part, type(self).part
        self.part = nothing
        for x in islice(self.op.elements(part), self.elements_read, None):
            self.part = part
            self.elements_read += 1
            yield x
            self.part = nothing


@dataclass(frozen=True)
class FileReader(Op):
    """Base class of the operators that read files. The elements of their input are the names of the
    files."""

    result_spec = TensorSpec((), np.bytes_)
    result_count = UNKNOWN_CARDINALITY
    ratio = None
    is_reader: ClassVar[bool] = True
    block_length: ClassVar[int] = 1
    deterministic: ClassVar[bool | None] = None

    compression: str = ""
    parallel: int = field(default=0, kw_only=True)
    """The number of files that are open at the same time, of which the operator yields one record
    each in turn. With 0 one file is read after another.
    """

    def open(self, dataset: DatasetLike, context: Context) -> OperatorNode:
        return InterleaveNode(dataset, context) if self.parallel else ReaderNode(dataset, context)

    @property
    def cycle_length(self) -> int:
        """The number of open files, for InterleaveNode."""
        return default_cycle_length(self.parallel) if self.parallel == AUTOTUNE else self.parallel

    def dataset_of(self, name: Any) -> DatasetLike:
        """Return the dataset of the records in the file `name`."""
        return make(replace(self, parallel=0), [make(Tensors.build(name))])

    def part_of(self, item: Any) -> str:
        """Return the path of the file that an element of the input names."""
        return str(item)

    def elements(self, path: str) -> Iterator[Any]:
        """Yield the records of a file. Raises DataLossError if its compression is damaged."""
        with open_file(path, self.compression) as file:
            try:
                yield from self.records(file, path)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise DataLossError(f"{path}: {error}") from error

    def records(self, file: IO[bytes], path: str) -> Iterator[Any]:
        """Yield the records of an open file."""
        raise NotImplementedError


@operator("text_lines", ReaderNode)
class TextLines(FileReader):
    """Yields the lines of text files, without line endings."""

    result_spec = TensorSpec((), np.str_)

    def records(self, file: IO[bytes], path: str) -> Iterator[Any]:
        return (line.rstrip(b"\r\n").decode("utf-8", "surrogateescape") for line in file)


@operator("fixed_length_records", ReaderNode)
class FixedLengthRecords(FileReader):
    """Yields records of `record_bytes` bytes. The header and the footer of each file are
    skipped.
    """

    record_bytes: int = 1
    header_bytes: int = 0
    footer_bytes: int = 0

    def records(self, file: IO[bytes], path: str) -> Iterator[Any]:
        size, footer = self.record_bytes, self.footer_bytes
        file.read(self.header_bytes)
        # Hold the size of a footer back, because only the end of the file shows where it begins.
        buffer = file.read(footer)
        while data := file.read(size):
            buffer += data
            if len(data) < size:
                break
            yield buffer[:size]
            buffer = buffer[size:]
        else:
            return
        raise invalid(
            f"{path}: the size without header and footer is no multiple of {size} bytes: check "
            f"record_bytes, header_bytes and "
            "footer_bytes"
        )


def crc32c() -> Callable[[bytes], int]:
    """Return the function that computes CRC-32C, the checksum of TFRecord files. Raises
    ImportError if the package google-crc32c is missing.
    """
    try:
        import google_crc32c
    except ImportError as error:
        raise ImportError(needs("TFRecordDataset", "google-crc32c")) from error
    return google_crc32c.value  # type: ignore[no-any-return]


def masked(crc: int) -> int:
    """Return a checksum in the masked form that TFRecord files contain."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


_HEAD = struct.Struct("<QI")
_TAIL = struct.Struct("<I")


def framed(data: bytes, checksum_of: Callable[[bytes], int]) -> bytes:
    """Return a record as a TFRecord file holds it, with both checksums."""
    length = struct.pack("<Q", len(data))
    head = _TAIL.pack(masked(checksum_of(length)))
    return b"".join((length, head, data, _TAIL.pack(masked(checksum_of(data)))))


@operator("tf_records", ReaderNode)
class TFRecords(FileReader):
    """Yields the records of TFRecord files. Both checksums of each record are verified."""

    def records(self, file: IO[bytes], path: str) -> Iterator[Any]:
        checksum_of = crc32c()
        while head := file.read(_HEAD.size):
            if len(head) < _HEAD.size:
                raise DataLossError(f"{path}: truncated record")
            length, checksum = _HEAD.unpack(head)
            if masked(checksum_of(head[:8])) != checksum:
                raise DataLossError(f"{path}: corrupted record")
            data, tail = file.read(length), file.read(_TAIL.size)
            if len(tail) < _TAIL.size:
                raise DataLossError(f"{path}: truncated record")
            if masked(checksum_of(data)) != _TAIL.unpack(tail)[0]:
                raise DataLossError(f"{path}: corrupted record")
            yield data

"""Datasets of what is in files, under the names of tf.data.

Files are named by a string, a list of strings, or a Dataset of strings, and read one after the other. A file that does not exist
is a NotFoundError where it is read.
"""

from __future__ import annotations

import os
from typing import Any

from zmqdist.data.dataset import Dataset
from zmqdist.data.ops import readers
from zmqdist.data.structure import invalid, is_dataset


def _names(filenames: Any) -> Dataset:
    if is_dataset(filenames):
        return filenames  # type: ignore[no-any-return]
    many = [filenames] if isinstance(filenames, (str, bytes, os.PathLike)) else list(filenames)
    return Dataset.from_tensor_slices([os.fsdecode(one) for one in many])


def TextLineDataset(
    filenames: Any,
    compression_type: str | None = None,
    buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
    name: str | None = None,
) -> Dataset:
    """The lines of files, as str without their ends.

    Args:
      compression_type: None, "GZIP" or "ZLIB".
      buffer_size, num_parallel_reads: accepted; `interleave` reads several files at once.
    """
    compression = readers.checked_compression(compression_type)
    return Dataset(readers.TextLines(compression), (_names(filenames),))


def FixedLengthRecordDataset(
    filenames: Any,
    record_bytes: int,
    header_bytes: int | None = None,
    footer_bytes: int | None = None,
    buffer_size: int | None = None,
    compression_type: str | None = None,
    num_parallel_reads: int | None = None,
    name: str | None = None,
) -> Dataset:
    """Pieces of `record_bytes`, as bytes; each file's header and footer are skipped.

    Raises:
      InvalidArgumentError: `record_bytes` is not positive. Reading raises it for a file that does not divide into records.
    """
    if record_bytes < 1:
        raise invalid(f"record_bytes must be > 0, not {record_bytes}")
    compression = readers.checked_compression(compression_type)
    op = readers.FixedLengthRecords(compression, int(record_bytes), int(header_bytes or 0), int(footer_bytes or 0))
    return Dataset(op, (_names(filenames),))


def TFRecordDataset(
    filenames: Any,
    compression_type: str | None = None,
    buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
    name: str | None = None,
) -> Dataset:
    """The records of TFRecord files, as bytes. Reading raises DataLossError for a file that is cut off or damaged."""
    compression = readers.checked_compression(compression_type)
    return Dataset(readers.TFRecords(compression), (_names(filenames),))

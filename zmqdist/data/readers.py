"""Functions that return datasets of the content of files, with the names and arguments of tf.data.

`filenames` is a string, a list of strings, or a Dataset of strings. Files are read one after
another. With `num_parallel_reads`, that many files are open at the same time. A thread reads each
open file, and the dataset yields one record of each in turn. Iterating raises NotFoundError for a
file that does not exist, and ParquetDataset raises it at once. `buffer_size` is accepted and
ignored, because the operating system reads ahead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from zmqdist.data.dataset import Dataset
from zmqdist.data.ops import parquet, readers
from zmqdist.data.ops.background import checked_parallel
from zmqdist.data.structure import checked_int, invalid, is_dataset
from zmqdist.field_types import checked, converted


def _paths(filenames: Any) -> list[str]:
    many = (
        [filenames]
        if isinstance(filenames, (str, bytes, os.PathLike))
        else converted("filenames", list, filenames)
    )
    return [converted("filenames", os.fsdecode, name) for name in many]


def file_names(filenames: Any) -> Dataset:
    """Return a dataset of names of files, from a name, a list of names, or such a dataset."""
    return filenames if is_dataset(filenames) else Dataset.from_tensor_slices(_paths(filenames))


def _common_args(compression_type: str | None, num_parallel_reads: int | None) -> dict[str, Any]:
    """Check the arguments that all functions of this file except ParquetDataset take. Return them
    as arguments for an operator."""
    parallel = checked_parallel(num_parallel_reads, "num_parallel_reads")
    return {
        "compression": readers.checked_compression(compression_type, "compression_type"),
        "parallel": parallel,
    }


@checked
def TextLineDataset(
    filenames: Any,
    compression_type: str | None = None,
    buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
    name: str | None = None,
) -> Dataset:
    """Return a dataset of the lines of text files, as str without line endings.

    >>> from pathlib import Path
    >>> _ = Path(folder, "lines.txt").write_text("one" + chr(10) + "two")
    >>> print(*zd.data.TextLineDataset(f"{folder}/lines.txt"))
    one two

    Args:
      compression_type: None, "GZIP" or "ZLIB".
    """
    common = _common_args(compression_type, num_parallel_reads)
    return Dataset(readers.TextLines(**common), (file_names(filenames),))


@checked
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
    """Return a dataset of records of `record_bytes` bytes each, as bytes. The header and footer of
    each file are skipped.

    >>> from pathlib import Path
    >>> _ = Path(folder, "records").write_bytes(b"abcdef")
    >>> list(zd.data.FixedLengthRecordDataset(f"{folder}/records", 3))
    [b'abc', b'def']

    Raises:
      InvalidArgumentError: `record_bytes` is not positive, another size is negative, or, while
        iterating, a file does not consist of whole records.
    """
    if record_bytes < 1:
        raise invalid(f"record_bytes must be > 0, not {record_bytes}")
    common = _common_args(compression_type, num_parallel_reads)
    counts = {
        "record_bytes": record_bytes,
        "header_bytes": header_bytes or 0,
        "footer_bytes": footer_bytes or 0,
    }
    sizes: dict[str, Any] = {
        argument: checked_int(size, argument) for argument, size in counts.items()
    }
    if negative := [argument for argument, size in sizes.items() if size < 0]:
        raise invalid(f"{negative[0]} must be >= 0, not {sizes[negative[0]]}")
    return Dataset(readers.FixedLengthRecords(**common, **sizes), (file_names(filenames),))


@checked
def TFRecordDataset(
    filenames: Any,
    compression_type: str | None = None,
    buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
    name: str | None = None,
) -> Dataset:
    """Return a dataset of the records of TFRecord files, as bytes. Iterating raises DataLossError
    for a truncated or damaged file.

    >>> list(zd.data.TFRecordDataset(records))  # the path of a file
    [b'one', b'two']

    Needs the package google-crc32c for the checksums.
    """
    readers.crc32c()  # if the package is missing, raise ImportError here and not only at a worker
    common = _common_args(compression_type, num_parallel_reads)
    return Dataset(readers.TFRecords(**common), (file_names(filenames),))


@checked
def ParquetDataset(
    filenames: Any,
    columns: Sequence[str] | None = None,
    batch_size: int | None = None,
    name: str | None = None,
) -> Dataset:
    """Return a dataset of the rows of Parquet files, as dicts of columns. Needs the package
    pyarrow.

    >>> import pyarrow, pyarrow.parquet
    >>> pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2]}), f"{folder}/table")
    >>> list(zd.data.ParquetDataset(f"{folder}/table", batch_size=2))
    [{'n': array([1, 2])}]

    The call opens each file to read its schema, and a data service splits and shards the dataset by
    row groups. If `filenames` is a Dataset, the call opens no file, and a data service does not
    split files.

    Args:
      columns: the columns to read; None means all columns.
      batch_size: the number of rows in each element, which is then a dict of arrays. The last
        element of a row group may have fewer rows. Batches are read much faster than single rows.

    Raises:
      NotFoundError: a file does not exist.
      DataLossError: a file is not a Parquet file.
      InvalidArgumentError: a file lacks a column, no file has a row group, or, while iterating, a
        value is missing or cannot be in an array.
    """
    if batch_size is not None and batch_size < 1:
        raise invalid(f"batch_size must be > 0, not {batch_size}")
    selected, size = (
        None if columns is None else tuple(columns),
        checked_int(batch_size or 0, "batch_size"),
    )
    if is_dataset(filenames):
        return Dataset(parquet.Parquet(selected, size), (filenames,))
    row_groups: list[tuple[str, int]] = []
    count, spec = 0, None
    for path in _paths(filenames):
        with parquet.opened(path) as file:
            names = parquet.checked_columns(file, selected, path)
            spec = spec or parquet.spec_of_schema(file.schema_arrow, names, size)
            rows = [
                file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)
            ]
        row_groups += [(os.path.abspath(path), number) for number in range(len(rows))]
        count += sum(-(-row_count // size) for row_count in rows) if size else sum(rows)
    if not row_groups:
        raise invalid("the files have no rows: there is no row group in them")
    paths, groups = zip(*row_groups, strict=True)
    op = parquet.Parquet(selected, size, spec, len(row_groups), count)
    return Dataset(op, (Dataset.from_tensor_slices((list(paths), list(groups))),))

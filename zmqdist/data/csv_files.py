"""Functions that return datasets of CSV files, with the names and arguments of
tf.data.experimental. Text is str."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqdist.data.dataset import Dataset
from zmqdist.data.ops import csv_rows, readers, sources
from zmqdist.data.ops.background import checked_parallel
from zmqdist.data.options import Options
from zmqdist.data.readers import file_names
from zmqdist.data.structure import checked_int
from zmqdist.field_types import checked, converted
from zmqdist.specs import TensorSpec

_PYTHON_DTYPES = {int: np.dtype("int32"), float: np.dtype("float32"), str: np.dtype("str")}


@checked
def CsvDataset(
    filenames: Any,
    record_defaults: Sequence[Any],
    compression_type: str | None = None,
    buffer_size: int | None = None,
    header: bool = False,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    select_cols: Sequence[int] | None = None,
    exclude_cols: Sequence[int] | None = None,
) -> Dataset:
    """Return a dataset of the rows of CSV files, as tuples.

    >>> from pathlib import Path
    >>> _ = Path(folder, "rows.csv").write_text("a,1" + chr(10) + "b," + chr(10))
    >>> path = f"{folder}/rows.csv"
    >>> [(text, int(n)) for text, n in zd.data.experimental.CsvDataset(path, [str, 7])]
    [('a', 1), ('b', 7)]

    Args:
      record_defaults: for each value of a row a dtype (the value must be there), or its default,
        also as a list of one value. The dtypes are int32, int64, float32, float64 and str; an int,
        float or str of Python stands for int32, float32 and str.
      buffer_size: accepted and ignored.
      header: whether to skip the first row of each file.
      use_quote_delim: whether quotes enclose fields that hold delimiters, quotes or newlines.
      na_value: a text that stands for a missing value, as an empty field does.
      select_cols, exclude_cols: the positions of the values in a row, or those of all others.

    Raises:
      ValueError: an argument is invalid.
      InvalidArgumentError: while iterating, a row has another number of fields, or a value is
        missing or not of its dtype. The next row follows.
    """
    if select_cols is not None and exclude_cols is not None:
        raise ValueError("select_cols and exclude_cols: pass one of them")
    defaults = [_default(entry) for entry in record_defaults]
    if not defaults:
        raise ValueError("record_defaults is empty: pass a dtype or a default for each value")
    columns = None
    if select_cols is not None:
        columns = [checked_int(column, "select_cols") for column in select_cols]
    elif exclude_cols is not None:
        left_out = {checked_int(column, "exclude_cols") for column in exclude_cols}
        columns = [
            column for column in range(len(defaults) + len(left_out)) if column not in left_out
        ]
    if columns is not None and (
        len(columns) != len(defaults) or columns != sorted(set(columns)) or columns[0] < 0
    ):
        raise ValueError(
            f"select_cols and exclude_cols leave the columns {columns} for {len(defaults)} "
            f"record_defaults: there must be as many, in increasing order, from 0"
        )
    rows = _rows(filenames, compression_type, header, field_delim, use_quote_delim)
    convert = csv_rows.RowConverter(defaults, columns, na_value)
    return rows.map(convert, output_signature=tuple(TensorSpec((), dtype) for dtype, _ in defaults))


def _rows(
    filenames: Any,
    compression_type: str | None,
    header: bool,
    field_delim: str,
    quoted: bool,
    encoding: str = "utf-8",
    parallel: int = 0,
) -> Dataset:
    if len(field_delim) != 1 or field_delim in '"\r\n':
        raise ValueError(f"field_delim is {field_delim!r}, wants one character, and no quote")
    op = csv_rows.CsvRows(
        compression=readers.checked_compression(compression_type, "compression_type"),
        parallel=parallel,
        header=header,
        delimiter=field_delim,
        quoted=quoted,
        encoding=encoding,
    )
    return Dataset(op, (file_names(filenames),))


def _default(entry: Any) -> tuple[np.dtype[Any], Any]:
    """Return the dtype and the default of a value; None if it must be there. Raises ValueError for
    anything else than a dtype or one value."""
    if isinstance(entry, (type, np.dtype)):
        dtype = np.dtype(entry)
        default = None
    else:
        array = np.ravel(converted("record_defaults", np.asarray, entry))
        single = entry[0] if isinstance(entry, list) and len(entry) == 1 else entry
        dtype = _PYTHON_DTYPES.get(type(single), array.dtype)
        if array.size > 1:
            raise ValueError(f"record_defaults: {entry!r:.80} is more than one value")
        default = None if not array.size else array[0].astype(dtype)
    if dtype.kind == "U":
        return np.dtype("str"), None if default is None else str(default)
    if dtype not in csv_rows.DTYPES:
        raise ValueError(
            f"record_defaults: a column cannot be {dtype}, but {', '.join(map(str, csv_rows.DTYPES))}"
        )
    return dtype, default


@checked
def make_csv_dataset(
    file_pattern: Any,
    batch_size: int,
    column_names: Sequence[str] | None = None,
    column_defaults: Sequence[Any] | None = None,
    label_name: str | None = None,
    select_columns: Sequence[Any] | None = None,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    header: bool = True,
    num_epochs: int | None = None,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10000,
    shuffle_seed: int | None = None,
    prefetch_buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
    sloppy: bool = False,
    num_rows_for_inference: int | None = 100,
    compression_type: str | None = None,
    ignore_errors: bool = False,
    encoding: str = "utf-8",
) -> Dataset:
    """Return a dataset of batches of the rows of CSV files, as dicts of arrays by the names of the
    columns.

    >>> from pathlib import Path
    >>> _ = Path(folder, "named.csv").write_text(chr(10).join(["x,y", "1,a", "2,b"]))
    >>> batches = zd.data.experimental.make_csv_dataset(
    ...     f"{folder}/named.csv", 2, label_name="y", num_epochs=1, shuffle=False
    ... )
    >>> [(features["x"].tolist(), label.tolist()) for features, label in batches]
    [([1, 2], ['a', 'b'])]

    Args:
      file_pattern: patterns of the names of files.
      column_names: the names of all columns; by default those in the first row of the files.
      column_defaults: as `record_defaults` of CsvDataset, for the selected columns. By default the
        dtypes are the narrowest that hold the first `num_rows_for_inference` rows (None: all rows),
        and missing values are 0 or "".
      label_name: a column that is returned beside the dict, as (dict, label).
      select_columns: names or positions of the columns to read.
      field_delim, use_quote_delim, na_value, header: as for CsvDataset.
      num_epochs: how often the rows are repeated; None repeats without end, and then every batch is
        full.
      shuffle, shuffle_buffer_size, shuffle_seed: how files and rows are shuffled.
      prefetch_buffer_size, num_parallel_reads: as for `Dataset.prefetch` and `TextLineDataset`.
      sloppy: whether rows may come in the order in which they are ready.
      ignore_errors: whether to leave out rows that cannot be converted.
      encoding: the encoding of the files.

    Raises:
      InvalidArgumentError: no file matches, or as CsvDataset.
      ValueError: an argument is invalid, a name occurs twice, or the first rows of the files
        differ.
    """
    files, size = sources.files_matching(file_pattern), checked_int(batch_size, "batch_size")
    parallel = checked_parallel(num_parallel_reads, "num_parallel_reads")

    def rows_of(names: Any, skip: bool, parallel: int = 0) -> Dataset:
        return _rows(
            names, compression_type, skip, field_delim, use_quote_delim, encoding, parallel
        )

    if column_names is None:
        if not header:
            raise ValueError("column_names: files without a header need names of their columns")
        heads = [row for name in files for row in rows_of(name, False).take(1)]
        if len(heads) < len(files) or len(set(heads)) > 1:
            raise ValueError(
                f"the first rows of {files[0]} and others differ, or are missing: give column_names"
            )
        column_names = heads[0]
    names = list(column_names)
    if len(set(names)) < len(names):
        raise ValueError(f"column_names: a name occurs twice in {names}")
    columns = _positions(names, select_columns)
    if column_defaults is None:
        first = rows_of(files, header).take(
            -1 if num_rows_for_inference is None else num_rows_for_inference
        )
        defaults = _inferred(first, len(names), columns, na_value)
    else:
        defaults = [_default(entry) for entry in column_defaults]
    if len(defaults) != len(columns):
        raise ValueError(f"column_defaults has {len(defaults)} entries for {len(columns)} columns")
    selected = [names[column] for column in columns]
    if label_name is not None and label_name not in selected:
        raise ValueError(f"label_name: no column {label_name!r}; there are {', '.join(selected)}")
    paths = Dataset.from_tensor_slices(files)
    rows = rows_of(paths.shuffle(len(files), shuffle_seed) if shuffle else paths, header, parallel)
    signature = tuple(TensorSpec((), dtype) for dtype, _ in defaults)
    dataset = rows.map(
        csv_rows.RowConverter(defaults, columns, na_value), output_signature=signature
    )
    if ignore_errors:
        dataset = dataset.ignore_errors()
    if shuffle:
        dataset = dataset.shuffle(shuffle_buffer_size, shuffle_seed)
    if num_epochs != 1:
        dataset = dataset.repeat(num_epochs)
    if sloppy:
        options = Options()
        options.deterministic = False
        dataset = dataset.with_options(options)
    batches = dataset.batch(size, drop_remainder=num_epochs is None)
    named = csv_rows.ColumnsByName(selected, label_name)
    by_name = batches.map(named, output_signature=named(*batches.element_spec))
    return by_name.prefetch(prefetch_buffer_size)


def _positions(names: list[str], select_columns: Sequence[Any] | None) -> list[int]:
    """Return the positions of the selected columns, in their order in the files."""
    if select_columns is None:
        return list(range(len(names)))
    columns = [
        names.index(column)
        if column in names
        else -1
        if isinstance(column, str)
        else checked_int(column, "select_columns")
        for column in select_columns
    ]
    if (
        not columns
        or len(set(columns)) < len(columns)
        or not 0 <= min(columns) <= max(columns) < len(names)
    ):
        raise ValueError(
            f"select_columns is {list(select_columns)}, wants different names or positions of the "
            f"columns {names}"
        )
    return sorted(columns)


def _inferred(
    rows: Dataset, width: int, columns: list[int], na_value: str
) -> list[tuple[np.dtype[Any], Any]]:
    """Return the narrowest dtype that holds the values of each column, with 0 or "" as default."""
    found: list[int | None] = [None] * len(columns)
    for row in rows:
        if len(row) != width:
            raise ValueError(
                f"a row has {len(row)} fields, but there are {width} columns: {row!r:.80}"
            )
        for number, column in enumerate(columns):
            if row[column] not in ("", na_value):
                found[number] = csv_rows.dtype_of(row[column], found[number] or 0)
    dtypes = [csv_rows.DTYPES[-1 if number is None else number] for number in found]
    return [(dtype, "" if dtype.kind == "U" else dtype.type(0)) for dtype in dtypes]

"""TFRecord files that are written, and a dataset's number of elements that is checked, with the
names of tf.data.experimental."""

from __future__ import annotations

import os
from collections.abc import Callable

from zmqdist.data import storage
from zmqdist.data.constants import INFINITE_CARDINALITY
from zmqdist.data.dataset import Dataset
from zmqdist.data.ops import elementwise, readers
from zmqdist.data.structure import checked_int, invalid, is_dataset
from zmqdist.field_types import checked, converted


@checked
class TFRecordWriter:
    """Writes a dataset of bytes to a TFRecord file. Needs the package google-crc32c.

    >>> writer = zd.data.experimental.TFRecordWriter(f"{folder}/written")
    >>> writer.write(Dataset.from_tensor_slices(["one", "two"]))
    >>> list(zd.data.TFRecordDataset(f"{folder}/written"))
    [b'one', b'two']

    Args:
      filename: the file, which is created or replaced.
      compression_type: None, "GZIP" or "ZLIB".
    """

    def __init__(
        self, filename: str | os.PathLike[str], compression_type: str | None = None
    ) -> None:
        self._path = converted("filename", os.fsdecode, filename)
        self._compression = readers.checked_compression(compression_type, "compression_type")
        self._checksum = readers.crc32c()

    def write(self, dataset: Dataset) -> None:
        """Write all elements. The file is on the disk when `write` returns; after an error it holds
        the elements before it.

        >>> writer = zd.data.experimental.TFRecordWriter(f"{folder}/numbers")
        >>> writer.write(Dataset.range(2).map(str))

        Raises:
          TypeError: `dataset` is no dataset, or an element is neither str nor bytes.
          InvalidArgumentError: the dataset is infinite.
        """
        if not is_dataset(dataset):
            raise TypeError(f"`dataset` must be a Dataset, not {type(dataset).__name__}")
        if dataset.cardinality() == INFINITE_CARDINALITY:
            raise invalid("`dataset` is infinite, and has no last record: take() some")
        with storage.open_write(self._path) as file:
            sink = storage.compressing(file, self._compression)
            try:
                for x in dataset:
                    if not isinstance(x, (str, bytes)):
                        raise TypeError(
                            f"`dataset`: a record is bytes or str, not {type(x).__name__}"
                        )
                    data = x.encode("utf-8", "surrogateescape") if isinstance(x, str) else x
                    sink.write(readers.framed(data, self._checksum))
            finally:
                if sink is not file:
                    sink.close()
            storage.sync(file)


@checked
def assert_cardinality(expected_cardinality: int) -> Callable[[Dataset], Dataset]:
    """Return a function for `Dataset.apply` that makes a number of elements known, and has
    iterating raise FailedPreconditionError if there are more or fewer.

    >>> evens = Dataset.range(10).filter(lambda x: x % 2 == 0)
    >>> len(evens.apply(zd.data.experimental.assert_cardinality(5)))
    5

    Args:
      expected_cardinality: the number, or INFINITE_CARDINALITY.
    """
    count = checked_int(expected_cardinality, "expected_cardinality")
    if count < INFINITE_CARDINALITY:
        raise invalid(
            f"`expected_cardinality` is {count}, wants a number of elements, or "
            f"INFINITE_CARDINALITY"
        )
    return lambda dataset: Dataset(elementwise.AssertCardinality(count), (dataset,))

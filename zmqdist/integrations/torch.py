"""`IterableDataset`: lets a DataLoader of PyTorch read a dataset of zmqdist. It needs the package
torch."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from zmqdist import errors

try:
    import torch.utils.data as torch_data
except ImportError as error:
    raise ImportError(errors.needs("zmqdist.integrations.torch", "torch")) from error

from zmqdist import nest
from zmqdist.data import Dataset
from zmqdist.data.sharding import common_shard


class IterableDataset(torch_data.IterableDataset):  # type: ignore[misc, type-arg, unused-ignore]
    """A `zmqdist.data.Dataset` as an IterableDataset of PyTorch.

        loader = DataLoader(IterableDataset(dataset), batch_size=None, num_workers=2)

    The processes of a DataLoader share the elements of an epoch. If the dataset is distributed,
    they read it as one job, so that only one of the processes reads each element. If not, each of n
    processes computes all elements and yields every n-th element. The dataset's random operators
    then draw the same numbers in all processes, and its parallel operators yield their elements in
    order. The DataLoader converts arrays to tensors by its own rules.
    This class first copies read-only arrays, because programs can write to tensors.

    Args:
      dataset: a dataset of batches. Pass `batch_size=None` to the DataLoader, so that it does not
        copy the batches again.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self._entropy = secrets.randbits(63)
        self._epochs = 0
        """The number of epochs that this process of a DataLoader has begun."""

    def __iter__(self) -> Iterator[Any]:
        return map(_writable, self._elements())

    def _elements(self) -> Iterator[Any]:
        info = torch_data.get_worker_info()
        if info is None:
            return iter(self.dataset)
        # PyTorch adds `id` to a number that all processes of a DataLoader share. New processes of
        # the next epoch get another number, but processes that stay (`persistent_workers=True`)
        # keep their number, so they have to count the epochs.
        epoch = info.seed - info.id + self._epochs
        self._epochs += 1
        if any(node.op.name == "distribute" for node in self.dataset.walk()):
            return iter(self.dataset.rewrite(lambda node: _for_epoch(node, epoch)))
        return iter(common_shard(self.dataset, info.num_workers, info.id, (self._entropy, epoch)))

    def __len__(self) -> int:
        return len(self.dataset)


def _writable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else value.copy()
    if isinstance(value, (tuple, dict)):
        return nest.map_structure(_writable, value)
    return value


def _for_epoch(node: Any, epoch: int) -> Any:
    if node.op.name != "distribute":
        return node
    name = f"{node.op.job_name or 'loader'}-{node.op.dataset}-{epoch}"
    return type(node)(replace(node.op, job_name=name), node.inputs)

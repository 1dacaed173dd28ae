"""Per-worker datasets at the worker: what counts as one, and the iterator that its functions share."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zmqdist import task_context
from zmqdist.data.structure import is_dataset


def check_iterable(dataset: Any) -> Any:
    """A dataset, or anything else that can be iterated and is no single value. Raises TypeError for the rest."""
    if is_dataset(dataset):
        return dataset
    if not hasattr(dataset, "__iter__") or isinstance(dataset, (str, bytes, Mapping)):
        raise TypeError(
            f"a per-worker dataset is made of a Dataset or of anything that can be iterated, not of {type(dataset).__name__}:"
            " what does the dataset function return?"
        )
    return dataset


class WorkerIterator:
    """The elements of a dataset, for the functions of one worker: each goes on where the one before has stopped.

    Functions that run at a time (slots that are threads) share it: each element goes to one of them.

    Args:
      sharers: indices of the workers that share the elements: of n of them the one at position i has element i, i + n, ...; another
        worker has none. Empty: each has all.
    """

    def __init__(self, dataset: Any, sharers: Sequence[int]) -> None:
        if sharers:
            index = task_context.get_current_worker_index()
            dataset = _share(dataset, len(sharers), sharers.index(index)) if index in sharers else ()
        self._iterator: Iterator[Any] = iter(dataset)
        self._dataset = dataset
        self._lock = threading.Lock()

    @property
    def element_spec(self) -> Any:
        """That of the dataset. Raises NotImplementedError where it has none."""
        return spec_of(self._dataset)

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        with self._lock:
            return next(self._iterator)

    get_next = __next__

    def __reduce__(self) -> Any:
        raise TypeError("an iterator of a per-worker dataset stays with its worker: return its elements")


def spec_of(dataset: Any) -> Any:
    """The form of the elements. Raises NotImplementedError where that cannot be known."""
    try:
        return dataset.element_spec
    except AttributeError:
        raise NotImplementedError(
            f"the elements of {type(dataset).__name__} have no spec: let the function return a zmqdist.data.Dataset"
        ) from None


def _share(dataset: Any, shards: int, index: int) -> Any:
    return dataset.shard(shards, index) if hasattr(dataset, "shard") else itertools.islice(dataset, index, None, shards)


class DatasetOnWorker:
    """What a per-worker dataset is inside a function: a name. Its iterators are made by the coordinator."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError(
            "a per-worker dataset is iterated on the coordinator, not in a scheduled function: give the function"
            " iter(dataset), or dataset.build() to iterate anew in each"
        )

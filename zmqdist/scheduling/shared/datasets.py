"""Per-worker datasets at the worker: the check that a value is a dataset, and the iterator that the
worker's functions share."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from zmqdist import task_context


def check_iterable(dataset: Any) -> Any:
    """Return `dataset` if it is a Dataset or another iterable that is not text or a mapping. Raises
    TypeError otherwise."""
    if not hasattr(dataset, "__iter__") or isinstance(dataset, (str, bytes, Mapping)):
        raise TypeError(
            f"the function of a per-worker dataset returned a {type(dataset).__name__}: let it "
            f"return a Dataset or another iterable,"
            " except text and mappings"
        )
    return dataset


class WorkerIterator:
    """An iterator over a dataset that the functions of one worker share. Each function continues
    after the elements of earlier functions.

    Functions that run at the same time, in slots that are threads, get different elements.

    Args:
      sharers: the indices of the workers that share the elements. Of n sharers, the worker at
        position i gets elements i, i + n, and so on. A worker that is not among the sharers gets no
        elements. If `sharers` is empty, each worker gets all elements.
      entropy: two numbers that the sharers have in common, of which the second is the iterator's
        own.
    """

    def __init__(self, dataset: Any, sharers: Sequence[int], entropy: tuple[int, int]) -> None:
        if sharers:
            index = task_context.get_current_worker_index()
            dataset = (
                _share(dataset, len(sharers), sharers.index(index), entropy)
                if index in sharers
                else ()
            )
        self._iterator: Iterator[Any] = iter(dataset)
        self._dataset = dataset
        self._lock = threading.Lock()

    @property
    def element_spec(self) -> Any:
        """The spec of the dataset's elements. Raises NotImplementedError if the dataset has no
        spec."""
        return spec_of(self._dataset)

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        with self._lock:
            return next(self._iterator)

    get_next = __next__

    def __reduce__(self) -> Any:
        raise TypeError(
            "an iterator of a per-worker dataset stays with its worker: return its elements"
        )


def spec_of(dataset: Any) -> Any:
    """Return the spec of the dataset's elements. Raises NotImplementedError if the dataset has no
    spec."""
    try:
        return dataset.element_spec
    except AttributeError:
        raise NotImplementedError(
            f"the elements of {type(dataset).__name__} have no spec: let the function return a "
            f"zmqdist.data.Dataset"
        ) from None


def _share(dataset: Any, shards: int, index: int, entropy: tuple[int, int]) -> Any:
    # A Dataset of zmqdist divides itself so that all workers count the same elements. A function
    # may return an object that this worker has read before, and another worker has not.
    common_shard = getattr(type(dataset), "_common_shard", None)
    if common_shard is not None:
        return common_shard(dataset, shards, index, entropy)
    return (
        dataset.shard(shards, index)
        if hasattr(dataset, "shard")
        else islice(dataset, index, None, shards)
    )


class DatasetOnWorker:
    """The object that a scheduled function gets in place of a PerWorkerDataset. The function cannot
    iterate over it, because only the program creates iterators of a per-worker dataset."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError(
            "a scheduled function cannot iterate over a per-worker dataset: let the program pass "
            "iter(dataset) to it, or dataset.build(),"
            " over which each function iterates from the beginning"
        )

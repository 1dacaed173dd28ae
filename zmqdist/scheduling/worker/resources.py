"""Per-worker resources at the worker: what is built there once, and used by each function that names it.

Rules
    In a pickle a resource is a call of `resource` with its number and its definition: the packed function and arguments that make it.
    Where it is unpickled it is looked up, and built where it is not there yet; so a worker or slot that was started again
    has it back, as it was at first, before the function begins that wants it.
    It is built once, whoever asks at the same time waits, and a build that has failed stays failed: who uses it gets ClosureInputError.
    Slots that are threads of one worker share their resources; a slot process has its own.

Not here: when a resource is of no further use (its coordinator says so), and iterators (datasets.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from zmqdist import errors, nest, task_context
from zmqdist.messages import ALL_NUMBERS
from zmqdist.scheduling.worker.references import PartsFetcher, decode_reference, is_reference
from zmqdist.wire import trusted

RESOURCE, DATASET, ITERATOR = "resource", "dataset", "iterator"
"""What a definition makes: any value; something that can be iterated; an iterator over that, for all functions of the worker."""

_of_thread = threading.local()


def use_resources(resources: SlotResources) -> None:
    """The present thread runs functions: the resources that they name are these."""
    _of_thread.resources = resources


def current_resources() -> SlotResources:
    """Those of the slot whose thread this is."""
    resources: SlotResources = _of_thread.resources
    return resources


def resource(coordinator: int, number: int, kind: str, definition: bytes, sharers: Sequence[int]) -> Any:
    """What the pickle of a resource calls; the name is part of the protocol.

    Args:
      number: among the coordinator's.
      definition: a packed call, or a reference to one.
      sharers: indices of the workers that share an ITERATOR's elements; empty: each has all.

    Raises:
      ClosureInputError: it cannot be built; with the reason.
      RuntimeError: this is not unpickled for a scheduled function.
    """
    resources: SlotResources | None = getattr(_of_thread, "resources", None)
    if resources is None:
        raise RuntimeError("a per-worker resource is there for scheduled functions only: it cannot be used here")
    return resources.get((coordinator, number), kind, definition, sharers)


def slice_of(values: tuple[Any, ...]) -> Any:
    """What the pickle of values of all workers calls that are no resource; the name is part of the protocol.

    Raises:
      RuntimeError: there is none for this worker.
    """
    index = task_context.get_current_worker_index()
    if index >= len(values):
        raise RuntimeError(f"there are values for {len(values)} workers, and none for worker:{index}")
    return values[index]


def ensure_built(resource: Any) -> None:
    """A scheduled function: it is there now."""


def read_value(resource: Any) -> Any:
    """A scheduled function: the value of a resource."""
    return resource


def read_numpy(resource: Any) -> Any:
    """The same with each leaf that has a `numpy()` replaced by what that gives."""
    return nest.map_structure(lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf, resource)


def read_spec(dataset: Any) -> Any:
    """A scheduled function: the form of a dataset's elements."""
    from zmqdist.scheduling.worker import datasets

    return datasets.spec_of(dataset)


class _Resource:
    """One resource. `failure` is the packed error with which its build ended."""

    __slots__ = ("built", "failure", "lock", "value")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.built = False
        self.failure = b""
        self.value: Any = None


class SlotResources:
    """The resources of one process, or of a worker whose slots are threads. Any thread may use it."""

    def __init__(self, fetcher: PartsFetcher) -> None:
        self._fetcher = fetcher
        self._resources: dict[tuple[int, int], _Resource] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._resources)

    def get(self, key: tuple[int, int], kind: str, definition: bytes, sharers: Sequence[int]) -> Any:
        """See `resource`."""
        with self._lock:
            entry = self._resources.get(key)
            if entry is None:
                entry = self._resources[key] = _Resource()
        with entry.lock:
            if not entry.built:
                self._build(entry, kind, definition, sharers)
        if entry.failure:
            error = trusted.unpack_error(entry.failure)
            raise errors.ClosureInputError(error) from error
        return entry.value

    def forget(self, keys: list[tuple[int, int]]) -> None:
        """Drop what stands under these, where something does."""
        with self._lock:
            for coordinator, number in keys:
                if number == ALL_NUMBERS:
                    mine = [key for key in self._resources if key[0] == coordinator]
                else:
                    mine = [(coordinator, number)]
                for key in mine:
                    self._resources.pop(key, None)

    def _build(self, entry: _Resource, kind: str, definition: bytes, sharers: Sequence[int]) -> None:
        if is_reference(definition):
            parts = self._fetcher.fetch(decode_reference(definition))  # a failure to get it is no failure to build it
        else:
            parts = [definition]
        try:
            with task_context.under_construction(DATASET if kind == ITERATOR else kind):
                (fn, *args), kwargs = trusted.unpack_parts(parts)
                value = fn(*args, **kwargs)
                if kind != RESOURCE:
                    from zmqdist.scheduling.worker import datasets  # loads zmqdist.data

                    value = datasets.check_iterable(value)
                    if kind == ITERATOR:
                        value = datasets.WorkerIterator(value, sharers)
        except BaseException as error:
            entry.failure = trusted.pack_error(trusted.as_ordinary_error(error))
        else:
            entry.value = value
        entry.built = True

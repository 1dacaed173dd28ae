"""Per-worker resources at the worker: values that each worker builds once for the functions that
use them.

Rules
    A pickle represents a resource as a call of `resource` with the number and the definition of the
    resource. The definition is the packed call that builds the resource. The process that unpickles
    the pickle looks the resource up, and builds it if it is missing. A restarted worker or slot
    therefore builds the resource anew before a function that uses the resource begins.
    A resource is built once, and functions that need the resource during the build wait. A failed
    build is not repeated: each function that uses the resource fails with ClosureInputError.
    Slots that are threads of one worker share their resources; each slot process has its own
    resources.
    The state of a slot belongs to one slot, also if slots are threads. A failed build of it is
    repeated for the next function, because each build concerns one function only.

Not here: when a resource is no longer needed (its coordinator sends a Forget), and iterators
(datasets.py).
"""

from __future__ import annotations

import threading
from _thread import get_ident
from collections.abc import Callable, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from zmqdist import errors, nest, task_context
from zmqdist.messages import ALL_NUMBERS
from zmqdist.scheduling.shared import datasets
from zmqdist.scheduling.shared.references import PartsFetcher, decode_reference, is_reference
from zmqdist.wire import trusted

RESOURCE, DATASET, ITERATOR, STATE = "resource", "dataset", "iterator", "state of a slot"
"""The kinds of resources: any value; an iterable; an iterator that all functions of the worker
share; a value that each slot makes at its first use, even if slots are threads."""

_of_thread = threading.local()


def use_resources(resources: SlotResources) -> None:
    """Set the resources of the functions that the calling thread will run."""
    _of_thread.resources = resources


def current_resources() -> SlotResources:
    """Return the resources of the slot that runs in the calling thread."""
    resources: SlotResources = _of_thread.resources
    return resources


def resource(
    coordinator: int, number: int, kind: str, definition: bytes, sharers: Sequence[int]
) -> Any:
    """Return the value of a resource, and build the resource if it is missing. Pickles call this
    function by name, so the name is part of the protocol.

    Args:
      number: the coordinator's number for the resource.
      kind: RESOURCE, DATASET, ITERATOR or STATE.
      definition: the packed call that builds the resource, or a reference to it.
      sharers: the indices of the workers that share an ITERATOR's elements; if empty, each worker
        gets all elements.

    Raises:
      ClosureInputError: the resource could not be built; the text has the reason.
      RuntimeError: the calling thread runs no scheduled function.
    """
    resources: SlotResources | None = getattr(_of_thread, "resources", None)
    if resources is None:
        raise RuntimeError(
            "a per-worker resource exists only inside scheduled functions: pass it to a function "
            "as an argument"
        )
    return resources.get((coordinator, number), kind, definition, sharers)


def slice_of(values: tuple[Any, ...]) -> Any:
    """Return this worker's value from a tuple with one value for each worker. Pickles call this
    function by name.

    Raises:
      RuntimeError: the tuple has no value for this worker.
    """
    index = task_context.get_current_worker_index()
    if index >= len(values):
        raise RuntimeError(
            f"these PerWorkerValues are for {len(values)} workers, and have none for worker:{index}"
        )
    return values[index]


def ensure_built(resource: Any) -> None:
    """Do nothing. The coordinator schedules this function with a resource as its argument, so that
    the worker builds the resource."""


def read_value(resource: Any) -> Any:
    """Return the value of a resource. The coordinator schedules this function."""
    return resource


def read_numpy(resource: Any) -> Any:
    """Return a resource's value, in which each leaf that has a method `numpy()` is replaced by the
    result. The coordinator schedules this function."""
    return nest.as_numpy(resource)


def read_spec(dataset: Any) -> Any:
    """Return the spec of a dataset's elements. The coordinator schedules this function."""
    return datasets.spec_of(dataset)


class _Resource:
    """One resource of a slot or worker. `failure` is the packed error of the build; b"" if the
    build has not failed."""

    __slots__ = ("built", "failure", "lock", "value")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.built = False
        self.failure = b""
        self.value: Any = None


LAZY = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType})
"""The types of values that a function returns before its code has run."""


def run_to_end(fn: Callable[..., Any], value: Any) -> Any:
    """Run the coroutine that `fn` has returned, in an event loop of its own, and return its value.
    Raises TypeError for a generator."""
    if type(value) is not CoroutineType:
        raise TypeError(f"{trusted.describe(fn)} {trusted.GENERATES}")
    import asyncio  # imported here, because asyncio is slow to import, and few functions are async

    return asyncio.run(value)


class SlotResources:
    """The resources of one slot process, or of a worker whose slots are threads. Any thread may
    call the methods."""

    def __init__(self, fetcher: PartsFetcher) -> None:
        self._fetcher = fetcher
        self._resources: dict[tuple[int, int, int], _Resource] = {}
        """The resources by coordinator, number, and thread; 0 in place of the thread if all threads
        share a resource."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._resources)

    def get(
        self, key: tuple[int, int], kind: str, definition: bytes, sharers: Sequence[int]
    ) -> Any:
        """Return the value of a resource, and build the resource if it is missing. Arguments and
        errors are as for the function `resource`."""
        place = *key, get_ident() if kind == STATE else 0
        with self._lock:
            entry = self._resources.get(place)
            if entry is None:
                entry = self._resources[place] = _Resource()
        with entry.lock:
            if not entry.built:
                self._build(entry, key, kind, definition, sharers)
        if entry.failure:
            if kind == STATE:
                with self._lock:
                    self._resources.pop(place, None)
            error = trusted.unpack_error(entry.failure)
            raise errors.ClosureInputError(error) from error
        return entry.value

    def forget(self, keys: list[tuple[int, int]]) -> None:
        """Drop the resources with these (coordinator, number), if they exist. ALL_NUMBERS drops all
        resources of the coordinator."""
        with self._lock:
            for coordinator, number in keys:
                for place in list(self._resources):
                    if place[0] == coordinator and number in (ALL_NUMBERS, place[1]):
                        del self._resources[place]

    def _build(
        self,
        entry: _Resource,
        key: tuple[int, int],
        kind: str,
        definition: bytes,
        sharers: Sequence[int],
    ) -> None:
        if is_reference(definition):
            # The fetch is outside of `try`, so that its error is not recorded: the next function
            # repeats a failed fetch, but not a failed build.
            parts = self._fetcher.fetch(decode_reference(definition))
        else:
            parts = [definition]
        try:
            built = {ITERATOR: DATASET, STATE: RESOURCE}.get(kind, kind)
            with task_context.under_construction(built):
                (fn, *args), kwargs = trusted.unpack_parts(parts)
                value = fn(*args, **kwargs)
                if type(value) is CoroutineType:
                    value = run_to_end(fn, value)
                if built != RESOURCE:
                    value = datasets.check_iterable(value)
                    if kind == ITERATOR:
                        value = datasets.WorkerIterator(value, sharers, entropy=key)
        except BaseException as error:
            entry.failure = trusted.pack_error(trusted.as_ordinary_error(error))
        else:
            entry.value = value
        entry.built = True

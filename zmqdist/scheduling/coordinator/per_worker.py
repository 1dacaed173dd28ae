"""The program's side of per-worker resources: PerWorkerValues, and per-worker datasets.

Rules
    A scheduled function that gets PerWorkerValues (as an argument at any depth, or captured) sees
    the value of the worker that runs it. In the program each of these values is a RemoteValue. Its
    status is the status of the latest build, and each `result` reads the value from the worker
    again, because functions may have changed it. A dataset is pickled when
    `create_per_worker_dataset` is called; each `iter` starts a new iteration on all workers.

Not here: when workers build a resource (resources.py, scheduling/shared/resources.py).
"""

from __future__ import annotations

import inspect
from _thread import get_ident
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from zmqdist import errors, task_context
from zmqdist.callbacks import Callbacks
from zmqdist.clock import deadline, left
from zmqdist.field_types import converted
from zmqdist.scheduling.coordinator.remote_value import (
    RemoteValue,
    RemoteValueNotAllowed,
    RemoteValueStatus,
)
from zmqdist.scheduling.coordinator.resources import Definition, Resource, Resources
from zmqdist.scheduling.coordinator.work import Work
from zmqdist.scheduling.shared import datasets
from zmqdist.scheduling.shared import resources as at_worker
from zmqdist.scheduling.shared.resources import DATASET, ITERATOR, RESOURCE
from zmqdist.wire import trusted

T = TypeVar("T")


class ResourceValue(RemoteValue):
    """The value of a per-worker resource at one worker.

    The value is ABORTED while its worker is lost, and READY again once the worker is back and has
    rebuilt the resource. While the program holds a ResourceValue, all workers keep the resource.
    """

    __slots__ = ("_index", "_resource")

    def __init__(self, resource: Resource, index: int) -> None:
        work = Work(0, 0, f"{resource.name} at worker:{index}", b"")
        super().__init__(resource.owner.runtime, work)
        self._resource = resource
        self._index = index

    def __repr__(self) -> str:
        return f"<RemoteValue: {self.name}: {self.status.value}>"

    def __reduce__(self) -> Any:
        raise RemoteValueNotAllowed(
            f"{self.name} exists only at its worker: pass the PerWorkerValues to the function "
            f"instead"
        )

    @property
    def status(self) -> RemoteValueStatus:
        """NOT_READY during the build, READY once the build has ended (even with an error), ABORTED
        while the worker is lost."""
        building, lost = self._state()
        if lost is not None:
            return RemoteValueStatus.ABORTED
        return (
            RemoteValueStatus.READY
            if building is not None and building.done()
            else RemoteValueStatus.NOT_READY
        )

    def done(self) -> bool:
        """Return whether the build has ended or the worker is lost. Does not wait."""
        return self.status is not RemoteValueStatus.NOT_READY

    def result(self, timeout: float | None = None) -> Any:
        """Wait until the resource is built, and return a copy of its present state, which each call
        reads from the worker again.

        Raises:
          CancelledError: the worker is lost. The resource is available again when the worker is
            back.
          FailedPreconditionError: the coordinator has been closed.
          DeadlineExceededError: the resource was not available within `timeout` seconds.
          InvalidArgumentError: the resource cannot be pickled, which is so for every iterator.
          Exception: the function that builds the resource raised it.
        """
        return self._read(at_worker.read_value, timeout)

    get = result

    def fetch(self, timeout: float | None = None) -> Any:
        """Return the value as `result` does, but replace each leaf that has a method `numpy()` by
        the result of that method.
        """
        return self._read(at_worker.read_numpy, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the resource is built, and return the error that `result` would raise, or
        None.

        Raises DeadlineExceededError as `result` does.
        """
        until = deadline(timeout)
        while True:
            building, lost = self._state()
            if lost is not None:
                error = errors.ClosureAbortedError(errors.UnavailableError(lost))
                cancelled = errors.CancelledError(
                    f"{self.name} is aborted until the worker is back: {lost}"
                )
                cancelled.__cause__ = error
                return cancelled
            assert building is not None, "a worker that is there builds it"
            failed = building.exception(left(until))
            if self._state() == (building, None):
                return (
                    failed.original_exception
                    if isinstance(failed, errors.ClosureInputError)
                    else failed
                )

    def cancel(self) -> bool:
        """Return False, because a resource cannot be cancelled. Workers drop a resource when the
        program holds none of its values."""
        return False

    def _call_at_end(self, thread: Callbacks, fn: Callable[[RemoteValue], object]) -> None:
        """Call `fn(self)` when the present build has ended, even with an error. If the worker is
        lost, call `fn(self)` at once."""
        building, lost = self._state()
        if lost is not None or building is None:
            thread.put(fn, self)
        else:
            building._call_at_end(thread, lambda _: fn(self))

    def __await__(self) -> Generator[Any, None, Any]:
        # imported here, because asyncio is slow to import, and most programs do not await values
        import asyncio

        return (yield from asyncio.get_running_loop().run_in_executor(None, self.result))

    def _state(self) -> tuple[RemoteValue | None, str | None]:
        with self._owner.lock:
            state = self._resource.states[self._index]
            return state.building, state.lost

    def _read(self, fn: Callable[[Any], Any], timeout: float | None) -> Any:
        until = deadline(timeout)
        while True:
            error = self.exception(left(until))
            if error is not None:
                raise error
            building = self._state()[0]
            try:
                return self._resource.owner.run_at(self._resource, self._index, fn).result(
                    left(until)
                )
            except errors.CancelledError:
                # If there is a new build, the worker was lost during the read, so read again. If
                # the build is the same, the read itself was cancelled.
                if self._state() == (building, None):
                    raise


class PerWorkerValues:
    """One RemoteValue for each worker, in the order of the workers' indices.

    A scheduled function that gets PerWorkerValues as an argument, or captures them, sees the value
    of the worker that runs it. The values of a resource include a value for each worker that joins
    later.

    >>> tables = coordinator.create_per_worker_resource(dict)
    >>> len(tables), tables[0].result()
    (2, {})

    Args:
      values: RemoteValues of one coordinator, one for each worker.

    Raises:
      AssertionError: an element of `values` is not a RemoteValue.
    """

    def __init__(self, values: Iterable[RemoteValue]) -> None:
        self._fixed_values = tuple(values)
        self._resource: Resource | None = None
        for value in self._fixed_values:
            if not isinstance(value, RemoteValue):
                raise AssertionError(
                    f"`PerWorkerValues` should only take `RemoteValue`s, one for each worker, not "
                    f"{type(value).__name__}"
                )
        resources = {
            value._resource if isinstance(value, ResourceValue) else None
            for value in self._fixed_values
        }
        if len(resources) == 1:
            (self._resource,) = resources

    @classmethod
    def _of(cls, resource: Resource) -> Any:
        """Return an object of this class that has the values of this resource."""
        values = cls(())
        values._resource = resource
        return values

    @property
    def _values(self) -> tuple[RemoteValue, ...]:
        resource = self._resource
        if resource is None:
            return self._fixed_values
        with resource.owner.runtime.lock:
            indices = sorted(resource.states)
        return tuple(ResourceValue(resource, index) for index in indices)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, position: int) -> RemoteValue:
        return self._values[position]

    def __iter__(self) -> Iterator[RemoteValue]:
        return iter(self._values)

    def fetch(self, timeout: float | None = None) -> list[Any]:
        """Return the fetched values of all workers.

        >>> coordinator.create_per_worker_resource(dict).fetch(timeout=20.0)
        [{}, {}]

        Raises the error of the first value whose `fetch` fails, and DeadlineExceededError after
        `timeout` seconds in total.
        """
        until = deadline(timeout)
        return [value.fetch(left(until)) for value in self._values]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(map(repr, self._values))}>"

    def __reduce__(self) -> Any:
        resource = self._resource
        if resource is None:
            return at_worker.slice_of, (self._fixed_values,)
        return _reduced(resource)


class PerWorkerIterator(PerWorkerValues):
    """Iterators over a per-worker dataset, one for each worker.

    A scheduled function that gets a PerWorkerIterator sees the iterator of the worker that runs it.
    After the last element, `next(iterator)` in the function raises OutOfRangeError, and a for-loop
    ends as usual.
    """

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError(
            "a per-worker iterator is for scheduled functions: pass it to a function as an "
            "argument, and call next() there"
        )

    get_next = __next__


class PerSlot(Generic[T]):
    """State that each slot makes once and that its functions share; `ClusterCoordinator.per_slot`
    makes it.

    Pass it to scheduled functions, as an argument at any depth or captured: they get the object of
    their slot. While the program holds it, or unfinished work uses it, slots keep their objects.

    >>> counts = coordinator.per_slot(dict)
    >>> coordinator.submit(len, counts).result()
    0
    """

    def __init__(self, resource: Resource) -> None:
        self._resource = resource

    def __repr__(self) -> str:
        return f"<PerSlot of {self._resource.definition.name}>"

    def __reduce__(self) -> Any:
        return _reduced(self._resource)


def _reduced(resource: Resource) -> Any:
    """Return how a resource is pickled in the arguments of a function, which then uses it."""
    runtime = resource.owner.runtime
    if runtime.packing.thread != get_ident():
        raise RemoteValueNotAllowed(
            f"{resource.name} is for functions that are scheduled by its own coordinator"
        )
    runtime.packing.uses.append(resource)
    return resource.__reduce__()


class PerWorkerDataset:
    """A dataset that each worker reads for itself, made by
    `ClusterCoordinator.create_per_worker_dataset`.

    Args:
      spec: returns the dataset's element_spec, or raises NotImplementedError if the dataset has no
        spec. None means that a function makes the dataset, so that only a worker can report the
        spec.
    """

    def __init__(
        self,
        resources: Resources,
        definition: Definition,
        shard: bool,
        spec: Callable[[], Any] | None,
    ) -> None:
        self._resources = resources
        self._definition = definition
        self._shard = shard
        self._spec = spec

    def __iter__(self) -> PerWorkerIterator:
        """Create an iterator on each worker, at the beginning of the dataset. Does not wait until
        the iterators are built.

        Raises:
          RuntimeError: called by a scheduled function.
          UnavailableError: no worker was present for `cluster_lost_limit_s`.
          FailedPreconditionError: the coordinator has been closed.
        """
        if task_context.scheduled():
            raise RuntimeError(
                "a scheduled function cannot iterate over a per-worker dataset: let the program "
                "pass iter(dataset) to the function"
            )
        sharers = self._resources.workers() if self._shard else []
        dense = range(len(sharers))  # a range is short in a message, however many elements it has
        resource = self._resources.create(
            ITERATOR, self._definition, dense if sharers == [*dense] else tuple(sharers)
        )
        iterator: PerWorkerIterator = PerWorkerIterator._of(resource)
        return iterator

    def build(self) -> PerWorkerValues:
        """Create the dataset itself, without an iterator, on each worker. A function that gets the
        dataset may iterate over it repeatedly.

        Raises UnavailableError and FailedPreconditionError as `iter` does.
        """
        values: PerWorkerValues = PerWorkerValues._of(
            self._resources.create(DATASET, self._definition)
        )
        return values

    @property
    def element_spec(self) -> Any:
        """The spec of the elements. If a function makes the dataset, the first access asks a worker
        for the spec and waits for its reply.

        Raises:
          NotImplementedError: the source is not a Dataset, so its elements have no spec.
          CancelledError: the worker that was asked is lost.
          Exception: the dataset function raised this error.
        """
        if self._spec is None:
            resource = self._resources.create(DATASET, self._definition)
            value = PerWorkerValues._of(resource)[0]
            spec = value._read(at_worker.read_spec, None)
            self._spec = lambda: spec
        return self._spec()

    def __reduce__(self) -> Any:
        return datasets.DatasetOnWorker, ()


def per_worker_resource(
    resources: Resources, fn: Any, args: Iterable[Any] | None, kwargs: Mapping[str, Any] | None
) -> PerWorkerValues:
    """Implement `ClusterCoordinator.create_per_worker_resource`."""
    if not callable(fn):
        raise TypeError(
            f"fn: create_per_worker_resource() takes a callable, not {type(fn).__name__}"
        )
    positional: tuple[Any, ...] = converted("args", tuple, args or ())
    keywords: dict[str, Any] = converted("kwargs", dict, kwargs or {})
    definition = resources.define(trusted.describe(fn), fn, positional, keywords)
    values: PerWorkerValues = PerWorkerValues._of(resources.create(RESOURCE, definition))
    return values


def per_slot(
    resources: Resources, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PerSlot[Any]:
    """Implement `ClusterCoordinator.per_slot`."""
    if not callable(fn):
        raise TypeError(f"fn: per_slot() takes a callable, not {type(fn).__name__}")
    return PerSlot(resources.create_state(resources.define(trusted.describe(fn), fn, args, kwargs)))


def per_worker_dataset(resources: Resources, source: Any, shard: bool) -> PerWorkerDataset:
    """Implement `ClusterCoordinator.create_per_worker_dataset`."""
    if callable(source):
        _check_needs_nothing(source)
        return PerWorkerDataset(
            resources, resources.define(trusted.describe(source), source), shard, None
        )
    if (
        hasattr(source, "__next__")
        or isinstance(source, (str, bytes, Mapping))
        or not hasattr(source, "__iter__")
    ):
        raise ValueError(
            f"Unexpected dataset type! dataset_fn is a {type(source).__name__}, and neither a "
            f"function that returns a dataset, nor"
            " a Dataset or another iterable that can be read again and again"
        )
    definition = resources.define(f"a {type(source).__name__}", at_worker.read_value, (source,))
    return PerWorkerDataset(resources, definition, shard, lambda: datasets.spec_of(source))


def _check_needs_nothing(fn: Callable[..., Any]) -> None:
    try:
        inspect.signature(fn).bind()
    except ValueError:  # the function is a builtin without a signature
        return
    except TypeError as error:
        raise TypeError(
            f"a dataset function is called without arguments, but {trusted.describe(fn)} needs "
            f"some: {error}"
        ) from None

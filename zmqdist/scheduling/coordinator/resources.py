"""Per-worker resources at the coordinator: which resources exist, where they are built, and their
states.

Theory of operation
    A resource has a number, different from those of functions, and a definition: a packed call,
    which the coordinator holds while a worker may need it. Messages carry the number and the
    definition, so that a worker can build a resource that it does not have
    (scheduling/shared/resources.py). In addition the coordinator schedules a build as soon as a
    worker joins, so that the program learns of an error early and functions need not wait for the
    build. Such a build is a detached work item, pinned to that worker. When a worker is lost, its
    value of the resource is lost as well. The value is ABORTED until the worker is back and has
    rebuilt it. A resource exists as long as the program holds one of its values or unfinished work
    uses the resource. After that the coordinator has all workers drop the resource.

Not here: the values that the program holds (per_worker.py).
"""

from __future__ import annotations

import logging
import os
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from zmqdist import errors, limits
from zmqdist.messages import SAID_GOODBYE
from zmqdist.scheduling.coordinator.affinity import Joined, Left
from zmqdist.scheduling.coordinator.coordinator_events import ForgetRequested
from zmqdist.scheduling.coordinator.options import WorkOptions
from zmqdist.scheduling.coordinator.remote_value import RemoteValue, unwrapped
from zmqdist.scheduling.coordinator.work import Extra
from zmqdist.scheduling.shared import resources as at_worker
from zmqdist.wire import trusted

if TYPE_CHECKING:
    from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime

log = logging.getLogger("zmqdist.coordinator")


class Definition:
    """A packed call by which workers build an object. When the Definition is garbage-collected, the
    packed data is released.

    Attributes:
      encoded: the bytes that represent the call in a message: the pickle, or a reference to the
        pickle.
      name: the name of the object in error texts and log lines.
      uses: the other resources and kept values that must stay alive while a worker may make the
        call.
    """

    def __init__(
        self, owner: Resources, name: str, packed: trusted.Packed, uses: list[Any]
    ) -> None:
        parts = packed if isinstance(packed, list) else [packed]
        size = sum(memoryview(part).nbytes for part in parts)
        self.name = name
        self.uses = uses
        self._owner = owner
        self._bulks: list[int] = []
        if size > limits.DEFINITION_BYTES_WARNED:
            log.warning(
                "%s carries %d MB of data, and each worker gets a copy", self.name, size // 10**6
            )
        self.encoded: bytes = parts[0]
        if size > limits.DEFINITION_INLINE_BYTES_MAX:
            self.encoded, self._bulks = owner.runtime.hold(
                parts, inline_max=limits.DEFINITION_INLINE_BYTES_MAX
            )

    def __del__(self) -> None:
        if bulks := self.__dict__.get("_bulks"):
            self._owner.release(0, bulks)


class _State:
    """The state of a resource at one worker.

    Attributes:
      building: the RemoteValue of the latest build at this worker.
      reads: the RemoteValues of the program's reads of the resource. Some of these reads may have
        ended.
      lost: why the worker is absent; None while it is present.
    """

    __slots__ = ("building", "lost", "reads")

    def __init__(self, lost: str | None) -> None:
        self.building: RemoteValue | None = None
        self.reads: list[RemoteValue] = []
        self.lost = lost


class Resource:
    """One resource of a coordinator. When this object is garbage-collected, all workers drop their
    values of the resource.

    Attributes:
      kind: RESOURCE, DATASET, ITERATOR or STATE of scheduling/shared/resources.py.
      sharers: the workers that share the elements of an iterator; empty if each worker gets all
        elements.
      states: the state of the resource at each worker, by the worker's index. Lost workers are
        included. Guarded by the coordinator's lock.
    """

    def __init__(
        self,
        owner: Resources,
        number: int,
        kind: str,
        definition: Definition,
        sharers: Sequence[int],
    ) -> None:
        self.owner = owner
        self.number = number
        self.kind = kind
        self.definition = definition
        self.sharers = sharers
        self.states: dict[int, _State] = {}

    @property
    def name(self) -> str:
        """The name of the resource in error texts and log lines."""
        return f"the {self.kind} of {self.definition.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a call by which a worker gets its own value of the resource."""
        arguments = (
            self.owner.runtime.machine.coordinator,
            self.number,
            self.kind,
            self.definition.encoded,
            self.sharers,
        )
        return at_worker.resource, arguments

    def __del__(self) -> None:
        self.owner.release(self.number, [])


class Resources:
    """The resources of one coordinator. Any thread may call the methods.

    Args:
      works: yields numbers for work items. The runtime's lock is held while a number is taken.
      patience_s: how long `create` waits for the first worker.
    """

    def __init__(
        self, runtime: CoordinatorRuntime, works: Iterator[int], patience_s: float
    ) -> None:
        self.runtime = runtime
        self._works = works
        self._patience_s = patience_s
        self._live: dict[int, ref[Resource]] = {}
        self._released: deque[tuple[int, list[int]]] = deque()
        self._present: set[int] = set()
        self._lost: dict[int, str] = {}
        """The reasons why workers are missing, by worker index."""
        self._watching = False
        runtime.listeners.names_of_resources = self.names

    def names(self) -> list[str]:
        """Return the names of all resources, for drain reports."""
        return [
            resource.name
            for reference in list(self._live.values())
            if (resource := reference()) is not None
        ]

    def __len__(self) -> int:
        return len(self._live)

    def workers(self, *, missing: bool = False) -> list[int]:
        """Wait until a worker is present, and return the sorted indices of the present workers.

        Args:
          missing: whether to return an empty list at once if all workers that were present before
            are lost.

        Raises:
          UnavailableError: no worker was present for `patience_s`.
          OpError: the dispatcher refuses this coordinator; the message has its reason.
        """
        runtime = self.runtime
        with runtime.lock:
            self.runtime.check_open()
            if not self._watching:
                self._watching = True
                runtime.watch(self._members)
            runtime.changed.wait_for(
                lambda: (
                    self._present
                    or (missing and self._lost)
                    or runtime.closed
                    or runtime.refusal is not None
                ),
                self._patience_s,
            )
            self.runtime.check_open()
            if self._present or (missing and self._lost):
                return sorted(self._present)
        if runtime.refusal is not None:
            raise runtime.refusal()
        problem = f"no worker was present for {self._patience_s:g} s: waited for {runtime.absence.description or 'a worker'}"
        raise errors.UnavailableError(problem)

    def define(
        self, name: str, fn: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Definition:
        """Pack a call of `fn`, with the function and the arguments in their present state.

        Raises:
          InvalidArgumentError: the function or an argument cannot be pickled; the message says
            which.
          ValueError: one of the arguments is a RemoteValue that was not scheduled with `keep=True`,
            or that has not ended.
        """
        runtime = self.runtime
        with runtime.schedule_lock:
            runtime.packing.thread, runtime.packing.by_reference = get_ident(), True
            try:
                packed = trusted.pack_call((fn, *args), dict(kwargs or {}))
            except errors.InvalidArgumentError as error:
                raise unwrapped(error) from error.__cause__
            finally:
                runtime.packing.thread, runtime.packing.by_reference = None, False
                uses, runtime.packing.uses = runtime.packing.uses, []
        return Definition(self, name, packed, uses)

    def create(self, kind: str, definition: Definition, sharers: Sequence[int] = ()) -> Resource:
        """Create a resource and schedule its build on all workers. Raises the errors of `workers`.

        Args:
          sharers: the workers that share the elements of an iterator
            (scheduling/shared/resources.py); empty for any other resource.
        """
        self.workers(missing=True)
        with self.runtime.lock:
            self.runtime.check_open()
            resource = Resource(self, self.runtime.functions.fresh(), kind, definition, sharers)
            self._live[resource.number] = ref(resource)
            for index in sorted(self._present):
                self._build(resource, index)
            for index, reason in self._lost.items():
                resource.states[index] = _State(reason)
        return resource

    def create_state(self, definition: Definition) -> Resource:
        """Create the state of a slot, which each slot builds when a function first uses it."""
        with self.runtime.lock:
            self.runtime.check_open()
            return Resource(self, self.runtime.functions.fresh(), at_worker.STATE, definition, ())

    def run_at(self, resource: Resource, index: int, fn: Callable[[Any], Any]) -> RemoteValue:
        """Schedule `fn(value of the resource)` on the worker with this index. If the worker lacks
        the resource, the worker builds it first."""
        with self.runtime.lock:
            self.runtime.check_open()
            state = resource.states[index]
            read = self._enqueue(resource, index, fn)
            state.reads = [*(value for value in state.reads if not value.done()), read]
            return read

    def release(self, number: int, bulks: list[int]) -> None:
        """Have the loop drop an unused resource, or release the data of an unused definition.

        Finalizers call this method, so it takes no lock.

        Args:
          number: the number of the resource; 0 for a definition.
          bulks: the numbers under which the store holds the definition's data.
        """
        if self.runtime.pid != os.getpid():
            return
        self._released.append((number, bulks))
        self.runtime.call_in_loop(self._drop)

    # -- in the loop -------------------------------------------------------------------------------

    def _drop(self) -> None:
        while self._released:
            number, bulks = self._released.popleft()
            self.runtime.store.free(bulks)
            if number:
                self._live.pop(number, None)
                self.runtime.request(ForgetRequested, number)

    def _members(self, joined: list[Joined], left: list[Left]) -> None:
        """Schedule builds of all resources, oldest first, on workers that joined. Mark the values
        of workers that left as lost."""
        cancelled: list[RemoteValue] = []
        with self.runtime.lock:
            live = [
                resource
                for reference in list(self._live.values())
                if (resource := reference()) is not None
            ]
            for name, _, reason in left:
                index = _index(name)
                self._present.discard(index)
                reason_lost = f"{name} is lost: {reason}"
                if reason != SAID_GOODBYE:
                    self._lost[index] = reason_lost
                for resource in live:
                    state = resource.states.get(index)
                    if state is not None:
                        state.lost = reason_lost
                        cancelled += state.reads
                        if state.building is not None:
                            cancelled.append(state.building)
            for name, *_ in joined:
                self._present.add(_index(name))
                self._lost.pop(_index(name), None)
                for resource in live:
                    self._build(resource, _index(name))
            self.runtime.changed.notify_all()
        for building in cancelled:
            building.cancel()

    # -- with the runtime's lock held --------------------------------------------------------------

    def _build(self, resource: Resource, index: int) -> None:
        state = resource.states.setdefault(index, _State(None))
        state.building = self._enqueue(resource, index, at_worker.ensure_built)
        state.lost = None

    def _enqueue(self, resource: Resource, index: int, fn: Callable[[Any], Any]) -> RemoteValue:
        payload = trusted.pack_call((resource,), {})
        assert isinstance(payload, bytes), "a large definition is represented by a reference"
        work = next(self._works)
        number, _ = self.runtime.functions.number(fn, trusted.pack_function(fn), [])
        extra = Extra(WorkOptions(f"worker:{index}", 0, True))
        extra.uses = [resource]
        return self.runtime.enqueue(work, number, resource.name, payload, extra, True)


def _index(worker: str) -> int:
    return int(worker.rpartition(":")[2])

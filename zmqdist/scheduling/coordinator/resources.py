"""Per-worker resources at the coordinator: which there are, where they are built, and what became of them.

Theory of operation
    A resource is a definition (a packed call, held here while somebody may build it) under a number that it shares with no function. What
    travels is the number and the definition, so a worker can build it whenever it has to (scheduling/worker/resources.py); what is done
    here in addition is to have it built as soon as a worker is there, so that a failure is known, and no function waits for it. Such a
    build is a piece of work for that worker alone, apart from the rounds.
    A worker that is lost takes its value along: ABORTED, until it has come back and built it again.
    A resource lives as long as somebody holds a value of it, or unfinished work uses it; then all workers are told to drop it.

Not here: what users hold (per_worker.py).
"""

from __future__ import annotations

import logging
import os
import threading
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from zmqdist import errors, limits
from zmqdist.scheduling.coordinator.affinity import Joined, Left, WorkOptions
from zmqdist.scheduling.coordinator.remote_value import RemoteValue, unwrapped
from zmqdist.scheduling.dispatcher.membership import SAID_GOODBYE
from zmqdist.scheduling.worker import resources as at_worker
from zmqdist.wire import trusted

if TYPE_CHECKING:
    from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime

log = logging.getLogger("zmqdist.coordinator")


class Definition:
    """A packed call that makes something, as it was when it was packed. Held until this object has been collected.

    Attributes:
      encoded: what stands for it in a message.
      name: of what it makes, for messages.
      uses: what has to stay while it may be called: other resources, kept values.
    """

    def __init__(self, owner: Resources, name: str, packed: trusted.Packed, uses: list[Any]) -> None:
        parts = packed if isinstance(packed, list) else [packed]
        size = sum(memoryview(part).nbytes for part in parts)
        self.name = name
        self.uses = uses
        self._owner = owner
        self._bulks: list[int] = []
        if size > limits.DEFINITION_BYTES_WARNED:
            log.warning("%s carries %d MB of data, and each worker gets a copy", self.name, size // 10**6)
        self.encoded: bytes = parts[0]
        if size > limits.DEFINITION_INLINE_BYTES_MAX:
            self.encoded, self._bulks = owner.runtime.held(parts, inline_max=limits.DEFINITION_INLINE_BYTES_MAX)

    def __del__(self) -> None:
        if bulks := self.__dict__.get("_bulks"):
            self._owner.release(0, bulks)


class _State:
    """Of a resource at one worker.

    Attributes:
      building: its latest build there.
      asked: questions for its value that may not have ended.
      lost: why its worker is not there; None when it is.
    """

    __slots__ = ("building", "lost", "reads")

    def __init__(self, lost: str | None) -> None:
        self.building: RemoteValue | None = None
        self.reads: list[RemoteValue] = []
        self.lost = lost


class Resource:
    """One resource. Its states are behind the coordinator's lock.

    Attributes:
      states: by index of a worker: all that were there since it was made.
    """

    def __init__(
        self, owner: Resources, number: int, kind: str, definition: Definition, sharers: Sequence[int]
    ) -> None:
        self.owner = owner
        self.number = number
        self.kind = kind
        self.definition = definition
        self.sharers = sharers
        self.states: dict[int, _State] = {}

    @property
    def name(self) -> str:
        """For messages."""
        return f"the {self.kind} of {self.definition.name}"

    @property
    def call(self) -> tuple[Any, ...]:
        """What it is in a pickle."""
        arguments = self.owner.runtime.number, self.number, self.kind, self.definition.encoded, self.sharers
        return at_worker.resource, arguments

    def __del__(self) -> None:
        self.owner.release(self.number, [])


class _ResourceCall:
    """Stands for a resource in the arguments of work of our own."""

    def __init__(self, resource: Resource) -> None:
        self._call = resource.call

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class Resources:
    """The resources of one coordinator. Any thread may use it.

    Args:
      works: numbers for pieces of work; taken with the runtime's lock held.
      patience_s: how long `create` waits for the first worker.
    """

    def __init__(self, runtime: CoordinatorRuntime, works: Iterator[int], patience_s: float) -> None:
        self.runtime = runtime
        self._works = works
        self._patience_s = patience_s
        self._live: dict[int, ref[Resource]] = {}
        self._released: deque[tuple[int, list[int]]] = deque()
        self._present: set[int] = set()
        self._lost: dict[int, str] = {}
        """Workers that are missing: why."""
        self._watching = False

    def __len__(self) -> int:
        return len(self._live)

    def workers(self, *, missing: bool = False) -> list[int]:
        """The indices of the workers that are there, sorted; waits for a first one.

        Args:
          missing: one that was there and is lost will do, too.

        Raises:
          UnavailableError: there was none for `patience_s`.
          OpError: the dispatcher does not take this coordinator; with its reason.
        """
        runtime = self.runtime
        with runtime.lock:
            self._check_open()
            if not self._watching:
                self._watching = True
                runtime.watch(self._members)
            runtime.changed.wait_for(
                lambda: self._present or (missing and self._lost) or runtime.closed or runtime.refusal is not None,
                min(self._patience_s, threading.TIMEOUT_MAX),
            )
            self._check_open()
            if self._present or (missing and self._lost):
                return sorted(self._present)
        if runtime.refusal is not None:
            raise runtime.refusal()
        problem = (
            f"no worker was there for {self._patience_s:g} s: waited for {runtime.missing.description or 'a worker'}"
        )
        raise errors.UnavailableError(problem)

    def define(
        self, name: str, fn: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Definition:
        """A call as it is now.

        Raises:
          InvalidArgumentError: something in it cannot be pickled; the message says what.
          ValueError: values that cannot be given away are among its arguments.
        """
        runtime = self.runtime
        with runtime.schedule_lock:
            runtime.packing, runtime.by_reference = get_ident(), True
            try:
                packed = trusted.pack_call((fn, *args), dict(kwargs or {}))
            except errors.InvalidArgumentError as error:
                raise unwrapped(error) from error.__cause__
            finally:
                runtime.packing, runtime.by_reference = None, False
                uses, runtime.given = runtime.given, []
        return Definition(self, name, packed, uses)

    def create(self, kind: str, definition: Definition, sharers: Sequence[int] = ()) -> Resource:
        """A new resource, which all workers are asked to build. Raises as `workers`.

        Args:
          sharers: see scheduling/worker/resources.py.
        """
        self.workers(missing=True)
        with self.runtime.lock:
            self._check_open()
            resource = Resource(self, self.runtime.functions.fresh(), kind, definition, sharers)
            self._live[resource.number] = ref(resource)
            for index in sorted(self._present):
                self._build(resource, index)
            for index, reason in self._lost.items():
                resource.states[index] = _State(reason)
        return resource

    def run_at(self, resource: Resource, index: int, fn: Callable[[Any], Any]) -> RemoteValue:
        """What `fn` gives for a resource at that worker, which waits until it is there."""
        with self.runtime.lock:
            self._check_open()
            state = resource.states[index]
            read = self._enqueue(resource, index, fn)
            state.reads = [*(each for each in state.reads if not each.done()), read]
            return read

    def release(self, number: int, bulks: list[int]) -> None:
        """Nobody uses a resource, or what was held for a definition. In finalizers: takes no lock."""
        if self.runtime.pid != os.getpid():
            return
        self._released.append((number, bulks))
        self.runtime.call_in_loop(self._drop)

    # -- in the loop --------------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        while self._released:
            number, bulks = self._released.popleft()
            self.runtime.drop(bulks)
            if number:
                self._live.pop(number, None)
                self.runtime.forget_everywhere(number)

    def _members(self, joined: list[Joined], left: list[Left]) -> None:
        """Who has come builds what there is, oldest first; who has gone has lost it."""
        cancelled: list[RemoteValue] = []
        with self.runtime.lock:
            live = [resource for each in list(self._live.values()) if (resource := each()) is not None]
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

    # -- with the runtime's lock held -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.runtime.closed:
            raise errors.FailedPreconditionError("this ClusterCoordinator has been closed")
        if self.runtime.pid != os.getpid():
            raise errors.FailedPreconditionError("this ClusterCoordinator was made before a fork")

    def _build(self, resource: Resource, index: int) -> None:
        state = resource.states.setdefault(index, _State(None))
        state.building = self._enqueue(resource, index, at_worker.built)
        state.lost = None

    def _enqueue(self, resource: Resource, index: int, fn: Callable[[Any], Any]) -> RemoteValue:
        payload = trusted.pack_call((_ResourceCall(resource),), {})
        assert isinstance(payload, bytes), "what is large in a definition is held beside it"
        work = next(self._works)
        number, _ = self.runtime.functions.number(fn, trusted.pack_function(fn), [])
        options = WorkOptions(f"worker:{index}", 0, True)
        return self.runtime.enqueue(work, number, resource.name, payload, [], False, [resource], options)


def _index(worker: str) -> int:
    return int(worker.rpartition(":")[2])

"""Actors for programs: `ActorHandle`, whose methods are calls, and `Actors`, which makes and finds
actors for one coordinator. `ClusterCoordinator.actor` has the rules for users."""

from __future__ import annotations

import itertools
import os
import queue
import secrets
import threading
import weakref
from _thread import get_ident
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar, overload

from msgspec.structs import replace

from zmqdist import errors
from zmqdist.clock import deadline, seconds
from zmqdist.conditions import Signals
from zmqdist.field_types import did_you_mean
from zmqdist.html_repr import HtmlRows, html_repr
from zmqdist.messages import ActorFound, ActorSpec
from zmqdist.scheduling.coordinator.coordinator_events import (
    ActorKilled,
    ActorMade,
    ActorSought,
    ActorWatched,
    HandlesDropped,
)
from zmqdist.scheduling.coordinator.options import WorkOptions, whole, worker_name
from zmqdist.scheduling.coordinator.remote_value import RemoteValue, unwrapped, work_of
from zmqdist.scheduling.coordinator.result_stream import ResultStream
from zmqdist.scheduling.coordinator.runtime import ActorWatcher, CoordinatorRuntime
from zmqdist.scheduling.coordinator.work import CalledActor, Extra, MethodCall
from zmqdist.scheduling.shared import actor_class
from zmqdist.scheduling.shared.actor_class import MethodKind, is_async, method_kinds
from zmqdist.scheduling.shared.actors import ActorState
from zmqdist.scheduling.shared.quantities import quantities
from zmqdist.task_context import settle_update
from zmqdist.type_variables import T_co
from zmqdist.wire import trusted

P = ParamSpec("P")
T = TypeVar("T")

CONCURRENCY: Final = 1000
"""The calls of `async` methods that run at a time, unless `concurrency` says otherwise."""

FIND_S: Final = 60.0
"""Seconds for which `get_actor` waits for the dispatcher, which may be in its first lease."""

CALL_OPTIONS: Final = WorkOptions(detached=True)


class _Held:
    """What all handles of one actor in this process share. When the last of them is dropped, the
    coordinator's machine hears of it."""

    __slots__ = ("__weakref__", "actors", "alive", "called")

    def __init__(self, actors: Actors, called: CalledActor) -> None:
        self.actors, self.called = actors, called
        self.alive = actors.alive

    def __del__(self) -> None:
        runtime = self.actors.runtime
        if runtime.pid == os.getpid():
            # not by `request`, which may overtake the event that makes the actor known
            runtime.post_event(HandlesDropped([self.called.number]))


class _HeldArguments:
    """The large class or arguments of an actor, which its program holds while it may be started
    again. The last record of the actor frees them."""

    __slots__ = ("bulks", "runtime")

    def __init__(self, runtime: CoordinatorRuntime, bulks: list[int]) -> None:
        self.runtime, self.bulks = runtime, bulks

    def __del__(self) -> None:
        if self.runtime.pid == os.getpid():
            self.runtime.call_in_loop(self.runtime.store.free, self.bulks)


class ActorHandle(Generic[T_co]):
    """A handle of an actor: each method call returns a RemoteValue, which is also awaitable.

    >>> class Counter:
    ...     def __init__(self, start):
    ...         self.count = start
    ...     def add(self, number):
    ...         self.count += number
    ...         return self.count
    >>> counter = coordinator.actor(Counter, 1)
    >>> counter.add(2).result()
    3

    Type checkers do not know the type of `counter.add(2)`, but that of `counter[Counter.add](2)`,
    which is the same call (docs/types.md).

    Calls of one program run in the order in which it makes them. A handle may be an argument, a
    result or captured, also of other actors, and any thread may use it.
    """

    def __init__(self, held: _Held, methods: dict[str, int]) -> None:
        self._held, self._methods = held, methods

    @overload
    def __getitem__(
        self, method: Callable[Concatenate[T_co, P], Coroutine[Any, Any, T]]
    ) -> ActorMethod[P, RemoteValue[T]]: ...

    @overload
    def __getitem__(  # type: ignore[overload-overlap]  # the result of a generator is no value
        self, method: Callable[Concatenate[T_co, P], Iterator[T] | AsyncIterator[T]]
    ) -> ActorMethod[P, ResultStream[T]]: ...

    @overload
    def __getitem__(
        self, method: Callable[Concatenate[T_co, P], T]
    ) -> ActorMethod[P, RemoteValue[T]]: ...

    def __getitem__(self, method: Callable[..., Any]) -> ActorMethod[..., Any]:
        actor_method: ActorMethod[..., Any] = getattr(self, method_name(method))
        return actor_method

    def __getattr__(self, name: str) -> ActorMethod[..., Any]:
        if name.startswith("_") or name not in self._methods:
            cls = self._held.called.cls
            raise AttributeError(
                f"the actor {cls} has no method {name}: {did_you_mean(name, list(self._methods))}"
            )
        is_stream = self._methods[name] == MethodKind.STREAM
        method: ActorMethod[..., Any] = ActorMethod(self._held, name, is_stream)
        self.__dict__[name] = method
        return method

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(
                f"{name} would be set on the handle, not on the actor: have a method set it"
            )
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(self._methods)

    def __repr__(self) -> str:
        called = self._held.called
        state = called.state.name.lower()
        return f"<actor {called.cls}: {state}{f', {called.worker}' if called.worker else ''}>"

    @html_repr
    def _repr_html_(self) -> HtmlRows:
        called = self._held.called
        return [
            ("class", called.cls),
            ("state", called.state.name.lower()),
            ("worker", called.worker or None),
            ("methods", ", ".join(sorted(self._methods))),
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other._held.called.number == self._number

    def __hash__(self) -> int:
        return hash(self._number)

    @property
    def _number(self) -> int:
        return self._held.called.number

    def __reduce__(self) -> Any:
        actors = self._held.actors
        packing = actors.runtime.packing_here()
        if packing is not None:
            packing.uses.append(self)  # unfinished work that carries a handle keeps the actor
        called = self._held.called
        return actors.restore, (
            called.number,
            called.cls,
            self._methods,
            actors.runtime.target.address,
        )


class ActorMethod(Generic[P, T_co]):
    """A method of an actor. `options(timeout=, name=)` returns the same method with options: the
    seconds after which a call ends with DeadlineExceededError, and a name for errors."""

    __slots__ = ("_held", "_label", "_name", "_timeout", "is_stream")

    def __init__(
        self,
        held: _Held,
        name: str,
        is_stream: bool,
        timeout: float | None = None,
        label: str | None = None,
    ) -> None:
        self._held, self._name, self.is_stream, self._timeout = held, name, is_stream, timeout
        self._label = label or f"{held.called.cls}.{name}"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Call the method, and return a RemoteValue of what it returns, or the ResultStream of a
        generator. Does not wait."""
        settle_update()
        held = self._held
        if (
            not kwargs
            and not self.is_stream
            and self._timeout is None
            and actor_class.own is None
            and trusted.ATOMS.issuperset(map(type, args))
        ):
            # as `call` does, for the calls that most are: no handle or RemoteValue is among these
            # arguments, so that packing needs no lock
            packed = trusted.pack_call(args, kwargs)
            if type(packed) is bytes:
                actors = held.actors
                number = next(actors.works)
                call = MethodCall(number, held.called, self._name, self._label, packed, held)
                return actors.runtime.enqueue_call(call, None)  # type: ignore[return-value]
        return held.actors.call(  # type: ignore[no-any-return]
            held, self._name, args, kwargs, self._timeout, self._label, self.is_stream
        )

    def options(
        self, *, timeout: float | None = None, name: str | None = None
    ) -> ActorMethod[P, T_co]:
        if (limit_s := seconds(timeout)) == 0:
            raise ValueError(f"timeout is {timeout}, wants more than 0 s, or None")
        return ActorMethod(self._held, self._name, self.is_stream, limit_s, name)

    def __repr__(self) -> str:
        return f"<method {self._label}>"


def method_name(method: Callable[..., Any]) -> str:
    """Return the name of a public method of a class, as `Counter.add`. Raises TypeError if it is
    none."""
    name = getattr(method, "__name__", "_")
    if not callable(method) or not isinstance(name, str) or name.startswith("_"):
        raise TypeError(f"{method!r:.200} is no public method of the actor's class (Counter.add)")
    return name


open_actors: weakref.WeakSet[Actors] = weakref.WeakSet()
"""Those of all coordinators of this process."""


class Actors:
    """The actors of one coordinator.

    Args:
      works: the numbers of the coordinator's work items.
      alive: keeps the coordinator open while the program holds a handle.
      restore: what a pickled handle calls in the process that unpickles it.
    """

    def __init__(
        self,
        runtime: CoordinatorRuntime,
        works: itertools.count[int],
        alive: object,
        restore: Callable[..., ActorHandle],
    ) -> None:
        self.runtime, self.alive, self.restore = runtime, alive, restore
        self.works = works
        self._requests = itertools.count(1)
        self._searches: dict[int, tuple[Signals, list[ActorFound]]] = {}
        self._held: weakref.WeakValueDictionary[int, _Held] = weakref.WeakValueDictionary()
        self._called: weakref.WeakValueDictionary[int, CalledActor] = weakref.WeakValueDictionary()
        """Each actor has one record, also if a handle comes while calls of dropped handles run."""
        self._lock = threading.Lock()
        self._supervisors: dict[int, weakref.WeakMethod[ActorWatcher]] = {}
        # weak: the runtime must not keep what keeps the coordinator open
        runtime.listeners.on_actor_found = weakref.WeakMethod(self._found)
        runtime.listeners.on_actor_changed = weakref.WeakMethod(self._changed)
        open_actors.add(self)

    def serves(self, dispatcher: str) -> bool:
        """Return whether this process may use the coordinator for an actor of this dispatcher."""
        runtime = self.runtime
        return (
            runtime.target.address == dispatcher
            and not runtime.closed
            and runtime.pid == os.getpid()
        )

    # -- making and finding ------------------------------------------------------------------------

    def make(
        self,
        cls: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Mapping[str, Any],
        group: tuple[int, int, int] = (0, 0, 1),
    ) -> ActorHandle:
        """Make an actor, as `ClusterCoordinator.actor` describes it."""
        if not isinstance(cls, type):
            raise TypeError(f"actor() takes a class, not {cls!r:.200}")
        spec = self._checked(cls, options)
        runtime = self.runtime
        with self._lock:
            runtime.check_open()
            packed, uses, inputs = self._packed(trusted.pack, (cls, args, kwargs))
            if inputs:
                raise errors.InvalidArgumentError(
                    f"a RemoteValue is among the arguments of the actor {cls.__name__}, which is "
                    f"made at once: pass its result()"
                )
            if isinstance(packed, list):
                packed, held_arguments = self._held_call(packed, detached=not spec.owner)
                uses = [*uses, held_arguments]
            methods = method_kinds(cls)
            spec = replace(
                spec,
                call=runtime.packing.mark + packed,
                methods=methods,
                group=group[0],
                rank=group[1],
                size=group[2],
            )
            return self.make_from(spec, uses)

    def make_from(self, spec: ActorSpec, uses: Sequence[Any]) -> ActorHandle:
        """Make an actor from its checked spec. `uses` are what its arguments need: handles, and
        what holds large ones."""
        called = CalledActor(spec.actor, spec.cls, spec)
        called.uses = uses
        self.runtime.post_event(ActorMade(called))
        return self._handle(called, spec.methods)

    def _held_call(self, parts: list[Any], *, detached: bool) -> tuple[bytes, _HeldArguments]:
        """Return a reference to a large class or arguments, and what holds them in this process."""
        if detached:
            size = sum(memoryview(part).nbytes for part in parts)
            raise errors.InvalidArgumentError(
                f"the arguments of a detached actor have {size} bytes, which its program would have "
                f"to hold: have a method fetch or receive them"
            )
        reference, bulks = self.runtime.hold(parts)
        return reference, _HeldArguments(self.runtime, bulks)

    def _checked(self, cls: type, options: Mapping[str, Any]) -> ActorSpec:
        name, lifetime = options.get("name"), options.get("lifetime")
        if lifetime not in (None, "detached"):
            raise ValueError(f'lifetime is {lifetime!r:.100}, wants "detached" or None')
        if lifetime and not name:
            raise ValueError("a detached actor needs a name, by which other programs find it")
        restarts = whole("restarts", options.get("restarts", 0))
        if restarts < 0:
            raise ValueError(f"restarts is {restarts}, wants 0 or more")
        concurrency = options.get("concurrency")
        if concurrency is not None and whole("concurrency", concurrency) < 1:
            raise ValueError(f"concurrency is {concurrency}, wants 1 or more")
        if concurrency is not None and concurrency > 1 and not is_async(cls):
            raise ValueError(
                f"concurrency is {concurrency}, but {cls.__name__} has no `async def` method: its "
                f"calls run one after the other"
            )
        worker = options.get("worker")
        return ActorSpec(
            secrets.randbits(62) | 1,
            cls.__name__,
            b"",
            0 if lifetime else self.runtime.machine.coordinator,
            name or "",
            "" if worker is None else worker_name(worker),
            restarts,
            concurrency or (CONCURRENCY if is_async(cls) else 1),
            resources=dict(quantities(options.get("resources") or {})),
        )

    def handle(self, number: int, cls: str, methods: dict[str, int]) -> ActorHandle:
        """Return a handle of an actor that exists already."""
        held = self._held.get(number)
        if held is not None:
            return ActorHandle(held, methods)
        called = self._called.get(number) or CalledActor(number, cls)
        self.runtime.post_event(ActorWatched(called))
        return self._handle(called, methods)

    def _handle(self, called: CalledActor, methods: dict[str, int]) -> ActorHandle:
        self._called[called.number] = called
        held = self._held[called.number] = _Held(self, called)
        return ActorHandle(held, methods)

    def find(self, name: str, timeout: float | None) -> ActorHandle:
        """Return a handle of the actor of this name, as `ClusterCoordinator.get_actor` says."""
        timeout = FIND_S if timeout is None else timeout
        request, answered = next(self._requests), Signals()
        answers: list[ActorFound] = []
        self._searches[request] = answered, answers
        self.runtime.check_open()
        self.runtime.post_event(ActorSought(request, name))
        try:
            if not answered.acquire(timeout):
                raise errors.DeadlineExceededError(
                    f"the dispatcher at {self.runtime.target.address} has not said after "
                    f"{timeout:g} s whether there is an actor named {name}"
                )
        finally:
            del self._searches[request]
            self.runtime.post_event(ActorSought(request, ""))
        if self.runtime.refusal is not None:
            raise self.runtime.refusal()
        if not answers or not answers[0].actor:
            raise errors.NotFoundError(f"there is no actor named {name}")
        return self.handle(answers[0].actor, answers[0].cls, answers[0].methods)

    def _found(self, answer: ActorFound) -> None:
        if answer.request in self._searches:
            answered, answers = self._searches[answer.request]
            answers.append(answer)
            answered.release()

    def kill(self, handle: ActorHandle, reason: str = "it was killed by its program") -> None:
        if handle._held.actors is not self:
            raise ValueError(f"{handle!r} is a handle of another coordinator of this program")
        self.runtime.post_event(ActorKilled(handle._number, reason))

    @staticmethod
    def called(handle: ActorHandle) -> CalledActor:
        """Return what the coordinator knows of an actor."""
        return handle._held.called

    def supervise(self, handle: ActorHandle, changed: ActorWatcher) -> None:
        """Have the loop call the method `changed` when the state of an actor changes, as long as
        the program has the method's object."""
        self._supervisors[handle._number] = weakref.WeakMethod(changed)

    def _changed(self, called: CalledActor, state: ActorState, reason: str) -> None:
        supervisor = self._supervisors.get(called.number)
        if supervisor is not None:
            if state is ActorState.ENDED:
                del self._supervisors[called.number]
            if (changed := supervisor()) is not None:
                changed(called, state, reason)

    # -- calls -------------------------------------------------------------------------------------

    def call(
        self,
        held: _Held,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        name: str,
        is_stream: bool,
    ) -> Any:
        """Call a method, and return a RemoteValue for its result, or the ResultStream of a
        generator."""
        runtime = self.runtime
        own = actor_class.own
        if own is not None and own.actor == held.called.number and own.concurrency == 1:
            raise errors.FailedPreconditionError(
                f"{held.called.cls}.{method} is called by a method of the same actor, which would "
                f"wait for itself: call self.{method}() instead"
            )
        with self._lock:
            packed, uses, inputs = self._packed(trusted.pack_call, args, kwargs)
            bulks: list[int] = []
            try:
                if isinstance(packed, list):
                    # a call is sent once, so that its actor alone maps them
                    packed, bulks = runtime.hold(packed, shared=False)
                extra = None
                if inputs or uses or bulks or timeout is not None:
                    extra = Extra(
                        CALL_OPTIONS,
                        until=deadline(timeout),
                        inputs=[work_of(value) for value in inputs.values()],
                    )
                    extra.timeout = timeout
                    extra.uses, extra.bulks = uses, bulks
                    extra.input_values, extra.packed_inputs = inputs, {}
                    runtime.copy_inputs(extra)
                call = MethodCall(next(self.works), held.called, method, name, packed, held)
                if is_stream:
                    call.items = queue.SimpleQueue()
                value = runtime.enqueue_call(call, extra)
                return ResultStream(runtime, call, value) if is_stream else value
            except BaseException:
                runtime.store.free(bulks)
                raise

    def _packed(
        self, pack: Callable[..., trusted.Packed], *values: Any
    ) -> tuple[trusted.Packed, list[Any], dict[int, RemoteValue]]:
        """Return the packed values, and the handles and RemoteValues among them. The caller holds
        the lock."""
        packing = self.runtime.packing.of_calls
        packing.thread = get_ident()
        try:
            packed = pack(*values)
        except errors.InvalidArgumentError as error:
            raise unwrapped(error) from error.__cause__
        finally:
            packing.thread = None
            uses, inputs = packing.uses, packing.inputs
            if uses or inputs:
                packing.uses, packing.inputs = [], {}
        return packed, uses, inputs

"""`Submitter`: schedules functions with options, in the words of the standard library.
`ClusterCoordinator.options` makes it.
"""

from __future__ import annotations

import os
from _thread import get_ident
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    cast,
    overload,
)

import numpy as np

from zmqdist import errors
from zmqdist.clock import deadline, left
from zmqdist.errors import InvalidArgumentError
from zmqdist.field_types import did_you_mean
from zmqdist.scheduling.coordinator.actor_groups import ActorGroup, MemberDeath, make_group
from zmqdist.scheduling.coordinator.actors import ActorHandle, Actors
from zmqdist.scheduling.coordinator.failures import with_failures
from zmqdist.scheduling.coordinator.function_stream import Arrivals, FunctionStream
from zmqdist.scheduling.coordinator.options import (
    NO_OPTIONS,
    PlanOptions,
    Retries,
    WorkOptions,
)
from zmqdist.scheduling.coordinator.ordered_results import (
    AHEAD,
    OrderedResults,
    checked_ahead,
)
from zmqdist.scheduling.coordinator.remote_value import PartValue, RemoteValue, unwrapped
from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime
from zmqdist.scheduling.coordinator.typed_calls import (
    as_imap,
    as_map,
    as_run,
    as_stream,
    as_submit,
)
from zmqdist.scheduling.shared.stream_source import send_values
from zmqdist.wire.trusted import describe

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = ParamSpec("P")
T = TypeVar("T")

NAME_CHARS_MAX: Final = 200
"""The largest number of characters of a name, because names travel in reports."""
NEWS_S: Final = 1.0
"""Seconds to wait for the dispatcher's news, of a worker that may have left by then."""


class OneResult(TypedDict, total=False):
    """The options of a function whose result is one RemoteValue."""

    name: str | None
    worker: int | str | None
    priority: int
    retries: int | Retries
    timeout: float | None
    keep: bool
    lineage: bool
    resources: Mapping[str, float] | None
    lifetime: str | None
    restarts: int
    concurrency: int | None
    on_death: str
    restarts_within_s: float
    supervisor: Callable[[MemberDeath], object] | None


class TaskOptions(OneResult, total=False):
    """The options of a function, as `ClusterCoordinator.options` describes them."""

    num_returns: int | None


OF_ACTORS: Final = frozenset({"lifetime", "restarts", "concurrency"})
"""The options that only actors have."""
OF_GROUPS: Final = frozenset({"on_death", "restarts_within_s", "supervisor"})
"""The options that only groups of actors have."""
OF_BOTH: Final = frozenset({"name", "worker", "resources"})
"""The options of functions that actors have, too."""


if TYPE_CHECKING:

    class Parts(Protocol):
        """What type checkers know of a Submitter with the option `num_returns`."""

        def submit(
            self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> tuple[RemoteValue, ...]: ...

        def map(
            self, fn: Callable[..., Any], /, *iterables: Iterable[Any]
        ) -> list[tuple[RemoteValue, ...]]: ...


def _is_plain(item: object) -> bool:
    """Return whether pickling an item runs no code of the program."""
    if type(item) is np.ndarray:
        return not item.dtype.hasobject
    return item is None or type(item) in (bool, int, float, str, bytes)


class FunctionSnapshot:
    """A pickled function. `schedule` accepts a FunctionSnapshot in place of the function, so that
    it need not pickle the function again.

    Args:
      blob: the pickle or a reference to the pickle, as messages carry it.
      bulks: the numbers under which the store holds the pickle. The FunctionSnapshot releases them.
      uses, inputs: the resources and the RemoteValues that the function captures.
    """

    __slots__ = ("blob", "bulks", "fn", "inputs", "runtime", "uses")

    def __init__(
        self,
        runtime: CoordinatorRuntime,
        fn: Callable[..., Any],
        blob: bytes,
        bulks: list[int],
        uses: list[Any],
        inputs: dict[int, Any],
    ) -> None:
        self.runtime = runtime
        self.fn = fn
        self.blob = blob
        self.bulks = bulks
        self.uses = uses
        self.inputs = inputs

    @classmethod
    def take(cls, runtime: CoordinatorRuntime, fn: Callable[..., Any]) -> FunctionSnapshot:
        """Pickle a function in its present state. Raises the errors that
        `ClusterCoordinator.schedule` raises for such a function."""
        packing = runtime.packing
        with runtime.schedule_lock:
            packing.thread = get_ident()
            try:
                packed = runtime.functions.pickled(fn)
            except InvalidArgumentError as error:
                raise unwrapped(error) from error.__cause__
            finally:
                packing.thread = None
                uses, inputs, packing.uses, packing.inputs = packing.uses, packing.inputs, [], {}
            blob, bulks = runtime.hold(packed) if isinstance(packed, list) else (packed, [])
            return cls(runtime, fn, blob, bulks, uses, inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def use(self) -> tuple[bytes, list[int]]:
        """Have one more work item use this function. Add the captured resources and inputs to those
        of the work item's arguments, and count one more use of the held pickle. The caller must
        free this use with the work item. Return the blob, and its numbers in the store."""
        self.runtime.packing.uses += self.uses
        self.runtime.packing.inputs.update(self.inputs)
        self.runtime.store.hold_again(self.bulks)
        return self.blob, list(self.bulks)

    def __del__(self) -> None:
        """Have the loop release the held data. A finalizer must take no lock of the coordinator, so
        it does not release the data itself."""
        if self.bulks and self.runtime.pid == os.getpid():
            self.runtime.call_in_loop(self.runtime.store.free, self.bulks)


class Scheduler(Protocol):
    """The attributes of a ClusterCoordinator that a Submitter uses."""

    _runtime: CoordinatorRuntime
    _actors: Actors

    def _schedule(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keep: bool,
        options: WorkOptions,
        plan_options: PlanOptions,
        name: str | None = None,
    ) -> RemoteValue: ...

    def _snapshot_of(self, fn: Callable[..., Any]) -> FunctionSnapshot: ...

    def workers(self) -> list[str]: ...


class Submitter:
    """Schedules functions of one coordinator with the same options. Immutable; any thread may use
    it.

    >>> urgent = coordinator.options(priority=1, timeout=30.0)
    >>> urgent.submit(divmod, 7, 2).result()
    (3, 1)
    >>> urgent.options(name="halve").map(divmod, [7], [2])[0].name
    'halve'
    """

    __slots__ = (
        "_coordinator",
        "_keep",
        "_name",
        "_of_actors",
        "_options",
        "_plan_options",
        "_settings",
    )

    def __init__(self, coordinator: Scheduler, settings: TaskOptions) -> None:
        options = list(TaskOptions.__annotations__)
        for option in settings.keys() - options:
            raise TypeError(f"options() has no option {option}: {did_you_mean(option, options)}")
        for option in ("keep", "lineage"):
            if not isinstance(settings.get(option, False), bool):
                raise TypeError(f"{option} is {settings[option]!r:.100}, wants True or False")  # type: ignore[literal-required]
        name, lineage = settings.get("name"), settings.get("lineage", False)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name is {name!r:.100}, wants a text")
        if name is not None and not (0 < len(name) <= NAME_CHARS_MAX and name.isprintable()):
            text = f"a text of 1 to {NAME_CHARS_MAX} printable characters"
            raise ValueError(f"name is {name!r:.100}, wants {text}")
        self._coordinator, self._settings, self._name = coordinator, settings, name
        self._options = WorkOptions.checked(
            settings.get("worker"), settings.get("priority", 0), settings.get("resources")
        )
        self._plan_options = PlanOptions.checked(
            settings.get("retries", 0),
            settings.get("timeout"),
            lineage,
            settings.get("num_returns"),
        )
        self._keep = settings.get("keep", False) or lineage
        self._of_actors = ", ".join(settings.keys() & (OF_ACTORS | OF_GROUPS))

    def __repr__(self) -> str:
        return f"<{', '.join(f'{option}={value!r}' for option, value in self._settings.items())} of {self._coordinator!r}>"

    @overload
    def options(self, *, num_returns: None = None, **options: Unpack[OneResult]) -> Submitter: ...

    @overload
    def options(self, *, num_returns: int, **options: Unpack[OneResult]) -> Parts: ...

    def options(self, **options: Any) -> Any:
        """Return a Submitter with these options and, where they are missing, those of this one.

        >>> coordinator.options(priority=1).options(name="first")
        <priority=1, name='first' of <ClusterCoordinator of zmq://...>>
        """
        return Submitter(self._coordinator, cast(TaskOptions, {**self._settings, **options}))

    @as_submit
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RemoteValue[Any]:
        """Run `fn(*args, **kwargs)` on a worker, as `ClusterCoordinator.submit` does, with the
        options.

        >>> coordinator.options(retries=2).submit(abs, -3).result()
        3

        With `num_returns` the function returns a tuple or list of so many items, and `submit` a
        tuple with a RemoteValue for each item. With `keep` a consumer fetches only its item. All
        are cancelled, retried and lost together, and a kept result is released with the last one.

        >>> whole, rest = coordinator.options(num_returns=2).submit(divmod, 7, 2)
        >>> rest.result()
        1
        """
        if self._of_actors:
            raise ValueError(f"submit() runs a function: it has no use for {self._of_actors}")
        plan_options = self._begun_options()
        value = self._coordinator._schedule(
            fn, args, kwargs, self._keep, self._options, plan_options, self._name
        )
        parts = plan_options.num_returns
        return tuple(PartValue(value, part, parts) for part in range(parts)) if parts else value  # type: ignore[return-value]

    def actor(self, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> ActorHandle[T]:
        """Make an actor, as `ClusterCoordinator.actor` does, with the options.

        >>> coordinator.options(worker=1).actor(set).union([3]).result()
        {3}
        """
        self._check(OF_BOTH | OF_ACTORS, "actor() makes an actor")
        return self._coordinator._actors.make(cls, args, kwargs, self._settings)

    def actors(
        self, cls: Callable[P, T], size: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> ActorGroup[T]:
        """Make a group of actors, as `ClusterCoordinator.actors` does, with the options.

        >>> coordinator.options(on_death="restart").actors(set, 2).union([3]).result()
        [{3}, {3}]
        """
        self._check(OF_BOTH | OF_ACTORS | OF_GROUPS, "actors() makes a group of actors")
        return make_group(self._coordinator._actors, cls, size, args, kwargs, {**self._settings})

    def _check(self, options: AbstractSet[str], caller: str) -> None:
        for option in self._settings.keys() - options:
            raise ValueError(f"{caller}: it has no use for the option {option}")

    def _begun_options(self) -> PlanOptions:
        """Return the options of a function that is scheduled now."""
        plan_options = self._plan_options
        if plan_options.timeout is None:
            return plan_options
        return replace(plan_options, until=deadline(plan_options.timeout))

    @as_stream
    def stream(
        self, fn: Callable[..., Any], /, *args: Any, ahead: int = AHEAD, **kwargs: Any
    ) -> FunctionStream[Any]:
        """Yield the values of a generator function as they are made, as `ClusterCoordinator.stream`
        does, with the options.

        >>> list(coordinator.options(worker=1).stream(reversed, "abc"))
        ['c', 'b', 'a']

        Raises ValueError for `keep`, `lineage` and `num_returns`, because the values come here.
        """
        if not callable(fn):
            raise TypeError(f"fn: stream() takes a callable, not {type(fn).__name__}")
        for option in self._settings.keys() & {"keep", "lineage", "num_returns"}:
            raise ValueError(f"stream() brings values here: it has no use for the option {option}")
        runtime, ahead = self._coordinator._runtime, checked_ahead(ahead)
        name, plan_options = self._name or describe(fn), self._begun_options()
        arrivals, store = Arrivals(name, plan_options.retries), runtime.store
        runtime.listeners.streams.add(arrivals)
        sent = store.address, store.key, arrivals.number, ahead, fn, args, kwargs
        value = self._coordinator._schedule(
            send_values, sent, {}, False, self._options, plan_options, name
        )
        return FunctionStream(arrivals, value, runtime.target.form.safe_only)

    @as_map
    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any]) -> list[RemoteValue]:
        """Run `fn` for the items of the iterables, as `ClusterCoordinator.map` does, with the
        options.

        >>> coordinator.gather(coordinator.options(worker=1).map(abs, [-3, 4]))
        [3, 4]
        """
        if not iterables:
            raise TypeError("map() takes a callable and at least one iterable")
        items = zip(*iterables, strict=False)
        snapshot = self._coordinator._snapshot_of(fn)
        # otherwise the program may run between two items, and write into an array
        are_plain = all(
            type(each) in (list, tuple) and all(map(_is_plain, each)) for each in iterables
        )
        with self._coordinator._runtime.store.unchanged() if are_plain else nullcontext():
            return [self.submit(snapshot, *item) for item in items]

    @as_imap
    def imap(
        self, fn: Callable[..., Any], *iterables: Iterable[Any], ahead: int = AHEAD
    ) -> OrderedResults[Any]:
        """Yield `fn(*items)` for the items of the iterables, as `ClusterCoordinator.imap` does, with
        the options.

        >>> list(coordinator.options(worker=1).imap(abs, [-3, 4]))
        [3, 4]

        Raises ValueError for `num_returns`, because the parts would come as one result.
        """
        if self._plan_options.num_returns:
            raise ValueError(
                "imap() yields whole results: it has no use for the option num_returns"
            )
        if not iterables:
            raise TypeError("imap() takes a callable and at least one iterable")
        items = zip(*iterables, strict=False)
        submit = partial(self.submit, self._coordinator._snapshot_of(fn))
        return OrderedResults(submit, items, ahead)

    @as_run
    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Call `fn(*args, **kwargs)` once on each worker, as `ClusterCoordinator.run` does, with
        the options.

        >>> coordinator.options(timeout=20.0).run(abs, -3)
        {'worker:0': 3, 'worker:1': 3}

        Raises ValueError if one of them is not `name`, `priority` or `timeout`.
        """
        self._check(
            {"name", "priority", "timeout"}, "run() calls the function once on every worker"
        )
        name = self._name or describe(fn)

        # The calls belong to no round, so an error of one neither ends the others nor fails a later
        # `join`. A call is not repeated on another worker: if its worker is lost, it has failed.
        def submit(worker: str) -> RemoteValue:
            options = WorkOptions(worker, self._options.priority, detached=True)
            return self._coordinator._schedule(
                fn, args, kwargs, False, options, NO_OPTIONS, f"{name} at {worker}"
            )

        coordinator = self._coordinator
        coordinator.workers()  # waits for the dispatcher
        _hear_of_new_workers(coordinator._runtime)
        return _run_on(
            coordinator._runtime, coordinator.workers(), submit, self._plan_options.timeout
        )


def _hear_of_new_workers(runtime: CoordinatorRuntime) -> None:
    """Wait until the coordinator has heard of the workers that have registered by now, because a
    program that has just added some expects calls on these, too.
    """
    try:
        rows = runtime.call_dispatcher("facts", timeout_ms=round(NEWS_S * 1000))["workers"]
    except errors.OpError:  # the calls wait for the dispatcher, or fail, as others do
        return
    registered = {row["name"] for row in rows if row["state"] == "alive"}
    with runtime.lock:
        runtime.progress.waiting += 1
        try:
            runtime.changed.wait_for(lambda: registered <= (runtime.members or {}).keys(), NEWS_S)
        finally:
            runtime.progress.waiting -= 1


def _run_on(
    runtime: CoordinatorRuntime,
    workers: list[str],
    submit: Callable[[str], RemoteValue[T]],
    timeout: float | None,
) -> dict[str, T]:
    """Call `submit(worker)` for each of these workers, and return the results by worker.

    Raises the first error, with the attribute `failures`: the errors by worker. Calls that have not
    ended then are cancelled.
    """
    if not workers:
        raise errors.UnavailableError(
            "run() found no worker: start one, or wait until one has joined"
        )
    until, before = deadline(timeout), runtime.members or {}
    values: dict[str, RemoteValue[T]] = {}
    lost: set[str] = set()

    def is_over() -> bool:
        present = runtime.members or {}
        lost.update(
            name
            for name, value in values.items()
            if not value.done() and (name not in present or present[name] != before.get(name))
        )
        return all(name in lost or value.done() for name, value in values.items())

    results: dict[str, T] = {}
    failures: dict[str, BaseException] = {}
    try:
        for name in workers:
            values[name] = submit(name)
        with runtime.lock:
            runtime.progress.waiting += 1
            try:
                runtime.changed.wait_for(is_over, left(until))
            finally:
                runtime.progress.waiting -= 1
        for name, value in values.items():
            if name in lost:
                failures[name] = errors.UnavailableError(
                    f"{value.name}: the worker was lost before the function ended"
                )
            elif not value.done():
                failures[name] = errors.DeadlineExceededError(
                    f"{value.name} has not ended after {timeout:g} s"
                )
            elif (error := value.exception()) is not None:
                failures[name] = error
            else:
                results[name] = value.result()
    finally:
        for value in values.values():
            value.cancel()
    for error in failures.values():
        raise with_failures(error, failures)
    return results

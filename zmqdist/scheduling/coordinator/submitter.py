"""`Submitter`: schedules functions with options, in the words of the standard library.
`ClusterCoordinator.options` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypedDict, TypeVar, overload

from zmqdist.clock import deadline
from zmqdist.field_types import did_you_mean
from zmqdist.scheduling.coordinator.every_worker import hear_of_new_workers, run_on
from zmqdist.scheduling.coordinator.function_snapshot import FunctionSnapshot
from zmqdist.scheduling.coordinator.options import NO_OPTIONS, PlanOptions, WorkOptions
from zmqdist.scheduling.coordinator.remote_value import RemoteValue
from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime
from zmqdist.wire.trusted import describe

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")

NAME_CHARS_MAX: Final = 200
"""The largest number of characters of a name, because names travel in reports."""


class TaskOptions(TypedDict, total=False):
    """The options of a function, as `ClusterCoordinator.options` describes them."""

    name: str | None
    worker: int | str | None
    priority: int
    retries: int
    timeout: float | None
    keep: bool
    lineage: bool


class Scheduler(Protocol):
    """The attributes of a ClusterCoordinator that a Submitter uses."""

    _runtime: CoordinatorRuntime

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

    __slots__ = ("_coordinator", "_given", "_keep", "_name", "_options", "_plan_options")

    def __init__(self, coordinator: Scheduler, given: TaskOptions) -> None:
        known = list(TaskOptions.__annotations__)
        for option in given.keys() - known:
            raise TypeError(f"options() has no option {option}: {did_you_mean(option, known)}")
        for option in ("keep", "lineage"):
            if not isinstance(given.get(option, False), bool):
                raise TypeError(f"{option} is {given[option]!r:.100}, wants True or False")  # type: ignore[literal-required]
        name, lineage = given.get("name"), given.get("lineage", False)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name is {name!r:.100}, wants a text")
        if name is not None and not (0 < len(name) <= NAME_CHARS_MAX and name.isprintable()):
            text = f"a text of 1 to {NAME_CHARS_MAX} printable characters"
            raise ValueError(f"name is {name!r:.100}, wants {text}")
        self._coordinator, self._given, self._name = coordinator, given, name
        self._options = WorkOptions.checked(given.get("worker"), given.get("priority", 0))
        self._plan_options = PlanOptions.checked(
            given.get("retries", 0), given.get("timeout"), lineage
        )
        self._keep = given.get("keep", False) or lineage

    def __repr__(self) -> str:
        return f"<{', '.join(f'{option}={value!r}' for option, value in self._given.items())} of {self._coordinator!r}>"

    def options(self, **options: Unpack[TaskOptions]) -> Submitter:
        """Return a Submitter with these options and, where they are missing, those of this one.

        >>> coordinator.options(priority=1).options(name="first")
        <priority=1, name='first' of <ClusterCoordinator of zmq://...>>
        """
        return Submitter(self._coordinator, {**self._given, **options})

    @overload
    def submit(
        self, fn: Callable[..., Coroutine[Any, Any, T]], /, *args: Any, **kwargs: Any
    ) -> RemoteValue[T]: ...

    @overload
    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> RemoteValue[T]: ...

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RemoteValue[Any]:
        """Run `fn(*args, **kwargs)` on a worker, as `ClusterCoordinator.submit` does, with the
        options.

        >>> coordinator.options(retries=2).submit(abs, -3).result()
        3
        """
        plan_options = self._plan_options
        if plan_options.timeout is not None:
            plan_options = replace(plan_options, until=deadline(plan_options.timeout))
        return self._coordinator._schedule(
            fn, args, kwargs, self._keep, self._options, plan_options, self._name
        )

    def map(self, fn: Callable[..., T], *iterables: Iterable[Any]) -> list[RemoteValue[T]]:
        """Run `fn` for the items of the iterables, as `ClusterCoordinator.map` does, with the
        options.

        >>> coordinator.gather(coordinator.options(worker=1).map(abs, [-3, 4]))
        [3, 4]
        """
        if not iterables:
            raise TypeError("map() takes a callable and at least one iterable")
        items = zip(*iterables, strict=False)
        snapshot = self._coordinator._snapshot_of(fn)
        return [self.submit(snapshot, *item) for item in items]

    def run(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> dict[str, T]:
        """Call `fn(*args, **kwargs)` once on each worker, as `ClusterCoordinator.run` does, with
        the options.

        >>> coordinator.options(timeout=20.0).run(abs, -3)
        {'worker:0': 3, 'worker:1': 3}

        Raises ValueError if one of them is not `name`, `priority` or `timeout`.
        """
        for option in self._given.keys() - {"name", "priority", "timeout"}:
            raise ValueError(
                f"run() calls the function once on every worker: it has no use for the option "
                f"{option}"
            )
        name = self._name or describe(fn)

        def submit(worker: str) -> RemoteValue[T]:
            options = WorkOptions(worker, self._options.priority, detached=True)
            return self._coordinator._schedule(
                fn, args, kwargs, False, options, NO_OPTIONS, f"{name} at {worker}"
            )

        coordinator = self._coordinator
        coordinator.workers()  # waits for the dispatcher
        hear_of_new_workers(coordinator._runtime)
        return run_on(
            coordinator._runtime, coordinator.workers(), submit, self._plan_options.timeout
        )

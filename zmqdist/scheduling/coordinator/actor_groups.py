"""Groups of actors: `ActorGroup`, whose methods call all members, and the decision what the death
of a member leads to. `ClusterCoordinator.actors` has the rules for users."""

from __future__ import annotations

import enum
import secrets
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any, Concatenate, Final, Generic, NamedTuple, ParamSpec, TypeVar, overload

from msgspec.structs import replace

from zmqdist import clock as time
from zmqdist.callbacks import NotAFuture
from zmqdist.clock import deadline, left, seconds
from zmqdist.field_types import check_type, did_you_mean
from zmqdist.scheduling.coordinator.actors import (
    ActorHandle,
    ActorMethod,
    Actors,
    method_name,
)
from zmqdist.scheduling.coordinator.completion import AsCompleted
from zmqdist.scheduling.coordinator.options import whole
from zmqdist.scheduling.coordinator.remote_value import RemoteValue, release_at_end
from zmqdist.scheduling.coordinator.work import CalledActor
from zmqdist.scheduling.shared.actors import ActorState
from zmqdist.type_variables import T_co

P = ParamSpec("P")
T = TypeVar("T")

RESTARTS_WITHIN_S: Final = 600.0
"""The time in which the restarts of a group are counted, unless `restarts_within_s` says otherwise."""


class OnDeath(enum.Enum):
    """What the death of a member leads to."""

    FAIL = "fail"
    """All members end."""
    RESTART = "restart"
    """The member begins again."""
    RESTART_ALL = "restart_all"
    """All members begin again."""


class MemberDeath(NamedTuple):
    """The death of a member, as a supervisor is told of it.

    Attributes:
      rank: the member's place in the group.
      reason: how its process ended, with the last lines of its standard error.
      action: what follows: "fail", "restart" or "restart_all".
    """

    rank: int
    reason: str
    action: str


class RestartBudget:
    """How often a group may restart: `restarts` times in any `within_s` seconds."""

    def __init__(self, on_death: OnDeath, restarts: int, within_s: float) -> None:
        self._on_death, self._restarts, self._within_s = on_death, restarts, within_s
        self._times: deque[float] = deque()

    def member_died(self, now: float) -> OnDeath:
        """Return what the death of a member at this time leads to."""
        while self._times and self._times[0] <= now - self._within_s:
            self._times.popleft()
        if self._on_death is OnDeath.FAIL or len(self._times) >= self._restarts:
            return OnDeath.FAIL
        self._times.append(now)
        return self._on_death


class GroupValue(NotAFuture, Generic[T_co]):
    """The results of one call of all members: one value, a list by rank. An argument of a function,
    it is the list of the results."""

    __slots__ = ("values",)

    def __init__(self, values: list[RemoteValue[T_co]]) -> None:
        self.values = values

    def result(self, timeout: float | None = None) -> list[T_co]:
        """Wait for all members, and return their results by rank. Raises the error of the first
        member, by rank, whose call has failed, and DeadlineExceededError after `timeout` seconds.

        >>> team = coordinator.actors(set, 2)
        >>> team.union([3]).result()
        [{3}, {3}]
        """
        until = deadline(timeout)
        return [value.result(left(until)) for value in self.values]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for all members, and return the first error by rank, or None."""
        until = deadline(timeout)
        errors = [value.exception(left(until)) for value in self.values]
        return next((error for error in errors if error is not None), None)

    def done(self) -> bool:
        """Return whether the calls of all members have ended."""
        return all(value.done() for value in self.values)

    def cancel(self) -> bool:
        """Cancel the calls. Return False if all have ended."""
        return sum(value.cancel() for value in self.values) > 0

    def __await__(self) -> Generator[Any, None, list[T_co]]:
        results = []
        for value in self.values:
            results.append((yield from value.__await__()))
        return results

    def __reduce__(self) -> Any:
        return list, (self.values,)

    def __repr__(self) -> str:
        return f"<GroupValue of {self.values!r}>"


class GroupMethod(Generic[P, T_co]):
    """A method of all members of a group."""

    __slots__ = ("_group", "_methods")

    def __init__(self, group: ActorGroup, methods: list[ActorMethod[P, RemoteValue[T_co]]]) -> None:
        self._group, self._methods = group, methods

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> GroupValue[T_co]:
        if self._methods[0].is_stream:
            raise TypeError(
                f"{self._methods[0]} is a generator: call it at each member of the group"
            )
        values = [method(*args, **kwargs) for method in self._methods]
        for value in values:
            release_at_end(value, _Kept(self._group))
        return GroupValue(values)

    def as_completed(self, *args: P.args, **kwargs: P.kwargs) -> AsCompleted[T_co]:
        """Call all members, and yield their RemoteValues in the order in which they end."""
        return AsCompleted(self(*args, **kwargs).values, None)

    def options(
        self, *, timeout: float | None = None, name: str | None = None
    ) -> GroupMethod[P, T_co]:
        """Return this method with options, as those of a method of an actor."""
        methods = [method.options(timeout=timeout, name=name) for method in self._methods]
        return GroupMethod(self._group, methods)


class _Kept:
    """A waiter that keeps a group, with its supervision, until a call of it has ended."""

    __slots__ = ("_group",)

    def __init__(self, group: ActorGroup) -> None:
        self._group = group

    def release(self) -> None:
        # the report of a death comes right after the end of the calls
        self._group._actors.runtime.call_in_loop(type, self._group)


class ActorGroup(Generic[T_co]):
    """Actors of one class that work together; `ClusterCoordinator.actors` makes it.

    >>> team = coordinator.actors(set, 2)
    >>> len(team), team.union([3]).result(), team[1].union([4]).result()
    (2, [{3}, {3}], {4})

    Attributes:
      deaths: the deaths of members, oldest first.
    """

    def __init__(
        self,
        actors: Actors,
        size: int,
        make: Callable[[tuple[int, int, int]], ActorHandle[T_co]],
        budget: RestartBudget,
        supervisor: Callable[[MemberDeath], object] | None,
    ) -> None:
        self._actors, self._budget, self._supervisor = actors, budget, supervisor
        self.deaths: list[MemberDeath] = []
        self._lock = threading.Lock()
        self._is_ended = False
        group = secrets.randbits(62) | 1
        self._members = [make((group, rank, size)) for rank in range(size)]
        for member in self._members:
            actors.supervise(member, self._member_changed)

    def __len__(self) -> int:
        return len(self._members)

    @overload
    def __getitem__(self, rank: int) -> ActorHandle[T_co]: ...

    @overload
    def __getitem__(
        self, rank: Callable[Concatenate[T_co, P], Coroutine[Any, Any, T]]
    ) -> GroupMethod[P, T]: ...

    @overload
    def __getitem__(self, rank: Callable[Concatenate[T_co, P], T]) -> GroupMethod[P, T]: ...

    def __getitem__(
        self, rank: int | Callable[..., Any]
    ) -> ActorHandle[T_co] | GroupMethod[..., Any]:
        return self._members[rank] if isinstance(rank, int) else getattr(self, method_name(rank))

    def __iter__(self) -> Iterator[ActorHandle[T_co]]:
        return iter(self._members)

    def __getattr__(self, name: str) -> GroupMethod[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return GroupMethod(self, [getattr(member, name) for member in self._members])

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._members[0]), "deaths"})

    def __repr__(self) -> str:
        return f"<group of {len(self)}: {self._members[0]!r} ...>"

    def __reduce__(self) -> Any:
        raise TypeError("a group stays in its program, which supervises it: pass list(group)")

    def _kill(self) -> None:
        with self._lock:
            self._is_ended = True
            for member in self._members:
                self._actors.kill(member)

    # In the loop's thread.
    def _member_changed(self, called: CalledActor, state: ActorState, reason: str) -> None:
        if state is not ActorState.ENDED:
            return
        with self._lock:
            ranks = [
                rank
                for rank, member in enumerate(self._members)
                if self._actors.called(member) is called
            ]
            if self._is_ended or not ranks:
                return  # a member of an earlier generation, which was ended
            rank = ranks[0]
            action = self._budget.member_died(time.monotonic())
            death = MemberDeath(rank, reason, action.value)
            self.deaths.append(death)
            text = f"member {rank} of its group has died: {reason}"
            if action is OnDeath.FAIL:
                self._is_ended = True
            if action is not OnDeath.RESTART:
                for other in self._members:
                    if self._actors.called(other) is not called:
                        self._actors.kill(other, text)
            if action is OnDeath.RESTART:
                self._begin_again([rank], group=None)
            elif action is OnDeath.RESTART_ALL:
                self._begin_again(list(range(len(self))), group=secrets.randbits(62) | 1)
        if self._supervisor is not None:
            self._actors.runtime.callbacks.start()
            self._actors.runtime.callbacks.put(self._supervisor, death)

    def _begin_again(self, ranks: list[int], group: int | None) -> None:
        members = list(self._members)
        for rank in ranks:
            called = self._actors.called(members[rank])
            spec, uses = called.spec, called.uses
            assert spec is not None
            spec = replace(
                spec, actor=secrets.randbits(62) | 1, group=spec.group if group is None else group
            )
            members[rank] = self._actors.make_from(spec, uses)
            self._actors.supervise(members[rank], self._member_changed)
        self._members = members


def kill(actors: Actors, target: ActorHandle | ActorGroup) -> None:
    """End an actor, or all members of a group."""
    if isinstance(target, ActorGroup):
        target._kill()
    else:
        check_type("actor", target, ActorHandle, "the handle of an actor, or a group")
        actors.kill(target)


def make_group(
    actors: Actors,
    cls: Callable[..., Any],
    size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> ActorGroup:
    """Make a group, as `ClusterCoordinator.actors` describes it."""
    if whole("size", size) < 1:
        raise ValueError(f"size is {size}, wants 1 or more members")
    options = dict(options)
    names = [action.value for action in OnDeath]
    on_death = options.pop("on_death", OnDeath.FAIL.value)
    if on_death not in names:
        raise ValueError(f"on_death is {on_death!r:.100}: {did_you_mean(str(on_death), names)}")
    for option in ("name", "lifetime"):
        if options.pop(option, None) is not None:
            raise ValueError(f"a group belongs to its program: it has no use for {option}")
    restarts = options.pop("restarts", 0 if on_death == OnDeath.FAIL.value else 3)
    within_s = seconds(options.pop("restarts_within_s", RESTARTS_WITHIN_S)) or RESTARTS_WITHIN_S
    supervisor = options.pop("supervisor", None)
    if supervisor is not None and not callable(supervisor):
        raise TypeError(f"supervisor is {supervisor!r:.100}, wants a callable")
    budget = RestartBudget(OnDeath(on_death), whole("restarts", restarts), within_s)
    return ActorGroup(
        actors,
        size,
        lambda place: actors.make(cls, args, kwargs, options, place),
        budget,
        supervisor,
    )

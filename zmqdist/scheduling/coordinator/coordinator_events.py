"""Events of the coordinator's machine (machine.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from zmqdist.events import Heard, Ticked
from zmqdist.scheduling.coordinator.work import Work


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The program has scheduled these work items, in the order of their numbers."""

    works: list[Work]


@dataclass(frozen=True, slots=True)
class FunctionsDefined:
    """The program will schedule work with these functions, each given as (number, pickle)."""

    functions: list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class FunctionsDropped:
    """The program will schedule no more work with these functions."""

    functions: list[int]


@dataclass(frozen=True, slots=True)
class ForgetRequested:
    """All slots must drop the resources with these numbers, because the program no longer needs
    them (`Forget.everywhere`)."""

    numbers: list[int]


@dataclass(frozen=True, slots=True)
class DispatcherUp:
    """The connection to the dispatcher is established."""


@dataclass(frozen=True, slots=True)
class DispatcherDown:
    """The connection to the dispatcher is lost."""


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The program cancelled these work items."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class TakeBackRequested:
    """The program cancels these work items unless a worker has begun them. Pass it only to a
    machine that was made with `starts=True`."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class EndRoundRequested:
    """A thread waits to raise the error of this round, so the round must end. The event has no
    effect if this is not the present round."""

    round: int


@dataclass(frozen=True, slots=True)
class BulkArrived:
    """A large result has arrived in this process, or no RemoteValue needs it any more."""

    work: int
    attempt: int
    payload: Any


@dataclass(frozen=True, slots=True)
class KeptDropped:
    """The program no longer needs the kept values of these work items."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class BulkUnreachable:
    """The runtime has given up the fetch of a large result, for the reason in `problem`."""

    work: int
    attempt: int
    problem: str


@dataclass(frozen=True, slots=True)
class PackingFailed:
    """The inputs of a new work item cannot be packed, so it ends with this packed error."""

    work: Work
    error: bytes


@dataclass(frozen=True, slots=True)
class CoordinatorRefused:
    """The dispatcher refuses this coordinator, for the reason in the packed `error`."""

    error: bytes


@dataclass(frozen=True, slots=True)
class ValueLost:
    """The program requests a value that this attempt had computed, but its worker no longer holds
    the value."""

    work: Work
    attempt: int


Event: TypeAlias = (
    Scheduled
    | PackingFailed
    | ValueLost
    | CoordinatorRefused
    | FunctionsDefined
    | FunctionsDropped
    | ForgetRequested
    | DispatcherUp
    | DispatcherDown
    | CancelRequested
    | TakeBackRequested
    | EndRoundRequested
    | BulkArrived
    | BulkUnreachable
    | KeptDropped
    | Heard
    | Ticked
)

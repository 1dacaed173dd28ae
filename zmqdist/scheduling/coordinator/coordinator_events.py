"""Events of the coordinator's machine (machine.py); those of its plans are in dependencies_and_retries.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from zmqdist.events import Heard, Ticked
from zmqdist.scheduling.coordinator.affinity import Scheduled
from zmqdist.scheduling.coordinator.dependencies_and_retries import Planned, ValueLost


@dataclass(frozen=True, slots=True)
class FunctionsDefined:
    """Functions that further work may use: (fn, pickled)."""

    functions: list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class FunctionsDropped:
    """No further work will use these functions."""

    functions: list[int]


@dataclass(frozen=True, slots=True)
class ForgetRequested:
    """The program no longer needs what slots hold under these numbers, on any worker (`Forget.everywhere`)."""

    numbers: list[int]


@dataclass(frozen=True, slots=True)
class DispatcherUp:
    """The connection to the dispatcher is established."""


@dataclass(frozen=True, slots=True)
class DispatcherDown:
    """The connection is lost. `for_good`: there will be no other connection, so no round waits for one."""

    for_good: bool = False


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The program cancelled this work."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class TakeBackRequested:
    """The program cancels this work unless a worker has begun it. Only for a machine with `report_starts`."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class EndRoundRequested:
    """A thread waits to raise the error of this round: end it. Ignored for any other round than the present one."""

    round: int


@dataclass(frozen=True, slots=True)
class BulkArrived:
    """A bulk result is in this process, or no RemoteValue needs it any more."""

    work: int
    attempt: int
    payload: Any


@dataclass(frozen=True, slots=True)
class KeptDropped:
    """The program no longer needs these values, which their workers keep."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class BulkUnreachable:
    """The holder of a bulk result is alive but cannot be reached from here."""

    work: int
    attempt: int
    problem: str


@dataclass(frozen=True, slots=True)
class AttemptPacked:
    """The runtime's reply to HandIn: the packed attempt."""

    attempt: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class PackingFailed:
    """A plan was scheduled whose inputs cannot be packed: it ends with this error."""

    work: int
    error: bytes


@dataclass(frozen=True, slots=True)
class CoordinatorRefused:
    """The dispatcher refuses this coordinator with this packed error."""

    error: bytes


@dataclass(frozen=True, slots=True)
class UnfinishedFailed:
    """All unfinished work ends with this packed error."""

    error: bytes


Event: TypeAlias = (
    Planned
    | ValueLost
    | AttemptPacked
    | PackingFailed
    | CoordinatorRefused
    | UnfinishedFailed
    | Scheduled
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

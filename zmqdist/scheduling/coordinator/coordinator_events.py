"""Events of the coordinator's machine (machine.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from zmqdist.events import Heard, Ticked
from zmqdist.scheduling.coordinator.affinity import Scheduled
from zmqdist.scheduling.coordinator.dependencies_and_retries import Planned, ValueLost


@dataclass(frozen=True, slots=True)
class FunctionsDefined:
    """Functions that the next work may use: (fn, pickled). `kept` says that more work may come for them."""

    functions: list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class FunctionsDropped:
    """No further work will name these functions."""

    functions: list[int]


@dataclass(frozen=True, slots=True)
class ForgetAsked:
    """What stands under these numbers in whichever slots is of no further use (`Forget.everywhere`)."""

    numbers: list[int]


@dataclass(frozen=True, slots=True)
class DispatcherUp:
    """The connection stands."""


@dataclass(frozen=True, slots=True)
class DispatcherDown:
    """The connection is gone; `for_good`: there will be no other, so that no round waits for one."""

    for_good: bool = False


@dataclass(frozen=True, slots=True)
class WithdrawAsked:
    """The user cancelled these."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class TakeBackAsked:
    """The user cancels these unless they have begun. For a machine with `starts`."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class EndAsked:
    """The user waits to raise the error of this round: end its generation. The end of another round is not asked for."""

    round: int


@dataclass(frozen=True, slots=True)
class BulkArrived:
    """A bulk result is here, or nobody wants it any more."""

    work: int
    attempt: int
    payload: Any


@dataclass(frozen=True, slots=True)
class KeptDropped:
    """The user has no further use for values that their workers keep."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class BulkUnreachable:
    """The holder of a bulk result lives but cannot be reached from here."""

    work: int
    attempt: int
    problem: str


@dataclass(frozen=True, slots=True)
class AttemptPacked:
    """The answer to HandIn: what travels."""

    attempt: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Unpackable:
    """A plan was scheduled, and its inputs cannot be packed: it ends with this error."""

    work: int
    error: bytes


@dataclass(frozen=True, slots=True)
class CoordinatorRefused:
    """The dispatcher does not take this coordinator; `error` is packed."""

    error: bytes


@dataclass(frozen=True, slots=True)
class UnfinishedFailed:
    """All that is unfinished ends with this packed error."""

    error: bytes


Event: TypeAlias = (
    Planned
    | ValueLost
    | AttemptPacked
    | Unpackable
    | CoordinatorRefused
    | UnfinishedFailed
    | Scheduled
    | FunctionsDefined
    | FunctionsDropped
    | ForgetAsked
    | DispatcherUp
    | DispatcherDown
    | WithdrawAsked
    | TakeBackAsked
    | EndAsked
    | BulkArrived
    | BulkUnreachable
    | KeptDropped
    | Heard
    | Ticked
)

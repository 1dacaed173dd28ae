"""The events and effects of the worker machine (machine.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from zmqdist.events import Heard, Send, Ticked

NOT_RUN: Final = -1
"""Kind of a slot's outcome: it was about to begin this item when Reclaim told it not to."""


@dataclass(frozen=True, slots=True)
class DispatcherConnected:
    """The connection stands and the dispatcher has said who it is."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class DispatcherDisconnected:
    """The connection is gone; libzmq tries to make a new one."""


@dataclass(frozen=True, slots=True)
class SlotReady:
    """A slot has started."""

    slot: int


@dataclass(frozen=True, slots=True)
class SlotFinished:
    """Items of a slot have ended: (position, kind, payload)."""

    slot: int
    outcomes: list[tuple[int, int, bytes]]


@dataclass(frozen=True, slots=True)
class SlotSeen:
    """A look at a slot: the position that it is at."""

    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class SlotReclaimed:
    """The answer to Reclaim: nothing after `position` has begun or will begin."""

    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class SlotDied:
    """A slot's process has ended at `position` (0 for none). A new one is asked for by Spawn."""

    slot: int
    position: int
    exit_code: int | None
    log: str


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """The user wants the worker to stop in good order."""

    grace_s: float


Event: TypeAlias = (
    DispatcherConnected
    | DispatcherDisconnected
    | Heard
    | SlotReady
    | SlotFinished
    | SlotSeen
    | SlotReclaimed
    | SlotDied
    | LeaveRequested
    | Ticked
)


@dataclass(frozen=True, slots=True)
class Give:
    """Give a slot functions that are new to it, (coordinator, fn, pickled), and items, (position, coordinator, fn, payload)."""

    slot: int
    functions: list[tuple[int, int, bytes]]
    items: list[tuple[int, int, int, bytes]]


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Keep a slot from beginning anything that it has not begun; answered by SlotReclaimed."""

    slot: int


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Tell the function at `position` that somebody wants it to end (`zmqdist.cancelled()`)."""

    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End a slot's process now. Only where slots are processes."""

    slot: int


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a slot's process."""

    slot: int


@dataclass(frozen=True, slots=True)
class ForgetFunctions:
    """These functions are not used again, nor what else a slot has under such a key: (coordinator, number), ALL_NUMBERS for all."""

    slot: int
    functions: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class FreeBulk:
    """Nobody wants the bulk result of this lease any more."""

    lease: int


@dataclass(frozen=True, slots=True)
class Exit:
    """The worker has ended. `error` says why where that was not asked for; `code` is one of zmqdist.errors."""

    code: int
    error: str


Effect: TypeAlias = Send | Give | Reclaim | Interrupt | Kill | Spawn | ForgetFunctions | FreeBulk | Exit

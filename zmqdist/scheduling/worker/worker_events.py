"""Events and effects of the worker's machine (machine.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from zmqdist.events import Heard, Send, Ticked

NOT_RUN: Final = -1
"""Kind of an outcome: the slot was about to begin this item when a Reclaim stopped it."""


@dataclass(frozen=True, slots=True)
class DispatcherConnected:
    """The connection to the dispatcher is established. `incarnation` is the dispatcher's, from its hello."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class DispatcherDisconnected:
    """The connection is lost; libzmq tries to reconnect."""


@dataclass(frozen=True, slots=True)
class SlotReady:
    """A slot is ready for items."""

    slot: int


@dataclass(frozen=True, slots=True)
class SlotFinished:
    """Items of a slot have ended: (position, kind, payload)."""

    slot: int
    outcomes: list[tuple[int, int, bytes]]


@dataclass(frozen=True, slots=True)
class SlotSeen:
    """The position of a slot, as the runtime has read it: the slot has begun the item there."""

    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class SlotReclaimed:
    """The reply to Reclaim: nothing after `position` has begun or will begin."""

    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class SlotDied:
    """A slot's process has ended at `position`; 0: it ran no item. It is not replaced before the machine returns a Spawn."""

    slot: int
    position: int
    exit_code: int | None
    log: str


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """The program requests the worker to stop in good order."""

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
    """Keep a slot from beginning further items. The runtime replies with SlotReclaimed."""

    slot: int


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Ask the function at `position` to end early, by `zmqdist.cancelled()`."""

    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a slot's process. Only if slots are processes."""

    slot: int


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a slot's process."""

    slot: int


@dataclass(frozen=True, slots=True)
class ForgetFunctions:
    """Have a slot drop functions and resources by (coordinator, number); ALL_NUMBERS for all of that coordinator."""

    slot: int
    functions: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class FreeBulk:
    """Free the bulk result of this lease."""

    lease: int


@dataclass(frozen=True, slots=True)
class Exit:
    """The worker has ended. `code` is one of zmqdist.errors; `error` says why unless the end was requested (OK)."""

    code: int
    error: str


Effect: TypeAlias = Send | Give | Reclaim | Interrupt | Kill | Spawn | ForgetFunctions | FreeBulk | Exit

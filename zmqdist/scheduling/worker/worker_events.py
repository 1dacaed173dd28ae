"""The events and effects of the worker's machine (machine.py)."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import ActorSpec, KeepActor

NOT_RUN: Final = -1
"""A kind of outcome: the slot was about to begin this item when the worker took the item back."""


class DispatcherConnected(msgspec.Struct, frozen=True):
    """The connection to the dispatcher is established. `incarnation` is the dispatcher's, from its
    hello."""

    incarnation: int


class DispatcherDisconnected(msgspec.Struct, frozen=True):
    """The connection to the dispatcher is lost. The transport tries to connect again by itself."""


class SlotReady(msgspec.Struct, frozen=True):
    """A slot has started and can be given items."""

    slot: int


class SlotFinished(msgspec.Struct, frozen=True):
    """Items of a slot have ended: (position, kind, payload). The position of an item is its number
    among all items of the slot, from 1."""

    slot: int
    outcomes: list[tuple[int, int, bytes]]


class SlotSeen(msgspec.Struct, frozen=True):
    """The runtime has seen that the slot has begun the item at `position`."""

    slot: int
    position: int


class SlotReclaimed(msgspec.Struct, frozen=True):
    """The reply to Reclaim: the slot has not begun the items after `position`, and will not begin
    them."""

    slot: int
    position: int


class SlotDied(msgspec.Struct, frozen=True):
    """A slot's process has died while it ran the item at `position`. Position 0 means that the slot
    ran no item."""

    slot: int
    position: int
    exit_code: int | None
    log: str


class SlotOverMemory(msgspec.Struct, frozen=True):
    """A slot's process uses more memory than it may, while it runs the item at `position`. Position
    0 means that it runs no item."""

    slot: int
    position: int
    reason: str


class SlotWaits(msgspec.Struct, frozen=True):
    """The function at `position` of the slot asks whether it may wait for results of other work.
    The machine returns a WaitAnswered."""

    slot: int
    position: int


class SlotResumed(msgspec.Struct, frozen=True):
    """The function at `position` of the slot does not wait any more."""

    slot: int
    position: int


class LeaveRequested(msgspec.Struct, frozen=True):
    """The process of this worker requests that the worker stop in good order."""

    grace_s: float


class ActorServing(msgspec.Struct, frozen=True):
    """The process of an actor has made its object, and serves calls at this address."""

    incarnation: int
    address: str
    key: bytes


class ActorEnded(msgspec.Struct, frozen=True):
    """The process of an actor has ended, or could not be started. `error` is the packed error of
    its `__init__`, or empty."""

    incarnation: int
    reason: str
    error: bytes = b""


Event: TypeAlias = (
    DispatcherConnected
    | DispatcherDisconnected
    | Heard
    | SlotReady
    | SlotFinished
    | SlotSeen
    | SlotReclaimed
    | SlotDied
    | SlotOverMemory
    | ActorServing
    | ActorEnded
    | SlotWaits
    | SlotResumed
    | LeaveRequested
    | Ticked
)


class Give(msgspec.Struct, frozen=True):
    """Send functions and work items to a slot.

    Attributes:
      functions: the functions that the slot does not have yet, as (coordinator, number of the
        function, pickled function).
      items: the work items, as (position in the slot, coordinator, number of the function,
        payload).
    """

    slot: int
    functions: list[tuple[int, int, bytes]]
    items: list[tuple[int, int, int, bytes]]


class Reclaim(msgspec.Struct, frozen=True):
    """Keep a slot from beginning further items. The runtime then passes SlotReclaimed to the
    machine."""

    slot: int


class Interrupt(msgspec.Struct, frozen=True):
    """Have `zmqdist.cancelled()` return True in the function at `position`, so that the function
    can end early."""

    slot: int
    position: int


class Kill(msgspec.Struct, frozen=True):
    """Kill a slot's process. The machine does not return this effect if slots are threads."""

    slot: int


class WaitAnswered(msgspec.Struct, frozen=True):
    """Tell the function in a slot that it may wait, or, with a `refusal`, why it may not."""

    slot: int
    refusal: str


class EndSlot(msgspec.Struct, frozen=True):
    """End the process or thread of an extra slot, which has no items. The runtime then passes
    SlotDied with position 0 to the machine."""

    slot: int


class Spawn(msgspec.Struct, frozen=True):
    """Start a slot's process, or its thread. `devices` are the numbers of the worker's devices that
    the process may use; if there are none, it sees what the worker sees."""

    slot: int
    devices: tuple[int, ...] = ()


class ForgetFunctions(msgspec.Struct, frozen=True):
    """Have a slot drop the functions and resources with these (coordinator, number). The number
    ALL_NUMBERS stands for all functions and resources of the coordinator."""

    slot: int
    functions: list[tuple[int, int]]


class FreeBulk(msgspec.Struct, frozen=True):
    """Free the bulk result of this lease."""

    lease: int


class Exit(msgspec.Struct, frozen=True):
    """The worker has ended. `code` is OK if the end was requested, otherwise another code of
    zmqdist.errors, with the reason in `error`."""

    code: int
    error: str


class SpawnActor(msgspec.Struct, frozen=True):
    """Start a process for this incarnation of an actor, which uses these devices."""

    spec: ActorSpec
    incarnation: int
    devices: tuple[int, ...] = ()


class EndActor(msgspec.Struct, frozen=True):
    """Tell the process of an actor to end: no further call begins."""

    incarnation: int


class KillActor(msgspec.Struct, frozen=True):
    """Kill the process of an actor."""

    incarnation: int


Effect: TypeAlias = (
    Send
    | Give
    | Reclaim
    | Interrupt
    | Kill
    | WaitAnswered
    | EndSlot
    | Spawn
    | ForgetFunctions
    | FreeBulk
    | SpawnActor
    | KeepActor
    | EndActor
    | KillActor
    | Exit
)

"""What the machine of machine.py wants done: its effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from zmqdist.errors import LostStart
from zmqdist.events import Send
from zmqdist.scheduling.coordinator.pins import MembersChanged


@dataclass(frozen=True, slots=True)
class Resolve:
    """These have ended: (work, kind, payload). KEPT: the payload is the reference to a value that stays with its worker."""

    items: list[tuple[int, int, bytes]]


@dataclass(frozen=True, slots=True)
class ResolveLost:
    """Every start of this was lost."""

    work: int
    starts: tuple[LostStart, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch a bulk result; answered by BulkArrived or BulkUnreachable."""

    work: int
    attempt: int
    reference: bytes


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """Nothing of this round or of an earlier one can be executing; all of it is resolved."""

    round: int


@dataclass(frozen=True, slots=True)
class RoomMade:
    """The queue has room again, or its length has changed after it was full."""


@dataclass(frozen=True, slots=True)
class WorkBegun:
    """A worker has begun these: they are not to be had back."""

    works: list[int]


Effect: TypeAlias = Send | Resolve | ResolveLost | Fetch | RoundEnded | RoomMade | MembersChanged | WorkBegun

"""The effects that the coordinator's machine (machine.py) returns and the runtime carries out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from zmqdist.events import Send
from zmqdist.scheduling.coordinator.affinity import MembersChanged
from zmqdist.scheduling.coordinator.dependencies_and_retries import Free, HandIn, Recomputed


class KeptAt(NamedTuple):
    """The value of an attempt, which the worker of the attempt keeps. `lineage` says whether the
    value is recomputed when it is lost."""

    attempt: int
    reference: bytes
    lineage: bool


@dataclass(frozen=True, slots=True)
class Resolve:
    """These work items have ended: (work, kind, payload).

    The payload depends on the kind. For KEPT it is the reference to the value, or a KeptAt if the
    work is a plan. For LOST it is the tuple of lost starts, each a LostStart. For INPUT_FAILED it
    is the number of the failed input. For UNAVAILABLE it is the reason, as encoded text. For any
    other kind it is the payload of the outcome, which is empty for CANCELLED and TIMED_OUT.

    Attributes:
      failures: the items that fail their round.
      detached: the items that belong to no round.
    """

    items: list[tuple[int, int, Any]]
    failures: Collection[int] = ()
    detached: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Replace:
    """A plan that had succeeded has a recomputed value, or has lost its value for good. Kind and
    payload are as in Resolve."""

    work: int
    kind: int
    payload: Any


@dataclass(frozen=True, slots=True)
class KeepInput:
    """Store an input, which is now available, for the plans that wait for it. The payload is its
    packed result or the reference to it."""

    work: int
    payload: Any
    plans: Sequence[int]


@dataclass(frozen=True, slots=True)
class RoundRefused:
    """The dispatcher refuses this coordinator, so the round fails. `for_good` says whether the
    coordinator will never register again."""

    error: bytes
    for_good: bool


@dataclass(frozen=True, slots=True)
class Fetch:
    """The runtime must fetch a bulk result, and then pass BulkArrived or BulkUnreachable to the
    machine."""

    work: int
    attempt: int
    reference: bytes


@dataclass(frozen=True, slots=True)
class RoundSettled:
    """This round is over: all of its work is resolved. Unless the dispatcher is gone for good, no
    work of this round or an earlier one can be executing.
    """

    round: int


@dataclass(frozen=True, slots=True)
class RoomMade:
    """The queue was full and has room again."""


@dataclass(frozen=True, slots=True)
class WorkBegun:
    """Workers have begun these work items, so they can no longer be taken back."""

    works: list[int]


Effect: TypeAlias = (
    Send
    | Resolve
    | Replace
    | KeepInput
    | HandIn
    | Recomputed
    | Free
    | Fetch
    | RoundSettled
    | RoundRefused
    | RoomMade
    | MembersChanged
    | WorkBegun
)

"""What the machine of machine.py wants done: its effects."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from zmqdist.events import Send
from zmqdist.scheduling.coordinator.affinity import MembersChanged
from zmqdist.scheduling.coordinator.dependencies_and_retries import Free, HandIn, Remade


class KeptAt(NamedTuple):
    """The value of an attempt that stays with its worker; with `lineage` it is made again when it is lost."""

    attempt: int
    reference: bytes
    lineage: bool


@dataclass(frozen=True, slots=True)
class Resolve:
    """These have ended: (work, kind, payload).

    The payload is, by kind: for KEPT the reference to a value that stays with its worker, KeptAt for a plan; for LOST the starts, each
    a LostStart; for INPUT_FAILED the number of the input; else what came with the outcome.

    Attributes:
      failures: those of them that fail their round.
      apart: those of them that are apart from the rounds.
    """

    items: list[tuple[int, int, Any]]
    failures: Collection[int] = ()
    apart: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Replace:
    """A plan that had ended well has another value, or none any more. As an item of Resolve."""

    work: int
    kind: int
    payload: Any


@dataclass(frozen=True, slots=True)
class KeepInput:
    """This result is here, an input of these plans, which wait for it: its payload, or the reference to a kept one."""

    work: int
    payload: Any
    plans: Sequence[int]


@dataclass(frozen=True, slots=True)
class RoundRefused:
    """The dispatcher does not take this coordinator: the round has failed by that. `for_good`: it will not be asked again."""

    error: bytes
    for_good: bool


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


Effect: TypeAlias = (
    Send
    | Resolve
    | Replace
    | KeepInput
    | HandIn
    | Remade
    | Free
    | Fetch
    | RoundEnded
    | RoundRefused
    | RoomMade
    | MembersChanged
    | WorkBegun
)

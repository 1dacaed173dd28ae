"""The effects that the coordinator's machine (machine.py) returns and the runtime carries out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from zmqdist.batches import split
from zmqdist.events import Send
from zmqdist.messages import Submit
from zmqdist.scheduling.coordinator.affinity import MembersChanged
from zmqdist.scheduling.coordinator.options import WorkOptions
from zmqdist.scheduling.coordinator.work import Work


@dataclass(frozen=True, slots=True)
class SubmitWork:
    """Submit these work items, which have the same options, to the dispatcher, each with its
    present `attempt` and its payload."""

    round: int
    works: list[Work]
    options: WorkOptions

    def messages(self, pack: Callable[[Work], bytes]) -> Iterator[Submit]:
        """Yield the messages, each of limited size. `pack` returns the payload of a work item."""
        items = [
            (work.number, work.attempt, len(work.lost_starts), work.function, pack(work))
            for work in self.works
        ]
        for part in split(items):
            yield Submit(self.round, part, *self.options)


@dataclass(frozen=True, slots=True)
class Resolve:
    """These work items have ended: (work, kind, payload). If a work item has a `kind` already, its
    lost value was recomputed, or is lost for good.

    The payload depends on the kind. For KEPT it is a KeptAt, for LOST the tuple of lost starts, each
    a LostStart, for INPUT_FAILED the number of the failed input, for UNAVAILABLE the reason, as
    encoded text. For any other kind it is the payload of the outcome, which is empty for CANCELLED
    and TIMED_OUT.

    Attributes:
      failures: the items that fail their round.
    """

    items: list[tuple[Work, int, Any]]
    failures: Collection[Work] = ()


@dataclass(frozen=True, slots=True)
class KeepInput:
    """Store an input, whose packed value is in this process now, for the work items that wait for
    it."""

    work: Work
    payload: Any
    dependents: Sequence[Work]


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Wake the threads that wait for the lost value of this work item: it is there, or never will
    be."""

    work: Work


@dataclass(frozen=True, slots=True)
class Free:
    """Release the data that was held to recompute the value of this work item."""

    work: Work


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

    work: Work
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
    | SubmitWork
    | Resolve
    | KeepInput
    | Recomputed
    | Free
    | Fetch
    | RoundSettled
    | RoundRefused
    | RoomMade
    | MembersChanged
    | WorkBegun
)

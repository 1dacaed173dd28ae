"""What a reader's runtime (data/service/reader/runtime.py) and its delivery machine say to each other.

The runtime holds one `Delivery`. It tells the machine what the dispatcher, the workers and the consumer did, as events, with the time, and
carries out the effects that the machine returns, in their order. It calls `handle` from one thread, with `Ticked` at `deadline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from zmqdist.errors import OpError
from zmqdist.events import Ticked

SOME: Final = 0
END: Final = 1
SKIP: Final = 2
FAILED: Final = 3
"""Kinds of answers of a task: elements and their tag; nothing more; nothing now; an error."""

ELEMENTS_MAX: Final = 4096
BATCH_BYTES: Final = 17 << 20
"""The most that a reader wants in one answer."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One question of a reader to a task.

    Attributes:
      elements_max, bytes_max: the answer has at least one element, and about so many at most.
      wait_s: answer `skip` when there is nothing after so long; None: wait.
      reader: number of the reading client.
      consumer, round, skipped: of coordinated reads: which consumer, which round, whether it was told to skip the round before.
      trainer: of a cross-trainer cache.
    """

    elements_max: int
    bytes_max: int
    wait_s: float | None = None
    reader: int = 0
    consumer: int = -1
    round: int = -1
    skipped: bool = False
    trainer: str = ""


class TaskPlace(NamedTuple):
    """A task that this reader is to read, as the dispatcher lists it.

    Attributes:
      where: address and key of the worker that serves it; empty while none does.
      life: incarnation of that worker; negative while it is away.
      starting_round: of coordinated reads.
    """

    task: int
    address: str
    where: str
    life: int
    starting_round: int


# -- events -----------------------------------------------------------------------------------------------------------


class News(NamedTuple):
    """The dispatcher has answered a question for news.

    Attributes:
      tasks: all that this reader is to read now.
      for_others: there are tasks that this reader leaves to others.
      finished: the iteration has ended.
      hold: of coordinated reads: the consumer is not to begin another round.
      ended: of coordinated reads: tasks that end before a round.
    """

    tasks: Sequence[TaskPlace]
    for_others: bool
    finished: bool
    hold: bool
    ended: Mapping[int, int]


class Began(NamedTuple):
    """The consumer wants elements. Nothing is asked for before, because what no consumer reads must not be used up."""


class Answered(NamedTuple):
    """A task has answered a question. The answers of one task come in the order of its questions."""

    source: Any
    kind: int
    value: Any
    error: OpError | None


class Took(NamedTuple):
    """The consumer has taken what filled one place of the window."""


class Waits(NamedTuple):
    """The consumer has found its queue empty: what it has done with is acknowledged now."""


class Works(NamedTuple):
    """The consumer has taken something: it is acknowledged in time."""


class Reported(NamedTuple):
    """The dispatcher has answered a `TellDispatcher`, with this error code; 0: it has taken it."""

    report: TellDispatcher
    code: int
    message: str


Event: TypeAlias = News | Began | Answered | Took | Waits | Works | Reported | Ticked

# -- effects ----------------------------------------------------------------------------------------------------------


class Ask(NamedTuple):
    """Ask a task; its answer comes back as `Answered`."""

    source: Any
    wanted: Wanted


class Deliver(NamedTuple):
    """Put these into the consumer's queue."""

    items: list[Any]


class TellDispatcher(NamedTuple):
    """Tell the dispatcher; its answer comes back as `Reported`."""

    method: str
    about: Any


class AskForNews(NamedTuple):
    """Ask the dispatcher for news at once: the standing has changed."""


class Over(NamedTuple):
    """The consumer gets what is in its queue, and then the end or this error."""

    error: OpError | None


Effect: TypeAlias = Ask | Deliver | TellDispatcher | AskForNews | Over


class Delivery(Protocol):
    """Decides what is asked of which task, and what the consumer gets of it.

    Attributes:
      deadline: when `Ticked` is due; infinite: never.
    """

    @property
    def deadline(self) -> float:
        """See above."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What follows from it."""

    def standing(self) -> tuple[Any, ...]:
        """What the dispatcher is told with the question for news that is now sent."""

    def awaited(self) -> str:
        """What the consumer waits for, for the log."""

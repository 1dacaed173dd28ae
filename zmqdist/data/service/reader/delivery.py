"""The events and effects between a reader's runtime (data/service/reader/runtime.py) and its delivery machine.

The runtime holds one `Delivery`. It reports what the dispatcher, the workers and the consumer did as events, each with the time, and
carries out the effects that the machine returns, in their order. It calls `handle` from one thread, and with `Ticked` when `deadline` has
come.
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
"""Kinds of replies of a task. SOME: elements and their tag. END: the task has no more elements. SKIP: it has none now. FAILED: an error."""

ELEMENTS_MAX: Final = 4096
BATCH_BYTES: Final = 17 << 20
"""The most elements, and the most bytes, that a reader requests in one reply."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request of a reader to a task.

    Attributes:
      elements_max, bytes_max: the reply has at least one element, and at most about this many elements and bytes.
      wait_s: seconds after which the task replies SKIP if it has no elements; None: the request waits without limit.
      reader: number of the reading client.
      consumer, round, skipped: in coordinated reads, the index of the consumer, the round that it requests, and whether the last reply
        was a skip.
      trainer: name of the trainer, for a task that trainers share.
    """

    elements_max: int
    bytes_max: int
    wait_s: float | None = None
    reader: int = 0
    consumer: int = -1
    round: int = -1
    skipped: bool = False
    trainer: str = ""


class TaskLocation(NamedTuple):
    """A task that this reader is to read, as the dispatcher lists it.

    Attributes:
      location: address and key of the worker that serves the task; empty while no worker does.
      incarnation: incarnation of that worker; negative while it is away.
      starting_round: in coordinated reads, the first round in which the task takes part.
    """

    task: int
    address: str
    location: str
    incarnation: int
    starting_round: int


# -- events -----------------------------------------------------------------------------------------------------------


class News(NamedTuple):
    """The dispatcher has replied to a `watch` request.

    Attributes:
      tasks: all tasks that this reader is to read now.
      others_exist: whether there are tasks that this reader leaves to other readers.
      finished: the iteration has ended.
      hold: in coordinated reads, the consumer must not begin another round.
      ended: in coordinated reads, task -> the round before which the task ends.
    """

    tasks: Sequence[TaskLocation]
    others_exist: bool
    finished: bool
    hold: bool
    ended: Mapping[int, int]


class ConsumerBegan(NamedTuple):
    """The consumer has asked for its first element. The machine sends no request earlier, so that elements are not used up without a
    consumer.
    """


class TaskReplied(NamedTuple):
    """A task has replied. The runtime reports the replies of one task in the order of the requests."""

    source: Any
    kind: int
    value: Any
    error: OpError | None


class BatchTaken(NamedTuple):
    """The consumer has taken the last item of one reply, so that the reply's place in the window is free."""


class ConsumerStarved(NamedTuple):
    """The consumer has found its queue empty: the machine acknowledges at once the elements that the consumer has finished."""


class ConsumerBusy(NamedTuple):
    """The consumer has taken a piece of a portion: the machine acknowledges it after a delay."""


class DispatcherReplied(NamedTuple):
    """The dispatcher has replied to a `NotifyDispatcher` with this error code; 0: success."""

    report: NotifyDispatcher
    code: int
    message: str


Event: TypeAlias = (
    News | ConsumerBegan | TaskReplied | BatchTaken | ConsumerStarved | ConsumerBusy | DispatcherReplied | Ticked
)

# -- effects ----------------------------------------------------------------------------------------------------------


class RequestElements(NamedTuple):
    """Send a request to a task. The runtime reports the reply as `TaskReplied`."""

    source: Any
    wanted: Wanted


class Deliver(NamedTuple):
    """Append these items to the consumer's queue."""

    items: list[Any]


class NotifyDispatcher(NamedTuple):
    """Call a method of the dispatcher. The runtime reports the reply as `DispatcherReplied`."""

    method: str
    payload: Any


class RequestNews(NamedTuple):
    """Send a `watch` request at once, because the result of `watch_args` has changed."""


class ReadingEnded(NamedTuple):
    """End the reading: the consumer gets the items in its queue, and then the end or this error."""

    error: OpError | None


Effect: TypeAlias = RequestElements | Deliver | NotifyDispatcher | RequestNews | ReadingEnded


class Delivery(Protocol):
    """Decides which requests go to which task, and which elements the consumer gets.

    Attributes:
      deadline: when `Ticked` is due; infinite: never.
    """

    @property
    def deadline(self) -> float:
        """Return the time at which `Ticked` is due."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Return the effects of `event`. The runtime carries them out in this order."""

    def watch_args(self) -> tuple[Any, ...]:
        """Return the machine's arguments of the `watch` request that the runtime is about to send."""

    def describe_wait(self) -> str:
        """Return a text for the log that says for which workers the consumer waits. Called from the consumer's thread."""

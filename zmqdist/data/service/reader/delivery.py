"""The events and effects between a reader's runtime (data/service/reader/runtime.py) and its
delivery machine.

The runtime has one delivery machine, an object with the protocol `Delivery`. For each action of the
dispatcher, of a worker or of the consumer, the runtime passes the machine an event and the time. It
carries out the effects that the machine returns, in their order. The runtime calls `handle` from
one thread only. At the time `deadline` it passes the event `Ticked`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec

from zmqdist.errors import OpError
from zmqdist.events import Ticked

SOME: Final = 0
END: Final = 1
SKIP: Final = 2
FAILED: Final = 3
"""Kinds of replies of a task. SOME: the reply has elements and a tag. END: the task has no more
elements. SKIP: the task has no elements at the moment. FAILED: the reply is an error."""

ELEMENTS_MAX: Final = 4096
BATCH_BYTES: Final = 17 << 20
"""The largest number of elements, and of bytes, that a reader requests in one reply."""


class Demand(msgspec.Struct, frozen=True):
    """One request of a reader to a task.

    Attributes:
      elements_max, bytes_max: about the largest number of elements and of bytes in the reply. A
        reply may have a single element of more than `bytes_max` bytes.
      wait_s: seconds after which the task replies SKIP if it has no elements. None means that the
        request waits without limit.
      reader: number of the reading client.
      consumer, round, skipped: in coordinated reads, the index of the consumer, the round that it
        requests, and whether the last reply was a skip.
      trainer: name of the trainer, if trainers share the task.
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
    """A task that this reader reads, as the dispatcher listed it.

    Attributes:
      location: address and key at which a worker serves the task; empty while no worker serves it.
      incarnation: incarnation of that worker; negative while the worker is away.
      starting_round: in coordinated reads, the first round in which the task takes part.
    """

    task: int
    address: str
    location: str
    incarnation: int
    starting_round: int


# -- events ----------------------------------------------------------------------------------------


class News(NamedTuple):
    """The dispatcher has replied to a `watch` request.

    Attributes:
      tasks: all tasks that this reader has to read now.
      others_exist: whether there are tasks that this reader leaves to other readers.
      finished: whether the iteration has ended. For a reader of portions, whether the reader's lane
        has ended.
      hold: in coordinated reads, whether the consumer has to stop at its next round.
      end_rounds: in coordinated reads, maps each ended task to the first round in which it takes no
        part.
    """

    tasks: Sequence[TaskLocation]
    others_exist: bool
    finished: bool
    hold: bool
    end_rounds: Mapping[int, int]


class ConsumerBegan(NamedTuple):
    """The consumer has asked for its first element. The machine sends no request before this event,
    so that no elements are used up without a consumer.
    """


class TaskReplied(NamedTuple):
    """A task has replied to a request, or the request has failed. The runtime reports the replies
    of one task in the order of the requests. `source` is the `source` of the RequestElements to
    which the task has replied.
    """

    source: Any
    kind: int
    value: Any
    error: OpError | None


class BatchTaken(NamedTuple):
    """The consumer has taken the last item of one reply, so the reply's place in the window is
    free."""


class ConsumerStarved(NamedTuple):
    """The consumer has found its queue empty, so the machine acknowledges at once the elements that
    the consumer has finished."""


class ConsumerBusy(NamedTuple):
    """The consumer has taken a piece of a portion from its queue. The machine acknowledges the
    finished elements after a delay."""


class DispatcherReplied(NamedTuple):
    """The dispatcher has replied to a `NotifyDispatcher` with this error code; 0 means success."""

    report: NotifyDispatcher
    code: int
    message: str


Event: TypeAlias = (
    News
    | ConsumerBegan
    | TaskReplied
    | BatchTaken
    | ConsumerStarved
    | ConsumerBusy
    | DispatcherReplied
    | Ticked
)

# -- effects ---------------------------------------------------------------------------------------


class RequestElements(NamedTuple):
    """Send a request to a task. The runtime reports the reply as `TaskReplied`. `source` is what
    the machine knows of the task."""

    source: Any
    demand: Demand


class Deliver(NamedTuple):
    """Append these items to the queue from which the consumer takes elements."""

    items: list[Any]


class NotifyDispatcher(NamedTuple):
    """Call a method of the dispatcher. The runtime reports the reply as `DispatcherReplied`."""

    method: str
    payload: Any


class RequestNews(NamedTuple):
    """Send the dispatcher a new `watch` request at once, because the result of `watch_args` has
    changed."""


class ReadingEnded(NamedTuple):
    """End the reading. The consumer gets the items in its queue, and then the end or this error."""

    error: OpError | None


Effect: TypeAlias = RequestElements | Deliver | NotifyDispatcher | RequestNews | ReadingEnded


class Delivery(Protocol):
    """Base class of the delivery machines. A delivery machine decides which requests go to which task, and which
    elements the consumer gets.

    Attributes:
      deadline: the time at which the runtime has to pass `Ticked`; infinite means never.
    """

    @property
    def deadline(self) -> float:
        """Return the time at which the runtime has to pass `Ticked`."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Decide on `event`, and return the effects, which the runtime carries out in this
        order.
        """

    def watch_args(self) -> tuple[Any, ...]:
        """Return the machine's part of the arguments for the `watch` request that the runtime is
        about to send."""

    def describe_wait(self) -> str:
        """Return a text for the log that names the workers for which the consumer waits. Called in
        the consumer's thread."""

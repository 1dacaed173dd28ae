"""Events of the coordinator's machine (machine.py), and the effects that it returns and the runtime
carries out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zmqdist.batches import split
from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import ERROR, ActorFound, Message, Result, Submit
from zmqdist.scheduling.coordinator.affinity import MembersChanged
from zmqdist.scheduling.coordinator.options import WorkOptions
from zmqdist.scheduling.coordinator.work import CalledActor, MethodCall, Work
from zmqdist.scheduling.shared.actors import ActorState


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The program has scheduled these work items, in the order of their numbers."""

    works: list[Work]


@dataclass(frozen=True, slots=True)
class FunctionsDefined:
    """The program will schedule work with these functions, each given as (number, pickle), and
    their names in the same order."""

    functions: list[tuple[int, bytes]]
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FunctionsDropped:
    """The program will schedule no more work with these functions."""

    functions: list[int]


@dataclass(frozen=True, slots=True)
class ForgetRequested:
    """All slots must drop the resources with these numbers, because the program no longer needs
    them (`Forget.everywhere`)."""

    numbers: list[int]


@dataclass(frozen=True, slots=True)
class DispatcherUp:
    """The connection to the dispatcher is established."""


@dataclass(frozen=True, slots=True)
class SessionRequested:
    """Another function uses this coordinator now, and no work of rounds is unfinished: begin a
    session for the function with this lease."""

    parent: int


@dataclass(frozen=True, slots=True)
class DispatcherDown:
    """The connection to the dispatcher is lost."""


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The program cancelled these work items."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class TakeBackRequested:
    """The program cancels these work items unless a worker has begun them. Pass it only to a
    machine that was made with `starts=True`."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class EndRoundRequested:
    """A thread waits to raise the error of this round, so the round must end. The event has no
    effect if this is not the present round."""

    round: int


@dataclass(frozen=True, slots=True)
class BulkArrived:
    """A large result has arrived in this process, or no RemoteValue needs it any more."""

    work: int
    attempt: int
    payload: Any


@dataclass(frozen=True, slots=True)
class KeptDropped:
    """The program no longer needs the kept values of these work items."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class BulkUnreachable:
    """The runtime has given up the fetch of a large result, for the reason in `problem`."""

    work: int
    attempt: int
    problem: str


@dataclass(frozen=True, slots=True)
class PackingFailed:
    """The inputs of a new work item cannot be packed, so it ends with this packed error."""

    work: Work
    error: bytes


@dataclass(frozen=True, slots=True)
class CoordinatorRefused:
    """The dispatcher refuses this coordinator, for the reason in the packed `error`."""

    error: bytes


@dataclass(frozen=True, slots=True)
class ValueLost:
    """The program requests a value that this attempt had computed, but its worker no longer holds
    the value."""

    work: Work
    attempt: int


@dataclass(frozen=True, slots=True)
class ActorMade:
    """The program has made an actor, whose `spec` says what it is."""

    actor: CalledActor


@dataclass(frozen=True, slots=True)
class ActorWatched:
    """The program has a handle of an actor that another program has made."""

    actor: CalledActor


@dataclass(frozen=True, slots=True)
class HandlesDropped:
    """The program holds no handle of these actors any more."""

    actors: list[int]


@dataclass(frozen=True, slots=True)
class ActorKilled:
    """The program ends an actor, for this reason."""

    actor: int
    reason: str


@dataclass(frozen=True, slots=True)
class ActorSought:
    """The program looks for an actor by name. With "" it does not wait any more."""

    request: int
    name: str


@dataclass(frozen=True, slots=True)
class ActorConnected:
    """The connection to the process of an actor is established."""

    actor: CalledActor


@dataclass(frozen=True, slots=True)
class ActorDisconnected:
    """The connection to the process of an actor is lost, or was refused because of `problem`."""

    actor: CalledActor
    problem: str = ""


@dataclass(frozen=True, slots=True)
class StreamTaken:
    """The program has taken so many more values of a generator."""

    call: MethodCall
    count: int


@dataclass(frozen=True, slots=True)
class CallsEnded:
    """Results of calls have arrived from an actor."""

    actor: CalledActor
    items: list[Result]


@dataclass(frozen=True, slots=True)
class RetryDecided:
    """The program has decided whether a function runs again.

    Attributes:
      question: the effect that asked for the decision.
      again: whether it runs again.
      draw: a random number from 0 to 1, for the jitter.
    """

    question: DecideRetry
    again: bool
    draw: float


Event: TypeAlias = (
    Scheduled
    | PackingFailed
    | ValueLost
    | RetryDecided
    | CoordinatorRefused
    | FunctionsDefined
    | FunctionsDropped
    | ForgetRequested
    | DispatcherUp
    | DispatcherDown
    | SessionRequested
    | CancelRequested
    | TakeBackRequested
    | EndRoundRequested
    | BulkArrived
    | BulkUnreachable
    | KeptDropped
    | ActorMade
    | ActorWatched
    | HandlesDropped
    | ActorKilled
    | ActorSought
    | ActorConnected
    | ActorDisconnected
    | CallsEnded
    | StreamTaken
    | Heard
    | Ticked
)


# -- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubmitWork:
    """Submit these work items, which have the same options, to the dispatcher, each with its
    present `attempt` and its payload. `waited` has the seconds that some have waited for inputs."""

    round: int
    works: list[Work]
    options: WorkOptions
    has_kept_inputs: bool = False
    waited: Mapping[int, float] = field(default_factory=dict)

    def messages(
        self, pack: Callable[[Work], bytes], near: Callable[[Work], tuple[str, int]] | None = None
    ) -> Iterator[Submit]:
        """Yield the messages, each of limited size. `pack` returns the payload of a work item, and
        `near` the worker that holds most bytes of its inputs, with their number."""
        groups: dict[tuple[str, int], list[Work]] = {("", 0): self.works}
        if self.has_kept_inputs and near is not None:
            groups = {}
            for work in self.works:
                groups.setdefault(near(work), []).append(work)
        for holder, works in groups.items():
            items = [
                (work.number, work.attempt, len(work.lost_starts), work.function, pack(work))
                for work in works
            ]
            for part in split(items):
                numbers = {item[0] for item in part} if self.waited else ()
                waited = {work: time for work, time in self.waited.items() if work in numbers}
                yield Submit(self.round, part, *self.options, *holder, waited)


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
    it. Those of `dependents` that have ended in the same event need it no more."""

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
class DecideRetry:
    """A function with a policy for its retries raised this packed error, or ended in the way `kind`:
    have the policy decide whether it runs again, and then pass RetryDecided to the machine."""

    work: Work
    attempt: int
    error: bytes
    kind: int = ERROR


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


@dataclass(frozen=True, slots=True)
class ConnectActor:
    """Connect to the process of an actor, at its present address."""

    actor: CalledActor


@dataclass(frozen=True, slots=True)
class DisconnectActor:
    """End the connection to the process of an actor."""

    actor: CalledActor


@dataclass(frozen=True, slots=True)
class SendCalls:
    """Send these calls to an actor, in this order."""

    actor: CalledActor
    calls: list[MethodCall]


@dataclass(frozen=True, slots=True)
class SendToActor:
    """Send a message to an actor."""

    actor: CalledActor
    message: Message


@dataclass(frozen=True, slots=True)
class ActorReported:
    """The state of an actor has changed, for this reason."""

    actor: CalledActor
    state: ActorState
    reason: str


@dataclass(frozen=True, slots=True)
class ActorSearched:
    """The dispatcher has answered a search by name."""

    answer: ActorFound


Effect: TypeAlias = (
    Send
    | SubmitWork
    | Resolve
    | KeepInput
    | Recomputed
    | DecideRetry
    | Free
    | Fetch
    | RoundSettled
    | RoundRefused
    | RoomMade
    | MembersChanged
    | WorkBegun
    | ConnectActor
    | DisconnectActor
    | SendCalls
    | SendToActor
    | ActorReported
    | ActorSearched
)

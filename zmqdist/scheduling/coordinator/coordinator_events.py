"""Events of the coordinator's machine (machine.py), and the effects that it returns and the runtime
carries out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from zmqdist.batches import split
from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import ERROR, ActorFound, Message, Result, Submit
from zmqdist.scheduling.coordinator.affinity import MembersChanged
from zmqdist.scheduling.coordinator.options import WorkOptions
from zmqdist.scheduling.coordinator.work import CalledActor, MethodCall, Work
from zmqdist.scheduling.shared.actors import ActorState


class Scheduled(msgspec.Struct, frozen=True):
    """The program has scheduled these work items, in the order of their numbers."""

    works: list[Work]


class FunctionsDefined(msgspec.Struct, frozen=True):
    """The program will schedule work with these functions, each given as (number, pickle), and
    their names in the same order."""

    functions: list[tuple[int, bytes]]
    names: tuple[str, ...] = ()


class FunctionsDropped(msgspec.Struct, frozen=True):
    """The program will schedule no more work with these functions."""

    functions: list[int]


class ForgetRequested(msgspec.Struct, frozen=True):
    """All slots must drop the resources with these numbers, because the program no longer needs
    them (`Forget.everywhere`)."""

    numbers: list[int]


class DispatcherUp(msgspec.Struct, frozen=True):
    """The connection to the dispatcher is established."""


class SessionRequested(msgspec.Struct, frozen=True):
    """Another function uses this coordinator now, and no work of rounds is unfinished: begin a
    session for the function with this lease."""

    parent: int


class DispatcherDown(msgspec.Struct, frozen=True):
    """The connection to the dispatcher is lost."""


class CancelRequested(msgspec.Struct, frozen=True):
    """The program cancelled these work items."""

    works: list[int]


class TakeBackRequested(msgspec.Struct, frozen=True):
    """The program cancels these work items unless a worker has begun them. Pass it only to a
    machine that was made with `starts=True`."""

    works: list[int]


class EndRoundRequested(msgspec.Struct, frozen=True):
    """A thread waits to raise the error of this round, so the round must end. The event has no
    effect if this is not the present round."""

    round: int


class BulkArrived(msgspec.Struct, frozen=True):
    """A large result has arrived in this process, or no RemoteValue needs it any more."""

    work: int
    attempt: int
    payload: Any


class KeptDropped(msgspec.Struct, frozen=True):
    """The program no longer needs the kept values of these work items."""

    works: list[int]


class BulkUnreachable(msgspec.Struct, frozen=True):
    """The runtime has given up the fetch of a large result, for the reason in `problem`."""

    work: int
    attempt: int
    problem: str


class PackingFailed(msgspec.Struct, frozen=True):
    """The inputs of a new work item cannot be packed, so it ends with this packed error."""

    work: Work
    error: bytes


class CoordinatorRefused(msgspec.Struct, frozen=True):
    """The dispatcher refuses this coordinator, for the reason in the packed `error`."""

    error: bytes


class ValueLost(msgspec.Struct, frozen=True):
    """The program requests a value that this attempt had computed, but its worker no longer holds
    the value."""

    work: Work
    attempt: int


class ActorMade(msgspec.Struct, frozen=True):
    """The program has made an actor, whose `spec` says what it is."""

    actor: CalledActor


class ActorWatched(msgspec.Struct, frozen=True):
    """The program has a handle of an actor that another program has made."""

    actor: CalledActor


class HandlesDropped(msgspec.Struct, frozen=True):
    """The program holds no handle of these actors any more."""

    actors: list[int]


class ActorKilled(msgspec.Struct, frozen=True):
    """The program ends an actor, for this reason."""

    actor: int
    reason: str


class ActorSought(msgspec.Struct, frozen=True):
    """The program looks for an actor by name. With "" it does not wait any more."""

    request: int
    name: str


class ActorConnected(msgspec.Struct, frozen=True):
    """The connection to the process of an actor is established."""

    actor: CalledActor


class ActorDisconnected(msgspec.Struct, frozen=True):
    """The connection to the process of an actor is lost, or was refused because of `problem`."""

    actor: CalledActor
    problem: str = ""


class StreamTaken(msgspec.Struct, frozen=True):
    """The program has taken so many more values of a generator."""

    call: MethodCall
    count: int


class CallsEnded(msgspec.Struct, frozen=True):
    """Results of calls have arrived from an actor."""

    actor: CalledActor
    items: list[Result]


class RetryDecided(msgspec.Struct, frozen=True):
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


class SubmitWork(msgspec.Struct, frozen=True):
    """Submit these work items, which have the same options, to the dispatcher, each with its
    present `attempt` and its payload. `waited` has the seconds that some have waited for inputs."""

    round: int
    works: list[Work]
    options: WorkOptions
    has_kept_inputs: bool = False
    waited: Mapping[int, float] = msgspec.field(default_factory=dict)

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


class Resolve(msgspec.Struct, frozen=True):
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


class KeepInput(msgspec.Struct, frozen=True):
    """Store an input, whose packed value is in this process now, for the work items that wait for
    it. Those of `dependents` that have ended in the same event need it no more."""

    work: Work
    payload: Any
    dependents: Sequence[Work]


class Recomputed(msgspec.Struct, frozen=True):
    """Wake the threads that wait for the lost value of this work item: it is there, or never will
    be."""

    work: Work


class Free(msgspec.Struct, frozen=True):
    """Release the data that was held to recompute the value of this work item."""

    work: Work


class DecideRetry(msgspec.Struct, frozen=True):
    """A function with a policy for its retries raised this packed error, or ended in the way `kind`:
    have the policy decide whether it runs again, and then pass RetryDecided to the machine."""

    work: Work
    attempt: int
    error: bytes
    kind: int = ERROR


class RoundRefused(msgspec.Struct, frozen=True):
    """The dispatcher refuses this coordinator, so the round fails. `for_good` says whether the
    coordinator will never register again."""

    error: bytes
    for_good: bool


class Fetch(msgspec.Struct, frozen=True):
    """The runtime must fetch a bulk result, and then pass BulkArrived or BulkUnreachable to the
    machine."""

    work: Work
    attempt: int
    reference: bytes


class RoundSettled(msgspec.Struct, frozen=True):
    """This round is over: all of its work is resolved. Unless the dispatcher is gone for good, no
    work of this round or an earlier one can be executing.
    """

    round: int


class RoomMade(msgspec.Struct, frozen=True):
    """The queue was full and has room again."""


class WorkBegun(msgspec.Struct, frozen=True):
    """Workers have begun these work items, so they can no longer be taken back."""

    works: list[int]


class ConnectActor(msgspec.Struct, frozen=True):
    """Connect to the process of an actor, at its present address."""

    actor: CalledActor


class DisconnectActor(msgspec.Struct, frozen=True):
    """End the connection to the process of an actor."""

    actor: CalledActor


class SendCalls(msgspec.Struct, frozen=True):
    """Send these calls to an actor, in this order."""

    actor: CalledActor
    calls: list[MethodCall]


class SendToActor(msgspec.Struct, frozen=True):
    """Send a message to an actor."""

    actor: CalledActor
    message: Message


class ActorReported(msgspec.Struct, frozen=True):
    """The state of an actor has changed, for this reason."""

    actor: CalledActor
    state: ActorState
    reason: str


class ActorSearched(msgspec.Struct, frozen=True):
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

"""The dispatcher's directory of actors: where each actor is, and when another process may take its
place. No I/O.

Theory of operation
    An actor belongs to the coordinator that has made it, which sends CreateActor on each connection
    to a dispatcher until the actor has ended. A detached actor belongs to no coordinator: the
    worker that has its process names it to a new dispatcher, with its spec.
    Each start of an actor's process is an incarnation of the actor. The numbers of incarnations
    grow over all actors and all dispatchers, and are never used again. A message about an earlier
    incarnation changes nothing.
    A process of an actor ends itself after at most three quarters of a lease without contact to a
    dispatcher (scheduling/worker/machine.py). Only the process of an actor without restarts lives
    on, once the actor's coordinator knows the process (KeepActor), because then no dispatcher
    replaces it. If the worker of such an actor stays away for ORPHAN_LIMIT_S, the dispatcher gives
    the actor up.
    A new dispatcher does not know which actors live. During its first lease it neither places an
    actor that may live, nor says that a name does not exist: within this lease each worker that has
    kept its actors comes back, and the actors with restarts of all other workers have ended.
    A process of an actor reserves the actor's resources from its placement until its end was seen.
    The members of a group are placed together, or none of them is. A member that is restarted is
    placed alone, because its group exists already.

Promises, checked by tests/sim
    A1   two incarnations of an actor never both serve: the next is placed only after the process of
         the one before was seen to end, or has ended itself
    A2   the end of an actor is reported to its coordinator once, with the reason
    A3   the oldest waiting actor that fits a worker is placed first; an actor that fits none does
         not hold up the others
    A4   a name belongs to at most one actor that neither has ended nor was told to end
    A5   an actor ends with its coordinator, unless it is detached; a coordinator that did not say
         goodbye has a lease to come back
    A6   an actor begins again at most `restarts` times, not counting an incarnation that has ended
         before its coordinator had heard of it, or because its worker leaves
    A7   a new dispatcher answers for a name, and places an actor that may live, only after one
         lease, or after a worker has named the actor
    A8   a worker is told to stop each process that is not the present incarnation of an actor
    A9   a worker never has more processes of actors than its `actors_max`
    A10  all members of a group are placed at the same time, or none
    A11  the processes of a worker never use more of its resources than it has, together with its
         functions (resources.py)
    A12  an actor, or a group, that no worker could have even with nothing in use ends when no
         worker has joined or was lost for `growth_limit_s` (demands.py)

Not here: processes and their contact (scheduling/worker/actor_host_machine.py), and calls, which go
from their callers to the actors directly.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from zmqdist import errors
from zmqdist.events import Peer, Send
from zmqdist.limits import ACTOR_ENDS_KEPT, ACTORS_MAX, ORPHAN_LIMIT_S
from zmqdist.messages import (
    ActorChanged,
    ActorExited,
    ActorFound,
    ActorKnown,
    ActorReady,
    ActorsOwned,
    ActorSpec,
    CreateActor,
    DropActor,
    FindActor,
    HostedActor,
    KeepActor,
    Message,
    Refused,
    Register,
    StartActor,
    StopActor,
    WatchActor,
)
from zmqdist.scheduling.dispatcher.membership_and_leases import Member, MemberLost
from zmqdist.scheduling.dispatcher.resources import Stocks
from zmqdist.scheduling.shared.actors import ActorState
from zmqdist.scheduling.shared.quantities import Grant, Quantities, amounts_text
from zmqdist.scheduling.shared.registrations import actor_problem, request_of
from zmqdist.transitions import enter

_S = ActorState
ACTOR_TRANSITIONS: Final[Mapping[ActorState, frozenset[ActorState]]] = {
    _S.PENDING: frozenset({_S.STARTING, _S.LIVE, _S.AWAY, _S.ENDED}),
    _S.STARTING: frozenset({_S.LIVE, _S.PENDING, _S.AWAY, _S.ENDED}),
    _S.LIVE: frozenset({_S.PENDING, _S.AWAY, _S.ENDED}),
    _S.AWAY: frozenset({_S.PENDING, _S.STARTING, _S.LIVE, _S.ENDED}),
    _S.ENDED: frozenset(),
}

MAKER_ENDED: Final = "the program that made it has ended"
NAME_TAKEN: Final = "the name {} is taken by another actor"
EARLIER_MAY_SERVE: Final = "an earlier process of it may serve yet"
NO_PROCESS: Final = "its worker does not have its process any more"


@dataclass(slots=True, eq=False)
class Actor:
    """One actor that has not ended.

    Attributes:
      host: the worker that has, or had, the present process; None before the first.
      not_before: until this time an earlier process may serve, so no other may be started; None if
        there is no such process.
      claimed_by: until this time the actor's coordinator has to ask for it, because a worker has
        named it; None if the coordinator has asked.
      is_acknowledged: whether the coordinator knows the present process, so that it is kept
        without contact if the actor has no restarts.
      reason: why the last process has ended, or may have ended.
      ends_for: why the actor ends as soon as its process has ended; "" if it is to live.
      waits_for: what was reported as the reason why it is not placed.
      kept_worker: the worker that is claimed for it while it waits.
      grace_s: the grace of the process that ends.
    """

    spec: ActorSpec
    restarts_left: int
    state: ActorState = ActorState.PENDING
    incarnation: int = 0
    host: int | None = None
    worker: str = ""
    address: str = ""
    key: bytes = b""
    not_before: float | None = None
    claimed_by: float | None = None
    is_acknowledged: bool = False
    reason: str = ""
    ends_for: str = ""
    waits_for: str = ""
    kept_worker: str = ""
    grace_s: float = 0.0

    @property
    def request(self) -> Quantities:
        return request_of(self.spec)

    @property
    def label(self) -> str:
        return f"{self.spec.cls} {self.spec.name or self.spec.actor}"

    def enter(self, state: ActorState) -> None:
        self.state = enter(ACTOR_TRANSITIONS, self.state, state, "actor", self.spec.actor)

    def change(self, error: bytes = b"") -> ActorChanged:
        return ActorChanged(
            self.spec.actor,
            self.state,
            self.incarnation,
            self.restarts_left,
            self.address,
            self.key,
            self.worker,
            self.reason,
            error,
        )


@dataclass(slots=True, eq=False)
class Host:
    """One worker. `processes` has, by incarnation, the actor of each process that it may have, and
    what the process uses."""

    member: Member
    actors_max: int
    processes: dict[int, tuple[int, Grant]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ActorRow:
    """One actor in a snapshot.

    Attributes:
      state: the name of its ActorState in small letters.
      restarts, restarts_left: how often its process may be replaced at all, and from now on.
      reason: why it waits, is away, or was begun again.
      owner: the number of the coordinator that has made it; 0 if it is detached.
    """

    actor: int
    name: str
    cls: str
    state: str
    worker: str
    restarts: int
    restarts_left: int
    reason: str
    owner: int
    incarnation: int
    address: str


class ActorDirectory:
    """The actors of one dispatcher; the module's docstring has the rules. Each method for an event
    returns the messages to send, in order.

    Args:
      stocks: the resources of the workers.
      ended_within_s: seconds after which no process of a worker is left that has ended.
      first_incarnation: a number above those of all earlier dispatchers.
      silent_until: the end of the first lease of a dispatcher that may have had predecessors.

    Attributes:
      actors: the actors that have not ended, by number.
      deadline: the time at which `tick` must next be called; None means never.
      waits_for_resources: whether an actor waits that uses resources, so that `retry` must be
        called when some are free again.
    """

    def __init__(
        self,
        stocks: Stocks,
        lease_s: float,
        ended_within_s: float,
        *,
        first_incarnation: int = 1,
        silent_until: float = 0.0,
    ) -> None:
        self._lease_s, self._ended_within_s = lease_s, ended_within_s
        self._next_incarnation = first_incarnation
        self._silent_until = silent_until
        self.actors: dict[int, Actor] = {}
        self.deadline: float | None = None
        self.waits_for_resources = False
        self._stocks = stocks
        self._is_impossible = False
        """Whether an actor waits that no worker could have (A12)."""
        self._hosts: dict[int, Host] = {}
        self._names: dict[str, int] = {}
        self._pending: dict[int, Actor] = {}
        self._timed: dict[int, Actor] = {}
        """The actors with a `not_before` or `claimed_by`."""
        self._groups: defaultdict[int, int] = defaultdict(int)
        """The number of members that have not ended, by group."""
        self._ends: dict[int, ActorChanged] = {}
        """The last reports of actors that have ended, for late questions."""
        self._peers: dict[int, Peer] = {}
        """The connection of each registered coordinator, by its number."""
        self._absent_owners: dict[int, float] = {}
        """The time at which the actors of a coordinator end that is away."""
        self._watchers: dict[int, dict[Peer, None]] = {}
        self._searches: list[tuple[Peer, FindActor]] = []
        self._effects: list[Send] = []

    # -- coordinators ------------------------------------------------------------------------------

    def coordinator_registered(self, coordinator: int, peer: Peer) -> None:
        self._peers[coordinator] = peer
        self._absent_owners.pop(coordinator, None)

    def coordinator_gone(self, peer: Peer, now: float, *, left: bool) -> list[Send]:
        """Note the end of a connection. `left`: the coordinator has said goodbye."""
        for watchers in self._watchers.values():
            watchers.pop(peer, None)
        self._searches = [search for search in self._searches if search[0] != peer]
        coordinator = next((n for n, owner in self._peers.items() if owner == peer), None)
        if coordinator is None:
            return []
        del self._peers[coordinator]
        if self._of_owner(coordinator):
            self._absent_owners[coordinator] = now if left else now + self._lease_s
        return self._settle(now)

    def from_coordinator(
        self, peer: Peer, coordinator: int, message: Message, now: float
    ) -> list[Send]:
        match message:
            case CreateActor():
                if (problem := actor_problem(message.spec)) or message.spec.owner not in (
                    0,
                    coordinator,
                ):
                    problem = problem or "the owner of an actor is the coordinator that makes it"
                    return [Send(peer, Refused(errors.INVALID_ARGUMENT, problem))]
                self._create(peer, message, now)
            case ActorsOwned(numbers):
                for actor in self._of_owner(coordinator, set(numbers)):
                    self._end(actor, "its program has dropped it")
            case DropActor(number, reason, grace_s):
                if number in self.actors:
                    self._end(self.actors[number], reason, grace_s)
            case FindActor():
                self._searches.append((peer, message))
            case ActorKnown(number, incarnation):
                self._acknowledge(number, incarnation)
            case WatchActor(number, stop):
                self._watch(peer, number, stop=stop)
        return self._settle(now)

    def _create(self, peer: Peer, message: CreateActor, now: float) -> None:
        spec = message.spec
        if spec.actor not in self.actors and (problem := self._obstacle(message)) is not None:
            self._effects.append(Send(peer, problem))
            return
        if not spec.owner:
            self._watchers.setdefault(spec.actor, {})[peer] = None
        if spec.actor in self.actors:
            actor = self.actors[spec.actor]
            actor.claimed_by = None
            self._effects.append(Send(peer, actor.change()))
            return
        left = spec.restarts if message.restarts_left < 0 else message.restarts_left
        actor = self._add(Actor(spec, left, incarnation=message.incarnation))
        self._next_incarnation = max(self._next_incarnation, message.incarnation + 1)
        if message.incarnation:
            # An earlier dispatcher has placed it, and its process may live.
            actor.is_acknowledged = True
            self._go_away(actor, "its worker has not come back", now, self._silent_until)
        elif message.may_live or spec.name:
            self._set_not_before(actor, self._silent_until)  # A7

    def _obstacle(self, message: CreateActor) -> ActorChanged | None:
        """Return why this actor cannot be added, as its end; None if it can."""
        spec = message.spec
        if spec.actor in self._ends:
            return self._ends[spec.actor]
        reason = ""
        if message.incarnation and not message.may_live:
            reason = "it has ended while its program was away"
        elif not self._takes_name(spec.name, may_live=message.incarnation > 0):
            reason = NAME_TAKEN.format(spec.name)
        elif len(self.actors) >= ACTORS_MAX:
            reason = f"this dispatcher has {ACTORS_MAX} actors and takes no more"
        return self._remember(ActorChanged(spec.actor, _S.ENDED, reason=reason)) if reason else None

    def _takes_name(self, name: str, *, may_live: bool) -> bool:
        """Return whether an actor can have this name. One that may live takes the name from an
        actor that was never placed."""
        holder = self.actors.get(self._names.get(name, -1))
        if holder is None:
            return True
        if holder.incarnation or not may_live:
            return False
        self._end_now(holder, NAME_TAKEN.format(name))
        return True

    def _remember(self, change: ActorChanged) -> ActorChanged:
        self._ends[change.actor] = change
        if len(self._ends) > ACTOR_ENDS_KEPT:
            del self._ends[next(iter(self._ends))]
        return change

    def _of_owner(self, coordinator: int, but: Container[int] = ()) -> list[Actor]:
        return [
            actor
            for number, actor in self.actors.items()
            if actor.spec.owner == coordinator and number not in but
        ]

    def _acknowledge(self, number: int, incarnation: int) -> None:
        actor = self.actors.get(number)
        if (
            actor is not None
            and (actor.incarnation, actor.state) == (incarnation, _S.LIVE)
            and not actor.is_acknowledged
        ):
            actor.is_acknowledged = True
            if not actor.spec.restarts:
                self._order(actor.host, KeepActor(number, incarnation))

    def _watch(self, peer: Peer, number: int, *, stop: bool) -> None:
        if stop:
            self._watchers.get(number, {}).pop(peer, None)
            return
        self._watchers.setdefault(number, {})[peer] = None
        if number in self.actors:
            self._effects.append(Send(peer, self.actors[number].change()))

    # -- workers -----------------------------------------------------------------------------------

    def registered(self, member: Member, register: Register, now: float) -> list[Send]:
        """A worker has registered, for the first time or again, and has named its processes."""
        host = self._hosts.setdefault(member.incarnation, Host(member, register.actors_max))
        host.member, host.actors_max = member, register.actors_max
        present = {hosted.incarnation: hosted for hosted in register.actors}
        for incarnation, (number, grant) in list(host.processes.items()):
            if incarnation in present:
                continue
            actor = self._present(member.incarnation, number, incarnation)
            if actor is not None and actor.state is _S.STARTING:
                # The order may be lost; a worker that has had it reports the end again.
                self._start(actor, grant)
                continue
            self._release(host, incarnation)
            if actor is not None:
                self._process_ended(actor, NO_PROCESS, now)
        for hosted in present.values():
            self._adopt(host, hosted, now)
        return self._settle(now)

    def _adopt(self, host: Host, hosted: HostedActor, now: float) -> None:
        spec, incarnation, member = hosted.spec, hosted.incarnation, host.member
        if incarnation not in host.processes:
            grant = Grant(request_of(spec), hosted.devices)
            host.processes[incarnation] = (spec.actor, grant)
            self._stocks.occupy(member.name, grant, lasting=True)
        self._next_incarnation = max(self._next_incarnation, incarnation + 1)
        actor = self.actors.get(spec.actor)
        if actor is None and self._is_adoptable(spec, now):
            # An actor of an earlier dispatcher: its coordinator comes back soon, or has ended.
            actor = self._add(Actor(spec, hosted.restarts_left))
            if spec.owner:
                actor.claimed_by = self._silent_until
                self._timed[spec.actor] = actor
        if (
            actor is None
            or incarnation < actor.incarnation
            or (incarnation == actor.incarnation and actor.host not in (None, member.incarnation))
        ):
            self._order(member.incarnation, StopActor(spec.actor, incarnation, 0.0))  # A8
            return
        if incarnation > actor.incarnation:
            actor.is_acknowledged = False
        actor.incarnation, actor.restarts_left = incarnation, hosted.restarts_left
        actor.host, actor.worker = member.incarnation, member.name
        actor.not_before = None
        self._pending.pop(spec.actor, None)
        self._stocks.drop_claim(actor)
        if actor.ends_for:
            self._order(member.incarnation, StopActor(spec.actor, incarnation, actor.grace_s))
        elif actor.is_acknowledged and not hosted.is_kept and not spec.restarts:
            self._order(member.incarnation, KeepActor(spec.actor, incarnation))
        actor.is_acknowledged |= hosted.is_kept
        if hosted.address and actor.state is not _S.LIVE:
            self._serve(actor, hosted.address, hosted.key)
        elif not hosted.address and actor.state in (_S.PENDING, _S.AWAY):
            actor.enter(_S.STARTING)

    def _is_adoptable(self, spec: ActorSpec, now: float) -> bool:
        """Return whether a process of an unknown actor may be that of an actor that lives."""
        if spec.actor in self._ends or (spec.owner and now >= self._silent_until):
            return False
        return self._takes_name(spec.name, may_live=True)

    def from_worker(self, member: Member, message: Message, now: float) -> list[Send]:
        match message:
            case ActorReady(number, incarnation, address, key):
                actor = self._present(member.incarnation, number, incarnation)
                if actor is not None and actor.state is _S.STARTING:
                    self._serve(actor, address, key)
            case ActorExited(number, incarnation, reason, final, error, has_begun):
                self._release(self._hosts[member.incarnation], incarnation)
                actor = self._present(member.incarnation, number, incarnation)
                if actor is not None:
                    if final:
                        actor.restarts_left = 0
                    elif not has_begun or (member.leaving and actor.spec.restarts):
                        actor.restarts_left += 1
                    self._process_ended(actor, reason, now, error=error)
        return self._settle(now)

    def lost(self, loss: MemberLost, now: float) -> list[Send]:
        """A worker is lost. If it is not known to have ended, its processes may serve on."""
        member = loss.member
        host = self._hosts.pop(member.incarnation, None)
        reason = f"{member.name} was lost: {loss.reason}"
        if loss.exit_code:
            reason += f" ({errors.describe_exit(loss.exit_code)})"
        for incarnation, (number, _) in host.processes.items() if host is not None else ():
            actor = self._present(member.incarnation, number, incarnation)
            if actor is None:
                continue
            if loss.settled:
                self._process_ended(actor, reason, now, within_s=self._ended_within_s)
            else:
                self._go_away(actor, reason, now, member.heard_at + self._lease_s)
        return self._settle(now)

    def tick(self, now: float) -> list[Send]:
        """Do what is due at `deadline`."""
        return self._settle(now) if self.deadline is not None and self.deadline <= now else []

    def retry(self, now: float) -> list[Send]:
        """Place waiting actors, because resources are free again."""
        return self._settle(now)

    # -- status ------------------------------------------------------------------------------------

    def count_at(self, member: Member) -> tuple[int, int]:
        """Return how many processes of actors this worker may have now, and how many at most."""
        host = self._hosts.get(member.incarnation)
        return (0, 0) if host is None else (len(host.processes), host.actors_max)

    def of_worker(self, member: Member) -> list[Actor]:
        return [actor for actor in self.actors.values() if actor.host == member.incarnation]

    def rows(self) -> tuple[ActorRow, ...]:
        return tuple(
            ActorRow(
                number,
                actor.spec.name,
                actor.spec.cls,
                actor.state.name.lower(),
                actor.worker,
                actor.spec.restarts,
                actor.restarts_left,
                EARLIER_MAY_SERVE
                if actor.state is _S.PENDING and actor.not_before is not None
                else actor.reason,
                actor.spec.owner,
                actor.incarnation,
                actor.address,
            )
            for number, actor in self.actors.items()
        )

    # -- states ------------------------------------------------------------------------------------

    def _add(self, actor: Actor) -> Actor:
        spec = actor.spec
        self.actors[spec.actor] = self._pending[spec.actor] = actor
        if spec.name:
            self._names[spec.name] = spec.actor
        self._groups[spec.group] += 1
        return actor

    def _present(self, host: int, number: int, incarnation: int) -> Actor | None:
        actor = self.actors.get(number)
        if actor is not None and (actor.host, actor.incarnation) == (host, incarnation):
            return actor
        return None

    def _release(self, host: Host, incarnation: int) -> None:
        """Forget a process that has ended, and give back what it used."""
        if (process := host.processes.pop(incarnation, None)) is not None:
            self._stocks.release(host.member.name, process[1], lasting=True)

    def _order(self, host: int | None, message: Message) -> None:
        """Send a message to a worker. It is lost if the worker is away, which names its processes
        when it comes back."""
        member = self._hosts[host].member if host in self._hosts else None
        if member is not None and member.peer is not None:
            self._effects.append(Send(member.peer, message))

    def _report(self, actor: Actor, error: bytes = b"") -> None:
        change = actor.change(error)
        peers = dict(self._watchers.get(actor.spec.actor, {}))
        if actor.spec.owner in self._peers:
            peers[self._peers[actor.spec.owner]] = None
        self._effects += [Send(peer, change) for peer in peers]
        if actor.state is _S.ENDED:
            self._remember(change)

    def _serve(self, actor: Actor, address: str, key: bytes) -> None:
        actor.enter(_S.LIVE)
        if not actor.ends_for:
            if actor.reason == actor.waits_for:
                actor.reason = ""
            actor.address, actor.key, actor.waits_for = address, key, ""
            self._report(actor)

    def _set_not_before(self, actor: Actor, time: float) -> None:
        actor.not_before = time
        self._timed[actor.spec.actor] = actor

    def _go_away(self, actor: Actor, reason: str, now: float, ends_itself_at: float) -> None:
        """The process of an actor may serve on without its worker's contact."""
        is_kept = actor.is_acknowledged and not actor.spec.restarts
        self._pending.pop(actor.spec.actor, None)
        actor.reason = reason
        actor.enter(_S.AWAY)
        self._set_not_before(actor, now + ORPHAN_LIMIT_S if is_kept else ends_itself_at)
        self._report(actor)

    def _process_ended(
        self, actor: Actor, reason: str, now: float, *, error: bytes = b"", within_s: float = 0.0
    ) -> None:
        """End the actor, or have it wait for its next process. `within_s`: for so long its process
        may not have ended yet."""
        actor.host, actor.address, actor.key, actor.is_acknowledged = None, "", b"", False
        actor.reason, actor.waits_for = reason, ""
        if actor.ends_for or not actor.restarts_left:
            self._end_now(actor, actor.ends_for or reason, error)
            return
        actor.restarts_left -= 1
        actor.enter(_S.PENDING)
        self._pending[actor.spec.actor] = actor
        if within_s:
            self._set_not_before(actor, now + within_s)
        self._report(actor)

    def _end(self, actor: Actor, reason: str, grace_s: float = 0.0) -> None:
        """End an actor, with its process if it may have one."""
        if not actor.ends_for:
            actor.ends_for = reason or "it was dropped"
            self._free_name(actor)
        actor.grace_s = grace_s
        if actor.state in (_S.STARTING, _S.LIVE):
            self._order(actor.host, StopActor(actor.spec.actor, actor.incarnation, grace_s))
        elif actor.not_before is None:
            self._end_now(actor, actor.ends_for)
        # otherwise a process may serve yet: its worker comes back and stops it, or it ends itself

    def _free_name(self, actor: Actor) -> None:
        if self._names.get(actor.spec.name) == actor.spec.actor:
            del self._names[actor.spec.name]

    def _end_now(self, actor: Actor, reason: str, error: bytes = b"") -> None:
        spec = actor.spec
        actor.enter(_S.ENDED)
        actor.reason = reason
        self._stocks.drop_claim(actor)
        self._report(actor, error)
        for table in (self.actors, self._pending, self._timed, self._watchers):
            table.pop(spec.actor, None)
        self._free_name(actor)
        self._groups[spec.group] -= 1
        if not self._groups[spec.group]:
            del self._groups[spec.group]

    def _settle(self, now: float) -> list[Send]:
        """Do what is due, place what can be placed (A3), answer what can be answered, set
        `deadline`, and return the messages."""
        for owner in [n for n, time in self._absent_owners.items() if time <= now]:
            del self._absent_owners[owner]
            for actor in self._of_owner(owner):
                self._end(actor, MAKER_ENDED)
        for actor in list(self._timed.values()):
            self._pass_times(actor, now)
        self._is_impossible = False
        if self._pending:
            self._place_pending(now)
        self._answer(now)
        times = [*self._absent_owners.values()]
        for actor in self._timed.values():
            times += [t for t in (actor.not_before, actor.claimed_by) if t is not None]
        if self._is_impossible:
            times.append(self._stocks.final_at)
        if now < self._silent_until and (self._searches or self._watchers):
            times.append(self._silent_until)
        self.deadline = min(times, default=None)
        effects, self._effects = self._effects, []
        return effects

    def _pass_times(self, actor: Actor, now: float) -> None:
        if actor.claimed_by is not None and actor.claimed_by <= now:
            actor.claimed_by = None
            self._end(actor, MAKER_ENDED)
        if actor.not_before is not None and actor.not_before <= now:
            actor.not_before = None
            if actor.state is _S.AWAY:
                self._process_ended(actor, actor.reason, now)
            elif actor.ends_for:
                self._end_now(actor, actor.ends_for)
        if actor.not_before is None and actor.claimed_by is None:
            self._timed.pop(actor.spec.actor, None)

    def _answer(self, now: float) -> None:
        """Answer the questions for names, and for actors that may have ended (A7)."""
        is_silent = now < self._silent_until
        searches, self._searches = self._searches, []
        for peer, search in searches:
            actor = self.actors.get(self._names.get(search.name, -1))
            if actor is not None and (actor.incarnation or actor.not_before is None):
                reply = ActorFound(
                    search.request, actor.spec.actor, actor.spec.cls, actor.spec.methods
                )
                self._effects.append(Send(peer, reply))
            elif is_silent:
                self._searches.append((peer, search))
            else:
                self._effects.append(Send(peer, ActorFound(search.request, 0)))
        if is_silent:
            return
        for number in [n for n in self._watchers if n not in self.actors]:
            unknown = ActorChanged(number, _S.ENDED, reason="it has ended")
            change = self._ends.get(number, unknown)
            self._effects += [Send(peer, change) for peer in self._watchers.pop(number)]

    # -- placement ---------------------------------------------------------------------------------

    def _place_pending(self, now: float) -> None:
        if self.waits_for_resources:
            self._stocks.keep_free(now)
        hosts = {
            number: host
            for number, host in self._hosts.items()
            if host.member.peer is not None
            and not host.member.leaving
            and len(host.processes) < host.actors_max
        }
        groups: set[int] = set()
        self.waits_for_resources = False
        for actor in list(self._pending.values()):
            if actor.not_before is not None or actor.ends_for or actor.state is not _S.PENDING:
                continue
            group = [actor]
            if actor.spec.size > 1 and not actor.incarnation:
                if actor.spec.group in groups:
                    continue
                groups.add(actor.spec.group)
                group = [
                    member
                    for member in self._pending.values()
                    if member.spec.group == actor.spec.group and not member.incarnation
                ]
            if self._place(group, hosts):
                continue
            if why := self._impossible(group):
                if now >= self._stocks.final_at:
                    for member in group:
                        self._end_now(member, why)
                    continue
                self._is_impossible = True
            why = why or self._why_pending(group, hosts)
            for member in group:
                if member.request and not self._is_incomplete(member):
                    self.waits_for_resources = True
                    self._claim(member, hosts.values(), now)
                if why != member.waits_for:
                    member.waits_for = member.reason = why
                    self._report(member)

    def _place(self, group: list[Actor], hosts: dict[int, Host]) -> bool:
        """Place these actors, or none of them (A10). Return whether they were placed."""
        if self._is_incomplete(group[0]) or any(a.not_before is not None for a in group):
            return False
        sizes = {number: len(host.processes) for number, host in hosts.items()}
        places: list[tuple[int, Grant]] = []
        for actor in group:
            place = self._reserve(actor, sizes, hosts)
            if place is None:
                for number, grant in places:
                    self._stocks.release(hosts[number].member.name, grant, lasting=True)
                return False
            sizes[place[0]] += 1
            places.append(place)
        for actor, (number, grant) in zip(group, places, strict=True):
            actor.incarnation = self._next_incarnation
            self._next_incarnation += 1
            actor.host, actor.worker = number, hosts[number].member.name
            hosts[number].processes[actor.incarnation] = (actor.spec.actor, grant)
            del self._pending[actor.spec.actor]
            self._stocks.drop_claim(actor)
            actor.enter(_S.STARTING)
            self._start(actor, grant)
        return True

    def _reserve(
        self, actor: Actor, sizes: Mapping[int, int], hosts: Mapping[int, Host]
    ) -> tuple[int, Grant] | None:
        """Reserve the resources of an actor at the worker with the fewest actors that has them and
        room. `sizes` has the number of processes of each worker."""
        for number in sorted(sizes, key=lambda number: (sizes[number], number)):
            host, name = hosts[number], hosts[number].member.name
            if sizes[number] >= host.actors_max or actor.spec.worker not in ("", name):
                continue
            # A worker that is kept for another request may have actors that use nothing.
            grant: Grant | None = Grant(())
            if actor.request:
                grant = self._stocks.reserve(name, actor.request, actor, lasting=True)
            if grant is not None:
                return number, grant
        return None

    def _why_pending(self, group: list[Actor], hosts: Mapping[int, Host]) -> str:
        """Return why these actors, which are placed together, are not placed now. `hosts`: the
        workers that have room. The text has no number that changes with each other actor, because
        each change is reported."""
        actor, spec = group[0], group[0].spec
        if any(member.not_before is not None for member in group):
            return EARLIER_MAY_SERVE
        if self._is_incomplete(actor):
            return f"not all {spec.size} members of its group were made"
        if not self._hosts:
            return "no worker has registered"
        here = [h for h in self._hosts.values() if spec.worker in ("", h.member.name)]
        if not here:
            return f"{spec.worker} has not registered"
        most = sum(host.actors_max for host in here)
        if not most:
            return "the workers have actors_max 0: their slots are threads, or it was set"
        amounts = amounts_text(actor.request)
        if len(group) > 1:
            each = f", with {amounts} each," if amounts else ""
            return (
                f"its group needs {spec.size} places{each} at a time, and too few of the workers' "
                f"{most} (actors_max) are free"
            )
        if amounts and any(host in here for host in hosts.values()):
            return f"the workers have room for it, but too little of {amounts} is free"
        return f"the workers have room for 0 of {most} actors (actors_max)"

    def _impossible(self, group: list[Actor]) -> str:
        """Return why the workers, even with nothing in use, do not have the resources of these
        actors; "" if they have, or if no worker is here that could be asked (A12)."""
        if not any(actor.spec.resources for actor in group):
            return ""
        requests = Counter((actor.request, actor.spec.worker) for actor in group)
        for (request, worker), members in requests.items():
            if request and not self._stocks.can_ever(request, worker):
                return self._stocks.lack_text(request, worker)
            hosts = [h for h in self._hosts.values() if worker in ("", h.member.name)]
            count = 0
            for host in hosts if request and members > 1 else ():
                most = min(host.actors_max, members - count)
                count += self._stocks.count_ever(request, host.member.name, most)
            if request and hosts and 1 < members > count:
                return (
                    f"{members} members of its group need {amounts_text(request)} each, and the "
                    f"workers can have {count} of them at a time ({self._stocks.text()})"
                )
        return ""

    def _is_incomplete(self, actor: Actor) -> bool:
        """Return whether the group of an actor that was never placed lacks members."""
        return not actor.incarnation and self._groups[actor.spec.group] < actor.spec.size

    def _claim(self, actor: Actor, hosts: Iterable[Host], now: float) -> None:
        """Have a worker be kept for an actor that waits for nothing but resources. It must have
        room for the actor: otherwise it would be kept in vain, and so it would be for a member of a
        group."""
        names = [
            host.member.name
            for host in hosts
            if actor.spec.worker in ("", host.member.name)
            and (actor.spec.size == 1 or actor.incarnation)
            and self._stocks.can_ever(actor.request, host.member.name)
        ]
        if actor.kept_worker not in names:
            self._stocks.drop_claim(actor)
            actor.kept_worker = names[0] if names else ""
        if actor.kept_worker:
            self._stocks.claim(actor, actor.request, now, actor.kept_worker)

    def _start(self, actor: Actor, grant: Grant) -> None:
        order = StartActor(actor.spec, actor.incarnation, actor.restarts_left, grant.devices)
        self._order(actor.host, order)

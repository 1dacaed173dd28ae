"""The dispatcher as one machine, which combines membership and dispatch. No I/O.

Broker passes each message to the part that decides about it: membership (membership_and_leases.py)
or dispatch (machine.py). A peer that has not registered as a worker or coordinator may only
register or say Goodbye. Broker refuses every other message of such a peer.

Not here: the decisions of these two parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from zmqdist import errors
from zmqdist.events import Heard, Peer, PeerExpelled, PeerGone, ProcessExited, Send, Ticked
from zmqdist.messages import (
    Beat,
    CancelWork,
    Define,
    Done,
    EndRound,
    Forget,
    Goodbye,
    LeasesReturned,
    Leave,
    Message,
    Refused,
    Register,
    RegisterCoordinator,
    ResultReceived,
    SlotsLost,
    Submit,
)
from zmqdist.scheduling.dispatcher.machine import Dispatch
from zmqdist.scheduling.dispatcher.membership_and_leases import (
    Change,
    Member,
    MemberAway,
    MemberBack,
    MemberJoined,
    MemberLeaving,
    MemberLost,
    Membership,
)
from zmqdist.scheduling.dispatcher.records import RUNNING, LeaseState, WorkerHoldings
from zmqdist.scheduling.shared.broker_settings import BrokerSettings

Event: TypeAlias = Heard | PeerExpelled | PeerGone | ProcessExited | Ticked


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker in a snapshot.

    Attributes:
      state: "alive", "away" (disconnected, within its grace) or "leaving".
      leases, running: the number of work items that the worker has, and the number of those that
        have begun as far as the dispatcher knows.
      window: how many leases the worker may have.
      done: the number of the worker's leases that ended with an outcome.
      rate: work items that the worker ends in a second while it has work; 0 while unknown.
      joined_at, heard_at: when the worker registered, and when its last message arrived.
      slot_deaths: the number of the worker's slot processes that crashed.
      kept: the number of results that the worker keeps for coordinators.
      pinned: the number of work items that wait for this worker alone.
    """

    name: str
    state: str
    slots: int
    threads_per_slot: int
    pid: int
    host: str
    address: str
    leases: int
    running: int
    window: int
    done: int
    rate: float
    joined_at: float
    heard_at: float
    slot_deaths: int
    kept: int
    pinned: int


@dataclass(frozen=True, slots=True)
class CoordinatorRow:
    """One coordinator in a snapshot.

    Attributes:
      coordinator: the coordinator's number in the cluster.
      queued, out: the number of its work items that wait, and the number of those that workers
        have.
      held: the number of its bulk results that workers hold.
      submitted, finished: the number of work items that it has submitted over this connection, and
        the number of those that have ended (without those that were cancelled before they began).
      functions: the number of functions that it has defined and not dropped.
    """

    coordinator: int
    queued: int
    out: int
    held: int
    submitted: int
    finished: int
    functions: int


@dataclass(frozen=True, slots=True)
class BrokerSnapshot:
    """The state of a dispatcher's scheduling, as `zmqdist status` and `zmqdist top` show it.

    Attributes:
      queued, queued_pinned: the number of work items that wait, and the number of those that are
        pinned to a worker.
      losses: the last losses of workers: (name, reason, exit code, when).
      last_slot_death: the last crash of a slot process: (the worker's name, exit code, when); None
        if no slot process has crashed.
    """

    workers: tuple[WorkerRow, ...]
    coordinators: tuple[CoordinatorRow, ...]
    queued: int
    queued_pinned: int
    losses_count: int
    losses: tuple[tuple[str, str, int | None, float], ...]
    slot_deaths: int
    last_slot_death: tuple[str, int | None, float] | None


class Broker:
    """Membership and dispatch as one machine; the module's docstring has the rules."""

    def __init__(self, settings: BrokerSettings, *, first_lease: int = 1) -> None:
        self.settings = settings
        self.membership = Membership(
            settings.lease_s, settings.reconnect_grace_s, settings.cancel_grace_s
        )
        self.dispatch = Dispatch(
            attempts_max=settings.attempts_max, lease_s=settings.lease_s, first_lease=first_lease
        )
        self.changes: list[MemberJoined | MemberLost] = []
        """The members that have joined and the members that were lost, in order, until the runtime
        takes them for the data service."""

    @property
    def deadline(self) -> float | None:
        """The time at which the runtime must next call `handle(Ticked(), now)`; None means
        never.
        """
        first, second = self.membership.deadline, self.dispatch.deadline
        if first is None or second is None:
            return second if first is None else first
        return min(first, second)

    def handle(self, event: Event, now: float, *, watched: bool = True) -> list[Send]:
        """Apply one event and return the messages to send, in order. No message of a peer makes
        this method raise.

        A message that its sender may not send changes nothing, and this method returns a Refused to
        the sender.

        Args:
          now: monotonic seconds, never less than for an earlier event.
          watched: for a Register, whether the runtime will notice the end of the connection over
            which the Register arrived.
        """
        effects: list[Send]
        match event:
            case Heard():
                peer, message = event.peer, event.message
                member = self.membership.note_message(peer, now)
                if member is not None:
                    effects = self._from_worker(member, peer, message, now)
                elif peer in self.dispatch.sessions:
                    effects = self._from_coordinator(peer, message, now)
                else:
                    effects = self._from_newcomer(peer, message, now, watched)
            case PeerGone(peer) | PeerExpelled(peer):
                effects = self.dispatch.coordinator_gone(peer, now)
                effects += self._apply(self.membership.handle(event, now), now)
            case ProcessExited():
                effects = self._apply(self.membership.handle(event, now), now)
            case Ticked():
                effects = self._apply(self.membership.handle(event, now), now)
                effects += self.dispatch.settle(now)
        return effects + self.dispatch.assign(now)

    def leave(self, job: str, index: int, grace_s: float, now: float) -> list[Send] | None:
        """Have a worker stop in good order within `grace_s`. Return the messages to send, or None
        if the worker is not registered."""
        member = self.membership.members.get((job, index))
        if member is None:
            return None
        return self._apply(self.membership.leave(member, grace_s), now) + self.dispatch.assign(now)

    def holdings(self, job: str, index: int) -> WorkerHoldings:
        """Return the numbers of this worker's kept values and work items. Raises KeyError if the
        worker is not registered."""
        member = self.membership.members[job, index]
        load = self.dispatch.loads[member]
        holdings = WorkerHoldings(member.name)
        for lease in load.held.values():
            (holdings.kept if lease.state is LeaseState.KEPT else holdings.others).append(
                (lease.session.peer, lease.work)
            )
        for lease in load.leases.values():
            if lease.state in RUNNING:
                holdings.running.append((lease.session.peer, lease.work))
            elif lease.band.session_queue.worker:
                holdings.pinned.append((lease.session.peer, lease.work))
            else:
                holdings.others.append((lease.session.peer, lease.work))
        for session, item in self.dispatch.placement.waiting_for(member.name):
            holdings.pinned.append((session.peer, item[0]))
        return holdings

    def holder(self, number: int) -> Peer | None:
        """Return the connection of the coordinator with this number or the worker with this
        incarnation; None if it is not connected."""
        for peer, session in self.dispatch.sessions.items():
            if session.coordinator == number:
                return peer
        return next(
            (m.peer for m in self.membership.members.values() if m.incarnation == number), None
        )

    def snapshot(self) -> BrokerSnapshot:
        """Return an immutable record of the present state of the scheduling."""
        return BrokerSnapshot(
            workers=tuple(
                self._worker_row(member) for _, member in sorted(self.membership.members.items())
            ),
            coordinators=tuple(
                CoordinatorRow(
                    session.coordinator,
                    sum(part.queued for part in session.with_detached),
                    sum(part.outstanding for part in session.with_detached),
                    sum(len(part.held) for part in session.with_detached),
                    sum(part.submitted for part in session.with_detached),
                    sum(part.finished for part in session.with_detached),
                    len(session.functions),
                )
                for session in self.dispatch.sessions.values()
            ),
            queued=self.dispatch.queued,
            queued_pinned=self.dispatch.placement.queued_pinned,
            losses_count=self.membership.losses_count,
            losses=tuple(
                (loss.name, loss.reason, loss.exit_code, loss.at) for loss in self.membership.losses
            ),
            slot_deaths=self.dispatch.slot_deaths,
            last_slot_death=self.dispatch.last_slot_death,
        )

    def _worker_row(self, member: Member) -> WorkerRow:
        load = self.dispatch.loads[member]
        state = "away" if member.peer is None else "leaving" if member.leaving else "alive"
        return WorkerRow(
            name=member.name,
            state=state,
            slots=member.slots,
            threads_per_slot=member.threads_per_slot,
            pid=member.pid,
            host=member.host,
            address=member.address,
            leases=len(load.leases),
            running=sum(lease.state in RUNNING for lease in load.leases.values()),
            window=load.window.limit,
            done=load.done,
            rate=load.window.rate,
            joined_at=member.joined_at,
            heard_at=member.heard_at,
            slot_deaths=load.slot_deaths,
            kept=sum(lease.state is LeaseState.KEPT for lease in load.held.values()),
            pinned=sum(1 for _ in self.dispatch.placement.waiting_for(member.name)),
        )

    def _from_worker(self, member: Member, peer: Peer, message: Message, now: float) -> list[Send]:
        match message:
            case Done():
                return self.dispatch.done(member, message, now)
            case LeasesReturned(leases):
                return self.dispatch.leases_returned(member, leases, now)
            case SlotsLost():
                return self.dispatch.slots_lost(member, message, now)
            case Beat():
                return [Send(peer, message)]
            case Register() | Leave() | Goodbye():
                return self._apply(self.membership.handle(Heard(peer, message), now), now)
            case _:
                return [_refuse(peer, "a worker", message)]

    def _from_coordinator(self, peer: Peer, message: Message, now: float) -> list[Send]:
        session = self.dispatch.sessions[peer]
        match message:
            case Submit():
                return self.dispatch.submit(session, message, now)
            case Define(functions):
                self.dispatch.define(session, functions)
                return []
            case Forget(_, functions, everywhere):
                return self.dispatch.forget(session, functions, everywhere=everywhere)
            case ResultReceived():
                return self.dispatch.result_received(session, message)
            case CancelWork():
                return self.dispatch.cancel_work(session, message)
            case EndRound():
                return self.dispatch.end_round(session, message, now)
            case RegisterCoordinator():
                return self.dispatch.register_coordinator(peer, message, now)
            case Goodbye():
                return self.dispatch.coordinator_gone(peer, now, left=True)
            case _:
                return [_refuse(peer, "a coordinator", message)]

    def _from_newcomer(self, peer: Peer, message: Message, now: float, watched: bool) -> list[Send]:
        match message:
            case Register():
                return self._apply(
                    self.membership.handle(Heard(peer, message), now, watched=watched), now
                )
            case RegisterCoordinator():
                return self.dispatch.register_coordinator(peer, message, now)
            case Goodbye():
                return []
            case _:
                return [
                    _refuse(
                        peer, "a peer that has not registered as a worker or coordinator", message
                    )
                ]

    def _apply(self, changes: list[Change | Send], now: float) -> list[Send]:
        effects: list[Send] = []
        for change in changes:
            match change:
                case Send():
                    effects.append(change)
                case MemberJoined(member, register):
                    self.changes.append(change)
                    effects += self.dispatch.joined(member, register)
                case MemberBack(member, register):
                    effects += self.dispatch.reconnected(member, register)
                case MemberAway(member) | MemberLeaving(member):
                    self.dispatch.placement.reindex(self.dispatch.loads[member])
                case MemberLost():
                    self.changes.append(change)
                    effects += self.dispatch.lost(change, now)
        return effects


def _refuse(peer: Peer, sender: str, message: Message) -> Send:
    return Send(
        peer, Refused(errors.FAILED_PRECONDITION, f"{type(message).__name__} from {sender}")
    )

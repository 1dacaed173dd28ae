"""Which workers are members of the cluster, which of them are alive, and which are lost.

Theory of operation
    A worker is known as (job, index); each start of its process is an incarnation. While its
    connection is open the worker is alive, even if its Python code is blocked, because ZeroMQ's
    heartbeats run outside the GIL. When the connection ends, the worker has `reconnect_grace_s` to
    reconnect as the same incarnation. The worker is lost after that time, when it says Goodbye, or
    when the runtime reports that its process has ended. Where the operating system does not report
    the end of a connection (`watched=False`), the worker is lost after `lease_s` without a message.

    A worker that is expelled because its key was revoked is lost at once. Its slots may run until
    its lease ends.

    A lost incarnation never returns. If it registers again, it joins as a new member, and the
    dispatcher aborts the functions that it still runs.

Promises, checked by tests/scheduling/dispatcher/test_membership_and_leases.py and tests/sim
    P1  a (job, index) has at most one member at any time
    P2  every MemberJoined is followed by at most one MemberLost for its member, and by exactly one
        if the member's process ends
    P3  a member whose connection has ended is lost at most `reconnect_grace_s` later, unless the
        same incarnation reconnects
    P4  a watched member with an open connection is never lost, however long it is silent
    P5  `MemberLost.settled` says whether the member's process has ended or said Goodbye; if not,
        its slots may run until its lease ends

Not here: what happens to the member's work (machine.py), and how the end of a process is noticed
(the runtimes).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from zmqdist import errors
from zmqdist.events import Heard, Peer, PeerExpelled, PeerGone, ProcessExited, Send, Ticked
from zmqdist.limits import TRACEBACK_CHARS_MAX, WORKERS_MAX
from zmqdist.messages import SAID_GOODBYE, Beat, Goodbye, Leave, Refused, Register, Registered
from zmqdist.scheduling.shared.quantities import Quantities
from zmqdist.scheduling.shared.registrations import worker_problem

BEAT_S_MIN = 1.0
BEAT_S_PER_WORKER = 0.01
"""Seconds that each worker of the cluster adds to the interval between the heartbeats of a worker,
so that all workers together send about 100 heartbeats a second. In a large cluster they send more,
because the interval is at most a quarter of a lease."""
IDLE_BEAT_S_PER_WORKER = 0.2
"""The same for a worker that has no work, result or actor, if the runtime will notice the end of its
connection. So all idle workers together send about 5 heartbeats a second, which show the program
that they answer."""

LOSSES_KEPT = 100
"""The number of losses that the history holds; older ones are only counted."""


@dataclass(slots=True, eq=False)
class Member:
    """One worker of the cluster.

    Attributes:
      joined_at, heard_at: when the worker first registered; when its last message arrived.
      watched: whether the runtime will notice the end of the worker's connection.
      peer: the worker's connection; None while the worker is away.
      away_until: the end of the worker's grace, while it is away.
      leaving: whether the worker gets no more work, because it was told to leave or has said that
        it leaves.
      leave_grace_s: the grace of a Leave that the worker has not confirmed yet. The Leave is sent
        again if the worker reconnects.
    """

    job: str
    index: int
    incarnation: int
    slots: int
    pid: int
    host: str
    joined_at: float
    heard_at: float
    watched: bool
    peer: Peer | None
    threads_per_slot: int = 0
    nested_slots_max: int = 0
    address: str = ""
    """The address at which other processes reach the worker's own server."""
    resources: Quantities = ()
    """What the worker has."""
    away_until: float = 0.0
    leaving: bool = False
    leave_grace_s: float | None = None

    @property
    def name(self) -> str:
        return f"{self.job}:{self.index}"


@dataclass(frozen=True, slots=True)
class MemberJoined:
    member: Member
    register: Register


@dataclass(frozen=True, slots=True)
class MemberLost:
    """A member is lost. `settled` says whether it has ended or said Goodbye; if not, its slots may
    run until its lease ends (P5)."""

    member: Member
    reason: str
    exit_code: int | None
    log: str
    settled: bool


Event: TypeAlias = Heard | PeerExpelled | PeerGone | ProcessExited | Ticked


class MemberWork(Protocol):
    """The dispatch machine (machine.py), as the membership calls it for each change of the members.
    The methods return the messages to send."""

    def joined(self, member: Member, register: Register) -> list[Send]: ...

    def reconnected(self, member: Member, register: Register) -> list[Send]: ...

    def restricted(self, member: Member) -> None: ...

    def lost(self, loss: MemberLost, now: float) -> list[Send]: ...


@dataclass(slots=True)
class LossRecord:
    """One lost worker in the history that `zmqdist status` shows. `at` is the time of the loss by
    the machine's clock, `log` has the last lines of its output if its parent has reported them."""

    name: str
    reason: str
    exit_code: int | None
    at: float
    log: str = ""


@dataclass(slots=True)
class Membership:
    """The members of a cluster; the module's docstring has the rules.

    `handle` applies an event, calls the dispatch machine for each change of the members, and returns
    the messages to send, in order.

    Attributes:
      members: the members that are not lost, by (job, index).
      by_peer: the members that are connected, by connection.
      changes: the members that have joined and the members that were lost, in order, until the
        runtime takes them for the part that the dispatcher hosts.
      losses, losses_count: the last losses, and the number of all losses. A worker that stopped in
        good order is not a loss.
    """

    lease_s: float
    reconnect_grace_s: float
    cancel_grace_s: float
    dispatch: MemberWork
    changes: list[MemberJoined | MemberLost] = field(default_factory=list)
    members: dict[tuple[str, int], Member] = field(default_factory=dict)
    by_peer: dict[Peer, Member] = field(default_factory=dict)
    losses: list[LossRecord] = field(default_factory=list)
    losses_count: int = 0
    _away: dict[int, Member] = field(default_factory=dict)
    _by_incarnation: dict[tuple[str, int], Member] = field(default_factory=dict)
    """The members that are not lost, by (job, incarnation)."""
    _lowest: dict[str, int] = field(default_factory=dict)
    """For each job an index below which no index is free, so that the search for a free index need
    not begin at 0."""
    _unwatched: set[int] = field(default_factory=set)

    @property
    def deadline(self) -> float | None:
        """The time at which the runtime must next call `handle(Ticked(), now)`; None means
        never.
        """
        times = [member.away_until for member in self._away.values()]
        if self._unwatched:
            times += [
                m.heard_at + self.lease_s
                for m in self.members.values()
                if not m.watched and m.peer is not None
            ]
        return min(times, default=None)

    def note_message(self, peer: Peer, now: float) -> Member | None:
        """Record that a message of this peer has arrived, so the peer is alive. Return its member,
        or None if the peer is not a member."""
        member = self.by_peer.get(peer)
        if member is not None:
            member.heard_at = now
        return member

    def handle(self, event: Event, now: float, *, watched: bool = True) -> list[Send]:
        match event:
            case Heard(peer, Register() as register):
                return self._register(peer, register, now, watched)
            case Heard(peer, Goodbye(reason)):
                member = self.by_peer.get(peer)
                if member is None:
                    return []
                return self._lose(member, reason or SAID_GOODBYE, 0, "", now, settled=True)
            case Heard(peer, Leave()):
                member = self.by_peer.get(peer)
                if member is None:
                    return []
                member.leave_grace_s = None
                if member.leaving:
                    return []
                member.leaving = True
                self.dispatch.restricted(member)
                return []
            case Heard():
                return []
            case PeerGone(peer):
                return self._note_disconnect(peer, now)
            case PeerExpelled(peer, reason):
                member = self.by_peer.get(peer)
                return (
                    []
                    if member is None
                    else self._lose(member, reason, None, "", now, settled=False)
                )
            case ProcessExited():
                return self._process_exited(event, now)
            case Ticked():
                return self._expire(now)

    def leave(self, member: Member, grace_s: float) -> list[Send]:
        """Tell a member to stop in good order within `grace_s`. This has no effect if the member is
        leaving already."""
        if member.leaving:
            return []
        member.leaving = True
        member.leave_grace_s = grace_s
        self.dispatch.restricted(member)
        return [] if member.peer is None else [Send(member.peer, Leave(grace_s))]

    def _register(self, peer: Peer, register: Register, now: float, watched: bool) -> list[Send]:
        refusal = self._refusal(peer, register)
        if refusal is not None:
            return [Send(peer, refusal)]
        effects: list[Send] = []
        old = self._find(register)
        if old is not None and old.incarnation == register.incarnation:
            if old.peer is not None:
                self.by_peer.pop(old.peer, None)
            self._away.pop(id(old), None)
            old.peer, old.heard_at = peer, now
            self.by_peer[peer] = old
            effects.append(Send(peer, self._registered(old, register)))
            effects += self.dispatch.reconnected(old, register)
            if old.leave_grace_s is not None:
                # repeat the Leave, which may have been lost with the old connection
                effects.append(Send(peer, Leave(old.leave_grace_s)))
            return effects
        if old is not None:
            effects += self._lose(
                old, "another process registered in its place", None, "", now, settled=False
            )
        index = register.index if register.index >= 0 else self._lowest_free(register.job)
        member = Member(
            job=register.job,
            index=index,
            incarnation=register.incarnation,
            slots=register.slots,
            pid=register.pid,
            host=register.host,
            joined_at=now,
            heard_at=now,
            watched=watched,
            peer=peer,
            threads_per_slot=register.threads_per_slot,
            nested_slots_max=register.nested_slots_max,
            address=register.address,
            resources=register.resources,
        )
        self.members[register.job, index] = self._by_incarnation[
            register.job, register.incarnation
        ] = member
        self.by_peer[peer] = member
        if not watched:
            self._unwatched.add(id(member))
        self.changes.append(MemberJoined(member, register))
        effects.append(Send(peer, self._registered(member, register)))
        return effects + self.dispatch.joined(member, register)

    def _refusal(self, peer: Peer, register: Register) -> Refused | None:
        if problem := worker_problem(register):
            return Refused(errors.INVALID_ARGUMENT, problem, final=True)
        old = self._find(register)
        if peer in self.by_peer and (
            self.by_peer[peer] is not old or old.incarnation != register.incarnation
        ):
            return Refused(
                errors.FAILED_PRECONDITION, "this connection has registered as another worker"
            )
        if old is None and len(self.members) >= WORKERS_MAX:
            return Refused(
                errors.RESOURCE_EXHAUSTED,
                f"this dispatcher has {WORKERS_MAX} workers and takes no more",
            )
        # A worker that was configured with its index replaces a member that is away under this
        # index. If a dispatcher chose the index for the worker, the member with this index may be a
        # different worker, so it is not replaced.
        if (
            old is not None
            and old.incarnation != register.incarnation
            and not (old.peer is None and register.named)
        ):
            return Refused(
                errors.ALREADY_EXISTS,
                f"{old.name} is registered already (pid {old.pid} on {old.host}): stop it first, "
                f"or register under another index",
            )
        return None

    def _find(self, register: Register) -> Member | None:
        """Return the member with the job and index of a Register. If the Register has no index,
        find the member by job and incarnation."""
        if register.index >= 0:
            return self.members.get((register.job, register.index))
        return self._by_incarnation.get((register.job, register.incarnation))

    def _registered(self, member: Member, register: Register) -> Registered:
        beat_s = min(max(BEAT_S_MIN, BEAT_S_PER_WORKER * len(self.members)), self.lease_s / 4)
        return Registered(member.index, beat_s, self.lease_s, self.cancel_grace_s, register.serial)

    def echo(self, member: Member) -> Beat:
        """Return the reply to a Beat of a member."""
        return Beat(IDLE_BEAT_S_PER_WORKER * len(self.members) if member.watched else 0.0)

    def _lowest_free(self, job: str) -> int:
        index = self._lowest.get(job, 0)
        while (job, index) in self.members:
            index += 1
        self._lowest[job] = index
        return index

    def _note_disconnect(self, peer: Peer, now: float) -> list[Send]:
        member = self.by_peer.pop(peer, None)
        # The worker may have registered over a newer connection before this one ended.
        if member is None or member.peer != peer:
            return []
        member.peer = None
        member.away_until = now + self.reconnect_grace_s
        self._away[id(member)] = member
        self.dispatch.restricted(member)
        return []

    def _process_exited(self, event: ProcessExited, now: float) -> list[Send]:
        member = (
            self.by_peer.get(event.peer)
            if event.peer is not None
            else self.members.get((event.job, event.index))
        )
        # The connection of a process often ends a little before the process.
        if event.peer is not None and member is None:
            member = next((m for m in self._away.values() if m.pid == event.pid), None)
        if member is None or member.pid != event.pid:
            self._add_exit_code(event)
            return []
        return self._lose(
            member, "its process ended", event.exit_code, event.log, now, settled=True
        )

    def _add_exit_code(self, event: ProcessExited) -> None:
        """Add the exit code to the record of a worker that was lost before the runtime saw its
        process end."""
        name = f"{event.job}:{event.index}"
        for record in reversed(self.losses):
            if record.name == name and record.exit_code is None:
                record.exit_code = event.exit_code
                record.log = event.log[-TRACEBACK_CHARS_MAX:]
                return

    def _expire(self, now: float) -> list[Send]:
        effects: list[Send] = []
        for member in [m for m in self._away.values() if m.away_until <= now]:
            reason = "its connection ended and it did not come back"
            effects += self._lose(member, reason, None, "", now, settled=False)
        if self._unwatched:
            members = self.members.values()
            silent = [m for m in members if not m.watched and m.heard_at + self.lease_s <= now]
            for member in silent:
                effects += self._lose(
                    member, "it was silent for a lease", None, "", now, settled=False
                )
        return effects

    def _lose(
        self,
        member: Member,
        reason: str,
        exit_code: int | None,
        log: str,
        now: float,
        *,
        settled: bool,
    ) -> list[Send]:
        del self.members[member.job, member.index]
        if self._by_incarnation.get((member.job, member.incarnation)) is member:
            del self._by_incarnation[member.job, member.incarnation]
        if member.job in self._lowest:
            self._lowest[member.job] = min(self._lowest[member.job], member.index)
        if member.peer is not None:
            self.by_peer.pop(member.peer, None)
            member.peer = None
        self._away.pop(id(member), None)
        self._unwatched.discard(id(member))
        # A worker that stopped in good order is no loss.
        if reason != SAID_GOODBYE:
            self.losses_count += 1
            self.losses.append(
                LossRecord(member.name, reason, exit_code, now, log[-TRACEBACK_CHARS_MAX:])
            )
            del self.losses[:-LOSSES_KEPT]
        loss = MemberLost(member, reason, exit_code, log, settled)
        self.changes.append(loss)
        return self.dispatch.lost(loss, now)

"""Who is in the cluster: which worker is which, who is alive, who is lost.

Theory of operation
    A worker is known as (job, index). One life of its process is an incarnation. Its connection is its life: while it is
    open (ZeroMQ's own heartbeats see to that, outside the GIL) the worker is alive, whatever its Python code does. When the
    connection goes, the worker has `reconnect_grace_s` to be back under the same incarnation; after that, or when it said
    Goodbye, or when somebody saw its process end, it is lost. Where the system does not tell when a connection ends
    (`watched=False`), the lease decides: `lease_s` without a message.

    Lost is for good: a lost incarnation that comes back joins as a new member, and what it still runs is cut off.

Promises, checked by tests/machines/test_membership.py and tests/sim
    P1  a (job, index) has at most one member at any time
    P2  every MemberJoined is followed by exactly one MemberLost for the same member, or by nothing while it lives
    P3  a member whose connection ended is lost at most `reconnect_grace_s` later unless the same incarnation is back
    P4  a watched member with an open connection is never lost, however long it is silent
    P5  `settled` says of a lost member whether its process is known to have ended; else its slots may run until its lease ends

Not here: what becomes of its work (dispatch.py), and how a process is seen to end (the runtimes).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from zmqdist import errors
from zmqdist.events import Heard, Peer, PeerGone, ProcessExited, Send, Ticked
from zmqdist.limits import WORKERS_MAX
from zmqdist.messages import Goodbye, Leave, Refused, Register, Registered

SAID_GOODBYE = "said goodbye"
"""Why a member is no more that left in good order."""

BEAT_S_MIN = 1.0
BEAT_S_PER_WORKER = 0.01
"""With 1,000 workers one beat in 10 s each: 100 messages a second, whatever their number."""


@dataclass(slots=True, eq=False)
class Member:
    """One worker. The dispatch machine hangs its own state on `work`."""

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
    address: str = ""
    """Of its own server, as it tells the others."""
    away_until: float = 0.0
    leaving: bool = False
    leave_grace_s: float | None = None
    """What it was told, until it says that it leaves."""

    @property
    def name(self) -> str:
        return f"{self.job}:{self.index}"


@dataclass(frozen=True, slots=True)
class MemberJoined:
    member: Member
    register: Register


@dataclass(frozen=True, slots=True)
class MemberBack:
    """The same incarnation, over a new connection: `register.held` says what it still has."""

    member: Member
    register: Register


@dataclass(frozen=True, slots=True)
class MemberAway:
    """Its connection is gone; it may be back."""

    member: Member


@dataclass(frozen=True, slots=True)
class MemberLost:
    """It will not be back. `settled`: its process is known to have ended, so nothing of it can be executing."""

    member: Member
    reason: str
    exit_code: int | None
    log: str
    settled: bool


@dataclass(frozen=True, slots=True)
class MemberLeaving:
    """It was told to leave: no more work for it."""

    member: Member


Change: TypeAlias = MemberJoined | MemberBack | MemberAway | MemberLost | MemberLeaving
Event: TypeAlias = Heard | PeerGone | ProcessExited | Ticked


@dataclass(slots=True)
class LossRecord:
    """One line of the history that `status` shows."""

    name: str
    reason: str
    exit_code: int | None
    at: float


@dataclass(slots=True)
class Membership:
    """See the module's docstring. `handle` returns changes for the dispatch machine and messages to send, in order."""

    lease_s: float
    reconnect_grace_s: float
    cancel_grace_s: float
    members: dict[tuple[str, int], Member] = field(default_factory=dict)
    by_peer: dict[Peer, Member] = field(default_factory=dict)
    losses: list[LossRecord] = field(default_factory=list)
    losses_count: int = 0
    _away: dict[int, Member] = field(default_factory=dict)
    _lives: dict[tuple[str, int], Member] = field(default_factory=dict)
    """By (job, incarnation)."""
    _lowest: dict[str, int] = field(default_factory=dict)
    """Of each job an index below which none is free."""
    _unwatched: set[int] = field(default_factory=set)

    @property
    def deadline(self) -> float | None:
        """When `handle(Ticked(), now)` is next worth calling; None for never."""
        times = [member.away_until for member in self._away.values()]
        if self._unwatched:
            times += [m.heard_at + self.lease_s for m in self.members.values() if not m.watched and m.peer is not None]
        return min(times, default=None)

    def heard(self, peer: Peer, now: float) -> Member | None:
        """Any message is life. Returns who sent it, None for a peer that is not a worker."""
        member = self.by_peer.get(peer)
        if member is not None:
            member.heard_at = now
        return member

    def handle(self, event: Event, now: float, *, watched: bool = True) -> list[Change | Send]:
        match event:
            case Heard(peer, Register() as register):
                return self._register(peer, register, now, watched)
            case Heard(peer, Goodbye(reason)):
                member = self.by_peer.get(peer)
                return [] if member is None else [self._lose(member, reason or SAID_GOODBYE, 0, "", now, settled=True)]
            case Heard(peer, Leave()):
                member = self.by_peer.get(peer)
                if member is None:
                    return []
                member.leave_grace_s = None
                if member.leaving:
                    return []
                member.leaving = True
                return [MemberLeaving(member)]
            case Heard():
                return []
            case PeerGone(peer):
                return self._gone(peer, now)
            case ProcessExited():
                return self._exited(event, now)
            case Ticked():
                return self._expire(now)

    def leave(self, member: Member, grace_s: float) -> list[Change | Send]:
        """Tell a member to leave in good order."""
        if member.leaving:
            return []
        member.leaving = True
        member.leave_grace_s = grace_s
        changes: list[Change | Send] = [MemberLeaving(member)]
        if member.peer is not None:
            changes.append(Send(member.peer, Leave(grace_s)))
        return changes

    def _register(self, peer: Peer, register: Register, now: float, watched: bool) -> list[Change | Send]:
        problem = self._problem(peer, register)
        if problem is not None:
            return [Send(peer, problem)]
        changes: list[Change | Send] = []
        old = self._find(register)
        if old is not None and old.incarnation == register.incarnation:
            if old.peer is not None:
                self.by_peer.pop(old.peer, None)
            self._away.pop(id(old), None)
            old.peer, old.heard_at = peer, now
            self.by_peer[peer] = old
            changes = [Send(peer, self._welcome(old, register)), MemberBack(old, register)]
            if old.leave_grace_s is not None:  # it may not have heard that it shall
                changes.append(Send(peer, Leave(old.leave_grace_s)))
            return changes
        if old is not None:
            changes.append(self._lose(old, "its successor registered", None, "", now, settled=False))
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
            address=register.address,
        )
        self.members[register.job, index] = self._lives[register.job, register.incarnation] = member
        self.by_peer[peer] = member
        if not watched:
            self._unwatched.add(id(member))
        return [*changes, Send(peer, self._welcome(member, register)), MemberJoined(member, register)]

    def _problem(self, peer: Peer, register: Register) -> Refused | None:
        if register.slots < 1:
            return Refused(errors.INVALID_ARGUMENT, f"a worker offered {register.slots} slots, at least 1 is wanted")
        old = self._find(register)
        if peer in self.by_peer and (self.by_peer[peer] is not old or old.incarnation != register.incarnation):
            return Refused(errors.FAILED_PRECONDITION, "this connection has registered as another worker")
        if old is None and len(self.members) >= WORKERS_MAX:
            return Refused(errors.RESOURCE_EXHAUSTED, f"this dispatcher has {WORKERS_MAX} workers and takes no more")
        # A worker that names its index succeeds the one that is away under it; one that was given it has met another's by chance.
        if old is not None and old.incarnation != register.incarnation and not (old.peer is None and register.named):
            return Refused(
                errors.ALREADY_EXISTS,
                f"{old.name} is here already (pid {old.pid} on {old.host}): stop it first, or register under another index",
            )
        return None

    def _find(self, register: Register) -> Member | None:
        """The member that this registration is about: by its incarnation, else by the name it asks for."""
        if register.index >= 0:
            return self.members.get((register.job, register.index))
        return self._lives.get((register.job, register.incarnation))

    def _welcome(self, member: Member, register: Register) -> Registered:
        beat_s = min(max(BEAT_S_MIN, BEAT_S_PER_WORKER * len(self.members)), self.lease_s / 4)
        return Registered(member.index, beat_s, self.lease_s, self.cancel_grace_s, register.serial)

    def _lowest_free(self, job: str) -> int:
        index = self._lowest.get(job, 0)
        while (job, index) in self.members:
            index += 1
        self._lowest[job] = index
        return index

    def _gone(self, peer: Peer, now: float) -> list[Change | Send]:
        member = self.by_peer.pop(peer, None)
        if member is None or member.peer != peer:
            return []
        member.peer = None
        member.away_until = now + self.reconnect_grace_s
        self._away[id(member)] = member
        return [MemberAway(member)]

    def _exited(self, event: ProcessExited, now: float) -> list[Change | Send]:
        member = self.by_peer.get(event.peer) if event.peer is not None else self.members.get((event.job, event.index))
        if event.peer is not None and member is None:
            member = next((m for m in self._away.values() if m.pid == event.pid), None)
        if member is None or member.pid != event.pid:
            self._amend(event)
            return []
        return [self._lose(member, "its process ended", event.exit_code, event.log, now, settled=True)]

    def _amend(self, event: ProcessExited) -> None:
        """The exit code of a worker that is known to be lost already: the history should have it."""
        name = f"{event.job}:{event.index}"
        for record in reversed(self.losses):
            if record.name == name and record.exit_code is None:
                record.exit_code = event.exit_code
                return

    def _expire(self, now: float) -> list[Change | Send]:
        late = [m for m in self._away.values() if m.away_until <= now]
        changes: list[Change | Send] = [
            self._lose(m, "its connection ended and it did not come back", None, "", now, settled=False) for m in late
        ]
        if self._unwatched:
            silent = [m for m in self.members.values() if not m.watched and m.heard_at + self.lease_s <= now]
            changes += [
                self._lose(m, "nothing was heard of it for a lease", None, "", now, settled=False) for m in silent
            ]
        return changes

    def _lose(
        self, member: Member, reason: str, exit_code: int | None, log: str, now: float, *, settled: bool
    ) -> MemberLost:
        del self.members[member.job, member.index]
        if self._lives.get((member.job, member.incarnation)) is member:
            del self._lives[member.job, member.incarnation]
        if member.job in self._lowest:
            self._lowest[member.job] = min(self._lowest[member.job], member.index)
        if member.peer is not None:
            self.by_peer.pop(member.peer, None)
            member.peer = None
        self._away.pop(id(member), None)
        self._unwatched.discard(id(member))
        if reason != SAID_GOODBYE:
            self.losses_count += 1
            self.losses.append(LossRecord(member.name, reason, exit_code, now))
            del self.losses[:-LOSSES_KEPT]
        return MemberLost(member, reason, exit_code, log, settled)


LOSSES_KEPT = 100
"""Losses that `status` can show; older ones are only counted."""

__all__ = [
    "Change",
    "LossRecord",
    "Member",
    "MemberAway",
    "MemberBack",
    "MemberJoined",
    "MemberLeaving",
    "MemberLost",
    "Membership",
]

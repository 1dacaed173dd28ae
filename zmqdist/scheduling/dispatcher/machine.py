"""Which worker runs which work: the dispatcher's rules, and no I/O.

Theory of operation
    A coordinator's session has a queue. Work leaves it as a lease: one handing-out to one worker, under a number that never
    comes again, so that whatever arrives late names a lease that is no more. Idle workers are served first, then those that
    have room in their window (credit.py), each with its share of what waits; coordinators take turns. When nothing
    waits and a worker is idle, what others have not begun is called back.
    A lease ends by an outcome, by being returned, with its slot or with its worker. An attempt that had started is charged to
    the work when its process dies, and goes back to the end: what may never end, or kills its process, must not keep what waits from being
    tried. Work that had not started goes back uncharged, to the front. Where nobody knows, it goes back uncharged. Both these and what
    has lost a start are handed out carefully: the start is reported before it happens.

Promises, checked by tests/sim
    P1   each submitted piece of work ends at its session exactly once: by a result (a bulk one until it is taken: again when its
         worker is lost), or by a final StartsLost; or together with its generation or session
    P2   an outcome counts only from the worker that holds the lease, and only once
    P3   work is charged only for starts that were lost, and fails when `attempts_max` were
    P4   work that had not started goes back uncharged
    P5   GenerationEnded is sent only when nothing of it can be executing on any worker, lost and frozen ones included
    P6   a worker is never given more leases than its window, but for work that is pinned to it: of that it may have one a slot all the same
    P7   with a live worker and no further faults every queue empties
    P8   a function is sent to a worker once after its registration, before the first work that uses it
    P9   a bulk result keeps its work alive until it is taken
    P10  of several coordinators with waiting work each is served in turn
    P11  a bulk result that was taken to be kept is finished: it is not made again, and its worker holds it until it is taken for good,
         or the session ends
    P12  work that is pinned to a worker is handed out to members of that name alone, waits while there is none (P7 but for it), and is
         not called back
    P13  of one session's work that waits for the same, the higher priority is handed out first, and of one priority the oldest
    P14  work apart from the rounds does not end with a generation, and no generation waits for it; it ends with its session
    P15  a session that watches is told each worker that comes and each that is lost, in that order, from those on that were there,
         and of a loss before it hears what that has done to its work
    P16  what was forgotten everywhere is forgotten by all slots, and what a coordinator had made for work apart is, once it has
         left or has been gone for a lease
    P17  work that is withdrawn unless it has begun is never cut off; the session is told that it was cancelled, that it has begun, or its
         result

Not here: who is alive (membership.py), what a worker does with its leases (scheduling/worker/machine.py), what a
payload is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from zmqdist import errors
from zmqdist.batches import split
from zmqdist.events import Peer, Send
from zmqdist.limits import BATCH_ITEMS_MAX, COORDINATORS_MAX, QUEUE_MAX
from zmqdist.messages import (
    ALL_NUMBERS,
    BULK,
    CANCELLED,
    Begun,
    CutOff,
    Done,
    EndGeneration,
    Enlist,
    Enlisted,
    Forget,
    GenerationEnded,
    Members,
    Progress,
    Recall,
    Refused,
    Register,
    Release,
    Result,
    Results,
    SlotsLost,
    StartsLost,
    Submit,
    Taken,
    Withdraw,
    Workers,
)
from zmqdist.scheduling.dispatcher.credit import WorkWindow
from zmqdist.scheduling.dispatcher.membership import Member, MemberLost
from zmqdist.scheduling.dispatcher.placement import Placement
from zmqdist.scheduling.dispatcher.records import CoordinatorSession, Lease, WorkerLoad

SLOTS_END_S = 0.1
"""A worker's process was seen to end: its slots are ended by the process that watches over them, a moment later."""

DISPLACED = (
    "another connection has enlisted as this coordinator: its number is in two programs; if none of yours was copied or forked, whoever "
    "has the right to schedule here has taken it"
)
"""To the connection that has lost its session. Without a word it would wait for results for ever."""

LOG_FIELD = 4
"""Where the last log lines are in an item of StartsLost."""

LostStarts: TypeAlias = "list[tuple[int, int, str, int | None, str, bool]]"


class Dispatch:
    """Queue, leases, attempts, placement. Each method is one event and returns the effects that follow, but for the assignment,
    which `assign` makes once for all that has happened in a turn."""

    def __init__(self, *, attempts_max: int, lease_s: float, first_lease: int = 1) -> None:
        self.attempts_max = attempts_max
        self._lease_s = lease_s
        self._placement = Placement(first_lease)
        self.sessions: dict[Peer, CoordinatorSession] = {}
        self._former: dict[int, list[CoordinatorSession]] = {}
        self._ending: dict[CoordinatorSession, None] = {}
        self._crowded: dict[CoordinatorSession, None] = {}
        self._gone: dict[int, float] = {}
        """Coordinators that went without a word and had work apart: until when they may be back."""
        self.hands: dict[Member, WorkerLoad] = {}
        self.slot_deaths = 0
        self.last_slot_death: tuple[str, int | None, float] | None = None

    @property
    def queued(self) -> int:
        """Pieces of work that wait, of all coordinators."""
        return self._placement.queued

    @property
    def deadline(self) -> float | None:
        """When the end of a generation may next become certain, or a recall worth while, by the passing of time alone."""
        recall_at = self._placement.deadline
        if not self._ending and not self._gone:
            return recall_at
        times = [*self._gone.values()] if recall_at is None else [*self._gone.values(), recall_at]
        for session in self._ending:
            lives = (session, *self._former.get(session.coordinator, ()))
            if all(life.outstanding == 0 for life in lives) and not self._has_leftover(session):
                times.append(max(life.unsettled_until for life in lives))
        return min(times, default=None)

    # -- coordinators -------------------------------------------------------------------------------------------

    def enlist(self, peer: Peer, enlist: Enlist, now: float) -> list[Send]:
        earlier = [s for s in self.sessions.values() if s.coordinator == enlist.coordinator]
        if len(self.sessions) - len(earlier) >= COORDINATORS_MAX:
            return [
                Send(peer, Refused(errors.RESOURCE_EXHAUSTED, f"this dispatcher has {COORDINATORS_MAX} coordinators"))
            ]
        effects: list[Send] = []
        for other in earlier:
            effects += self.close(other.peer, now)
            if other.peer != peer:  # one that has come back hears nothing there: only one that is still there does
                effects.append(Send(other.peer, Refused(errors.ABORTED, DISPLACED, final=True)))
        self._gone.pop(enlist.coordinator, None)
        session = CoordinatorSession(enlist.coordinator, peer, enlist.queue_max, generation_ended=enlist.generation - 1)
        session.watch, session.starts = enlist.watch, enlist.starts
        if enlist.former and enlist.coordinator not in self._former:
            # Its work was with an earlier life of the dispatcher, whose workers may not have found this one yet.
            session.unsettled_until = now + self._lease_s
        self.sessions[peer] = session
        effects.append(Send(peer, Enlisted(self.attempts_max, self._live())))
        if enlist.watch:
            effects.append(Send(peer, Members([_joined(member) for member in self.hands], [])))
        return effects

    def define(self, session: CoordinatorSession, functions: list[tuple[int, bytes]]) -> None:
        session.functions.update(functions)

    def forget(self, session: CoordinatorSession, functions: list[int], *, everywhere: bool = False) -> list[Send]:
        if everywhere:
            return self._forget_by_all(session.coordinator, functions)
        for fn in functions:
            session.functions.pop(fn, None)
        return self._forget_where_known(session.coordinator, functions)

    def submit(self, session: CoordinatorSession, submit: Submit) -> list[Send]:
        main = session
        if not submit.items:
            return []
        if submit.apart:
            if session.apart is None:
                session.apart = CoordinatorSession(
                    session.coordinator, session.peer, QUEUE_MAX, functions=session.functions
                )
            session = session.apart
        elif submit.generation <= session.generation_ended:
            return []
        if session.queued + len(submit.items) > 2 * session.queue_max + BATCH_ITEMS_MAX:
            problem = (
                f"more than twice queue_max={session.queue_max} pieces of work wait: nothing of this message was queued"
            )
            return [Send(session.peer, Refused(errors.RESOURCE_EXHAUSTED, problem))]
        missing = {item[3] for item in submit.items if item[3] not in session.functions}
        if missing:
            problem = f"work for functions {sorted(missing)[:5]} that were never defined"
            return [Send(session.peer, Refused(errors.FAILED_PRECONDITION, problem))]
        self._placement.enqueue(session, submit.worker, submit.priority, submit.items)
        if session is main and session.submitted - session.progress_told >= session.queue_max:
            self._crowded[session] = None
        return []

    def withdraw(self, session: CoordinatorSession, withdraw: Withdraw) -> list[Send]:
        wanted = set(withdraw.works)
        results: list[Result] = []
        for part in session.parts:
            results += [(item[0], item[1], CANCELLED, b"") for item in self._placement.take_out(part, wanted)]
        effects = [Send(session.peer, Results(part)) for part in split(results)]
        if withdraw.unbegun:
            return effects + self._take_back(session, wanted)
        parts = session.parts
        for part in parts:
            for (work, _), (hands, number) in part.held.items():
                if work in wanted:
                    hands.held[number].cut = True  # it may still be taken; lost before that, it is not made again
        return effects + self._cut_off(lambda lease: lease.session in parts and lease.work in wanted, withdraw.grace_s)

    def _take_back(self, session: CoordinatorSession, wanted: set[int]) -> list[Send]:
        """What has begun goes on. Of what a worker that cannot be asked has, it is taken for granted."""
        effects: list[Send] = []
        for hands in self.hands.values():
            asked: list[int] = []
            begun: list[Lease] = []
            for number, lease in hands.leases.items():
                if lease.session is not session or lease.work not in wanted or lease.cut:
                    continue
                lease.unwanted = hands.reachable and not lease.started
                if lease.unwanted:
                    asked.append(number)
                else:
                    begun.append(lease)  # it was asked before that was heard, or before the worker went away
            if asked:
                effects.append(Send(hands.member.peer, Recall(asked)))
            effects += _tell_begun(begun)
        return effects

    def end_generation(self, session: CoordinatorSession, end: EndGeneration, now: float) -> list[Send]:
        session.generation_ended = session.ending = end.generation
        self._ending[session] = None
        self._placement.drop(session)
        effects = self._cut_off(lambda lease: lease.session is session, end.grace_s)
        return effects + self._release_held(session, kept=False) + self.settle(now)

    def taken(self, session: CoordinatorSession, taken: Taken) -> list[Send]:
        by_hands: dict[WorkerLoad, list[int]] = {}
        for part, key in [(part, key) for part in session.parts for key in taken.items if key in part.held]:
            hands, number = part.held[key]
            lease = hands.held[number]
            if not lease.kept:
                part.finished += 1
            if taken.keep:
                lease.keep()
            else:
                del part.held[key], hands.held[number]
                by_hands.setdefault(hands, []).append(number)
        return self._release(by_hands)

    def close(self, peer: Peer, now: float, *, left: bool = False) -> list[Send]:
        """A coordinator has gone: its connection is its life. `left`: it said so, and will not be back."""
        session = self.sessions.pop(peer, None)
        if session is None:
            return []
        session.ending = None
        self._ending.pop(session, None)
        self._crowded.pop(session, None)
        effects: list[Send] = []
        for part in session.parts:
            part.closed = True
            self._placement.drop(part)
            effects += self._release_held(part, kept=True)
        parts = session.parts
        effects = self._cut_off(lambda lease: lease.session in parts, 0.0) + effects
        effects += self._forget_where_known(session.coordinator, list(session.functions))
        session.functions.clear()
        if session.apart is not None:
            if left:
                effects += self._forget_by_all(session.coordinator, [ALL_NUMBERS])
            else:
                self._gone[session.coordinator] = now + self._lease_s
        if not session.quiet(now):
            self._former.setdefault(session.coordinator, []).append(session)
        return effects

    # -- workers ------------------------------------------------------------------------------------------------

    def joined(self, member: Member, register: Register) -> list[Send]:
        hands = self.hands[member] = WorkerLoad(member, WorkWindow(member.slots), member.name)
        hands.leftover = dict(register.leftover)
        self._placement.came(hands)
        effects = self._stale(hands, register.held)
        effects += self._tell_workers() if self._live() == 1 else []
        return effects + self._tell_watchers(Members([_joined(member)], []))

    def back(self, member: Member, register: Register) -> list[Send]:
        """The same life over a new connection: what was on the way when the old one broke is lost."""
        hands = self.hands[member]
        hands.reachable = True
        hands.leftover = dict(register.leftover)
        hands.known.clear()
        hands.recalled.clear()
        still = set(register.held)
        vanished = [hands.leases.pop(number) for number in list(hands.leases) if number not in still]
        unheld = [hands.held.pop(number) for number in list(hands.held) if number not in still]
        known = hands.leases.keys() | hands.held.keys()
        effects = self._stale(hands, [number for number in register.held if number not in known])
        effects += self._give_back(self._unhold(unheld))
        cut = [lease for lease, record in hands.leases.items() if record.cut]
        if cut:
            effects.append(Send(member.peer, CutOff(cut, 0.0)))
        unwanted = [lease for lease, record in hands.leases.items() if record.unwanted]
        if unwanted:
            effects.append(Send(member.peer, Recall(unwanted)))
        effects += [Send(member.peer, forget) for forget in hands.to_forget]
        hands.to_forget.clear()
        effects += self._give_back(vanished)
        self._placement.place(hands)
        return effects

    def away(self, member: Member) -> None:
        hands = self.hands[member]
        hands.reachable = False
        self._placement.place(hands)

    def leaving(self, member: Member) -> None:
        self._placement.place(self.hands[member])

    def lost(self, loss: MemberLost, now: float) -> list[Send]:
        member, exit_code, log, settled = loss.member, loss.exit_code, loss.log, loss.settled
        hands = self.hands.pop(member)
        self._placement.went(hands)
        leases = list(hands.leases.values())
        until = now + SLOTS_END_S if settled else member.heard_at + self._lease_s
        running = [lease.session for lease in leases]
        if hands.leftover:
            running += [s for s in self.sessions.values() if s.coordinator in hands.leftover.values()]
        for session in running:
            session.unsettled_until = max(session.unsettled_until, until)
        started = [lease for lease in leases if lease.started]
        waiting = [lease for lease in leases if not lease.started]
        held = self._unhold(hands.held.values())
        # first: a coordinator has to know that something may be executing out of sight before it hears that nothing is left of it
        effects = self._tell_watchers(Members([], [(member.name, member.incarnation, loss.reason)]))
        effects += self._charge([(lease, exit_code, log) for lease in started], member.name)
        effects += self._give_back(waiting, careful=True) + self._give_back(held)
        hands.leases.clear()
        if not self._live():
            effects += self._tell_workers()
        return effects + self.settle(now)

    def done(self, member: Member, done: Done, now: float) -> list[Send]:
        hands = self.hands[member]
        begun = self.started(member, done.started) if done.started else []
        by_session: dict[CoordinatorSession, list[Result]] = {}
        unwanted: list[int] = []
        before, leases = len(hands.leases), hands.leases
        present: CoordinatorSession | None = None
        results: list[Result] = []
        for number, kind, payload in done.outcomes:
            lease = leases.pop(number, None)
            if lease is None:
                continue
            session = lease.session
            if session is not present:
                present, results = session, by_session.setdefault(session, [])
            session.outstanding -= 1
            if lease.cut:  # it was told to end, and what such a function returns or raises is dropped
                if kind == BULK:
                    unwanted.append(number)
                kind, payload = CANCELLED, b""
            if kind == BULK:
                hands.held[number] = lease
                session.held[lease.work, lease.attempt] = (hands, number)
            else:
                session.finished += 1
            work, attempt, _, _, _ = lease.item
            results.append((work, attempt, kind, payload))
        ended = before - len(leases)
        hands.done += ended
        hands.window.done(ended, done.busy_us / 1e6, done.trip_us / 1e6, now, idle=not hands.leases)
        self._placement.place(hands)
        effects = [Send(session.peer, Results(items)) for session, items in by_session.items() if not session.closed]
        if unwanted and member.peer is not None:
            effects.append(Send(member.peer, Release(unwanted)))
        return begun + effects + self.settle(now)

    def started(self, member: Member, numbers: list[int]) -> list[Send]:
        leases = self.hands[member].leases
        begun: list[Lease] = []
        for number in numbers:
            lease = leases.get(number)
            if lease is not None:
                if lease.session.starts and not lease.started:
                    begun.append(lease)
                lease.started, lease.unwanted = True, False
        return _tell_begun(begun)

    def returned(self, member: Member, numbers: list[int], now: float) -> list[Send]:
        hands = self.hands[member]
        back = []
        hands.recalled.clear()  # a recall is answered by one Returned, which may be empty
        for number in numbers:
            hands.leftover.pop(number, None)
            lease = hands.leases.pop(number, None)
            if lease is not None:
                back.append(lease)
        self._placement.place(hands)
        return self._give_back(back) + self.settle(now)

    def slots_lost(self, member: Member, lost: SlotsLost, now: float) -> list[Send]:
        hands = self.hands[member]
        charged = []
        for number, exit_code, log in lost.items:
            hands.slot_deaths += 1
            self.slot_deaths += 1
            self.last_slot_death = member.name, exit_code, now
            lease = hands.leases.pop(number, None)
            if lease is not None:
                charged.append((lease, exit_code, log))
        self._placement.place(hands)
        return self._charge(charged, member.name) + self.settle(now)

    def assign(self, now: float) -> list[Send]:
        """Hand out what waits. Called once at the end of each event."""
        return self._placement.assign(now) + self._tell_progress()

    # -- ends ---------------------------------------------------------------------------------------------------

    def _charge(self, lost: Iterable[tuple[Lease, int | None, str]], worker: str) -> list[Send]:
        """Starts whose process died."""
        by_session: dict[CoordinatorSession, LostStarts] = {}
        again: list[Lease] = []
        cut: list[Lease] = []
        for lease, exit_code, log in lost:
            lease.charge()
            if lease.cut or lease.unwanted or lease.session.closed:
                cut.append(lease)
                continue
            final = lease.lost >= self.attempts_max
            told = by_session.setdefault(lease.session, [])
            told.append((lease.work, lease.attempt, worker, exit_code, log, final))
            if final:
                lease.session.outstanding -= 1
                lease.session.finished += 1
            else:
                again.append(lease)
        effects = [
            Send(session.peer, StartsLost(part))
            for session, told in by_session.items()
            for part in split(told, LOG_FIELD)
        ]
        return effects + self._give_back(again, careful=True) + self._give_back(cut)

    def _give_back(self, leases: list[Lease], *, careful: bool = False) -> list[Send]:
        """Leases that ended without an outcome: to the front of their queue, or cancelled where they were withdrawn."""
        cancelled: dict[CoordinatorSession, list[Result]] = {}
        for lease in reversed(leases):
            session = lease.session
            session.outstanding -= 1
            if session.closed:
                continue
            if lease.cut or lease.unwanted:
                cancelled.setdefault(session, []).append((lease.work, lease.attempt, CANCELLED, b""))
                continue
            self._placement.put_back(lease, careful=careful)
        return [Send(session.peer, Results(results)) for session, results in cancelled.items()]

    def _unhold(self, leases: Iterable[Lease]) -> list[Lease]:
        """Bulk results that are lost; those that were not taken before, as leases that are out again."""
        again: list[Lease] = []
        for lease in leases:
            if lease.session.closed:
                continue
            lease.session.held.pop((lease.work, lease.attempt), None)
            if not lease.kept:
                lease.session.outstanding += 1
                again.append(lease)
        return again

    def _cut_off(self, which: Callable[[Lease], bool], grace_s: float) -> list[Send]:
        effects: list[Send] = []
        for hands in self.hands.values():
            numbers = []
            for number, lease in hands.leases.items():
                if which(lease):
                    lease.cut = True
                    numbers.append(number)
            if numbers and hands.reachable:
                effects.append(Send(hands.member.peer, CutOff(numbers, grace_s)))
        return effects

    def _stale(self, hands: WorkerLoad, numbers: list[int]) -> list[Send]:
        """Leases that a worker believes to have and that are no more."""
        return [Send(hands.member.peer, CutOff(numbers, 0.0))] if numbers else []

    def _release_held(self, session: CoordinatorSession, *, kept: bool) -> list[Send]:
        by_hands: dict[WorkerLoad, list[int]] = {}
        for key, (hands, number) in list(session.held.items()):
            if kept or not hands.held[number].kept:
                del session.held[key], hands.held[number]
                by_hands.setdefault(hands, []).append(number)
        return self._release(by_hands)

    def _release(self, by_hands: dict[WorkerLoad, list[int]]) -> list[Send]:
        return [Send(hands.member.peer, Release(numbers)) for hands, numbers in by_hands.items() if hands.reachable]

    def settle(self, now: float) -> list[Send]:
        """Say that a generation has ended where that is certain now."""
        effects: list[Send] = []
        if self._gone:
            for coordinator in [number for number, until in self._gone.items() if until <= now]:
                del self._gone[coordinator]
                effects += self._forget_by_all(coordinator, [ALL_NUMBERS])
        if not self._ending and not self._former:
            return effects
        for coordinator, former in list(self._former.items()):
            former[:] = [session for session in former if not session.quiet(now)]
            if not former:
                del self._former[coordinator]
        for session in list(self._ending):
            if not session.quiet(now) or session.coordinator in self._former or self._has_leftover(session):
                continue
            effects.append(Send(session.peer, GenerationEnded(self._ended(session))))
        return effects

    def _ended(self, session: CoordinatorSession) -> int:
        generation = session.ending
        assert generation is not None, "only a session that is ending is in the list"
        session.ending = None
        del self._ending[session]
        return generation

    def _has_leftover(self, session: CoordinatorSession) -> bool:
        return any(session.coordinator in hands.leftover.values() for hands in self.hands.values())

    # -- small things -------------------------------------------------------------------------------------------

    def _forget_by_all(self, coordinator: int, numbers: list[int]) -> list[Send]:
        forget = Forget(coordinator, numbers, everywhere=True)
        effects: list[Send] = []
        for hands in self.hands.values():
            if hands.reachable:
                effects.append(Send(hands.member.peer, forget))
            else:
                hands.to_forget.append(forget)
        return effects

    def _forget_where_known(self, coordinator: int, functions: list[int]) -> list[Send]:
        keys = {(coordinator, fn) for fn in functions}
        effects: list[Send] = []
        for hands in self.hands.values():
            known = keys & hands.known
            if known:
                hands.known -= known
                if hands.reachable:
                    effects.append(Send(hands.member.peer, Forget(coordinator, sorted(fn for _, fn in known))))
        return effects

    def _live(self) -> int:
        return len(self.hands)

    def _tell_workers(self) -> list[Send]:
        return [Send(session.peer, Workers(self._live())) for session in self.sessions.values()]

    def _tell_watchers(self, members: Members) -> list[Send]:
        return [Send(session.peer, members) for session in self.sessions.values() if session.watch]

    def _tell_progress(self) -> list[Send]:
        """A coordinator that believes its queue to be full waits: tell it when it is not."""
        effects: list[Send] = []
        if not self._crowded:
            return effects
        for session in list(self._crowded):
            if session.left_queue > session.progress_told:
                session.progress_told = session.left_queue
                effects.append(Send(session.peer, Progress(session.left_queue)))
            if session.submitted - session.progress_told < session.queue_max:
                del self._crowded[session]
        return effects


def _tell_begun(leases: Iterable[Lease]) -> list[Send]:
    by_session: dict[CoordinatorSession, list[int]] = {}
    for lease in leases:
        by_session.setdefault(lease.session, []).append(lease.work)
    return [Send(session.peer, Begun(works)) for session, works in by_session.items() if not session.closed]


def _joined(member: Member) -> tuple[str, int, int, str]:
    """How Members tells of one that is there."""
    return (member.name, member.incarnation, member.pid, member.host)

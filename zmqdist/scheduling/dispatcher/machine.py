"""The dispatcher's decisions: which worker runs which work item, and how each work item ends; no
I/O.

`Broker` is the machine. It passes each message to the part that decides about it: membership
(membership_and_leases.py), the directory of actors (actors_machine.py) or `Dispatch`. A peer that
has not registered as a worker or coordinator may only register or say Goodbye. Broker refuses every
other message of such a peer.

Theory of operation
    Each coordinator's session has queues. A work item leaves its queue as a lease: one hand-out to
    one worker, under a number that is never used again, so that a late message names a lease that
    no longer exists (fencing). Idle workers get work first, then workers with room in their window
    (records.py) get a share of the waiting work. Coordinators take turns. While no work waits and a
    worker is idle, the dispatcher requests from overloaded workers the work that they have not
    begun.
    A lease ends when the worker reports an outcome or returns the lease, or when its slot process
    or its worker is lost. If a process dies while it runs the function, the lost start is charged
    to the work item. The item then goes to the end of its queue, so that an item that kills its
    process does not delay the other items. An item that had not started, or may have started
    without a report, is not charged. It returns to the front of the queue, unless it has lost a
    start before. A worker must report the start of an item before it starts the item
    (`report_before_start`) if the item has lost a start, or if it may have started at the worker
    that had it before.
    Functions may schedule functions (children.py). A function that waits for results does not count
    as one that its worker runs. Nested work is handed out before other work, the deepest first:
    such work ends functions that have begun, and so few functions wait at a time.

Promises, checked by tests/sim
    P1   each submitted work item ends exactly once for its session: by a result, by a final
         StartsLost, or together with its round or session. Exception: if a worker is lost before
         its bulk result was received, the work runs again and ends again
    P2   an outcome counts only from the worker that holds the lease, and only once
    P3   a work item is charged only for lost starts, and fails after `attempts_max` of them
    P4   a work item that had not started is queued again uncharged
    P5   RoundEnded is sent only when no work of the round can be executing on any worker, lost and
         frozen workers included
    P6   a worker never has more leases than its window, with one exception: it may always have one
         work item that is pinned or has resources for each slot
    P7   if a worker is alive and no further fault occurs, every queue empties
    P8   a function is sent to a worker once after its registration, before the first work item that
         uses it
    P9   a bulk result keeps its work item alive until the coordinator has received it
    P10  coordinators with waiting work are served in turn
    P11  a bulk result that the coordinator received with `keep` is not computed again; its worker
         holds it until the coordinator sends a ResultReceived without `keep`, or the session ends
    P12  work pinned to a worker is handed out only to a member of that name, waits while no such
         member exists (an exception to P7), and is not requested back
    P13  in each queue (the work of one session that waits for a certain worker, or for any worker)
         the item of the highest priority is handed out first, and within one priority the oldest
         item
    P14  the end of a round does not end detached work, and no round waits for detached work;
         detached work ends with its session
    P15  a session that watches members is told of the present workers, then of each worker that
         joins or is lost, in the order of these events; it is told of a loss before the effects of
         the loss on its work
    P16  all slots forget a function or resource when its coordinator sends a Forget with
         `everywhere`; if a coordinator had detached work, all slots forget all its functions and
         resources when the coordinator has said goodbye, or was away for `lease_s`
    P17  work cancelled with `unless_begun` is never aborted after it has begun; the session gets
         CANCELLED, Begun or the work's result
    P18  nested work is handed out before other work that any worker may run, the deepest first (an
         exception to P10); a worker at its bound of waiting functions gets only work that is
         deeper than they are, apart from pinned work and work with resources
    P19  each item with resources that has not ended at its worker has a grant of that worker; the
         grants of a worker never exceed what it has; they are released when nothing of the item can
         execute at this worker (resources.py, demands.py)
    P20  work that no member could run even with nothing in use fails at the latest `growth_limit_s`
         after the last change of the members, unless there is no member
    P21  work whose large inputs a worker holds runs on the holder's host, unless none of it has
         begun there for as long as it would take to move the inputs; nothing else waits for it

Not here: which workers are alive (membership_and_leases.py), how a worker runs its leases
(scheduling/worker/machine.py), and payloads, which are opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from zmqdist import errors
from zmqdist.batches import split
from zmqdist.events import Heard, Peer, PeerExpelled, PeerGone, ProcessExited, Send, Ticked
from zmqdist.limits import BATCH_ITEMS_MAX, COORDINATORS_MAX, GROWTH_LIMIT_S, QUEUE_MAX
from zmqdist.messages import (
    ALL_NUMBERS,
    BULK,
    CANCELLED,
    SUBMISSION_SHIFT,
    AbortLeases,
    ActorExited,
    ActorKnown,
    ActorReady,
    ActorsOwned,
    Beat,
    Begun,
    CancelWork,
    CoordinatorRegistered,
    CreateActor,
    Define,
    Done,
    DropActor,
    EndRound,
    FindActor,
    Forget,
    FreeResult,
    Goodbye,
    LeasesReturned,
    Leave,
    Members,
    Message,
    ProgramFacts,
    QueueProgress,
    Refused,
    Register,
    RegisterCoordinator,
    Result,
    ResultReceived,
    Results,
    RoundEnded,
    ServerFacts,
    SlotsLost,
    SlotsWaiting,
    StartsLost,
    StealRequest,
    Submit,
    Unsatisfied,
    WatchActor,
    WorkerFacts,
    Workers,
)
from zmqdist.scheduling.dispatcher.actors_machine import ActorDirectory, ActorRow
from zmqdist.scheduling.dispatcher.children import FENCED, HeldEnd, Nesting, kept_above
from zmqdist.scheduling.dispatcher.demands import DemandRow
from zmqdist.scheduling.dispatcher.facts import Facts
from zmqdist.scheduling.dispatcher.membership_and_leases import (
    Member,
    MemberLost,
    Membership,
)
from zmqdist.scheduling.dispatcher.placement import Placement
from zmqdist.scheduling.dispatcher.records import (
    NOT_RUN_AGAIN,
    OUTCOME_IGNORED,
    RUNNING,
    WITH_RESULT,
    CoordinatorSession,
    Lease,
    LeaseState,
    WorkerHoldings,
    WorkerLoad,
    WorkWindow,
)
from zmqdist.scheduling.dispatcher.servers import Servers
from zmqdist.scheduling.shared.broker_settings import BrokerSettings
from zmqdist.scheduling.shared.quantities import Grant, quantities_problem
from zmqdist.scheduling.shared.registrations import coordinator_problem

SLOTS_END_S = 0.1
"""Seconds for which slot processes may outlive their worker's process, until their zygote has
noticed that the worker has ended."""

DISPLACED = (
    "another connection has registered as this coordinator, so two programs use its number: start "
    "this program again; if you have not "
    "copied or forked it, another user with the right to schedule has taken the number: replace "
    "the token or the keys"
)
"""The text of the Refused to a connection that has lost its session, so that the program there does
not wait for results for ever."""

LOG_FIELD = 4
"""Index, in an item of StartsLost, of the field with the last log lines of the lost process;
`split` counts the bytes of this field."""

LostStarts: TypeAlias = "list[tuple[int, int, str, int | None, str, bool]]"


class Dispatch:
    """The queues, leases and attempts of one dispatcher; the module's docstring has the rules.

    Each method for an event returns the messages to send, in order. The caller must call `assign`,
    which hands out work, after each event.

    Attributes:
      placement, sessions: the waiting work, and the sessions of registered coordinators by
        connection.
      loads: the load of each member; members that are away are included, lost members are not.
      facts: what is shown of the inside.
      done: the number of leases that have ended with an outcome.
      slot_deaths, last_slot_death: the number of slot processes that have crashed; the last crash
        as (worker, exit code, when).
    """

    def __init__(
        self,
        *,
        attempts_max: int,
        lease_s: float,
        growth_limit_s: float = GROWTH_LIMIT_S,
        first_lease: int = 1,
    ) -> None:
        self.attempts_max = attempts_max
        self._lease_s = lease_s
        self.placement = Placement(first_lease, growth_limit_s)
        self.sessions: dict[Peer, CoordinatorSession] = {}
        self._closed_sessions: dict[int, list[CoordinatorSession]] = {}
        self._ending_sessions: dict[CoordinatorSession, None] = {}
        """The sessions that have not been told yet that their `closed_round` has ended."""
        self._full_sessions: dict[CoordinatorSession, None] = {}
        self._forget_at: dict[int, float] = {}
        """The time at which all workers forget a coordinator's numbers (P16), for each coordinator
        that had detached work and is away."""
        self.loads: dict[Member, WorkerLoad] = {}
        self.nesting = Nesting()
        self.facts = Facts()
        self.done = 0
        self.slot_deaths = 0
        self.last_slot_death: tuple[str, int | None, float] | None = None

    @property
    def deadline(self) -> float | None:
        """The time at which `settle` and `assign` must next be called if no event occurs before;
        None means never."""
        first = self.placement.deadline
        held_at = self.nesting.deadline if self.nesting.held else None
        for at in (held_at, self.placement.demands.deadline):
            if at is not None:
                first = at if first is None else min(first, at)
        if not self._ending_sessions and not self._forget_at:
            return first
        times = [*self._forget_at.values()] if first is None else [*self._forget_at.values(), first]
        for session in self._ending_sessions:
            sessions = (session, *self._closed_sessions.get(session.coordinator, ()))
            if all(part.outstanding == 0 for part in sessions) and not self._has_stale_leases(
                session
            ):
                times.append(max(part.unsettled_until for part in sessions))
        return min(times, default=None)

    # -- coordinators ------------------------------------------------------------------------------

    def register_coordinator(
        self, peer: Peer, message: RegisterCoordinator, now: float
    ) -> list[Send]:
        if problem := coordinator_problem(message):
            return [Send(peer, Refused(errors.INVALID_ARGUMENT, problem, final=True))]
        parent: Lease | None = None
        effects: list[Send] = []
        if message.parent:
            load = next((x for x in self.loads.values() if message.parent in x.leases), None)
            parent = None if load is None else load.leases[message.parent]
            if load is None or parent is None or parent.state in OUTCOME_IGNORED:
                return [Send(peer, Refused(errors.ABORTED, FENCED, final=True))]
            effects += self.note_starts(load.member, [message.parent])
        earlier = [s for s in self.sessions.values() if s.coordinator == message.coordinator]
        # A coordinator that reconnects takes the place of its earlier session.
        if len(self.sessions) - len(earlier) >= COORDINATORS_MAX:
            return [
                Send(
                    peer,
                    Refused(
                        errors.RESOURCE_EXHAUSTED,
                        f"this dispatcher has {COORDINATORS_MAX} coordinators",
                    ),
                )
            ]
        for earlier_session in earlier:
            effects += self.end_session(earlier_session.peer, now)
            # Another program with this number gets this Refused. A coordinator that has reconnected
            # does not: its old connection has ended.
            if earlier_session.peer != peer:
                effects.append(
                    Send(earlier_session.peer, Refused(errors.ABORTED, DISPLACED, final=True))
                )
        self._forget_at.pop(message.coordinator, None)
        session = CoordinatorSession(
            message.coordinator, peer, message.queue_max, closed_round=message.round - 1
        )
        session.watches_members, session.reports_starts = (
            message.watch_members,
            message.report_starts,
        )
        if message.previous_dispatcher and message.coordinator not in self._closed_sessions:
            # Workers that have not connected here yet may still execute work that they got from the
            # previous dispatcher (P5).
            session.unsettled_until = now + self._lease_s
        self.sessions[peer] = session
        if parent is not None:
            self.nesting.adopt(session, parent, message.parent)
        effects.append(Send(peer, CoordinatorRegistered(self.attempts_max, len(self.loads))))
        if message.watch_members:
            effects.append(Send(peer, Members([_member_row(member) for member in self.loads], [])))
        return effects

    def forget(
        self, session: CoordinatorSession, functions: list[int], *, everywhere: bool = False
    ) -> list[Send]:
        if everywhere:
            return self._forget_everywhere(session.coordinator, functions)
        for fn in functions:
            session.functions.pop(fn, None)
        return self._forget_functions(session.coordinator, functions)

    def submit(self, session: CoordinatorSession, message: Submit, now: float) -> list[Send]:
        main = session
        if not message.items:
            return []
        if session.fenced:
            return [Send(session.peer, Refused(errors.ABORTED, FENCED, final=True))]
        if message.detached:
            if session.detached is None:
                session.detached = CoordinatorSession(
                    session.coordinator, session.peer, QUEUE_MAX, functions=session.functions
                )
                session.detached.depth, session.detached.above = session.depth, session.above
            session = session.detached
        elif message.round <= session.closed_round:
            # the work arrives after the coordinator's request to end its round
            return []
        # A coordinator submits no more than `queue_max` items ahead. The bound keeps a faulty one from
        # filling the memory.
        if session.queued + len(message.items) > 2 * session.queue_max + BATCH_ITEMS_MAX:
            problem = f"more than twice queue_max={session.queue_max} work items wait: no item of this message was queued"
            return [Send(session.peer, Refused(errors.RESOURCE_EXHAUSTED, problem))]
        missing = {item[3] for item in message.items if item[3] not in session.functions}
        if missing:
            problem = f"work for functions {sorted(missing)[:5]} that were never defined"
            return [Send(session.peer, Refused(errors.FAILED_PRECONDITION, problem))]
        if message.resources and (problem := quantities_problem(message.resources)):
            return [Send(session.peer, Refused(errors.INVALID_ARGUMENT, problem))]
        if message.resources and session.above:
            request, loads = message.resources, self.loads.values()
            if self.nesting.waits_for_itself(session, request, message.worker, loads):
                works = [(item[0], item[1]) for item in message.items]
                return [Send(session.peer, Unsatisfied(works, kept_above(request), final=True))]
        totals = self.facts.totals
        totals.submitted += len(message.items)
        retried = sum(item[1] >= 1 << SUBMISSION_SHIFT for item in message.items)
        totals.retried += retried
        if self.facts.is_observed(now):
            self.facts.times.note_submitted(
                session.coordinator, message.items, message.waited, now, retried=retried
            )
        self.placement.enqueue(
            session,
            message.worker,
            message.priority,
            message.items,
            message.resources,
            message.near,
            message.near_bytes,
        )
        if session is main and session.submitted - session.progress_reported >= session.queue_max:
            self._full_sessions[session] = None
        return []

    def cancel_work(self, session: CoordinatorSession, message: CancelWork) -> list[Send]:
        submissions = {(work, attempt >> SUBMISSION_SHIFT) for work, attempt in message.works}
        results: list[Result] = []
        for part in session.with_detached:
            results += [
                (item[0], item[1], CANCELLED, b"")
                for item in self.placement.take_out(part, submissions)
            ]
        self.facts.totals.cancelled += len(results)
        effects = [Send(session.peer, Results(part)) for part in split(results)]
        # P17: such work must not be aborted, so it is only requested back.
        if message.unless_begun:
            return effects + self._cancel_unbegun(session, submissions)
        parts = session.with_detached
        for part in parts:
            for (work, attempt), (load, number) in part.held.items():
                lease = load.held[number]
                if (
                    lease.state is LeaseState.HELD
                    and (work, attempt >> SUBMISSION_SHIFT) in submissions
                ):
                    lease.enter(LeaseState.UNNEEDED)  # the coordinator may still receive it
        return effects + self._abort_leases(
            lambda lease: lease.session in parts and lease.submission in submissions,
            message.grace_s,
        )

    def _cancel_unbegun(
        self, session: CoordinatorSession, submissions: set[tuple[int, int]]
    ) -> list[Send]:
        """Request back `wanted` work that has not begun. Report the rest as begun (P17), including
        all of it at a worker that is away."""
        effects: list[Send] = []
        for load in self.loads.values():
            steal: list[int] = []
            begun_leases: list[Lease] = []
            for number, lease in load.leases.items():
                if lease.session is not session or lease.submission not in submissions:
                    continue
                if load.reachable and lease.state in (LeaseState.ASSIGNED, LeaseState.UNWANTED):
                    steal.append(number)
                    lease.enter(LeaseState.UNWANTED)
                elif lease.state not in OUTCOME_IGNORED:
                    # The coordinator may have sent the CancelWork before it learned that the work
                    # has begun, so report the start again.
                    begun_leases.append(lease)
                    if lease.state is LeaseState.UNWANTED:
                        lease.enter(LeaseState.ASSIGNED)
            if steal:
                effects.append(Send(load.member.peer, StealRequest(steal)))
            effects += _start_messages(begun_leases)
        return effects

    def end_round(self, session: CoordinatorSession, message: EndRound, now: float) -> list[Send]:
        session.closed_round = message.round
        self._ending_sessions[session] = None
        self.placement.drop(session)
        effects = self._abort_leases(lambda lease: lease.session is session, message.grace_s)
        return effects + self._free_results_of(session, include_values=False) + self.settle(now)

    def result_received(self, session: CoordinatorSession, message: ResultReceived) -> list[Send]:
        by_load: dict[WorkerLoad, list[int]] = {}
        for part, key in [
            (part, key)
            for part in session.with_detached
            for key in message.items
            if key in part.held
        ]:
            load, number = part.held[key]
            lease = load.held[number]
            if lease.state is not LeaseState.KEPT:
                part.finished += 1
                if message.keep:
                    lease.keep()
            if not message.keep:
                lease.enter(LeaseState.ENDED)
                del part.held[key], load.held[number]
                by_load.setdefault(load, []).append(number)
        return _free_results(by_load)

    def end_session(self, peer: Peer, now: float, *, left: bool = False) -> list[Send]:
        """End the session of this connection. `left` says whether the coordinator has said Goodbye,
        so that it will not reconnect."""
        session = self.sessions.pop(peer, None)
        if session is None:
            return []
        self._ending_sessions.pop(session, None)
        self._full_sessions.pop(session, None)
        effects: list[Send] = []
        for part in session.with_detached:
            part.closed = True
            self.placement.drop(part)
            effects += self._free_results_of(part, include_values=True)
        parts = session.with_detached
        effects = self._abort_leases(lambda lease: lease.session in parts, 0.0) + effects
        effects += self._forget_functions(session.coordinator, list(session.functions))
        session.functions.clear()
        if session.detached is not None:
            # P16: a coordinator that did not say goodbye may return, and use its resources again.
            if left:
                effects += self._forget_everywhere(session.coordinator, [ALL_NUMBERS])
            else:
                self._forget_at[session.coordinator] = now + self._lease_s
        # P5: a round of the coordinator's next session must wait for the work of this one.
        if not session.is_quiet(now):
            self._closed_sessions.setdefault(session.coordinator, []).append(session)
        return effects

    # -- workers -----------------------------------------------------------------------------------

    def joined(self, member: Member, register: Register) -> list[Send]:
        load = self.loads[member] = WorkerLoad(member, WorkWindow(member.slots), member.name)
        load.stale_leases = dict(register.stale_leases)
        self.placement.add_worker(load)
        self._note_grants(load, register)
        effects = _abort_strays(load, register.held)
        effects += self._report_worker_count() if len(self.loads) == 1 else []
        return effects + self._report_members(Members([_member_row(member)], []))

    def reconnected(self, member: Member, register: Register) -> list[Send]:
        """Reconcile this machine's leases of a reconnected member with those that the member has,
        because messages may have been lost."""
        load = self.loads[member]
        load.stale_leases = dict(register.stale_leases)
        self._note_grants(load, register)
        # The last messages over the old connection may be lost, so functions are sent again (P8), and
        # no reply to a StealRequest is expected.
        load.known_functions.clear()
        load.waiting.clear()
        load.steals = 0
        still = set(register.held)
        vanished = [load.leases.pop(number) for number in list(load.leases) if number not in still]
        unheld = [load.held.pop(number) for number in list(load.held) if number not in still]
        lease_numbers = load.leases.keys() | load.held.keys()
        effects = _abort_strays(
            load, [number for number in register.held if number not in lease_numbers]
        )
        effects += self._give_back(unheld)
        leases = load.leases.items()
        cut = [number for number, lease in leases if lease.state in OUTCOME_IGNORED]
        if cut:
            effects.append(Send(member.peer, AbortLeases(cut, 0.0)))
        unwanted = [number for number, lease in leases if lease.state is LeaseState.UNWANTED]
        if unwanted:
            effects.append(Send(member.peer, StealRequest(unwanted)))
        effects += [Send(member.peer, forget) for forget in load.undelivered_forgets]
        load.undelivered_forgets.clear()
        effects += self._give_back_after_children(vanished)
        self.placement.reindex(load)
        return effects

    def restricted(self, member: Member) -> None:
        """Hand out no more work to a member that is away or leaves."""
        self.placement.reindex(self.loads[member])

    def lost(self, loss: MemberLost, now: float) -> list[Send]:
        member, exit_code, log, settled = loss.member, loss.exit_code, loss.log, loss.settled
        load = self.loads.pop(member)
        self.facts.lost(member)
        self.placement.remove_worker(load, now)
        leases = list(load.leases.values())
        # P5: a worker whose process may still run stops its functions when its lease expires.
        last_at = max(member.heard_at, load.window.handed_out_at)
        until = now + SLOTS_END_S if settled else last_at + self._lease_s
        running = [lease.session for lease in leases]
        if load.stale_leases:
            running += [
                s for s in self.sessions.values() if s.coordinator in load.stale_leases.values()
            ]
        for session in running:
            session.unsettled_until = max(session.unsettled_until, until)
        started_leases = [lease for lease in leases if lease.state in RUNNING]
        waiting = [lease for lease in leases if lease.state not in RUNNING]
        # Send Members first (P15): a coordinator must know that the lost worker may still run its
        # work before it learns how this work ends.
        effects = self._report_members(
            Members([], [(member.name, member.incarnation, loss.reason)])
        )
        effects += self._lose_starts(
            [(lease, exit_code, log) for lease in started_leases], member, now
        )
        effects += self._give_back(waiting, report_before_start=True)
        effects += self._give_back(list(load.held.values()))
        if not len(self.loads):
            effects += self._report_worker_count()
        return effects + self.settle(now)

    def take_outcomes(self, member: Member, done: Done, now: float) -> list[Send]:
        load = self.loads[member]
        if done.runs:
            self.facts.note_runs(member, done.runs, load.leases, now)
        start_reports = self.note_starts(member, done.started) if done.started else []
        nested = self.nesting.children
        by_session: dict[CoordinatorSession, list[Result]] = {}
        unwanted: list[int] = []
        before, leases, waiting = len(load.leases), load.leases, load.waiting
        is_nesting = bool(waiting or nested)
        held: list[Send] = []
        present: CoordinatorSession | None = None
        results: list[Result] = []
        assigned, over = LeaseState.ASSIGNED, LeaseState.ENDED
        for number, kind, payload in done.outcomes:
            lease = leases.pop(number, None)
            # P2: the lease has ended, or another worker holds it.
            if lease is None:
                load.strays.discard(number)
                continue
            if is_nesting:
                waiting.discard(number)
                if lease in nested:
                    held += self._hold(
                        lease, partial(self._apply_outcome, load, number, lease, kind, payload)
                    )
                    continue
            session = lease.session
            if session is not present:
                present, results = session, by_session.setdefault(session, [])
            session.outstanding -= 1
            if lease.state is not assigned and lease.state in OUTCOME_IGNORED:
                self.facts.totals.cancelled += 1
                if kind == BULK:
                    unwanted.append(number)
                kind, payload = CANCELLED, b""
            if kind == BULK:
                lease.enter(LeaseState.HELD)
                load.held[number] = lease
                session.held[lease.work, lease.attempt] = (load, number)
            else:
                lease.state = over  # unchecked, because it may end from every state here
                session.finished += 1
            work, attempt, _, _, _ = lease.item
            results.append((work, attempt, kind, payload))
        outcome_count = before - len(leases)
        load.done_count += outcome_count
        self.done += outcome_count
        load.window.note_returned(
            outcome_count, done.busy_us / 1e6, done.trip_us / 1e6, now, idle=not load.leases
        )
        self.placement.reindex(load)
        effects = [
            Send(session.peer, Results(items))
            for session, items in by_session.items()
            if not session.closed
        ]
        if unwanted and member.peer is not None:
            effects.append(Send(member.peer, FreeResult(unwanted)))
        return start_reports + effects + held + self.settle(now)

    def slots_waiting(self, member: Member, message: SlotsWaiting) -> list[Send]:
        """Record which functions of a worker wait for results, or do not wait any more."""
        load = self.loads[member]
        load.waiting.update(load.leases.keys() & message.waiting)
        load.waiting.difference_update(message.resumed)
        self.placement.reindex(load)
        return []

    def note_starts(self, member: Member, numbers: list[int]) -> list[Send]:
        leases = self.loads[member].leases
        begun_leases: list[Lease] = []
        for number in numbers:
            lease = leases.get(number)
            if lease is not None and lease.state not in RUNNING:
                if lease.session.reports_starts:
                    begun_leases.append(lease)
                cancelled = lease.state is LeaseState.CANCELLED
                lease.enter(LeaseState.ABORTED if cancelled else LeaseState.BEGUN)
        return _start_messages(begun_leases)

    def leases_returned(self, member: Member, numbers: list[int], now: float) -> list[Send]:
        load = self.loads[member]
        back = []
        # each StealRequest gets one LeasesReturned, even if it is empty, so no request is open now
        load.steals = 0
        for number in numbers:
            load.stale_leases.pop(number, None)
            load.strays.discard(number)
            lease = load.pop(number)
            if lease is not None:
                back.append(lease)
        self.placement.reindex(load)
        return self._give_back_after_children(back) + self.settle(now)

    def slots_lost(self, member: Member, lost: SlotsLost, now: float) -> list[Send]:
        load = self.loads[member]
        charged = []
        for number, exit_code, log in lost.items:
            load.slot_deaths += 1
            self.slot_deaths += 1
            self.last_slot_death = member.name, exit_code, now
            load.strays.discard(number)
            lease = load.pop(number)
            self.facts.note_slot_death(member, number, lease, exit_code, log, now)
            if lease is not None:
                charged.append((lease, exit_code, log))
        self.placement.reindex(load)
        return self._lose_starts(charged, member, now) + self.settle(now)

    def assign(self, now: float) -> list[Send]:
        """Hand out waiting work, and report progress to coordinators whose queue was full. The
        caller must call this after each event."""
        first = self.placement.next_lease
        effects = self.placement.assign(now)
        end = self.placement.next_lease
        if end > first and self.facts.is_observed(now):
            self.facts.times.handed_out.add(first, end, now)
        if self.placement.demands.ready:
            notices, unmet = self.placement.demands.judge(now)
            effects += notices
            for queue in unmet:
                self.facts.note_unmet(queue, self.placement.demands.lack_text(queue), now)
                queue.session.finished += queue.count
                self.placement.drop_queue(queue)
        return effects + self._report_progress()

    # -- ends --------------------------------------------------------------------------------------

    def _hold(self, lease: Lease, apply: Callable[[], list[Send]]) -> list[Send]:
        """Hold back the end of a lease until its children have ended (P21), and fence them."""
        self.nesting.held.append(HeldEnd(lease, apply))
        return self._fence(lease, 0.0)

    def _fence(self, lease: Lease, grace_s: float) -> list[Send]:
        """End the children of a lease that ends or is cancelled (P22)."""
        effects: list[Send] = []
        for session in self.nesting.unfenced(lease):
            parts = session.with_detached
            is_busy = any(part.queued or part.outstanding for part in parts)
            for part in parts:
                self.placement.drop(part)
                effects += self._free_results_of(part, include_values=True)
            effects += self._abort_leases(partial(_is_of, parts), grace_s)
            if is_busy and not session.closed:
                refusal = Refused(errors.ABORTED, FENCED, final=True)
                effects.append(Send(session.peer, refusal))
        return effects

    def _apply_outcome(
        self, load: WorkerLoad, number: int, lease: Lease, kind: int, payload: bytes
    ) -> list[Send]:
        """Apply the outcome of a lease that was held back."""
        session = lease.session
        is_lost = self.loads.get(load.member) is not load
        if kind == BULK and (lease.state in OUTCOME_IGNORED or session.closed or is_lost):
            effects = [] if is_lost else _free_results({load: [number]})
            return effects + self._give_back([lease])
        session.outstanding -= 1
        if lease.state in OUTCOME_IGNORED:
            kind, payload = CANCELLED, b""
        if kind == BULK:
            lease.enter(LeaseState.HELD)
            load.held[number] = lease
            session.held[lease.work, lease.attempt] = (load, number)
        else:
            lease.enter(LeaseState.ENDED)
            session.finished += 1
        result = (lease.work, lease.attempt, kind, payload)
        return [] if session.closed else [Send(session.peer, Results([result]))]

    def _lose_starts(
        self, lost: list[tuple[Lease, int | None, str]], member: Member, now: float
    ) -> list[Send]:
        """Charge lost starts, those of functions with children once these have ended."""
        for lease, _, _ in lost:
            self.facts.note_lost_start(lease, member, self.attempts_max, now)
        worker = member.name
        if not self.nesting.children:
            return self._charge_lost_starts(lost, worker)
        effects: list[Send] = []
        plain: list[tuple[Lease, int | None, str]] = []
        for start in lost:
            if start[0] not in self.nesting.children:
                plain.append(start)
                continue
            charge = partial(self._charge_lost_starts, [start], worker)
            effects += self._hold(start[0], charge)
        return effects + self._charge_lost_starts(plain, worker)

    def _give_back_after_children(self, leases: list[Lease]) -> list[Send]:
        """Give back leases, those of functions with children once these have ended."""
        parents = [lease for lease in leases if lease in self.nesting.children]
        effects = self._give_back([lease for lease in leases if lease not in parents])
        for lease in parents:
            effects += self._hold(lease, partial(self._give_back, [lease]))
        return effects

    def _charge_lost_starts(
        self, lost: Iterable[tuple[Lease, int | None, str]], worker: str
    ) -> list[Send]:
        """Charge lost starts to their work items (P3), and queue again each item that may have
        another attempt."""
        by_session: dict[CoordinatorSession, LostStarts] = {}
        again: list[Lease] = []
        cut: list[Lease] = []
        for lease, exit_code, log in lost:
            lease.charge_lost_start()
            if lease.state in NOT_RUN_AGAIN or lease.session.fenced:
                cut.append(lease)
                continue
            final = lease.lost >= self.attempts_max
            starts = by_session.setdefault(lease.session, [])
            starts.append((lease.work, lease.attempt, worker, exit_code, log, final))
            if final:
                lease.enter(LeaseState.ENDED)
                lease.session.outstanding -= 1
                lease.session.finished += 1
            else:
                again.append(lease)
        effects = [
            Send(session.peer, StartsLost(part))
            for session, starts in by_session.items()
            for part in split(starts, LOG_FIELD)
        ]
        return effects + self._give_back(again, report_before_start=True) + self._give_back(cut)

    def _give_back(self, leases: list[Lease], *, report_before_start: bool = False) -> list[Send]:
        """End leases without an outcome, or whose bulk result is lost, and queue their work again.
        Cancelled work is not queued: the returned Results report it. Kept results are lost (P11).
        """
        cancelled: dict[CoordinatorSession, list[Result]] = {}
        # Each item goes to the front of its queue, so the oldest one must be the last.
        for lease in reversed(leases):
            session, state = lease.session, lease.state
            lease.enter(LeaseState.ENDED)
            if state in WITH_RESULT:
                session.held.pop((lease.work, lease.attempt), None)
            else:
                session.outstanding -= 1
            if session.closed or session.fenced or state is LeaseState.KEPT:
                continue
            if state in NOT_RUN_AGAIN:
                cancelled.setdefault(session, []).append(
                    (lease.work, lease.attempt, CANCELLED, b"")
                )
                continue
            self.placement.put_back(lease, report_before_start=report_before_start)
        return [Send(session.peer, Results(results)) for session, results in cancelled.items()]

    def _abort_leases(self, selects: Callable[[Lease], bool], grace_s: float) -> list[Send]:
        effects: list[Send] = []
        parents: list[Lease] = []
        for load in self.loads.values():
            numbers = []
            for number, lease in load.leases.items():
                if selects(lease):
                    lease.cancel()
                    numbers.append(number)
                    if lease in self.nesting.children:
                        parents.append(lease)
            if numbers and load.reachable:
                effects.append(Send(load.member.peer, AbortLeases(numbers, grace_s)))
        for lease in parents:
            effects += self._fence(lease, grace_s)
        return effects

    def _free_results_of(self, session: CoordinatorSession, *, include_values: bool) -> list[Send]:
        by_load: dict[WorkerLoad, list[int]] = {}
        for key, (load, number) in list(session.held.items()):
            if include_values or load.held[number].state is not LeaseState.KEPT:
                load.held.pop(number).enter(LeaseState.ENDED)
                del session.held[key]
                by_load.setdefault(load, []).append(number)
        return _free_results(by_load)

    def settle(self, now: float) -> list[Send]:
        """Send RoundEnded for each round that a coordinator ends, once no work of the round can be
        executing (P5). Have all workers forget the functions and resources of each coordinator that
        had detached work and has been away for `lease_s` (P16)."""
        effects: list[Send] = []
        if self.nesting.children or self.nesting.held:
            while ready := self.nesting.take_quiet(now):
                for end in ready:
                    effects += end.apply()
        if self._forget_at:
            for coordinator in [
                number for number, until in self._forget_at.items() if until <= now
            ]:
                del self._forget_at[coordinator]
                effects += self._forget_everywhere(coordinator, [ALL_NUMBERS])
        if not self._ending_sessions and not self._closed_sessions:
            return effects
        for coordinator, closed in list(self._closed_sessions.items()):
            closed[:] = [session for session in closed if not session.is_quiet(now)]
            if not closed:
                del self._closed_sessions[coordinator]
        for session in list(self._ending_sessions):
            if (
                not session.is_quiet(now)
                or session.coordinator in self._closed_sessions
                or self._has_stale_leases(session)
            ):
                continue
            effects.append(Send(session.peer, RoundEnded(session.closed_round)))
            del self._ending_sessions[session]
        return effects

    def is_ending(self, session: CoordinatorSession) -> bool:
        """Return whether the end of a round of the session waits for functions that run."""
        return session in self._ending_sessions

    def _has_stale_leases(self, session: CoordinatorSession) -> bool:
        return any(
            session.coordinator in load.stale_leases.values() for load in self.loads.values()
        )

    # -- small things ------------------------------------------------------------------------------

    def _note_grants(self, load: WorkerLoad, register: Register) -> None:
        """Count what functions still use whose leases this dispatcher has not made, or has ended."""
        load.strays = {number for number, *_ in register.grants if number not in load.leases}
        for number, amounts, devices in register.grants:
            if number not in load.grants:
                load.grants[number] = grant = Grant(amounts, devices)
                self.placement.demands.stocks.occupy(load.name, grant)

    def _forget_everywhere(self, coordinator: int, numbers: list[int]) -> list[Send]:
        forget = Forget(coordinator, numbers, everywhere=True)
        effects: list[Send] = []
        for load in self.loads.values():
            if load.reachable:
                effects.append(Send(load.member.peer, forget))
            else:
                load.undelivered_forgets.append(forget)
        return effects

    def _forget_functions(self, coordinator: int, functions: list[int]) -> list[Send]:
        keys = {(coordinator, fn) for fn in functions}
        effects: list[Send] = []
        for load in self.loads.values():
            known_keys = keys & load.known_functions
            if known_keys:
                load.known_functions -= known_keys
                if load.reachable:
                    effects.append(
                        Send(
                            load.member.peer,
                            Forget(coordinator, sorted(fn for _, fn in known_keys)),
                        )
                    )
        return effects

    def _report_worker_count(self) -> list[Send]:
        return [Send(session.peer, Workers(len(self.loads))) for session in self.sessions.values()]

    def _report_members(self, members: Members) -> list[Send]:
        return [
            Send(session.peer, members)
            for session in self.sessions.values()
            if session.watches_members
        ]

    def _report_progress(self) -> list[Send]:
        """Report progress to coordinators whose queue was full, because their programs may wait in
        `schedule`."""
        effects: list[Send] = []
        if not self._full_sessions:
            return effects
        for session in list(self._full_sessions):
            if session.left_queue > session.progress_reported:
                session.progress_reported = session.left_queue
                effects.append(Send(session.peer, QueueProgress(session.left_queue)))
            if session.submitted - session.progress_reported < session.queue_max:
                del self._full_sessions[session]
        return effects


def _is_of(parts: tuple[CoordinatorSession, ...], lease: Lease) -> bool:
    return lease.session in parts


def _abort_strays(load: WorkerLoad, numbers: list[int]) -> list[Send]:
    """Abort leases that the worker still has but that no longer exist at the dispatcher (P2)."""
    return [Send(load.member.peer, AbortLeases(numbers, 0.0))] if numbers else []


def _free_results(by_load: dict[WorkerLoad, list[int]]) -> list[Send]:
    return [
        Send(load.member.peer, FreeResult(numbers))
        for load, numbers in by_load.items()
        if load.reachable
    ]


def _start_messages(leases: Iterable[Lease]) -> list[Send]:
    by_session: dict[CoordinatorSession, list[tuple[int, int]]] = {}
    for lease in leases:
        by_session.setdefault(lease.session, []).append((lease.work, lease.attempt))
    return [
        Send(session.peer, Begun(works))
        for session, works in by_session.items()
        if not session.closed
    ]


def _member_row(member: Member) -> tuple[str, int, int, str, int]:
    return (member.name, member.incarnation, member.pid, member.host, member.slots)


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
      actors, actors_max: the number of processes of actors that the worker may have now, and at
        most.
      resources: (what is in use, what there is) of each resource, in units.
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
    actors: int
    actors_max: int
    resources: dict[str, tuple[float, float]]


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
      waits_for_input, held_bytes: what the program has told of itself (ProgramFacts).
    """

    coordinator: int
    queued: int
    out: int
    held: int
    submitted: int
    finished: int
    functions: int
    waits_for_input: int = 0
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BrokerSnapshot:
    """The state of a dispatcher's scheduling, as `zmqdist status` and `zmqdist top` show it.

    Attributes:
      queued, queued_pinned: the number of work items that wait, and the number of those that are
        pinned to a worker.
      demands: the requests for resources for which work waits.
      losses: the last losses of workers: (name, reason, exit code, when).
      last_slot_death: the last crash of a slot process: (the worker's name, exit code, when); None
        if no slot process has crashed.
    """

    workers: tuple[WorkerRow, ...]
    coordinators: tuple[CoordinatorRow, ...]
    actors: tuple[ActorRow, ...]
    queued: int
    queued_pinned: int
    demands: tuple[DemandRow, ...]
    losses_count: int
    losses: tuple[tuple[str, str, int | None, float], ...]
    slot_deaths: int
    last_slot_death: tuple[str, int | None, float] | None


class Broker:
    """The dispatcher as one machine, which combines membership, dispatch and the directory of
    actors.

    Args:
      first_actor: the first incarnation of an actor, above those of earlier dispatchers.
      silent_until: the time until which actors of an earlier dispatcher may come back.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        first_lease: int = 1,
        first_actor: int = 1,
        silent_until: float = 0.0,
    ) -> None:
        self.settings = settings
        self.dispatch = Dispatch(
            attempts_max=settings.attempts_max,
            lease_s=settings.lease_s,
            growth_limit_s=settings.growth_limit_s,
            first_lease=first_lease,
        )
        self.servers = Servers()
        self._stocks = self.dispatch.placement.demands.stocks
        self.actors = ActorDirectory(
            self._stocks,
            settings.lease_s,
            SLOTS_END_S,
            first_incarnation=first_actor,
            silent_until=silent_until,
        )
        self.membership = Membership(
            settings.lease_s, settings.reconnect_grace_s, settings.cancel_grace_s, self
        )

    @property
    def deadline(self) -> float | None:
        """The time at which the runtime must next call `handle(Ticked(), now)`; None means
        never.
        """
        first, second = self.membership.deadline, self.dispatch.deadline
        if first is None or (second is not None and second < first):
            first = second
        third = self.actors.deadline
        return third if first is None or (third is not None and third < first) else first

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
                self.servers.reporter_gone(peer)
                effects = self.dispatch.end_session(peer, now)
                effects += self.actors.coordinator_gone(peer, now, left=False)
                effects += self.membership.handle(event, now)
            case ProcessExited():
                effects = self.membership.handle(event, now)
            case Ticked():
                effects = self.membership.handle(event, now)
                effects += self.dispatch.settle(now)
                effects += self.actors.tick(now)
        if self.actors.waits_for_resources and self._stocks.changed:
            effects += self.actors.retry(now)
        return effects + self.dispatch.assign(now)

    # -- changes of the members --------------------------------------------------------------------

    def joined(self, member: Member, register: Register) -> list[Send]:
        effects = self.dispatch.joined(member, register)
        effects += self.dispatch.facts.joined(member, member.heard_at)
        return effects + self.actors.registered(member, register, member.heard_at)

    def reconnected(self, member: Member, register: Register) -> list[Send]:
        effects = self.dispatch.reconnected(member, register)
        effects += self.dispatch.facts.joined(member, member.heard_at)
        return effects + self.actors.registered(member, register, member.heard_at)

    def restricted(self, member: Member) -> None:
        self.dispatch.restricted(member)

    def lost(self, loss: MemberLost, now: float) -> list[Send]:
        self.servers.reporter_gone(loss.member)
        return self.dispatch.lost(loss, now) + self.actors.lost(loss, now)

    # -- questions and orders of the runtime -------------------------------------------------------

    def leave(self, job: str, index: int, grace_s: float, now: float) -> list[Send] | None:
        """Have a worker stop in good order within `grace_s`. Return the messages to send, or None
        if the worker is not registered."""
        member = self.membership.members.get((job, index))
        if member is None:
            return None
        return self.membership.leave(member, grace_s) + self.dispatch.assign(now)

    def observe(self, now: float) -> list[Send]:
        """Have the workers report each run for a while. Return the messages to send."""
        members = self.membership.members.values()
        peers = [member.peer for member in members if member.peer is not None]
        return self.dispatch.facts.observe(peers, now)

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
        for actor in self.actors.of_worker(member):
            (holdings.actors if actor.restarts_left else holdings.lost_actors).append(actor.label)
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
                    session.program.waits_for_input,
                    session.program.held_bytes,
                )
                for session in self.dispatch.sessions.values()
            ),
            actors=self.actors.rows(),
            queued=self.dispatch.placement.queued,
            queued_pinned=self.dispatch.placement.queued_pinned,
            demands=self.dispatch.placement.demands.rows(),
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
        actors, actors_max = self.actors.count_at(member)
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
            done=load.done_count,
            rate=load.window.rate,
            joined_at=member.joined_at,
            heard_at=member.heard_at,
            slot_deaths=load.slot_deaths,
            kept=sum(lease.state is LeaseState.KEPT for lease in load.held.values()),
            pinned=sum(1 for _ in self.dispatch.placement.waiting_for(member.name)),
            actors=actors,
            actors_max=actors_max,
            resources=self.dispatch.placement.demands.stocks.figures(member.name),
        )

    def _from_worker(self, member: Member, peer: Peer, message: Message, now: float) -> list[Send]:
        match message:
            case Done():
                return self.dispatch.take_outcomes(member, message, now)
            case LeasesReturned(leases):
                return self.dispatch.leases_returned(member, leases, now)
            case SlotsLost():
                return self.dispatch.slots_lost(member, message, now)
            case SlotsWaiting():
                return self.dispatch.slots_waiting(member, message)
            case WorkerFacts():
                load = self.dispatch.loads[member]
                self.dispatch.facts.take(member, message, load.leases, now)
                return []
            case ServerFacts():
                self.servers.take(member, message, now)
                return []
            case Beat():
                return [Send(peer, self.membership.echo(member))]
            case Register() | Leave() | Goodbye():
                return self.membership.handle(Heard(peer, message), now)
            case ActorReady() | ActorExited():
                return self.actors.from_worker(member, message, now)
            case _:
                return [_refuse(peer, "a worker", message)]

    def _from_coordinator(self, peer: Peer, message: Message, now: float) -> list[Send]:
        session = self.dispatch.sessions[peer]
        match message:
            case Submit():
                return self.dispatch.submit(session, message, now)
            case Define(functions, names):
                session.functions.update(functions)
                self.dispatch.facts.define(session.coordinator, functions, names)
                return []
            case ProgramFacts():
                session.program = message
                return []
            case ServerFacts():
                self.servers.take(peer, message, now)
                return []
            case Forget(_, functions, everywhere):
                return self.dispatch.forget(session, functions, everywhere=everywhere)
            case ResultReceived():
                return self.dispatch.result_received(session, message)
            case CancelWork():
                return self.dispatch.cancel_work(session, message)
            case EndRound():
                return self.dispatch.end_round(session, message, now)
            case (
                CreateActor()
                | ActorsOwned()
                | DropActor()
                | FindActor()
                | ActorKnown()
                | WatchActor()
            ):
                return self.actors.from_coordinator(peer, session.coordinator, message, now)
            case RegisterCoordinator():
                return self._register_coordinator(peer, message, now)
            case Goodbye():
                self.servers.reporter_gone(peer)
                effects = self.dispatch.end_session(peer, now, left=True)
                return effects + self.actors.coordinator_gone(peer, now, left=True)
            case _:
                return [_refuse(peer, "a coordinator", message)]

    def _register_coordinator(
        self, peer: Peer, message: RegisterCoordinator, now: float
    ) -> list[Send]:
        effects = self.dispatch.register_coordinator(peer, message, now)
        if peer in self.dispatch.sessions:
            self.actors.coordinator_registered(message.coordinator, peer)
        return effects

    def _from_newcomer(self, peer: Peer, message: Message, now: float, watched: bool) -> list[Send]:
        match message:
            case Register():
                return self.membership.handle(Heard(peer, message), now, watched=watched)
            case RegisterCoordinator():
                return self._register_coordinator(peer, message, now)
            case Goodbye():
                return []
            case _:
                return [
                    _refuse(
                        peer, "a peer that has not registered as a worker or coordinator", message
                    )
                ]


def _refuse(peer: Peer, sender: str, message: Message) -> Send:
    return Send(
        peer, Refused(errors.FAILED_PRECONDITION, f"{type(message).__name__} from {sender}")
    )

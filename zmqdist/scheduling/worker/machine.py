"""The worker's decisions: which slot runs which leased item, what the worker reports and aborts, and
when it registers, sends heartbeats, stops its work and gives up. No I/O.

Theory of operation of the slots
    Assigned work waits in a queue until a slot can take it. A slot runs its items in the order of
    their positions (records.py). A slot gets quick work in batches, so that it is not idle while a
    message travels, and slow work one by one. The machine can take back the items that a slot has
    not begun (`Reclaim`; the reply contains the slot's position).
    An item with devices needs a slot of its own: a process that was started for exactly these devices
    (P11). If there is none, an idle slot ends, and another takes its place. So does a slot without
    devices when other work waits and only slots with devices are idle.
    Outcomes are reported at the end of the event that makes them known. The start of an item is
    reported with the next outcomes. If an item runs for so long that the runtime sees its start in
    the position of its process slot, the start gets a message of its own. If the worker is lost,
    work whose start the dispatcher does not know runs on another worker with `report_before_start`.
    That worker reports the start, sends a Beat, and begins the work when the dispatcher has echoed
    the Beat.
    A report contains how long the worker has had work since the last report, and the round-trip
    time. From these times the dispatcher computes how much work to send ahead (WorkWindow).
    When the connection to the dispatcher is lost, work goes on for half of `lease_s`. Then the
    worker stops all work, so that no work can be executing when the dispatcher's lease has expired.
    Another incarnation of the dispatcher does not know the leases of this worker, so the worker
    stops its work before it registers with another incarnation.

Theory of operation of the contact with the dispatcher
    While connected the worker sends a Beat at each interval, and rarely while it has nothing that
    a lease protects: no work, result or actor. The dispatcher echoes each Beat. The
    echo shows that the dispatcher has received all messages that the worker sent before the Beat.
    When the connection ends, work may go on for half of `lease_s`, but not longer than three
    quarters of `lease_s` after the worker sent the last echoed Beat. This is safe because the
    dispatcher counts a lease from the last message that it received, and it received this Beat
    later than the worker sent it. It counts a lease also from the work that it has handed out last,
    so a worker that was idle begins at once, and sends the next Beat one interval later, but work
    whose connection ends before the echo stops at once. The time when the worker reads the echo does not count, because
    the echo may have waited in the worker's socket while the worker was frozen.
    A worker ends when it has had no contact for the orphan limit.
    The processes of actors stop with the work, except those that the dispatcher has told the worker
    to keep; actor_host_machine.py has their rules.
    The worker repeats a refused registration for a while, because the dispatcher may not know yet
    that an earlier worker of this name has crashed. A worker that was configured without an index
    accepts a new index from the dispatcher, because another worker may have got the old index while
    this worker was away.
    A Register names the leases that the worker had when it sent the Register. Leases that end
    before the reply are reported after the reply, because the dispatcher refuses messages from a
    peer that is not registered. If the worker has to stop all work while it still waits for the
    reply, it sends a second Register, without leases. The worker then ignores the reply to the
    first Register, and all work that the dispatcher has assigned before the reply to the second.
    The dispatcher replies to a Register and a Beat at once, so the time until the reply is the
    round-trip time.

Promises, checked by tests/scheduling/worker/test_machine.py and tests/sim
    P1  a slot runs at most one item at a time, in the order of its positions
    P2  each lease ends exactly once: by an outcome, LeasesReturned or SlotsLost, or because the
        worker drops it when contact is lost
    P3  no item runs for longer than `lease_s / 2` after contact was lost (process slots)
    P4  when a Register is sent to a new dispatcher, no item of the old dispatcher runs, except
        those in `stale_leases` (thread slots)
    P5  an aborted lease ends at the latest when its grace is over (process slots)
    P6  an item with `report_before_start` begins only after the report of its start has arrived at
        the dispatcher
    P7  a worker without a dispatcher for `orphan_limit_s` ends itself
    P8  with a start delay, worker i begins a coordinator's first work i times the delay later
        (Stagger)
    P9  pinned work begins before other waiting work, in the order in which it was assigned; if a
        slot reports nothing for STUCK_S, the machine takes back the items that the slot has not
        begun, so that pinned work can begin
    P10 an item that a slot has begun is neither taken back from the slot nor begun again by this
        worker
    P11 an item with devices runs in a process that was started for these devices, and no process
        that was started for other devices, some of which are the same, runs meanwhile; other work
        does not run in processes that were started for devices
    P12 an item whose slot uses too much memory ends with OUT_OF_MEMORY, not as a lost start; other
        items of the slot go on as after a crash
    P13 nested work begins before other waiting work, the deepest first; of one depth, pinned work
        begins first

Not here: functions that wait, and extra slots (nested_slots.py), processes, threads and pipes
(runtime.py), and the functions themselves, which are opaque.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from typing import Final

from msgspec.structs import replace

from zmqdist import errors
from zmqdist.batches import split
from zmqdist.events import Heard, Send, Ticked
from zmqdist.limits import LEASE_S
from zmqdist.messages import (
    BULK,
    CANCELLED,
    OUT_OF_MEMORY,
    AbortLeases,
    Assign,
    Beat,
    Done,
    Forget,
    FreeResult,
    Goodbye,
    KeepActor,
    Leased,
    LeasesReturned,
    Leave,
    Message,
    Outcome,
    Refused,
    Register,
    Registered,
    SlotsLost,
    SlotsWaiting,
    StartActor,
    StealRequest,
    StopActor,
    TaskEvent,
)
from zmqdist.scheduling.shared.quantities import Grant, Quantities
from zmqdist.scheduling.worker.actor_host_machine import ActorHost
from zmqdist.scheduling.worker.nested_slots import NestedSlots
from zmqdist.scheduling.worker.records import (
    Slot,
    SlotState,
    Stagger,
    WaitingWork,
    kill_overdue,
    slots_to_change,
)
from zmqdist.scheduling.worker.worker_events import (
    NOT_RUN,
    ActorEnded,
    ActorServing,
    DispatcherConnected,
    DispatcherDisconnected,
    Effect,
    Event,
    Exit,
    ForgetFunctions,
    FreeBulk,
    Give,
    Interrupt,
    Kill,
    LeaveRequested,
    Reclaim,
    SlotDied,
    SlotFinished,
    SlotOverMemory,
    SlotReady,
    SlotReclaimed,
    SlotResumed,
    SlotSeen,
    SlotWaits,
    Spawn,
    WaitAnswered,
)

DISPATCHER: Final = "dispatcher"
"""The dispatcher, which is the only peer of a worker's machine."""
STUCK_S: Final = 0.02
"""Seconds without a report of a slot after which its unbegun items are taken back, if another slot
is idle or pinned work waits."""
SPAWN_FAILURES_MAX: Final = 3
"""The worker ends when this many slot processes in a row have ended before they were ready."""
REGISTER_AGAIN_S = 0.25
"""Seconds before a refused registration is repeated."""
TRIPS_KEPT = 4
"""`Contact.trip_s` is the shortest of this many last round trips, because longer round trips
include time in which a message waited."""
RETRIED_REFUSALS = (errors.ALREADY_EXISTS, errors.FAILED_PRECONDITION)
"""The codes of refusals after which the worker registers again, because the cause of the refusal
may pass."""


def earliest(first: float | None, second: float | None) -> float | None:
    """Return the earlier of two times, where None means never. Does not use the slower `min`,
    because it is called after each event."""
    if first is None or (second is not None and second < first):
        return second
    return first


@dataclass(slots=True)
class Contact:
    """The state of a worker's contact with its dispatcher. Times are seconds by the machine's
    clock; None means never.

    Attributes:
      orphan_at: when the worker ends if it has no dispatcher by then; None while the worker is
        registered.
      dispatcher: the incarnation of the dispatcher that knows the worker's leases; None if no
        dispatcher knows them.
      up: whether the connection is established.
      registered: whether the dispatcher has accepted the registration over this connection.
        Invariant: only while `up`.
      named: whether the worker was configured with its index; False if a dispatcher chose the
        index.
      index_conflict: whether the dispatcher refused the index because another worker has it.
      serial: the number of the latest registration over this connection, counted from 1. A
        dispatcher of an older version replies with 0.
      lease_s: the dispatcher's lease; 0 before the first registration.
      beats_sent, beats_echoed: the number of heartbeats over this connection. Invariant:
        beats_echoed <= beats_sent.
      stop_at: when all work must stop if the contact is still lost.
    """

    orphan_limit_s: float
    orphan_at: float | None
    dispatcher: int | None = None
    up: bool = False
    registered: bool = False
    named: bool = True
    index_conflict: bool = False
    serial: int = 0
    lease_s: float = 0.0
    beats_sent: int = 0
    beats_echoed: int = 0
    stop_at: float | None = None
    _beat_s: float = 1.0
    _beat_at: float | None = None
    _register_at: float | None = None
    _refusals: int = 0
    _unanswered_at: deque[float] = field(default_factory=deque)
    """The times at which the worker sent the registrations and beats that have no reply yet, oldest
    first."""
    _answered_at: float = -inf
    """When the worker sent the latest registration or beat that has a reply. The dispatcher
    received it then or later."""
    _postponed: list[Send] = field(default_factory=list)
    """The messages to send once the dispatcher has accepted the registration."""
    _trips_s: deque[float] = field(default_factory=lambda: deque(maxlen=TRIPS_KEPT))

    @property
    def deadline(self) -> float | None:
        first = earliest(self._beat_at, self.orphan_at)
        return earliest(earliest(first, self.stop_at), self._register_at)

    @property
    def trip_s(self) -> float:
        """The round-trip time to the dispatcher; 0 while unknown."""
        return min(self._trips_s, default=0.0)

    def connected(self, incarnation: int) -> bool:
        """Record that the connection is established. Return whether the dispatcher is a new
        incarnation, which does not know the leases."""
        self.up = True
        self.serial = 0
        self.beats_sent = self.beats_echoed = 0
        self._unanswered_at.clear()
        is_new = incarnation != self.dispatcher
        self.dispatcher = incarnation
        self._register_at = None
        return is_new

    def note_registration(self, now: float) -> None:
        """Record that a Register is sent. Drop the postponed reports of ended leases: the Register
        does not name these leases, so the dispatcher ends them without a report."""
        self.serial += 1
        self._postponed.clear()
        self._unanswered_at.clear()
        self._unanswered_at.append(now)

    def note_beat(self, now: float) -> None:
        """Record that a beat is sent."""
        self.beats_sent += 1
        self._unanswered_at.append(now)

    def echoed(self, idle_beat_s: float, now: float, *, idle: bool) -> None:
        """Record that the dispatcher has echoed a beat."""
        self.beats_echoed += 1
        if idle and self._beat_at is not None:
            self._beat_at = max(self._beat_at, now + idle_beat_s)
        self._note_reply(now)

    def is_certain(self, now: float) -> bool:
        """Return whether a reply shows that the dispatcher counts this worker's lease until after
        now, as far as this worker must know (`disconnected`)."""
        return now < self._answered_at + 0.75 * self.lease_s

    def _note_reply(self, now: float) -> None:
        if self._unanswered_at:
            self._answered_at = self._unanswered_at.popleft()
            self._trips_s.append(now - self._answered_at)

    def disconnected(self, now: float) -> None:
        self.up = self.registered = False
        self._beat_at = self._register_at = None
        self.orphan_at = now + self.orphan_limit_s
        self.stop_at = min(
            now + self.lease_s / 2, max(now, self._answered_at + 0.75 * self.lease_s)
        )

    def report(self, message: Message) -> list[Send]:
        """If the worker is registered, return the Send of this report of ended leases. Otherwise
        postpone the report, and return []."""
        if self.registered:
            return [Send(DISPATCHER, message)]
        self._postponed.append(Send(DISPATCHER, message))
        return []

    def accepted(self, beat_s: float, lease_s: float, now: float) -> list[Send]:
        """Record that the dispatcher has accepted the registration. Return the reports postponed
        since the Register, in order."""
        self._beat_s, self.lease_s = beat_s, lease_s
        self._note_reply(now)
        self.registered = True
        self._register_at = None
        self.index_conflict = False
        self._refusals = 0
        self.orphan_at = self.stop_at = None
        self._beat_at = now + beat_s
        postponed, self._postponed = self._postponed, []
        return postponed

    def refused(self, code: int, now: float) -> bool:
        """Record a refusal by the dispatcher. Return whether the worker will register again. If so,
        `register_due` says when."""
        self.registered = False
        if code in RETRIED_REFUSALS and self._register_at is not None:
            # A registration is already planned. The dispatcher refuses each message that was on its
            # way, but these refusals count as one.
            return True
        self._refusals += 1
        patience_s = 1.0 + (self.lease_s or LEASE_S)
        if code not in RETRIED_REFUSALS or self._refusals * REGISTER_AGAIN_S >= patience_s:
            return False
        self.index_conflict = code == errors.ALREADY_EXISTS and not self.named
        self._register_at = now + REGISTER_AGAIN_S
        return True

    def register_due(self, now: float) -> bool:
        due = self._register_at is not None and now >= self._register_at
        if due:
            self._register_at = None
        return due

    def must_stop(self, now: float) -> bool:
        """Return whether all work must stop now, because the contact was lost for too long.

        Return True at most once after each loss of contact. The caller must then stop the work, and
        the worker registers anew.
        """
        if self.stop_at is None or now < self.stop_at:
            return False
        self.stop_at = None
        if not self.up:
            self.dispatcher = None
        elif self._register_at is None:
            # Register again, because the Register that was sent lists leases which the caller ends
            # now.
            self._register_at = now
        return True

    def beat_due(self, now: float) -> bool:
        due = self._beat_at is not None and now >= self._beat_at
        if due:
            self._beat_at = now + self._beat_s
        return due

    def note_work(self, now: float) -> None:
        """Record that the worker is not idle."""
        if self._beat_at is not None:
            self._beat_at = min(self._beat_at, now + self._beat_s)


class WorkerMachine:
    """The leases, slots and connection of one worker; the module's docstring has the rules.

    Attributes:
      contact: the state of the contact with the dispatcher.
      queue, slots: the work that waits for a slot, and the slots.
      actors: the processes of actors.
      nested: the functions that wait for results, and the extra slots.
      functions: the pickled functions, by (coordinator, number).
      results: the outcomes of the bulk results that the worker holds, by lease.
      grants: the resources of leases that have some. Some of these leases may have ended.
      workers: the number of workers in the cluster, from the last Assign.
      serving: whether data tasks still serve readers. While they do, a leaving worker stays until
        the end of its grace.
      leave_at: when a leaving worker aborts items that still run; None if the worker has aborted
        them, or does not leave.
    """

    def __init__(
        self,
        *,
        incarnation: int,
        job: str,
        index: int,
        slots: int,
        pid: int,
        host: str,
        orphan_limit_s: float,
        can_kill: bool,
        now: float,
        address: str = "",
        tags: tuple[str, ...] = (),
        start_delay: tuple[float, float] = (0.0, 0.0),
        threads_per_slot: int = 0,
        resources: Quantities = (),
        actors_max: int = 0,
        nested_slots_max: int = 0,
    ) -> None:
        self.job, self.index, self.can_kill = job, index, can_kill
        self._register_template = Register(
            incarnation,
            job,
            index,
            slots,
            [],
            [],
            pid,
            host,
            address,
            tags,
            threads_per_slot=threads_per_slot,
            resources=resources,
            actors_max=actors_max,
            nested_slots_max=nested_slots_max,
        )
        self.actors = ActorHost(actors_max)
        self.leaving, self.serving, self.workers = False, False, 0
        self.exit: Exit | None = None
        self.slots = [Slot(i) for i in range(slots)]
        self.nested = NestedSlots(self.slots, nested_slots_max)
        self.queue = WaitingWork()
        self.grants: dict[int, Grant] = {}
        self._busy_since: float | None = None
        """Since when the worker has had work that is not in a report of its busy time yet."""
        self.functions: dict[tuple[int, int], bytes] = {}
        self.results: dict[int, Outcome] = {}
        self._outcomes: list[Outcome] = []
        self._runs: list[TaskEvent] = []
        self._starts: list[int] = []
        self.contact = Contact(orphan_limit_s, now + orphan_limit_s, named=index >= 0)
        self.leave_at: float | None = None
        self._spawn_failures, self._stagger = 0, Stagger(*start_delay)
        self._announced: tuple[int, int] | None = None
        """The lease whose start was reported in advance, and the number of the Beat after whose
        echo the item may begin (P6)."""

    @property
    def deadline(self) -> float | None:
        """The time at which the runtime must next call `handle(Ticked(), now)`; None means
        never.
        """
        if self.exit is not None:
            return None
        first = earliest(earliest(self.contact.deadline, self.leave_at), self._stagger.until)
        first = earliest(first, self.actors.deadline)
        first = earliest(first, self.nested.deadline)
        for slot in self.slots:
            if slot.abort_at and self.can_kill:
                first = earliest(first, slot.kill_at)
            if len(slot.given) > 1 and _could_balance(slot, self.slots, self.queue):
                first = earliest(first, slot.reported_at + STUCK_S)
        return first

    @property
    def busy_slots(self) -> int:
        return sum(bool(slot.given) for slot in self.slots)

    @property
    def running(self) -> int:
        """The number of slots that run an item, plus the number of items that wait."""
        return self.busy_slots + len(self.queue)

    @property
    def _is_idle(self) -> bool:
        """Whether the worker has nothing that a lease protects."""
        stale = any(slot.state is SlotState.LEFT_OVER for slot in self.slots)
        return not (self.running or stale or self.results or self.actors.processes)

    def lease_at(self, slot: int, position: int) -> int | None:
        """Return the lease of the item at this position of the slot; None if there is no such
        item.
        """
        return next((item[0] for at, item in self.slots[slot].given if at == position), None)

    def start(self) -> list[Effect]:
        """Return the effects that start the slots. Call it before the first event."""
        return [Spawn(slot.index) for slot in self.slots]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event and return the effects to carry out, in order. `now` is monotonic
        seconds."""
        if self.exit is not None:
            return []
        effects = self._apply(event, now)
        if self.exit is None:
            effects += self._fill(now) if self.queue else []
            effects += self._balance(now) if len(self.slots) > 1 or self.queue.pinned else []
            effects += self._report(now) if self._outcomes or self._starts else []
        return effects + self._leave_if_idle() if self.leaving else effects

    def _apply(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Heard():
                return self._handle_message(event.message, now)
            case SlotFinished():
                return self._finished(self.slots[event.slot], event.outcomes, now)
            case SlotSeen(index, position):
                self._starts += self.slots[index].take_starts(position)
                return []
            case SlotReady(index):
                self.slots[index].enter(SlotState.READY)
                self._spawn_failures = 0
                self.slots[index].reported_at = now
                return []
            case SlotWaits(index, position):
                return self._wait(self.slots[index], position)
            case SlotResumed(index, position):
                slot = self.slots[index]
                if slot.waits_at != position:
                    return []
                self.nested.end_wait(slot)
                return [*self.contact.report(SlotsWaiting([], slot.leases()[:1]))]
            case SlotReclaimed(index, position):
                return self._reclaimed(self.slots[index], position, now)
            case SlotDied():
                return self._died(event)
            case SlotOverMemory(index, position, reason):
                return self._end_over_memory(self.slots[index], position, reason)
            case DispatcherConnected(incarnation):
                return self._dispatcher_up(incarnation, now)
            case DispatcherDisconnected():
                self.contact.disconnected(now)
                return []
            case ActorServing(incarnation, address, key):
                return self._of_actors(self.actors.served(incarnation, address, key))
            case ActorEnded(incarnation, reason, error):
                return self._of_actors(self.actors.ended(incarnation, reason, error))
            case LeaveRequested(grace_s):
                return self._leave(grace_s, now)
            case Ticked():
                return self._tick(now)

    # -- the dispatcher ----------------------------------------------------------------------------

    def _handle_message(self, message: object, now: float) -> list[Effect]:
        match message:
            case Assign(functions, items, report_before_start, workers, pinned, grants, depth) if (
                self.contact.registered
            ):
                self.workers = workers
                if grants:
                    self._drop_ended_grants()
                    self.grants.update(
                        (lease, Grant(amounts, devices)) for lease, amounts, devices in grants
                    )
                self.contact.note_work(now)
                self._stagger.note_arrival(items, self.index, now)
                if not self.running:
                    self._busy_since = now
                for coordinator, fn, pickled in functions:
                    self.functions[coordinator, fn] = pickled
                self.queue.put(
                    items, report_before_start=report_before_start, pinned=pinned, depth=depth
                )
                return self._returned(self.queue.empty()) if self.leaving else []
            case Registered(index, beat_s, lease_s, _, serial) if serial in (
                0,
                self.contact.serial,
            ):
                self.index = index
                postponed = self.contact.accepted(beat_s, lease_s, now)
                self._outcomes = [
                    *self.results.values(),
                    *(o for o in self._outcomes if o[0] not in self.results),
                ]
                waiting = [slot.leases()[0] for slot in self.slots if slot.waits_at]
                if waiting:  # a dispatcher forgets them with the connection
                    postponed.append(Send(DISPATCHER, SlotsWaiting(waiting, [])))
                return [*self._announce_leave(), *postponed]
            case Beat(idle_beat_s):
                self.contact.echoed(idle_beat_s, now, idle=self._is_idle)
                return self._start_actors(now) if self.actors.orders else []
            case StealRequest(leases):
                lease_set = set(leases)
                # Report which of these leases have begun, because a program that cancels work may
                # wait for this report.
                for slot in self.slots:
                    self._starts += slot.begun_among(lease_set)
                return self._return_unbegun(lease_set)
            case AbortLeases(leases, grace_s):
                return self._abort_leases(set(leases), now + grace_s)
            case FreeResult(leases):
                return [
                    FreeBulk(lease) for lease in leases if self.results.pop(lease, None) is not None
                ]
            case Forget(coordinator, numbers, everywhere):
                return self._forget({(coordinator, number) for number in numbers}, everywhere)
            case StartActor() if self.contact.registered:
                self.contact.note_work(now)
                self.actors.orders.append(message)
                return self._start_actors(now)
            case StopActor():
                return self._of_actors(self.actors.stop(message, now))
            case KeepActor():
                return [*self.actors.keep(message)]
            case Leave(grace_s):
                return self._leave(grace_s, now)
            case Refused(code, text, final):
                return (
                    [] if not final and self.contact.refused(code, now) else self._exit(code, text)
                )
            case _:
                return []

    def _start_actors(self, now: float) -> list[Effect]:
        contact = self.contact
        if not contact.is_certain(now):
            # the echo of a Beat, or of one that is on its way, makes it certain
            return [] if contact.beats_sent > contact.beats_echoed else [self._beat(now)]
        orders, self.actors.orders = self.actors.orders, []
        return [
            effect
            for order in orders
            for effect in self._of_actors(self.actors.start(order, leaving=self.leaving))
        ]

    def _of_actors(self, effects: Sequence[Effect | Message]) -> list[Effect]:
        """Return the effects about actors, with their reports as messages to the dispatcher."""
        return [
            sent
            for effect in effects
            for sent in (self.contact.report(effect) if isinstance(effect, Message) else [effect])
        ]

    def _dispatcher_up(self, incarnation: int, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.contact.connected(incarnation):
            effects += self._abandon()
            self.functions.clear()
            self.actors.met_dispatcher()
        self._announced = None
        return effects + self._register(now)

    def _register(self, now: float) -> list[Effect]:
        self.contact.note_registration(now)
        self.actors.orders.clear()  # the dispatcher repeats them
        held_leases = [item[0] for item in self.queue]
        held_leases += [
            lease
            for slot in self.slots
            if slot.state is not SlotState.LEFT_OVER
            for lease in slot.leases()
        ]
        held_leases += [outcome[0] for outcome in self._outcomes]
        held_leases += [lease for lease in self.results if lease not in set(held_leases)]
        stale_leases = [
            (item[0], item[1])
            for slot in self.slots
            if slot.state is SlotState.LEFT_OVER
            for _, item in slot.given
        ]
        self._drop_ended_grants()
        template, contact = self._register_template, self.contact
        index = -1 if contact.index_conflict else self.index
        by_dispatcher, serial = index >= 0 and not contact.named, contact.serial
        register = replace(
            template,
            index=index,
            held=held_leases,
            stale_leases=stale_leases,
            index_given=by_dispatcher,
            serial=serial,
            grants=[(lease, *grant) for lease, grant in self.grants.items()],
            actors=self.actors.present,
        )
        return [Send(DISPATCHER, register)]

    def _drop_ended_grants(self) -> None:
        live = {item[0] for item in self.queue}
        live.update(lease for slot in self.slots for lease in slot.leases())
        self.grants = {lease: grant for lease, grant in self.grants.items() if lease in live}

    def _tick(self, now: float) -> list[Effect]:
        contact = self.contact
        effects: list[Effect] = []
        if contact.orphan_at is not None and now >= contact.orphan_at:
            return self._exit(errors.UNAVAILABLE, f"no dispatcher for {contact.orphan_limit_s:g} s")
        if contact.must_stop(now):
            effects += [*self._abandon(), *self.actors.kill_unkept()]
        if contact.register_due(now):
            effects += self._register(now)
        if contact.beat_due(now):
            effects.append(self._beat(now))
        if self.leave_at is not None and now >= self.leave_at:
            effects += self._abort_leases(
                {lease for slot in self.slots for lease in slot.leases()}, now
            )
            self.leave_at = None
            if not self.can_kill:
                effects += self._returned(
                    [
                        n
                        for slot in self.slots
                        if slot.state is not SlotState.LEFT_OVER
                        for n in slot.leases()
                    ]
                )
                effects += self._exit(errors.OK, "")
        effects += self.actors.kill_overdue(now)
        effects += self.nested.end_idle(now)
        return effects + (kill_overdue(self.slots, now) if self.can_kill else [])

    def _beat(self, now: float) -> Send:
        self.contact.note_beat(now)
        return Send(DISPATCHER, Beat())

    # -- stopping ----------------------------------------------------------------------------------

    def _abandon(self) -> list[Effect]:
        """Drop all leases and abort all items that run, because no dispatcher would accept their
        outcomes (P3, P4)."""
        effects: list[Effect] = [FreeBulk(lease) for lease in self.results]
        self.queue.empty()
        self.queue.pinned.clear()
        self._outcomes.clear()
        self._starts.clear()
        self.queue.depths.clear()
        self.results.clear()
        self._announced = None
        for slot in self.slots:
            if not slot.given:
                continue
            if not self.can_kill:
                if slot.state is SlotState.READY:
                    slot.enter(SlotState.LEFT_OVER)
                effects.append(Interrupt(slot.index, slot.given[0][0]))
            else:
                self.nested.end_wait(slot)
                slot.given.clear()
                if slot.state is not SlotState.ENDING:
                    slot.enter(SlotState.ENDING)
                    effects.append(Kill(slot.index))
            slot.abort_at.clear()
            slot.to_return.clear()
        return effects

    def _leave(self, grace_s: float, now: float) -> list[Effect]:
        at = now + grace_s
        # A second request to leave can shorten the grace, but not prolong it.
        if not self.leaving or (self.leave_at is not None and at < self.leave_at):
            self.leave_at = at
        self.leaving = True
        reclaims = [
            effect for slot in self.slots if len(slot.given) > 1 for effect in _reclaim(slot)
        ]
        ends = self.actors.stop_all(at) if self.actors.processes else []
        return [*self._announce_leave(), *self._returned(self.queue.empty()), *reclaims, *ends]

    def _announce_leave(self) -> list[Effect]:
        """Tell the dispatcher that the worker leaves, so that it does not assign returned work to
        this worker again."""
        return [Send(DISPATCHER, Leave(0.0))] if self.leaving and self.contact.registered else []

    def _leave_if_idle(self) -> list[Effect]:
        busy = self.busy_slots or self.queue or self.actors.processes
        idle = not (busy or (self.serving and self.leave_at is not None))
        return self._exit(errors.OK, "") if self.leaving and self.exit is None and idle else []

    def _exit(self, code: int, text: str) -> list[Effect]:
        effects: list[Effect] = [*self._report(), *self.actors.kill_all()]
        self.exit = Exit(code, text)
        if self.contact.up:
            effects.append(Send(DISPATCHER, Goodbye()))
        return [*effects, self.exit]

    def _returned(self, leases: list[int]) -> list[Effect]:
        return [*self.contact.report(LeasesReturned(leases))] if leases else []

    def _return_unbegun(self, leases: set[int]) -> list[Effect]:
        back = self.queue.take_out(leases)
        # The report is sent even if `back` is empty, because the dispatcher waits for one
        # LeasesReturned for each StealRequest.
        effects: list[Effect] = [*self.contact.report(LeasesReturned(back))]
        for slot in self.slots:
            unbegun = leases & slot.unbegun()
            if unbegun:
                slot.to_return |= unbegun
                effects += _reclaim(slot)
        return effects

    def _abort_leases(self, leases: set[int], at: float) -> list[Effect]:
        effects = self._return_unbegun(leases)
        for slot in self.slots:
            for position, item in slot.given:
                if item[0] not in leases:
                    continue
                slot.abort_at[item[0]] = at
                if position == slot.given[0][0]:
                    effects.append(Interrupt(slot.index, position))
        for lease in leases & self.results.keys():
            del self.results[lease]
            effects.append(FreeBulk(lease))
        return effects

    # -- slots -------------------------------------------------------------------------------------

    def _fill(self, now: float) -> list[Effect]:
        """Give waiting work to the slots that can take it."""
        effects: list[Effect] = []
        nested = self.nested
        if nested.at_bound:
            effects += self._returned(self.queue.take_out(self.queue.above(nested.floor)))
        for slot in self.slots if not self._stagger.delays(now) else ():
            if not self.queue:
                break
            # A slot whose item was aborted may be killed soon, together with what it has.
            if slot.state is not SlotState.READY or slot.abort_at:
                continue
            if (self.grants or slot.devices) and not self._suits(slot):
                continue
            if nested.in_use and not nested.may_begin(slot):
                continue
            if nested.at_bound and not self.queue.may_begin_below(nested.floor):
                break
            if (
                self.queue.report_before_start
                and self.queue[0][0] in self.queue.report_before_start
            ):
                effects += self._announce_then_give(slot, now)
            elif len(slot.given) <= slot.batch // 2 and not _pinned_would_wait(slot, self.queue):
                count = slot.batch - len(slot.given)
                if nested.at_bound:
                    count = min(count, self.queue.count_below(nested.floor))
                effects.append(self._give(slot, count, now))
        if self.queue and (self.grants or any(slot.devices for slot in self.slots)):
            effects += self._change_slots()
        if nested.in_use and self.queue:
            at_bound, queue = nested.at_bound, self.queue
            count = queue.count_below(nested.floor) if at_bound else len(queue)
            effects += nested.start_extra(count)
        return effects

    def _devices_of(self, item: Leased) -> tuple[int, ...]:
        grant = self.grants.get(item[0])
        return () if grant is None else grant.devices

    def _suits(self, slot: Slot) -> bool:
        """Return whether a slot may get the next item of the queue. An item with resources begins
        at once, so that the resources are not idle."""
        if slot.devices != (devices := self._devices_of(self.queue[0])):
            return False
        if slot.given and self.queue[0][0] in self.grants:
            return False
        return not devices or not any(
            other.devices != devices and not set(other.devices).isdisjoint(devices)
            for other in self.slots
        )

    def _change_slots(self) -> list[Effect]:
        """End idle slots so that the first items of the queue get slots with their devices."""
        effects: list[Effect] = []
        first = [*takewhile(lambda item: item[0] in self.grants, self.queue)] or [self.queue[0]]
        for item in first if self.can_kill else ():
            for slot in slots_to_change(self.slots, self._devices_of(item)):
                slot.enter(SlotState.ENDING)
                effects.append(Kill(slot.index))
        return effects

    def _wait(self, slot: Slot, position: int) -> list[Effect]:
        """Have the function of a slot wait for results, and take back what the slot has not
        begun."""
        lease = self.lease_at(slot.index, position)
        depth = self.queue.depths.get(lease or 0, 0)
        refusal = self.nested.begin_wait(slot, position, depth)
        effects: list[Effect] = [WaitAnswered(slot.index, refusal)]
        if slot.waits_at == position and lease is not None:
            self._starts += slot.take_starts(position)
            effects += self.contact.report(SlotsWaiting([lease], []))
            effects += _reclaim(slot) if len(slot.given) > 1 else []
        return effects

    def _announce_then_give(self, slot: Slot, now: float) -> list[Effect]:
        if slot.given:
            return []
        lease = self.queue[0][0]
        if self._announced is None or self._announced[0] != lease:
            if not self.contact.registered:
                return []
            beat = self._beat(now)
            self._announced = (lease, self.contact.beats_sent)
            self.queue.announced = lease
            return [Send(DISPATCHER, Done([], [lease])), beat]
        if self.contact.beats_echoed < self._announced[1]:
            return []
        self._announced = None
        self.queue.report_before_start.discard(lease)
        return [self._give(slot, 1, now)]

    def _give(self, slot: Slot, count: int, now: float) -> Give:
        """Give a slot the next items of the queue, but none whose start must be reported first. The
        loop must be fast: it runs per item."""
        was_idle = not slot.given
        functions: list[tuple[int, int, bytes]] = []
        items: list[tuple[int, int, int, bytes]] = []
        queue, reported = self.queue, self.queue.report_before_start
        slot_items, known_functions, position = slot.given, slot.known, slot.position
        grants = self.grants
        any_rule = bool(reported or grants)
        for _ in range(min(count, len(queue))):
            if any_rule and (
                queue[0][0] in reported or (slot_items and (slot.devices or queue[0][0] in grants))
            ):
                break
            item = queue.popleft()
            _, coordinator, _, fn, payload = item
            key = (coordinator, fn)
            if key not in known_functions:
                known_functions.add(key)
                functions.append((coordinator, fn, self.functions[key]))
            position += 1
            slot_items.append((position, item))
            items.append((position, coordinator, fn, payload))
        slot.position = position
        slot.note_handout(len(items), now, was_idle=was_idle)
        # Report this start now if a report is due anyway, or if slots are threads, whose starts the
        # runtime does not poll.
        if was_idle and (self._outcomes or not self.can_kill):
            self._starts += slot.take_starts()
        return Give(slot.index, functions, items)

    def _finished(
        self, slot: Slot, outcomes: list[tuple[int, int, bytes]], now: float
    ) -> list[Effect]:
        count = 0
        stale: list[int] = []
        effects: list[Effect] = []
        slot_items, reports, pinned = slot.given, self._outcomes, self.queue.pinned
        left_over, depths = SlotState.LEFT_OVER, self.queue.depths
        may_be_aborted = bool(slot.abort_at or slot.to_return)
        for position, kind, payload in outcomes:
            if not slot_items or slot_items[0][0] != position:
                continue  # the worker has dropped this lease
            item = slot_items.popleft()[1]
            lease = item[0]
            if kind == NOT_RUN:
                effects += self._not_run(slot, item)
                continue
            count += 1
            aborted = may_be_aborted and slot.forget_lease(lease)
            if slot.state is left_over:
                slot.enter(SlotState.READY)
                stale.append(lease)
                effects += [FreeBulk(lease)] if kind == BULK else []
                continue
            # The dispatcher ignores the result of an aborted lease, and may not know the lease any
            # more, so this worker frees the result.
            if aborted and kind == BULK and not self.leaving:
                effects.append(FreeBulk(lease))
                kind, payload = CANCELLED, b""
            reports.append((lease, kind, payload))
            if pinned:
                pinned.discard(lease)
            if depths:
                depths.pop(lease, None)
            if kind == BULK:
                self.results[lease] = reports[-1]
        if slot.waits_at and not (slot_items and slot_items[0][0] == slot.waits_at):
            self.nested.end_wait(slot)  # only threads that the function has left still wait
        slot.reported_at = now
        if count:
            slot.tune(now, several=self.can_kill)
            self._starts += slot.take_starts()
        return effects + self._returned(stale)

    def _not_run(self, slot: Slot, item: Leased) -> list[Effect]:
        """Handle an item that a slot did not run, because the worker had taken it back: return it
        to the dispatcher, or put it back into the worker's queue."""
        if self._goes_back(slot, item[0]):
            return self._returned([item[0]])
        self.queue.put_back([item])
        return []

    def _goes_back(self, slot: Slot, lease: int) -> bool:
        """Have a slot forget a lease that it will not run. Return whether the item must go back to
        the dispatcher, and not to the queue."""
        must_return = lease in slot.to_return
        goes_back = slot.forget_lease(lease) or must_return or self.leaving
        if goes_back:
            self.queue.depths.pop(lease, None)
        return goes_back

    def _reclaimed(self, slot: Slot, position: int, now: float) -> list[Effect]:
        unbegun = slot.take_unbegun(position, now)
        back = [item[0] for item in unbegun if self._goes_back(slot, item[0])]
        returned = set(back)
        self.queue.put_back([item for item in reversed(unbegun) if item[0] not in returned])
        slot.to_return.clear()
        self._starts += slot.take_starts(position)
        effects = self._returned(back)
        if slot.given and slot.running in slot.abort_at:
            effects.append(Interrupt(slot.index, slot.given[0][0]))
        return effects

    def _died(self, event: SlotDied) -> list[Effect]:
        slot = self.slots[event.slot]
        effects: list[Effect] = []
        if slot.state is SlotState.STARTING:
            self._spawn_failures += 1
            if self._spawn_failures >= SPAWN_FAILURES_MAX:
                last_output = event.log or "it wrote nothing"
                problem = (
                    f"slot processes end before they are ready; the last one wrote:\n{last_output}"
                )
                return self._exit(errors.INTERNAL, problem)
        again: list[Leased] = []
        back: list[int] = []
        for position, item in slot.given:
            lease = item[0]
            if lease in slot.to_return or self.leaving:
                back.append(lease)
            elif lease in slot.abort_at:
                self._outcomes.append((lease, CANCELLED, b""))
            elif position == event.position == slot.over_memory[0]:
                self._outcomes.append((lease, OUT_OF_MEMORY, slot.over_memory[1].encode()))
            elif position == event.position:
                # Report the start first, because the dispatcher charges only work that has begun.
                self._starts.append(lease)
                effects += self._report()
                effects += self.contact.report(SlotsLost([(lease, event.exit_code, event.log)]))
            elif position < event.position:
                # this function has ended, but its outcome is lost with the slot process
                back.append(lease)
            else:
                again.append(item)
        for lease in {*slot.leases()} - {item[0] for item in again}:
            self.queue.depths.pop(lease, None)
        self.queue.put_back(again)
        effects += self._returned(back)
        spawns = self.nested.replaced(slot)
        return effects if self.leaving and not self.queue else effects + spawns

    def _end_over_memory(self, slot: Slot, position: int, reason: str) -> list[Effect]:
        """Kill a slot that uses too much memory. When it has died, its function ends with an error,
        unless its outcome has arrived by then (P12)."""
        if slot.state not in (SlotState.READY, SlotState.RECLAIMING):
            return []
        slot.over_memory = position, reason
        slot.enter(SlotState.ENDING)
        return [Kill(slot.index)]

    def _balance(self, now: float) -> list[Effect]:
        stuck = [
            slot
            for slot in self.slots
            if now >= slot.reported_at + STUCK_S and _could_balance(slot, self.slots, self.queue)
        ]
        return [effect for slot in stuck for effect in _reclaim(slot)]

    def _forget(self, keys: set[tuple[int, int]], everywhere: bool) -> list[Effect]:
        """Drop functions and resources. Return to the dispatcher the waiting items that need one of
        them, because their work has ended."""
        back = {item[0] for item in self.queue if (item[1], item[3]) in keys}
        effects = self._returned(sorted(self.queue.take_out(back)))
        for key in keys:
            self.functions.pop(key, None)
        for slot in self.slots:
            slot_keys = sorted(
                keys if everywhere and slot.state is not SlotState.STARTING else slot.known & keys
            )
            if slot_keys:
                slot.known.difference_update(slot_keys)
                effects.append(ForgetFunctions(slot.index, slot_keys))
        return effects

    def note_run(self, run: TaskEvent) -> None:
        """Report a run, for a watcher, before its outcome or with it."""
        self._runs.append(run)

    def _report(self, now: float | None = None) -> list[Effect]:
        """Report outcomes and starts since the last report, in as few messages as possible."""
        if not self.contact.registered or not (self._outcomes or self._starts):
            return []
        outcomes, starts = self._outcomes, self._starts
        self._outcomes, self._starts = [], []
        if not outcomes:
            return [Send(DISPATCHER, Done([], starts))]
        effects: list[Effect] = []
        busy_us = 0
        if now is not None:
            since, self._busy_since = self._busy_since, now if self.running else None
            busy_us = 0 if since is None else int((now - since) * 1e6)
        for part in split(outcomes):
            trip_us = int(self.contact.trip_s * 1e6)
            runs, self._runs = self._runs, []
            effects.append(Send(DISPATCHER, Done(part, starts, busy_us, trip_us, runs)))
            starts, busy_us = [], 0
        return effects


def _pinned_would_wait(slot: Slot, queue: WaitingWork) -> bool:
    """Return whether pinned work, if given to this slot, would wait behind other work (P9)."""
    return bool(slot.given) and queue.pinned_is_next and slot.given[-1][1][0] not in queue.pinned


def _could_balance(slot: Slot, slots: list[Slot], queue: WaitingWork) -> bool:
    """Return whether to take back the items that the slot has not begun. This is so if pinned work
    waits (P9), or if no work waits and another slot is idle."""
    if len(slot.given) < 2 or slot.state is not SlotState.READY:
        return False
    if queue:
        return queue.pinned_is_next
    return any(candidate.state is SlotState.READY and not candidate.given for candidate in slots)


def _reclaim(slot: Slot) -> list[Effect]:
    """Return the effect that takes back the items that a slot has not begun, unless a Reclaim of
    this slot is already in progress, or its process is being killed."""
    if slot.state is not SlotState.READY:
        return []
    slot.enter(SlotState.RECLAIMING)
    return [Reclaim(slot.index)]

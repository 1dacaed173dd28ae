"""What a worker does with its leases: which slot runs what, what is reported, what is cut off; no I/O.

Theory of operation
    Work that was assigned waits in a queue until a slot can take it. A slot runs what it was given in order; positions count the
    items given to it. Quick work is given in batches, so that a slot is not idle while a message travels, slow work one by
    one. What a slot has not begun can be taken back (`Reclaim`; the answer says where the slot is).
    Each outcome is reported at the end of the event in which it is known. A start is reported together with the next outcomes, or
    when a look at the slot has seen it: most work is over before its start would be worth a message, and whoever is lost with work
    whose start is not known makes it careful. Careful work is reported and the report's arrival awaited (the dispatcher echoes a
    Beat) before it starts.
    A report tells how long the worker has had work since the last one, and the round trip: with these the dispatcher keeps enough on
    the way (credit.py).
    Contact is the connection to the dispatcher. When it is lost, work goes on for half a lease; then everything is stopped, so
    that nothing of it can be executing when the dispatcher's lease has run out. Another life of the dispatcher knows nothing of
    what this worker has: it is stopped before the worker registers there.

Promises, checked by tests/machines/test_worker.py, test_worker_stops.py and tests/sim
    P1  a slot runs at most one item at a time, in the order of its positions
    P2  each lease ends by exactly one of: an outcome, Returned, SlotsLost; or is dropped because contact was lost
    P3  nothing runs longer than `lease_s / 2` after contact was lost (process slots)
    P4  when Register is sent to a new dispatcher, nothing of the old one is running, but for `leftover` (thread slots)
    P5  a lease that was cut off ends at most its grace later (process slots)
    P6  careful work is not begun before its start was reported and the report has arrived
    P7  a worker without a dispatcher for `orphan_limit_s` ends itself
    P8  with a start delay, worker i begins with a coordinator's first work i times that later (stagger.py)
    P9  work for this very worker is begun before what waits here for any, in the order in which it came; what a slot has is taken
        back for that if it is not over in STUCK_S
    P10 what a slot has begun is not taken back from it, and is not begun here once more

Not here: processes, threads, pipes (runtime.py), and what a function is.
"""

from __future__ import annotations

from typing import Any, Final

from zmqdist import errors
from zmqdist.batches import split
from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import (
    BULK,
    CANCELLED,
    Assign,
    Beat,
    CutOff,
    Done,
    Forget,
    Goodbye,
    Leased,
    Leave,
    Outcome,
    Recall,
    Refused,
    Register,
    Registered,
    Release,
    Returned,
    SlotsLost,
)
from zmqdist.scheduling.dispatcher.credit import BusyTime
from zmqdist.scheduling.dispatcher.stagger import Stagger
from zmqdist.scheduling.worker.contact import DISPATCHER as DISPATCHER
from zmqdist.scheduling.worker.contact import Contact, earliest
from zmqdist.scheduling.worker.slot import Slot
from zmqdist.scheduling.worker.waiting_work import Waiting
from zmqdist.scheduling.worker.worker_events import (
    NOT_RUN,
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
    LeaveAsked,
    Reclaim,
    SlotDied,
    SlotFinished,
    SlotReady,
    SlotReclaimed,
    SlotSeen,
    Spawn,
)

STUCK_S: Final = 0.02
"""A slot that reported nothing for this long gives up what it has not begun, if another slot could run it, or other work goes first."""
SPAWN_FAILURES_MAX: Final = 3
"""Slot processes that die before they are ready, one after the other, before the worker gives up."""


class WorkerMachine:
    """See the module's docstring."""

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
    ) -> None:
        self.job, self.index, self.pid, self.host = job, index, pid, host
        self.address, self.tags, self.threads_per_slot = address, tags, threads_per_slot
        self.incarnation, self.can_kill = incarnation, can_kill
        self.leaving, self.workers = False, 0  # workers: as the dispatcher told with the latest work
        self.serving = False  # readers want to have something to its end: a worker that leaves waits, within its grace
        self.ended: Exit | None = None
        self._slots = [Slot(i) for i in range(slots)]
        self.queue = Waiting()
        self._functions: dict[tuple[int, int], bytes] = {}
        self._bulk: dict[int, Outcome] = {}
        self._outcomes: list[Outcome] = []
        self._started: list[int] = []
        self._contact = Contact(orphan_limit_s, now + orphan_limit_s, named=index >= 0)
        self.leave_at: float | None = None  # when what it runs is cut off
        self._spawn_failures, self._stagger = 0, Stagger(*start_delay)
        self._busy = BusyTime()
        self._careful: tuple[int, int] | None = None
        """The careful lease whose start was reported, and the beat whose echo lets it start."""

    @property
    def deadline(self) -> float | None:
        """When `handle(Ticked(), now)` is next worth calling; None for never."""
        if self.ended is not None:
            return None
        first = earliest(earliest(self._contact.deadline, self.leave_at), self._stagger.until)
        for slot in self._slots:
            if slot.cut and self.can_kill:
                first = earliest(first, slot.kill_at)
            if len(slot.given) > 1 and self._could_balance(slot):
                first = earliest(first, slot.heard_at + STUCK_S)
        return first

    @property
    def registered(self) -> bool:
        """Whether a dispatcher has taken this worker, and the connection to it stands."""
        return self._contact.registered

    @property
    def lease_s(self) -> float:
        """The dispatcher's lease; 0 before the first registration."""
        return self._contact.lease_s

    @property
    def busy_slots(self) -> int:
        return sum(bool(slot.given) for slot in self._slots)

    @property
    def running(self) -> int:
        """Slots that run something, and what waits for them."""
        return self.busy_slots + len(self.queue)

    @property
    def figures(self) -> dict[str, Any]:
        """What a WorkerSnapshot says of it."""
        return {**_figures(self._slots, self.queue), "functions": len(self._functions), "results": len(self._bulk)}

    def lease_at(self, slot: int, position: int) -> int | None:
        """The lease of what a slot has at a position; None when it has nothing there."""
        return next((item[0] for at, item in self._slots[slot].given if at == position), None)

    def start(self) -> list[Effect]:
        """The first effects: start the slots."""
        return [Spawn(slot.index) for slot in self._slots]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event and return what must be done about it, in order. `now` is monotonic seconds."""
        if self.ended is not None:
            return []
        effects = self._apply(event, now)
        if self.ended is None:
            effects += self._fill(now) if self.queue else []
            effects += self._balance(now) if len(self._slots) > 1 or self.queue.own else []
            effects += self._report(now) if self._outcomes or self._started else []
        return effects + self._leave_if_done() if self.leaving else effects

    def _apply(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Heard():
                return self._hear(event.message, now)
            case SlotFinished():
                return self._finished(self._slots[event.slot], event.outcomes, now)
            case SlotSeen(index, position):
                self._started += self._slots[index].begun(position)
                return []
            case SlotReady(index):
                self._slots[index].ready = True
                self._spawn_failures = 0
                return []
            case SlotReclaimed(index, position):
                return self._reclaimed(self._slots[index], position, now)
            case SlotDied():
                return self._died(event)
            case DispatcherConnected(incarnation):
                return self._dispatcher_up(incarnation, now)
            case DispatcherDisconnected():
                self._contact.went(now)
                return []
            case LeaveAsked(grace_s):
                return self._leave(grace_s, now)
            case Ticked():
                return self._tick(now)

    # -- the dispatcher -----------------------------------------------------------------------------------------

    def _hear(self, message: object, now: float) -> list[Effect]:
        match message:
            case Assign(functions, items, careful, workers, first) if self.registered:
                self.workers = workers
                self._stagger.came(items, self.index, now)
                self._busy.came(now, self.running)
                for coordinator, fn, pickled in functions:
                    self._functions[coordinator, fn] = pickled
                self.queue.put(items, careful=careful, own=first)
                return self._return_queue() if self.leaving else []
            case Registered(index, beat_s, lease_s, _, serial) if serial in (0, self._contact.serial):
                self.index = index
                untold = self._contact.welcomed(beat_s, lease_s, now)
                self._outcomes = [*self._bulk.values(), *(o for o in self._outcomes if o[0] not in self._bulk)]
                return [*self._say_leaving(), *untold]
            case Beat():
                self._contact.echoed(now)
                return []
            case Recall(leases):
                wanted = set(leases)
                for slot in self._slots:  # somebody may wait to hear that it is too late
                    self._started += slot.begun_of(wanted)
                return self._take_back(wanted)
            case CutOff(leases, grace_s):
                return self._cut_off(set(leases), now + grace_s)
            case Release(leases):
                return [FreeBulk(lease) for lease in leases if self._bulk.pop(lease, None) is not None]
            case Forget(coordinator, numbers, everywhere):
                return self._forget({(coordinator, number) for number in numbers}, everywhere)
            case Leave(grace_s):
                return self._leave(grace_s, now)
            case Refused(code, text, final):
                return [] if not final and self._contact.refused(code, now) else self._exit(code, text)
            case _:
                return []

    def _dispatcher_up(self, incarnation: int, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._contact.came(incarnation):
            effects += self._abandon()
            self._functions.clear()
        self._careful = None
        return effects + self._register(now)

    def _register(self, now: float) -> list[Effect]:
        self._contact.registers(now)
        held = [item[0] for item in self.queue]
        held += [lease for slot in self._slots if not slot.orphan for lease in slot.leases()]
        held += [outcome[0] for outcome in self._outcomes]
        held += [lease for lease in self._bulk if lease not in set(held)]
        leftover = [(item[0], item[1]) for slot in self._slots if slot.orphan for _, item in slot.given]
        index = -1 if self._contact.another_has_it else self.index
        us = (self.incarnation, self.job, index, len(self._slots))
        given, serial = index >= 0 and not self._contact.named, self._contact.serial
        at = (self.pid, self.host, self.address)
        return [Send(DISPATCHER, Register(*us, held, leftover, *at, self.tags, given, serial, self.threads_per_slot))]

    def _tick(self, now: float) -> list[Effect]:
        contact = self._contact
        effects: list[Effect] = []
        if contact.orphaned(now):
            return self._exit(errors.UNAVAILABLE, f"no dispatcher for {contact.orphan_limit_s:g} s")
        if contact.must_stop(now):
            effects += self._abandon()
        if contact.register_due(now):
            effects += self._register(now)
        if contact.beat_due(now):
            effects.append(self._beat(now))
        if self.leave_at is not None and now >= self.leave_at:
            effects += self._cut_off({lease for slot in self._slots for lease in slot.leases()}, now)
            self.leave_at = None
            if not self.can_kill:
                effects += self._returned([lease for slot in self._slots if not slot.orphan for lease in slot.leases()])
                effects += self._exit(errors.OK, "")
        return effects + self._kill_overdue(now)

    def _kill_overdue(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for slot in self._slots if self.can_kill else ():
            if slot.kill_at is not None and slot.kill_at <= now:
                slot.killed = True
                effects.append(Kill(slot.index))
        return effects

    def _beat(self, now: float) -> Send:
        self._contact.beats(now)
        return Send(DISPATCHER, Beat())

    # -- stopping -----------------------------------------------------------------------------------------------

    def _abandon(self) -> list[Effect]:
        """Drop everything: nobody will take the outcomes, and nothing may go on running."""
        effects: list[Effect] = [FreeBulk(lease) for lease in self._bulk]
        self.queue.empty()
        self.queue.own.clear()
        self._outcomes.clear()
        self._started.clear()
        self._bulk.clear()
        self._careful = None
        for slot in self._slots:
            if not slot.given:
                continue
            if self.can_kill:
                effects.append(Kill(slot.index))
                slot.given.clear()
                slot.ready = False
                slot.killed = True
            else:
                slot.orphan = True
                effects.append(Interrupt(slot.index, slot.given[0][0]))
            slot.cut.clear()
            slot.wanted_back.clear()
        return effects

    def _leave(self, grace_s: float, now: float) -> list[Effect]:
        at = now + grace_s
        if not self.leaving or (self.leave_at is not None and at < self.leave_at):  # somebody asks for a sooner end
            self.leave_at = at
        self.leaving = True
        reclaims = [effect for slot in self._slots if len(slot.given) > 1 for effect in _reclaim(slot)]
        return [*self._say_leaving(), *self._return_queue(), *reclaims]

    def _say_leaving(self) -> list[Effect]:
        """Else what is given back would come again at once."""
        return [Send(DISPATCHER, Leave(0.0))] if self.leaving and self.registered else []

    def _leave_if_done(self) -> list[Effect]:
        idle = not (self.busy_slots or self.queue or (self.serving and self.leave_at is not None))
        return self._exit(errors.OK, "") if self.leaving and self.ended is None and idle else []

    def _exit(self, code: int, text: str) -> list[Effect]:
        effects: list[Effect] = self._report()
        self.ended = Exit(code, text)
        if self._contact.up:
            effects.append(Send(DISPATCHER, Goodbye()))
        return [*effects, self.ended]

    def _return_queue(self) -> list[Effect]:
        return self._returned(self.queue.empty())

    def _returned(self, leases: list[int]) -> list[Effect]:
        return [*self._contact.tell(Returned(leases))] if leases else []

    def _take_back(self, wanted: set[int]) -> list[Effect]:
        back = self.queue.take_out(wanted)
        effects: list[Effect] = [*self._contact.tell(Returned(back))]  # also when empty: a recall wants one answer
        for slot in self._slots:
            unbegun = wanted & slot.unbegun()
            if unbegun:
                slot.wanted_back |= unbegun
                effects += _reclaim(slot)
        return effects

    def _cut_off(self, wanted: set[int], at: float) -> list[Effect]:
        effects = self._take_back(wanted)
        for slot in self._slots:
            for position, item in slot.given:
                if item[0] not in wanted:
                    continue
                slot.cut[item[0]] = at
                if position == slot.given[0][0]:
                    effects.append(Interrupt(slot.index, position))
        for lease in wanted & self._bulk.keys():
            del self._bulk[lease]
            effects.append(FreeBulk(lease))
        return effects

    # -- slots --------------------------------------------------------------------------------------------------

    def _fill(self, now: float) -> list[Effect]:
        """Give waiting work to slots that can take it."""
        effects: list[Effect] = []
        for slot in self._slots if not self._stagger.holds(now) else ():
            if not self.queue:
                break
            if not slot.ready or slot.reclaiming or slot.orphan or slot.cut:
                continue
            if self.queue.care and self.queue[0][0] in self.queue.care:
                effects += self._give_careful(slot, now)
            elif len(slot.given) <= slot.batch // 2 and not self._would_wait(slot):
                effects.append(self._give(slot, slot.batch - len(slot.given), now))
        return effects

    def _would_wait(self, slot: Slot) -> bool:
        """Whether what is for this very worker would be behind other work at the slot."""
        return bool(slot.given) and self.queue.own_waits and slot.given[-1][1][0] not in self.queue.own

    def _give_careful(self, slot: Slot, now: float) -> list[Effect]:
        if slot.given:
            return []
        lease = self.queue[0][0]
        if self._careful is None or self._careful[0] != lease:
            if not self.registered:
                return []
            beat = self._beat(now)
            self._careful = (lease, self._contact.beats_sent)
            self.queue.begins = lease
            return [Send(DISPATCHER, Done([], [lease])), beat]
        if self._contact.beats_echoed < self._careful[1]:
            return []
        self._careful = None
        self.queue.care.discard(lease)
        return [self._give(slot, 1, now)]

    def _give(self, slot: Slot, count: int, now: float) -> Give:
        """The next of the queue, up to the next careful one. This is done for each piece of work: it has to be quick."""
        was_idle = not slot.given
        functions: list[tuple[int, int, bytes]] = []
        items: list[tuple[int, int, int, bytes]] = []
        queue, care, given, known, position = self.queue, self.queue.care, slot.given, slot.known, slot.position
        for _ in range(min(count, len(queue))):
            if care and queue[0][0] in care:
                break
            item = queue.popleft()
            _, coordinator, _, fn, payload = item
            key = (coordinator, fn)
            if key not in known:
                known.add(key)
                functions.append((coordinator, fn, self._functions[key]))
            position += 1
            given.append((position, item))
            items.append((position, coordinator, fn, payload))
        slot.position = position
        slot.took(len(items), now, was_idle=was_idle)
        if was_idle and (self._outcomes or not self.can_kill):  # it goes with these; and nobody looks at threads
            self._started += slot.begun()
        return Give(slot.index, functions, items)

    def _finished(self, slot: Slot, outcomes: list[tuple[int, int, bytes]], now: float) -> list[Effect]:
        count = 0
        leftover: list[int] = []
        effects: list[Effect] = []
        given, ended, own = slot.given, self._outcomes, self.queue.own
        asked_back = bool(slot.cut or slot.wanted_back)
        for position, kind, payload in outcomes:
            if not given or given[0][0] != position:
                continue  # of before it was abandoned
            item = given.popleft()[1]
            lease = item[0]
            if kind == NOT_RUN:
                effects += self._unbegun(slot, item)
                continue
            count += 1
            cut = asked_back and slot.ends(lease)
            if slot.orphan:
                slot.orphan = False
                leftover.append(lease)
                effects += [FreeBulk(lease)] if kind == BULK else []
                continue
            if cut and kind == BULK and not self.leaving:  # a dispatcher that does not know it would not let go of it
                effects.append(FreeBulk(lease))
                kind, payload = CANCELLED, b""
            ended.append((lease, kind, payload))
            if own:
                own.discard(lease)
            if kind == BULK:
                self._bulk[lease] = ended[-1]
        slot.heard_at = now
        if count:
            slot.tune(now, several=self.can_kill)
            self._started += slot.begun()
        return effects + self._returned(leftover)

    def _unbegun(self, slot: Slot, item: Leased) -> list[Effect]:
        """A slot was about to begin this when it was told not to."""
        if self._goes_back(slot, item[0]):
            return self._returned([item[0]])
        self.queue.put_back([item])
        return []

    def _goes_back(self, slot: Slot, lease: int) -> bool:
        """Whether what a slot did not begin goes back to the dispatcher, and not to our own queue."""
        wanted = lease in slot.wanted_back
        return slot.ends(lease) or wanted or self.leaving

    def _reclaimed(self, slot: Slot, position: int, now: float) -> list[Effect]:
        unbegun = slot.take_unbegun(position, now)
        back = [item[0] for item in unbegun if self._goes_back(slot, item[0])]
        gone = set(back)
        self.queue.put_back([item for item in reversed(unbegun) if item[0] not in gone])
        slot.wanted_back.clear()
        self._started += slot.begun(position)
        effects = self._returned(back)
        if slot.given and slot.running in slot.cut:
            effects.append(Interrupt(slot.index, slot.given[0][0]))
        return effects

    def _died(self, event: SlotDied) -> list[Effect]:
        slot = self._slots[event.slot]
        effects: list[Effect] = []
        if not slot.ready and not slot.given and not slot.killed:
            self._spawn_failures += 1
            if self._spawn_failures >= SPAWN_FAILURES_MAX:
                said = event.log or "it wrote nothing"
                problem = f"slot processes die before they are ready; the last one said:\n{said}"
                return self._exit(errors.INTERNAL, problem)
        again: list[Leased] = []
        back: list[int] = []
        for position, item in slot.given:
            lease = item[0]
            if lease in slot.wanted_back or self.leaving:
                back.append(lease)
            elif lease in slot.cut:
                self._outcomes.append((lease, CANCELLED, b""))
            elif position == event.position:
                self._started.append(lease)
                effects += self._report()
                effects += self._contact.tell(SlotsLost([(lease, event.exit_code, event.log)]))
            elif position < event.position:
                back.append(lease)  # it ended, and its outcome is lost with the slot
            else:
                again.append(item)
        self.queue.put_back(again)
        effects += self._returned(back)
        self._slots[event.slot] = Slot(event.slot)
        return effects if self.leaving and not self.queue else [*effects, Spawn(event.slot)]

    def _could_balance(self, slot: Slot) -> bool:
        """Whether the slot has work that it has not begun while another slot has nothing to do, or work for this very worker waits."""
        if len(slot.given) < 2 or slot.reclaiming:
            return False
        if self.queue:
            return self.queue.own_waits
        return any(other.ready and not other.given for other in self._slots)

    def _balance(self, now: float) -> list[Effect]:
        stuck = [slot for slot in self._slots if now >= slot.heard_at + STUCK_S and self._could_balance(slot)]
        return [effect for slot in stuck for effect in _reclaim(slot)]

    def _forget(self, keys: set[tuple[int, int]], everywhere: bool) -> list[Effect]:
        """What still waits here for such a function has ended elsewhere; the dispatcher knows that it need not run."""
        back = {item[0] for item in self.queue if (item[1], item[3]) in keys}
        effects = self._returned(sorted(self.queue.take_out(back)))
        for key in keys:
            self._functions.pop(key, None)
        for slot in self._slots:
            known = sorted(keys if everywhere and slot.ready else slot.known & keys)
            if known:
                slot.known.difference_update(known)
                effects.append(ForgetFunctions(slot.index, known))
        return effects

    def _report(self, now: float | None = None) -> list[Effect]:
        """Outcomes and starts since the last report, as few messages as they fit in."""
        if not self.registered or not (self._outcomes or self._started):
            return []
        outcomes, started = self._outcomes, self._started
        self._outcomes, self._started = [], []
        if not outcomes:
            return [Send(DISPATCHER, Done([], started))]
        effects: list[Effect] = []
        busy_us = 0 if now is None else self._busy.reported_us(now, self.running)
        for part in split(outcomes):
            effects.append(Send(DISPATCHER, Done(part, started, busy_us, int(self._contact.trip_s * 1e6))))
            started, busy_us = [], 0
        return effects


def _figures(slots: list[Slot], queue: Waiting) -> dict[str, Any]:
    return {"slots": tuple(slot.row for slot in slots), "waiting": len(queue), "waiting_own": queue.own_waiting}


def _reclaim(slot: Slot) -> list[Effect]:
    """One at a time: the answer to a second one would also take back what the slot was given, and has begun, after the first."""
    effects: list[Effect] = [] if slot.reclaiming else [Reclaim(slot.index)]
    slot.reclaiming = True
    return effects

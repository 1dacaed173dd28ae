"""A simulated worker: the real machine, with slots that run functions in virtual time.

The payload of a function is b"kind|coordinator|work", and the kind determines its duration and
outcome. `Oracle` records the facts of each run for the checks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tests.sim.simulations.clock import SimClock
from tests.sim.simulations.network import SimConnection, SimProcess
from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import (
    BULK,
    ERROR,
    INPUT_LOST,
    SUBMISSION_SHIFT,
    VALUE,
    Assign,
    Done,
    LeasesReturned,
    Message,
    SlotsLost,
)
from zmqdist.scheduling.dispatcher.resources import Ledger
from zmqdist.scheduling.shared.broker_settings import BrokerSettings
from zmqdist.scheduling.shared.quantities import Grant, Quantities
from zmqdist.scheduling.worker.machine import DISPATCHER, WorkerMachine
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
    LeaveRequested,
    Reclaim,
    SlotDied,
    SlotFinished,
    SlotOverMemory,
    SlotReady,
    SlotReclaimed,
    SlotSeen,
    Spawn,
)

DURATIONS_S = {
    "quick": 0.001,
    "long": 1.5,
    "slow": 6.0,
    "polite": 1.5,
    "poison": 0.02,
    "killer": 0.02,
    "raise": 0.01,
    "bulk": 0.01,
    "keep": 0.01,
}
POLL_S = 0.02
PIPE_S = 0.0001
"""Seconds that a message to a slot takes."""


SUBMISSIONS_SHIFT = 20
"""The bits of a submission below the work number (`submission_of`)."""


def submission_of(work: int, attempt: int) -> int:
    """Return a number that stands for one submission, retry or recomputation of a work item. It is
    in the payload, so that each run says what it was started for."""
    return work << SUBMISSIONS_SHIFT | attempt >> SUBMISSION_SHIFT


@dataclass
class Oracle:
    """The facts that the checks of a simulation need, and that no single part of the cluster
    knows.
    """

    runs: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Number of a run -> (coordinator, submission of a work item)."""
    reported: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """(coordinator, work) -> its leases whose start a worker has reported."""
    kept: set[tuple[int, int]] = field(default_factory=set)
    """(coordinator, submission) of each result that the dispatcher had when a coordinator told the
    dispatcher to keep the result."""


@dataclass(eq=False)
class SimSlot:
    """One incarnation of a slot's process, or the slot's thread."""

    index: int
    alive: bool = True
    items: deque[tuple[int, int, int, bytes]] = field(default_factory=deque)
    known: set[tuple[int, int]] = field(default_factory=set)
    position: int = 0
    reported: int = 0
    running: tuple[int, int, int] | None = None
    """(position, coordinator, work) of the running function; None while no function runs."""
    run: int = 0
    given_up: tuple[int, int] = (0, 0)
    given_to: int = 0
    cancel: int = 0
    devices: tuple[int, ...] = ()
    grants: dict[int, Grant] = field(default_factory=dict)
    """The resources of items that have some, by position."""


class WorkerSurroundings(Protocol):
    """The simulated cluster around a worker (cluster.py).

    Attributes:
      incarnation: incarnation of the dispatcher; while no dispatcher runs, the incarnation of the
        last dispatcher.
    """

    clock: SimClock
    random: Random
    settings: BrokerSettings
    oracle: Oracle
    dispatcher_up: bool
    incarnation: int

    def new_connection(self, name: str, down: Callable[[Message], None]) -> SimConnection:
        """Return a new connection of a client to the dispatcher; `down` gets the messages for the
        client."""

    def end_connection(
        self,
        connection: SimConnection,
        *,
        noticed_by_client: bool = True,
        noticed_by_server: bool = True,
    ) -> None:
        """End a connection. Messages in flight are lost. Each side notices the end at a random
        time, or never if the flag of the side is False."""

    def worker_exited(self, worker: SimWorker) -> None:
        """Record that a worker's process has ended by itself."""

    def kill_worker(self, worker: SimWorker) -> None:
        """Kill a worker's process as SIGKILL does."""

    def new_run(self, coordinator: int, work: int) -> int:
        """Return the number of a new run of a function."""

    def is_held(self, run: int) -> bool:
        """Return whether a live worker holds the result of the function run that has this
        number.
        """

    def check_registration(self, worker: SimWorker, message: Message) -> None:
        """Raise AssertionError if a worker registers with leases of another dispatcher, or without
        leases while its functions run."""

    def check_reported_before_start(self, worker: SimWorker, lease: int) -> None:
        """Raise AssertionError if the lease has `report_before_start`, and the worker begins the
        work before its report of the start has reached the dispatcher.
        """


class SimWorker:
    """One incarnation of a worker's process."""

    nested_slots_max = 0

    def __init__(
        self,
        cluster: WorkerSurroundings,
        index: int,
        incarnation: int,
        *,
        can_kill: bool,
        slots: int,
        resources: Quantities,
    ) -> None:
        self.cluster = cluster
        self.process = SimProcess()
        self.index = index
        self.incarnation = incarnation
        self.key = f"w{index}.{incarnation}"
        self.connection: SimConnection | None = None
        self.slots_frozen = False
        self.cut_off_until = 0.0
        """Until this time the worker has no network."""
        self.has_disconnected = False
        """Whether the worker has lost a connection at least once."""
        self.thawed_unheard = False
        """Whether the worker was frozen with its slots, and has not connected to the dispatcher
        since then."""
        self.report_before_start: set[int] = set()
        self.own: set[int] = set()
        self.held: dict[int, int] = {}
        """The large results that the worker holds: lease -> number of the function's run."""
        self._resources = resources
        self._grants: dict[int, Grant] = {}
        """The resources of each lease that has some."""
        self._begun: set[int] = set()
        """The leases whose work has begun at this worker."""
        self._random: Random = cluster.random
        self._what: dict[int, tuple[int, int]] = {}
        self._slots: list[SimSlot | None] = [None] * slots
        self._tick_at: float | None = None
        self.machine = WorkerMachine(
            incarnation=incarnation,
            job="worker",
            index=index,
            slots=slots,
            pid=incarnation,
            host=f"host{index % 2}",
            orphan_limit_s=1e6,
            can_kill=can_kill,
            now=cluster.clock.now,
            resources=resources,
            nested_slots_max=self.nested_slots_max,
        )
        self._perform(self.machine.start())
        self.connect()

    # -- start, connection and end -----------------------------------------------------------------

    def connect(self) -> None:
        """Connect to the dispatcher. While it is down, or while this worker has no network, try
        again later."""
        if not self.process.alive or (self.connection is not None and self.connection.open):
            return
        if not self.cluster.dispatcher_up or self.cluster.clock.now < self.cut_off_until:
            self.cluster.clock.after(
                self._random.uniform(0.05, 0.6), lambda: self.process.post(self.connect)
            )
            return
        connection = self.connection = self.cluster.new_connection(self.key, self._receive)
        incarnation = self.cluster.incarnation

        def up() -> None:
            if connection.open:
                self.handle(DispatcherConnected(incarnation))

        self.cluster.clock.after(self._random.expovariate(1000.0), lambda: self.process.post(up))

    def lost_connection(self, connection: SimConnection) -> None:
        """Have the worker notice the end of a connection."""
        if connection is self.connection:
            self.connection = None
            self.has_disconnected = True
            self.handle(DispatcherDisconnected())
            self.cluster.clock.after(
                self._random.uniform(0.05, 0.5), lambda: self.process.post(self.connect)
            )

    def kill(self) -> None:
        """Kill the process with SIGKILL; its slots die with it."""
        for slot in self._slots:
            if slot is not None:
                self._end(slot)
        self.process.kill()
        self.held.clear()
        if self.connection is not None:
            self.cluster.end_connection(self.connection, noticed_by_client=False)

    def freeze(self, *, slots_too: bool) -> None:
        """Freeze the worker's process, as SIGSTOP does. With `slots_too`, freeze its slots as well.

        The zygote ends slots that are not frozen, because it notices that their worker does not run
        (process/zygote.py).
        """
        self.process.frozen = True
        self.slots_frozen = self.thawed_unheard = slots_too
        since = self.cluster.clock.now
        if not slots_too:
            self.cluster.clock.after(self.cluster.settings.lease_s / 2, lambda: self._watch(since))

    def thaw(self) -> None:
        self.slots_frozen = False
        self.process.thaw()

    def leave(self) -> None:
        self.handle(LeaveRequested(1.0))

    def executing(self) -> list[tuple[int, int]]:
        """Return (coordinator, work) of every function that runs now."""
        if not self.process.alive or self.slots_frozen:
            return []
        return [
            slot.running[1:]
            for slot in self._slots
            if slot is not None and slot.alive and slot.running is not None
        ]

    def kill_slot(self) -> None:
        """Kill the process of one slot."""
        live = [slot for slot in self._slots if slot is not None and slot.alive]
        if live and self.machine.can_kill and self.process.alive:
            self._kill(self._random.choice(live), -9)

    def use_memory(self) -> None:
        """Have one slot use too much memory, whether or not it runs a function."""
        live = [slot for slot in self._slots if slot is not None and slot.alive]
        if live and self.machine.can_kill:
            slot = self._random.choice(live)
            position = 0 if slot.running is None else slot.running[0]
            self.handle(SlotOverMemory(slot.index, position, "too much"))

    def _watch(self, since: float) -> None:
        if (
            self.process.alive
            and self.process.frozen
            and self.cluster.clock.now - since >= self.cluster.settings.lease_s / 2 - 1e-9
        ):
            for slot in self._slots:
                if slot is not None and slot.alive and self.machine.can_kill:
                    self._kill(slot, -9)

    # -- the runtime -------------------------------------------------------------------------------

    def _note_starts(self, message: Message) -> None:
        leases = message.started if isinstance(message, Done) else []
        if isinstance(message, SlotsLost):
            leases = [item[0] for item in message.items]
        for lease in leases:
            if lease in self._what:
                self.cluster.oracle.reported.setdefault(self._what[lease], set()).add(lease)

    def _receive(self, message: Message) -> None:
        if isinstance(message, Assign):
            for lease, coordinator, _, _, payload in message.items:
                self._what[lease] = (coordinator, int(payload.split(b"|")[2]) >> SUBMISSIONS_SHIFT)
            self._grants |= {
                lease: Grant(amounts, devices) for lease, amounts, devices in message.grants
            }
        self.process.post(lambda: self.handle(Heard(DISPATCHER, message)))

    def handle(self, event: Event) -> None:
        if not self.process.alive:
            return
        if isinstance(event, DispatcherConnected):
            self.thawed_unheard = False
        if isinstance(event, SlotFinished):
            for position, kind, payload in event.outcomes:
                lease = self.machine.lease_at(event.slot, position)
                if kind == BULK and lease is not None:
                    self.held[lease] = int(payload.split(b"|")[3])
        effects = self.machine.handle(event, self.cluster.clock.now)
        if isinstance(event, SlotReclaimed):
            self._check_given_back(effects)
        self._perform(effects)
        self._rearm()

    def _check_given_back(self, effects: list[Effect]) -> None:
        messages = [effect.message for effect in effects if isinstance(effect, Send)]
        back = {
            lease
            for message in messages
            if isinstance(message, LeasesReturned)
            for lease in message.leases
        }
        assert not back & self._begun, "worker P10: work that a slot has begun is given back"

    def _rearm(self) -> None:
        at = self.machine.deadline
        if at is None or at == self._tick_at:
            return
        self._tick_at = at

        def tick() -> None:
            if self._tick_at == at:
                self._tick_at = None
                self.process.post(lambda: self.handle(Ticked()))

        self.cluster.clock.at(at, tick)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(_, message):
                    if self.connection is not None:
                        self._note_starts(message)
                        self.cluster.check_registration(self, message)
                        self.connection.send_up(message)
                case Spawn(slot, devices):
                    self._spawn(slot, devices)
                case Give():
                    self._give(effect)
                case Reclaim(slot):
                    self._reclaim(slot)
                case Interrupt(index, position):
                    self._interrupt(index, position)
                case Kill(index):
                    slot_ = self._slots[index]
                    if slot_ is not None and slot_.alive:
                        self._kill(slot_, -9)
                case ForgetFunctions(index, functions):
                    self._forget(index, functions)
                case FreeBulk(lease):
                    self.held.pop(lease, None)
                case Exit():
                    self.kill()
                    self.cluster.worker_exited(self)

    # -- slots -------------------------------------------------------------------------------------

    def _later(self, delay_s: float, event: Event) -> None:
        self.cluster.clock.after(delay_s, lambda: self.process.post(lambda: self.handle(event)))

    def _spawn(self, index: int, devices: tuple[int, ...]) -> None:
        slot = self._slots[index] = SimSlot(index, devices=devices)

        def ready() -> None:
            if slot.alive:
                self.process.post(lambda: self.handle(SlotReady(index)))

        self.cluster.clock.after(self._random.uniform(0.005, 0.02), ready)

    def _check_own(self, give: Give) -> None:
        """Check that the machine hands pinned work to slots before other work, and in order. Work
        with `report_before_start` is exempt."""
        leases = {self.machine.lease_at(give.slot, item[0]) or 0 for item in give.items}
        waiting = self.own.intersection(item[0] for item in self.machine.queue)
        early = leases - self.own - self.report_before_start
        assert not waiting or not early, "worker P9: pinned work waits for other work"
        given, waiting = (
            leases & self.own - self.report_before_start,
            waiting - self.report_before_start,
        )
        assert not given or not waiting or max(given) < min(waiting), (
            "worker P9: pinned work is out of order"
        )

    def _give(self, give: Give) -> None:
        slot = self._slots[give.slot]
        assert slot is not None
        slot.given_to = give.items[-1][0]
        for position, *_ in give.items:
            lease = self.machine.lease_at(give.slot, position)
            if lease in self._grants:
                slot.grants[position] = self._grants[lease]
        if not self.machine.can_kill:
            assert (slot.running, len(give.items)) == (None, 1), (
                "worker P1: a thread has one item at a time"
            )
        self._check_own(give)

        def arrive() -> None:
            if not slot.alive:
                return
            slot.known.update((coordinator, fn) for coordinator, fn, _ in give.functions)
            unknown = {(coordinator, fn) for _, coordinator, fn, _ in give.items} - slot.known
            assert not unknown, "dispatch P8: a function is sent before the first work that uses it"
            slot.items.extend(give.items)
            if slot.running is None:
                self._next(slot)

        self.cluster.clock.after(PIPE_S, arrive)

    def _forget(self, index: int, functions: list[tuple[int, int]]) -> None:
        """Have a slot forget functions. The message arrives after all work that was sent to the
        slot earlier, because this work may need the functions."""
        slot = self._slots[index]
        if slot is not None:
            self.cluster.clock.after(PIPE_S, lambda: slot.known.difference_update(functions))

    def _next(self, slot: SimSlot) -> None:
        """Have a slot begin its next item, if it has one and is not frozen."""
        while slot.alive and slot.items and slot.running is None:
            if self.slots_frozen:
                self.cluster.clock.after(0.05, lambda: self._next(slot))
                return
            position, coordinator, _, payload = slot.items.popleft()
            assert position > slot.position, "worker P1: a slot works in the order of positions"
            if slot.given_up[0] < position <= slot.given_up[1]:
                self._report(slot, position, NOT_RUN, b"")
                continue
            self._begin(slot, position, coordinator, payload)

    def _begin(self, slot: SimSlot, position: int, coordinator: int, payload: bytes) -> None:
        kind, _, work, *inputs = payload.decode().split("|")
        lease = self.machine.lease_at(slot.index, position)
        if lease is not None:
            assert lease not in self._begun, (
                "worker P10: work that has begun at a slot begins again"
            )
            self._begun.add(lease)
            self.cluster.check_reported_before_start(self, lease)
        slot.position = position
        slot.running = (position, coordinator, int(work))
        self._check_resources(slot, slot.grants.get(position, Grant(())))
        slot.run = self.cluster.new_run(coordinator, int(work))
        self.cluster.clock.after(POLL_S, lambda: self._look(slot, position))
        lost = next(
            (text for text in inputs if not self.cluster.is_held(int(text.partition(":")[2]))), None
        )
        if lost is not None:
            slot.running = None
            self._report(slot, position, INPUT_LOST, lost.partition(":")[0].encode())
            self.cluster.clock.after(0.0, lambda: self._next(slot))
            return
        duration_s = DURATIONS_S[kind] * self._random.uniform(0.5, 1.5)
        self.cluster.clock.after(duration_s, lambda: self._end_of(slot, position, kind))

    def _check_resources(self, slot: SimSlot, grant: Grant) -> None:
        """Check that the running functions use no more than the worker has, and that a function
        with devices runs in a slot for them."""
        left = Ledger(self._resources)
        running = [s for s in self._slots if s is not None and s.alive and s.running is not None]
        for other in running:
            assert other.running is not None
            left.change(other.grants.get(other.running[0], Grant(())), -1)
        assert min([0, *left.free.values(), *left.devices]) == 0, (
            f"dispatch P19: {self.key} runs functions that use more than it has"
        )
        devices = grant.devices
        assert slot.devices == devices, (
            f"worker P11: a function with the devices {devices} begins in a slot for {slot.devices}"
        )
        for other in running:
            assert other.devices == devices or not set(other.devices) & set(devices), (
                f"worker P11: a function with the devices {devices} runs beside a slot for "
                f"{other.devices}"
            )

    def _look(self, slot: SimSlot, position: int) -> None:
        if slot.alive and slot.running is not None and slot.running[0] == position:
            self.process.post(
                lambda: self.handle(SlotSeen(slot.index, position)) if slot.alive else None
            )

    def _end_of(self, slot: SimSlot, position: int, kind: str) -> None:
        if not slot.alive or slot.running is None or slot.running[0] != position:
            return
        if self.slots_frozen:
            self.cluster.clock.after(0.05, lambda: self._end_of(slot, position, kind))
            return
        if kind == "killer" and self.machine.can_kill:
            self.cluster.kill_worker(self)
            return
        if kind in ("poison", "killer") and self.machine.can_kill:
            self._kill(slot, -11)
            return
        _, coordinator, work = slot.running
        payload = f"v|{coordinator}|{work}|{slot.run}".encode()
        outcome = {"raise": ERROR, "bulk": BULK, "keep": BULK}.get(kind, VALUE)
        slot.running = None
        self._report(slot, position, outcome, payload)
        self._next(slot)

    def _report(self, slot: SimSlot, position: int, kind: int, payload: bytes) -> None:
        """Report an outcome 1 ms later. If the slot dies before that, the outcome is lost."""

        def leave() -> None:
            if slot.alive:
                slot.reported = max(slot.reported, position)
                self.process.post(
                    lambda: self.handle(SlotFinished(slot.index, [(position, kind, payload)]))
                )

        self.cluster.clock.after(0.001, leave)

    def _reclaim(self, index: int) -> None:
        slot = self._slots[index]
        if slot is None or not slot.alive:
            return
        slot.given_up = (slot.position, slot.given_to)
        self._later(0.0005, SlotReclaimed(index, slot.position))

    def _interrupt(self, index: int, position: int) -> None:
        slot = self._slots[index]
        if (
            slot is not None
            and slot.running is not None
            and slot.running[0] == position
            and self._random.random() < 0.5
        ):
            # Simulate a function that calls zmqdist.cancelled(), and returns early.
            self.cluster.clock.after(0.01, lambda: self._end_of(slot, position, "polite"))

    def _kill(self, slot: SimSlot, code: int) -> None:
        position = slot.position if slot.reported < slot.given_to else 0
        self._end(slot)
        self._later(0.002, SlotDied(slot.index, position, code, "sim"))

    def _end(self, slot: SimSlot) -> None:
        slot.alive = False
        if slot.running is not None:
            slot.running = None


__all__ = ["SimSlot", "SimWorker", "Oracle"]

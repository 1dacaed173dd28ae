"""A simulated cluster whose functions schedule functions: the real machines, with seeded faults and
deaths of slots, workers, the dispatcher and the programs outside.

An outer program schedules functions. Some of them are programs themselves: they schedule functions
of their own, tell their worker that they wait, and end when all results have come. Some end before
their work, and some programs outside die.

The checks: no function executes after the end of an attempt of a function above it was reported
(with the two exceptions of cluster.py), and without further faults all work ends, so that functions
which wait for each other never fill all slots.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from typing import Any

from tests.sim.simulations.clock import seed_named
from tests.sim.simulations.cluster import SimCluster
from tests.sim.simulations.coordinator import SimCoordinator
from tests.sim.simulations.coordinator_plans import decode_loss
from tests.sim.simulations.network import SimConnection, SimProcess
from tests.sim.simulations.worker import (
    PIPE_S,
    SUBMISSIONS_SHIFT,
    SimSlot,
    SimWorker,
    submission_of,
)
from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import (
    SUBMISSION_SHIFT,
    Assign,
    Goodbye,
    Message,
    Refused,
    Results,
    StartsLost,
)
from zmqdist.scheduling.coordinator.coordinator_events import (
    CancelRequested,
    CoordinatorRefused,
    DispatcherDown,
    DispatcherUp,
    EndRoundRequested,
    Event,
    FunctionsDefined,
    Resolve,
    RoundSettled,
    Scheduled,
    SubmitWork,
)
from zmqdist.scheduling.coordinator.machine import CoordinatorMachine
from zmqdist.scheduling.coordinator.work import Work
from zmqdist.scheduling.dispatcher.machine import Event as BrokerEvent
from zmqdist.scheduling.dispatcher.membership_and_leases import Member
from zmqdist.scheduling.shared import nested_bound
from zmqdist.scheduling.worker.worker_events import (
    Effect,
    EndSlot,
    Give,
    SlotDied,
    SlotResumed,
    SlotWaits,
    WaitAnswered,
)

DEPTH_MAX = 3
FN = 1

Attempt = tuple[int, int, int]
"""(coordinator, work, attempt): one attempt of a work item."""


class NestedProgram:
    """A program that schedules functions and waits for them: outside of the cluster, or as a
    function in a slot.

    Attributes:
      parent: the attempt of the function that this program is; None for one outside.
      refused: whether the dispatcher or the worker has refused it.
      position: the position in its slot of the item that it is.
    """

    def __init__(
        self,
        cluster: NestedCluster,
        number: int,
        works: int,
        depth: int,
        parent: Attempt | None = None,
        lease: int = 0,
        process: SimProcess | None = None,
    ) -> None:
        self.cluster, self.number, self.depth, self.parent = cluster, number, depth, parent
        self.process = SimProcess() if process is None else process
        self.connection: SimConnection | None = None
        self.refused = False
        self.position = 0
        self.unresolved: set[int] = set()
        self.kept_results: dict[int, Any] = {}
        self._left = works
        self._numbers = itertools.count(1)
        self._tick_at: float | None = None
        self.machine = CoordinatorMachine(
            coordinator=number,
            queue_max=2**20,
            cancel_grace_s=cluster.settings.cancel_grace_s,
            lost_limit_s=1e6,
            recomputations_max=1,
            decode_loss=decode_loss,
            now=cluster.clock.now,
            rounds=parent is None,
            parent=lease,
        )
        cluster.programs[number] = self
        self.handle(FunctionsDefined([(FN, b"f")]))
        self.connect()

    @property
    def finished(self) -> bool:
        busy = self._left or self.unresolved or self.machine.ending or self.machine.failed
        return not self.process.alive or not busy

    @property
    def kinds(self) -> set[int]:
        """The functions that have not ended."""
        return self.unresolved

    @property
    def resolved(self) -> Counter[int]:
        return Counter()

    def schedule(self, count: int) -> None:
        """Schedule this many of the functions that are left."""
        for _ in range(min(count, self._left)):
            self._left -= 1
            random = self.cluster.random
            kind = random.choices(("quick", "long", "raise", "poison"), (8, 1, 0.3, 0.1))[0]
            if self.depth < DEPTH_MAX and random.random() < 0.4:
                kind = f"nest{self.depth + 1}"
            work = Work(next(self._numbers), FN, kind, b"")
            self.unresolved.add(work.number)
            self.handle(Scheduled([work]))

    def keep_scheduling(self) -> None:
        """Schedule the functions of a program outside, bit by bit."""
        if self._left and self.process.alive:
            if not self.machine.ending:
                self.schedule(self.cluster.random.randint(1, 4))
            self.cluster.clock.after(
                self.cluster.random.expovariate(4.0), lambda: self.keep_scheduling()
            )

    # -- the connection ----------------------------------------------------------------------------

    def connect(self) -> None:
        if not self.process.alive or self.connection is not None:
            return
        clock, random = self.cluster.clock, self.cluster.random
        if not self.cluster.dispatcher_up:
            clock.after(random.uniform(0.05, 0.6), lambda: self.process.post(self.connect))
            return
        connection = self.connection = self.cluster.new_connection(
            f"p{self.number}", lambda message: self.process.post(partial(self._receive, message))
        )

        def up() -> None:
            if connection.open:
                self.handle(DispatcherUp())

        clock.after(random.expovariate(1000.0), lambda: self.process.post(up))

    def lost_connection(self, connection: SimConnection) -> None:
        if connection is self.connection:
            self.connection = None
            self.process.post(partial(self.handle, DispatcherDown()))
            self.cluster.clock.after(
                self.cluster.random.uniform(0.05, 0.5), lambda: self.process.post(self.connect)
            )

    def die(self) -> None:
        """End the process, as SIGKILL does."""
        self.process.kill()
        if self.connection is not None:
            self.cluster.end_connection(self.connection, noticed_by_client=False)
            self.connection = None

    def leave(self) -> None:
        """End the function: its coordinator is closed."""
        if self.connection is not None:
            self.connection.send_up(Goodbye())
        self.die()

    # -- the runtime -------------------------------------------------------------------------------

    def cancel(self) -> None:
        if self.unresolved and not self.machine.ending and self.process.alive:
            numbers = sorted(self.unresolved)
            self.handle(CancelRequested([self.cluster.random.choice(numbers)]))

    def take_back(self) -> None:
        """Take nothing back: other simulations do."""

    def _receive(self, message: Message) -> None:
        if isinstance(message, Refused):
            self.refused = True
            self.handle(CoordinatorRefused(b"refused"))
        else:
            self.handle(Heard("dispatcher", message))

    def handle(self, event: Event) -> None:
        if not self.process.alive:
            return
        for effect in self.machine.handle(event, self.cluster.clock.now):
            match effect:
                case Send(_, message):
                    if self.connection is not None:
                        self.connection.send_up(message)
                case SubmitWork():
                    for message in effect.messages(self._pack):
                        if self.connection is not None:
                            self.connection.send_up(message)
                case Resolve(items):
                    for work, _, _ in items:
                        assert work.number in self.unresolved, "coordinator P1: resolved twice"
                        self.unresolved.discard(work.number)
                case RoundSettled():
                    self.cluster.check_descendants(self.number)
        if self.machine.failed is not None and not self.machine.ending and self.parent is None:
            self.cluster.clock.after(self.cluster.random.uniform(0.0, 1.0), self._join)
        at = self.machine.deadline
        if at is not None and at != self._tick_at:
            self._tick_at = at
            self.cluster.clock.at(at, lambda: self.process.post(partial(self._tick, at)))

    def _join(self) -> None:
        if self.machine.failed is not None and not self.machine.ending:
            self.handle(EndRoundRequested(self.machine.round))

    def _tick(self, at: float) -> None:
        if self._tick_at == at:
            self._tick_at = None
            self.handle(Ticked())

    def _pack(self, work: Work) -> bytes:
        submission = submission_of(work.number, work.attempt)
        return f"{work.name}|{self.number}|{submission}".encode()


class NestedWorker(SimWorker):
    """A worker whose functions may be programs."""

    cluster: NestedCluster

    @property
    def nested_slots_max(self) -> int:  # type: ignore[override]
        return (2, 3, 6)[self.cluster.seed % 3]

    def _begin(self, slot: SimSlot, position: int, coordinator: int, payload: bytes) -> None:
        kind, _, submission, *_ = payload.decode().split("|")
        lease = self.machine.lease_at(slot.index, position)
        self.cluster.check_not_ended(self, coordinator)
        if not kind.startswith("nest"):
            super()._begin(slot, position, coordinator, payload)
            return
        slot.position = position
        slot.running = (position, coordinator, int(submission))
        item = next((item for at, item in self.machine.slots[slot.index].given if at == position))
        work = int(submission) >> SUBMISSIONS_SHIFT
        random = self.cluster.random
        program = NestedProgram(
            self.cluster,
            next(self.cluster.numbers),
            random.randint(1, 4),
            int(kind[4:]),
            (coordinator, work, item[2]),
            lease or 0,
            SimProcess(),
        )
        self.programs()[slot] = program
        program.position = position
        program.schedule(4)
        if random.random() < 0.1:  # it does not wait for its work
            self.cluster.clock.after(
                random.uniform(0.0, 0.5), lambda: self._end_of(slot, position, "quick")
            )
            return
        self.cluster.clock.after(
            random.uniform(0.002, 0.01),  # after the reports of the items before
            lambda: self.process.post(lambda: self.handle(SlotWaits(slot.index, position))),
        )
        self._look_at_program(slot, position)

    def programs(self) -> dict[SimSlot, NestedProgram]:
        programs: dict[SimSlot, NestedProgram] = self.__dict__.setdefault("_programs", {})
        return programs

    def _look_at_program(self, slot: SimSlot, position: int) -> None:
        program = self.programs().get(slot)
        if not slot.alive or program is None or program.position != position:
            return
        if program.refused or not program.unresolved:
            event = SlotResumed(slot.index, position)
            self.process.post(lambda: self.handle(event) if slot.alive else None)
            self._end_of(slot, position, "quick")
            return
        self.cluster.clock.after(0.01, lambda: self._look_at_program(slot, position))

    def _end_of(self, slot: SimSlot, position: int, kind: str) -> None:
        program = self.programs().get(slot)
        if program is not None and program.position == position and not self.slots_frozen:
            del self.programs()[slot]
            program.leave()
        super()._end_of(slot, position, kind)

    def _end(self, slot: SimSlot) -> None:
        super()._end(slot)
        program = self.programs().pop(slot, None)
        if program is not None:
            program.die()

    def freeze(self, *, slots_too: bool) -> None:
        super().freeze(slots_too=slots_too)
        for program in self.programs().values() if slots_too else ():
            program.process.freeze()

    def thaw(self) -> None:
        super().thaw()
        for program in list(self.programs().values()):
            program.process.thaw()

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case WaitAnswered(index, refusal):
                    self.cluster.waits += not refusal
                    self.cluster.refusals += bool(refusal)
                    self.cluster.full += self.machine.nested.at_bound
                    slot = self._slots[index]
                    if slot is not None and slot in self.programs() and refusal:
                        self.programs()[slot].refused = True
                case EndSlot(index):
                    slot = self._slots[index]
                    assert slot is not None
                    assert slot.running is None, "worker P19: a slot that works is ended"
                    self._end(slot)
                    self._later(PIPE_S, SlotDied(index, 0, 0, ""))
                case _:
                    if isinstance(effect, Give):
                        self._check_depths(effect)
                    super()._perform([effect])

    def _check_depths(self, give: Give) -> None:
        """Check that a worker at its bound begins only work that is deeper than all its waits."""
        machine, depths = self.machine, self.machine.queue.depths
        waits = [
            depths.get(machine.lease_at(slot.index, slot.waits_at) or 0, 0)
            for slot in machine.slots
            if slot.waits_at
        ]
        if nested_bound.at_bound(len(waits), self.nested_slots_max):
            for item in give.items:
                depth = depths.get(machine.lease_at(give.slot, item[0]) or 0, 0)
                assert depth > max(waits), (
                    f"worker P18: work of depth {depth} begins at {self.key} beside {waits}"
                )

    def _spawn(self, index: int, devices: tuple[int, ...]) -> None:
        if index == len(self._slots):
            self._slots.append(None)
        super()._spawn(index, devices)


class NestedCluster(SimCluster):
    """A cluster of such programs and workers."""

    worker_class = NestedWorker

    def __init__(self, seed: int, *, programs: int = 2, works: int = 10, **options: Any) -> None:
        self.programs: dict[int, NestedProgram] = {}
        self.numbers = itertools.count(101)
        self.ended: set[Attempt] = set()
        """The attempts whose ends the dispatcher has reported, or which it has replaced."""
        self.waits = self.refusals = self.full = 0
        """How often a function waited, was refused to wait, and was begun at a full worker."""
        super().__init__(seed, coordinators=0, **options)
        outside = [NestedProgram(self, number, works, 0) for number in range(1, programs + 1)]
        self.coordinators: list[SimCoordinator] = outside  # type: ignore[assignment]
        for program in outside:
            program.keep_scheduling()

    def _fault(self) -> None:
        if self.random.random() < 0.05:
            program = self.random.choice(self.coordinators)
            self.log(f"fault: program {program.number} dies")
            program.die()  # type: ignore[attr-defined]
        else:
            super()._fault()

    def _tell_client(self, connection: SimConnection) -> None:
        super()._tell_client(connection)
        for program in list(self.programs.values()):
            program.lost_connection(connection)

    def _feed(self, event: BrokerEvent) -> None:
        if isinstance(event, Heard) and isinstance(event.peer, SimConnection):
            self._note_session(event.peer)
        super()._feed(event)

    def _note_session(self, connection: SimConnection) -> None:
        session = self.broker.dispatch.sessions.get(connection) if self.dispatcher_up else None
        if session is not None:
            connection.__dict__["coordinator"] = session.coordinator

    def _check_release(self, connection: SimConnection, message: Message) -> None:
        items: list[tuple[int, int]] = []
        if isinstance(message, (Results, StartsLost)):
            items = [(item[0], item[1]) for item in message.items]
        coordinator = connection.__dict__.get("coordinator", 0)
        for work, attempt in items:
            self.ended.add((coordinator, work, attempt))
        if items:
            self._check_executing()

    def _check_assign(self, connection: SimConnection, message: Message) -> None:
        if not isinstance(message, Assign):
            return
        for _, coordinator, attempt, _, payload in message.items:
            work = int(payload.split(b"|")[2]) >> SUBMISSIONS_SHIFT
            first = attempt >> SUBMISSION_SHIFT << SUBMISSION_SHIFT
            self.ended.update((coordinator, work, before) for before in range(first, attempt))
        member = self.broker.membership.by_peer[connection]
        self._check_options(member, message)

    def _check_options(self, member: Member, assign: Assign) -> None:
        load = self.broker.dispatch.loads[member]
        assert load.outstanding <= load.window.limit, (
            "dispatch P6: more leases than the window allows"
        )
        if load.at_bound:
            assert assign.depth > load.floor, "dispatch P18: shallow work goes to a full worker"

    # -- checks ------------------------------------------------------------------------------------

    def _is_below_ended(self, number: int) -> Attempt | None:
        """Return the ended attempt below which the program with this number is, if there is one."""
        program = self.programs.get(number)
        while program is not None and program.parent is not None:
            if program.parent in self.ended:
                return program.parent
            program = self.programs.get(program.parent[0])
        return None

    def _excepted(self, worker: SimWorker) -> bool:
        detached = worker.connection is None or not worker.connection.open
        if detached and (worker.process.frozen or worker.thawed_unheard):
            return True
        return worker.has_disconnected and not self.can_kill

    def check_not_ended(self, worker: SimWorker, number: int) -> None:
        ended = self._is_below_ended(number)
        assert ended is None or self._excepted(worker), (
            f"dispatch P21: work of program {number} begins on {worker.key} after the end of {ended}"
        )

    def _check_executing(self) -> None:
        for worker in self.workers:
            for owner, submission in () if self._excepted(worker) else worker.executing():
                ended = self._is_below_ended(owner)
                assert ended is None, (
                    f"dispatch P21: work {submission >> SUBMISSIONS_SHIFT} of program {owner} "
                    f"executes on {worker.key} after the end of {ended}"
                )

    def check_descendants(self, number: int) -> None:
        """Check that nothing below an outer program executes, because its round has ended."""
        for worker in self.workers:
            for owner, _ in () if self._excepted(worker) else worker.executing():
                program = self.programs.get(owner)
                while program is not None and program.parent is not None:
                    program = self.programs.get(program.parent[0])
                assert program is None or owner == number or program.number != number, (
                    f"dispatch P5: work of program {owner} executes after the end of the round"
                )

    def _check_nothing_left(self) -> None:
        snapshot = self.broker.snapshot()
        assert snapshot.queued == 0, "dispatch P7: work waits at the end"
        assert not self.broker.dispatch.nesting.held, "dispatch P21: an end is held back for ever"
        assert not self.broker.dispatch.nesting.children, "dispatch P21: children are remembered"
        for row in snapshot.workers:
            assert row.leases == 0, f"dispatch P1: {row.name} has leases at the end"
        for worker in self.workers:
            if worker.process.alive:
                assert worker.machine.running == 0, f"worker P2: {worker.key} has work at the end"
                assert not worker.machine.queue.depths, "worker P13: depths are remembered"


def simulate_nested(seed: int, **options: Any) -> NestedCluster:
    """Run a simulated cluster of nested work with one seed to its end.

    Use it to search for seeds that break a promise about functions that schedule functions. It needs
    no socket, process or sleep.

    Raises:
      AssertionError: a promise was broken; the text has the promise, the seed, and the end of the
        trace.
    """
    cluster = NestedCluster(seed, **options)
    with seed_named(seed, cluster.trace):
        cluster.run()
    return cluster

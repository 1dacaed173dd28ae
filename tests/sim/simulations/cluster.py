"""A simulated cluster in one thread and in virtual time: the real machines, with simulated network,
processes and functions, and seeded faults.

In the first phase faults happen, and only safety is checked. The second phase has no faults: the
dispatcher and workers run again, and all scheduled work must end within CALM_LIMIT_S of virtual
time. At the end no lease, held result or unfinished work may be left.

The promise that no function executes after the end of its round has two exceptions. First, a worker
that was frozen with its slots may thaw after its connection has ended. A function in its slots then
executes until the worker has registered again. No part of the cluster can prevent this, but the
dispatcher refuses the result. Second, a slot that is a thread cannot be killed, so a function in
such a slot continues when its worker has lost its connection.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from random import Random

from tests.sim.simulations.clock import SimClock, seed_named
from tests.sim.simulations.coordinator import SimCoordinator
from tests.sim.simulations.network import SimConnection
from tests.sim.simulations.worker import SUBMISSIONS_SHIFT, Oracle, SimWorker, submission_of
from zmqdist.events import Heard, PeerGone, ProcessExited, Ticked
from zmqdist.messages import (
    SUBMISSION_SHIFT,
    Assign,
    Forget,
    FreeResult,
    Message,
    Register,
    Registered,
    ResultReceived,
    StealRequest,
)
from zmqdist.scheduling.coordinator.options import PLAIN, WorkOptions
from zmqdist.scheduling.dispatcher.facts_record import FactsRecord
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.dispatcher.machine import Event as BrokerEvent
from zmqdist.scheduling.dispatcher.membership_and_leases import Member
from zmqdist.scheduling.dispatcher.records import RUNNING
from zmqdist.scheduling.dispatcher.resources import Ledger
from zmqdist.scheduling.shared.broker_settings import BrokerSettings
from zmqdist.scheduling.shared.quantities import Quantities

FAULTS_UNTIL_S = 8.0
CALM_LIMIT_S = 200.0

FAULTS = (
    *("kill", "kill", "freeze", "freeze all", "cut", "cut off", "cut off", "slot", "drain"),
    "memory",
    *("dispatcher", "coordinator", "cancel", "cancel", "take back", "take back"),
)


EVENTS_A_RECORD = 40
"""The record of facts is checked after so many events of the dispatcher."""

RINGS = ("failures", "slot_deaths", "refusals")


class SimCluster:
    """One dispatcher, some workers and some coordinators. All random choices follow from the seed.

    Args:
      workers, coordinators: the number of workers and of coordinators.
      works: number of work items that each coordinator schedules.
      faults: number of faults.
      can_kill: whether the slots are processes, which the worker can kill. Otherwise the slots are
        threads.
      queue_max: the most work items that a coordinator queues. With None, the simulation chooses a
        random number.

    Raises (from `run`):
      AssertionError: a promise was broken; the text begins with the machine and the promise's
        number.
    """

    worker_class: type[SimWorker] = SimWorker

    def __init__(
        self,
        seed: int,
        *,
        workers: int = 3,
        coordinators: int = 2,
        works: int = 40,
        faults: int = 8,
        can_kill: bool = True,
        queue_max: int | None = None,
    ) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.clock = SimClock()
        self.settings = BrokerSettings(
            lease_s=4.0,
            reconnect_grace_s=1.0,
            cancel_grace_s=0.3,
            attempts_max=3,
            growth_limit_s=20.0,
        )
        self.oracle = Oracle()
        self.trace: list[str] = []
        self.quiet_since = 0.0
        """The time of the last fault, or of the last new or ended connection."""
        self.dispatcher_up = False
        self.incarnation = 0
        self._incarnations = itertools.count(1)
        self._runs = itertools.count(1)
        self._connections: dict[SimConnection, Callable[[Message], None]] = {}
        self._known: dict[SimConnection, set[tuple[int, int]]] = {}
        self._tick_at: float | None = None
        self._events = 0
        self._calm = False
        self.can_kill = can_kill
        self.start_dispatcher()
        self.slots = self.random.choice((1, 1, 2, 3))
        self.workers: list[SimWorker] = []
        for index in range(workers):
            self.start_worker(index)
        queue = queue_max or self.random.choice((2, 5, 2**20))
        self.coordinators = [
            SimCoordinator(self, number, queue_max=queue, works=works, calm=not faults)
            for number in range(1, coordinators + 1)
        ]
        for _ in range(faults):
            self.clock.at(self.random.uniform(0.05, FAULTS_UNTIL_S), self._fault)

    def run(self) -> None:
        """Run the phase with faults, the phase without faults, and the final checks."""
        self.clock.run(FAULTS_UNTIL_S)
        self._be_calm()
        self.clock.run(FAULTS_UNTIL_S + CALM_LIMIT_S, self._ended)
        for coordinator in self.coordinators:
            left = sorted(work for work in coordinator.kinds if not coordinator.resolved[work])
            assert coordinator.finished, (
                f"dispatch P7: coordinator {coordinator.number} waits for {left}"
            )
        # Wait, so that messages in flight arrive, and both sides of each ended connection notice
        # its end.
        self.clock.run(self.clock.now + 10.0)
        self._check_nothing_left()

    # -- parts -------------------------------------------------------------------------------------

    def start_dispatcher(self) -> None:
        self.incarnation = next(self._incarnations)
        self.broker = Broker(self.settings, first_lease=self.incarnation << 40)
        self.record = FactsRecord(self.broker)
        self.dispatcher_up = True
        self.log("dispatcher starts")

    def kill_dispatcher(self) -> None:
        self.dispatcher_up = False
        self.log("dispatcher killed")
        for connection in list(self._connections):
            self.end_connection(connection, noticed_by_server=False)

    def start_worker(self, index: int) -> None:
        worker = self.worker_class(
            self,
            index,
            next(self._incarnations),
            can_kill=self.can_kill,
            slots=self.slots,
            resources=self._resources_of(index),
        )
        self.workers = [other for other in self.workers if other.process.alive] + [worker]
        self.log(f"{worker.key} starts")

    def _resources_of(self, index: int) -> Quantities:
        licences = ("licence", 2000 if index < 2 else 500)
        return (("gpu", 2000), licences) if self.can_kill and index != 1 else (licences,)

    def could_run(self, request: Quantities) -> bool:
        return any(Ledger(self._resources_of(index)).fits(request) for index in (0, 1))

    def kill_worker(self, worker: SimWorker) -> None:
        if not worker.process.alive:
            return
        self.log(f"{worker.key} killed")
        connection = worker.connection
        worker.kill()
        if connection is not None and self.random.random() < 0.5:
            event = ProcessExited(
                pid=worker.incarnation, exit_code=-9, job="worker", index=worker.index
            )
            self.clock.after(self.random.uniform(0.0, 0.02), lambda: self._feed(event))
        self.worker_exited(worker)

    def worker_exited(self, worker: SimWorker) -> None:
        """Record the end of a worker's process. With a probability of 0.7 another incarnation
        starts later; in the phase without faults the first two workers always restart.
        """
        if worker.connection is not None:
            self.end_connection(worker.connection, noticed_by_client=False)
        if (self._calm and worker.index < 2) or self.random.random() < 0.7:
            self.clock.after(self.random.uniform(0.0, 3.0), lambda: self._restart(worker.index))

    def _restart(self, index: int) -> None:
        if not any(worker.index == index and worker.process.alive for worker in self.workers):
            self.start_worker(index)

    def holder(self, reference: bytes) -> SimWorker | None:
        """Return the worker that holds the large result of this reference; None if no worker does,
        or if this worker is frozen."""
        return self._holder_of(int(reference.split(b"|")[3]))

    def is_held(self, run: int) -> bool:
        """Return whether a worker that runs and is not frozen holds the result of the function run
        that has this number."""
        return self._holder_of(run) is not None

    def _holder_of(self, run: int) -> SimWorker | None:
        for worker in self.workers:
            if run in worker.held.values() and worker.process.alive and not worker.process.frozen:
                return worker
        return None

    def new_run(self, coordinator: int, work: int) -> int:
        run = next(self._runs)
        self.oracle.runs[run] = (coordinator, work)
        return run

    def log(self, text: str) -> None:
        self.quiet_since = self.clock.now
        self.trace.append(f"{self.clock.now:8.4f} {text}")

    # -- network -----------------------------------------------------------------------------------

    def new_connection(self, name: str, down: Callable[[Message], None]) -> SimConnection:
        connection = SimConnection(self.clock, self.random, name, self._arrived, down)
        self.quiet_since = self.clock.now
        self._connections[connection] = down
        self._known[connection] = set()
        return connection

    def end_connection(
        self,
        connection: SimConnection,
        *,
        noticed_by_client: bool = True,
        noticed_by_server: bool = True,
    ) -> None:
        """End a connection. Messages in flight are lost. Each side notices the end at a random
        time, or never if the flag of the side is False."""
        if not connection.open:
            return
        connection.end()
        self.quiet_since = self.clock.now
        self._connections.pop(connection, None)
        late_s = self.settings.lease_s * 0.2
        if noticed_by_server:
            incarnation = self.incarnation
            self.clock.after(
                self.random.uniform(0.0, late_s),
                lambda: (
                    self._feed(PeerGone(connection)) if incarnation == self.incarnation else None
                ),
            )
        if noticed_by_client:
            self.clock.after(
                self.random.uniform(0.0, late_s), lambda: self._tell_client(connection)
            )

    def _tell_client(self, connection: SimConnection) -> None:
        for worker in self.workers:
            if worker.connection is connection:
                worker.process.post(partial(worker.lost_connection, connection))
                return
        for coordinator in self.coordinators:
            coordinator.lost_connection(connection)

    def _arrived(self, connection: SimConnection, message: Message) -> None:
        if isinstance(message, ResultReceived) and message.keep:
            self._note_kept(connection, message)
        self._feed(Heard(connection, message))

    def _note_kept(self, connection: SimConnection, message: ResultReceived) -> None:
        session = self.broker.dispatch.sessions.get(connection) if self.dispatcher_up else None
        if session is not None:
            self.oracle.kept.update(
                (session.coordinator, submission_of(*item))
                for item in message.items
                if item in session.held
            )

    def _feed(self, event: BrokerEvent) -> None:
        if not self.dispatcher_up:
            return
        effects = self.broker.handle(event, self.clock.now)
        for effect in effects:
            connection, message = effect.to, effect.message
            assert isinstance(connection, SimConnection)
            self._check_assign(connection, message)
            self._check_release(connection, message)
            connection.send_down(message)
        self._check_members(event)
        self._events += 1
        if self._events % EVENTS_A_RECORD == 0:
            self._check_facts()
        at = self.broker.deadline
        if at is not None and at != self._tick_at:
            self._tick_at = at
            self.clock.at(at, lambda: self._tick(at))

    def _tick(self, at: float) -> None:
        if self._tick_at == at:
            self._tick_at = None
            self._feed(Ticked())

    # -- faults ------------------------------------------------------------------------------------

    def _fault(self) -> None:
        live = [
            worker for worker in self.workers if worker.process.alive and not worker.process.frozen
        ]
        worker = self.random.choice(live) if live else None
        kind = self.random.choice(FAULTS)
        self.log(f"fault: {kind} {worker.key if worker else ''}")
        if kind == "dispatcher":
            if self.dispatcher_up:
                self.kill_dispatcher()
                self.clock.after(self.random.uniform(0.0, 3.0), self._restart_dispatcher)
        elif kind == "coordinator":
            connection = self.random.choice(self.coordinators).connection
            if connection is not None:
                self.end_connection(connection)
        elif kind == "cancel":
            self.random.choice(self.coordinators).cancel()
        elif kind == "take back":
            self._take_back(self.random.choice(self.coordinators), self.random.randint(1, 5))
        elif worker is not None:
            self._fault_of(kind, worker)

    def _take_back(self, coordinator: SimCoordinator, times: int) -> None:
        """Have the program cancel futures of its work several times. One time would test little,
        because most work has ended by then."""
        coordinator.take_back()
        if times > 1:
            self.clock.after(
                self.random.expovariate(2.0), lambda: self._take_back(coordinator, times - 1)
            )

    def _fault_of(self, kind: str, worker: SimWorker) -> None:
        if kind == "kill":
            self.kill_worker(worker)
        elif kind == "slot":
            worker.kill_slot()
        elif kind == "memory":
            worker.use_memory()
        elif kind == "drain":
            worker.leave()
        elif kind in ("cut", "cut off") and worker.connection is not None:
            if kind == "cut off":
                worker.cut_off_until = self.clock.now + self.random.uniform(2.0, 6.0)
            self.end_connection(worker.connection)
        elif kind.startswith("freeze"):
            self._freeze(worker, slots_too=kind == "freeze all" or not self.can_kill)

    def _freeze(self, worker: SimWorker, *, slots_too: bool) -> None:
        worker.freeze(slots_too=slots_too)
        connection = worker.connection
        length_s = self.random.choice((0.2, 1.0, 6.0))
        if length_s > 0.5 and connection is not None:
            # ZeroMQ's heartbeats end the connection of a frozen process
            self.clock.after(
                0.5, lambda: self.end_connection(connection) if worker.process.frozen else None
            )

        def end() -> None:
            if worker.process.alive and worker.process.frozen:
                if self.random.random() < 0.3:
                    self.kill_worker(worker)
                else:
                    self.log(f"{worker.key} thaws")
                    worker.thaw()

        self.clock.after(length_s, end)

    def _restart_dispatcher(self) -> None:
        if not self.dispatcher_up:
            self.start_dispatcher()

    def _be_calm(self) -> None:
        self.log("calm")
        self._calm = True
        self._restart_dispatcher()
        for worker in self.workers:
            if worker.process.frozen:
                worker.thaw()
        live = {worker.index for worker in self.workers if worker.process.alive}
        for index in {0, 1} - live:
            self._restart(index)

    def _ended(self) -> bool:
        return all(coordinator.finished for coordinator in self.coordinators)

    # -- checks ------------------------------------------------------------------------------------

    def check_nothing_executes(self, coordinator: SimCoordinator, last_work: int) -> None:
        for worker in self.workers:
            detached = worker.connection is None or not worker.connection.open
            if detached and (worker.process.frozen or worker.thawed_unheard):
                continue
            if worker.has_disconnected and not self.can_kill:
                continue
            for owner, submission in worker.executing():
                work = submission >> SUBMISSIONS_SHIFT
                assert (
                    owner != coordinator.number or work > last_work or coordinator.is_detached(work)
                ), (
                    f"dispatch P5: work {work} of coordinator {owner} executes on {worker.key} "
                    f"after its round has ended"
                )

    def check_reported_before_start(self, worker: SimWorker, lease: int) -> None:
        if lease not in worker.report_before_start:
            return
        for member, load in self.broker.dispatch.loads.items():
            if member.incarnation == worker.incarnation and lease in load.leases and load.reachable:
                assert load.leases[lease].state in RUNNING, (
                    "worker P6: work to be reported first began before its report had arrived"
                )

    def check_registration(self, worker: SimWorker, message: Message) -> None:
        if isinstance(message, Register) and self.can_kill:
            held = set(message.held)
            assert (
                all(lease >> 40 == self.incarnation for lease in held) or not self.dispatcher_up
            ), "worker P4: a worker registers with leases of another dispatcher"
            if not held:
                assert not worker.executing(), (
                    "worker P4: a worker registers without leases while a function runs"
                )

    def _check_options(self, member: Member, assign: Assign) -> None:
        """Check that each assigned item may run on this worker, and that no waiting work should
        have been assigned before it. Compare the item only with work of the same coordinator that
        has the same options, apart from the priority."""
        waiting: dict[tuple[int, WorkOptions], list[tuple[int, int, bool]]] = {}
        for _, number, attempt, _, payload in assign.items:
            coordinator = self.coordinators[number - 1]
            work = int(payload.split(b"|")[2]) >> SUBMISSIONS_SHIFT
            options = coordinator.options.get(work, PLAIN)
            worker, priority, _, request = options
            assert worker in ("", member.name), (
                f"dispatch P12: work {work} is for {worker}, and goes to {member.name}"
            )
            if work in coordinator.near:
                continue  # its place in the queues depends on the holder of its inputs
            assert assign.pinned == bool(worker or request), (
                f"dispatch P12: the Assign to {member.name} does not say whether work {work} is "
                f"pinned to it"
            )
            line = (number, options._replace(priority=0))
            if line not in waiting:
                waiting[line] = self._waiting(coordinator, line[1])
            first = not attempt % (1 << SUBMISSION_SHIFT)
            for other, other_priority, others_first in waiting[line]:
                early = other_priority < priority or (
                    other_priority == priority
                    and (
                        coordinator.order[work] < coordinator.order[other]
                        or not (first and others_first)
                    )
                )
                assert early, f"dispatch P13: work {work} goes before {other}"

    def _waiting(
        self, coordinator: SimCoordinator, line: WorkOptions
    ) -> list[tuple[int, int, bool]]:
        """Return the coordinator's work that waits in the dispatcher's queues and was scheduled
        with these options, apart from the priority. Each entry is (work, priority, whether this is
        its first submission)."""
        sessions = self.broker.dispatch.sessions.values()
        parts = [
            part
            for s in sessions
            if s.coordinator == coordinator.number
            for part in s.with_detached
        ]
        ranks = [rank for part in parts for line in part.queues.values() for rank in line.bands]
        items = [
            (item, coordinator.options.get(item[0], PLAIN)) for rank in ranks for item in rank.items
        ]
        return [
            (item[0], options.priority, not item[1] % (1 << SUBMISSION_SHIFT))
            for item, options in items
            if options._replace(priority=0) == line and item[0] not in coordinator.near
        ]

    def _check_steal(self, connection: SimConnection, steal: StealRequest) -> None:
        load = self.broker.dispatch.loads[self.broker.membership.by_peer[connection]]
        for lease in (load.leases[number] for number in steal.leases):
            coordinator = self.coordinators[lease.session.coordinator - 1]
            pinned = coordinator.options.get(
                lease.work, PLAIN
            ).worker and not coordinator.wanted_back(lease.work)
            assert not pinned, "dispatch P12: pinned work is called back"

    def _check_assign(self, connection: SimConnection, message: Message) -> None:
        if isinstance(message, Forget):
            self._known[connection] -= {(message.coordinator, fn) for fn in message.functions}
        if isinstance(message, Registered):
            # after a registration the dispatcher may send functions again
            self._known[connection].clear()
        if isinstance(message, StealRequest):
            self._check_steal(connection, message)
        if not isinstance(message, Assign):
            return
        for _, coordinator, _, _, payload in message.items:
            again = not payload or (coordinator, int(payload.split(b"|")[2])) in self.oracle.kept
            assert not again, "dispatch P11: work whose result was kept runs again"
        for coordinator, fn, _ in message.functions:
            assert (coordinator, fn) not in self._known[connection], (
                "dispatch P8: a function is sent once"
            )
            self._known[connection].add((coordinator, fn))
        member = self.broker.membership.by_peer[connection]
        self._check_options(member, message)
        load = self.broker.dispatch.loads[member]
        own = sum(bool(lease.band.session_queue.key) for lease in load.leases.values())
        fits = load.outstanding <= load.window.limit or (message.pinned and own <= member.slots)
        assert fits, "dispatch P6: more leases than the window allows"
        for worker in self.workers:
            if worker.incarnation == member.incarnation:
                leases = {item[0] for item in message.items}
                worker.report_before_start.update(leases if message.report_before_start else ())
                worker.own.update(leases if message.pinned else ())

    def _check_release(self, connection: SimConnection, message: Message) -> None:
        """Check that no worker has to drop a value that a program holds, while the connection that
        brought the value is open."""
        if not isinstance(message, FreeResult):
            return
        for worker in self.workers:
            runs = (
                {worker.held.get(lease) for lease in message.leases}
                if worker.connection is connection
                else set()
            )
            for coordinator in self.coordinators:
                early = [
                    run
                    for run in runs
                    if run in coordinator.kept_results and _stands(coordinator.kept_results[run])
                ]
                assert not early, (
                    f"dispatch P11: {worker.key} has to drop {early}, which a coordinator keeps"
                )

    def _check_members(self, event: BrokerEvent) -> None:
        """Check that every registered worker whose connection is open is a member, unless the
        worker is leaving."""
        for worker in self.workers:
            connection = worker.connection
            if (
                worker.machine.contact.registered
                and connection is not None
                and connection.open
                and worker.process.alive
            ):
                assert connection in self.broker.membership.by_peer or worker.machine.leaving, (
                    f"membership P4: {worker.key} was lost while its connection stood, at {event}"
                )

    def _check_facts(self) -> None:
        """Check that the record counts what is in the queues, and gives each item a reason."""
        record = self.record.make(0, timeline=True, now=self.clock.now, to_unix_s=0.0)
        not_queued = {"away", "ending_round", "input", "window"}
        reasons = sum(row["count"] for row in record["waiting"] if row["reason"] not in not_queued)
        assert reasons == record["queued"], "facts: the reasons are not of all that waits"
        members = self.broker.membership.members
        assert len(record["workers"]) == len(members), "facts: a worker is missing"
        numbers = [row["seq"] for name in RINGS for row in record[name]]
        assert len({*numbers}) == len(numbers), "facts P2: two entries have one number"
        assert all(number < record["next"] for number in numbers), "facts P2: a number to come"

    def _check_nothing_left(self) -> None:
        snapshot = self.broker.snapshot()
        assert snapshot.queued == 0, "dispatch P7: work waits at the end"
        stocks = self.broker.dispatch.placement.demands.stocks
        for row in snapshot.workers:
            used = {name: use for name, (use, _) in stocks.figures(row.name).items() if use}
            assert not used, f"dispatch P19: {row.name} has {used} in use at the end"
            assert row.leases == 0, f"dispatch P1: {row.name} has leases at the end"
        for session in snapshot.coordinators:
            assert session.out == 0, "dispatch P1: work is with a worker at the end"
            assert session.held == 0, "dispatch P9: a bulk result is held at the end"
            assert session.functions <= 3, "coordinator P7: unused functions are remembered"
        members = {
            member.name: member.incarnation for member in self.broker.membership.members.values()
        }
        for coordinator in self.coordinators:
            coordinator.plans.check_end()
            assert coordinator.members == members, (
                "dispatch P15: a coordinator's members are not those of the cluster"
            )
        for worker in self.workers:
            if worker.process.alive:
                assert worker.machine.running == 0, f"worker P2: {worker.key} has work at the end"
                assert not worker.held, f"dispatch P9: {worker.key} holds bulk results at the end"


def _stands(connection: SimConnection | None) -> bool:
    return connection is not None and connection.open


def simulate(seed: int, **options: object) -> SimCluster:
    """Run a simulated cluster with one seed to its end.

    Use it to search for seeds that break a promise of the scheduling machines, for example after
    you have changed them. It needs no socket, process or sleep.

    Args:
      options: the arguments of SimCluster.

    Raises:
      AssertionError: a promise was broken; the text has the promise, the seed, and the end of the
        trace.
    """
    cluster = SimCluster(seed, **options)  # type: ignore[arg-type]
    with seed_named(seed, cluster.trace):
        cluster.run()
    return cluster

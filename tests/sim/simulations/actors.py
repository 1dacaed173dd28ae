"""A simulated cluster with actors: the real machines of the dispatcher and of workers, programs
that make actors, and processes of actors that start, serve, hang and die in virtual time.

In the first phase faults happen, and only safety is checked. The second phase has no faults. At its
end each actor of a living program serves, unless no worker has room for it, the programs know where
each actor is, and no other process is left.

The promise that two incarnations never both serve has no exception here. A worker that is frozen
has its processes killed by its zygote after half a lease, or after a fifth of one if it was
without contact before.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from tests.sim.simulations.clock import SimClock, seed_named
from tests.sim.simulations.network import SimConnection, SimProcess
from zmqdist.events import Heard, PeerGone, ProcessExited, Send, Ticked
from zmqdist.limits import ORPHAN_LIMIT_S
from zmqdist.messages import (
    ActorChanged,
    ActorFound,
    ActorKnown,
    ActorsOwned,
    ActorSpec,
    Beat,
    CoordinatorRegistered,
    CreateActor,
    DropActor,
    FindActor,
    Goodbye,
    KeepActor,
    Message,
    RegisterCoordinator,
    Registered,
    StartActor,
    WatchActor,
    Workers,
)
from zmqdist.scheduling.dispatcher.actors_machine import Actor
from zmqdist.scheduling.dispatcher.machine import SLOTS_END_S, Broker
from zmqdist.scheduling.dispatcher.machine import Event as BrokerEvent
from zmqdist.scheduling.shared.actors import ActorState
from zmqdist.scheduling.shared.broker_settings import BrokerSettings
from zmqdist.scheduling.worker.machine import DISPATCHER, WorkerMachine
from zmqdist.scheduling.worker.worker_events import (
    ActorEnded,
    ActorServing,
    DispatcherConnected,
    DispatcherDisconnected,
    Effect,
    EndActor,
    Event,
    Exit,
    KillActor,
    LeaveRequested,
    SlotReady,
    Spawn,
    SpawnActor,
)

LEASE_S = 4.0
FAULTS_UNTIL_S = 40.0
CALM_S = 2 * ORPHAN_LIMIT_S + 40.0
ACTORS_AT_WORKER = 3
DEVICES_AT_WORKER = 2
GROWTH_LIMIT_S = 8.0
NAMES = ("", "", "n0", "n1", "n2")
FAULTS = (
    *("kill", "freeze", "freeze", "cut", "cut", "cut off", "crash", "crash", "drain"),
    *("dispatcher", "dispatcher", "owner cut", "owner ends", "owner dies", "drop", "find"),
)

QUIET = (Beat, Registered, CoordinatorRegistered, Workers)
"""Messages that the trace leaves out."""


@dataclass(eq=False)
class SimActorProcess:
    """One process of an actor."""

    spec: ActorSpec
    incarnation: int
    devices: tuple[int, ...] = ()
    alive: bool = True
    serves: bool = False
    is_kept: bool = False


@dataclass
class ActorOracle:
    """What happened, for the checks. `heard` has the incarnations of each actor that a program has
    heard of."""

    processes: list[SimActorProcess] = field(default_factory=list)
    groups: dict[int, int] = field(default_factory=dict)
    """The group of each actor that has one, as its program has made it."""
    drained: Counter[int] = field(default_factory=Counter)
    """How often the worker of each actor was drained."""
    heard: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    started: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    found: int = 0
    impossible: int = 0

    def begins(self, process: SimActorProcess) -> None:
        """A process begins to serve."""
        number = process.spec.actor
        twins = [p for p in self.processes if p.alive and p.serves and p.spec.actor == number]
        assert not twins, (
            f"directory A1: actor {number} serves as {process.incarnation} and as "
            f"{twins[0].incarnation}"
        )
        process.serves = True


class SimHost:
    """One incarnation of a worker with processes of actors."""

    def __init__(self, cluster: SimActors, index: int, incarnation: int) -> None:
        self.cluster, self.index, self.incarnation = cluster, index, incarnation
        self.process = SimProcess()
        self.connection: SimConnection | None = None
        self.cut_off_until = 0.0
        self.thaws = 0
        self.processes: dict[int, SimActorProcess] = {}
        self._tick_at: float | None = None
        self.machine = WorkerMachine(
            incarnation=incarnation,
            job="worker",
            index=index,
            slots=1,
            pid=incarnation,
            host="sim",
            orphan_limit_s=ORPHAN_LIMIT_S,
            can_kill=True,
            now=cluster.clock.now,
            resources=(("gpu", 1000 * DEVICES_AT_WORKER),),
            actors_max=ACTORS_AT_WORKER,
        )
        self._perform(self.machine.start())
        self.connect()

    def later(self, low_s: float, high_s: float, fn: Callable[[], object]) -> None:
        delay_s = self.cluster.random.uniform(low_s, high_s)
        self.cluster.clock.after(delay_s, lambda: self.process.post(fn))

    def connect(self) -> None:
        cluster = self.cluster
        if not self.process.alive or (self.connection is not None and self.connection.open):
            return
        if cluster.broker is None or cluster.clock.now < self.cut_off_until:
            self.later(0.05, 0.6, self.connect)
            return
        connection = self.connection = cluster.new_connection(
            f"w{self.index}.{self.incarnation}", self._receive, self.lost_connection
        )
        dispatcher = cluster.dispatcher

        def up() -> None:
            if connection.open:
                self.handle(DispatcherConnected(dispatcher))

        self.later(0.0, 0.002, up)

    def lost_connection(self, connection: SimConnection) -> None:
        self.process.post(partial(self._note_loss, connection))

    def _note_loss(self, connection: SimConnection) -> None:
        if connection is self.connection:
            self.connection = None
            self.handle(DispatcherDisconnected())
            self.later(0.05, 0.5, self.connect)

    def _receive(self, message: Message) -> None:
        self.process.post(lambda: self.handle(Heard(DISPATCHER, message)))

    def handle(self, event: Event) -> None:
        if self.process.alive:
            self._perform(self.machine.handle(event, self.cluster.clock.now))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    if self.connection is not None and self.connection.open:
                        self.connection.send_up(effect.message)
                case Spawn():
                    self.later(0.01, 0.2, lambda: self.handle(SlotReady(0)))
                case SpawnActor():
                    self._spawn(effect)
                case EndActor():
                    if self.cluster.random.random() < 0.8:  # else its call does not end in time
                        self._end_later(effect.incarnation, 0.3)
                case KeepActor():
                    self.processes[effect.incarnation].is_kept = True
                case KillActor():
                    self._end_later(effect.incarnation, 0.05)
                case Exit():
                    self.cluster.worker_exited(self)
        at = self.machine.deadline
        if at is not None and at != self._tick_at:
            self._tick_at = at
            self.cluster.clock.at(at, lambda: self.process.post(lambda: self._tick(at)))

    def _tick(self, at: float) -> None:
        if self._tick_at == at:
            self._tick_at = None
            self.handle(Ticked())

    # -- processes of actors -----------------------------------------------------------------------

    def _spawn(self, spawn: SpawnActor) -> None:
        process = SimActorProcess(spawn.spec, spawn.incarnation, spawn.devices)
        self.cluster.oracle.processes.append(process)
        self.processes[spawn.incarnation] = process
        assert len(self.processes) <= ACTORS_AT_WORKER, "directory A9: too many processes"
        devices = [device for p in self.processes.values() for device in p.devices]
        assert len(devices) == len({*devices} & {*range(DEVICES_AT_WORKER)}), (
            f"directory A11: the devices {devices} are in use"
        )
        self.cluster.clock.after(
            self.cluster.random.uniform(0.02, 0.5), lambda: self._make_object(process)
        )

    def _make_object(self, process: SimActorProcess) -> None:
        if not process.alive:
            return
        if self.cluster.random.random() < 0.05:
            self._ends(process, "no object", b"error")
            return
        self.cluster.oracle.begins(process)
        event = ActorServing(process.incarnation, f"sim:{process.incarnation % 60_000}", b"")
        self.process.post(lambda: self.handle(event))

    def _end_later(self, incarnation: int, within_s: float) -> None:
        process = self.processes.get(incarnation)
        if process is not None:
            delay_s = self.cluster.random.uniform(0.0, within_s)
            self.cluster.clock.after(delay_s, lambda: self._ends(process, "ended"))

    def _ends(self, process: SimActorProcess, reason: str, error: bytes = b"") -> None:
        if process.alive:
            process.alive = False
            event = ActorEnded(process.incarnation, reason, error)
            self.process.post(lambda: self._report_end(process, event))

    def _report_end(self, process: SimActorProcess, event: ActorEnded) -> None:
        self.processes.pop(process.incarnation, None)
        self.handle(event)

    def crash_actor(self) -> None:
        live = [process for process in self.processes.values() if process.alive]
        if live:
            self._ends(self.cluster.random.choice(live), "crashed")

    def kill(self) -> None:
        """Kill the worker. Its zygote kills its processes soon."""
        self.process.kill()
        for process in self.processes.values():
            delay_s = self.cluster.random.uniform(0.0, 0.9 * SLOTS_END_S)
            self.cluster.clock.after(delay_s, partial(setattr, process, "alive", False))

    def freeze(self) -> None:
        self.process.freeze()
        thaws = self.thaws
        watch_s = LEASE_S / 2 if self.machine.contact.registered else LEASE_S / 5
        for silence_s, is_kept in ((watch_s, False), (ORPHAN_LIMIT_S, True)):
            self.cluster.clock.after(silence_s, partial(self._watch, thaws, is_kept))

    def thaw(self) -> None:
        self.thaws += 1
        self.process.thaw()

    def _watch(self, thaws: int, is_kept: bool) -> None:
        if self.process.frozen and self.thaws == thaws:
            for process in list(self.processes.values()):
                if process.is_kept == is_kept:
                    self._ends(process, "silent")


class SimProgram:
    """A program that makes actors. It registers on each connection, as a coordinator does."""

    def __init__(self, cluster: SimActors, number: int) -> None:
        self.cluster, self.number = cluster, number
        self.alive = True
        self.connection: SimConnection | None = None
        self.wanted: dict[int, ActorSpec] = {}
        self.changes: dict[int, ActorChanged] = {}
        self.ends: set[int] = set()
        self._sent: set[int] = set()
        self._registered = False
        self.connect()

    def connect(self) -> None:
        cluster = self.cluster
        if not self.alive or self.connection is not None:
            return
        if cluster.broker is None:
            cluster.clock.after(cluster.random.uniform(0.05, 0.6), self.connect)
            return
        self.connection = cluster.new_connection(
            f"c{self.number}", self._receive, self.lost_connection
        )
        self.send(RegisterCoordinator(self.number, 1000, 1, False))
        self.send(ActorsOwned([*self.wanted]))
        for number in self.changes.keys() - self.wanted.keys() - self.ends:
            self.send(WatchActor(number))
        for spec in list(self.wanted.values()):
            self._create(spec)

    def lost_connection(self, connection: SimConnection) -> None:
        if connection is self.connection:
            self.connection = None
            self.cluster.clock.after(self.cluster.random.uniform(0.05, 0.6), self.connect)

    def send(self, message: Message) -> None:
        if self.connection is not None and self.connection.open:
            self.connection.send_up(message)

    def make(self, spec: ActorSpec) -> None:
        self.wanted[spec.actor] = spec
        if spec.group:
            self.cluster.oracle.groups[spec.actor] = spec.group
        if self.connection is not None:
            self._create(spec)

    def _create(self, spec: ActorSpec) -> None:
        change = self.changes.get(spec.actor)
        incarnation = change.incarnation if change else 0
        left = change.restarts_left if change else -1
        self.send(CreateActor(spec, incarnation, left, spec.actor in self._sent))
        self._sent.add(spec.actor)

    def _receive(self, message: Message) -> None:
        if not self.alive:
            return
        if isinstance(message, ActorFound):
            self.cluster.oracle.found += bool(message.actor)
            if message.actor and message.actor not in self.wanted:
                self.send(WatchActor(message.actor))
        if not isinstance(message, ActorChanged):
            return
        number = message.actor
        assert number not in self.ends, f"directory A2: the end of {number} is reported again"
        self.changes[number] = message
        if message.state == ActorState.ENDED:
            self.ends.add(number)
            self.wanted.pop(number, None)
        elif message.state == ActorState.LIVE and number in self.wanted:
            self.send(ActorKnown(number, message.incarnation))
            heard = self.cluster.oracle.heard[number]
            heard.add(message.incarnation)
            drained = self.cluster.oracle.drained[number] if self.wanted[number].restarts else 0
            assert len(heard) <= self.wanted[number].restarts + 1 + drained, (
                f"directory A6: actor {number} began {len(heard)} times"
            )

    def end(self, *, goodbye: bool) -> None:
        if goodbye:
            self.send(Goodbye())
        self.cluster.clock.after(0.2 if goodbye else 0.0, self._end)

    def _end(self) -> None:
        self.alive = False
        if self.connection is not None:
            self.cluster.end_connection(self.connection)


class SimActors:
    """One dispatcher, three workers, three programs. All random choices follow from the seed.

    Raises (from `run`):
      AssertionError: a promise was broken; the text begins with the machine and the promise.
    """

    def __init__(self, seed: int, faults: int = 12, actors: int = 10) -> None:
        self.random, self.clock = Random(seed), SimClock()
        self.oracle = ActorOracle()
        self.trace: list[str] = []
        self.broker: Broker | None = None
        self.dispatcher = 0
        self._numbers = itertools.count(1)
        self._incarnations = itertools.count(1)
        self._connections: dict[SimConnection, Callable[[SimConnection], object]] = {}
        self._tick_at: float | None = None
        self.start_dispatcher()
        self.workers: list[SimHost] = []
        for index in range(3):
            self._start_worker(index)
        self.programs = [SimProgram(self, number) for number in range(101, 104)]
        for _ in range(actors):
            self.clock.at(self.random.uniform(0.1, FAULTS_UNTIL_S * 0.8), self._make_actor)
        for _ in range(faults):
            self.clock.at(self.random.uniform(0.5, FAULTS_UNTIL_S), self._fault)

    def run(self) -> None:
        self.clock.run(FAULTS_UNTIL_S)
        self._be_calm()
        self.clock.run(FAULTS_UNTIL_S + CALM_S)
        self._check_end()

    def log(self, text: str) -> None:
        self.trace.append(f"{self.clock.now:8.4f} {text}")

    # -- parts -------------------------------------------------------------------------------------

    def start_dispatcher(self) -> None:
        is_first = not self.dispatcher
        self.dispatcher += 1
        self._tick_at = None
        settings = BrokerSettings(
            lease_s=LEASE_S,
            reconnect_grace_s=1.0,
            cancel_grace_s=0.3,
            growth_limit_s=GROWTH_LIMIT_S,
        )
        self.broker = Broker(
            settings,
            first_lease=self.dispatcher << 40,
            first_actor=self.dispatcher << 20,
            silent_until=0.0 if is_first else self.clock.now + LEASE_S,
        )
        self.log("dispatcher starts")

    def _restart_dispatcher(self) -> None:
        if self.broker is None:
            self.start_dispatcher()

    def _start_worker(self, index: int) -> None:
        if not any(w.index == index and w.process.alive for w in self.workers):
            self.workers = [w for w in self.workers if w.process.alive]
            self.workers.append(SimHost(self, index, next(self._incarnations)))
            self.log(f"worker {index} starts")

    def worker_exited(self, worker: SimHost) -> None:
        self.log(f"worker {worker.index} ends: {worker.machine.exit}")
        worker.kill()
        if worker.connection is not None:
            self.end_connection(worker.connection)
        self.clock.after(self.random.uniform(0.2, 3.0), lambda: self._start_worker(worker.index))

    def _make_actor(self) -> None:
        programs = [program for program in self.programs if program.alive]
        if not programs:
            return
        program, random = self.random.choice(programs), self.random
        size = random.choice((1, 1, 1, 1, 2, 3))
        group = next(self._numbers) if size > 1 else 0
        for rank in range(size):
            spec = ActorSpec(
                next(self._numbers),
                "Counter",
                b"call",
                random.choice((0, program.number, program.number)) if size == 1 else program.number,
                name=random.choice(NAMES) if size == 1 else "",
                worker="worker:0" if random.random() < 0.1 and size == 1 else "",
                restarts=random.choice((0, 0, 1, 3)),
                resources={"gpu": random.choice((1000, 2000, 3000))}
                if random.random() < 0.2
                else {},
                group=group,
                rank=rank,
                size=size,
            )
            self.log(f"program {program.number} makes {spec}")
            program.make(spec)

    # -- network -----------------------------------------------------------------------------------

    def new_connection(
        self,
        name: str,
        down: Callable[[Message], None],
        lost: Callable[[SimConnection], object],
    ) -> SimConnection:
        connection = SimConnection(self.clock, self.random, name, self._arrived, down)
        self._connections[connection] = lost
        return connection

    def end_connection(self, connection: SimConnection) -> None:
        if not connection.open:
            return
        connection.end()
        lost = self._connections.pop(connection)
        broker = self.broker
        self.clock.after(
            self.random.uniform(0.0, 0.5),
            lambda: self._feed(PeerGone(connection)) if broker is self.broker else None,
        )
        self.clock.after(self.random.uniform(0.0, 0.5), lambda: lost(connection))

    def _arrived(self, connection: SimConnection, message: Message) -> None:
        self._feed(Heard(connection, message))

    def _feed(self, event: BrokerEvent) -> None:
        if self.broker is None:
            return
        effects = self.broker.handle(event, self.clock.now)
        starts: list[ActorSpec] = []
        for effect in effects:
            connection, message = effect.to, effect.message
            assert isinstance(connection, SimConnection)
            if isinstance(message, StartActor):
                starts.append(message.spec)
            if not isinstance(message, QUIET):
                self.log(f"to {connection.name}: {message}")
            self._check(message, connection)
            connection.send_down(message)
        self._check_groups(starts)
        at = self.broker.deadline
        if at is not None and at != self._tick_at:
            self._tick_at = at
            broker = self.broker
            self.clock.at(at, lambda: self._tick(broker, at))

    def _tick(self, broker: Broker, at: float) -> None:
        if self.broker is broker and self._tick_at == at:
            self._tick_at = None
            self._feed(Ticked())

    # -- faults ------------------------------------------------------------------------------------

    def _fault(self) -> None:
        kind, random = self.random.choice(FAULTS), self.random
        live = [w for w in self.workers if w.process.alive and not w.process.frozen]
        worker = random.choice(live) if live else None
        program = random.choice(self.programs)
        self.log(f"fault: {kind} {worker.index if worker else ''} {program.number}")
        if kind == "dispatcher":
            self._kill_dispatcher()
        elif kind.startswith("owner"):
            self._fault_of_program(kind, program)
        elif kind == "drop":
            program.send(DropActor(random.randint(1, 12), "dropped", 0.3))
        elif kind == "find":
            program.send(FindActor(1, random.choice(NAMES[2:])))
        elif worker is not None:
            self._fault_of_worker(kind, worker)

    def _kill_dispatcher(self) -> None:
        if self.broker is not None:
            self.broker = None
            for connection in list(self._connections):
                self.end_connection(connection)
            self.clock.after(self.random.uniform(0.0, 6.0), self._restart_dispatcher)

    def _fault_of_program(self, kind: str, program: SimProgram) -> None:
        if kind == "owner cut":
            if program.connection is not None:
                self.end_connection(program.connection)
        elif program is not self.programs[0]:
            program.end(goodbye=kind == "owner ends")

    def _fault_of_worker(self, kind: str, worker: SimHost) -> None:
        if kind == "crash":
            worker.crash_actor()
        elif kind == "drain":
            self.oracle.drained.update(process.spec.actor for process in worker.processes.values())
            worker.handle(LeaveRequested(1.0))
        elif kind == "kill":
            worker.kill()
            if self.random.random() < 0.5:
                gone = ProcessExited(worker.incarnation, -9, job="worker", index=worker.index)
                self.clock.after(self.random.uniform(0.0, 0.02), lambda: self._feed(gone))
            self.worker_exited(worker)
        elif kind == "freeze":
            worker.freeze()
            length_s = self.random.choice((0.3, 1.5, 3.0, 7.0))
            connection = worker.connection
            if length_s > 1.0 and connection is not None:
                self.clock.after(0.8, lambda: self.end_connection(connection))
            self.clock.after(length_s, worker.thaw)
        elif worker.connection is not None:
            if kind == "cut off":
                worker.cut_off_until = self.clock.now + self.random.uniform(1.0, 9.0)
            self.end_connection(worker.connection)

    def _be_calm(self) -> None:
        self.log("calm")
        self._restart_dispatcher()
        for worker in self.workers:
            worker.thaw()
        for index in range(3):
            self._start_worker(index)

    # -- checks ------------------------------------------------------------------------------------

    def _check(self, message: Message, connection: SimConnection) -> None:
        assert self.broker is not None
        if isinstance(message, ActorChanged) and message.state == ActorState.ENDED:
            self.oracle.ended.add(message.actor)
            self.oracle.impossible += "which is more than a worker has" in message.reason
        if isinstance(message, ActorFound) and not message.actor:
            registered = [w for w in self.workers if w.machine.contact.registered]
            present = {
                process.spec.actor
                for worker in registered
                if worker.connection is not None and worker.connection.open
                for process in worker.processes.values()
                if process.serves and process.spec.name and not self._is_over(process.spec)
            }
            known = {n for n in present if n not in self.broker.actors.actors}
            assert not known, f"directory A7: {known} live, and a name is said not to exist"

    def _is_over(self, spec: ActorSpec) -> bool:
        """Whether an actor has ended for its program, which may not know yet."""
        programs = {program.number for program in self.programs if program.alive}
        return spec.actor in self.oracle.ended or spec.owner not in {0, *programs}

    def _check_groups(self, starts: list[ActorSpec]) -> None:
        first = [spec for spec in starts if spec.actor not in self.oracle.started]
        self.oracle.started |= {spec.actor for spec in starts}
        assert self.broker is not None
        for spec in first:
            left = [
                number
                for number, group in self.oracle.groups.items()
                if group == self.oracle.groups.get(spec.actor)
                and number not in self.oracle.started | self.oracle.ended
            ]
            assert not left, f"directory A10: {spec.actor} is placed without {left}"

    def _check_end(self) -> None:
        assert self.broker is not None
        directory = self.broker.actors
        owners = {program.number for program in self.programs if program.alive}
        for actor in directory.actors.values():
            assert actor.spec.owner in {0, *owners}, f"directory A5: {actor.spec} outlives it"
            assert actor.state in (ActorState.LIVE, ActorState.PENDING), (
                f"directory A3: {actor.spec} is {actor.state.name} at the end"
            )
            if actor.state is ActorState.PENDING:
                assert actor.spec.resources.get("gpu", 0) <= 1000 * DEVICES_AT_WORKER, (
                    f"directory A12: {actor.spec} waits for more than a worker has"
                )
                assert not self._could_be_placed(actor), f"directory A3: {actor.spec} waits"
        names = [a.spec.name for a in directory.actors.values() if a.spec.name]
        assert len(names) == len({*names}), f"directory A4: {names}"
        self._check_programs(directory.actors)
        present = {
            (w.incarnation, p.incarnation)
            for w in self.workers
            if w.process.alive
            for p in w.processes.values()
        }
        placed = {(a.host, a.incarnation) for a in directory.actors.values() if a.host}
        assert present == placed, f"directory A8: processes {present}, actors {placed}"

    def _check_programs(self, actors: dict[int, Actor]) -> None:
        for program in self.programs:
            for number in program.wanted if program.alive else ():
                assert number in actors, f"directory A2: the end of {number} was not reported"
                actor, change = actors[number], program.changes.get(number)
                if actor.state is ActorState.LIVE:
                    assert change is not None, f"directory A2: {number} is live, unreported"
                    assert (change.state, change.incarnation) == (
                        ActorState.LIVE,
                        actor.incarnation,
                    ), f"directory A2: {number} is live as {actor.incarnation}, and {change}"

    def _could_be_placed(self, actor: Actor) -> bool:
        assert self.broker is not None
        rows = self.broker.snapshot().workers
        group = [a for a in self.broker.actors.actors.values() if a.spec.group == actor.spec.group]
        if actor.spec.size > 1 and not actor.incarnation:
            if len(group) < actor.spec.size:
                return False
            if any(a.spec.resources for a in group):
                return False  # whether all of it fits together is not computed here
            waiting = sum(a.state is ActorState.PENDING for a in group)
            return sum(row.actors_max - row.actors for row in rows) >= waiting
        idle = {
            f"worker:{worker.index}": DEVICES_AT_WORKER
            - sum(len(process.devices) for process in worker.processes.values())
            for worker in self.workers
            if worker.process.alive
        }
        return any(
            row.actors < row.actors_max
            and actor.spec.worker in ("", row.name)
            and 1000 * idle[row.name] >= actor.spec.resources.get("gpu", 0)
            for row in rows
        )


def simulate_actors(seed: int, **options: Any) -> SimActors:
    """Run a simulated cluster with actors to its end. Raises AssertionError with the promise, the
    seed and the end of the trace if a promise was broken."""
    cluster = SimActors(seed, **options)
    with seed_named(seed, cluster.trace):
        cluster.run()
    return cluster

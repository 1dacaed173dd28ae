"""Programs that call actors, with the actors' processes, their workers and a dispatcher, in virtual
time: the real CoordinatorMachine, ActorCallQueue and ActorDirectory.

Each program makes, finds, calls, kills and drops actors, and schedules functions, whose values are
inputs of calls. Faults: processes of actors, workers, programs and the dispatcher die; processes
freeze; connections break, and each side notices it at its own time. After FAULTS_S no more faults
come. Then all calls must end, each actor that has not ended must answer, and once the programs have
dropped their handles nothing may be left.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from tests.sim.simulations.calls import SimWorld
from tests.sim.simulations.network import SimConnection, SimProcess
from zmqdist.events import Heard, Send, Ticked
from zmqdist.limits import ACTOR_WINDOW_BYTES
from zmqdist.messages import (
    BULK,
    CANCELLED,
    ERROR,
    ITEM,
    VALUE,
    ActorExited,
    ActorReady,
    ActorResults,
    ActorSpec,
    CallActor,
    CancelActorCalls,
    CancelWork,
    CoordinatorRegistered,
    EndRound,
    HostedActor,
    Register,
    RegisterCoordinator,
    ResultReceived,
    Results,
    RoundEnded,
    StartActor,
    StopActor,
    Submit,
    Workers,
)
from zmqdist.scheduling.coordinator.coordinator_events import (
    ActorConnected,
    ActorDisconnected,
    ActorKilled,
    ActorMade,
    ActorSearched,
    ActorSought,
    ActorWatched,
    BulkArrived,
    BulkUnreachable,
    CallsEnded,
    CancelRequested,
    ConnectActor,
    DisconnectActor,
    DispatcherDown,
    DispatcherUp,
    EndRoundRequested,
    Event,
    Fetch,
    HandlesDropped,
    Resolve,
    Scheduled,
    SendCalls,
    SendToActor,
    StreamTaken,
    SubmitWork,
)
from zmqdist.scheduling.coordinator.machine import DISPATCHER, CoordinatorMachine
from zmqdist.scheduling.coordinator.work import (
    ACTOR_LOST,
    INPUT_FAILED,
    TIMED_OUT,
    UNAVAILABLE,
    CalledActor,
    Extra,
    MethodCall,
    Work,
)
from zmqdist.scheduling.dispatcher.actors_machine import ActorDirectory
from zmqdist.scheduling.dispatcher.membership_and_leases import Member, MemberLost
from zmqdist.scheduling.dispatcher.resources import Stocks
from zmqdist.scheduling.shared.actors import ActorState
from zmqdist.scheduling.worker.actor_calls_machine import ActorCall, ActorCallQueue, CallState

FAULTS_S = 2.5
OVER_S = 5.0
DROPPED_S = 80.0
END_S = 150.0
"""The times after OVER_S leave room for ORPHAN_LIMIT_S: a dispatcher that does not know how the
worker of an actor has ended waits for so long."""
LEASE_S = 1.0
DOWN_S = 1.2
NOTICE_S = 0.1
LATE_S = 1.5
"""The longest time until the actor's side notices the end of a connection, in seconds."""
PAUSE_S = 0.12
AGAIN_S = 0.03
RUNNING_MAX = 8
LARGE = b"x" * (6 << 20)
FAULTS = (
    "kill actor",
    "kill actor",
    "kill worker",
    "kill program",
    "kill dispatcher",
    "freeze actor",
    "freeze program",
    "cut actor",
    "cut actor",
    "cut dispatcher",
)


def as_sent(message: Any) -> tuple[Any, int]:
    return message, 0


class SimActorProcess(SimProcess):
    """The process of one incarnation of an actor: a model of scheduling/worker/actor_calls.py."""

    def __init__(
        self, world: ActorCallsSim, worker: SimWorker, spec: ActorSpec, incarnation: int, left: int
    ) -> None:
        super().__init__()
        self.world, self.worker, self.spec, self.incarnation = world, worker, spec, incarnation
        self.restarts_left, self.address, self.is_kept = left, "", False
        self.queue = ActorCallQueue(0)
        self.connections: dict[SimConnection, SimDealer] = {}
        self.held: dict[SimConnection, set[tuple[int, int]]] = {}
        self._given: deque[ActorCall] = deque()
        self._is_busy = False

    def __repr__(self) -> str:
        return f"actor {self.spec.actor}.{self.incarnation}"

    def serve(self) -> None:
        self.address = self.world.listen(self)
        self.queue.running_max = RUNNING_MAX
        self.worker.tell(ActorReady(self.spec.actor, self.incarnation, self.address))

    def heard(self, connection: SimConnection, message: Any) -> None:
        if connection not in self.connections:
            return
        match message:
            case CallActor(number, incarnation, calls):
                if (number, incarnation) != (self.spec.actor, self.incarnation):
                    self.connections[connection].refused(connection)
                    self.gone(connection)
                    return
                dealer = self.connections[connection]
                former: Any = self.queue.former(connection, dealer.program.number)
                if former is not None:
                    self.gone(former)
                refused = self.queue.add(connection, calls)
                self.world.promise(not refused, f"K5: {refused} are too many for the actor")
                self._give_next()
            case CancelActorCalls(keys):
                self.queue.cancel(connection, keys)
            case ResultReceived(keys):
                self.held.get(connection, set()).difference_update(keys)

    def gone(self, connection: SimConnection) -> None:
        if self.connections.pop(connection, None) is not None:
            self.queue.caller_gone(connection)
            self.held.pop(connection, None)

    def end(self) -> None:
        if self.alive:
            self.kill()
            self.world.unlisten(self)
            for connection, dealer in list(self.connections.items()):
                connection.end()
                dealer.notice(connection)

    def _give_next(self) -> None:
        self._given += self.queue.next_calls()
        self._run_next()

    def _run_next(self) -> None:
        while self._given and not self._is_busy:
            call = self._given.popleft()
            if call.state is CallState.DROPPED:
                self._ended(call, VALUE, b"")
                continue
            self._is_busy = True
            program, duration_s, kind = self.world.begun(self, call)
            ran = partial(self._ran, program, call, kind)
            self.world.clock.after(duration_s, partial(self.post, ran))

    def _ran(self, program: SimProgram, call: ActorCall, kind: int) -> None:
        self._is_busy = False
        value = b"raised" if kind == ERROR else b"%d" % call.work
        if kind == ITEM:
            items = [(call.work, call.attempt, ITEM, b"%d" % call.work)]
            if call.state is CallState.GIVEN:
                self._connection(call).send_down(ActorResults(self.incarnation, items))
            kind = VALUE
        self._ended(call, kind, value)
        self._give_next()

    def _connection(self, call: ActorCall) -> SimConnection:
        assert isinstance(call.caller, SimConnection)
        return call.caller

    def _ended(self, call: ActorCall, kind: int, value: bytes) -> None:
        connection = self._connection(call)
        if self.queue.ended(call):
            if kind == BULK:
                self.held.setdefault(connection, set()).add((call.work, call.attempt))
            items = [(call.work, call.attempt, kind, value)]
            connection.send_down(ActorResults(self.incarnation, items))


class SimWorker(SimProcess):
    """One incarnation of a worker that has processes of actors."""

    def __init__(self, world: ActorCallsSim, index: int) -> None:
        super().__init__()
        self.world, self.index, self.incarnation = world, index, world.new_life()
        self.processes: dict[int, SimActorProcess] = {}
        self._link: SimConnection | None = None
        job = f"worker{self.incarnation}"
        self.member = Member(job, index, self.incarnation, 1, 1, "h", 0.0, 0.0, True, None)

    def register(self, dispatcher: SimDispatcher) -> None:
        if not dispatcher.alive:
            return
        link = self._link = SimConnection(
            self.world.clock,
            self.world.random,
            f"worker:{self.index}",
            lambda _, message: dispatcher.heard_worker(self, message),
            lambda message: self.post(lambda: self._heard(message)),
            wire=as_sent,
        )
        dispatcher.links[link] = self
        actors = [
            HostedActor(p.spec, n, p.restarts_left, p.is_kept, p.address)
            for n, p in self.processes.items()
        ]
        name = self.member
        register = Register(
            self.incarnation, "worker", self.index, 1, [], [], 1, name.host, actors_max=100
        )
        register.actors = actors
        self.tell(register)

    def tell(self, message: Any) -> None:
        if self._link is not None:
            self._link.send_up(message)

    def _heard(self, message: Any) -> None:
        world = self.world
        match message:
            case StartActor(spec, incarnation, left):
                process = SimActorProcess(world, self, spec, incarnation, left)
                self.processes[incarnation] = process
                delay_s = world.random.random() * 0.2
                if spec.call == b"bad":
                    world.clock.after(
                        delay_s, lambda: self.end(process, "its __init__ has failed", b"E")
                    )
                else:
                    world.clock.after(delay_s, lambda: process.post(process.serve))
            case StopActor(_, incarnation, grace_s):
                if incarnation in self.processes:
                    process = self.processes[incarnation]
                    process.queue.close()
                    world.clock.after(grace_s, lambda: self.end(process, "it was stopped"))

    def end(self, process: SimActorProcess, reason: str, error: bytes = b"") -> None:
        """A process has ended."""
        if process.alive:
            process.end()
            self.world.clock.after(
                self.world.random.random() * NOTICE_S,
                lambda: self.post(lambda: self._ended(process, reason, error)),
            )

    def _ended(self, process: SimActorProcess, reason: str, error: bytes) -> None:
        del self.processes[process.incarnation]
        exited = ActorExited(process.spec.actor, process.incarnation, reason)
        if error:
            exited.final, exited.error = True, error
        self.tell(exited)

    def die(self) -> None:
        self.kill()
        for process in self.processes.values():
            process.end()
        if self._link is not None:
            self._link.end()


class SimDispatcher(SimProcess):
    """One incarnation of the dispatcher. It runs functions itself."""

    def __init__(self, world: ActorCallsSim, silent_until: float) -> None:
        super().__init__()
        self.world = world
        first = 1000 * world.new_life()
        self._stocks = Stocks()
        self.directory = ActorDirectory(
            self._stocks, LEASE_S, 0.3, first_incarnation=first, silent_until=silent_until
        )
        self.links: dict[SimConnection, SimWorker] = {}
        self.programs: dict[SimConnection, SimProgram] = {}
        self._works: dict[tuple[SimConnection, int], int] = {}
        for worker in world.workers:
            delay_s = world.random.random() * 0.7 * LEASE_S * (silent_until > 0)
            world.clock.after(delay_s, partial(self._admit, worker))

    def _admit(self, worker: SimWorker) -> None:
        worker.post(lambda: worker.register(self))

    def heard_worker(self, worker: SimWorker, message: Any) -> None:
        now = self.world.clock.now
        if not self.alive:
            return
        if isinstance(message, Register):
            link = next(link for link, other in self.links.items() if other is worker)
            worker.member.peer, worker.member.heard_at = link, now
            self._stocks.add_worker(worker.member.name, ())
            self._perform(self.directory.registered(worker.member, message, now))
            self.count_workers()
        else:
            self._perform(self.directory.from_worker(worker.member, message, now))

    def worker_lost(self, worker: SimWorker) -> None:
        link = next((link for link, other in self.links.items() if other is worker), None)
        if not self.alive or link is None:
            return
        del self.links[link]
        if worker.member.peer is None:
            return  # it has died before it registered
        worker.member.peer = None
        loss = MemberLost(worker.member, "it has ended", 9, "", settled=True)
        self._perform(self.directory.lost(loss, self.world.clock.now))
        self._stocks.remove_worker(worker.member.name)
        self.count_workers()

    def count_workers(self) -> None:
        for link in self.programs:
            link.send_down(Workers(len(self.links)))

    def heard(self, link: SimConnection, program: SimProgram, message: Any) -> None:
        if not self.alive:
            return
        match message:
            case RegisterCoordinator():
                self.programs[link] = program
                self.directory.coordinator_registered(program.number, link)
                link.send_down(CoordinatorRegistered(1, len(self.links)))
            case Submit(_, items):
                for number, attempt, *_ in items:
                    self._works[link, number] = attempt
                    kind = ERROR if self.world.random.random() < 0.1 else VALUE
                    delay_s = self.world.random.expovariate(10.0)
                    self.world.clock.after(delay_s, partial(self._end_work, link, number, kind))
            case CancelWork(items):
                for number, _ in items:
                    self._end_work(link, number, CANCELLED)
            case EndRound(number):
                for other, work in list(self._works):
                    if other is link:
                        self._end_work(link, work, CANCELLED)
                link.send_down(RoundEnded(number))
            case _ if type(message).__name__ in ACTOR_MESSAGES:
                now = self.world.clock.now
                self._perform(self.directory.from_coordinator(link, program.number, message, now))

    def program_lost(self, link: SimConnection) -> None:
        if self.alive and self.programs.pop(link, None) is not None:
            now = self.world.clock.now
            self._perform(self.directory.coordinator_gone(link, now, left=False))

    def _end_work(self, link: SimConnection, number: int, kind: int) -> None:
        attempt = self._works.pop((link, number), None)
        if attempt is not None and self.alive:
            link.send_down(Results([(number, attempt, kind, b"")]))

    def _perform(self, effects: list[Send]) -> None:
        for effect in effects:
            peer: Any = effect.to
            peer.send_down(effect.message)
        due = self.directory.deadline
        if due is not None:
            self.world.clock.at(due, self._tick)

    def _tick(self) -> None:
        if self.alive:
            self._perform(self.directory.tick(self.world.clock.now))

    def die(self) -> None:
        self.kill()
        for link, worker in self.links.items():
            link.end()
            worker.member.peer = None
        for link, program in self.programs.items():
            link.end()
            program.notice_link(link)


ACTOR_MESSAGES = frozenset(
    {"CreateActor", "ActorsOwned", "DropActor", "FindActor", "ActorKnown", "WatchActor"}
)


class SimDealer:
    """The connection of a program to the process that listens at an address, made anew when it is
    lost, until the process refuses the program."""

    def __init__(self, program: SimProgram, actor: CalledActor) -> None:
        self.program, self.actor, self.address = program, actor, actor.address
        self.connection: SimConnection | None = None
        self.to_its_process: SimConnection | None = None
        self._ended, self._pause_s = False, AGAIN_S
        self._attempt()

    def _later(self, fn: Callable[[], object], delay_s: float) -> None:
        world = self.program.world
        world.clock.after(delay_s * world.random.random(), lambda: self.program.post(fn))

    def _attempt(self) -> None:
        world = self.program.world
        process = world.listeners.get(self.address)
        if self._ended:
            return
        if process is None or process.frozen:
            self._pause_s = min(2 * self._pause_s, 4.0)
            self._later(self._attempt, self._pause_s)
            return
        self._pause_s = AGAIN_S
        connection = SimConnection(
            world.clock,
            world.random,
            f"{self.program} to {process}",
            lambda c, message: process.post(lambda: process.heard(c, message)),
            lambda message: self.program.post(lambda: self._heard(connection, message)),
            wire=as_sent,
        )
        self.connection = connection
        is_other = process.incarnation != self.actor.incarnation
        self.to_its_process = None if is_other else connection
        process.connections[connection] = self
        self._later(lambda: self._up(connection), AGAIN_S)

    def _up(self, connection: SimConnection) -> None:
        if self.connection is connection and connection.open:
            self.program.handle(ActorConnected(self.actor))

    def _heard(self, connection: SimConnection, message: ActorResults) -> None:
        if self.connection is connection and message.incarnation == self.actor.incarnation:
            self.program.handle(CallsEnded(self.actor, message.items))

    def send(self, message: Any) -> None:
        if self.connection is not None:
            self.connection.send_up(message)

    def notice(self, connection: SimConnection) -> None:
        """A connection has ended: the program notices it soon."""
        self._later(lambda: self._down(connection), NOTICE_S)

    def refused(self, connection: SimConnection) -> None:
        connection.end()
        self._later(lambda: self._down(connection, "another actor listens here"), NOTICE_S)

    def _down(self, connection: SimConnection, problem: str = "") -> None:
        if self.connection is connection:
            self.connection, self._ended = None, bool(problem)
            self.program.handle(ActorDisconnected(self.actor, problem))
            self._later(self._attempt, AGAIN_S)

    def cut(self) -> None:
        if self.connection is not None:
            self.connection.end()
            self.notice(self.connection)
            self._leave(self.connection)

    def close(self) -> None:
        self._ended = True
        if self.connection is not None:
            self.connection.end()
            self._leave(self.connection)
            self.connection = None

    def _leave(self, connection: SimConnection) -> None:
        """The process notices the end of a connection later than the program."""
        world = self.program.world
        process = world.listeners.get(self.address)
        if process is not None:
            late_s = world.random.random() * LATE_S
            world.clock.after(late_s, lambda: process.post(lambda: process.gone(connection)))


class SimProgram(SimProcess):
    """A program with a coordinator: a model of scheduling/coordinator/runtime.py and actors.py."""

    def __init__(self, world: ActorCallsSim) -> None:
        super().__init__()
        self.world, self.number = world, world.new_life()
        self.machine = CoordinatorMachine(
            coordinator=self.number,
            queue_max=1000,
            cancel_grace_s=0.1,
            lost_limit_s=world.random.choice((1.5, 30.0)),
            now=world.clock.now,
            decode_loss=lambda payload: (int(payload), b""),
            recomputations_max=1,
        )
        self.records: dict[int, CalledActor] = {}
        self.handles: Counter[int] = Counter()
        self.killed: set[int] = set()
        self.cancelled: set[int] = set()
        self.unfinished: dict[int, Work] = {}
        self.probes: list[MethodCall] = []
        self._last: list[Work] = []
        self._dealers: dict[CalledActor, SimDealer] = {}
        self._link: SimConnection | None = None
        self._numbers = 0
        self._due: float | None = None
        self._connect()
        self._later(self._act, 0.0)

    def __repr__(self) -> str:
        return f"program {self.number}"

    def _later(self, fn: Callable[[], object], delay_s: float) -> None:
        world = self.world
        world.clock.after(delay_s * world.random.random(), lambda: self.post(fn))

    # -- the dispatcher ----------------------------------------------------------------------------

    def _connect(self) -> None:
        dispatcher = self.world.dispatcher
        if not dispatcher.alive:
            self._later(self._connect, 0.2)
            return
        link = self._link = SimConnection(
            self.world.clock,
            self.world.random,
            f"{self}",
            lambda link, message: dispatcher.heard(link, self, message),
            lambda message: self.post(lambda: self._heard(link, message)),
        )
        dispatcher.programs[link] = self
        self.handle(DispatcherUp())

    def _heard(self, link: SimConnection, message: Any) -> None:
        if self._link is link:
            self.handle(Heard(DISPATCHER, message))

    def notice_link(self, link: SimConnection) -> None:
        self._later(lambda: self._link_lost(link), NOTICE_S)

    def _link_lost(self, link: SimConnection) -> None:
        if self._link is link:
            self._link = None
            self.handle(DispatcherDown())
            self._connect()

    def cut_link(self) -> None:
        if self._link is not None:
            link, dispatcher = self._link, self.world.dispatcher
            link.end()
            self.notice_link(link)
            late_s = self.world.random.random() * 0.5 * LEASE_S
            self.world.clock.after(late_s, lambda: dispatcher.program_lost(link))

    def cut_actor(self) -> None:
        if self._dealers:
            self.world.random.choice(list(self._dealers.values())).cut()

    def connection_to(self, actor: CalledActor) -> SimConnection | None:
        """Return the connection to the process of an actor, unless another actor has its port."""
        return self._dealers[actor].to_its_process

    def die(self) -> None:
        self.kill()
        self.cut_link()
        for dealer in self._dealers.values():
            dealer.close()

    # -- the machine -------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        for effect in self.machine.handle(event, self.world.clock.now):
            self._perform(effect)
        due = self.machine.deadline
        if due is not None and due != self._due:
            self.world.clock.at(due, lambda: self.post(self._tick))
        self._due = due

    def _tick(self) -> None:
        due = self.machine.deadline
        if due is not None and due <= self.world.clock.now:
            self._due = None
            self.handle(Ticked())

    def _perform(self, effect: Any) -> None:
        match effect:
            case Send(_, message):
                self._send(message)
            case SubmitWork():
                for message in effect.messages(lambda work: work.payload):
                    self._send(message)
            case Resolve(items):
                for work, kind, payload in items:
                    self.world.promise(work.kind is None, f"P1: {work} ends twice")
                    work.kind, work.outcome = kind, payload
                    del self.unfinished[work.number]
                    if isinstance(work, MethodCall):
                        self.world.ended(self, work, kind, payload)
                        if self.world.random.random() < 0.2:
                            self.handle_later(StreamTaken(work, 1))
            case Fetch(work, attempt, _):
                assert isinstance(work, MethodCall)
                self.world.off_the_way(work)
                self._later(partial(self._fetched, work, attempt, work.actor.incarnation), 0.4)
            case ConnectActor(actor):
                assert actor not in self._dealers, f"{actor} has two connections"
                self._dealers[actor] = SimDealer(self, actor)
            case DisconnectActor(actor):
                self._dealers.pop(actor).close()
            case SendCalls(actor, calls):
                self.world.sent(self, actor, calls)
                sent = [(call.number, call.attempt, "m", call.payload) for call in calls]
                self._dealers[actor].send(CallActor(actor.number, actor.incarnation, sent))
            case SendToActor(actor, message):
                self._dealers[actor].send(message)
            case ActorSearched(answer):
                if answer.actor:
                    self._later(lambda: self._take(answer.actor), 0.05)

    def handle_later(self, event: Event) -> None:
        self._later(lambda: self.handle(event), 0.01)

    def _send(self, message: Any) -> None:
        if self._link is not None:
            self._link.send_up(message)

    def _fetched(self, call: MethodCall, attempt: int, incarnation: int) -> None:
        event: Event
        if incarnation in self.world.serving:
            event = BulkArrived(call.number, attempt, b"%d" % call.number)
        else:
            event = BulkUnreachable(call.number, attempt, "its process has ended")
        self.handle(event)

    # -- the program -------------------------------------------------------------------------------

    def _act(self) -> None:
        world, random = self.world, self.world.random
        if world.clock.now > OVER_S:
            return
        self._later(self._act, PAUSE_S)
        draw, numbers = random.random(), list(self.handles)
        if draw < 0.07 or not numbers:
            self._make()
        elif draw < 0.7:
            for _ in range(random.choice((1, 1, 2, 5))):
                self.call(random.choice(numbers))
        elif draw < 0.78:
            self._numbers += 1
            self._schedule(Work(self._numbers, 1, "f", b""))
        elif draw < 0.86:
            if self.unfinished:
                number = random.choice(list(self.unfinished))
                self.cancelled.add(number)
                self.handle(CancelRequested([number]))
        elif draw < 0.9:
            self.drop(random.choice(numbers))
        elif draw < 0.95:
            if world.named:
                self.handle(ActorSought(world.new_life(), random.choice(world.named)))
            if world.actors:
                self._take(random.choice(world.actors))
        elif draw < 0.975:
            self.handle(EndRoundRequested(self.machine.round))
        else:
            number = random.choice(numbers)
            self.killed.add(number)
            self.handle(ActorKilled(number, "it was killed by its program"))

    def _make(self) -> None:
        world, random = self.world, self.world.random
        number = world.new_life()
        name = f"name {number}" if random.random() < 0.4 else ""
        spec = ActorSpec(
            number,
            "A",
            b"bad" if random.random() < 0.1 else b"",
            0 if name and random.random() < 0.5 else self.number,
            name,
            restarts=random.choice((0, 0, 1, 5)),
        )
        world.actors.append(number)
        world.named += [name] if name else []
        self.records[number] = CalledActor(number, "A", spec)
        self.handles[number] += 1
        self.handle(ActorMade(self.records[number]))

    def _take(self, number: int) -> None:
        if self.world.clock.now > OVER_S:
            return
        record = self.records.get(number)
        if record is None:
            record = self.records[number] = CalledActor(number, "A")
        self.handles[number] += 1
        self.handle(ActorWatched(record))

    def drop(self, number: int) -> None:
        self.handles[number] -= 1
        if not self.handles[number]:
            del self.handles[number]
        self.handle(HandlesDropped([number]))

    def call(self, number: int, *, plain: bool = False) -> MethodCall:
        random = self.world.random
        self._numbers += 1
        payload = LARGE if random.random() < 0.05 and not plain else b""
        call = MethodCall(self._numbers, self.records[number], "m", "A.m", payload)
        draw = random.random()
        if draw < 0.35 and not plain:
            call.extra = Extra(
                until=self.world.clock.now + random.random() if draw < 0.1 else None,
                inputs=random.sample(self._last, min(len(self._last), random.choice((0, 1, 2)))),
            )
        call.items = SimpleQueue()
        self._schedule(call)
        return call

    def _schedule(self, work: Work) -> None:
        self._last = [*self._last[-7:], work]
        self.unfinished[work.number] = work
        self.handle(Scheduled([work]))

    def probe(self) -> None:
        """Call each actor, now that no more faults come."""
        self.probes = [self.call(number, plain=True) for number in self.handles]


class ActorCallsSim(SimWorld):
    """One run with seeded faults, and the account of what really happened."""

    def __init__(self, seed: int, faults: int = 14) -> None:
        super().__init__(seed)
        self.actors: list[int] = []
        self.named: list[str] = []
        self.listeners: dict[str, SimActorProcess] = {}
        self.serving: dict[int, SimActorProcess] = {}
        self.outcomes: Counter[int] = Counter()
        self.executed: dict[tuple[int, int], int] = {}
        """The incarnation that has begun each call, by program and number."""
        self._sent: set[MethodCall] = set()
        self._unexecuted: dict[tuple[int, int], str] = {}
        """The calls that have ended, and were not executed as the program knows."""
        self._last_begun: dict[tuple[int, int], int] = {}
        self._on_the_way: dict[MethodCall, SimConnection | None] = {}
        self._bytes: Counter[CalledActor] = Counter()
        """Of the arguments of the calls that are on the way."""
        self._incarnations: Counter[int] = Counter()
        self.workers: list[SimWorker] = []
        self.workers += [SimWorker(self, index) for index in range(2)]
        self.dispatcher = SimDispatcher(self, 0.0)
        self.programs = [SimProgram(self) for _ in range(self.random.randint(1, 3))]
        for _ in range(faults):
            self.clock.after(self.random.uniform(0.2, FAULTS_S), self._fault)

    # -- the account -------------------------------------------------------------------------------

    def sent(self, program: SimProgram, actor: CalledActor, calls: list[MethodCall]) -> None:
        for call in calls:
            self.promise(call not in self._sent, f"K2: {call} is sent twice")
            self._sent.add(call)
            is_full = self._bytes[actor] > ACTOR_WINDOW_BYTES
            self.promise(not is_full, f"K5: {program} has sent too many bytes to {actor}")
            if call.kind is None:
                self._on_the_way[call] = program.connection_to(actor)
                self._bytes[actor] += len(call.payload)

    def off_the_way(self, call: MethodCall) -> None:
        if call in self._on_the_way:
            del self._on_the_way[call]
            self._bytes[call.actor] -= len(call.payload)

    def begun(self, process: SimActorProcess, call: ActorCall) -> tuple[SimProgram, float, int]:
        """A process executes a call. Return its program, and how the call runs and ends."""
        assert isinstance(call.caller, SimConnection)
        connection, actor = call.caller, process.spec.actor
        program = self.program_of(connection, process)
        key = program.number, call.work
        self.note(f"{process} executes {key}")
        self.promise(key not in self.executed, f"K2: call {key} is executed twice")
        self.executed[key] = process.incarnation
        self.promise(
            key not in self._unexecuted, f"K4: {key}, {self._unexecuted.get(key)}, is executed"
        )
        order = program.number, process.incarnation
        self.promise(self._last_begun.get(order, 0) < call.work, f"K1: {key} is executed too late")
        self._last_begun[order] = call.work
        self.promise(
            self._incarnations[actor] <= process.incarnation, f"A1: {process} executes too late"
        )
        self._incarnations[actor] = process.incarnation
        kind = self.random.choice((VALUE, VALUE, VALUE, ERROR, BULK, ITEM))
        return program, self.random.choice((0.0, 0.001, 0.01, 0.15)), kind

    def program_of(self, connection: SimConnection, process: SimActorProcess) -> SimProgram:
        dealer = process.connections.get(connection)
        assert dealer is not None, "a call of a connection that has ended begins"
        return dealer.program

    def ended(self, program: SimProgram, call: MethodCall, kind: int, payload: Any) -> None:
        key = program.number, call.number
        self.note(f"{key} ends with {kind} {payload}")
        self.outcomes[kind] += 1
        is_sent = call in self._sent
        connection = self._on_the_way.get(call)
        self.off_the_way(call)
        if kind == VALUE:
            self.promise(payload == b"%d" % call.number, f"K2: {key} has another call's value")
        if kind == VALUE or (kind == ERROR and payload == b"raised"):
            self.promise(key in self.executed, f"K2: {key} has a value, and was not executed")
            return
        if kind == ACTOR_LOST:
            is_open = connection is not None and connection.open
            self.promise(not is_open, f"K3: {key} is lost, but its actor is connected")
            self.promise(payload[1] == is_sent, f"K3: maybe_executed of {key} is {payload[1]}")
        elif kind in (ERROR, INPUT_FAILED, UNAVAILABLE):
            self.promise(not is_sent, f"K4: {key} was sent and ends with {kind}")
        elif kind == TIMED_OUT:
            until = call.with_extra().until
            self.promise(until is not None and until <= self.clock.now, f"P26: {key} is not due")
        else:
            is_cancelled = kind == CANCELLED and call.number in program.cancelled
            self.promise(is_cancelled, f"P10: {key} ends with {kind}, and was not cancelled")
        if not is_sent:
            self._unexecuted[key] = f"which has ended with {kind}"

    # -- faults ------------------------------------------------------------------------------------

    def listen(self, process: SimActorProcess) -> str:
        """Give a process a free port, which another process may have had."""
        address = next(f"port {n}" for n in range(1000) if f"port {n}" not in self.listeners)
        self.listeners[address] = self.serving[process.incarnation] = process
        return address

    def unlisten(self, process: SimActorProcess) -> None:
        self.listeners.pop(process.address, None)
        self.serving.pop(process.incarnation, None)

    def _fault(self) -> None:
        kind, random = self.random.choice(FAULTS), self.random
        program = random.choice(self.programs)
        self.note(kind)
        serving = list(self.serving.values())
        if kind == "kill dispatcher":
            if self.dispatcher.alive:
                self.dispatcher.die()
                self.clock.after(random.random() * DOWN_S, self._start_dispatcher)
        elif kind == "kill worker":
            self._kill_worker(random.randrange(2))
        elif kind == "cut dispatcher":
            program.cut_link()
        elif kind == "cut actor":
            program.cut_actor()
        elif kind == "kill program":
            if program.alive and random.random() < 0.5:
                program.die()
        elif kind == "freeze program":
            self._freeze(program)
        elif serving:
            process = random.choice(serving)
            if kind == "freeze actor":
                self._freeze(process)
            else:
                process.worker.end(process, "killed by SIGKILL")

    def _freeze(self, process: SimProcess) -> None:
        process.freeze()
        self.clock.after(self.random.random() * LEASE_S, process.thaw)

    def _kill_worker(self, index: int) -> None:
        worker = self.workers[index]
        if worker.alive:
            worker.die()
            dispatcher = self.dispatcher
            late_s = self.random.random() * NOTICE_S
            self.clock.after(late_s, lambda: dispatcher.worker_lost(worker))
            self.clock.after(self.random.random() * DOWN_S, lambda: self._start_worker(index))

    def _start_worker(self, index: int) -> None:
        self.workers[index] = SimWorker(self, index)
        self.workers[index].register(self.dispatcher)

    def _start_dispatcher(self) -> None:
        self.dispatcher = SimDispatcher(self, self.clock.now + LEASE_S)

    # -- the end -----------------------------------------------------------------------------------

    def run(self) -> None:
        self.clock.run(OVER_S + 1.0)
        programs = [program for program in self.programs if program.alive]
        for program in programs:
            program.probe()
        self.clock.run(DROPPED_S)
        for program in programs:
            left = [f"{work}{self._of(work)}" for work in program.unfinished.values()]
            self.promise(not left, f"never ends: {left}")
            for call in program.probes:
                self.promise(
                    call.kind in (VALUE, ERROR) or call.actor.state is ActorState.ENDED,
                    f"{call} of {call.actor} ends with {call.kind} {call.outcome}",
                )
            for process in self.serving.values():
                held = process.held.values()
                self.promise(not any(held), f"K7: results are left in {process}")
            for number in program.killed & {*program.handles}:
                state = program.records[number].state
                self.promise(state is ActorState.ENDED, f"K6: {number} was killed, and is {state}")
            for number, count in list(program.handles.items()):
                for _ in range(count):
                    program.drop(number)
        self.clock.run(END_S)
        for program in programs:
            machine = program.machine
            self.promise(not machine.works, "left in the coordinator: works")
            self.promise(not machine.actors.actors, f"K6: left: {machine.actors.actors}")
            self.promise(machine.deadline is None, "left in the coordinator: a deadline")
            for actor in program.records.values():
                counts = actor.calling, actor.calling_bytes, actor.receiving, actor.holders
                self.promise(not any(counts) and not actor.queue, f"left in {actor}: {counts}")
        actors = self.dispatcher.directory.actors.values()
        owned = [actor for actor in actors if actor.spec.owner]
        self.promise(not owned, f"K6: actors are left: {owned}")
        for process in self.serving.values():
            self.promise(not process.spec.owner, f"K6: {process} is left")
            self.promise(
                process.queue.running == 0 and len(process.queue) == 0,
                f"C2: calls are left in {process}",
            )

    @staticmethod
    def _of(work: Work) -> str:
        return f" of {work.actor}" if isinstance(work, MethodCall) else ""


def simulate_actor_calls(seed: int, faults: int = 14) -> ActorCallsSim:
    """Run one seed. Raise AssertionError, with the seed, if a promise is broken."""
    world = ActorCallsSim(seed, faults)
    world.run()
    return world

"""The simulated parts of a data service: the real machines of a dispatcher, of workers and of their
tasks. See data_service.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Protocol, TypeAlias

import msgspec

from tests.sim.simulations.clock import SimClock
from tests.sim.simulations.data_links import SimLink, SimRequest, Then
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.machine import DataDispatcherMachine
from zmqdist.data.service.dispatcher.machine.state import DurableState
from zmqdist.data.service.dispatcher.machine.tables import Rules
from zmqdist.data.service.reader.delivery import Demand
from zmqdist.data.service.worker.first_come_machine import FirstComeBuffer
from zmqdist.data.service.worker.task_replies import TaskReply
from zmqdist.data.service.worker.tasks_machine import (
    BeginTask,
    DropTask,
    RequestWork,
    RequestWorkLater,
    WorkerTask,
    WorkerTasks,
    WorkerTasksEffect,
)
from zmqdist.errors import NOT_FOUND, RESOURCE_EXHAUSTED, UNAVAILABLE
from zmqdist.events import Heard, PeerGone, ProcessExited, Send, Ticked
from zmqdist.events import Ticked as TimePassed
from zmqdist.messages import Message, Register
from zmqdist.scheduling.dispatcher.machine import Dispatch
from zmqdist.scheduling.dispatcher.membership_and_leases import MemberJoined, MemberLost, Membership
from zmqdist.scheduling.worker.machine import DISPATCHER, WorkerMachine
from zmqdist.scheduling.worker.worker_events import (
    DispatcherConnected,
    DispatcherDisconnected,
    Exit,
)
from zmqdist.scheduling.worker.worker_events import Event as WorkerEvent

GRACE_S = 0.3
LEASE_S = 3.0
RECONNECT_S_MAX = 1.0
WORKER_TIMEOUT_S = 3.0
DELAY_S = 0.002
BUFFER_MAX = 5
FULL_S = 0.01
"""Seconds between two polls of a task that waits for room in its full buffer."""

TOGETHER = 3
"""The most elements in a reply."""

SendTaskReply: TypeAlias = Callable[[TaskReply], None]


class PartSurroundings(Protocol):
    """The simulated data service (data_service.py), as its parts see it: the dispatcher, workers
    and tasks of this module.

    Attributes:
      count: number of elements of the dataset.
      disk_full_until: before this time, writing the journal fails.
    """

    clock: SimClock
    random: Random
    count: int
    disk_full_until: float
    dispatcher: SimDispatcher

    def soon(self, fn: Callable[[], object]) -> None:
        """Call `fn` after a short random time."""

    def in_order(self, link: SimLink, way: str, fn: Callable[[], object]) -> None:
        """Call `fn` after a short random time, but not before the functions that were passed
        earlier for this direction of the link."""

    def end_link(self, link: SimLink) -> None:
        """End a connection. Each side notices the end at a random time."""

    def note(self, what: str) -> None:
        """Add a line to the trace, which is printed when a promise is broken."""

    def lost(self, incarnation: int) -> None:
        """Record that the dispatcher counts an incarnation of a worker as lost."""

    def joined(self, incarnation: int) -> None:
        """Record that the dispatcher has registered an incarnation of a worker, for the first time
        or again."""

    def gave(self, request: ev.SplitsRequest, given: dict[int, tuple[int, int, int, int]]) -> None:
        """Record the positions that the dispatcher has just handed to a task. The reply with them
        may be lost."""

    def task(self, worker: SimDataWorker, task: WorkerTask, state: int) -> SimTask:
        """Return the simulated task that a worker begins."""


class SimDispatcher:
    """The dispatcher: the real machines of the data service and of the membership, its connections,
    and a journal that survives its process.
    """

    def __init__(self, sim: PartSurroundings, fault_tolerant: bool) -> None:
        self._sim = sim
        self.rules = Rules(
            worker_timeout_s=WORKER_TIMEOUT_S,
            client_timeout_s=2.0,
            gc_check_s=0.5,
            gc_timeout_s=1.0,
            fault_tolerant=fault_tolerant,
        )
        self.incarnation = 0
        self.alive = False
        self.links: list[SimLink] = []
        self._snapshot: bytes | None = None
        self._records: list[bytes] = []
        self.start()

    def start(self) -> None:
        """Start another incarnation, which restores its state from the journal if there is one."""
        self.incarnation += 1
        self.alive = True
        self.membership = Membership(
            LEASE_S, GRACE_S, 1.0, Dispatch(attempts_max=3, lease_s=LEASE_S)
        )
        self.machine = DataDispatcherMachine(
            self.rules, self._sim.random.getrandbits(40), self._sim.clock.now
        )
        if self.rules.fault_tolerant:
            if self._snapshot is None:
                self._snapshot = r.encode(self.machine.state)
            self._restore()
        self._tick(self.incarnation)

    def kill(self) -> None:
        """Kill the process. Records that the process is writing at this moment may reach the disk
        or not."""
        self.alive = False
        for link in self.links:
            self._sim.end_link(link)
        self.links = []

    def connect(self) -> SimLink | None:
        if not self.alive:
            return None
        link = SimLink(self.incarnation)
        self.links.append(link)
        return link

    def ask(
        self, link: SimLink | None, make: Callable[[SimRequest], ev.Request], then: Then
    ) -> None:
        """Send a request. `then` is called later with its reply, or with UNAVAILABLE."""
        sim = self._sim
        if link is None or not link.open:
            sim.soon(lambda: then(None, UNAVAILABLE))
            return
        pending = SimRequest(link, then)
        link.pending.append(pending)

        def arrive() -> None:
            if link.open and self.alive and link.incarnation == self.incarnation:
                request_of = make(pending)
                self.handle(request_of)
                if (
                    isinstance(request_of, ev.SplitsRequest)
                    and request_of.task in self.machine.state.tasks
                ):
                    sim.gave(request_of, self.machine.state.tasks[request_of.task].last_replies)

        sim.in_order(link, "up", arrive)

    def tell(self, link: SimLink, message: Message) -> None:
        """Send a message of a worker to the dispatcher's membership machine."""

        def arrive() -> None:
            if link.open and self.alive and link.incarnation == self.incarnation:
                self._members(Heard(link, message))

        self._sim.in_order(link, "up", arrive)

    def gone(self, link: SimLink) -> None:
        """Have the dispatcher notice the end of a connection."""
        if self.alive and link.incarnation == self.incarnation:
            self._members(PeerGone(link))

    def exited(self, incarnation: int) -> None:
        """Have the dispatcher notice the end of a worker's process, as a dispatcher does for
        workers on its own host."""
        if not self.alive:
            return
        for member in list(self.membership.members.values()):
            if member.incarnation == incarnation:
                self._members(
                    ProcessExited(
                        pid=member.pid, exit_code=None, job=member.job, index=member.index
                    )
                )

    def _members(self, event: Heard | PeerGone | ProcessExited | TimePassed) -> None:
        """Have the machine of the membership handle an event, and carry out the effects as the
        runtime does."""
        for send in self.membership.handle(event, self._sim.clock.now):
            self._say(send.to, send.message)
        changes, self.membership.changes = self.membership.changes, []
        for change in changes:
            match change:
                case MemberJoined(member, register):
                    self._sim.joined(member.incarnation)
                    joined = ev.WorkerJoined(
                        member.name, register.address, member.incarnation, (), register.named
                    )
                    self.handle(joined)
                case MemberLost(member):
                    self._sim.note(f"{member.name} is lost")
                    self._sim.lost(member.incarnation)
                    self.handle(ev.WorkerGone(member.incarnation))

    def _say(self, link: Any, message: Message) -> None:
        self._sim.in_order(link, "down", lambda: link.receive(message) if link.open else None)

    def handle(self, event: ev.Event) -> None:
        if self.alive:
            self._perform(self.machine.handle(event, self._sim.clock.now))

    def _perform(self, effects: list[ev.Effect]) -> None:
        sim = self._sim
        for effect in effects:
            match effect:
                case ev.ReplyToRequest(token, value):
                    self._send(token, value, 0)
                case ev.FailRequest(token, code, _):
                    self._send(token, None, code)
                case ev.CommitJournal(records):
                    sim.clock.after(
                        sim.random.expovariate(500), partial(self._write, records, self.incarnation)
                    )
                case ev.Reload():
                    self._restore()

    def _send(self, pending: Any, value: Any, code: int) -> None:
        if isinstance(value, (list, tuple)):
            value = msgspec.msgpack.decode(msgspec.msgpack.encode(value), strict=False)
        link = pending.link

        def arrive() -> None:
            if link.open:
                if pending in link.pending:
                    link.pending.remove(pending)
                pending.end(value, code)

        self._sim.in_order(link, "down", arrive)

    def _write(self, records: tuple[bytes, ...], incarnation: int) -> None:
        sim = self._sim
        if incarnation != self.incarnation or not self.alive:
            if sim.random.random() < 0.5 and incarnation == self.incarnation:
                # The dispatcher was killed during the write. In half of these cases the records had
                # reached the disk before.
                self._records += records
            return
        if sim.clock.now < sim.disk_full_until:
            sim.note("the journal fails")
            self.handle(ev.JournalFailed(RESOURCE_EXHAUSTED, "disk full"))
            return
        self._records += records
        if len(self._records) > 200:
            # Like the snapshot that the runtime writes, this snapshot holds the durable state only.
            self._snapshot, self._records = r.encode(self._durable()), []
        self.handle(ev.JournalCommitted())

    def _durable(self) -> DurableState:
        assert self._snapshot is not None
        state = msgspec.msgpack.decode(self._snapshot, type=DurableState)
        for record in self._records:
            state.apply(r.decode(record))
        return state

    def _restore(self) -> None:
        assert self._snapshot is not None
        snapshot = msgspec.msgpack.decode(self._snapshot, type=DurableState)
        self.machine.restore(snapshot, map(r.decode, self._records), self._sim.clock.now)

    def _tick(self, incarnation: int) -> None:
        """Poll for deadlines that have passed. The real runtime has a timer for them."""
        if self.alive and incarnation == self.incarnation:
            if self.machine.deadline <= self._sim.clock.now:
                self.handle(Ticked())
            due = self.membership.deadline
            if due is not None and due <= self._sim.clock.now:
                self._members(TimePassed())
            self._sim.clock.after(0.05, lambda: self._tick(incarnation))


class SimTask:
    """One task of a worker: the real machine of its buffer, and a model of the thread that makes
    elements."""

    def __init__(self, worker: SimDataWorker, task: WorkerTask, state: int) -> None:
        self.worker = worker
        self.number = task.id
        self.mode = task.terms.mode
        self.dataset = task.dataset
        self.state = state
        self.dropped = False
        self._buffer = FirstComeBuffer(BUFFER_MAX, lambda elements, bytes_max: TOGETHER)
        self._full_since: float | None = None
        self._next = 0
        self._run = (0, 0)
        self._started = False

    def ask(self, wanted: Demand, then: SendTaskReply) -> None:
        self._buffer.add_request(wanted, then)
        if not self._started:
            self._started = True
            self._produce()
        self._serve()

    def drop(self) -> None:
        """Drop the task. The worker does so when the dispatcher requests it."""
        self.dropped = True
        self._buffer.close()
        self._serve()

    def _produce(self) -> None:
        sim = self.worker.sim
        if self.dropped or not self.worker.alive or self._buffer.finished:
            return
        if not self._buffer.may_add():
            self._full_since = sim.clock.now
            return
        if self.mode == r.OFF:
            if self._next < sim.count:
                self._made(self._next)
                self._next += 1
            else:
                self._end()
            return
        start, stop = self._run
        if start < stop:
            self._run = (start + 1, stop)
            self._made(start)
        else:
            self._more(sim.random.getrandbits(40))

    def _made(self, element: int) -> None:
        self._buffer.elements.append(element)
        self._serve()
        self.worker.sim.clock.after(self.worker.sim.random.expovariate(300), self._produce)

    def _more(self, request: int) -> None:
        worker, count = self.worker, self.worker.sim.random.choice((1, 3, 8))

        def request_of(pending: SimRequest) -> ev.Request:
            return ev.SplitsRequest(
                pending, self.state, self.number, worker.incarnation, 0, request, 0, count
            )

        def then(value: Any, code: int) -> None:
            if self.dropped or not worker.alive:
                return
            if code == NOT_FOUND:
                self._end()
            elif code:
                worker.sim.clock.after(0.02, lambda: self._more(request))
            elif not value[1]:
                self._end()
            else:
                self._run = (value[0], value[0] + value[1])
                self._produce()

        worker.dispatcher.ask(worker.calls(), request_of, then)

    def _end(self) -> None:
        self._buffer.end()
        self._serve()

    def _serve(self) -> None:
        while (answer := self._buffer.next_reply()) is not None:
            answer.reply(answer)
        if self._full_since is not None and self._buffer.may_add():
            clock = self.worker.sim.clock
            clock.at(clock.next_poll(self._full_since, FULL_S), self._produce)
            self._full_since = None
        if self._buffer.has_finished():
            self.worker.finished(self.number)


class SimDataWorker:
    """A worker process with tasks. The real worker machine registers it; its tasks share a second
    connection."""

    def __init__(self, sim: PartSurroundings, name: str, address: str, index: int) -> None:
        self.sim = sim
        self.name = name
        self.address = address
        self.index = index
        self.incarnation = sim.random.getrandbits(40)
        self.dispatcher = sim.dispatcher
        self.alive = True
        self.tasks: dict[int, SimTask] = {}
        self._work = WorkerTasks()
        self.died: list[Callable[[], None]] = []
        """Functions to call when the worker is killed. Readers that wait for a reply have
        registered them."""
        self.link: SimLink | None = None
        self._calls: SimLink | None = None
        self._away_until = 0.0
        self._tick_at = 0.0
        self._machine = WorkerMachine(
            incarnation=self.incarnation,
            job="worker",
            index=index,
            slots=1,
            pid=self.incarnation % 2**22 + 1,
            host="sim",
            orphan_limit_s=1e6,
            can_kill=True,
            now=sim.clock.now,
            address=address,
        )
        self.connect()

    def connect(self) -> None:
        """Connect to the dispatcher. While it is down, or while this worker is cut off, try again
        later."""
        if not self.alive or (self.link is not None and self.link.open):
            return
        clock = self.sim.clock
        self.link = self.dispatcher.connect() if clock.now >= self._away_until else None
        if self.link is None:
            clock.after(self.sim.random.uniform(0.02, RECONNECT_S_MAX), self.connect)
            return
        link, incarnation = self.link, self.dispatcher.incarnation
        link.receive = lambda message: self._handle(Heard(DISPATCHER, message))
        link.closed = self._down
        self.sim.soon(lambda: self._handle(DispatcherConnected(incarnation)) if link.open else None)

    def calls(self) -> SimLink | None:
        """Return the connection of the worker's tasks; None while the dispatcher is down or the
        worker is cut off."""
        if self._calls is None or not self._calls.open:
            self._calls = (
                self.dispatcher.connect() if self.sim.clock.now >= self._away_until else None
            )
        return self._calls

    def _down(self) -> None:
        self._handle(DispatcherDisconnected())
        self.sim.clock.after(self.sim.random.uniform(0.02, RECONNECT_S_MAX), self.connect)

    def _handle(self, event: WorkerEvent) -> None:
        machine, clock = self._machine, self.sim.clock
        if not self.alive:
            return
        before = machine.contact.registered
        for effect in machine.handle(event, clock.now):
            match effect:
                case Send(_, Register() as message) if self.link is not None:
                    self.dispatcher.tell(self.link, message)
                case Exit():
                    raise AssertionError(
                        f"D6: {self.name} is alive, and its machine ends it: {effect}"
                    )
        if machine.contact.registered and not before:
            self.ask_work()
        due = machine.deadline
        if due is not None and not clock.now < self._tick_at <= due:
            self._tick_at = due
            clock.at(due, lambda: self._handle(TimePassed()))

    def cut(self) -> None:
        """End the worker's connection, and perhaps also the connection of its tasks. The worker
        reconnects soon, or only after the dispatcher has counted the worker as lost.
        """
        both = self.sim.random.random() < 0.5
        if both:
            self._away_until = self.sim.clock.now + self.sim.random.choice((0.05, GRACE_S * 2))
        for link in (self.link, self._calls if both else None):
            if link is not None:
                self.sim.end_link(link)

    def kill(self) -> None:
        self.alive = False
        for link in (self.link, self._calls):
            if link is not None:
                self.sim.end_link(link)
        for task in self.tasks.values():
            task.dropped = True
        for tell in self.died:
            tell()
        # In half of the kills the worker is on the dispatcher's host, where the dispatcher notices
        # the end of the process.
        if self.sim.random.random() < 0.5:
            self.sim.clock.after(0.01, lambda: self.dispatcher.exited(self.incarnation))

    def ask_work(self) -> None:
        self._perform(self._work.ask())

    def finished(self, number: int) -> None:
        """Record that the readers have taken the last element of this task."""
        self._perform(self._work.finished(number))

    def _perform(self, effects: list[WorkerTasksEffect]) -> None:
        for effect in effects:
            match effect:
                case RequestWork(request, has, done):
                    self._ask(request, has, done)
                case RequestWorkLater():
                    self.sim.clock.after(
                        0.05, lambda: self.ask_work() if self._machine.contact.registered else None
                    )
                case BeginTask(task):
                    assert task.id not in self.tasks, f"T3: {self.name} begins task {task.id} twice"
                    self.tasks[task.id] = self.sim.task(self, task, self._work.state)
                case DropTask(number):
                    self.tasks.pop(number).drop()

    def _ask(self, request: int, has: tuple[int, ...], done: tuple[int, ...]) -> None:
        places, state = dict.fromkeys(has, self.address), self._work.state

        def answered(value: Any, code: int) -> None:
            if self.alive:
                self._perform(
                    self._work.request_failed(request)
                    if code
                    else self._work.work_received(request, value)
                )

        self.dispatcher.ask(
            self.link,
            lambda pending: ev.WorkRequest(pending, state, self.incarnation, places, done),
            answered,
        )

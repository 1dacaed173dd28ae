"""The runtime of machine.py: a connection to the dispatcher, slots that run functions, and a store
of results. Slots that are processes are in slots.py.

`WorkerServer` (servers/) is its class for users, and gives it the part that it hosts beside the
slots.

The runtime passes messages, and events of the slots, to the machine, and carries out the effects
that the machine returns. The runtime decides nothing itself.

The loop's thread refers to the runtime and not to the WorkerServer. So a WorkerServer that the
program has dropped is garbage-collected, and its finalizer stops the runtime.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from zmqdist import clock as time
from zmqdist import errors, limits, task_context
from zmqdist.addresses import is_wildcard, join_address
from zmqdist.blas_threads import threads_in
from zmqdist.errors import FailedPreconditionError
from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import (
    BULK,
    ERROR,
    KEPT,
    AskWorker,
    KeepActor,
    Message,
    Observe,
    Read,
    Replies,
    Reply,
)
from zmqdist.process.bound_children import BoundChildren
from zmqdist.process.zygote_client import ZygoteProcess, start_slots_zygote
from zmqdist.rpc.internal_client import LoopClient
from zmqdist.rpc.service import RpcService
from zmqdist.scheduling.shared import own_cluster, remote_results, resources
from zmqdist.scheduling.shared.config import WorkerConfig, reached_at
from zmqdist.scheduling.shared.parts import WorkerPart, WorkerSurroundings
from zmqdist.scheduling.shared.references import PartsFetcher, decode_reference, encode_reference
from zmqdist.scheduling.shared.store import BulkStore, Fetcher, Holdings
from zmqdist.scheduling.worker.actor_host import ActorProcesses
from zmqdist.scheduling.worker.devices import take_resources
from zmqdist.scheduling.worker.function_call import Functions, last_failure, run
from zmqdist.scheduling.worker.inside import Inside
from zmqdist.scheduling.worker.machine import DISPATCHER, WorkerMachine
from zmqdist.scheduling.worker.records import SlotRow
from zmqdist.scheduling.worker.run_figures import BEGAN, TABLE_BYTES, RunReader, RunTable
from zmqdist.scheduling.worker.slots import (
    Feed,
    HoldResult,
    LeaseAt,
    ProcessSlots,
    check_descriptors,
    within_descriptors,
)
from zmqdist.scheduling.worker.worker_cache import FETCH_FOR_SLOT, WorkerCache
from zmqdist.scheduling.worker.worker_events import (
    DispatcherConnected,
    DispatcherDisconnected,
    Effect,
    EndActor,
    EndSlot,
    Event,
    Exit,
    ForgetFunctions,
    FreeBulk,
    Give,
    Interrupt,
    Kill,
    KillActor,
    LeaveRequested,
    Reclaim,
    SlotDied,
    SlotFinished,
    SlotReady,
    SlotReclaimed,
    SlotResumed,
    SlotWaits,
    Spawn,
    SpawnActor,
    WaitAnswered,
)
from zmqdist.scheduling.worker.worker_reports import ActorAtWork, SlotAtWork, WorkerReports
from zmqdist.transport.dealer import DealerConnection
from zmqdist.transport.endpoint import DTS_PORT, split
from zmqdist.transport.loop import Loop
from zmqdist.transport.own_address import bindable, own_host
from zmqdist.transport.router import Router
from zmqdist.wire import results
from zmqdist.wire.hello import Hello, our_hello

P = TypeVar("P", bound=WorkerPart)

log = logging.getLogger("zmqdist.scheduling")
end_log = logging.getLogger("zmqdist.scheduling.end")
"""The log of the reasons why workers end. The command `zmqdist worker` prints the reason itself,
and turns this log off."""

READERS = frozenset({"submit", "worker"})
SLOTS = frozenset({"worker"})
FIRST_CONTACT_LOG_S = limits.WAIT_LOG_S


class WorkerRuntime(Generic[P]):
    """The part of a WorkerServer that the loop's thread refers to.

    Attributes:
      loop, machine, part: the loop, the machine, and what the worker hosts beside its slots.
        `open` makes them.
      start_requested, opened: whether `open` was called, and whether it has succeeded.
      stopped: set once the worker has ended.
      exit: how the worker ended; None while it has not ended.
      address, advertised: the address of the worker's server, and the address that readers of the
        data service get.
    """

    def __init__(
        self,
        config: WorkerConfig,
        zygote: ZygoteProcess | None,
        modules: Sequence[str],
        make_part: Callable[[WorkerSurroundings], P],
    ) -> None:
        self._config = config
        self._modules, self._make_part = modules, make_part
        self._zygote = zygote
        self._pid = os.getpid()
        self._dispatcher = config.dispatcher_address.removeprefix("zmq://")
        split(self._dispatcher)
        self.start_requested = self.opened = False
        self.stopped = threading.Event()
        self._registered = threading.Event()
        self.exit: Exit | None = None
        self._children: BoundChildren | None = None
        self.address = self.advertised = ""
        self._bulk_leases: dict[int, list[int]] = {}
        self._due: float | None = None
        self._in_contact = False
        self._draining = False

    @property
    def needs_stop(self) -> bool:
        """Whether the finalizer of a WorkerServer must stop this runtime, because the runtime runs
        in this process.

        A forked child has a copy of the runtime, but not the loop's thread.
        """
        return self.opened and not self.stopped.is_set() and self._pid == os.getpid()

    def wait_registered(self) -> None:
        """Wait until the dispatcher has registered this worker. If the worker ends with an error
        first, raise this error."""
        while not self._registered.wait(FIRST_CONTACT_LOG_S):
            log.warning(
                "worker waits for the dispatcher at %s: %s",
                self._dispatcher,
                self._dealer.trouble or "no reply",
            )
        if self.exit is not None and self.exit.code:
            raise errors.from_code(
                self.exit.code, f"worker of {self._dispatcher}: {self.exit.error}"
            )

    def stop(self, grace_s: float) -> None:
        """Leave the dispatcher and wait for the end of the worker. Do not call it in the loop's
        thread."""
        try:
            self.loop.call_soon(self._handle, LeaveRequested(grace_s))
        except errors.FailedPreconditionError:
            pass
        limit_s = grace_s + self._config.quiet_s + 10.0
        if not self.stopped.wait(limit_s):
            log.error(
                "the worker did not stop in good order within %g s: its loop is ended now", limit_s
            )
        self.loop.stop()

    def open(self) -> None:
        """Bind the worker's ports, start the loop, and begin to connect to the dispatcher."""
        config = self._config
        credentials = config.credentials
        host = bindable(config.host) if config.host else own_host(self._dispatcher)
        incarnation = secrets.randbits(62) | 1
        name = f"{config.job}:{'?' if config.index is None else config.index}"
        loop = self.loop = Loop(f"zmqdist-{name}")
        try:
            environment = credentials.environment()
            if config.processes:
                environment |= config.thread_variables(environment)
                self._children = self._bound_children(loop, environment)
            security = credentials.server(host, "worker")
            router = Router(loop, security, our_hello("server", incarnation, name))
            service = self._service = RpcService("worker")
            self._store = BulkStore(service, READERS, incarnation)
            self._fetcher = Fetcher(credentials, "worker", self._dispatcher)
            self._cache = WorkerCache(self._store, self._fetcher)
            service.register(FETCH_FOR_SLOT, self._cache.fetch_for_slot, roles=SLOTS)
            self._dealer = DealerConnection(
                loop,
                self._dispatcher,
                credentials.client(self._dispatcher, "worker"),
                our_hello("worker", incarnation, name),
                on_up=self._up,
                on_message=self._handle_message,
                on_down=self._down,
                on_refused=self._refused,
                heartbeat_s=limits.HEARTBEAT_SERVER_S,
            )
            self._calls = LoopClient(self._dealer)
            self._inside = Inside(loop, self._dealer.send, self._children)
            self._reports = WorkerReports(loop, self._dealer.send, self._store)
            self._actors_at_work: Callable[[], list[ActorAtWork]] = list
            surroundings = WorkerSurroundings(
                loop,
                service,
                self._calls,
                self._dispatcher,
                credentials,
                incarnation,
                host,
                self._children,
            )
            self.part: P = self._make_part(surroundings)
            service.attach(router, loop, incarnation)
            loop.on_stop(service.close)
            self.part.bound(*self._bind(router, security.public, host), security)
            self._slots: ProcessSlots | ThreadSlots
            taken = take_resources(config)
            for claim in taken.sockets:
                loop.on_stop(claim.close)
            self._actions: dict[type[Effect], Callable[[Any], None]] = {}
            actors_max, nested_slots_max = 0, config.nested_slots_max
            about_slots = config.slots, self._handle, self._hold
            if self._children is not None:
                self._slots = ProcessSlots(
                    loop,
                    *about_slots,
                    self.address,
                    security.public,
                    self._children,
                    self._worker,
                    self._dispatcher,
                    lambda slot, position: self.machine.lease_at(slot, position),
                    taken.gpus,
                    None if config.memory_max_gb is None else config.memory_max_gb * 1e9,
                    self._reports,
                )
                actors_max, nested_slots_max = within_descriptors(
                    config.slots, config.actors_max, nested_slots_max
                )
                self._start_actors(loop, self._children, host, self._slots.variables)
            else:
                own = partial(own_cluster.of_slot, self._dispatcher, credentials)
                self._slots = ThreadSlots(
                    loop,
                    *about_slots,
                    self._cache,
                    self._worker,
                    own,
                    lambda slot, position: self.machine.lease_at(slot, position),
                    self._reports,
                )
            self._actions |= {
                Send: self._send,
                Give: self._slots.give,
                Reclaim: self._slots.reclaim,
                Interrupt: self._slots.interrupt,
                Kill: self._slots.kill,
                WaitAnswered: self._slots.answer,
                EndSlot: self._slots.end,
                Spawn: self._slots.spawn,
                ForgetFunctions: self._slots.forget,
                FreeBulk: self._free,
                Exit: self._exit,
            }
            self.machine = WorkerMachine(
                incarnation=incarnation,
                job=config.job,
                index=-1 if config.index is None else config.index,
                slots=config.slots,
                pid=os.getpid(),
                host=socket.gethostname(),
                orphan_limit_s=config.orphan_limit_s,
                can_kill=self._slots.can_kill,
                now=loop.now(),
                address=self.advertised,
                tags=tuple(config.worker_tags or ()),
                start_delay=config.start_delay,
                threads_per_slot=threads_in(environment),
                resources=taken.quantities,
                actors_max=actors_max,
                nested_slots_max=nested_slots_max,
            )
            self.machine.serving = True
        except BaseException:
            loop.stop()
            self.stopped.set()
            raise
        self.opened = True
        loop.on_stop(self._close)
        loop.call_soon(self._begin)
        loop.start()

    def _bound_children(self, loop: Loop, environment: dict[str, str]) -> BoundChildren:
        """Return the owner of the zygote from which slot processes and processes of data tasks are
        forked."""
        check_descriptors(self._config.slots)
        bound = BoundChildren(
            loop,
            self._zygote or start_slots_zygote(self._modules, environment),
            echo=self._config.echo,
        )
        loop.on_stop(bound.close)
        return bound

    def _start_actors(
        self,
        loop: Loop,
        children: BoundChildren,
        host: str,
        variables: Callable[[tuple[int, ...]], dict[str, str]],
    ) -> None:
        actors = ActorProcesses(
            loop,
            children,
            self._handle,
            host,
            self._store.address,
            self._dispatcher,
            self._worker,
            variables,
            self._reports,
        )
        self._actors_at_work = actors.at_work
        self._actions[SpawnActor] = actors.spawn
        self._actions[KeepActor] = actors.keep
        self._actions[EndActor] = actors.end
        self._actions[KillActor] = actors.kill
        loop.on_stop(actors.close)

    def _worker(self) -> tuple[int, int]:
        return self.machine.index, self.machine.workers

    def snapshot(self) -> WorkerSnapshot:
        """Return the record for `WorkerServer.snapshot`. Call it in the loop's thread."""
        machine, cache = self.machine, self._cache
        return WorkerSnapshot(
            registered=machine.contact.registered,
            leaving=machine.leaving,
            running=machine.running,
            waiting=len(machine.queue),
            waiting_pinned=machine.queue.pinned_waiting,
            slots=tuple(slot.row for slot in machine.slots),
            functions=len(machine.functions),
            results=len(machine.results),
            held=self._store.holdings,
            fetched=len(cache),
            fetched_bytes=cache.nbytes,
            fetches=cache.fetches,
            resources=self._slots.resources,
            slot_deaths=self._slots.deaths,
        )

    def _bind(self, router: Router, key: bytes, host: str) -> tuple[str, str]:
        """Bind the worker's ports, and set the addresses that other processes use. Return the
        worker's address, and that of its second port ("" without one).

        With `processes` each data task binds a port of its own, so the second port is not bound
        here.
        """
        config = self._config
        self.address = router.bind(join_address(host, config.port))
        # Advertise an address of this host in the dispatcher's network, because peers cannot
        # connect to a wildcard.
        if is_wildcard(host):
            self.address = join_address(own_host(self._dispatcher), split(self.address)[1])
        self.advertised = config.advertised(self.address)
        self._store.address = self.address if config.worker_address is None else self.advertised
        self._store.key = key
        read_at = ""
        if config.data_transfer_protocol is not None and config.processes:
            read_at = config.data_transfer_address or ""
        elif config.data_transfer_protocol is not None:
            bound = router.bind(join_address(host, config.data_transfer_port))
            read_at = reached_at(config.data_transfer_address, DTS_PORT, bound)
        return self.advertised, read_at

    def _begin(self) -> None:
        self._perform(self.machine.start())
        self._dealer.connect()
        self._rearm()
        self._reports.begin(self.machine, self._slots.at_work, self._actors_at_work)

    def _down(self) -> None:
        self._handle(DispatcherDisconnected())
        self._calls.down()

    def _up(self, hello: Hello) -> None:
        self._calls.up(hello.incarnation)
        self._handle(DispatcherConnected(hello.incarnation))

    def _handle_message(self, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, Read):
            self._dealer.send(*self._store.read_reply(message))
        elif isinstance(message, (Reply, Replies)):
            self._calls.handle_message(message)
        elif isinstance(message, AskWorker):
            self._inside.answer(message)
        elif isinstance(message, Observe):
            self._reports.observe(message)
        else:
            self._handle(Heard(DISPATCHER, message))

    def _refused(self, error: errors.OpError) -> None:
        """End the worker, because the dispatcher has refused the connection for good."""
        self._exit(Exit(error.error_code, error.message))

    def _handle(self, event: Event) -> None:
        machine, now = self.machine, self.loop.now()
        if isinstance(event, SlotFinished):
            self._note_results(event)
        self._perform(machine.handle(event, now))
        if machine.leave_at is not None and machine.leave_at > now and not self._draining:
            self._draining = True
            self.part.drain(self._part_left)
        # The parts were fetched for work that has ended.
        if self._cache.nbytes and not machine.running:
            self._cache.drop()
        if machine.contact.registered and not self._registered.is_set():
            self._registered.set()
        if machine.contact.registered != self._in_contact:
            self._in_contact = machine.contact.registered
            if self._children is not None:
                # Without contact, children may have run for three quarters of a lease when this
                # process is suspended, and they must have ended when the lease has.
                share = 1 / 2 if self._in_contact else 1 / 5
                self._children.watch(share * machine.contact.lease_s)
            if self._in_contact:
                self._store.holder = self._service.label = f"{machine.job}:{machine.index}"
                self._reports.servers.forget()
                self.part.registered()
        self._rearm()

    def _part_left(self) -> None:
        self.machine.serving = False
        self._handle(Ticked())

    def _rearm(self) -> None:
        due = self.machine.deadline
        if due != self._due:
            self._due = due
            self.loop.set_timer(self, due, self._tick)

    def _tick(self) -> None:
        self._due = None
        self._handle(Ticked())

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._actions[type(effect)](effect)

    def _send(self, send: Send) -> None:
        # A message that is sent while disconnected is lost. After a reconnect the machine registers
        # again, with all leases.
        self._dealer.send(send.message)

    # -- bulk results ------------------------------------------------------------------------------

    def _hold(self, kind: int, parts: list[Any]) -> bytes:
        """Hold the parts of a result, and return the encoded reference. Only parts of kept values
        may be mapped by several processes."""
        return encode_reference(self._store.hold(parts, shared=kind == KEPT))

    def _note_results(self, event: SlotFinished) -> None:
        """Record which held parts belong to which lease, because the machine frees a result by its
        lease."""
        for position, kind, payload in event.outcomes:
            if kind != BULK:
                continue
            reference = decode_reference(payload)
            lease = self.machine.lease_at(event.slot, position)
            # The machine has dropped this lease, so no coordinator will release the result.
            if lease is None:
                self._store.free(reference.bulks)
            else:
                self._bulk_leases[lease] = reference.bulks

    def _free(self, free: FreeBulk) -> None:
        self._store.free(self._bulk_leases.pop(free.lease, ()))

    # -- the end -----------------------------------------------------------------------------------

    def _exit(self, exit_: Exit) -> None:
        self.exit = exit_
        if exit_.code:
            end_log.error("worker of %s ends: %s", self._dispatcher, exit_.error)
        # After an error no reader is served any more.
        if exit_.code or not self._config.quiet_s:
            self.loop.call_soon(self.loop.stop)
            return
        self.loop.set_timer((self, "quiet"), self.loop.now() + self._config.quiet_s, self.loop.stop)
        self.part.refuse(self.loop.stop)

    def _close(self) -> None:
        if self._children is not None:
            self._children.read_left()
        self._inside.push()
        self._dealer.close(linger_s=0.5)
        self._slots.close()
        if self._children is not None:
            self._children.close()
        self._fetcher.close()
        self._store.close()
        self._registered.set()
        self.stopped.set()


class ThreadSlots:
    """The slots of one worker as threads of its own process, for a `WorkerServer` inside a program.
    Call the methods in the loop's thread.

    A thread cannot be killed. A cancelled function is asked to end early (`zmqdist.cancelled()`),
    and the slot waits until the function ends. A slot that is a thread has one item at a time, so
    the worker never takes items back from the slot.
    """

    can_kill = False

    def __init__(
        self,
        loop: Loop,
        slots: int,
        feed: Feed,
        hold: HoldResult,
        fetcher: PartsFetcher,
        worker: task_context.Worker,
        own: Callable[[own_cluster.ItemLink], own_cluster.OwnCluster],
        lease_at: LeaseAt,
        facts: WorkerReports,
    ) -> None:
        self._own = own
        self._facts = facts
        self._lease_at = lease_at
        self._loop = loop
        self._feed = feed
        self._hold = hold
        self._fetcher = fetcher
        self._worker = worker
        self._functions = Functions(fetcher)
        self._slots = [_SlotThread(self, number) for number in range(slots)]
        self.deaths = 0
        """Always 0, because a thread ends only with its worker."""

    @property
    def resources(self) -> int:
        """The number of per-worker resources that the slots share."""
        return len(self._functions.resources)

    def spawn(self, spawn: Spawn) -> None:
        if spawn.slot == len(self._slots):
            self._slots.append(_SlotThread(self, spawn.slot))
        elif self._slots[spawn.slot].thread.ident is not None:
            self._slots[spawn.slot] = _SlotThread(self, spawn.slot)
        self._slots[spawn.slot].thread.start()

    def give(self, give: Give) -> None:
        self._functions.define(give.functions)
        for item in give.items:
            self._slots[give.slot].position = item[0]
            self._slots[give.slot].items.put(item)

    def forget(self, forget: ForgetFunctions) -> None:
        self._functions.forget(forget.functions)

    def at_work(self) -> list[SlotAtWork]:
        """Return all slots."""
        return [
            SlotAtWork(slot.number, os.getpid(), slot.runs, slot.position) for slot in self._slots
        ]

    def reclaim(self, reclaim: Reclaim) -> None:
        position = self._slots[reclaim.slot].position
        self._loop.call_soon(self._feed, SlotReclaimed(reclaim.slot, position))

    def interrupt(self, interrupt: Interrupt) -> None:
        self._slots[interrupt.slot].cancel = interrupt.position

    def kill(self, kill: Kill) -> None:
        raise AssertionError("a thread cannot be killed: the machine must not return Kill here")

    def end(self, end: EndSlot) -> None:
        self._slots[end.slot].items.put(None)
        self._loop.call_soon(self._feed, SlotDied(end.slot, 0, None, ""))

    def answer(self, answer: WaitAnswered) -> None:
        self._slots[answer.slot].refusal = answer.refusal

    def close(self) -> None:
        """End idle threads. A running function continues in its daemon thread, and its outcome is
        dropped."""
        for slot in self._slots:
            slot.items.put(None)
        for slot in self._slots:
            if not slot.busy and slot.thread.is_alive():
                slot.thread.join(1.0)

    def _serve(self, slot: _SlotThread) -> None:
        remote_results.of_thread.fetcher = self._fetcher
        resources.use_resources(self._functions.resources)
        own = self._own(_ThreadLink(self._loop, self._feed, self._lease_at, slot))
        own_cluster.enter(own, whole_process=False)
        self._report(SlotReady(slot.number))
        table = slot.table
        while (item := slot.items.get()) is not None:
            position, coordinator, fn, payload = item
            slot.busy = True
            table.seconds[BEGAN] = began = time.monotonic()
            # The lambda may refer to the loop variable, because a slot has one item at a time.
            task_context.enter(lambda: slot.cancel == position, self._worker)  # noqa: B023
            try:
                kind, result = run(self._functions, coordinator, fn, payload)
                if kind in (BULK, KEPT):
                    kind, result = BULK, self._hold(kind, result)
            except BaseException as error:  # an error such as a MemoryError fails this item only
                kind, result = ERROR, results.pack_error(error)
            ended = time.monotonic()
            failed = kind == ERROR
            table.add(coordinator, fn, [ended - began], failed, len(payload), len(result), ended)
            if table.watches_runs and table.may_report_run(ended):
                table.runs.append((position, began, ended, kind))
            if failed:
                table.note_failure(position, last_failure.take())
            task_context.leave()
            if table.failures or table.runs:
                self._tell(
                    partial(self._facts.reported, slot.number, os.getpid(), *table.take_reports())
                )
            slot.busy = False
            self._report(SlotFinished(slot.number, [(position, kind, result)]))
        own.end()

    def _report(self, event: SlotReady | SlotFinished) -> None:
        self._tell(partial(self._feed, event))

    def _tell(self, fn: Callable[[], object]) -> None:
        try:
            self._loop.call_soon(fn)
        except FailedPreconditionError:  # the worker has stopped and has given up its leases
            pass


class _SlotThread:
    def __init__(self, owner: ThreadSlots, number: int) -> None:
        self.number = number
        self.items: queue.SimpleQueue[tuple[int, int, int, bytes] | None] = queue.SimpleQueue()
        self.position = 0
        self.cancel = 0
        self.busy = False
        self.refusal = ""
        memory = bytearray(TABLE_BYTES)
        self.table, self.runs = RunTable(memory), RunReader(memory)
        self.thread = threading.Thread(
            target=owner._serve, args=(self,), name=f"zmqdist-slot-{number}", daemon=True
        )


class _ThreadLink:
    """The questions of a slot's thread to the worker's loop (`own_cluster.ItemLink`)."""

    def __init__(self, loop: Loop, feed: Feed, lease_at: LeaseAt, slot: _SlotThread) -> None:
        self._loop = loop
        self._feed = feed
        self._lease_at = lease_at
        self._slot = slot

    def position(self) -> int:
        return self._slot.position if self._slot.busy else 0

    def lease(self, position: int) -> int:
        return self._loop.run(self._lease_at, self._slot.number, position) or 0

    def wait(self, position: int) -> str:
        self._loop.run(self._feed, SlotWaits(self._slot.number, position))
        return self._slot.refusal

    def resume(self, position: int) -> None:
        self._loop.call_soon(self._feed, SlotResumed(self._slot.number, position))


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """The running and waiting work of a worker, and the data that it holds, at one moment.

    Attributes:
      registered: whether the worker is registered with a dispatcher and connected to it.
      leaving: whether the worker is leaving, and accepts no more work.
      running: the number of slots that run an item, plus the number of items that wait for a slot.
      waiting: the number of items that wait for a slot.
      waiting_pinned: the number of waiting items that are pinned to this worker. They begin first.
      slots: each slot, in order.
      functions: the number of functions that coordinators have sent.
      results: the number of large results that the worker holds. The worker frees a result when the
        coordinator has received it, but a kept result only when the coordinator releases it.
      held: figures of the large parts that the worker holds: parts of results, and parts of
        arguments that were fetched.
      fetched: the number of held parts that were fetched from other processes for the slots.
      fetched_bytes: the bytes of the fetched parts.
      fetches: the number of parts that were fetched so far.
      resources: the number of resources that exist in the worker; None if slots are processes,
        because each slot has its own resources.
      slot_deaths: the number of slot processes that ended without being killed by the worker.
    """

    registered: bool
    leaving: bool
    running: int
    waiting: int
    waiting_pinned: int
    slots: tuple[SlotRow, ...]
    functions: int
    results: int
    held: Holdings
    fetched: int
    fetched_bytes: int
    fetches: int
    resources: int | None
    slot_deaths: int

"""The worker's server, the runtime of machine.py: a connection to the dispatcher, slots that run functions, and a store of results.

The runtime passes messages, and events of the slots, to the machine, and carries out the effects that the machine returns. The runtime
decides nothing itself.

The loop's thread refers to the runtime and not to the WorkerServer. So a WorkerServer that the program has dropped is garbage-collected,
and its finalizer stops the runtime.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from functools import partial
from typing import Any

from zmqdist import errors, limits
from zmqdist.addresses import is_wildcard, join_address
from zmqdist.background import in_background
from zmqdist.blas_threads import threads_in
from zmqdist.clock import duration, seconds
from zmqdist.data.service.worker.runtime import DataWorker, WorkerDataSnapshot
from zmqdist.data.service.worker.task_process import TaskProcesses
from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import BULK, KEPT, Message, Read
from zmqdist.process.bound_children import BoundChildren
from zmqdist.process.zygote_process import ZygoteProcess, start_slots_zygote
from zmqdist.rpc.loop_client import LoopClient
from zmqdist.rpc.service import RpcService
from zmqdist.scheduling.shared.config import WorkerConfig, config_of
from zmqdist.scheduling.shared.fetch import Fetcher
from zmqdist.scheduling.shared.references import decode_reference, encode_reference
from zmqdist.scheduling.shared.store import BulkStore
from zmqdist.scheduling.worker import children
from zmqdist.scheduling.worker.machine import DISPATCHER, WorkerMachine
from zmqdist.scheduling.worker.slots import ProcessSlots, check_descriptors
from zmqdist.scheduling.worker.threads import ThreadSlots
from zmqdist.scheduling.worker.worker_cache import FETCH_FOR_SLOT, WorkerCache
from zmqdist.scheduling.worker.worker_events import (
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
    SlotFinished,
    Spawn,
)
from zmqdist.scheduling.worker.worker_snapshot import WorkerSnapshot
from zmqdist.transport.dealer import DealerConnection
from zmqdist.transport.endpoint import split
from zmqdist.transport.loop import Loop
from zmqdist.transport.own_address import bindable, own_host
from zmqdist.transport.router import Router
from zmqdist.wire.hello import Hello, our_hello

log = logging.getLogger("zmqdist.scheduling")
end_log = logging.getLogger("zmqdist.scheduling.end")
"""The log of the reasons why workers end. The command `zmqdist worker` prints the reason itself, and turns this log off."""

READERS = frozenset({"submit", "worker"})
SLOTS = frozenset({"worker"})
FIRST_CONTACT_LOG_S = limits.WAIT_LOG_S


class WorkerServer:
    """A worker in this process: it registers with a dispatcher and runs scheduled functions in its slots.

    >>> with zd.DispatchServer() as dispatcher:
    ...     with zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address)):
    ...         with zd.ClusterCoordinator(dispatcher) as coordinator:
    ...             print(coordinator.submit(pow, 2, 3).result())
    8

    The slots are threads unless the config has `processes=True`, which the command `zmqdist worker` sets. The dispatcher may be started
    later, because `start` waits for the dispatcher, and logs that it waits.

    Stop the worker with `stop`, or use it in a with-statement. A worker to which the program no longer refers stops in the background and
    aborts its running functions.

    Args:
      config: a WorkerConfig. None means the config with `fields`.
      start: whether the constructor starts the worker. If False, call `start()` later.
      zygote: the process from which slot processes are forked. With None, the worker starts a zygote if it needs one.
      fields: fields of the config, as in TensorFlow 2.3: `WorkerServer(port=0, dispatcher_address="host:port")`.

    Raises (from `start`):
      UnauthenticatedError, PermissionDeniedError: the dispatcher refuses the token or key.
      AlreadyExistsError: another worker is registered under this job and index.
      FailedPreconditionError: the minor version of Python or zmqdist is not the dispatcher's, or the dispatcher's `worker_addresses` have
        no free entry for this worker.
      UnavailableError: no dispatcher accepted the worker within `orphan_limit_s`.
      UnknownError: the worker's own port could not be bound.
      ResourceExhaustedError: the slots need more descriptors than this process may have.
    """

    def __init__(
        self,
        config: WorkerConfig | None = None,
        start: bool = True,
        *,
        zygote: ZygoteProcess | None = None,
        **fields: Any,
    ) -> None:
        self._runtime = _Runtime(config_of(WorkerConfig, config, fields), zygote)
        self._lock = threading.Lock()
        if start:
            self.start()

    # -- for users ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker, and return once the dispatcher has registered it. If the worker is started already, only wait.

        >>> with zd.DispatchServer() as dispatcher:
        ...     with zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address)) as worker:
        ...         worker.start()  # a second call does nothing

        Raises:
          FailedPreconditionError: the worker was stopped before. The docstring of the class lists the other errors.
        """
        runtime = self._runtime
        with self._lock:
            if runtime.stopped.is_set():
                raise errors.FailedPreconditionError("Server cannot be started after it has been stopped")
            if not runtime.started:
                runtime.started = True
                runtime.open()
        runtime.wait_registered()

    def stop(self, grace_s: float = 0.0) -> None:
        """Leave the dispatcher and end the slots. Blocks until the worker has ended. Idempotent.

        >>> with zd.DispatchServer() as dispatcher:
        ...     zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address)).stop()

        Functions that have not begun are returned to the dispatcher at once, for other workers.

        Args:
          grace_s: how long running functions may go on before they are aborted.
        """
        grace_s = duration("grace_s", grace_s)
        with self._lock:
            if self._runtime.loop is None:
                self._runtime.stopped.set()
                return
        self._runtime.stop(grace_s)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the worker has ended, for any reason. Return False if `timeout` seconds pass first; None waits without a limit.

        >>> with zd.DispatchServer() as dispatcher:
        ...     worker = zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address))
        ...     worker.stop()
        ...     worker.join()
        True
        """
        return self._runtime.stopped.wait(seconds(timeout))

    @property
    def ended(self) -> Exit | None:
        """How the worker ended; None while it runs."""
        return self._runtime.ended

    @property
    def in_contact(self) -> bool:
        """Whether the worker is registered with a dispatcher and connected to it."""
        machine = self._runtime.machine
        return machine is not None and machine.registered and not self._runtime.stopped.is_set()

    @property
    def address(self) -> str:
        """ "host:port" of the worker's own server, with the port that was bound."""
        return self._runtime.address

    @property
    def advertised_address(self) -> str:
        """ "host:port" at which readers of the data service reach the worker: `worker_address` of the config, or `address`.

        If this is `address`, "localhost" replaces 127.0.0.1, as in tf.data service.
        """
        return self._runtime.advertised

    @property
    def _address(self) -> str:
        """The advertised address. The name `_address` is the one in tf.data service."""
        return self.advertised_address

    @property
    def target(self) -> str:
        return f"zmq://{self._runtime.address}"

    @property
    def name(self) -> str:
        """ "job:index", the name under which the dispatcher knows the worker."""
        machine = self._runtime.machine
        assert machine is not None
        return f"{machine.job}:{machine.index}"

    @property
    def num_tasks(self) -> int:
        """The number of functions that run or wait in the worker, plus the number of its data tasks that have not ended."""
        machine = self._runtime.machine
        return 0 if machine is None else machine.running + self._num_tasks()

    def snapshot(self) -> WorkerSnapshot:
        """Return an immutable record of the worker's running and waiting work, and of the data that it holds. Waits for the loop.

        >>> with zd.DispatchServer() as dispatcher:
        ...     with zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address)) as worker:
        ...         print(type(worker.snapshot()).__name__)
        WorkerSnapshot

        Raises:
          FailedPreconditionError: the worker was not started, or has stopped.
        """
        runtime = self._runtime
        if runtime.loop is None or runtime.machine is None:
            raise errors.FailedPreconditionError("this worker was not started: call start() first")
        return runtime.loop.run(runtime.snapshot)

    def _num_tasks(self) -> int:
        """Return how many data tasks have not ended. The name `_num_tasks` is the one in tf.data service."""
        return 0 if self._runtime.machine is None else self._runtime.data.num_tasks

    def data_snapshot(self) -> WorkerDataSnapshot:
        """Return an immutable record of the worker's data tasks and of the streams of distributed snapshots that it writes.

        >>> with zd.DispatchServer() as dispatcher:
        ...     with zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address)) as worker:
        ...         print(type(worker.data_snapshot()).__name__)
        WorkerDataSnapshot
        """
        assert self._runtime.loop is not None
        return self._runtime.loop.run(self._runtime.data.snapshot)

    def _snapshot_task_progresses(self) -> list[Any]:
        """Return the streams of snapshots that the worker writes. The name of this method is the one in tf.data service."""
        return list(self.data_snapshot().streams)

    def __enter__(self) -> WorkerServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __del__(self) -> None:
        runtime = self.__dict__.get("_runtime")
        if runtime is not None and runtime.needs_stop:
            in_background("zmqdist-worker-stop", runtime.stop, 0.0)


class _Runtime:
    """The part of a WorkerServer that the loop's thread refers to.

    Attributes:
      loop, machine: the loop and the machine, which `open` makes; None before.
      started: whether `open` was called.
      stopped: set once the worker has ended.
      ended: how the worker ended; None while it has not ended.
      address, advertised: the address of the worker's server, and the address that readers of the data service get.
    """

    def __init__(self, config: WorkerConfig, zygote: ZygoteProcess | None) -> None:
        self._config = config
        self._zygote = zygote
        self._pid = os.getpid()
        self._dispatcher = config.dispatcher_address.removeprefix("zmq://")
        split(self._dispatcher)
        self.started = False
        self.stopped = threading.Event()
        self._registered = threading.Event()
        self.ended: Exit | None = None
        self.machine: WorkerMachine | None = None
        self.loop: Loop | None = None
        self._children: BoundChildren | None = None
        self.address = self.advertised = ""
        self._bulk_leases: dict[int, list[int]] = {}
        self._due: float | None = None
        self._in_contact = False
        self._draining = False

    @property
    def needs_stop(self) -> bool:
        """Whether the finalizer of a WorkerServer must stop this runtime, because the runtime runs in this process.

        A forked child has a copy of the runtime, but not the loop's thread.
        """
        return self.loop is not None and not self.stopped.is_set() and self._pid == os.getpid()

    def wait_registered(self) -> None:
        """Wait until the dispatcher has registered this worker. If the worker ends with an error first, raise this error."""
        while not self._registered.wait(FIRST_CONTACT_LOG_S):
            log.warning(
                "worker waits for the dispatcher at %s: %s", self._dispatcher, self._dealer.trouble or "no reply"
            )
        if self.ended is not None and self.ended.code:
            raise errors.from_code(self.ended.code, f"worker of {self._dispatcher}: {self.ended.error}")

    def stop(self, grace_s: float) -> None:
        """Leave the dispatcher and wait for the end of the worker. Do not call it in the loop's thread."""
        assert self.loop is not None
        try:
            self.loop.call_soon(self._handle, LeaveRequested(grace_s))
        except errors.FailedPreconditionError:
            pass
        limit_s = grace_s + self._config.quiet_s + 10.0
        if not self.stopped.wait(limit_s):
            log.error("the worker did not stop in good order within %g s: its loop is ended now", limit_s)
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
            service = RpcService("worker")
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
            )
            self._calls = LoopClient(self._dealer)
            about = self._dispatcher, credentials, incarnation, config.dispatcher_timeout_s
            host_of_tasks = self._task_processes(host, incarnation, config.dispatcher_timeout_s)
            self.data = DataWorker(loop, service, self._calls, *about, host_of_tasks, config.chunk_bytes_max)
            self.data.host.cache_bytes = config.cache_bytes
            if self._children is not None:
                self.data.snapshots.processes = partial(self._children.spawn, children.STREAM)
            service.attach(router, loop, incarnation)
            loop.on_stop(service.close)
            self._bind(router, security.public, host)
            self._slots: ProcessSlots | ThreadSlots
            about_slots = config.slots, self._handle, self._hold
            if self._children is not None:
                self._slots = ProcessSlots(
                    loop, *about_slots, self.address, security.public, self._children, self._worker
                )
            else:
                self._slots = ThreadSlots(loop, *about_slots, self._cache, self._worker)
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
            )
        except BaseException:
            loop.stop()
            self.stopped.set()
            raise
        loop.on_stop(self._close)
        loop.call_soon(self._begin)
        loop.start()

    def _bound_children(self, loop: Loop, environment: dict[str, str]) -> BoundChildren:
        """Return the owner of the zygote from which slot processes and processes of data tasks are forked."""
        check_descriptors(self._config.slots)
        bound = BoundChildren(loop, self._zygote or start_slots_zygote(children.MODULES, environment))
        loop.on_stop(bound.close)
        return bound

    def _worker(self) -> tuple[int, int]:
        assert self.machine is not None
        return self.machine.index, self.machine.workers

    def snapshot(self) -> WorkerSnapshot:
        """Return the record for `WorkerServer.snapshot`. Call it in the loop's thread."""
        machine, cache = self.machine, self._cache
        assert machine is not None
        return WorkerSnapshot(
            registered=machine.registered,
            leaving=machine.leaving,
            running=machine.running,
            held=self._store.holdings,
            fetched=len(cache),
            fetched_bytes=cache.nbytes,
            fetches=cache.fetches,
            resources=self._slots.resources,
            slot_deaths=self._slots.deaths,
            **machine.figures,
        )

    def _task_processes(self, host: str, incarnation: int, timeout_s: float) -> TaskProcesses | None:
        """Return the object that starts processes for data tasks; None if data tasks run in threads."""
        if self._children is None:
            return None
        assert self.loop is not None
        spawn = partial(self._children.spawn, children.TASK)
        return TaskProcesses(self.loop, spawn, host, self._dispatcher, incarnation, timeout_s)

    def _bind(self, router: Router, key: bytes, host: str) -> None:
        """Bind the worker's ports, and set the addresses that other processes use.

        With `processes` each data task binds a port of its own, so the second port is not bound here.
        """
        config = self._config
        self.address = router.bind(join_address(host, config.port))
        # Advertise an address of this host in the dispatcher's network, because peers cannot connect to a wildcard.
        if is_wildcard(host):
            self.address = join_address(own_host(self._dispatcher), split(self.address)[1])
        self.advertised = self.data.host.address = config.advertised(self.address)
        self._store.address = self.address if config.worker_address is None else self.advertised
        self._store.key = self.data.key = key
        if config.data_transfer_protocol is not None and config.processes:
            self.data.host.read_at = config.data_transfer_address or ""
        elif config.data_transfer_protocol is not None:
            self.data.host.read_at = config.elements_at(router.bind(join_address(host, config.data_transfer_port)))

    def _begin(self) -> None:
        assert self.machine is not None
        self._perform(self.machine.start())
        self._dealer.connect()
        self._rearm()

    def _down(self) -> None:
        self._handle(DispatcherDisconnected())
        self._calls.down()

    def _up(self, hello: Hello) -> None:
        self._calls.up(hello.incarnation)
        self._handle(DispatcherConnected(hello.incarnation))

    def _handle_message(self, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, Read):
            self._dealer.send(*self._store.read_reply(message))
        elif not self._calls.handle_message(message):
            self._handle(Heard(DISPATCHER, message))

    def _refused(self, error: errors.OpError) -> None:
        """End the worker, because the dispatcher has refused the connection for good."""
        self._exit(Exit(error.error_code, error.message))

    def _handle(self, event: Event) -> None:
        machine = self.machine
        assert machine is not None
        if isinstance(event, SlotFinished):
            self._note_results(event)
        machine.serving = not self.data.left
        self._perform(machine.handle(event, self._loop_now()))
        if not self._draining and machine.leave_at is not None and machine.leave_at > self._loop_now():
            self._draining = True
            self.data.drain(lambda: self._handle(Ticked()))
        if not machine.running:
            self._cache.drop()
        if machine.registered and not self._registered.is_set():
            self._registered.set()
            if self._children is not None:
                self._children.watch(machine.lease_s / 2)
        if machine.registered != self._in_contact:
            self._in_contact = machine.registered
            if self._in_contact:
                self._store.holder = f"{machine.job}:{machine.index}"
                self.data.registered()
        self._rearm()

    def _loop_now(self) -> float:
        assert self.loop is not None
        return self.loop.now()

    def _rearm(self) -> None:
        assert self.machine is not None
        assert self.loop is not None
        due = self.machine.deadline
        if due != self._due:
            self._due = due
            self.loop.set_timer(self, due, self._tick)

    def _tick(self) -> None:
        self._due = None
        self._handle(Ticked())

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(_, message):
                    # A message that is sent while disconnected is lost. After a reconnect the machine registers again, with all leases.
                    self._dealer.send(message)
                case Give():
                    self._slots.give(effect)
                case Reclaim(slot):
                    self._slots.reclaim(slot)
                case Interrupt(slot, position):
                    self._slots.interrupt(slot, position)
                case Kill(slot):
                    self._slots.kill(slot)
                case Spawn(slot):
                    self._slots.spawn(slot)
                case ForgetFunctions():
                    self._slots.forget(effect)
                case FreeBulk(lease):
                    self._free(lease)
                case Exit():
                    self._exit(effect)

    # -- bulk results -------------------------------------------------------------------------------------------

    def _hold(self, kind: int, parts: list[Any]) -> bytes:
        """Hold the parts of a result, and return the encoded reference. Only parts of kept values may be mapped by several processes."""
        return encode_reference(self._store.hold(parts, shared=kind == KEPT))

    def _note_results(self, event: SlotFinished) -> None:
        """Record which held parts belong to which lease, because the machine frees a result by its lease."""
        assert self.machine is not None
        for position, kind, payload in event.outcomes:
            if kind != BULK:
                continue
            reference = decode_reference(payload)
            lease = self.machine.lease_at(event.slot, position)
            if lease is None:
                self._store.free(reference.bulks)
            else:
                self._bulk_leases[lease] = reference.bulks

    def _free(self, lease: int) -> None:
        self._store.free(self._bulk_leases.pop(lease, ()))

    # -- the end ------------------------------------------------------------------------------------------------

    def _exit(self, exit_: Exit) -> None:
        self.ended = exit_
        if exit_.code:
            end_log.error("worker of %s ends: %s", self._dispatcher, exit_.error)
        assert self.loop is not None
        if exit_.code or not self._config.quiet_s:
            self.loop.call_soon(self.loop.stop)
            return
        self.loop.set_timer((self, "quiet"), self._loop_now() + self._config.quiet_s, self.loop.stop)
        self.data.refuse(self.loop.stop)

    def _close(self) -> None:
        self._dealer.close(linger_s=0.5)
        self._slots.close()
        if self._children is not None:
            self._children.close()
        self._fetcher.close()
        self._store.close()
        self._registered.set()
        self.stopped.set()

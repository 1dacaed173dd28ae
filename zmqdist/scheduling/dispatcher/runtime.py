"""The dispatcher's server, the runtime of broker.py: one socket, one loop, and the RPC methods of the dispatcher.

The runtime passes each message to the machine, and sends the messages that the machine returns. The runtime decides nothing itself and
never unpickles a payload.

The loop's thread refers to the runtime and not to the DispatchServer. So a DispatchServer that the program has dropped is
garbage-collected, and its finalizer stops the runtime.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from zmqdist import errors
from zmqdist.addresses import advertised_address, join_address
from zmqdist.background import in_background
from zmqdist.clock import seconds
from zmqdist.coordination.service import CoordinationService
from zmqdist.data.service.dispatcher.machine.snapshot import DataSnapshot
from zmqdist.data.service.dispatcher.machine.tables import Rules
from zmqdist.data.service.dispatcher.runtime import DataDispatcher
from zmqdist.events import Heard, PeerExpelled, PeerGone, ProcessExited, Send, Ticked
from zmqdist.limits import JOIN_VALID_S
from zmqdist.messages import (
    Beat,
    CancelWork,
    Define,
    Done,
    EndRound,
    Forget,
    Goodbye,
    LeasesReturned,
    Leave,
    Message,
    Refused,
    Register,
    RegisterCoordinator,
    ResultReceived,
    SlotsLost,
    Submit,
    WorkDescribed,
)
from zmqdist.rpc.pending_call import PendingCall
from zmqdist.rpc.service import RpcService
from zmqdist.scheduling.dispatcher.broker import Broker, BrokerSnapshot
from zmqdist.scheduling.dispatcher.broker import Event as BrokerEvent
from zmqdist.scheduling.dispatcher.drain_report import DrainReport
from zmqdist.scheduling.dispatcher.drain_reporter import DrainReporter, not_registered
from zmqdist.scheduling.dispatcher.key_service import KeyService
from zmqdist.scheduling.dispatcher.membership_and_leases import Member, MemberJoined, MemberLost
from zmqdist.scheduling.dispatcher.relay import Relay
from zmqdist.scheduling.dispatcher.scaler import NO_LAUNCHER, Scaler
from zmqdist.scheduling.shared.config import DispatcherConfig, config_of
from zmqdist.scheduling.shared.fetch import RELAY
from zmqdist.scheduling.shared.heap_trimming import HeapTrimmer
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.endpoint import split
from zmqdist.transport.loop import Loop
from zmqdist.transport.own_address import bindable
from zmqdist.transport.peer import Peer
from zmqdist.transport.processes import is_alive
from zmqdist.transport.router import Router
from zmqdist.wire.hello import host_identity, our_hello, pickles_differ

log = logging.getLogger("zmqdist.scheduling")

PROCESS_END_POLL_S = 0.005
"""Seconds before the first check whether a disconnected process has ended. Each later pause is twice as long as the pause before it."""

LEAVING_S = 1.0
"""Seconds for which `shutdown` waits for workers after their grace has passed."""

FROM_WORKERS = (Register, Done, LeasesReturned, SlotsLost, Beat, Leave)
FROM_COORDINATORS = (RegisterCoordinator, Define, Forget, Submit, CancelWork, EndRound, ResultReceived)


class DispatchServer:
    """The dispatcher of a cluster, in this process: workers register with it, and coordinators schedule functions through it.

    >>> with zd.DispatchServer() as dispatcher:
    ...     print(dispatcher.target.startswith("zmq://"))
    True

    The dispatcher runs in a thread of its own. Stop it with `stop`, or use it in a with-statement. A server to which the program no longer
    refers stops in the background. In a script `local_cluster` is simpler; on several hosts use `zmqdist dispatcher` or `zmqdist launch`.

    Args:
      config: a DispatcherConfig. None means the config with `fields`, by default a free port on loopback.
      start: whether the constructor starts the server. If False, call `start()` later.
      listener: the descriptor of a listening TCP socket, which the server then owns and uses in place of the config's address.
      fields: fields of the config, as in TensorFlow 2.3: `DispatchServer(port=0)`.

    Raises (from `start`):
      UnknownError: the server could not bind the port, because it is in use or the address does not belong to this host.
      FailedPreconditionError: the address needs keys, the server was stopped before, or another dispatcher uses its work_dir.
      DataLossError: the journal in the work_dir is damaged. The server overwrites no file.
    """

    def __init__(
        self, config: DispatcherConfig | None = None, start: bool = True, *, listener: int | None = None, **fields: Any
    ) -> None:
        self._runtime = _Runtime(config_of(DispatcherConfig, config, fields), listener)
        self._lock = threading.Lock()
        if start:
            self.start()

    # -- for users ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind the port and serve. Workers and coordinators can connect once `start` has returned. Starting again has no effect.

        >>> with zd.DispatchServer() as dispatcher:
        ...     dispatcher.start()  # a second call does nothing
        """
        with self._lock:
            if self._runtime.stopped.is_set():
                raise errors.FailedPreconditionError("Server cannot be started after it has been stopped")
            if self._runtime.loop is None:
                self._runtime.open()

    def stop(self) -> None:
        """Stop the dispatcher at once. Its queues and sessions are lost. Idempotent.

        >>> dispatcher = zd.DispatchServer()
        >>> dispatcher.stop()

        Workers go on running their functions for half the duration of a lease, and wait for another dispatcher at this address. To stop the
        workers as well, call `shutdown` instead.
        """
        with self._lock:
            self._runtime.stop()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the server has stopped. Return False if `timeout` seconds pass first; None waits without a limit.

        >>> dispatcher = zd.DispatchServer()
        >>> dispatcher.stop()
        >>> dispatcher.join()
        True
        """
        return self._runtime.stopped.wait(seconds(timeout))

    @property
    def address(self) -> str:
        """ "host:port", with the port that was bound."""
        return self._runtime.address

    @property
    def _address(self) -> str:
        """The address, with "localhost" in place of 127.0.0.1. The name `_address` is the one in tf.data service."""
        return self.address.replace("127.0.0.1:", "localhost:")

    @property
    def target(self) -> str:
        """ "zmq://host:port", the target for coordinators and workers."""
        advertise = self._runtime.config.advertise
        where = self._address if advertise is None else advertised_address(advertise, split(self.address)[1])
        return f"zmq://{where}"

    @property
    def cancel_grace_s(self) -> float:
        """The `cancel_grace_s` of the config, which is the default of coordinators that get this server as their target."""
        return self._runtime.config.cancel_grace_s

    @property
    def credentials(self) -> Credentials:
        """The paths of this dispatcher's token and keys. A coordinator uses them when this server is passed to it as its target."""
        return self._runtime.credentials

    @property
    def num_workers(self) -> int:
        """The number of workers that are registered and not lost."""
        return self._runtime.num_workers

    def _num_workers(self) -> int:
        """Return `num_workers`. The name `_num_workers` is the one in tf.data service."""
        return self.num_workers

    def snapshot(self) -> BrokerSnapshot:
        """Return an immutable record of workers, coordinators and queues, as `zmqdist status` shows them. Waits for the loop.

        >>> with zd.DispatchServer() as dispatcher:
        ...     print(len(dispatcher.snapshot().workers))
        0
        """
        assert self._runtime.loop is not None
        return self._runtime.loop.run(self._runtime.broker.snapshot)

    def wait_for(self, ready: Callable[[frozenset[tuple[str, int]]], bool], timeout_s: float) -> bool:
        """Wait until `ready` returns True for the set of registered workers, each a (job, index). Return False after `timeout_s`.

        The loop calls `ready` after each event, so `ready` must not block.
        """
        runtime = self._runtime
        assert runtime.loop is not None
        is_ready = threading.Event()

        def check() -> None:
            if ready(frozenset(runtime.broker.membership.members)):
                is_ready.set()

        runtime.loop.call_soon(runtime.watchers.append, check)
        runtime.loop.call_soon(check)
        try:
            return is_ready.wait(timeout_s)
        finally:
            runtime.loop.call_soon(runtime.watchers.remove, check)

    def watch_members(self, fn: Callable[[frozenset[tuple[str, int]]], object]) -> None:
        """Have the loop call `fn` with the registered workers as (job, index): first now, then whenever a worker has joined or is lost.

        `fn` must not block. It is called until the server stops.
        """
        runtime = self._runtime
        assert runtime.loop is not None

        def check() -> None:
            fn(frozenset(runtime.broker.membership.members))

        def begin() -> None:
            runtime.member_watchers.append(check)
            check()

        runtime.loop.call_soon(begin)

    def serve_scaling(self, scaler: Scaler) -> None:
        """Use this launcher, which starts and ends the workers, for the RPC method `scale` (`zmqdist scale`)."""
        self._runtime.scaler = scaler

    def drain_reports(self) -> list[DrainReport]:
        """Return for each worker what would become of its values and work if it left. Waits at most DESCRIBED_S for the programs.

        >>> with zd.DispatchServer() as dispatcher:
        ...     print(dispatcher.drain_reports())
        []
        """
        return self._runtime.reporter.reports()

    def drain(self, job: str, index: int, grace_s: float) -> None:
        """Have a worker leave after it has finished its running functions, or after `grace_s`. Waits for the loop, not for the worker.

        >>> with zd.DispatchServer() as dispatcher:
        ...     with zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address)) as worker:
        ...         dispatcher.drain("worker", 0, grace_s=1.0)
        ...         worker.join()
        True

        Raises:
          NotFoundError: no worker of this name is registered.
        """
        assert self._runtime.loop is not None
        self._runtime.loop.run(self._runtime.drain, job, index, grace_s)

    def shutdown(self, grace_s: float = 0.0) -> None:
        """Request that all workers stop, wait at most `grace_s` + LEAVING_S until they have left, and stop the server. Idempotent.

        >>> dispatcher = zd.DispatchServer()
        >>> dispatcher.shutdown(grace_s=1.0)
        """
        loop = self._runtime.loop
        # `run` raises FailedPreconditionError if another thread has stopped the server meanwhile.
        with contextlib.suppress(errors.FailedPreconditionError):
            if loop is not None and not self._runtime.stopped.is_set():
                loop.run(lambda: self._runtime.shutdown(grace_s))
                self.join(grace_s + LEAVING_S)
        self.stop()

    def open_join(self, name: str, *, valid_s: float = JOIN_VALID_S, address: str = "", dispatcher: str = "") -> str:
        """Make a join ticket and return it: one line of text, with which one process joins as `name`. The ticket is a secret.

        Args:
          name: "worker:3" or "ps:0" for these tasks; "submit", "client" or "admin" for a program with this role.
          valid_s: seconds for which the ticket is valid.
          address: the "host:port" at which programs will connect to the process, if it is a ps or another server. A server refuses a ticket
            without an address.
          dispatcher: the "host:port" at which the joining process reaches this dispatcher. "" means the address in `target`.

        Raises:
          FailedPreconditionError: this dispatcher has no CURVE keys, or was not started.
          InvalidArgumentError: `name` or `address` has another form than these, or `valid_s` is out of range.
          ResourceExhaustedError: too many tokens are valid and unused.
        """
        runtime = self._runtime
        if runtime.loop is None:
            raise errors.FailedPreconditionError("this dispatcher was not started: call start() first")
        return runtime.loop.run(
            runtime.keys.open_join, name, dispatcher or self.target.partition("://")[2], valid_s, address
        )

    def report_exit(self, job: str, index: int, pid: int, exit_code: int | None, log: str = "") -> None:
        """Report that the process of a worker has ended, so that the dispatcher counts the worker as lost at once.

        Only the process that started the worker calls this, from any of its threads.
        """
        if self._runtime.loop is not None:
            event = ProcessExited(pid=pid, exit_code=exit_code, log=log, job=job, index=index)
            with contextlib.suppress(errors.FailedPreconditionError):
                self._runtime.loop.call_soon(self._runtime.handle, event)

    def report_gone(self, name: str, reason: str) -> None:
        """Report that a task such as "ps:1" has ended for good, so that programs do not wait for its restart."""
        self._runtime.gone[name] = reason

    def data_snapshot(self) -> DataSnapshot:
        """Return an immutable record of the data service: jobs, iterations, readers, workers, the journal.

        >>> with zd.DispatchServer() as dispatcher:
        ...     print(type(dispatcher.data_snapshot()).__name__)
        DataSnapshot
        """
        assert self._runtime.loop is not None
        return self._runtime.loop.run(self._runtime.data.snapshot)

    def data_tasks_by_worker(self) -> dict[str, int]:
        """Return the number of data tasks and snapshot streams of each worker, by the worker's name. Workers with neither are left out."""
        assert self._runtime.loop is not None
        return self._runtime.loop.run(self._runtime.data.task_counts)

    def snapshot_streams(self, path: str) -> list[Any]:
        """Return the streams of the distributed snapshot in folder `path`, each with `index`, `owner` and `state`.

        Raises:
          NotFoundError: the dispatcher knows no snapshot in this folder.
        """
        assert self._runtime.loop is not None
        return self._runtime.data.snapshots.streams(path)

    def _snapshot_streams(self, path: str) -> list[Any]:
        """Return `snapshot_streams(path)`. The name `_snapshot_streams` is the one in tf.data service."""
        return self.snapshot_streams(path)

    def __enter__(self) -> DispatchServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __del__(self) -> None:
        runtime = self.__dict__.get("_runtime")
        if runtime is not None and runtime.abandoned:
            in_background("zmqdist-dispatcher-stop", runtime.stop)


class _Runtime:
    """The part of a DispatchServer that the loop's thread refers to.

    Attributes:
      loop: the loop, which `open` makes; None before.
      stopped: set by `stop`, and by `shutdown` when the workers have left or its wait for them is over.
      scaler: the launcher that starts and ends the workers; None if the workers were started without a launcher in this process.
      undelivered: the number of messages that were not sent because their peer had disconnected.
      watchers: functions that the loop calls after each event.
      member_watchers: functions that the loop calls when workers have joined or were lost.
    """

    def __init__(self, config: DispatcherConfig, listener: int | None) -> None:
        self.config = config
        self._listener = listener
        self._pid = os.getpid()
        self.stopped = threading.Event()
        self.loop: Loop | None = None
        self.address = ""
        self._incarnation = secrets.randbits(62) | 1
        # A worker may still name a lease of an earlier dispatcher, so the lease numbers of two dispatchers must differ.
        self.broker = Broker(config, first_lease=(self._incarnation & 0xFFFFF) << 40)
        self.scaler: Scaler | None = None
        self.gone: dict[str, str] = {}
        """Why tasks other than workers do not start again, by their names."""
        self.undelivered = 0
        self._heap_trimmer = HeapTrimmer()
        self.watchers: list[Callable[[], None]] = []
        self.member_watchers: list[Callable[[], None]] = []
        self._due: float | None = None

    @property
    def credentials(self) -> Credentials:
        return Credentials(self.config.token_file, self.config.keys_dir, self.config.insecure)

    @property
    def num_workers(self) -> int:
        return 0 if self.stopped.is_set() else len(self.broker.membership.members)

    @property
    def abandoned(self) -> bool:
        """Whether the finalizer of a DispatchServer must stop this runtime, because the runtime runs in this process.

        A forked child has a copy of the runtime, but not the loop's thread.
        """
        return self.loop is not None and not self.stopped.is_set() and self._pid == os.getpid()

    def open(self) -> None:
        """Bind the port and start the loop."""
        config = self.config
        loop = Loop("zmqdist-dispatcher")
        service = self._service()
        try:
            self._hello = our_hello("server", self._incarnation, f"dispatcher pid {os.getpid()}")
            host = bindable(config.host)
            keys = self.keys = KeyService(self.credentials.server(host), config.work_dir)
            router = self._router = Router(loop, keys.security, self._hello)
            keys.attach(loop, router, service, self._peer_expelled)
            # Load the state in the journal before binding the port, so that no peer sees a part of the state.
            self.data = DataDispatcher(service, loop, data_rules(config), config.work_dir, config.snapshots_max)
            if self._listener is None:
                self.address = router.bind(join_address(host, config.port))
            else:
                self.address = router.bind_fd(self._listener)
        except BaseException:
            loop.stop()
            raise
        for kinds, roles in ((FROM_WORKERS, {"worker"}), (FROM_COORDINATORS, {"submit"})):
            for kind in kinds:
                router.on(kind, self._handle_message, frozenset(roles))
        router.on(Goodbye, self._handle_message)
        self.reporter = DrainReporter(loop, self.broker, self.data, router.send)  # type: ignore[arg-type]
        router.on(WorkDescribed, lambda peer, message, _: self.reporter.described(peer, message), frozenset({"submit"}))
        router.on_gone.append(self._peer_gone)
        self._relay = Relay(loop, router, self.broker.holder)
        service.register(RELAY, self._relay.read, roles=frozenset({"submit", "worker"}))
        CoordinationService(service, router, loop, self._incarnation, None)
        service.attach(router, loop, self._incarnation)
        loop.on_stop(service.close)
        self.loop = loop
        loop.start()

    def stop(self) -> None:
        self.stopped.set()
        if self.loop is not None:
            self.loop.stop()

    def _handle_message(self, peer: Peer, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, (Register, RegisterCoordinator)) and (problem := self._pickles_differ(peer)):
            log.warning("refused: %s", problem)
            self._perform([Send(peer, Refused(errors.FAILED_PRECONDITION, problem, final=True))])
            return
        if isinstance(message, Register):
            if misnamed := self.keys.name_problem(peer, message):
                self._perform([Send(peer, Refused(errors.PERMISSION_DENIED, misnamed, final=True))])
                return
            try:
                self.data.machine.admit(message.address)
            except errors.OpError as error:
                self._perform([Send(peer, Refused(error.error_code, error.message, final=True))])
                return
        self.handle(Heard(peer, message), watched=peer.fd >= 0)

    def _pickles_differ(self, peer: Peer) -> str:
        """Return why this peer and the cluster could not unpickle each other's functions, or "" if they can."""
        assert peer.hello is not None
        differ = pickles_differ(self._hello, peer.hello)
        versions = " and ".join(f"{part} {theirs} (the dispatcher {ours})" for part, theirs, ours in differ)
        return versions and (
            f"{peer.name} and this cluster cannot run each other's functions, which are sent as pickles: it has {versions}; "
            "install the same minor versions for all programs, workers and the dispatcher"
        )

    def _peer_gone(self, peer: Peer) -> None:
        """Record that a connection has ended. If the peer is a member on this host, begin to check whether its process has ended."""
        member = self.broker.membership.by_peer.get(peer)
        self.handle(PeerGone(peer))
        if member is not None and peer.hello is not None and peer.hello.host == host_identity():
            self._poll_process_end(member, PROCESS_END_POLL_S)

    def _peer_expelled(self, peer: Peer) -> None:
        """Tell the machine that the key of this peer was revoked. If the peer is a worker, the machine counts it as lost at once."""
        self.handle(PeerExpelled(peer, "its key was revoked"))

    def _poll_process_end(self, member: Member, pause_s: float) -> None:
        """Report the end of a disconnected member's process. If the process still exists, check again later.

        The first check may be too early, because a killed process loses its connections a little before it ends.
        """
        if self.broker.membership.members.get((member.job, member.index)) is not member or member.peer is not None:
            return  # the member is lost already, or has reconnected
        if not is_alive(member.pid):
            self.handle(ProcessExited(pid=member.pid, exit_code=None, job=member.job, index=member.index))
            return
        assert self.loop is not None
        next_poll = self.loop.now() + pause_s
        self.loop.set_timer((self, member), next_poll, lambda: self._poll_process_end(member, 2 * pause_s))

    def handle(self, event: BrokerEvent, *, watched: bool = True) -> None:
        """Pass an event to the machine and send the messages that the machine returns. Call it in the loop's thread."""
        loop = self.loop
        if loop is None:
            return
        self._perform(self.broker.handle(event, loop.now(), watched=watched))
        if self.broker.changes:
            self._report_members()
        self._heap_trimmer.update(self.broker.dispatch.queued, self._is_idle)
        for watcher in self.watchers:
            watcher()

    def _report_members(self) -> None:
        """Tell the data service which members have joined and which were lost, and call the member watchers."""
        changes, self.broker.changes = self.broker.changes, []
        for change in changes:
            match change:
                case MemberJoined(member, register):
                    identity = member.name, register.address, member.incarnation, tuple(register.tags)
                    self.data.joined(*identity, named=register.named)
                case MemberLost(member):
                    self.data.lost(member.incarnation, left=False)
        for watcher in self.member_watchers:
            watcher()

    def _is_idle(self) -> bool:
        return not any(load.leases for load in self.broker.dispatch.loads.values())

    def _perform(self, effects: list[Send]) -> None:
        for effect in effects:
            # The router drops a message to a disconnected peer. The machine learns of the disconnection from a PeerGone.
            if not self._router.send(effect.to, effect.message):  # type: ignore[arg-type]
                self.undelivered += 1
        due = self.broker.deadline
        if due != self._due:
            assert self.loop is not None
            self._due = due
            self.loop.set_timer(self, due, self._tick)

    def _tick(self) -> None:
        self._due = None
        self.handle(Ticked())

    # -- RPC methods -------------------------------------------------------------------------------------------

    def _service(self) -> RpcService:
        service = RpcService("dispatcher")
        service.register("status", self._status, inline=True)
        service.register("shutdown", self.shutdown, inline=True, roles=frozenset({"submit"}))
        service.register("scale", self._scale, roles=frozenset({"submit"}))
        service.register_later("drain", self._drain_reported, roles=frozenset({"submit"}))
        service.register("report_exit", self._report_exit, inline=True, roles=frozenset({"submit"}))
        service.register("gone", lambda: dict(self.gone), inline=True, roles=frozenset({"submit"}))
        return service

    def _status(self) -> dict[str, Any]:
        assert self.loop is not None
        now = self.loop.now()
        snapshot = self.broker.snapshot()
        last = snapshot.last_slot_death
        return {
            "address": self.address,
            "pid": os.getpid(),
            "queued": snapshot.queued,
            "workers": [
                {**_row(row), "idle_s": now - row.heard_at, "age_s": now - row.joined_at} for row in snapshot.workers
            ],
            "scaling": None if self.scaler is None else self.scaler.figures(),
            "coordinators": [_row(row) for row in snapshot.coordinators],
            "data": self.data.status(),
            "losses_count": snapshot.losses_count,
            "losses": [
                {"name": name, "reason": reason, "exit_code": code, "ago_s": now - at}
                for name, reason, code, at in snapshot.losses
            ],
            "slot_deaths": snapshot.slot_deaths,
            "last_slot_death": last and {"name": last[0], "exit_code": last[1], "ago_s": now - last[2]},
            "relayed": self._relay.pieces,
            "dropped": dict(self._router.dropped),
            "refused_handshakes": self._router.refused_handshakes,
        }

    def shutdown(self, grace_s: float) -> int:
        """Tell all workers to stop, and return their number. The server stops when they have left, or LEAVING_S after the grace."""
        if self.scaler is not None:
            self.scaler.close()
        members = list(self.broker.membership.members.values())
        assert self.loop is not None
        now = self.loop.now()
        for member in members:
            self._perform(self.broker.leave(member.job, member.index, grace_s, now) or [])
        self._stop_when_empty(now + grace_s + LEAVING_S)
        return len(members)

    def _stop_when_empty(self, until: float) -> None:
        assert self.loop is not None
        now = self.loop.now()
        if self.num_workers and now < until:
            self.loop.set_timer((self, "shutdown"), now + 0.05, lambda: self._stop_when_empty(until))
            return
        self.stopped.set()
        # The loop stops a little later, so that the reply to `shutdown` is sent first.
        self.loop.set_timer((self, "shutdown"), now + 0.2, self.loop.stop)

    def _scale(self, job: str, count: int, grace_s: float, force: bool) -> dict[str, Any]:
        if self.scaler is None:
            raise errors.FailedPreconditionError(NO_LAUNCHER)
        return self.scaler.scale(job, count, grace_s, force)

    def _drain_reported(
        self, call: PendingCall, job: str, index: int, grace_s: float, force: bool = False, dry_run: bool = False
    ) -> None:
        """Serve the RPC method `drain`: tell a worker to leave if that is allowed, and reply with its drain report.

        The worker is not drained if `dry_run` is set, or if the drain would lose something and `force` is not set.
        """

        def finish(reports: list[DrainReport]) -> None:
            if not reports:
                call.fail(not_registered(job, index, self.broker.membership.members))
                return
            refused = [] if force else [report.worker for report in reports if report.losses]
            if not refused and not dry_run:
                self.drain(job, index, grace_s)
            call.reply({"refused": refused, "reports": [report.to_dict() for report in reports]})

        self.reporter.ask([(job, index)], finish)

    def drain(self, job: str, index: int, grace_s: float) -> None:
        """Tell a worker to leave within `grace_s`. Raises NotFoundError if no worker of this name is registered."""
        assert self.loop is not None
        effects = self.broker.leave(job, index, grace_s, self.loop.now())
        if effects is None:
            raise not_registered(job, index, self.broker.membership.members)
        self._perform(effects)

    def _report_exit(self, job: str, index: int, pid: int, exit_code: int | None, log: str) -> None:
        self.handle(ProcessExited(pid=pid, exit_code=exit_code, log=log, job=job, index=index))


def data_rules(config: DispatcherConfig) -> Rules:
    """Return the part of the config that the data service's dispatcher uses."""
    return Rules(
        worker_timeout_s=config.worker_timeout_s,
        client_timeout_s=config.client_timeout_s,
        gc_check_s=config.gc_check_s,
        gc_timeout_s=config.gc_timeout_s,
        gc_dynamic=config.gc_dynamic_sharding_jobs,
        fault_tolerant=config.fault_tolerant_mode,
        worker_addresses=tuple(config.worker_addresses or ()),
        deployment_mode=str(config.deployment_mode or "").upper(),
    )


def _row(row: Any) -> dict[str, Any]:
    """Return a row of a snapshot as a dict, without the fields that are times of this process's monotonic clock."""
    return {key: value for key, value in asdict(row).items() if not key.endswith("_at")}

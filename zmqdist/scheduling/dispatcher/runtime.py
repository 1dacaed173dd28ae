"""The runtime of machine.py: one socket, one loop, and the RPC methods of the dispatcher.

`DispatchServer` (servers/) is its class for users, and gives it the part that it hosts beside the
queue of functions.

The runtime passes each message to the machine, and sends the messages that the machine returns. The
runtime decides nothing itself and never unpickles a payload.

The loop's thread refers to the runtime and not to the DispatchServer. So a DispatchServer that the
program has dropped is garbage-collected, and its finalizer stops the runtime.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.addresses import join_address
from zmqdist.coordination.primitives_service import PrimitivesService
from zmqdist.coordination.service import CoordinationService
from zmqdist.events import Heard, PeerExpelled, PeerGone, ProcessExited, Send, Ticked
from zmqdist.messages import (
    ActorExited,
    ActorKnown,
    ActorReady,
    ActorsOwned,
    Beat,
    CancelWork,
    CreateActor,
    Define,
    Done,
    DropActor,
    EndRound,
    FindActor,
    Forget,
    Goodbye,
    LeasesReturned,
    Leave,
    Message,
    ProgramFacts,
    Refused,
    Register,
    RegisterCoordinator,
    ResultReceived,
    ServerFacts,
    SlotsLost,
    SlotsWaiting,
    Submit,
    WatchActor,
    WorkDescribed,
    WorkerFacts,
)
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.scheduling.dispatcher.drain_report import DrainReport, DrainReporter, not_registered
from zmqdist.scheduling.dispatcher.facts_record import FactsRecord
from zmqdist.scheduling.dispatcher.key_service import KeyService
from zmqdist.scheduling.dispatcher.log_stream import LogStream
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.dispatcher.machine import Event as BrokerEvent
from zmqdist.scheduling.dispatcher.membership_and_leases import MemberJoined, MemberLost
from zmqdist.scheduling.dispatcher.questions import Questions
from zmqdist.scheduling.dispatcher.relay import Relay
from zmqdist.scheduling.shared.config import DispatcherConfig
from zmqdist.scheduling.shared.parts import DispatcherPart
from zmqdist.scheduling.shared.store import RELAY
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop
from zmqdist.transport.memory_limits import TRIM_WORTH_ITEMS, trim_heap, usage
from zmqdist.transport.own_address import bindable
from zmqdist.transport.process_ends import watch_process_end
from zmqdist.transport.router import NAME_CHARS_MAX, Peer, Router
from zmqdist.wire.hello import host_identity, our_hello, pickles_differ

P = TypeVar("P", bound=DispatcherPart)

log = logging.getLogger("zmqdist.scheduling")

LEAVING_S = 1.0
"""Seconds for which `shutdown` waits for workers after their grace has passed."""

FROM_WORKERS = (
    Register,
    Done,
    LeasesReturned,
    SlotsLost,
    SlotsWaiting,
    Beat,
    Leave,
    ActorReady,
    ActorExited,
    WorkerFacts,
)
FROM_COORDINATORS = (
    RegisterCoordinator,
    Define,
    Forget,
    Submit,
    CancelWork,
    EndRound,
    ResultReceived,
    CreateActor,
    ActorsOwned,
    DropActor,
    FindActor,
    ActorKnown,
    WatchActor,
    ProgramFacts,
)
FROM_BOTH = (ServerFacts,)


class DispatcherRuntime(Generic[P]):
    """The part of a DispatchServer that the loop's thread refers to.

    Attributes:
      opened: whether `open` has succeeded.
      loop, part: the loop, and what the dispatcher hosts beside its queue. `open` makes them.
      stopped: set by `stop`, and by `shutdown` when the workers have left or its wait for them is
        over.
      scaler: the launcher that starts and ends the workers; None if the workers were started
        without a launcher in this process.
      undelivered: the number of messages that were not sent because their peer had disconnected.
      watchers: functions that the loop calls after each event.
      member_watchers: functions that the loop calls when workers have joined or were lost.
    """

    def __init__(
        self,
        config: DispatcherConfig,
        listener: int | None,
        make_part: Callable[[RpcService, Loop], P],
    ) -> None:
        self.config = config
        self._make_part = make_part
        self._listener = listener
        self._pid = os.getpid()
        self.stopped = threading.Event()
        self.opened = False
        self.address = ""
        self._incarnation = secrets.randbits(62) | 1
        # A worker may still name a lease of an earlier dispatcher, so the lease numbers of two
        # dispatchers must differ.
        # No earlier dispatcher was at a port that is chosen now, so none has placed actors.
        silent_until = time.monotonic() + config.lease_s if config.port else 0.0
        self.broker = Broker(
            config,
            first_lease=(self._incarnation & 0xFFFFF) << 40,
            first_actor=int(time.time()) << 20,
            silent_until=silent_until,
        )
        self._record = FactsRecord(self.broker)
        self._began_at = time.monotonic()
        self.scaler: Scaler | None = None
        self.gone: dict[str, str] = {}
        """Why tasks other than workers do not start again, by their names."""
        self.undelivered = 0
        self._heap_grown = False
        """Whether the queue was so long that the heap is trimmed once it is empty."""
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
        """Whether the finalizer of a DispatchServer must stop this runtime, because the runtime
        runs in this process.

        A forked child has a copy of the runtime, but not the loop's thread.
        """
        return self.opened and not self.stopped.is_set() and self._pid == os.getpid()

    def open(self) -> None:
        """Bind the port and start the loop."""
        config = self.config
        loop = Loop("zmqdist-dispatcher")
        service = self._rpc = self._service()
        try:
            self._hello = our_hello("server", self._incarnation, f"dispatcher pid {os.getpid()}")
            host = bindable(config.host)
            keys = self.keys = KeyService(self.credentials.server(host), config.work_dir)
            router = self._router = Router(loop, keys.security, self._hello)
            keys.attach(loop, router, service, self._peer_expelled)
            # Load the state in the journal before binding the port, so that no peer sees a part of
            # the state.
            self.part: P = self._make_part(service, loop)
            if self._listener is None:
                self.address = router.bind(join_address(host, config.port))
            else:
                self.address = router.bind_fd(self._listener)
        except BaseException:
            loop.stop()
            raise
        for kinds, roles in (
            (FROM_WORKERS, {"worker"}),
            (FROM_COORDINATORS, {"submit"}),
            (FROM_BOTH, {"worker", "submit"}),
        ):
            for kind in kinds:
                router.on(kind, self._handle_message, frozenset(roles))
        router.on(Goodbye, self._handle_message)
        self.reporter = DrainReporter(loop, self.broker, self.part, router.send)  # type: ignore[arg-type]
        router.on(
            WorkDescribed,
            lambda peer, message, _: self.reporter.described(peer, message),
            frozenset({"submit"}),
        )
        router.on_gone.append(self._note_disconnect)
        router.on_refused.append(self._note_refusal)
        self._relay = Relay(loop, router, self.broker.holder)
        service.register(RELAY, self._relay.read, roles=frozenset({"submit", "worker"}))
        questions = Questions(loop, router, service, self.broker.membership)
        logs = LogStream(loop, router, service, questions)
        self.member_watchers.append(logs.members_changed)
        CoordinationService(service, router, loop, self._incarnation, None)
        # a dispatcher at a free port has no predecessor
        PrimitivesService(
            service, router, loop, self._incarnation, config.lease_s, is_first=config.port == 0
        )
        service.attach(router, loop, self._incarnation)
        loop.on_stop(service.close)
        self.loop, self.opened = loop, True
        loop.start()

    def stop(self) -> None:
        self.stopped.set()
        if self.opened:
            self.loop.stop()

    def _handle_message(self, peer: Peer, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, (Register, RegisterCoordinator)) and (
            problem := self._pickles_differ(peer)
        ):
            log.warning("refused: %s", problem)
            self._perform([Send(peer, Refused(errors.FAILED_PRECONDITION, problem, final=True))])
            return
        if isinstance(message, Register):
            if misnamed := self.keys.name_problem(peer, message):
                self._perform([Send(peer, Refused(errors.PERMISSION_DENIED, misnamed, final=True))])
                return
            try:
                self.part.admit(message.address)
            except errors.OpError as error:
                self._perform([Send(peer, Refused(error.error_code, error.message, final=True))])
                return
        self.handle(Heard(peer, message), watched=peer.fd >= 0)

    def _pickles_differ(self, peer: Peer) -> str:
        """Return why this peer and the cluster could not unpickle each other's functions, or "" if
        they can."""
        assert peer.hello is not None
        differ = pickles_differ(self._hello, peer.hello)
        versions = " and ".join(
            f"{part} {theirs} (the dispatcher {ours})" for part, theirs, ours in differ
        )
        return versions and (
            f"{peer.name} and this cluster cannot run each other's functions, which are sent as "
            f"pickles: it has {versions}; "
            "install the same minor versions for all programs, workers and the dispatcher"
        )

    def _note_disconnect(self, peer: Peer) -> None:
        """Record that a connection has ended. If the peer is a member on this host, begin to check
        whether its process has ended."""
        member = self.broker.membership.by_peer.get(peer)
        self.handle(PeerGone(peer))
        if member is not None and peer.hello is not None and peer.hello.host == host_identity():
            members, name = self.broker.membership.members, (member.job, member.index)
            watch_process_end(
                self.loop,
                (self, member),
                member.pid,
                # until the member is lost already, or has reconnected
                lambda: members.get(name) is member and member.peer is None,
                lambda: self.handle(
                    ProcessExited(
                        pid=member.pid, exit_code=None, job=member.job, index=member.index
                    )
                ),
            )

    def _peer_expelled(self, peer: Peer) -> None:
        """Tell the machine that the key of this peer was revoked. If the peer is a worker, the
        machine counts it as lost at once."""
        self.handle(PeerExpelled(peer, "its key was revoked"))

    def handle(self, event: BrokerEvent, *, watched: bool = True) -> None:
        """Pass an event to the machine and send the messages that the machine returns. Call it in
        the loop's thread."""
        if not self.opened:
            return
        self._perform(self.broker.handle(event, self.loop.now(), watched=watched))
        if self.broker.membership.changes:
            self._report_members()
        queued = self.broker.dispatch.placement.queued
        if queued >= TRIM_WORTH_ITEMS:
            self._heap_grown = True
        elif self._heap_grown and not queued:
            self._trim_heap_if_idle()
        for watcher in self.watchers:
            watcher()

    def _trim_heap_if_idle(self) -> None:
        if not any(load.leases for load in self.broker.dispatch.loads.values()):
            self._heap_grown = False
            trim_heap()

    def _report_members(self) -> None:
        """Tell the data service which members have joined and which were lost, and call the member
        watchers."""
        membership = self.broker.membership
        changes, membership.changes = membership.changes, []
        for change in changes:
            match change:
                case MemberJoined(member, register):
                    identity = (
                        member.name,
                        register.address,
                        member.incarnation,
                        tuple(register.tags),
                    )
                    self.part.joined(*identity, named=register.named)
                case MemberLost(member):
                    self.part.lost(member.incarnation, left=False)
        for watcher in self.member_watchers:
            watcher()

    def _perform(self, effects: list[Send]) -> None:
        for effect in effects:
            # The router drops a message to a disconnected peer. The machine learns of the
            # disconnection from a PeerGone.
            if not self._router.send(effect.to, effect.message):  # type: ignore[arg-type]
                self.undelivered += 1
            if type(effect.message) is Refused:
                self._note_refusal(effect.to, effect.message.message)
        due = self.broker.deadline
        if due != self._due:
            self._due = due
            self.loop.set_timer(self, due, self._tick)

    def _note_refusal(self, peer: Any, reason: str) -> None:
        self.broker.dispatch.facts.note_refusal(peer.name, reason, self.loop.now())

    def _tick(self) -> None:
        self._due = None
        self.handle(Ticked())

    # -- RPC methods -------------------------------------------------------------------------------

    def _service(self) -> RpcService:
        service = RpcService("dispatcher", is_observable=True)
        service.register("facts", self._facts, inline=True)
        service.register("shutdown", self.shutdown, inline=True, roles=frozenset({"submit"}))
        service.register("scale", self._scale, roles=frozenset({"submit"}))
        service.register_later("drain", self._drain_reported, roles=frozenset({"submit"}))
        service.register("report_exit", self._report_exit, inline=True, roles=frozenset({"submit"}))
        service.register("gone", lambda: dict(self.gone), inline=True, roles=frozenset({"submit"}))
        return service

    def _facts(self, since: int = 0, timeline: bool = False) -> dict[str, Any]:
        now = self.loop.now()
        if timeline:
            self._perform(self.broker.observe(now))
        unix_s = time.time()
        record = self._record.make(since, timeline=timeline, now=now, to_unix_s=unix_s - now)
        programs = {
            session.coordinator: session.peer for session in self.broker.dispatch.sessions.values()
        }
        for row in record["coordinators"]:
            row |= _program(programs[row["coordinator"]])
        return record | {
            "at": unix_s,
            "uptime_s": now - self._began_at,
            "address": self.address,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "rss_bytes": usage(os.getpid())[0],
            "scaling": None if self.scaler is None else self.scaler.figures(),
            "data": self.part.status(),
            **self.broker.servers.record(self._rpc.facts()),
            "relayed": self._relay.pieces,
            "dropped": dict(self._router.dropped),
            "refused_handshakes": self._router.refused_handshakes,
        }

    def shutdown(self, grace_s: float) -> int:
        """Tell all workers to stop, and return their number. The server stops when they have left,
        or LEAVING_S after the grace."""
        if self.scaler is not None:
            self.scaler.close()
        members = list(self.broker.membership.members.values())
        now = self.loop.now()
        for member in members:
            self._perform(self.broker.leave(member.job, member.index, grace_s, now) or [])
        self._stop_when_empty(now + grace_s + LEAVING_S)
        return len(members)

    def _stop_when_empty(self, until: float) -> None:
        now = self.loop.now()
        if self.num_workers and now < until:
            self.loop.set_timer(
                (self, "shutdown"), now + 0.05, lambda: self._stop_when_empty(until)
            )
            return
        self.stopped.set()
        # The loop stops a little later, so that the reply to `shutdown` is sent first.
        self.loop.set_timer((self, "shutdown"), now + 0.2, self.loop.stop)

    def _scale(self, job: str, count: int, grace_s: float, force: bool) -> dict[str, Any]:
        if self.scaler is None:
            raise errors.FailedPreconditionError(NO_LAUNCHER)
        return self.scaler.scale(job, count, grace_s, force)

    def _drain_reported(
        self,
        call: PendingCall,
        job: str,
        index: int,
        grace_s: float,
        force: bool = False,
        dry_run: bool = False,
    ) -> None:
        """Serve the RPC method `drain`: tell a worker to leave if that is allowed, and reply with
        its drain report.

        The worker is not drained if `dry_run` is set, or if the drain would lose something and
        `force` is not set.
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
        """Tell a worker to leave within `grace_s`. Raises NotFoundError if no worker of this name
        is registered."""
        effects = self.broker.leave(job, index, grace_s, self.loop.now())
        if effects is None:
            raise not_registered(job, index, self.broker.membership.members)
        self._perform(effects)

    def _report_exit(self, job: str, index: int, pid: int, exit_code: int | None, log: str) -> None:
        self.handle(ProcessExited(pid=pid, exit_code=exit_code, log=log, job=job, index=index))


def _program(peer: Any) -> dict[str, Any]:
    """Return the name, host and pid of a program, which its hello has as "coordinator host:pid"."""
    name = "" if peer.hello is None else peer.hello.name[:NAME_CHARS_MAX]
    host, _, pid = name.rpartition(" ")[2].rpartition(":")
    return {"name": name, "host": host, "pid": int(pid) if pid.isdecimal() else 0}


NO_LAUNCHER = (
    "no launcher holds the workers of this dispatcher, so it cannot start or end any: start more "
    "with `zmqdist worker`, end one with "
    "`zmqdist drain`, or use what started them (kubectl scale, for instance)"
)


class Scaler(Protocol):
    """A launcher of workers in the process of the dispatcher."""

    def scale(self, job: str, count: int, grace_s: float, force: bool) -> dict[str, Any]:
        """Set the wanted size of a job, and return the launcher's decision. May wait for a moment.

        If values or work would be lost with the workers that would have to leave, and `force` is
        False, nothing changes. Then `refused` of the decision has the names of these workers.

        Raises:
          OpError: the launcher refuses the size, and nothing has changed.
        """

    def figures(self) -> dict[str, Any]:
        """Return the wanted size and its bounds, for the RPC method `facts`. Does not wait."""

    def close(self) -> None:
        """Tell the launcher to start and end no more workers, because the cluster shuts down. Does
        not wait."""

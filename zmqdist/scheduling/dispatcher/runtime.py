"""The dispatcher: one socket, the broker machine, and what can be asked of it by RPC.

The runtime of broker.py: messages go in, what comes out is sent. It decides nothing and never looks into a payload.

The loop's thread knows the runtime alone, so that a server which nobody refers to any more is collected, and stops.
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
from zmqdist.background import in_background
from zmqdist.cluster.addresses import advertised_address
from zmqdist.coordination.service import CoordinationService
from zmqdist.data.service.dispatcher.machine.snapshot import DataSnapshot
from zmqdist.data.service.dispatcher.machine.tables import Rules
from zmqdist.data.service.dispatcher.runtime import DataDispatcher
from zmqdist.events import Heard, PeerGone, ProcessExited, Send, Ticked
from zmqdist.messages import (
    Beat,
    Define,
    Done,
    EndGeneration,
    Enlist,
    Forget,
    Goodbye,
    Leave,
    Message,
    Refused,
    Register,
    Returned,
    SlotsLost,
    Submit,
    Taken,
    Withdraw,
)
from zmqdist.rpc.service import RpcService
from zmqdist.scheduling.dispatcher.broker import Broker, BrokerSnapshot
from zmqdist.scheduling.dispatcher.broker import Event as BrokerEvent
from zmqdist.scheduling.dispatcher.config import DispatcherConfig
from zmqdist.scheduling.dispatcher.heap_trimming import MemoryKeeper
from zmqdist.scheduling.dispatcher.membership import Member, MemberJoined, MemberLost
from zmqdist.scheduling.dispatcher.relay import Relay
from zmqdist.scheduling.worker.fetch import RELAY
from zmqdist.transport.address import join, split
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop
from zmqdist.transport.own_address import bindable
from zmqdist.transport.processes import is_alive
from zmqdist.transport.router import Peer, Router
from zmqdist.wire.hello import host_identity, our_hello, pickles_differ

log = logging.getLogger("zmqdist.scheduling")

LOOK_FOR_END_S = 0.005

LEAVING_S = 1.0
"""What workers that were told to leave take beyond their grace."""

FROM_WORKERS = (Register, Done, Returned, SlotsLost, Beat, Leave)
FROM_COORDINATORS = (Enlist, Define, Forget, Submit, Withdraw, EndGeneration, Taken)


class DispatchServer:
    """The broker: workers register with it, coordinators schedule on it.

    Args:
      config: a DispatcherConfig; None: a free port on loopback.
      start: begin at once; else `start()` does.
      listener: descriptor of a TCP socket that listens already, in place of the config's address; it is the server's from then on.

    Stop it, use it in a with-statement, or drop it: that stops it in the background.

    Raises (from `start`):
      UnknownError: the port could not be bound (in use, not an address of this machine).
      FailedPreconditionError: the address needs keys; or it was stopped before; or another dispatcher has its work_dir.
      DataLossError: the journal in its work_dir is damaged. Nothing is overwritten.
    """

    def __init__(
        self, config: DispatcherConfig | None = None, start: bool = True, *, listener: int | None = None
    ) -> None:
        self._runtime = _Runtime(config or DispatcherConfig(), listener)
        self._lock = threading.Lock()
        if start:
            self.start()

    # -- for users ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind and serve; returns when workers and coordinators can connect. A second start does nothing."""
        with self._lock:
            if self._runtime.stopped.is_set():
                raise errors.FailedPreconditionError("Server cannot be started after it has been stopped")
            if self._runtime.loop is None:
                self._runtime.open()

    def stop(self) -> None:
        """End it at once; workers go on for half a lease and look for another dispatcher at its address. Idempotent.

        `shutdown(grace_s)` ends the workers first.
        """
        with self._lock:
            self._runtime.stop()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until it has been stopped. False when `timeout` seconds passed first."""
        return self._runtime.stopped.wait(timeout)

    @property
    def address(self) -> str:
        """ "host:port", the real one."""
        return self._runtime.address

    @property
    def _address(self) -> str:
        """As tf.data service has it: "localhost" for the loopback."""
        return self.address.replace("127.0.0.1:", "localhost:")

    @property
    def target(self) -> str:
        """ "zmq://host:port", what coordinators and workers are given."""
        advertise = self._runtime.config.advertise
        where = self._address if advertise is None else advertised_address(advertise, split(self.address)[1])
        return f"{self._runtime.config.protocol or 'zmq'}://{where}"

    @property
    def credentials(self) -> Credentials:
        """Where its secret is, for a coordinator that is given this server as its target."""
        return self._runtime.credentials

    @property
    def num_workers(self) -> int:
        """Workers that are registered and not lost."""
        return self._runtime.num_workers

    def _num_workers(self) -> int:
        """As tf.data service has it."""
        return self.num_workers

    def snapshot(self) -> BrokerSnapshot:
        """An immutable record of workers, coordinators and queues; what `zmqdist status` shows."""
        assert self._runtime.loop is not None
        return self._runtime.loop.run(self._runtime.broker.snapshot)

    def wait_for(self, ready: Callable[[frozenset[tuple[str, int]]], bool], timeout_s: float) -> bool:
        """Wait until `ready` says so of the (job, index) of the registered workers; it is asked after each event.

        Returns:
          False when `timeout_s` passed first.
        """
        runtime = self._runtime
        assert runtime.loop is not None
        answered = threading.Event()

        def look() -> None:
            if ready(frozenset(runtime.broker.membership.members)):
                answered.set()

        runtime.loop.call_soon(runtime.watchers.append, look)
        runtime.loop.call_soon(look)
        try:
            return answered.wait(timeout_s)
        finally:
            runtime.loop.call_soon(runtime.watchers.remove, look)

    def watch_members(self, fn: Callable[[frozenset[tuple[str, int]]], object]) -> None:
        """Have `fn` called with the (job, index) of the registered workers: now, and whenever one has joined or was lost.

        In the loop's thread, so it must not wait.
        """
        runtime = self._runtime
        assert runtime.loop is not None

        def look() -> None:
            fn(frozenset(runtime.broker.membership.members))

        def begin() -> None:
            runtime.member_watchers.append(look)
            look()

        runtime.loop.call_soon(begin)

    def shutdown(self, grace_s: float = 0.0) -> None:
        """Tell all workers to leave, wait until they have, at most a little longer than `grace_s`, and stop. Idempotent."""
        loop = self._runtime.loop
        with contextlib.suppress(errors.FailedPreconditionError):  # it was stopped meanwhile
            if loop is not None and not self._runtime.stopped.is_set():
                loop.run(lambda: self._runtime.shutdown(grace_s))
                self.join(grace_s + LEAVING_S)
        self.stop()

    def report_exit(self, job: str, index: int, pid: int, exit_code: int | None, log: str = "") -> None:
        """Somebody saw a worker's process end, and says so before its connection does. From any thread, also when this was stopped."""
        if self._runtime.loop is not None:
            event = ProcessExited(pid=pid, exit_code=exit_code, log=log, job=job, index=index)
            with contextlib.suppress(errors.FailedPreconditionError):
                self._runtime.loop.call_soon(self._runtime.handle, event)

    def data_snapshot(self) -> DataSnapshot:
        """An immutable record of what the data service holds: jobs, iterations, readers, workers, the journal."""
        assert self._runtime.loop is not None
        return self._runtime.loop.run(self._runtime.data.snapshot)

    def snapshot_streams(self, path: str) -> list[Any]:
        """The streams of a distributed snapshot: `index`, `owner` and `state` of each. Raises NotFoundError."""
        assert self._runtime.loop is not None
        return self._runtime.loop.run(lambda: self._runtime.data.snapshots.streams(path))

    def _snapshot_streams(self, path: str) -> list[Any]:
        """As tf.data service has it."""
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
    """What the loop's thread knows of a DispatchServer.

    Attributes:
      loop: None before `open`.
      stopped: set by `stop`, or because somebody asked for it by RPC.
      watchers: called in the loop after each event.
      member_watchers: called in the loop when workers have joined or were lost.
    """

    def __init__(self, config: DispatcherConfig, listener: int | None) -> None:
        self.config = config
        self._listener = listener
        self._pid = os.getpid()
        self.stopped = threading.Event()
        self.loop: Loop | None = None
        self.address = ""
        self._incarnation = secrets.randbits(62) | 1
        # Lease numbers of two lives must not meet: a worker may still name one of the life before.
        self.broker = Broker(config, first_lease=(self._incarnation & 0xFFFFF) << 40)
        self.undelivered = 0
        self._memory = MemoryKeeper()
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
        """Whether it runs, in this process: nothing of it does in a child that was forked from it."""
        return self.loop is not None and not self.stopped.is_set() and self._pid == os.getpid()

    def open(self) -> None:
        """Bind and serve."""
        config = self.config
        loop = Loop("zmqdist-dispatcher")
        service = self._service()
        try:
            self._hello = our_hello("server", self._incarnation, f"dispatcher pid {os.getpid()}")
            host = bindable(config.host)
            router = self._router = Router(loop, self.credentials.server(host), self._hello)
            # What a journal has is there before anybody can ask for it.
            self.data = DataDispatcher(service, loop, data_rules(config), config.work_dir, config.snapshots_max)
            if self._listener is None:
                self.address = router.bind(join(host, config.port))
            else:
                self.address = router.bind_fd(self._listener)
        except BaseException:
            loop.stop()
            raise
        for kinds, roles in ((FROM_WORKERS, {"worker"}), (FROM_COORDINATORS, {"submit"})):
            for kind in kinds:
                router.on(kind, self._heard, frozenset(roles))
        router.on(Goodbye, self._heard)
        router.on_gone.append(self._gone)
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

    def _heard(self, peer: Peer, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, (Register, Enlist)) and (problem := self._unreadable(peer)):
            log.warning("refused: %s", problem)
            self._perform([Send(peer, Refused(errors.FAILED_PRECONDITION, problem, final=True))])
            return
        if isinstance(message, Register):
            try:
                self.data.splits.admit(message.address)
            except errors.OpError as error:
                self._perform([Send(peer, Refused(error.error_code, error.message, final=True))])
                return
        self.handle(Heard(peer, message), watched=peer.fd >= 0)

    def _unreadable(self, peer: Peer) -> str:
        """Why workers and programs of this cluster could not run what is pickled by this one, or it what they pickle; "" if they can."""
        assert peer.hello is not None
        differ = pickles_differ(self._hello, peer.hello)
        versions = " and ".join(f"{what} {theirs} (the dispatcher {ours})" for what, theirs, ours in differ)
        return versions and (
            f"{peer.name} and this cluster cannot run each other's functions, which travel as pickles: it has {versions}; "
            "install the same minor versions for all programs, workers and the dispatcher"
        )

    def _gone(self, peer: Peer) -> None:
        """Where the process is of this host the kernel knows whether it has ended or only lost its connection."""
        member = self.broker.membership.by_peer.get(peer)
        self.handle(PeerGone(peer))
        if member is not None and peer.hello is not None and peer.hello.host == host_identity():
            self._look_for_its_end(member, LOOK_FOR_END_S)

    def _look_for_its_end(self, member: Member, pause_s: float) -> None:
        """When a process is killed its connections go first; that it has ended is seen a little later."""
        if self.broker.membership.members.get((member.job, member.index)) is not member or member.peer is not None:
            return  # lost, or back
        if not is_alive(member.pid):
            self.handle(ProcessExited(pid=member.pid, exit_code=None, job=member.job, index=member.index))
            return
        assert self.loop is not None
        again = self.loop.now() + pause_s
        self.loop.set_timer((self, member), again, lambda: self._look_for_its_end(member, 2 * pause_s))

    def handle(self, event: BrokerEvent, *, watched: bool = True) -> None:
        """Have the broker decide. In the loop."""
        loop = self.loop
        if loop is None:
            return
        self._perform(self.broker.handle(event, loop.now(), watched=watched))
        if self.broker.changes:
            self._tell_data()
        self._memory.look(self.broker.dispatch.queued, self._nothing_out)
        for look in self.watchers:
            look()

    def _tell_data(self) -> None:
        """Who has come and who has gone."""
        changes, self.broker.changes = self.broker.changes, []
        for change in changes:
            match change:
                case MemberJoined(member, register):
                    who = member.name, register.address, member.incarnation, tuple(register.tags)
                    self.data.joined(*who, named=register.named)
                case MemberLost(member):
                    self.data.lost(member.incarnation, left=False)
        for told in self.member_watchers:
            told()

    def _nothing_out(self) -> bool:
        return not any(hands.leases for hands in self.broker.dispatch.hands.values())

    def _perform(self, effects: list[Send]) -> None:
        for effect in effects:
            # Not sent: the peer has gone, which comes as an event of its own and is decided about there.
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

    # -- what can be asked by RPC -------------------------------------------------------------------------------

    def _service(self) -> RpcService:
        service = RpcService("dispatcher")
        service.register("status", self._status, inline=True)
        service.register("shutdown", self.shutdown, inline=True, roles=frozenset({"submit"}))
        service.register("drain", self._drain, inline=True, roles=frozenset({"submit"}))
        service.register("report_exit", self._report_exit, inline=True, roles=frozenset({"submit"}))
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
        """Tell all workers to leave and stop when they have, or after the grace. Returns how many there are."""
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
        self.loop.set_timer((self, "shutdown"), now + 0.2, self.loop.stop)  # the answer has to leave first

    def _drain(self, job: str, index: int, grace_s: float) -> None:
        assert self.loop is not None
        effects = self.broker.leave(job, index, grace_s, self.loop.now())
        if effects is None:
            names = ", ".join(row.name for row in self.broker.snapshot().workers) or "none"
            raise errors.NotFoundError(f"no worker {job}:{index} here; there are: {names}")
        self._perform(effects)

    def _report_exit(self, job: str, index: int, pid: int, exit_code: int | None, log: str) -> None:
        self.handle(ProcessExited(pid=pid, exit_code=exit_code, log=log, job=job, index=index))


def data_rules(config: DispatcherConfig) -> Rules:
    """The figures of the data service."""
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
    """The figures of a row but for its clock times, which mean nothing in another process."""
    return {key: value for key, value in asdict(row).items() if not key.endswith("_at")}

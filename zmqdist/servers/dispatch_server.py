"""`DispatchServer`: the dispatcher of a cluster for users, with the queue of functions and the data
service."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from zmqdist import errors
from zmqdist.addresses import advertised_address
from zmqdist.background import in_background
from zmqdist.clock import duration, seconds
from zmqdist.data.service.dispatcher.machine.snapshot import DataSnapshot
from zmqdist.data.service.dispatcher.machine.tables import Rules
from zmqdist.data.service.dispatcher.runtime import DataDispatcher
from zmqdist.events import ProcessExited
from zmqdist.field_types import checked, checks_options, safe_repr
from zmqdist.limits import JOIN_VALID_S
from zmqdist.rpc.service import RpcService
from zmqdist.scheduling.dispatcher.drain_report import DrainReport
from zmqdist.scheduling.dispatcher.machine import BrokerSnapshot
from zmqdist.scheduling.dispatcher.runtime import LEAVING_S, DispatcherRuntime, Scaler
from zmqdist.scheduling.shared.config import DispatcherConfig, config_of
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.endpoint import split
from zmqdist.transport.loop import Loop


class DispatchServer:
    """The dispatcher of a cluster, in this process: workers register with it, and coordinators
    schedule functions through it.

    >>> with zd.DispatchServer() as dispatcher:
    ...     print(dispatcher.target.startswith("zmq://"))
    True

    The dispatcher runs in a thread of its own. Stop it with `stop`, or use it in a with-statement.
    A server to which the program no longer refers stops in the background. In a script
    `local_cluster` is simpler; on several hosts use `zmqdist dispatcher` or `zmqdist launch`.

    Args:
      config: a DispatcherConfig. None means the config with `fields`, by default a free port on
        loopback.
      start: whether the constructor starts the server. If False, call `start()` later.
      listener: the descriptor of a listening TCP socket, which the server then owns and uses in
        place of the config's address.
      fields: fields of the config, as in TensorFlow 2.3: `DispatchServer(port=0)`.

    Raises (from `start`):
      UnknownError: the server could not bind the port, because it is in use or the address does not
        belong to this host.
      FailedPreconditionError: the address needs keys, the server was stopped before, or another
        dispatcher uses its work_dir.
      DataLossError: the journal in the work_dir is damaged. The server overwrites no file.
    """

    @checks_options("DispatchServer()", DispatcherConfig.__init__)
    @checked
    def __init__(
        self,
        config: DispatcherConfig | None = None,
        start: bool = True,
        *,
        listener: int | None = None,
        **fields: Any,
    ) -> None:
        config = config_of(DispatcherConfig, config, fields)
        self._runtime = DispatcherRuntime(config, listener, partial(_data_service, config))
        self._lock = threading.Lock()
        if start:
            self.start()

    # -- for users ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind the port and serve. Workers and coordinators can connect once `start` has returned.
        Starting again has no effect.

        >>> with zd.DispatchServer() as dispatcher:
        ...     dispatcher.start()  # a second call does nothing
        """
        # One thread at a time, because two that find no loop would both bind the port.
        with self._lock:
            if self._runtime.stopped.is_set():
                raise errors.FailedPreconditionError(
                    "Server cannot be started after it has been stopped"
                )
            if not self._runtime.opened:
                self._runtime.open()

    def stop(self) -> None:
        """Stop the dispatcher at once. Its queues and sessions are lost. Idempotent.

        >>> dispatcher = zd.DispatchServer()
        >>> dispatcher.stop()

        Workers go on running their functions for half the duration of a lease, and wait for another
        dispatcher at this address. To stop the workers as well, call `shutdown` instead.
        """
        with self._lock:
            self._runtime.stop()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the server has stopped. Return False if `timeout` seconds pass first; None
        waits without a limit.

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
        """The address, with "localhost" in place of 127.0.0.1. The name `_address` is the one in
        tf.data service."""
        return self.address.replace("127.0.0.1:", "localhost:")

    @property
    def target(self) -> str:
        """ "zmq://host:port", the target for coordinators and workers."""
        advertise = self._runtime.config.advertise
        where = (
            self._address
            if advertise is None
            else advertised_address(advertise, split(self.address)[1])
        )
        return f"zmq://{where}"

    @property
    def cancel_grace_s(self) -> float:
        """The `cancel_grace_s` of the config, which is the default of coordinators that get this
        server as their target."""
        return self._runtime.config.cancel_grace_s

    @property
    def credentials(self) -> Credentials:
        """The paths of this dispatcher's token and keys. A coordinator uses them when this server
        is passed to it as its target."""
        return self._runtime.credentials

    @property
    def num_workers(self) -> int:
        """The number of workers that are registered and not lost."""
        return self._runtime.num_workers

    def _num_workers(self) -> int:
        """Return `num_workers`. The name `_num_workers` is the one in tf.data service."""
        return self.num_workers

    @property
    def _loop(self) -> Loop:
        return self._runtime.loop

    def snapshot(self) -> BrokerSnapshot:
        """Return an immutable record of workers, coordinators and queues, as `zmqdist status` shows
        them. Waits for the loop.

        >>> with zd.DispatchServer() as dispatcher:
        ...     print(len(dispatcher.snapshot().workers))
        0
        """
        return self._loop.run(self._runtime.broker.snapshot)

    def wait_for(
        self, ready: Callable[[frozenset[tuple[str, int]]], bool], timeout: float | None
    ) -> bool:
        """Wait until `ready` returns True for the set of registered workers, each a (job, index).
        Return False after `timeout` seconds.

        >>> with zd.DispatchServer() as dispatcher:
        ...     print(dispatcher.wait_for(lambda workers: len(workers) == 2, timeout=0.01))
        False

        The loop calls `ready` after each event, so `ready` must not block.
        """
        runtime, loop = self._runtime, self._loop
        is_ready = threading.Event()

        def check() -> None:
            if ready(frozenset(runtime.broker.membership.members)):
                is_ready.set()

        loop.call_soon(runtime.watchers.append, check)
        # Check once after that, because no event may follow.
        loop.call_soon(check)
        try:
            return is_ready.wait(seconds(timeout))
        finally:
            loop.call_soon(runtime.watchers.remove, check)

    def watch_members(self, fn: Callable[[frozenset[tuple[str, int]]], object]) -> None:
        """Have the loop call `fn` with the registered workers as (job, index): first now, then
        whenever a worker has joined or is lost.

        >>> seen = []
        >>> with zd.DispatchServer() as dispatcher:
        ...     dispatcher.watch_members(seen.append)
        ...     with zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address)):
        ...         print(dispatcher.wait_for(lambda workers: len(workers) == 1, timeout=10))
        True
        >>> frozenset({("worker", 0)}) in seen
        True

        `fn` must not block. It is called until the server stops.
        """
        runtime, loop = self._runtime, self._loop

        def check() -> None:
            fn(frozenset(runtime.broker.membership.members))

        def begin() -> None:
            runtime.member_watchers.append(check)
            check()

        loop.call_soon(begin)

    def drain_reports(self) -> list[DrainReport]:
        """Return for each worker what would become of its values and work if it left. Waits at most
        DESCRIBED_S for the programs.

        >>> with zd.DispatchServer() as dispatcher:
        ...     print(dispatcher.drain_reports())
        []
        """
        return self._runtime.reporter.reports()

    @checked
    def drain(self, job: str, index: int, grace_s: float) -> None:
        """Have a worker leave after it has finished its running functions, or after `grace_s`.
        Waits for the loop, not for the worker.

        >>> with zd.DispatchServer() as dispatcher:
        ...     with zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address)) as worker:
        ...         dispatcher.drain("worker", 0, grace_s=1.0)
        ...         worker.join()
        True

        Raises:
          NotFoundError: no worker of this name is registered.
        """
        self._loop.run(self._runtime.drain, job, index, duration("grace_s", grace_s))

    def shutdown(self, grace_s: float = 0.0) -> None:
        """Request that all workers stop, wait at most `grace_s` + LEAVING_S until they have left,
        and stop the server. Idempotent.

        >>> dispatcher = zd.DispatchServer()
        >>> dispatcher.shutdown(grace_s=1.0)
        """
        grace_s = duration("grace_s", grace_s)
        # `run` raises FailedPreconditionError if another thread has stopped the server meanwhile.
        with contextlib.suppress(errors.FailedPreconditionError):
            if self._runtime.opened and not self._runtime.stopped.is_set():
                self._runtime.loop.run(lambda: self._runtime.shutdown(grace_s))
                self.join(grace_s + LEAVING_S)
        self.stop()

    def data_snapshot(self) -> DataSnapshot:
        """Return an immutable record of the data service: jobs, iterations, readers, workers, the
        journal.

        >>> with zd.DispatchServer() as dispatcher:
        ...     print(type(dispatcher.data_snapshot()).__name__)
        DataSnapshot
        """
        return self._loop.run(self._runtime.part.snapshot)

    def data_tasks_by_worker(self) -> dict[str, int]:
        """Return the number of data tasks and snapshot streams of each worker, by the worker's
        name. Workers with neither are left out.

        >>> with zd.DispatchServer() as dispatcher:
        ...     print(dispatcher.data_tasks_by_worker())
        {}
        """
        return self._loop.run(self._runtime.part.task_counts)

    def _snapshot_streams(self, path: str) -> list[Any]:
        """Return the streams of the distributed snapshot in folder `path`, each with `index`,
        `owner` and `state`. The name is the one in tf.data service.

        Raises:
          NotFoundError: the dispatcher knows no snapshot in this folder.
        """
        return self._runtime.part.snapshots.streams(path)

    def open_join(
        self,
        name: str,
        *,
        valid_s: float = JOIN_VALID_S,
        address: str = "",
        dispatcher: str = "",
    ) -> str:
        """Make a join ticket and return it: one line of text, with which one process joins as `name`.
        The ticket is a secret.

        >>> with zd.DispatchServer(port=0) as plain:
        ...     plain.open_join("worker:3")
        Traceback (most recent call last):
            ...
        zmqdist.errors.FailedPreconditionError: ...

        Args:
          name: "worker:3" or "ps:0" for these tasks; "submit", "client" or "admin" for a program with
            this role.
          valid_s: seconds for which the ticket is valid.
          address: the "host:port" at which programs will connect to the process, if it is a ps or
            another server. A server refuses a ticket without an address.
          dispatcher: the "host:port" at which the joining process reaches this dispatcher. "" means the
            address in `target`.

        Raises:
          FailedPreconditionError: this dispatcher has no CURVE keys, or was not started.
          InvalidArgumentError: `name` or `address` has another form than these, or `valid_s` is out of
            range.
          ResourceExhaustedError: too many tokens are valid and unused.
          TypeError: `name`, `address` or `dispatcher` is no text.
        """
        for argument, text in (("name", name), ("address", address), ("dispatcher", dispatcher)):
            if not isinstance(text, str):
                raise TypeError(f"{argument} must be a string, not {text!r}")
        runtime = self._runtime
        if not runtime.opened:
            raise errors.FailedPreconditionError(
                "this dispatcher was not started: call start() first"
            )
        return runtime.loop.run(
            runtime.keys.open_join,
            name,
            dispatcher or self.target.partition("://")[2],
            duration("valid_s", valid_s),
            address,
        )

    @safe_repr
    def __repr__(self) -> str:
        if self._runtime.stopped.is_set() or not self._runtime.opened:
            return "stopped" if self._runtime.stopped.is_set() else "not started"
        return f"at {self.target}, workers={self.num_workers}"

    def __enter__(self) -> DispatchServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __del__(self) -> None:
        runtime = self.__dict__.get("_runtime")
        if runtime is not None and runtime.abandoned:
            in_background("zmqdist-dispatcher-stop", runtime.stop)


def _data_service(config: DispatcherConfig, service: RpcService, loop: Loop) -> DataDispatcher:
    """Make the data service of a dispatcher."""
    rules = Rules(
        worker_timeout_s=config.worker_timeout_s,
        client_timeout_s=config.client_timeout_s,
        gc_check_s=config.gc_check_s,
        gc_timeout_s=config.gc_timeout_s,
        gc_dynamic=config.gc_dynamic_sharding_jobs,
        fault_tolerant=config.fault_tolerant_mode,
        worker_addresses=tuple(config.worker_addresses or ()),
        deployment_mode=str(config.deployment_mode or "").upper(),
    )
    return DataDispatcher(service, loop, rules, config.work_dir, config.snapshots_max)


def serve_scaling(server: DispatchServer, scaler: Scaler) -> None:
    """Use this launcher, which starts and ends the workers, for the RPC method `scale` (`zmqdist
    scale`)."""
    server._runtime.scaler = scaler


def report_exit(
    server: DispatchServer, job: str, index: int, pid: int, exit_code: int | None, log: str = ""
) -> None:
    """Report that the process of a worker has ended, so that the dispatcher counts the worker as
    lost at once.

    Only the process that started the worker calls this, from any of its threads.
    """
    if server._runtime.opened:
        event = ProcessExited(pid=pid, exit_code=exit_code, log=log, job=job, index=index)
        with contextlib.suppress(errors.FailedPreconditionError):
            server._runtime.loop.call_soon(server._runtime.handle, event)


def report_gone(server: DispatchServer, name: str, reason: str) -> None:
    """Report that a task such as "ps:1" has ended for good, so that programs do not wait for its
    restart."""
    server._runtime.gone[name] = reason

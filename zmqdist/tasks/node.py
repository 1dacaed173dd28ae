"""The part of a task's server that all other parts use: the port, the methods behind the port, and
the connections to the other tasks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from zmqdist import clock as time
from zmqdist.clock import number
from zmqdist.cluster.devices import Device
from zmqdist.cluster.spec import ClusterSpec
from zmqdist.coordination.replies import Task, task_name
from zmqdist.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
    UnknownError,
)
from zmqdist.limits import GRACE_S, SERVER_DESCRIPTORS
from zmqdist.rpc import StatusOrResult, ZmqClient, internal_client
from zmqdist.rpc.client import new_incarnation
from zmqdist.rpc.service import RpcService
from zmqdist.tasks.definition import EVERYWHERE, address_to_bind
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.endpoint import split
from zmqdist.transport.loop import Loop
from zmqdist.transport.memory_limits import check_descriptors_and_threads
from zmqdist.transport.own_address import bindable
from zmqdist.transport.port_probe import listening
from zmqdist.transport.router import Router
from zmqdist.wire.hello import our_hello

A_YEAR_S = 3.2e7
"""Seconds. The longest grace of a stop, because threads cannot wait for an infinite time."""

TASKS = frozenset({"worker", "submit"})
"""The roles of peers that may call the methods which the tasks of a cluster have for each other."""


def task_named(name: Any, me: Task) -> Task | None:
    """Return the task that a name means, whether or not it exists; None if the name has none of the
    three forms.

    Args:
      name: "worker:1", ("worker", 1), or the name of a device ("/job:worker/task:1").
      me: the task that completes the name of a device. A name without a job means this task's job.
        A name without an index means this task's index if the job is this task's job, else index 0.
    """
    if (
        isinstance(name, tuple)
        and len(name) == 2
        and isinstance(name[0], str)
        and type(name[1]) is int
    ):
        return name
    if not isinstance(name, str):
        return None
    if not name.startswith("/"):
        job, _, index = name.rpartition(":")
        return (job, int(index)) if index.isascii() and index.isdecimal() else None
    try:
        device = Device.parse(name).canonical()
    except ValueError:
        return None
    # a task has one device; any other would be a mistake
    if (device.replica, device.type, device.index) != (0, "CPU", 0):
        return None
    job = device.job or me[0]
    return job, device.task if device.task is not None else me[1] if job == me[0] else 0


def grace_s(value: Any) -> float:
    """Return the seconds for which running calls may go on when a server stops; None means GRACE_S.

    Raises:
      InvalidArgumentError: `value` is neither a number of seconds, 0 or more, nor None.
    """
    seconds = GRACE_S if value is None else number(value)
    if not seconds >= 0:
        raise InvalidArgumentError(
            f"grace is a number of seconds, 0 or more, or None, not {value!r}"
        )
    return min(seconds, A_YEAR_S)


ENDED_BY_A_STOP = AbortedError, CancelledError, FailedPreconditionError, UnavailableError


class _OwnWait:
    """A context manager around each wait of this task. If the wait fails because this server stops,
    it raises the one error `Node.stopped`.

    The stop of a server ends its connections, its watches and its part in groups and barriers. Each
    of these ends raises an error of its own, which reads as if another task had gone or, with
    ABORTED, as if this task had been restarted. The caller gets `Node.stopped` instead, whichever
    of these errors arrives first.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if self._node.closed and isinstance(error, ENDED_BY_A_STOP):
            raise self._node.stopped from error


class Node:
    """The port of one task, the methods behind it, and the connections to the other tasks.

    Attributes:
      me: this task as (job, index).
      spec: the cluster, with this task's address as the user has written it.
      tasks: all tasks of the cluster: the jobs in the order of the spec, and the indices sorted.
      other_tasks: `tasks` without this task.
      closed: whether `close` has been called.
      address: "host:port", with the host as it is written in the cluster and the port that was
        bound.
      service: the methods behind the port; the other parts register theirs before `serve`.
      loop, router: loop and router of the port; the loop runs nothing before `serve`.
      incarnation: incarnation of this process, which its hello contains.
      credentials: the places of this task's keys and token.
      on_stop: functions that `close` calls first, in which each part of the server ends the waits
        of this task with the error `stopped`. No other task knows of the stop at that time, so no
        wait ends with an error that names another task.
      on_close: functions that `close` calls next, with the time (`time.monotonic`) until which
        running work may go on. The port is still open.
      own_wait: the context manager around each wait of this task; `_OwnWait` explains it.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        me: Task,
        address: str,
        credentials: Credentials,
        bind_host: str | None = None,
        listener: int | None = None,
    ) -> None:
        """Bind the port on `bind_host`, by default on the host of `address`
        (definition.address_to_bind).

        Args:
          listener: the descriptor of a TCP socket that listens already. The node serves it in place
            of binding a port, and owns it from then on.

        Raises:
          UnknownError: the port is in use, or cannot be bound.
          InvalidArgumentError: `address` is not an address.
          FailedPreconditionError: other hosts can reach the address, and there are no keys.
          ResourceExhaustedError: the limit of this process on open descriptors is too low.
        """
        self.spec = spec
        self.me = me
        self.tasks = [(job, index) for job in spec.jobs for index in spec.task_indices(job)]
        self.other_tasks = [task for task in self.tasks if task != me]
        self.incarnation = new_incarnation()
        self.credentials = credentials
        self.service = RpcService(f"server-{task_name(me)}")
        self.service.label = task_name(me)
        self.on_stop: list[Callable[[], object]] = []
        self.on_close: list[Callable[[float], object]] = []
        self.own_wait = _OwnWait(self)
        self._clients: dict[Task, ZmqClient] = {}
        self._lock = threading.Lock()
        self.closed = False
        check_descriptors_and_threads(f"the server of {task_name(me)}", SERVER_DESCRIPTORS)
        endpoint = address_to_bind(address, None if bind_host is None else bindable(bind_host))
        host, _ = split(endpoint)
        try:
            security = credentials.server(host)
        except FailedPreconditionError as error:
            # the user has chosen this host, so the error without an addition says it all
            if host != EVERYWHERE or bind_host is not None:
                raise
            text = f"{address} of {task_name(me)} is no address of this host, so it would listen on all interfaces, but: "
            raise FailedPreconditionError(text + error.message) from None
        self.loop = Loop(f"zmqdist-server-{task_name(me)}")
        try:
            hello = our_hello("server", self.incarnation, f"{task_name(me)} pid {os.getpid()}")
            self.router = Router(self.loop, security, hello)
            _, port = split(
                self.router.bind(endpoint) if listener is None else self.router.bind_fd(listener)
            )
        except UnknownError as error:
            self.loop.stop()
            raise UnknownError(
                f"could not start the server of {task_name(me)}: {error.message}"
            ) from None
        except BaseException:
            self.loop.stop()
            raise
        self.address = f"{address.rpartition(':')[0]}:{port}"

    @property
    def stopped(self) -> CancelledError:
        """The error that ends each wait of this task when the task stops."""
        return CancelledError(f"the server of {task_name(self.me)} was stopped")

    def serve(self) -> None:
        """Start the loop, which replies to calls from now on."""
        self.service.attach(self.router, self.loop, self.incarnation)
        self.loop.on_stop(self.service.close)
        self.loop.start()

    def task(self, name: str | tuple[str, int]) -> Task:
        """Return the task of this cluster that has a name (see `task_named`).

        Raises:
          InvalidArgumentError: the cluster has no such task; the text lists its tasks.
        """
        task = task_named(name, self.me)
        if (
            task is not None
            and task[0] in self.spec.jobs
            and task[1] in self.spec.task_indices(task[0])
        ):
            return task
        names = ", ".join(map(task_name, self.tasks))
        raise InvalidArgumentError(f"no task {name!r} in this cluster; it has {names}")

    def client(self, task: Task) -> ZmqClient:
        """Return the client for a task; make it on first use. This does not block. Any thread may
        call it.

        RPC calls of this client wait for the task to appear, up to their deadlines, and end with
        UNAVAILABLE when the task ends.
        """
        with self._lock:
            if self.closed:
                raise FailedPreconditionError(f"the server of {task_name(self.me)} was stopped")
            client = self._clients.get(task)
            if client is None:
                address = self.address if task == self.me else self.spec.task_address(*task)
                security = self.credentials.client(address, "worker")
                client = self._clients[task] = ZmqClient(
                    address, task_name(self.me), security=security
                )
            return client

    def is_connected(self, task: Task) -> bool:
        """Return whether this task has a connection to another task, and has read no Goodbye from
        it."""
        with self._lock:
            client = self._clients.get(task)
        return client is not None and client.snapshot().connected

    def connections(self) -> tuple[list[Task], int]:
        """Return the tasks to which this task has opened a connection, and the number of calls in
        flight over these connections."""
        with self._lock:
            clients = dict(self._clients)
        return sorted(clients), sum(client.snapshot().calls for client in clients.values())

    def start(self, task: Task, method: str, *args: Any, **how: Any) -> StatusOrResult:
        """Call a method of a task without waiting. Later changes of `args` are not sent.
        rpc/internal_client.py documents the keywords."""
        return internal_client.start(self.client(task), method, *args, **how)

    def up(self, tasks: Iterable[Task]) -> list[Task]:
        """Return the tasks in `tasks` that listen now. This may take seconds, so do not call it in
        the loop."""
        addresses = {
            task: self.address if task == self.me else self.spec.task_address(*task)
            for task in tasks
        }
        listeners = listening(addresses)
        return [task for task in addresses if task in listeners]

    def call_tasks(
        self, tasks: Iterable[Task], method: str, *args: Any, due: float
    ) -> tuple[list[str], list[str]]:
        """Call a method of each of the tasks that are up, and wait for the replies. Return the
        names of these tasks, and the errors of those that failed."""
        calls = [
            (task_name(task), self.start(task, method, *args, due=due)) for task in self.up(tasks)
        ]
        outcomes = [(name, *call.get_error()) for name, call in calls]
        return [name for name, _ in calls], [
            f"{name}: {text}" for name, code, text in outcomes if code
        ]

    def close(self, grace_s: float) -> None:
        """Wait at most `grace_s` for running calls and reply to them; then free the port and close
        all connections. Idempotent.

        Calls that clients make meanwhile wait for the next server at this address. Do not call
        `close` in the loop, nor in a method of the service.
        """
        with self._lock:
            if self.closed:
                return
            self.closed = True
            clients = list(self._clients.values())
        until = time.monotonic() + grace_s
        try:
            # first, while no other task knows of the stop, so that no wait names another task
            for end_waits in self.on_stop:
                end_waits()
            if self.loop.running:
                self.loop.run(self.service.say_goodbye, f"the server of {task_name(self.me)} stops")
            for fn in self.on_close:
                fn(until)
            # the port stays open until now, so that running calls get their replies
            self.service.stop(max(0.0, until - time.monotonic()))
        finally:
            for client in clients:
                client.close()
            self.loop.stop()

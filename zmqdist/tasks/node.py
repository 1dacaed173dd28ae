"""What the parts of one task's server share: its port, the methods behind it, and its connections to the other tasks."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from zmqdist.cluster.devices import Device
from zmqdist.cluster.spec import ClusterSpec
from zmqdist.coordination.answers import Task, named
from zmqdist.coordination.client import number
from zmqdist.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownError,
)
from zmqdist.limits import GRACE_S, SERVER_DESCRIPTORS
from zmqdist.rpc import StatusOrResult, ZmqClient, internal_client
from zmqdist.rpc.client import new_incarnation
from zmqdist.rpc.service import RpcService
from zmqdist.tasks.definition import EVERYWHERE, address_to_bind
from zmqdist.transport.address import split
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop
from zmqdist.transport.port_probe import listening
from zmqdist.transport.router import Router
from zmqdist.wire.hello import our_hello

A_YEAR_S = 3.2e7
"""The longest grace; threads cannot wait for ever."""

TASKS = frozenset({"worker", "submit"})
"""Roles of those who may use what tasks offer each other."""


def task_named(name: Any, me: Task) -> Task | None:
    """ "worker:1", ("worker", 1), or the name of a device ("/job:worker/task:1") as a Task, which may not exist; None for anything else.

    Of a device, what is not said is as in `me`; task 0 of another job.
    """
    if isinstance(name, tuple) and len(name) == 2 and isinstance(name[0], str) and type(name[1]) is int:
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
    if (device.replica, device.type, device.index) != (0, "CPU", 0):
        return None
    job = device.job or me[0]
    return job, device.task if device.task is not None else me[1] if job == me[0] else 0


def grace_s(value: Any) -> float:
    """Seconds that running calls have when a server stops; None stands for GRACE_S. Raises InvalidArgumentError for no such number."""
    seconds = GRACE_S if value is None else number(value)
    if not seconds >= 0:
        raise InvalidArgumentError(f"grace is a number of seconds, 0 or more, or None, not {value!r}")
    return min(seconds, A_YEAR_S)


ENDED_BY_A_STOP = AbortedError, CancelledError, FailedPreconditionError, UnavailableError


class _OwnWait:
    """Around what a caller of this task waits for, in as many threads as there are: the one place that knows who has ended it.

    The stop of a server ends its connections, its watches and its part in what others do together, and each of those has an error of its
    own, which reads as if another task had gone, or as if this one had begun another life (ABORTED: the others have noticed its end, and
    hear of it once more). Whichever reaches the caller first: once this task stops, the error is `Node.stopped`.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._node.closed and isinstance(error, ENDED_BY_A_STOP):
            raise self._node.stopped from error


class Node:
    """One task with its port.

    Attributes:
      me: its own name.
      spec: the cluster, with the own address as it is written there.
      address: "host:port": the host as it is written, the real port.
      service: the methods; parts register theirs before `serve`.
      loop, router: of its port; nothing runs in the loop before `serve`.
      incarnation: of this life, as its hello says.
      credentials: where its secrets are.
      on_stop: called first when it is to end: each part ends what this task itself waits for, with `stopped`. No other task has heard of
        the stop by then, so none can answer to it with an error that names somebody else.
      on_close: called after that, with the time (`time.monotonic`) up to which what runs may go on; before the port closes.
      own_wait: a context for whatever a caller of this task waits for: see `_OwnWait`.
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
        """Binds: `bind_host`, by default the host of `address` (definition.address_to_bind).

        `listener`, in place of that, is a descriptor of a TCP socket that listens already; it is the node's from then on.

        Raises:
          UnknownError: the port is in use, or is not to be had.
          InvalidArgumentError: not an address.
          FailedPreconditionError: others can reach it, and there are no keys.
          ResourceExhaustedError: the process may not have enough descriptors.
        """
        self.spec = spec
        self.me = me
        self.incarnation = new_incarnation()
        self.credentials = credentials
        self.service = RpcService(f"server-{named(me)}")
        self.on_stop: list[Callable[[], object]] = []
        self.on_close: list[Callable[[float], object]] = []
        self.own_wait = _OwnWait(self)
        self._clients: dict[Task, ZmqClient] = {}
        self._lock = threading.Lock()
        self._closed = False
        _check_descriptors(named(me))
        place = address_to_bind(address, bind_host)
        host, _ = split(place)
        try:
            security = credentials.server(host)
        except FailedPreconditionError as error:
            if host != EVERYWHERE or bind_host is not None:
                raise
            text = (
                f"{address} of {named(me)} is no address of this machine, so it would listen on all interfaces, but: "
            )
            raise FailedPreconditionError(text + error.message) from None
        self.loop = Loop(f"zmqdist-server-{named(me)}")
        try:
            hello = our_hello("server", self.incarnation, f"{named(me)} pid {os.getpid()}")
            self.router = Router(self.loop, security, hello)
            _, port = split(self.router.bind(place) if listener is None else self.router.bind_fd(listener))
        except UnknownError as error:
            self.loop.stop()
            raise UnknownError(f"could not start the server of {named(me)}: {error.message}") from None
        except BaseException:
            self.loop.stop()
            raise
        self.address = f"{address.rpartition(':')[0]}:{port}"

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is about to be."""
        return self._closed

    @property
    def stopped(self) -> CancelledError:
        """What ends the waits of this task when it stops."""
        return CancelledError(f"the server of {named(self.me)} was stopped")

    def serve(self) -> None:
        """Answer from now on."""
        self.service.attach(self.router, self.loop, self.incarnation)
        self.loop.on_stop(self.service.close)
        self.loop.start()

    def task(self, name: str | tuple[str, int]) -> Task:
        """A task of this cluster by its name (see `task_named`). Raises InvalidArgumentError, with those that there are."""
        task = task_named(name, self.me)
        if task is not None and task[0] in self.spec.jobs and task[1] in self.spec.task_indices(task[0]):
            return task
        known = ", ".join(map(named, self.tasks))
        raise InvalidArgumentError(f"no task {name!r} in this cluster; it has {known}")

    @property
    def tasks(self) -> list[Task]:
        """All of the cluster: jobs in the order of the spec, indices sorted."""
        return [(job, index) for job in self.spec.jobs for index in self.spec.task_indices(job)]

    def client(self, task: Task) -> ZmqClient:
        """The connection to a task; made at the first use, waits for nothing. From any thread.

        Calls of it wait for that task to appear, up to their deadlines, and end with UNAVAILABLE when it goes.
        """
        with self._lock:
            if self._closed:
                raise FailedPreconditionError(f"the server of {named(self.me)} was stopped")
            client = self._clients.get(task)
            if client is None:
                address = self.address if task == self.me else self.spec.task_address(*task)
                security = self.credentials.client(address, "worker")
                client = self._clients[task] = ZmqClient(address, named(self.me), security=security)
            return client

    def is_connected(self, task: Task) -> bool:
        """Whether a connection to a task is there, and it has not said goodbye, as far as was read."""
        with self._lock:
            client = self._clients.get(task)
        return client is not None and client.snapshot().connected

    def connections(self) -> tuple[list[Task], int]:
        """The tasks to which there is a connection, and how many calls over those were not answered yet."""
        with self._lock:
            clients = dict(self._clients)
        return sorted(clients), sum(client.snapshot().calls for client in clients.values())

    def start(self, task: Task, method: str, *args: Any, **how: Any) -> StatusOrResult:
        """Call a method of a task, with `args` as they are, and do not wait; see `client`, and for `how` rpc/internal_client.py."""
        return internal_client.start(self.client(task), method, *args, **how)

    def up(self, tasks: Iterable[Task]) -> list[Task]:
        """Those that listen now. Not to be called in the loop: it may take a second."""
        addresses = {task: self.address if task == self.me else self.spec.task_address(*task) for task in tasks}
        found = listening(addresses)
        return [task for task in addresses if task in found]

    @property
    def other_tasks(self) -> list[Task]:
        """All tasks but this one."""
        return [task for task in self.tasks if task != self.me]

    def close(self, grace_s: float) -> None:
        """Answer what runs, at most for `grace_s`; then free the port and end all connections. Idempotent.

        Who calls meanwhile waits for the next server at this address. Not to be called in the loop, nor by a method.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            clients = list(self._clients.values())
        until = time.monotonic() + grace_s
        try:
            for end_waits in self.on_stop:
                end_waits()
            if self.loop.running:
                self.loop.run(self.service.say_goodbye, f"the server of {named(self.me)} stops")
            for fn in self.on_close:
                fn(until)
            self.service.stop(max(0.0, until - time.monotonic()))
        finally:
            for client in clients:
                client.close()
            self.loop.stop()


def _check_descriptors(name: str) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and used + SERVER_DESCRIPTORS > limit:
        text = f"the server of {name} needs {SERVER_DESCRIPTORS} descriptors, and this process has {used} of {limit}: raise `ulimit -n`"
        raise ResourceExhaustedError(text)

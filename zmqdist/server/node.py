"""What the parts of one task's server share: its port, the methods behind it, and its connections to the other tasks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeAlias

from zmqdist.cluster.spec import ClusterSpec
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError, UnknownError
from zmqdist.messages import Goodbye
from zmqdist.net.address import split
from zmqdist.net.credentials import Credentials
from zmqdist.net.loop import Loop
from zmqdist.net.router import Router
from zmqdist.rpc import ZmqClient
from zmqdist.rpc.client import new_incarnation
from zmqdist.rpc.service import RpcService
from zmqdist.server.definition import EVERYWHERE, address_to_bind
from zmqdist.wire.hello import our_hello

Task: TypeAlias = tuple[str, int]
"""(job, index)."""

TASKS = frozenset({"worker", "submit"})
"""Roles of those who may use what tasks offer each other."""


def named(task: Task) -> str:
    """("worker", 1) as people write it: "worker:1"."""
    return f"{task[0]}:{task[1]}"


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
      on_close: called when it begins to close, in the thread that closes it: parts end the waits of their callers there.
    """

    def __init__(
        self, spec: ClusterSpec, me: Task, address: str, credentials: Credentials, bind_host: str | None = None
    ) -> None:
        """Binds: `bind_host`, by default the host of `address` (definition.address_to_bind).

        Raises:
          UnknownError: the port is in use, or is not to be had.
          InvalidArgumentError: not an address.
          FailedPreconditionError: others can reach it, and there are no keys.
        """
        self.spec = spec
        self.me = me
        self.incarnation = new_incarnation()
        self.credentials = credentials
        self.service = RpcService(f"server-{named(me)}")
        self._clients: dict[Task, ZmqClient] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.on_close: list[Callable[[], object]] = []
        place = address_to_bind(address, bind_host)
        host, _ = split(place)
        try:
            security = credentials.server(host)
        except FailedPreconditionError as error:
            if host != EVERYWHERE or bind_host is not None:
                raise
            told = (
                f"{address} of {named(me)} is no address of this machine, so it would listen on all interfaces, but: "
            )
            raise FailedPreconditionError(None, None, told + error.message) from None
        self.loop = Loop(f"zmqdist-server-{named(me)}")
        try:
            hello = our_hello("server", self.incarnation, f"{named(me)} pid {os.getpid()}")
            self.router = Router(self.loop, security, hello)
            _, port = split(self.router.bind(place))
        except UnknownError as error:
            self.loop.stop()
            raise UnknownError(None, None, f"could not start the server of {named(me)}: {error.message}") from None
        except BaseException:
            self.loop.stop()
            raise
        self.address = f"{address.rpartition(':')[0]}:{port}"

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is about to be."""
        return self._closed

    def serve(self) -> None:
        """Answer from now on."""
        self.service.attach(self.router, self.loop, self.incarnation)
        self.loop.on_stop(self.service.close)
        self.loop.start()

    def task(self, name: str | tuple[str, int]) -> Task:
        """ "worker:1" or ("worker", 1) as a Task of this cluster. Raises InvalidArgumentError, with those that there are."""
        job, index = name if isinstance(name, tuple) else (name.rpartition(":")[0], name.rpartition(":")[2])
        if job in self.spec.jobs and str(index).isdecimal() and int(index) in self.spec.task_indices(job):
            return job, int(index)
        known = ", ".join(map(named, self.tasks))
        raise InvalidArgumentError(None, None, f"no task {name!r} in this cluster; it has {known}")

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
                raise FailedPreconditionError(None, None, f"the server of {named(self.me)} was stopped")
            client = self._clients.get(task)
            if client is None:
                address = self.address if task == self.me else self.spec.task_address(*task)
                security = self.credentials.client(address, "worker")
                client = self._clients[task] = ZmqClient(address, named(self.me), security=security)
            return client

    def close(self, grace_s: float) -> None:
        """Answer what runs, at most for `grace_s`; then free the port and end all connections. Idempotent.

        Who calls meanwhile waits for the next server at this address. Not to be called in the loop, nor by a method.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            clients = list(self._clients.values())
        for fn in self.on_close:
            fn()
        if self.loop.running:
            self.loop.run(self._say_goodbye)
        self.service.stop(grace_s)
        for client in clients:
            client.close()
        self.loop.stop()

    def _say_goodbye(self) -> None:
        for peer in self.router.peers:
            self.router.send(peer, Goodbye(f"the server of {named(self.me)} stops"))

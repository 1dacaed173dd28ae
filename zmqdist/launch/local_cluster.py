"""A cluster on this machine for a with-statement: dispatcher here, workers as processes or as threads.

The workers are started before this process imports what the dispatcher needs: the imports of both take most of the start, and there is
more than one core. So the port is taken by a plain socket first, and handed to the dispatcher.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

from zmqdist import errors
from zmqdist.dispatch.config import DispatcherConfig, WorkerConfig
from zmqdist.launch.children import Child, Children
from zmqdist.launch.folders import RunFolder
from zmqdist.net import token
from zmqdist.net.address import is_ipv6, join
from zmqdist.net.credentials import Credentials

if TYPE_CHECKING:
    from zmqdist.cluster.spec import ClusterSpec
    from zmqdist.dispatch.server import DispatchServer
    from zmqdist.dispatch.worker import WorkerServer

START_LIMIT_S = 30.0
STOP_GRACE_S = 2.0


class local_cluster:
    """`with zmqdist.local_cluster(workers=2) as cluster:` starts a dispatcher in this process and workers beside it.

    Args:
      workers: how many.
      slots: functions that each runs at a time.
      ps: parameter servers; not there yet.
      processes: workers and their slots are processes of their own, started by command, so that scripts and notebooks need no `__main__`
        guard; False: threads of this process, at once there, for examples and debugging.
      options: fields of DispatcherConfig, such as `attempts_max` or `lease_s`.

    The cluster has a token of its own: other processes of this user do not get in by accident.

    Attributes:
      target: "zmq://host:port"; ClusterCoordinator and Executor also take the cluster itself.
      dispatcher: the DispatchServer.
      spec: the ClusterSpec with the dispatcher's address.

    Raises:
      NotImplementedError: for `ps`.
      UnavailableError: a worker ended before it had registered; with its exit code.
      UnknownError: the port could not be bound.
      InvalidArgumentError: a number that cannot be.
    """

    def __init__(self, workers: int = 2, slots: int = 1, ps: int = 0, processes: bool = True, **options: Any) -> None:
        if ps:
            raise NotImplementedError("local_cluster(ps=...): parameter servers are not there yet")
        if workers < 0:
            raise errors.InvalidArgumentError(None, None, f"workers is {workers}, wants 0 or more")
        config = DispatcherConfig(**options)  # what is wrong with it is said before anything has been made
        self._slots = slots
        self._listener = _listen(config)
        self._address = join(config.host, self._listener.getsockname()[1])
        self._folder = RunFolder()
        self.credentials = Credentials(token_file=str(self._folder.path / "token"))
        token.create(self._folder.path / "token")
        self._children: Children | None = None
        self._processes: list[Child] = []
        self._threads: list[WorkerServer] = []
        self._closed = threading.Lock()
        self._dispatcher: DispatchServer | None = None
        self._pid = os.getpid()
        atexit.register(self.close)
        try:
            started = self._start_processes(workers) if processes else []
            self._open(dataclasses.replace(config, token_file=self.credentials.token_file))
            self._wait_for(started)
            if not processes:
                self._start_threads(workers)
        except BaseException:
            self.close()
            raise

    def _open(self, config: DispatcherConfig) -> None:
        from zmqdist.dispatch.server import DispatchServer

        self._dispatcher = DispatchServer(config, listener=self._listener.detach())

    def _start_threads(self, count: int) -> None:
        from zmqdist.dispatch.worker import WorkerServer

        self._threads = [WorkerServer(self._worker(index, False)) for index in range(count)]

    @property
    def dispatcher(self) -> DispatchServer:
        assert self._dispatcher is not None
        return self._dispatcher

    @property
    def target(self) -> str:
        return self.dispatcher.target

    @property
    def spec(self) -> ClusterSpec:
        from zmqdist.cluster.spec import ClusterSpec

        return ClusterSpec({"dispatcher": [self.dispatcher.address]})

    def kill_worker(self, index: int) -> None:
        """End a worker's process with SIGKILL, as a crash would. Its work runs elsewhere.

        Raises:
          ValueError: there is no such worker process.
        """
        if not 0 <= index < len(self._processes):
            raise ValueError(f"no worker process {index} here; there are {len(self._processes)}")
        self._processes[index].process.kill()
        self._processes[index].ended.wait(5.0)

    def add_worker(self) -> int:
        """Start one more worker process, and return its index when it has registered."""
        index = len(self._processes)
        self._wait_for(self._start_processes(1))
        return index

    def close(self) -> None:
        """End the workers and the dispatcher. Idempotent. Does nothing in a child that was forked from the program."""
        if os.getpid() != self._pid or not self._closed.acquire(blocking=False):
            return
        atexit.unregister(self.close)
        with (
            contextlib.ExitStack() as steps
        ):  # a Ctrl-C in one of them must not leave out the others; the last comes first
            steps.callback(self._folder.close)
            steps.callback(self._listener.close)
            if self._dispatcher is not None:
                steps.callback(self._dispatcher.stop)
            if self._children is not None:
                steps.callback(self._children.close, STOP_GRACE_S)
            for worker in self._threads:
                steps.callback(worker.stop)

    def __enter__(self) -> local_cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _worker(self, index: int, processes: bool) -> WorkerConfig:
        return WorkerConfig(
            self._address,
            index=index,
            slots=self._slots,
            processes=processes,
            token_file=self.credentials.token_file,
        )

    def _start_processes(self, count: int) -> list[Child]:
        if self._children is None:
            self._children = Children(self._exited)
        first = len(self._processes)
        environment = self.credentials.environment()
        for index in range(first, first + count):
            self._processes.append(self._children.start_worker(self._worker(index, True), environment))
        return self._processes[first:]

    def _wait_for(self, started: list[Child]) -> None:
        """Until all have registered, or one has ended before."""
        wanted = {("worker", int(child.name.partition(":")[2])) for child in started}
        if not self.dispatcher.wait_for(
            lambda present: wanted <= present or any(child.ended.is_set() for child in started), START_LIMIT_S
        ):
            raise errors.UnavailableError(None, None, f"not all workers had registered after {START_LIMIT_S:g} s")
        for child in started:
            if child.ended.is_set():
                how = errors.describe_exit(child.exit_code or 0)
                raise errors.UnavailableError(
                    None, None, f"{child.name} ended before it had registered ({how}); its reason is on standard error"
                )

    def _exited(self, child: Child) -> None:
        job, _, index = child.name.partition(":")
        if self._dispatcher is not None:
            self._dispatcher.report_exit(job, int(index), child.pid, child.exit_code, child.tail)


def _listen(config: DispatcherConfig) -> socket.socket:
    family = socket.AF_INET6 if is_ipv6(config.host) else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        problem = f"could not bind {join(config.host, config.port)}: {error.strerror}; port 0 takes a free one"
        raise errors.UnknownError(None, None, problem) from None

"""Servers of tests in processes of their own, forked from one process that has everything imported.

A Python that starts by command and imports zmqdist costs more than a second of CPU; a fork costs
milliseconds. The zygote is the standard library's fork server: one for each pytest process, started
with the first server that a test wants. It has one thread and no ZeroMQ context. `ServerProcess` is
a dispatcher or a worker, `slots_zygote` what a worker with processes forks its slots and tasks
from.

Each server ends when the connection to this process closes, so none outlives it. `left_running`
names those that a test has forgotten.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import weakref
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any

from tests.ports import free_port
from zmqdist.process.zygote_client import ZygoteProcess

PATIENCE_S = 30.0

PRELOADED = [
    "zmqdist.servers.dispatch_server",
    "zmqdist.servers.worker_server",
    "zmqdist.scheduling.worker.slot_main",
    "zmqdist.data.service.worker.task_main",
    "zmqdist.data.service.snapshots.stream",
    "zmqdist.data.service",
]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)
_started: weakref.WeakSet[ForkServerProcess] = weakref.WeakSet()


def left_running() -> list[str]:
    """Processes that a test has started here and that have not ended."""
    return [f"{each.name} ({each.pid})" for each in _started if each.is_alive()]


def _fork(name: str, target: Any, *args: Any) -> ForkServerProcess:
    process = _context.Process(target=target, args=(dict(os.environ), *args), name=name)
    process.start()
    _started.add(process)
    return process


def _become(environment: dict[str, str]) -> None:
    """In the child: the fork server has the environment of the moment when it was started."""
    os.environ.clear()
    os.environ.update(environment)


# -- dispatchers and workers -----------------------------------------------------------------------


class ServerProcess:
    """A dispatcher or a worker in a process of its own; ends with this one at the latest.

    Args:
      kind: "dispatcher" or "worker".
      wait: return when it serves. A worker serves when the dispatcher has taken it. Else `ready`
        waits for that.
      config: the fields of its DispatcherConfig or WorkerConfig.
    """

    def __init__(self, kind: str, *, wait: bool = True, **config: Any) -> None:
        # Its port stays reserved while it is dead: a connection of another test could have it
        # before it is started again.
        self.kind, self.config = kind, {"port": free_port(), **config}
        self.address = ""
        self.begin()
        if wait:
            self.ready()

    def begin(self) -> None:
        self._connection, theirs = _context.Pipe()
        with theirs:
            self._process = _fork(self.kind, _serve, theirs, self.kind, self.config)

    def ready(self) -> None:
        """Wait until it serves."""
        assert self._connection.poll(PATIENCE_S), (
            f"the {self.kind} did not start in {PATIENCE_S:g} s"
        )
        try:
            self.address = self._connection.recv()
        except EOFError:
            raise AssertionError(
                f"the {self.kind} did not start: its process ended with {self.exit_code}"
            ) from None

    def start(self) -> None:
        self.begin()
        self.ready()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.exitcode

    def kill(self) -> None:
        """As kill -9; returns when it has ended."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def restart(self, use_same_port: bool = True) -> None:
        """kill -9, and another life."""
        self.kill()
        if not use_same_port:
            self.config["port"] = free_port()
        self.start()

    def stop(self) -> None:
        """In good order."""
        if self.alive:
            with contextlib.suppress(OSError):
                self.signal(signal.SIGCONT)
        self._connection.close()
        self._process.join(PATIENCE_S)
        self.kill()


def _serve(
    environment: dict[str, str], connection: Connection, kind: str, config: dict[str, Any]
) -> None:
    """In the child."""
    _become(environment)
    from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
    from zmqdist.servers.dispatch_server import DispatchServer
    from zmqdist.servers.worker_server import WorkerServer

    server = (
        DispatchServer(DispatcherConfig(**config))
        if kind == "dispatcher"
        else WorkerServer(WorkerConfig(**config))
    )
    connection.send(server.address)
    with contextlib.suppress(EOFError):
        connection.recv()
    server.stop()


# -- zygotes of workers ----------------------------------------------------------------------------


class _SlotsZygote(ZygoteProcess):
    """A zygote that is the fork server's child, and not this process's."""

    def __init__(self, process: ForkServerProcess, control: socket.socket) -> None:
        assert process.pid is not None
        super().__init__(process.pid, control)
        self._process = process

    def wait(self, timeout_s: float) -> int | None:
        wait([self._process.sentinel], timeout_s)
        return self._process.exitcode


def slots_zygote() -> ZygoteProcess:
    """For `WorkerServer(config, zygote=slots_zygote())` with processes: the worker ends it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    starter = os.pidfd_open(os.getpid())
    try:
        with theirs:
            return _SlotsZygote(
                _fork("zygote", _be_zygote, _Descriptor(theirs.fileno()), _Descriptor(starter)),
                ours,
            )
    finally:
        os.close(starter)


class _Descriptor:
    """Travels to a child with its arguments."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (DupFd(self._fd),)


def _detach(descriptor: Any) -> int:
    return int(descriptor.detach())


def _be_zygote(environment: dict[str, str], control: int, starter: int) -> None:
    """In the child."""
    _become(environment)
    os.setsid()
    from zmqdist.process import zygote
    from zmqdist.servers import children

    sys.argv[1:] = [str(control), str(starter), zygote.SLOTS_NAME, *children.MODULES]
    zygote.main()

"""One role in the foreground: what `zmqdist dispatcher`, `zmqdist worker` and `zmqdist server` do, and what a launcher starts as a child.

A role ends by SIGINT or SIGTERM, when it is told to by its dispatcher, or when its lifeline breaks: a pipe whose other end the launcher
holds, so that no child outlives a launcher that was killed. It drains for `grace_s` (not without its launcher: nobody is left who wants
the results), and a second signal ends it at once.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from zmqdist import errors
from zmqdist.background import logged
from zmqdist.child_command import add_working_directory
from zmqdist.limits import GRACE_S
from zmqdist.process.zygote import name_process
from zmqdist.transport.credentials import Credentials

if TYPE_CHECKING:  # each role imports its own: a child should be there soon
    from zmqdist.cluster.spec import ClusterSpec
    from zmqdist.scheduling.dispatcher.config import DispatcherConfig, WorkerConfig
    from zmqdist.scheduling.worker.runtime import WorkerServer

log = logging.getLogger("zmqdist.launch")

OK = 0
FAILED = 1
USAGE = 2
UNAVAILABLE = 3
REFUSED = 4
"""Exit codes; the command's page lists them (cli/exit_codes.py has the same)."""

_EXITS = {
    errors.UNAVAILABLE: UNAVAILABLE,
    errors.DEADLINE_EXCEEDED: UNAVAILABLE,
    errors.UNAUTHENTICATED: REFUSED,
    errors.PERMISSION_DENIED: REFUSED,
    errors.ALREADY_EXISTS: REFUSED,
    errors.INVALID_ARGUMENT: USAGE,
    errors.FAILED_PRECONDITION: USAGE,
}

Announce = Callable[[str], object]


@dataclass(frozen=True)
class TaskConfig:
    """A task of a cluster, for a child: what `zmqdist.Server` is made with.

    Attributes:
      cluster: job to addresses by index, or to a list of them.
    """

    cluster: dict[str, dict[int, str]]
    job: str
    index: int
    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False


class _Server(Protocol):
    def join(self, timeout: float | None = None) -> bool: ...


def exit_code_for(code: int) -> int:
    """The process's exit code for an error's code."""
    return OK if code == errors.OK else _EXITS.get(code, FAILED)


def run_dispatcher(config: DispatcherConfig, *, lifeline: int = -1, announce: Announce = print) -> int:
    """Serve until told to stop. Returns the exit code; an expected failure is one line on stderr."""
    from zmqdist.scheduling.dispatcher.runtime import DispatchServer

    with _Signals() as signals:
        try:
            server = DispatchServer(config)
        except errors.OpError as error:
            return _failed("dispatcher", error)
        announce(f"dispatcher at zmq://{server.address}")
        _serve(server, signals, lifeline, 0.0, lambda _: server.stop())
    return OK


def run_worker(
    config: WorkerConfig, *, grace_s: float = GRACE_S, lifeline: int = -1, announce: Announce = print
) -> int:
    """Work until told to stop. Returns the exit code; an expected failure is one line on stderr."""
    from zmqdist.process.zygote_process import fork_slots_zygote
    from zmqdist.scheduling.worker.children import import_modules
    from zmqdist.scheduling.worker.runtime import WorkerServer, end_log

    zygote = None
    if config.processes and threading.active_count() == 1:
        environment = Credentials(config.token_file, config.keys_dir, config.insecure).environment()
        import_modules()
        zygote = fork_slots_zygote(environment)
    with _Signals() as signals, _silent(end_log):
        try:
            server = WorkerServer(config, start=False, zygote=zygote)
            if not _start(server, signals, lifeline):
                return OK
        except errors.OpError as error:
            return _failed("worker", error)
        plural = "slot" if config.slots == 1 else "slots"
        announce(f"{server.name} of {config.dispatcher_address.removeprefix('zmq://')}: {config.slots} {plural}")
        _serve(server, signals, lifeline, grace_s, server.stop)
        ended = server.ended
        if ended is not None and ended.code:
            print(f"worker: {ended.error}", file=sys.stderr)
            return exit_code_for(ended.code)
    return OK


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


def run_server(
    cluster: ClusterSpec,
    job: str | None,
    index: int | None,
    credentials: Credentials,
    *,
    bind_host: str | None = None,
    config: Mapping[str, Any] | None = None,
    grace_s: float = GRACE_S,
    lifeline: int = -1,
    announce: Announce = print,
) -> int:
    """Be a task of a cluster until told to stop. Returns the exit code; an expected failure is one line on stderr.

    Args:
      config: of the Server.

    Raises:
      ValueError: the job or the task must be named.
    """
    from zmqdist.tasks.server import Server  # workers, which start through this module, do not need it

    with _Signals() as signals:
        try:
            server = Server(
                cluster,
                job,
                index,
                config=config,
                bind_host=bind_host,
                keys_dir=credentials.keys_dir,
                token_file=credentials.token_file,
                insecure=credentials.insecure,
            )
        except errors.OpError as error:
            return _failed("server", error)
        announce(f"{server.task} at {server.target}")
        _serve(server, signals, lifeline, grace_s, server.stop)
    return OK


def _start(server: WorkerServer, signals: _Signals, lifeline: int) -> bool:
    """Start, which waits for the dispatcher; False when a signal came first."""
    failed: list[BaseException] = []
    tried = threading.Event()  # set before the wake: the thread itself is alive for a moment after it

    def start() -> None:
        try:
            server.start()
        except BaseException as error:
            failed.append(error)
        tried.set()
        signals.wake()

    threading.Thread(target=start, name="zmqdist-start", daemon=True).start()
    while not tried.is_set():
        if signals.wait(lifeline):
            server.stop()
            return False
    if failed:
        raise failed[0]
    return True


def _serve(server: _Server, signals: _Signals, lifeline: int, grace_s: float, stop: Callable[[float], object]) -> None:
    """Until the server ends by itself, or a signal or the end of the lifeline asks for it; `stop` gets the grace."""

    def wake_when_ended() -> None:
        try:
            server.join()
        finally:
            signals.wake()

    threading.Thread(target=logged, args=(wake_when_ended,), name="zmqdist-joined", daemon=True).start()
    while not server.join(0):
        if signals.wait(lifeline):
            grace_s = 0.0 if _lifeline_broken(lifeline) else grace_s
            stopping = threading.Thread(target=logged, args=(stop, grace_s), name="zmqdist-stop", daemon=True)
            stopping.start()
            while stopping.is_alive():
                if signals.wait(-1, 0.1):
                    os._exit(FAILED)  # asked twice: whatever it was waiting for, it is not worth it
            return
    stop(0.0)


def _lifeline_broken(lifeline: int) -> bool:
    return lifeline >= 0 and bool(select.select([lifeline], [], [], 0)[0])


class _Signals:
    """SIGINT and SIGTERM as something to wait for, together with the lifeline.

    Their numbers come through the pipe as bytes, written where the signal arrives. A handler in Python would run too late for a signal
    that comes just before the wait begins: it runs between two instructions, and the wait is one.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> _Signals:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in self._NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)

    def wait(self, lifeline: int, timeout_s: float | None = None) -> bool:
        """True when a signal came or the lifeline broke; False when woken, or after the time-out."""
        descriptors = [self._read] if lifeline < 0 else [self._read, lifeline]
        ready, _, _ = select.select(descriptors, [], [], timeout_s)
        received = os.read(self._read, 64) if self._read in ready else b""
        return any(number in received for number in self._NUMBERS) or lifeline in ready

    def wake(self) -> None:
        os.write(self._write, b"\0")


def _failed(role: str, error: errors.OpError) -> int:
    print(f"{role}: {error}", file=sys.stderr)
    return exit_code_for(error.error_code)


def prepare(lifeline: str, kind: str, text: str = "") -> None:
    """Import what `main` needs with these arguments."""
    if kind == "WorkerConfig":
        import zmqdist.scheduling.worker.runtime
        from zmqdist.scheduling.worker import children

        children.import_modules()
    else:
        import zmqdist.cluster.spec
        import zmqdist.tasks.server  # noqa: F401


def main() -> int:
    """LIFELINE KIND JSON, in `sys.argv`: for a launcher, without the command's imports.

    KIND says what the JSON has the fields of: WorkerConfig or TaskConfig.
    """
    prepare(*sys.argv[1:])
    add_working_directory()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    lifeline, kind, fields = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    name_process(f"{fields['job']}:{fields['index']}")
    if kind == "WorkerConfig":
        from zmqdist.scheduling.dispatcher.config import WorkerConfig

        return run_worker(WorkerConfig(**fields), lifeline=lifeline, announce=log.info)
    from zmqdist.cluster.spec import ClusterSpec

    task = TaskConfig(**fields)
    credentials = Credentials(task.token_file, task.keys_dir, task.insecure)
    cluster = ClusterSpec(task.cluster)
    return run_server(cluster, task.job, task.index, credentials, lifeline=lifeline, announce=log.info)

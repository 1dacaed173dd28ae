"""Runs one role until it has to stop, for `zmqdist dispatcher`, `zmqdist worker`, `zmqdist server`
and the child processes of launchers.

A role stops on SIGINT or SIGTERM, when its dispatcher requests it, or when its lifeline breaks. The
lifeline is a pipe whose other end the launcher has, so that no role outlives a killed launcher.
Before it stops, a role drains for at most `grace_s`. If its lifeline broke, it does not drain,
because no process needs the results. A second signal ends the role at once.
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
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from zmqdist import errors
from zmqdist.background import logged
from zmqdist.launch.exit_codes import ExitCode, exit_code_for
from zmqdist.launch.folders import RunFolder
from zmqdist.limits import GRACE_S
from zmqdist.process.zygote import name_process

if TYPE_CHECKING:  # each role imports only what it needs, so that children start quickly
    from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
    from zmqdist.servers.worker_server import WorkerServer
    from zmqdist.transport.join_ticket import JoinTicket

log = logging.getLogger("zmqdist.launch")

Announce = Callable[[str], object]


@dataclass(frozen=True)
class TaskConfig:
    """The arguments of `zmqdist.Server` for one task of a cluster.

    Attributes:
      cluster: the addresses of the tasks of each job, by index.
      job, index: None if the cluster has only one job, or the job only one task.
      bind_host: the address or interface to bind. None means the host in the task's address.
      ticket_file, ticket_fd: the file or file descriptor with the task's join ticket, as in
        WorkerConfig. With a ticket, the task makes its own key and uses this key in place of the
        server's key.
      config: the argument `config` of `zmqdist.Server`.
    """

    cluster: Mapping[Any, Any]
    job: str | None
    index: int | None
    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False
    bind_host: str | None = None
    ticket_file: str | None = None
    ticket_fd: int | None = None
    config: dict[str, Any] = field(default_factory=dict)


class _Server(Protocol):
    def join(self, timeout: float | None = None) -> bool: ...


def run_dispatcher(
    config: DispatcherConfig, *, lifeline: int = -1, announce: Announce = print
) -> int:
    """Run a dispatcher until it has to stop, and return the exit code. An expected failure is
    written as one line to standard error."""
    from zmqdist.servers.dispatch_server import DispatchServer

    with _Signals() as signals:
        try:
            server = DispatchServer(config)
        except errors.OpError as error:
            return _failed("dispatcher", error)
        announce(
            f"dispatcher at {server.target if config.advertise else f'zmq://{server.address}'}"
        )
        _serve(server, signals, lifeline, 0.0, lambda _: server.stop())
    return ExitCode.OK


def run_worker(
    config: WorkerConfig,
    *,
    grace_s: float = GRACE_S,
    lifeline: int = -1,
    announce: Announce = print,
) -> int:
    """Run a worker until it has to stop, and return the exit code. An expected failure is written
    as one line to standard error."""
    # The environment variables for threads are set before the imports, because NumPy reads the
    # variables when it is loaded.
    are_limited = not config.processes or _limit_threads(config)
    try:
        ticket = _given_ticket(config)
        if ticket is not None:
            _check_name(ticket, config.job, config.index)
            index = int(ticket.name.partition(":")[2] or 0)
            config = replace(config, index=index, ticket_file=None, ticket_fd=None)
        with _joined(ticket, config.keys_dir, config.dispatcher_address) as keys_dir:
            config = replace(config, keys_dir=keys_dir)
            return _run_worker(config, are_limited, grace_s, lifeline, announce)
    except errors.OpError as error:
        return _failed("worker", error)


def _run_worker(
    config: WorkerConfig, are_limited: bool, grace_s: float, lifeline: int, announce: Announce
) -> int:
    from zmqdist.process.zygote_client import fork_slots_zygote
    from zmqdist.scheduling.worker.runtime import end_log
    from zmqdist.servers.children import import_modules
    from zmqdist.servers.worker_server import WorkerServer

    zygote = None
    # Fork the zygote only if NumPy has the right numbers of threads, because a fork keeps them, and
    # only while this process has one thread, because a fork would copy the locks of other threads.
    # Otherwise `WorkerServer` starts a zygote as a new Python interpreter.
    if config.processes and are_limited and threading.active_count() == 1:
        environment = config.credentials.environment()
        import_modules()
        zygote = fork_slots_zygote(environment)
    with _Signals() as signals, _silent(end_log):
        server = WorkerServer(config, start=False, zygote=zygote)
        if not _start(server, signals, lifeline):
            return ExitCode.OK
        plural = "slot" if config.slots == 1 else "slots"
        announce(
            f"{server.name} of {config.dispatcher_address.removeprefix('zmq://')}: {config.slots} "
            f"{plural}"
        )
        _serve(server, signals, lifeline, grace_s, server.stop)
        outcome = server.ended
        if outcome is not None and outcome.code:
            print(f"worker: {outcome.error}", file=sys.stderr)
            return exit_code_for(outcome.code)
    return ExitCode.OK


def _limit_threads(config: WorkerConfig) -> bool:
    """Set the environment variables that limit the threads of each slot. Return False if NumPy was
    already loaded with other variables."""
    variables = config.thread_variables(os.environ)
    if "numpy" in sys.modules:
        return variables.items() <= os.environ.items()
    os.environ.update(variables)
    return True


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


def run_server(
    task: TaskConfig,
    *,
    grace_s: float = GRACE_S,
    lifeline: int = -1,
    announce: Announce = print,
) -> int:
    """Run a task of a cluster until it has to stop, and return the exit code. An expected failure
    is written as one line to standard error.

    Raises:
      ValueError: the cluster has several jobs or tasks, and `job` or `index` is None.
    """
    try:
        ticket = _given_ticket(task)
        if ticket is not None:
            _check_ticket(ticket, task)
        with _joined(ticket, task.keys_dir) as keys_dir:
            # imported here, because workers also run this module and do not need it
            from zmqdist.tasks.server import Server

            with _Signals() as signals:
                server = Server(
                    task.cluster,
                    task.job,
                    task.index,
                    config=task.config,
                    bind_host=task.bind_host,
                    keys_dir=keys_dir,
                    token_file=task.token_file,
                    insecure=task.insecure,
                )
                announce(f"{server.task} at {server.target}")
                _serve(server, signals, lifeline, grace_s, server.stop)
    except errors.OpError as error:
        return _failed("server", error)
    return ExitCode.OK


def _given_ticket(config: WorkerConfig | TaskConfig) -> JoinTicket | None:
    """Read the join ticket of a role from its private file or descriptor. Return None if the config
    names neither. Raises the errors of `read_ticket`.
    """
    if config.ticket_file is None and config.ticket_fd is None:
        return None
    # imported here, because few roles have a ticket
    from zmqdist.transport.join_ticket import read_ticket

    return read_ticket(config.ticket_file, config.ticket_fd)


def _check_name(ticket: JoinTicket, job: str, index: int | None) -> None:
    """Raise InvalidArgumentError if a ticket is for another task than JOB:INDEX. If `index` is
    None, every task of the job fits."""
    task = f"{job}:{'?' if index is None else index}"
    fits = ticket.name.partition(":")[0] == job if index is None else ticket.name == task
    if not fits:
        raise errors.InvalidArgumentError(
            f"the join ticket is for {ticket.name}, and this process was started as {task}. The "
            f"ticket was not used"
        )


def _check_ticket(ticket: JoinTicket, config: TaskConfig) -> None:
    """Raise InvalidArgumentError if the ticket is for another task, or has no address at which
    programs can connect to the task."""
    from zmqdist.tasks.definition import effective  # imported here, because workers do not need it

    task = effective(config.cluster, config.job, config.index)
    _check_name(ticket, task.job_name, task.task_index)
    if not ticket.listens:
        raise errors.InvalidArgumentError(
            f"the join ticket for {ticket.name} names no address, so programs could not get the "
            f"key of this server: make a ticket with "
            f"`zmqdist keys token --role {ticket.name} --listens {task.own_address()}`. This "
            f"ticket was not used"
        )


@contextmanager
def _joined(
    ticket: JoinTicket | None, keys_dir: str | None, dispatcher: str | None = None
) -> Iterator[str | None]:
    """Return a context manager that joins a cluster with a ticket, and yields the folder with the
    keys of this process, which its child processes also use. If `ticket` is None, it joins no
    cluster and yields `keys_dir`.

    Args:
      keys_dir: the folder for the keys, which the role makes itself. None means a new private
        folder, which is removed at the end of the context.
      dispatcher: the address at which this process will connect to its dispatcher. None means the
        address in the ticket.

    Raises:
      OpError: the dispatcher does not admit this process. The text says why.
    """
    if ticket is None:
        yield keys_dir
        return
    from zmqdist.transport.join_ticket import join
    from zmqdist.transport.peer_keys import voucher_for

    with ExitStack() as stack:
        if keys_dir is None:
            folder = RunFolder()
            stack.callback(folder.close)
            keys_dir = str(folder.path / "keys")
        address = (dispatcher or ticket.dispatcher).removeprefix("zmq://")
        role = join(ticket, keys_dir, dispatcher=address)
        voucher_for(address, keys_dir, role).own()
        yield keys_dir


def _start(server: WorkerServer, signals: _Signals, lifeline: int) -> bool:
    """Start the worker, and wait until it has registered. Return False if a signal arrives or the
    lifeline breaks before that."""
    # The thread's `is_alive` cannot replace this future, because the thread is still alive when it
    # calls `wake`.
    registration = Future[None]()

    def start() -> None:
        try:
            server.start()
            registration.set_result(None)
        except BaseException as error:
            registration.set_exception(error)
        signals.wake()

    threading.Thread(target=start, name="zmqdist-start", daemon=True).start()
    while not registration.done():
        if signals.wait(lifeline):
            server.stop()
            return False
    registration.result()
    return True


def _serve(
    server: _Server,
    signals: _Signals,
    lifeline: int,
    grace_s: float,
    stop: Callable[[float], object],
) -> None:
    """Wait until the server ends by itself. On a signal, call `stop(grace_s)`, and if the lifeline
    breaks, `stop(0)`. A further signal then ends the process at once.
    """

    def wake_at_end() -> None:
        try:
            server.join()
        finally:
            signals.wake()

    threading.Thread(target=logged, args=(wake_at_end,), name="zmqdist-joined", daemon=True).start()
    while not server.join(0):
        if signals.wait(lifeline):
            if lifeline >= 0 and select.select([lifeline], [], [], 0)[0]:
                grace_s = 0.0  # the lifeline has broken, so no process needs the results
            stopping = threading.Thread(
                target=logged, args=(stop, grace_s), name="zmqdist-stop", daemon=True
            )
            stopping.start()
            while stopping.is_alive():
                if signals.wait(-1, 0.1):
                    os._exit(ExitCode.PROGRAM_FAILED)  # a second signal ends the process at once
            return
    stop(0.0)


class _Signals:
    """A context manager in which a thread can wait for SIGINT, SIGTERM and the break of the
    lifeline.

    As soon as a signal arrives, the interpreter writes the signal's number into a pipe, which ends
    the wait. A handler written in Python could not end the wait if the signal arrived just before
    the wait began: such a handler runs only between two bytecode instructions, and the wait is one
    instruction.
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
        """Wait for a signal, a broken lifeline, a call of `wake` or the time-out. Return whether a
        signal has arrived or the lifeline has broken.
        """
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
    """Import the modules that `main` needs for these arguments. The zygote calls this function
    before it forks roles."""
    if kind == "WorkerConfig":
        import zmqdist.servers.worker_server
        from zmqdist.servers import children

        children.import_modules()
    else:
        import zmqdist.cluster.spec
        import zmqdist.tasks.server  # noqa: F401


def main() -> int:
    """Run a role for a launcher, without the imports of the command line. The arguments in
    `sys.argv` are LIFELINE KIND JSON.

    LIFELINE is a file descriptor, KIND is WorkerConfig or TaskConfig, and JSON has the fields of
    that class.
    """
    lifeline, kind, fields = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    worker: WorkerConfig | None = None
    if kind == "WorkerConfig":
        from zmqdist.scheduling.shared.config import WorkerConfig

        worker = WorkerConfig(**fields)
        _limit_threads(worker)
    prepare(*sys.argv[1:])
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    name_process(f"{fields['job']}:{fields['index']}")
    if worker is not None:
        return run_worker(worker, lifeline=lifeline, announce=log.info)
    return run_server(TaskConfig(**fields), lifeline=lifeline, announce=log.info)

"""The launcher's side of its zygote (zygote.py). `fork` has the zygote fork a child. If `fork`
returns None, the caller must start the child by command.

A child inherits some facts from its zygote that no order can change: user, limits, ignored signals,
and the environment variables that Python, NumPy and the C library read when they start. For each
set of these facts there is one zygote. The variables are those of this process, except that an
order may have its own variables for the threads of BLAS. `prepare` or the first `fork` starts the
zygote, and the zygote ends with this process. If a zygote was killed, the next child is started by
command, and later children get a new zygote. The children of the killed zygote continue, but they
are reported as killed, because no process knows their exit codes.

A process starts a zygote in one of two ways. Any process can start it as a command, which costs
half a second of CPU. A process with one thread and no ZeroMQ context can fork the zygote, which
then has all modules that this process has imported.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

from zmqdist.background import check_threads
from zmqdist.blas_threads import VARIABLES
from zmqdist.child_command import child_command, path_variable
from zmqdist.errors import describe_exit
from zmqdist.files import fill_standard_streams
from zmqdist.platforms import register_at_fork
from zmqdist.process.zygote import (
    BORN,
    CONTROL_RECORD,
    NAME,
    SLOTS_NAME,
    SPAWN,
    Order,
    Zygote,
    name_process,
    wait_and_reap,
)

log = logging.getLogger("zmqdist.launch")


CLOSE_S = 5.0
"""Seconds that a zygote may take to end. After this time it is killed."""

Z = TypeVar("Z", bound="ZygoteProcess")


class ZygoteProcess:
    """One zygote process.

    Args:
      control: this process's end of the control socket. This object takes ownership of the socket.
    """

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self._exit_code: int | None = None

    def wait(self, timeout_s: float) -> int | None:
        """Wait at most `timeout_s` until the zygote has ended. Return its exit code, or None if it
        still runs."""
        if self._exit_code is None:
            self._exit_code = wait_and_reap(self.pid, timeout_s)
        return self._exit_code

    def close(self) -> None:
        """End the zygote and the children that are bound to it. Unbound children continue.
        Idempotent."""
        self.control.close()
        try:
            in_time = self.wait(CLOSE_S) is not None
        except KeyboardInterrupt:  # the user pressed Ctrl-C again: kill the zygote at once
            in_time = False
        if not in_time:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(CLOSE_S)

    def forget(self) -> None:
        """Release the zygote without ending it. This is for a process that was forked from the
        owner of the zygote."""
        self.control.close()
        self._exit_code = 0


def start_slots_zygote(modules: Sequence[str], environment: Mapping[str, str]) -> ZygoteProcess:
    """Start a zygote for bound children, as a command. The children have the environment of the
    zygote and the standard output of this process.

    Args:
      modules: the modules that children run. The zygote imports these modules before it forks the
        first child.
    """
    return _start(ZygoteProcess, SLOTS_NAME, modules, environment, None)


def fork_slots_zygote(environment: Mapping[str, str]) -> ZygoteProcess:
    """Fork a zygote for bound children from this process. The zygote has all modules that this
    process has imported.

    Call this function only while this process has one thread and no ZeroMQ context.

    Args:
      environment: environment variables that the children have in addition to those of this
        process.
    """
    assert threading.active_count() == 1, (
        "a fork would copy the locks of threads that are not in the child"
    )
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    starter = os.pidfd_open(os.getpid())
    gc.collect()
    gc.freeze()  # keeps the garbage collector from writing into pages that the processes share
    # Ctrl-C at a terminal signals the child, too, until the child ignores the signal. So block
    # signals until then.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    if pid:
        theirs.close()
        os.close(starter)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return ZygoteProcess(pid, control)
    code = 1
    try:
        control.close()
        os.setsid()
        name_process(SLOTS_NAME)
        os.environ.update(environment)
        zygote = Zygote(theirs, starter)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        run = zygote.serve()
        code = 0 if run is None else run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _start(
    kind: type[Z],
    name: str,
    modules: Sequence[str],
    environment: Mapping[str, str],
    output: int | None,
) -> Z:
    fill_standard_streams()
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    starter = os.pidfd_open(os.getpid())
    try:
        with theirs:
            # The zygote has a session of its own, so that Ctrl-C at a terminal signals only this
            # process, which ends its children in order.
            process = subprocess.Popen(
                child_command(
                    "zmqdist.process.zygote", str(theirs.fileno()), str(starter), name, *modules
                ),
                pass_fds=[theirs.fileno(), starter],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment, **path_variable()},
                start_new_session=True,
            )
    except BaseException:
        control.close()
        raise
    finally:
        os.close(starter)
    # ZygoteProcess waits for the process, so Popen must not warn that it runs
    process.returncode = 0
    return kind(process.pid, control)


BIRTH_S = 30.0
"""Seconds that a zygote may take to import modules and fork a child. This is enough on a busy host
with a slow disk."""

ZYGOTES_MAX = 4

_READ_AT_START = (
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "GLIBC_",
    "MALLOC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "OPENBLAS_",
    "GOTO_",
    "MKL_",
    "BLIS_",
    "NPY_",
)
_INHERITED = ("Umask", "SigIgn", "Uid", "Gid", "Groups", "CapEff", "Cpus_allowed", "NoNewPrivs")

InheritedState = tuple[object, ...]


class ForkedProcess:
    """A child of the zygote, with a pidfd and those parts of the interface of `subprocess.Popen`
    that `Child` (launch/children.py) needs.

    Attributes:
      pid: the child's pid, which no other process gets until `wait` has returned.
      stdout: the pipe with the child's output, if the caller of `fork` has made a pipe.
      returncode: the exit code. None until `wait` has returned.
    """

    def __init__(
        self, pid: int, pidfd: int, status: socket.socket, stdout: IO[bytes] | None
    ) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.stdout = stdout
        self.returncode: int | None = None
        self._status = status

    def wait(self) -> int:
        """Wait until the child has ended, and return its exit code, which is -n if signal n ended
        the child."""
        if self.returncode is None:
            try:
                word = self._status.recv(CONTROL_RECORD.size)
            except OSError:
                word = b""
            # No record has arrived: the zygote was killed, so no process knows how this child
            # ended.
            self.returncode = CONTROL_RECORD.unpack(word)[2] if word else -int(signal.SIGKILL)
            self._status.close()
            os.close(self.pidfd)
        return self.returncode


class _Zygote(ZygoteProcess):
    """A zygote for unbound children.

    Attributes:
      has_forked: whether the zygote has forked a child, which shows that a zygote can work with the
        facts that it has inherited.
    """

    has_forked = False

    def order(
        self, order: Order, descriptors: Sequence[int]
    ) -> tuple[int, int, socket.socket] | None:
        """Have the zygote fork a child. Return the pid, pidfd and status socket of the child, or
        None if the zygote refuses or has ended.
        """
        payload = order.to_memfd()
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                try:
                    socket.send_fds(self.control, [SPAWN], [payload, theirs.fileno(), *descriptors])
                finally:
                    os.close(payload)
            status.settimeout(BIRTH_S)
            word, pidfds, _, _ = socket.recv_fds(status, CONTROL_RECORD.size, 1)
        except OSError:
            word = b""
        if not word:
            status.close()
            return None
        assert word[:4] == BORN
        status.settimeout(None)
        self.has_forked = True
        return CONTROL_RECORD.unpack(word)[2], pidfds[0], status

    def exit_code_soon(self) -> int | None:
        """Return the zygote's exit code, or None if the zygote runs. If the zygote's end of the
        socket is closed, wait up to CLOSE_S for the exit code, because the kernel closes the
        sockets of a process before the process has ended.
        """
        with contextlib.suppress(OSError):
            self.control.settimeout(0.0)
            try:
                closed = self.control.recv(1) == b""
            except BlockingIOError:
                closed = False
            finally:
                self.control.settimeout(None)
            if not closed:
                return None
        return self.wait(CLOSE_S)


_lock = threading.Lock()
_zygotes: dict[InheritedState, _Zygote | None] = {}
"""The zygote for each set of inherited facts. None means that no zygote works with these facts, so
that children are started by command."""


def prepare(module: str, *arguments: str, environment: Mapping[str, str] = os.environ) -> None:
    """Start the zygote if it does not run, and have it import the modules that children need. This
    function returns at once.

    Call it as soon as it is certain that children will be forked, so that the zygote imports
    modules while this process continues.

    Args:
      module: the module whose `main` the children will run.
      arguments: the arguments for the function `prepare` of the module.
      environment: the environment of the children. Only its variables for the threads of BLAS are
        used.
    """
    zygote = _zygote(environment)
    if zygote is not None:
        with contextlib.suppress(OSError):  # the zygote has ended, and the next order notices that
            zygote.control.send(json.dumps([module, list(arguments)]).encode())


def fork(
    order: Order, descriptors: Sequence[int], stdout: IO[bytes] | None = None
) -> ForkedProcess | None:
    """Have the zygote fork a child. Return None if the zygote cannot, so that the caller must start
    the child by command.

    Args:
      descriptors: the file descriptors for the child, including its standard output and error.
        `order.numbers` has their new numbers.
      stdout: the reading end of the pipe for the child's standard output. It becomes `stdout` of
        the ForkedProcess.
    """
    environment = order.environment or {}
    if _start_variables(environment) != _start_variables(os.environ):
        return None
    zygote = _zygote(environment)
    if zygote is None:
        return None
    try:
        directory = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        birth = zygote.order(order, [directory, *descriptors])
    finally:
        os.close(directory)
    if birth is None:
        _discard_if_dead(_inherited_state(environment), zygote)
        return None
    return ForkedProcess(*birth, stdout)


def control_descriptors() -> set[int]:
    """Return the file descriptors of the control sockets of this process's zygotes, which stay open
    as long as this process runs."""
    with _lock:
        return {zygote.control.fileno() for zygote in _zygotes.values() if zygote is not None}


def close() -> None:
    """End the zygotes of this process. The next `fork` starts a new zygote."""
    with _lock:
        zygotes = [zygote for zygote in _zygotes.values() if zygote is not None]
        _zygotes.clear()
    for zygote in zygotes:
        zygote.close()


def _zygote(environment: Mapping[str, str]) -> _Zygote | None:
    check_threads()
    facts = _inherited_state(environment)
    with _lock:
        if facts not in _zygotes:
            if len(_zygotes) >= ZYGOTES_MAX:
                return None
            try:
                variables = {
                    name: value for name, value in os.environ.items() if name not in VARIABLES
                } | _thread_variables(environment)
                # The output is discarded: if the zygote does not work, children are started as
                # commands, and report the error themselves.
                _zygotes[facts] = _start(_Zygote, NAME, (), variables, subprocess.DEVNULL)
            except OSError as error:
                log.warning(
                    "the zygote could not be started (%s); children are started by command", error
                )
                _zygotes[facts] = None
        return _zygotes[facts]


def _discard_if_dead(facts: InheritedState, zygote: _Zygote) -> None:
    """Drop a zygote if it has ended. If it has never forked a child, start no zygote with the same
    facts again."""
    code = zygote.exit_code_soon()
    if code is None:  # the zygote runs, and has refused this order
        return
    with _lock:
        if _zygotes.get(facts) is not zygote:
            return
        del _zygotes[facts]
        if not zygote.has_forked:
            _zygotes[facts] = None
    zygote.close()
    log.warning(
        "the zygote, which forks child processes, ended (%s); this child is started by command",
        describe_exit(code),
    )


def _inherited_state(environment: Mapping[str, str]) -> InheritedState:
    """Return the facts about this process that a zygote for children with this environment inherits
    and passes on to its children."""
    import resource

    inherited = tuple(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.partition(":")[0] in _INHERITED
    )
    limits = tuple(
        resource.getrlimit(number)
        for name, number in sorted(vars(resource).items())
        if name.startswith("RLIMIT_")
    )
    variables = {**_start_variables(os.environ), **_thread_variables(environment)}
    return inherited, limits, os.getpriority(os.PRIO_PROCESS, 0), tuple(sorted(variables.items()))


def _start_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that Python, NumPy and the C library read when they start.

    PYTHONPATH and the variables for the threads of BLAS are left out, because an order can set them
    for its child.
    """
    own = {"PYTHONPATH", *VARIABLES}
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and name not in own
    }


def _thread_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in VARIABLES if name in environment}


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    for zygote in _zygotes.values():
        if zygote is not None:
            zygote.forget()
    _zygotes.clear()


register_at_fork(after_in_child=_forked)
atexit.register(close)

"""A launcher's side of its zygote (zygote.py): `fork` gives a child, or None where it has to be started by command.

There is one zygote for each set of facts that children inherit and no order can change: user, limits, ignored signals, and the variables
that Python, NumPy and the C library read when they start. These are this process's, except that an order may have its own for the threads
of BLAS. A zygote is started by `prepare` or with the first child, and ends with this process. A zygote that was killed is replaced with
the next child; its children go on, but how they end is not known any more: they count as killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from zmqdist.blas_threads import VARIABLES
from zmqdist.errors import describe_exit
from zmqdist.process.zygote import BORN, SPAWN, WORD, Order
from zmqdist.process.zygote_process import CLOSE_S, start_zygote

log = logging.getLogger("zmqdist.launch")

BIRTH_S = 30.0
"""So long a zygote may take for its imports and a child: a busy machine, a slow disk."""

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
_LIMITS = sorted(value for name, value in vars(resource).items() if name.startswith("RLIMIT_"))

Facts = tuple[object, ...]


class Forked:
    """A child of the zygote; what `Child` needs of a `subprocess.Popen`, and its pidfd.

    Attributes:
      pid: stays its own until `wait` has returned.
      stdout: its output, where a pipe was asked for.
      returncode: None until `wait` has returned.
    """

    def __init__(self, pid: int, pidfd: int, status: socket.socket, stdout: IO[bytes] | None) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.stdout = stdout
        self.returncode: int | None = None
        self._status = status

    def wait(self) -> int:
        """Wait for its end, and return its exit code: negative for a signal."""
        if self.returncode is None:
            try:
                word = self._status.recv(WORD.size)
            except OSError:
                word = b""
            # Without a word the zygote was killed, and how this child ended nobody knows.
            self.returncode = WORD.unpack(word)[2] if word else -int(signal.SIGKILL)
            self._status.close()
            os.close(self.pidfd)
        return self.returncode


class _Zygote:
    """One zygote process.

    Attributes:
      works: it has forked a child.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.works = False
        self._process = start_zygote(environment)
        self._control = self._process.control

    def fileno(self) -> int:
        return self._control.fileno()

    def tell(self, module: str, arguments: Sequence[str]) -> None:
        with contextlib.suppress(OSError):  # it is dead: the next order finds that out
            self._control.send(json.dumps([module, list(arguments)]).encode())

    def order(self, order: Order, descriptors: Sequence[int]) -> tuple[int, int, socket.socket] | None:
        """Have a child forked: its pid, pidfd and status socket. None: refused, or the zygote is dead."""
        payload = order.to_memfd()
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                try:
                    socket.send_fds(self._control, [SPAWN], [payload, theirs.fileno(), *descriptors])
                finally:
                    os.close(payload)
            status.settimeout(BIRTH_S)
            word, pidfds, _, _ = socket.recv_fds(status, WORD.size, 1)
        except OSError:
            word = b""
        if not word:
            status.close()
            return None
        assert word[:4] == BORN
        status.settimeout(None)
        self.works = True
        return WORD.unpack(word)[2], pidfds[0], status

    def exit_code_soon(self) -> int | None:
        """Its exit code, or None: it is not about to end. A process that is killed closes its descriptors first."""
        with contextlib.suppress(OSError):
            self._control.settimeout(0.0)
            try:
                gone = self._control.recv(1) == b""
            except BlockingIOError:
                gone = False
            finally:
                self._control.settimeout(None)
            if not gone:
                return None
        return self._process.wait(CLOSE_S)

    def close(self) -> None:
        """End it, and wait for its end; its children go on."""
        self._process.close()

    def forget(self) -> None:
        """In a process that was forked from the starting one: the zygote is not ours."""
        self._process.forget()


_lock = threading.Lock()
_zygotes: dict[Facts, _Zygote | None] = {}
"""None: it could not fork a child; with these facts, children are started by command."""


def prepare(module: str, *arguments: str, environment: Mapping[str, str] = os.environ) -> None:
    """Start the zygote, unless it runs, and have it import what a module needs. Returns at once.

    Args:
      module: whose `main` children will run.
      arguments: those of `module.prepare`.
      environment: of the children, as far as it is known: its variables for the threads of BLAS count.
    """
    zygote = _zygote(environment)
    if zygote is not None:
        zygote.tell(module, arguments)


def fork(order: Order, given: Sequence[int], stdout: IO[bytes] | None = None) -> Forked | None:
    """Have a child forked. None: it has to be started by command.

    Args:
      given: its descriptors, its standard output and error too; it gets them under `order.numbers`.
      stdout: the other end of its standard output, for the Forked.
    """
    environment = order.environment or {}
    if _fixed(environment) != _fixed(os.environ):
        return None
    zygote = _zygote(environment)
    if zygote is None:
        return None
    try:
        directory = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        made = zygote.order(order, [directory, *given])
    finally:
        os.close(directory)
    if made is None:
        _look_after(_facts(environment), zygote)
        return None
    return Forked(*made, stdout)


def control_descriptors() -> set[int]:
    """The descriptors that this process has for its zygotes, as long as it lives."""
    with _lock:
        return {zygote.fileno() for zygote in _zygotes.values() if zygote is not None}


def close() -> None:
    """End the zygotes of this process; the next child has a new one."""
    with _lock:
        zygotes = [zygote for zygote in _zygotes.values() if zygote is not None]
        _zygotes.clear()
    for zygote in zygotes:
        zygote.close()


def _zygote(environment: Mapping[str, str]) -> _Zygote | None:
    facts = _facts(environment)
    with _lock:
        if facts not in _zygotes:
            if len(_zygotes) >= ZYGOTES_MAX:
                return None
            try:
                inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
                _zygotes[facts] = _Zygote({**inherited, **_threads(environment)})
            except OSError as error:
                log.warning("the zygote could not be started (%s); children are started by command", error)
                _zygotes[facts] = None
        return _zygotes[facts]


def _look_after(facts: Facts, zygote: _Zygote) -> None:
    """It has not forked a child: it goes, if it is dead."""
    code = zygote.exit_code_soon()
    if code is None:  # it refused this one
        return
    with _lock:
        if _zygotes.get(facts) is not zygote:
            return
        del _zygotes[facts]
        if not zygote.works:
            _zygotes[facts] = None
    zygote.close()
    how = describe_exit(code)
    log.warning("the zygote, from which child processes are forked, ended (%s); this child is started by command", how)


def _facts(environment: Mapping[str, str]) -> Facts:
    """What a zygote for children with this environment has inherited, and its children do from it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    inherited = tuple(line for line in lines if line.partition(":")[0] in _INHERITED)
    limits = tuple(resource.getrlimit(number) for number in _LIMITS)
    fixed = {**_fixed(os.environ), **_threads(environment)}
    return inherited, limits, os.getpriority(os.PRIO_PROCESS, 0), tuple(sorted(fixed.items()))


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are read when Python, NumPy and the C library start, other than `_threads`. PYTHONPATH is the child's own."""
    own = {"PYTHONPATH", *VARIABLES}
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START) and name not in own}


def _threads(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in VARIABLES if name in environment}


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    for zygote in _zygotes.values():
        if zygote is not None:
            zygote.forget()
    _zygotes.clear()


os.register_at_fork(after_in_child=_forked)
atexit.register(close)

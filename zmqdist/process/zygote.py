"""The zygote: one process with the imports done, from which the child processes of a starting process are forked in milliseconds.

Importing Python, NumPy and zmqdist takes each worker half a second of CPU; a fork of a process that has done so takes a few milliseconds.
The zygote has one thread and no ZeroMQ context, so that a fork is safe. `zygote_client.py` is the starting process's side.

The zygote's promises
    A child gets the environment, working directory, standard streams and descriptors of its order, is the leader of a session of its own,
    and draws its own random numbers. Nothing of the zygote's descriptors stays open in it.
    A child that has ended keeps its process id until the starting process has read its exit code and closed the status socket.
    The zygote ends when the starting process ends or closes the control socket, however that comes. Its children do not end with it:
    each has a lifeline, a pipe of the starting process.
    What cannot be done as ordered is refused: the status socket is closed without a word, and the starting process uses a command.

On the control socket (SOCK_SEQPACKET) come
    JSON [module, arguments], without descriptors: import what this module needs with these arguments;
    SPAWN with descriptors: a memfd with the order (JSON), the status socket, the working directory, standard output, standard error, and
    the further ones of the order. On the status socket the zygote says BORN pid, with a pidfd, and later ENDED exit-code.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

SPAWN = b"spawn"
WORD = struct.Struct("<4si")
BORN, ENDED = b"born", b"end "
MESSAGE_BYTES_MAX = 4096
DESCRIPTORS_MAX = 64

NAME = "zmqdist-zygote"
"""What `ps -o comm` shows for a zygote; its children have other names."""

_PR_SET_NAME = 15
_STREAMS = 3


@dataclass(frozen=True)
class Order:
    """A child to be forked.

    Attributes:
      name: what `ps -o comm` shows.
      module: of this package; its `main()` is called with `sys.argv[1:]` = arguments, and gives the exit code.
      environment: all of it.
      numbers: the numbers that the further descriptors have in the child.
    """

    name: str
    module: str
    arguments: list[str]
    environment: dict[str, str]
    numbers: list[int]


def name_process(name: str) -> None:
    """Set what `ps -o comm` shows for the calling thread: the first 15 bytes of `name`."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


class Zygote:
    """The loop of the zygote process.

    Args:
      starter: a pidfd of the starting process.
    """

    def __init__(self, control: socket.socket, starter: int) -> None:
        self._control = control
        self._starter = starter
        self._children: dict[int, tuple[int, socket.socket]] = {}
        """pidfd -> pid and status socket of each child that runs."""
        self._ended: dict[int, tuple[int, socket.socket]] = {}
        """fd of a status socket -> the same, of each child that has ended and whose exit code is not read yet."""
        self._python_path = _folders(os.environ.get("PYTHONPATH", ""), os.getcwd())
        self._own_path = [folder for folder in sys.path if folder not in self._python_path]
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(starter, select.POLLIN)

    def serve(self) -> Callable[[], int] | None:
        """Fork children until the starting process is gone. Return None then, and in each child what it has to run."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._starter:
                    return None
                if fd == self._control.fileno():
                    try:
                        data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
                    except OSError:
                        return None
                    if not data:
                        return None
                    if data != SPAWN:
                        with contextlib.suppress(Exception):  # whoever needs it is told when it is ordered
                            _imported(*json.loads(data))
                    elif (run := self._spawn(*descriptors)) is not None:
                        return run
                elif fd in self._children:
                    self._report(fd)
                elif fd in self._ended:
                    self._reap(fd)

    def _spawn(
        self, payload: int, status: int, directory: int, out: int, err: int, *given: int
    ) -> Callable[[], int] | None:
        with contextlib.ExitStack() as stack:
            for descriptor in (directory, out, err, *given):
                stack.callback(os.close, descriptor)
            answer = stack.enter_context(socket.socket(fileno=status))
            with open(payload, "rb") as file:
                file.seek(0)
                order = Order(**json.load(file))
            try:
                module = _imported(order.module, order.arguments)
                path = self._path(order.environment.get("PYTHONPATH", ""), os.readlink(f"/proc/self/fd/{directory}"))
                leads, led = os.pipe()
                stack.callback(os.close, leads)
                try:
                    pid = os.fork()
                except OSError:
                    os.close(led)
                    raise
            except Exception:  # the command says what is wrong
                return None
            if pid:
                os.close(led)
                os.read(leads, 1)  # until it leads a session, a signal to its group would reach nobody
                self._born(pid, answer.dup())
                return None
            stack.pop_all()
            os.setsid()
            os.close(led)
            os.close(leads)
            answer.close()
            self._become(order, directory, out, err, given)
            sys.path[:] = path
            return module.main  # type: ignore[no-any-return]

    def _path(self, python_path: str, directory: str) -> list[str]:
        """The module path of a child. Raises ImportError where it has something else by a name that is imported already."""
        folders = _folders(python_path, directory)
        imported = {name.partition(".")[0] for name in sys.modules} | {"sitecustomize", "usercustomize"}
        for folder in folders:
            if folder not in self._python_path and os.path.isdir(folder):
                for entry in os.listdir(folder):
                    if entry.partition(".")[0] in imported:
                        raise ImportError(f"{folder} has another {entry}")
        return [*folders, *self._own_path]

    def _born(self, pid: int, answer: socket.socket) -> None:
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid, answer
        self._poll.register(pidfd, select.POLLIN)
        with contextlib.suppress(OSError):  # the starting process has given up, or is gone
            socket.send_fds(answer, [WORD.pack(BORN, pid)], [pidfd])

    def _report(self, pidfd: int) -> None:
        """Tell the exit code of a child that has ended."""
        pid, answer = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._ended[answer.fileno()] = pid, answer
        with contextlib.suppress(OSError):
            answer.send(WORD.pack(ENDED, code))
        self._poll.register(answer, 0)  # its end: it is reported without being asked for

    def _reap(self, fd: int) -> None:
        """Let a child's process id go: the starting process knows its exit code, or does not want it."""
        pid, answer = self._ended.pop(fd)
        self._poll.unregister(fd)
        answer.close()
        os.waitpid(pid, 0)

    def _become(self, order: Order, directory: int, out: int, err: int, given: Sequence[int]) -> None:
        """In the child: what a new process with this order would have."""
        self._control.close()
        os.close(self._starter)
        for pidfd, (_, answer) in self._children.items():
            os.close(pidfd)
            answer.close()
        for _, answer in self._ended.values():
            answer.close()
        os.fchdir(directory)
        os.close(directory)
        for descriptor, number in ((out, 1), (err, 2)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _place(given, order.numbers)
        os.environ.clear()
        os.environ.update(order.environment)
        _settle_in(order)


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors the numbers that they shall have; no number may be taken by one that is still to be moved."""
    import fcntl

    above = max([*descriptors, *numbers, _STREAMS]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _settle_in(order: Order) -> None:
    """What the start of Python does, as far as it depends on what is different in the child."""
    name_process(order.name)
    time.tzset()
    if (tempfile := sys.modules.get("tempfile")) is not None:
        vars(tempfile)["tempdir"] = None  # TMPDIR may be another
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # else all children would draw the same numbers; `random` sees to that itself
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]  # a text file: nobody has replaced it
    sys.argv = [order.module, *order.arguments]


def _imported(module: str, arguments: list[str]) -> ModuleType:
    """Import a module, and what it needs with these arguments: that it says by its function `prepare`, if it has one."""
    found = importlib.import_module(module)
    if (prepare := getattr(found, "prepare", None)) is not None:
        prepare(*arguments)
    return found


def _folders(python_path: str, directory: str) -> list[str]:
    """The folders of a PYTHONPATH, as seen from a directory."""
    return [os.path.join(directory, folder) for folder in python_path.split(os.pathsep)] if python_path else []


def main() -> int:
    """Be a zygote: CONTROL STARTER, two descriptors."""
    name_process(NAME)
    control, starter = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for descriptor in (control.fileno(), starter):
        os.set_inheritable(descriptor, False)
    zygote = Zygote(control, starter)
    os.chdir("/")  # the zygote keeps no folder busy
    gc.freeze()
    run = zygote.serve()
    if run is None:
        return 0
    del zygote
    return run()

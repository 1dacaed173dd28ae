"""The zygote: one process with the imports done, from which the child processes of a starting process are forked in milliseconds.

Importing Python, NumPy and zmqdist takes each process half a second of CPU; a fork of a process that has done so takes a few milliseconds.
The zygote has one thread and no ZeroMQ context, so that a fork is safe. A launcher has one for its workers and servers (zygote_client.py
is its side), and a worker has one for its slots and its tasks of the data service (bound_children.py).

The zygote's promises
    A child gets the environment, working directory, standard streams and descriptors of its order, is the leader of a session of its own,
    and draws its own random numbers. Nothing of the zygote's descriptors stays open in it.
    A child that has ended keeps its process id until its exit code has been told; one with a status socket until that is closed, too.
    The zygote ends when the starting process ends or closes the control socket, however that comes, and not by SIGINT or SIGTERM.
    A child is bound or it is not.
        One that is not outlives the zygote: it has a lifeline, a pipe of the starting process. What cannot be done as ordered is refused:
        its status socket is closed without a word, and the starting process uses a command.
        A bound child ends with the zygote, however that ends. It is ended when the starting process has been silent for longer than
        its watch allows: one that was stopped (SIGSTOP) has no child that goes on with work that others have taken over. When it has
        ended, so has what it started in its group.

On the control socket (SOCK_SEQPACKET) come
    JSON [module, arguments]: import what this module needs with these arguments;
    SPAWN with descriptors: a memfd with the order (JSON), the status socket and the working directory where the child is not
    bound, and those of the order;
    KILL ticket, for a bound child; BEAT, the starting process runs, and its next beat comes within so many milliseconds.
Of each child the zygote tells BORN pid and ENDED exit-code with its ticket: of a bound one on the control socket, of another one on
its status socket, and there with its pidfd.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import ModuleType

from zmqdist.child_command import add_working_directory
from zmqdist.process import reaper

CONTROL_RECORD = struct.Struct("<4sqq")
"""A verb, the ticket of the child that it is about, and a number."""

SPAWN, KILL, BEAT, BORN, ENDED = b"spwn", b"kill", b"beat", b"born", b"end "
MESSAGE_BYTES_MAX = 4096
DESCRIPTORS_MAX = 64

SILENT = 256
"""In place of an exit code, and none that a process can have: the child was ended because the starting process did not run."""

NAME = "zmqdist-zygote"
"""What `ps -o comm` shows for the zygote of a launcher; its children have other names."""

SLOTS_NAME = "zmqdist-slots"
"""The same for that of a worker; its children share it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_STREAMS = 3


@dataclass(frozen=True)
class Order:
    """A child to be forked.

    Attributes:
      name: what `ps -o comm` shows; empty: as the zygote.
      module: of this package. Its `main` is called with those descriptors for which there is no number and with `sys.argv[1:]` =
        arguments, and gives the exit code.
      environment: all of it. None: that of the zygote, and its directory and module path, too.
      numbers: the numbers that the first of its descriptors have in the child.
      ticket: of a bound child; 0: it is not bound.
    """

    name: str
    module: str
    arguments: list[str]
    environment: dict[str, str] | None
    numbers: list[int]
    ticket: int = 0

    def to_memfd(self) -> int:
        """Write it for the zygote; the caller closes the descriptor."""
        payload = os.memfd_create("zmqdist-order", os.MFD_CLOEXEC)
        with open(payload, "wb", closefd=False) as file:
            file.write(json.dumps(asdict(self)).encode())
        return payload


def name_process(name: str) -> None:
    """Set what `ps -o comm` shows for the calling thread: the first 15 bytes of `name`."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


@dataclass
class _Child:
    """A child that runs, or one with a status socket that has ended.

    Attributes:
      ticket: 0: it is not bound.
      told: where its words go: the control socket, or its own.
    """

    pid: int
    ticket: int
    report_to: socket.socket
    silenced: bool = False

    def report(self, verb: bytes, number: int, descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # the starting process has given up, or is gone
            socket.send_fds(self.report_to, [CONTROL_RECORD.pack(verb, self.ticket, number)], descriptors)


class Zygote:
    """The loop of the zygote process.

    Args:
      starter: a pidfd of the starting process.
    """

    def __init__(self, control: socket.socket, starter: int) -> None:
        self._control = control
        self._starter = starter
        for descriptor in (control.fileno(), starter):
            os.set_inheritable(descriptor, False)
        self._children: dict[int, _Child] = {}
        """By their pidfd."""
        self._bound: dict[int, _Child] = {}
        """Those of them that are bound, by ticket."""
        self._ended: dict[int, _Child] = {}
        """By their status socket: those that have ended and whose exit code is not read yet."""
        self._watch_s: float | None = None
        self._silent_at = 0.0
        self._python_path = _folders(os.environ.get("PYTHONPATH", ""), os.getcwd())
        self._own_path = [folder for folder in sys.path if folder not in self._python_path]
        # Whoever stops a whole group of processes means the starting process, and that one its children.
        self._handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(starter, select.POLLIN)

    def serve(self) -> Callable[[], int] | None:
        """Fork children until the starting process is gone. Return None then, and in each child what it has to run."""
        while True:
            ready = self._poll.poll(self._silence_left_ms())
            if not ready:
                self._end_children_for_silence()
            for fd, _ in ready:
                if fd in self._children:
                    self._report(fd)
                elif fd in self._ended:
                    self._reap(fd)
                else:
                    data, descriptors = (b"", []) if fd == self._starter else self._receive()
                    if not data:
                        for child in self._bound.values():
                            reaper.end_group(child.pid)
                        return None
                    if (run := self._handle(data, descriptors)) is not None:
                        return run

    def _silence_left_ms(self) -> int | None:
        """So long the starting process may be silent still."""
        if self._watch_s is None or not self._bound:
            return None
        return max(0, math.ceil((self._silent_at - time.monotonic()) * 1000))

    def _end_children_for_silence(self) -> None:
        self._beat(self._watch_s or 0.0)
        for child in self._bound.values():
            child.silenced = True
            reaper.end_group(child.pid)

    def _beat(self, watch_s: float) -> None:
        self._watch_s = watch_s
        self._silent_at = time.monotonic() + watch_s

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
        except OSError:
            return b"", []
        return data, descriptors

    def _handle(self, data: bytes, descriptors: list[int]) -> Callable[[], int] | None:
        """Return what it is to run, in a child."""
        if data == SPAWN:
            return self._spawn(*descriptors)
        if data.startswith(b"["):
            with contextlib.suppress(Exception):  # whoever needs it is told when it is ordered
                _imported(*json.loads(data))
            return None
        verb, ticket, number = CONTROL_RECORD.unpack(data)
        if verb == BEAT:
            self._beat(number / 1000)
        elif ticket in self._bound:
            reaper.end_group(self._bound[ticket].pid)
        return None

    def _spawn(self, payload: int, *descriptors: int) -> Callable[[], int] | None:
        with contextlib.ExitStack() as stack:
            for descriptor in descriptors:
                stack.callback(os.close, descriptor)
            with open(payload, "rb") as file:
                file.seek(0)
                order = Order(**json.load(file))
            descriptors_in = list(descriptors)
            status = None if order.ticket else descriptors_in.pop(0)
            directory = None if order.environment is None else descriptors_in.pop(0)
            try:
                module = _imported(order.module, order.arguments)
                path = None if directory is None else self._path(order, os.readlink(f"/proc/self/fd/{directory}"))
                pid = self._fork(bool(order.ticket))
            except Exception:  # the command says what is wrong
                if status is None:
                    raise
                return None
            if pid:
                self._born(
                    _Child(pid, order.ticket, self._control if status is None else socket.socket(fileno=os.dup(status)))
                )
                return None
            stack.pop_all()
            if status is not None:
                os.close(status)
            self._set_up_child(order, directory, path, descriptors_in)
            main = partial(module.main, *descriptors_in[len(order.numbers) :])
            return partial(_run_bound, main) if order.ticket else main

    def _fork(self, bound: bool) -> int:
        """As `os.fork`; returns when the child leads a session, and is bound. Before, a signal to its group would reach nobody."""
        leads, led = os.pipe()
        zygote = os.getpid()
        try:
            pid = os.fork()
            if not pid:
                os.setsid()
                if bound:
                    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                    if os.getppid() != zygote:  # it was killed before
                        os._exit(1)
                for number, handler in self._handlers.items():
                    signal.signal(number, handler or signal.SIG_DFL)
        finally:
            os.close(led)
        if pid:
            os.read(leads, 1)
        os.close(leads)
        return pid

    def _path(self, order: Order, directory: str) -> list[str]:
        """The module path of a child. Raises ImportError where it has something else by a name that is imported already."""
        folders = _folders((order.environment or {}).get("PYTHONPATH", ""), directory)
        imported = {name.partition(".")[0] for name in sys.modules} | {"sitecustomize", "usercustomize"}
        for folder in folders:
            if folder not in self._python_path and os.path.isdir(folder):
                for entry in os.listdir(folder):
                    if entry.partition(".")[0] in imported:
                        raise ImportError(f"{folder} has another {entry}")
        return [*folders, *self._own_path]

    def _born(self, child: _Child) -> None:
        pidfd = os.pidfd_open(child.pid)
        self._children[pidfd] = child
        self._poll.register(pidfd, select.POLLIN)
        if child.ticket:
            self._bound[child.ticket] = child
        child.report(BORN, child.pid, () if child.ticket else [pidfd])

    def _report(self, pidfd: int) -> None:
        """Tell the exit code of a child that has ended."""
        child = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        code = reaper.exit_code(child.pid)
        if child.ticket:
            del self._bound[child.ticket]
            reaper.end_group(child.pid)
            child.report(ENDED, SILENT if child.silenced else code)
            reaper.reap(child.pid)
        else:
            self._ended[child.report_to.fileno()] = child
            child.report(ENDED, code)
            self._poll.register(child.report_to, 0)  # its end: it is reported without being asked for

    def _reap(self, fd: int) -> None:
        """The starting process knows the exit code of a child, or does not want it."""
        child = self._ended.pop(fd)
        self._poll.unregister(fd)
        child.report_to.close()
        reaper.reap(child.pid)

    def _set_up_child(
        self, order: Order, directory: int | None, path: list[str] | None, descriptors_in: Sequence[int]
    ) -> None:
        """In the child: what a new process with this order would have."""
        self._control.close()
        os.close(self._starter)
        for pidfd in self._children:
            os.close(pidfd)
        for child in (*self._children.values(), *self._ended.values()):
            child.report_to.close()
        if directory is not None:
            os.fchdir(directory)
            os.close(directory)
        _place(descriptors_in, order.numbers)
        if order.environment is not None:
            os.environ.clear()
            os.environ.update(order.environment)
        _settle_in(order)
        if path is not None:
            sys.path[:] = path


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the first descriptors the numbers that they shall have; no number may be taken by one that is still to be moved."""
    import fcntl

    above = max([*descriptors, *numbers, _STREAMS]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors[: len(numbers)]]
    for descriptor in descriptors[: len(numbers)]:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _settle_in(order: Order) -> None:
    """What the start of Python does, as far as it depends on what is different in the child."""
    if order.name:
        name_process(order.name)
    time.tzset()
    if (tempfile := sys.modules.get("tempfile")) is not None:
        vars(tempfile)["tempdir"] = None  # TMPDIR may be another
    if (generators := sys.modules.get("numpy.random")) is not None:
        generators.seed()  # else all children would draw the same numbers; `random` sees to that itself
    sys.argv = [order.module, *order.arguments]
    bound = bool(order.ticket)
    for stream in (sys.stdout, sys.stderr) if bound else (sys.stdout,):
        if hasattr(stream, "reconfigure"):
            # Lines of a bound child in one piece, with PYTHONUNBUFFERED too: all of them write to the same pipe.
            stream.reconfigure(line_buffering=bound or os.isatty(1), write_through=False if bound else None)
    if bound:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the starting process's to decide about
        faulthandler.enable(all_threads=False)  # a segfault in user code leaves a traceback for the error that names it


def _run_bound(main: Callable[[], int]) -> int:
    """Without the end of a Python process, which threads of the user's could hold up. Does not return."""
    code = 1
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


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
    """Be a zygote: CONTROL STARTER, two descriptors, NAME, and the modules that bound children run."""
    control, starter, name, *modules = sys.argv[1:]
    name_process(name)
    for module in modules:
        _imported(module, [])
    if modules:
        add_working_directory()
    else:
        os.chdir("/")  # the zygote keeps no folder busy
    gc.collect()
    gc.freeze()  # the collector must not write into pages that the children share
    run = Zygote(socket.socket(fileno=int(control)), int(starter)).serve()
    return 0 if run is None else run()

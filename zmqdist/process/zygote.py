"""The zygote: a process that has done its imports, from which another process forks its children in milliseconds.

Importing Python, NumPy and zmqdist costs each process half a second of CPU; forking a process that has imported them takes a few
milliseconds. The zygote has one thread and no ZeroMQ context, so that a fork is safe. A launcher has a zygote for its workers and
servers (zygote_client.py is its side), a worker has one for its slots and its tasks of the data service (bound_children.py). Below, the
launcher or worker is called the starting process.

The zygote's promises
    A child gets the environment, working directory, standard streams and descriptors of its order. It leads a session of its own, and
    draws its own random numbers. It has none of the zygote's descriptors open.
    A child that has ended keeps its process id until its exit code was reported; a child with a status socket, also until that is closed.
    The zygote ends when the starting process ends or closes the control socket, for any reason, and not by SIGINT or SIGTERM.
    A child is bound or unbound.
        An unbound child outlives the zygote; its lifeline is a pipe of the starting process. If an order cannot be carried out, the
        zygote refuses it: it closes the status socket without a record, and the starting process runs a command instead.
        A bound child ends with the zygote, however the zygote ends. The zygote also ends it when the starting process has been silent
        for longer than its watch: the work of a stopped process (SIGSTOP) was handed to other processes, so its children must not
        continue. When a bound child has ended, all processes that it has started in its group have ended, too.

Messages to the control socket (SOCK_SEQPACKET)
    JSON [module, arguments]: import what this module needs with these arguments;
    SPAWN with descriptors: a memfd with the order (JSON); the status socket and the working directory if the child is unbound; and
    the descriptors of the order;
    KILL ticket, for a bound child; BEAT: the starting process runs, and it will send the next BEAT within that many milliseconds.
The zygote reports BORN pid and ENDED exit-code of each child with its ticket: of a bound child on the control socket, of an unbound child
on its status socket, with its pidfd.
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
"""A verb, the ticket of the child that it concerns, and a number."""

SPAWN, KILL, BEAT, BORN, ENDED = b"spwn", b"kill", b"beat", b"born", b"end "
MESSAGE_BYTES_MAX = 4096
DESCRIPTORS_MAX = 64

SILENT = 256
"""An exit code that no process can have: the zygote ended the child because the starting process did not run."""

NAME = "zmqdist-zygote"
"""The name of a launcher's zygote in `ps -o comm`; its children have other names."""

SLOTS_NAME = "zmqdist-slots"
"""The name of a worker's zygote and of its children in `ps -o comm`."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_STREAMS = 3


@dataclass(frozen=True)
class Order:
    """A child to be forked.

    Attributes:
      name: its name in `ps -o comm`; if empty, it keeps the zygote's name.
      module: a module of this package. Its `main` gets the descriptors that have no number, with `sys.argv[1:]` = `arguments`, and returns
        the exit code.
      environment: the complete environment. None: the child has the zygote's environment, working directory and module path.
      numbers: the numbers that the first descriptors get in the child.
      ticket: the ticket of a bound child; 0 for an unbound one.
    """

    name: str
    module: str
    arguments: list[str]
    environment: dict[str, str] | None
    numbers: list[int]
    ticket: int = 0

    def to_memfd(self) -> int:
        """Write the order into a memfd for the zygote. Return its descriptor, which the caller must close."""
        payload = os.memfd_create("zmqdist-order", os.MFD_CLOEXEC)
        with open(payload, "wb", closefd=False) as file:
            file.write(json.dumps(asdict(self)).encode())
        return payload


def name_process(name: str) -> None:
    """Set the name of the calling thread in `ps -o comm` to the first 15 bytes of `name`."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


@dataclass
class _Child:
    """A child that runs, or a child with a status socket that has ended.

    Attributes:
      ticket: 0 for an unbound child.
      report_to: the socket for its records: the control socket, or its status socket.
      silenced: whether the zygote has ended it because the starting process was silent.
    """

    pid: int
    ticket: int
    report_to: socket.socket
    silenced: bool = False

    def report(self, verb: bytes, number: int, descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # the starting process has closed the socket, or has ended
            socket.send_fds(self.report_to, [CONTROL_RECORD.pack(verb, self.ticket, number)], descriptors)


class Zygote:
    """The main loop of the zygote process.

    Args:
      starter: a pidfd of the starting process.
    """

    def __init__(self, control: socket.socket, starter: int) -> None:
        self._control = control
        self._starter = starter
        for descriptor in (control.fileno(), starter):
            os.set_inheritable(descriptor, False)
        self._children: dict[int, _Child] = {}
        """All running children, by pidfd."""
        self._bound: dict[int, _Child] = {}
        """The running children that are bound, by ticket."""
        self._ended: dict[int, _Child] = {}
        """Children that have ended and whose exit code was not read yet, by status socket."""
        self._watch_s: float | None = None
        self._silent_at = 0.0
        self._python_path = _folders(os.environ.get("PYTHONPATH", ""), os.getcwd())
        self._own_path = [folder for folder in sys.path if folder not in self._python_path]
        # A signal to a whole group of processes is for the starting process, which ends its children itself.
        self._handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(starter, select.POLLIN)

    def serve(self) -> Callable[[], int] | None:
        """Fork children until the starting process has ended, then return None. In each child, return the function that it must run."""
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
        """Return how many milliseconds the starting process may still be silent; None if there is no limit."""
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
        """Carry out a message of the control socket. In a new child, return the function that it must run."""
        if data == SPAWN:
            return self._spawn(*descriptors)
        if data.startswith(b"["):
            with contextlib.suppress(Exception):  # a later order that needs the module is refused
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
            except Exception:  # refuse: the starting process then runs a command, which reports the error
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
        """Fork, as `os.fork`, but return only when the child leads a session and is bound, so that a signal to its group reaches it."""
        leads, led = os.pipe()
        zygote = os.getpid()
        try:
            pid = os.fork()
            if not pid:
                os.setsid()
                if bound:
                    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                    if os.getppid() != zygote:  # the zygote was killed before the line above, so it sends no signal
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
        """Return the module path of a child.

        Raises ImportError if a folder in it has another module under a name that is imported already.
        """
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
        """Report the exit code of a child that has ended."""
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
            self._poll.register(child.report_to, 0)  # without flags, poll reports only that the other end was closed

    def _reap(self, fd: int) -> None:
        """Reap a child, because the starting process has read its exit code or does not need it."""
        child = self._ended.pop(fd)
        self._poll.unregister(fd)
        child.report_to.close()
        reaper.reap(child.pid)

    def _set_up_child(
        self, order: Order, directory: int | None, path: list[str] | None, descriptors_in: Sequence[int]
    ) -> None:
        """Give this forked child the descriptors, working directory and environment of its order."""
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
    """Move the first descriptors to their numbers.

    All are first moved above these numbers, because a number may belong to a descriptor that is moved later.
    """
    import fcntl

    above = max([*descriptors, *numbers, _STREAMS]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors[: len(numbers)]]
    for descriptor in descriptors[: len(numbers)]:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _settle_in(order: Order) -> None:
    """Redo the parts of Python's start that depend on the child's own name, environment and streams."""
    if order.name:
        name_process(order.name)
    time.tzset()
    if (tempfile := sys.modules.get("tempfile")) is not None:
        vars(tempfile)["tempdir"] = None  # the child may have another TMPDIR than the zygote
    if (generators := sys.modules.get("numpy.random")) is not None:
        generators.seed()  # else all children would draw the same numbers; `random` reseeds itself after a fork
    sys.argv = [order.module, *order.arguments]
    bound = bool(order.ticket)
    for stream in (sys.stdout, sys.stderr) if bound else (sys.stdout,):
        if hasattr(stream, "reconfigure"):
            # A bound child writes whole lines, also with PYTHONUNBUFFERED, because all bound children write to the same pipe.
            stream.reconfigure(line_buffering=bound or os.isatty(1), write_through=False if bound else None)
    if bound:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starting process decides which children Ctrl-C ends
        faulthandler.enable(all_threads=False)  # a segfault in the program's code leaves a traceback for the error text


def _run_bound(main: Callable[[], int]) -> int:
    """Run a bound child and end it at once, because threads of the program could delay the normal end of Python. Does not return."""
    code = 1
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _imported(module: str, arguments: list[str]) -> ModuleType:
    """Import a module, and have its function `prepare`, if it has one, import what it needs with these arguments."""
    found = importlib.import_module(module)
    if (prepare := getattr(found, "prepare", None)) is not None:
        prepare(*arguments)
    return found


def _folders(python_path: str, directory: str) -> list[str]:
    """Return the folders of a PYTHONPATH; relative ones are taken relative to `directory`."""
    return [os.path.join(directory, folder) for folder in python_path.split(os.pathsep)] if python_path else []


def main() -> int:
    """Run a zygote. Its arguments: CONTROL and STARTER, two descriptors; NAME; the modules that bound children run."""
    control, starter, name, *modules = sys.argv[1:]
    name_process(name)
    for module in modules:
        _imported(module, [])
    if modules:
        add_working_directory()
    else:
        os.chdir("/")  # so that the zygote does not keep a file system from being unmounted
    gc.collect()
    gc.freeze()  # so that the collector does not write into pages that the children share
    run = Zygote(socket.socket(fileno=int(control)), int(starter)).serve()
    return 0 if run is None else run()

"""The zygote: a process that has imported the modules of its children, and forks a child in
milliseconds when another process orders it.

The start of Python and the imports of NumPy and zmqdist cost half a second of CPU. A fork of a
process that has done this takes a few milliseconds. The zygote has one thread and no ZeroMQ
context, so that a fork is safe. A launcher has a zygote for its workers and servers
(zygote_client.py is the launcher's side). A worker has a zygote for its slots and its tasks of the
data service (bound_children.py is the worker's side). Below, the launcher or worker is called the
starting process.

The zygote's promises
    A child has the environment, working directory, standard streams and file descriptors that its
    order names. The child leads a session of its own, draws its own random numbers, and has none of
    the zygote's file descriptors open.
    After a child has ended, the kernel does not reuse its process id until the zygote has reported
    its exit code. The process id of a child with a status socket stays reserved until the starting
    process has also closed this socket.
    The zygote ends when the starting process ends in any way or closes the control socket. SIGINT
    and SIGTERM do not end the zygote. A child is bound or unbound.
        An unbound child continues when the zygote ends. Its lifeline leads to the starting process.
        If the zygote cannot carry out an order for an unbound child, it closes the child's status
        socket without a report, and the starting process runs a command instead. A bound child ends
        when the zygote ends in any way. The zygote also kills its bound children when the starting
        process has been silent for longer than its watch. If the starting process was stopped
        (SIGSTOP), other processes have taken over its work, so its children must not continue,
        unless they are kept. When a bound child has ended, the zygote kills all processes that the
        child has started in its process group.

Messages to the control socket (SOCK_SEQPACKET)
    JSON [module, arguments] has the zygote import the modules that a child with this module and
    these arguments needs. SPAWN orders a child. The file descriptors of the message are a memfd
    with the order as JSON; for an unbound child, its status socket and working directory; and the
    file descriptors for the child.
    KILL has the zygote kill the bound child with the ticket of the message.
    KEEP has the bound child with this ticket continue while the starting process is silent, for the
    number's milliseconds.
    BEAT tells the zygote that the starting process runs. Its number is the watch: the milliseconds
    within which the next message must arrive.
About each child, the zygote reports BORN with the pid, and later ENDED with the exit code. Both
reports have the child's ticket. The zygote writes the reports about a bound child to the control
socket. It writes the reports about an unbound child to the child's status socket, and sends a pidfd
of the child with BORN.

A child is reaped in two steps: first the exit code is read, later the process id is released. Between
the two steps the kernel gives the process id to no other process, so that a signal to the dead child
or its process group cannot reach another process.
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
from dataclasses import asdict, dataclass, field
from functools import partial
from types import ModuleType

from zmqdist import child_command
from zmqdist.lazy_names import without_collection
from zmqdist.process import stack_dump

CONTROL_RECORD = struct.Struct("<4sqq")
"""The form of KILL, KEEP, BEAT, BORN and ENDED: the verb, the ticket of a child, and a number."""

SPAWN, KILL, KEEP, BEAT = b"spwn", b"kill", b"keep", b"beat"
BORN, ENDED = b"born", b"end "
MESSAGE_BYTES_MAX = 4096
DESCRIPTORS_MAX = 64

SILENT = 256
"""An exit code that no process can have. It means that the zygote killed the child because the
starting process did not run."""

NAME = "zmqdist-zygote"
"""The name of a launcher's zygote in `ps -o comm`. Each child of this zygote has a name of its
own.
"""

SLOTS_NAME = "zmqdist-slots"
"""The name of a worker's zygote and of its children in `ps -o comm`."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_STREAMS = 3


@dataclass(frozen=True)
class Order:
    """The order for one child, which the starting process writes into a memfd and the zygote
    carries out.

    Attributes:
      name: the name of the child in `ps -o comm`. "" means the zygote's name.
      module: a module of this package. The child calls its `main`, which returns the exit code. The
        arguments of `main` are the child's file descriptors, except those that get a number of
        `numbers`.
      arguments: the child's `sys.argv[1:]`.
      environment: all environment variables of the child. None means that the child has the
        zygote's environment, working directory and module path.
      numbers: numbers of file descriptors in the child. The first descriptor of the order gets the
        first number, and so on.
      ticket: the ticket of a bound child. 0 means that the child is unbound.
      variables: environment variables that a bound child has beside those of the zygote.
    """

    name: str
    module: str
    arguments: list[str]
    environment: dict[str, str] | None
    numbers: list[int]
    ticket: int = 0
    variables: dict[str, str] = field(default_factory=dict)

    def to_memfd(self) -> int:
        """Write the order into a memfd for the zygote. Return the file descriptor of the memfd,
        which the caller must close."""
        payload = os.memfd_create("zmqdist-order", os.MFD_CLOEXEC)
        with open(payload, "wb", closefd=False) as file:
            file.write(json.dumps(asdict(self)).encode())
        return payload


def name_process(name: str) -> None:
    """Set the name of the calling thread in `ps -o comm` to the first 15 bytes of `name`."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def exit_code(pid: int) -> int:
    """Wait until a child has ended, and return its exit code, which is -n if signal n ended it. The
    process id of the child stays reserved until `reap`.
    """
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert status is not None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def end_group(pid: int) -> None:
    """Kill all processes in the process group that a child leads. The child may have ended, but
    must not have been reaped."""
    os.killpg(pid, signal.SIGKILL)


def reap(pid: int) -> None:
    """Release the process id of a child that has ended."""
    os.waitpid(pid, 0)


def wait_and_reap(pid: int, timeout_s: float) -> int | None:
    """Wait at most `timeout_s` until a child has ended, and reap it. Return its exit code, or None
    if the child still runs."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(math.ceil(timeout_s * 1000)):
            return None
    finally:
        os.close(pidfd)
    code = exit_code(pid)
    reap(pid)
    return code


@dataclass
class _Child:
    """A child that runs, or an unbound child that has ended and was not yet reaped.

    Attributes:
      ticket: the ticket of a bound child. 0 means that the child is unbound.
      report_to: the socket for reports about the child: the control socket for a bound child, else
        the child's status socket.
      silence_s: for how many seconds the starting process may be silent; None means the watch.
      silenced: whether the zygote has killed the child because the starting process was silent.
    """

    pid: int
    ticket: int
    report_to: socket.socket
    silence_s: float | None = None
    silenced: bool = False

    def report(self, verb: bytes, number: int, descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):
            # the launcher or worker has closed the socket, or has ended
            socket.send_fds(
                self.report_to, [CONTROL_RECORD.pack(verb, self.ticket, number)], descriptors
            )


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
        self._unreaped: dict[int, _Child] = {}
        """Unbound children that have ended, until the starting process closes their status sockets.
        The key is the zygote's descriptor of the status socket.
        """
        self._watch_s = math.inf
        self._heard_at = 0.0
        python_path = list(
            map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        )
        self._fresh_path = [
            folder for folder in child_command.fresh_path if folder not in python_path
        ]
        self._imported_from = {*sys.path, *child_command.fresh_path}
        # The zygote ignores these signals, which may go to its whole process group, because the
        # starting process ends its children itself.
        self._handlers = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(starter, select.POLLIN)

    def serve(self) -> Callable[[], int] | None:
        """Fork children until the starting process has ended or has closed the control socket, and
        then return None. In each forked child, return the function that the child must run.
        """
        while True:
            ready = self._poll.poll(self._silence_left_ms())
            if not ready:
                self._end_children_for_silence()
            for fd, _ in ready:
                if fd in self._children:
                    self._report(fd)
                elif fd in self._unreaped:
                    self._reap(fd)
                else:
                    data, descriptors = (b"", []) if fd == self._starter else self._receive()
                    if not data:
                        for child in self._bound.values():
                            end_group(child.pid)
                        return None
                    if (run := self._handle(data, descriptors)) is not None:
                        return run

    def _silence_left_ms(self) -> int | None:
        """Return for how many more milliseconds the starting process may be silent. None means that
        there is no limit."""
        limits_s = [self._silence_s(child) for child in self._bound.values() if not child.silenced]
        left_s = self._heard_at + min(limits_s, default=math.inf) - time.monotonic()
        return None if left_s == math.inf else max(0, math.ceil(left_s * 1000))

    def _silence_s(self, child: _Child) -> float:
        return self._watch_s if child.silence_s is None else child.silence_s

    def _end_children_for_silence(self) -> None:
        silent_s = time.monotonic() - self._heard_at
        for child in self._bound.values():
            if not child.silenced and silent_s >= self._silence_s(child):
                child.silenced = True
                end_group(child.pid)

    def _receive(self) -> tuple[bytes, list[int]]:
        with contextlib.suppress(OSError):
            return socket.recv_fds(self._control, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)[:2]
        return b"", []

    def _handle(self, data: bytes, descriptors: list[int]) -> Callable[[], int] | None:
        """Carry out a message of the control socket. In a forked child, return the function that
        the child must run. Otherwise return None.
        """
        # any message shows that the starting process runs; after a stop, orders come before a BEAT
        self._heard_at = time.monotonic()
        if data == SPAWN:
            return self._spawn(*descriptors)
        if data.startswith(b"["):
            with contextlib.suppress(Exception):
                # `_spawn` imports again; a second failure refuses the order
                _imported(*json.loads(data))
            return None
        verb, ticket, number = CONTROL_RECORD.unpack(data)
        if verb == BEAT:
            self._watch_s = number / 1000
        elif ticket in self._bound and verb == KEEP:
            self._bound[ticket].silence_s = number / 1000
        elif ticket in self._bound:
            end_group(self._bound[ticket].pid)
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
                path = self._path(
                    order.environment or {},
                    "" if directory is None else os.readlink(f"/proc/self/fd/{directory}"),
                )
                pid = self._fork(bool(order.ticket))
            except Exception:
                # refuse the order, so that the starting process runs a command, which reports the
                # error
                if status is None:
                    raise
                return None
            if pid:
                self._born(
                    _Child(
                        pid,
                        order.ticket,
                        self._control if status is None else socket.socket(fileno=os.dup(status)),
                    )
                )
                return None
            stack.pop_all()
            if status is not None:
                os.close(status)
            self._set_up_child(order, directory, path, descriptors_in)
            main = partial(module.main, *descriptors_in[len(order.numbers) :])
            return partial(_run_bound, main) if order.ticket else main

    def _fork(self, bound: bool) -> int:
        """Fork as `os.fork` does, but return in the zygote only when the child leads its process
        group, so that the zygote can signal the group. A bound child also asks the kernel to kill
        it when the zygote ends.
        """
        leads, led = os.pipe()
        zygote = os.getpid()
        try:
            pid = os.fork()
            if not pid:
                os.setsid()
                if bound:
                    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                    if os.getppid() != zygote:
                        # the zygote ended before prctl, so the kernel sends no signal
                        os._exit(1)
                for number, handler in self._handlers.items():
                    signal.signal(number, handler or signal.SIG_DFL)
        finally:
            os.close(led)
        if pid:
            os.read(leads, 1)
        os.close(leads)
        return pid

    def _path(self, environment: dict[str, str], directory: str) -> list[str]:
        """Return the folders on which Python would start in a child.

        Raises ImportError if a folder on the child's module path has another module with the name
        of a module that the zygote has imported, unless the folder is hidden from libraries.
        """
        folders = _folders(environment.get("PYTHONPATH", ""), directory)
        first, hidden = child_command.folders_of(environment.get(child_command.PATH_ENV))
        imported = {name.partition(".")[0] for name in sys.modules} | {
            "sitecustomize",
            "usercustomize",
        }
        for folder in {*first, *folders} - self._imported_from.union(hidden):
            if os.path.isdir(folder):
                for entry in os.listdir(folder):
                    if entry.partition(".")[0] in imported:
                        raise ImportError(
                            f"{folder} has {entry}, and the zygote has imported another module of "
                            f"this name"
                        )
        return [*folders, *self._fresh_path]

    def _born(self, child: _Child) -> None:
        pidfd = os.pidfd_open(child.pid)
        self._children[pidfd] = child
        self._poll.register(pidfd, select.POLLIN)
        if child.ticket:
            self._bound[child.ticket] = child
        child.report(BORN, child.pid, () if child.ticket else [pidfd])

    def _report(self, pidfd: int) -> None:
        """Report the exit code of a child that has ended. If the child is bound, kill the processes
        that it has left behind."""
        child = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        code = exit_code(child.pid)
        if child.ticket:
            del self._bound[child.ticket]
            end_group(child.pid)
            child.report(ENDED, SILENT if child.silenced else code)
            reap(child.pid)
        else:
            self._unreaped[child.report_to.fileno()] = child
            child.report(ENDED, code)
            # without flags, poll reports only that the other end is closed
            self._poll.register(child.report_to, 0)

    def _reap(self, fd: int) -> None:
        """Reap an unbound child that has ended. The starting process has closed the status socket,
        so it no longer uses the pid."""
        child = self._unreaped.pop(fd)
        self._poll.unregister(fd)
        child.report_to.close()
        reap(child.pid)

    def _set_up_child(
        self, order: Order, directory: int | None, path: list[str], descriptors_in: Sequence[int]
    ) -> None:
        """Give this forked child the file descriptors, working directory and environment of its
        order. Close the zygote's descriptors."""
        self._control.close()
        os.close(self._starter)
        for pidfd in self._children:
            os.close(pidfd)
        for child in (*self._children.values(), *self._unreaped.values()):
            child.report_to.close()
        if directory is not None:
            os.fchdir(directory)
            os.close(directory)
        _place_descriptors(descriptors_in, order.numbers)
        if order.environment is not None:
            os.environ.clear()
            os.environ.update(order.environment)
            child_command.use_path(path)
        os.environ.update(order.variables)
        _settle_in(order)


def _place_descriptors(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the first of these file descriptors the numbers in `numbers`.

    These descriptors are first moved above all numbers, because a number may belong to a descriptor
    that has not been moved yet.
    """
    import fcntl

    above = max([*descriptors, *numbers, _STREAMS]) + 1
    moved = [
        fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)
        for descriptor in descriptors[: len(numbers)]
    ]
    for descriptor in descriptors[: len(numbers)]:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _settle_in(order: Order) -> None:
    """Redo the parts of Python's start-up that depend on the child's name, environment and standard
    streams."""
    if order.name:
        name_process(order.name)
    time.tzset()
    if (tempfile := sys.modules.get("tempfile")) is not None:
        vars(tempfile)["tempdir"] = None  # the child may have another TMPDIR than the zygote
    if (generators := sys.modules.get("numpy.random")) is not None:
        # NumPy, unlike `random`, does not reseed after a fork: all children would draw equal
        # numbers
        generators.seed()
    sys.argv = [order.module, *order.arguments]
    bound = bool(order.ticket)
    for stream in (sys.stdout, sys.stderr) if bound else (sys.stdout,):
        if hasattr(stream, "reconfigure"):
            # A bound child writes whole lines, even with PYTHONUNBUFFERED, because several
            # processes may write to the same pipe.
            stream.reconfigure(
                line_buffering=bound or os.isatty(1), write_through=False if bound else None
            )
    if bound:
        # the process that ordered this child decides what Ctrl-C ends
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # a segfault in the program's code leaves a traceback for the error text
        faulthandler.enable(all_threads=False)
        stack_dump.serve_stacks()


def _run_bound(main: Callable[[], int]) -> int:
    """Run `main` in a bound child, and then end the process at once, because threads of the program
    could delay the normal end of Python. This function does not return.
    """
    code = 1
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _imported(module: str, arguments: list[str]) -> ModuleType:
    """Import a module and return it. If the module has a function `prepare`, call it with the
    arguments, so that it imports further modules.

    The garbage collector does not run meanwhile, and ignores what was imported, because it would
    take a tenth of the time of the imports, and later write into pages that the children share.
    """
    with without_collection():
        imported = importlib.import_module(module)
        if (prepare := getattr(imported, "prepare", None)) is not None:
            prepare(*arguments)
        gc.freeze()
    return imported


def _folders(python_path: str, directory: str) -> list[str]:
    """Return the folders of a PYTHONPATH. Folders that are relative paths are relative to
    `directory`."""
    return (
        [os.path.join(directory, folder) for folder in python_path.split(os.pathsep)]
        if python_path
        else []
    )


def main() -> int:
    """Run a zygote, or a child that it has forked. `sys.argv` has the file descriptors CONTROL and
    STARTER, NAME, and for bound children the modules that they run.
    """
    control, starter, name, *modules = sys.argv[1:]
    name_process(name)
    for module in modules:
        _imported(module, [])
    if not modules:
        os.chdir("/")  # a zygote in another folder would keep its file system from being unmounted
    run = Zygote(socket.socket(fileno=int(control)), int(starter)).serve()
    return 0 if run is None else run()

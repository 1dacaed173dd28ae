"""The process that slots and tasks of the data service are forked from.

It has one thread, no ZeroMQ context and everything imported that its children need, so that a fork is safe and takes milliseconds. A
worker starts it by command, which works from scripts and notebooks without a `__main__` guard, or forks it off itself before it has
any thread.

On its control socket (a SOCK_SEQPACKET pair) it is asked to
    spawn <ticket> <kind>   with descriptors, the last one for standard error; answered by: pid <ticket> <pid>
    kill <pid>              ended with SIGKILL, if it is still ours and alive
    beat <ms>               the worker is alive; the next word comes within so many milliseconds, or it was stopped
and it tells: exit <pid> <code>, where SILENT stands for a child that it has ended because the worker was silent. When the control socket
closes, or the worker has been silent for longer than its watch allows, it ends its children and, in the first case, itself: they never
outlive their worker, and a worker that was stopped (SIGSTOP) has no child that goes on with work that others have taken over.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zmqdist.child_command import add_working_directory, child_command

COMMAND = struct.Struct("<4sqq")
"""A verb and two numbers."""

SPAWN, KILL, BEAT, PID, EXIT = b"spwn", b"kill", b"beat", b"pid ", b"exit"

Entry = Callable[..., None]
"""What a kind of child runs: it is called with the descriptors that it was given. Kinds are numbers: places in a sequence of entries."""

SILENT = 256
"""No exit code that a process can have."""

DESCRIPTORS_MAX = 4

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class Template:
    """The loop of the template process."""

    def __init__(self, control: socket.socket, entries: Sequence[Entry]) -> None:
        self._control = control
        self._entries = entries
        self._watch_ms: int | None = None
        self._children: dict[int, int] = {}
        """pidfd -> pid."""
        self._silenced: set[int] = set()
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> None:
        """Until the worker is gone."""
        while True:
            ready = self._poll.poll(self._watch_ms if self._children else None)
            if not ready:
                self._silenced.update(self._children.values())
                self._end_children()
            for fd, _ in ready:
                if fd == self._control.fileno():
                    if not self._command():
                        self._end_children()
                        return
                else:
                    self._reap(fd)

    def _command(self) -> bool:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, COMMAND.size, DESCRIPTORS_MAX)
        except OSError:
            return False
        if not message:
            return False
        verb, number, kind = COMMAND.unpack(message)
        if verb == SPAWN:
            self._spawn(number, kind, descriptors)
        elif verb == KILL and number in self._children.values():
            os.killpg(number, signal.SIGKILL)
        elif verb == BEAT:
            self._watch_ms = number
        return True

    def _spawn(self, ticket: int, kind: int, descriptors: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become(kind, descriptors)
        os.setpgid(pid, pid)  # a group of its own: what user code starts there ends with the slot
        for descriptor in descriptors:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        self._tell(PID, ticket, pid)

    def _become(self, kind: int, descriptors: list[int]) -> None:
        """In the child; does not return."""
        try:
            # The template's death must be the child's death, also when it is killed.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            self._control.close()
            for pidfd in self._children:
                os.close(pidfd)
            *given, errors = descriptors
            os.dup2(errors, 2)
            os.close(errors)
            _settle_in()
            self._entries[kind](*given)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self, pidfd: int) -> None:
        pid = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        os.killpg(pid, signal.SIGKILL)  # before it is waited for: until then the number is not given to another
        _, status = os.waitpid(pid, 0)
        code = SILENT if pid in self._silenced else os.waitstatus_to_exitcode(status)
        self._silenced.discard(pid)
        self._tell(EXIT, pid, code)

    def _end_children(self) -> None:
        for pid in self._children.values():
            os.killpg(pid, signal.SIGKILL)

    def _tell(self, verb: bytes, first: int, second: int) -> None:
        try:
            self._control.send(COMMAND.pack(verb, first, second))
        except OSError:  # the worker is gone; the next poll says so, too
            pass


def _settle_in() -> None:
    """What a forked child needs before user code runs in it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's to decide about
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(all_threads=False)  # a segfault in user code leaves a traceback for the error that names it
    np.random.seed()  # else all children would draw the same numbers
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Lines in one piece, with PYTHONUNBUFFERED too: all slots write to the same pipe.
            stream.reconfigure(line_buffering=True, write_through=False)


class TemplateProcess:
    """The template process from the worker's side: its control socket and its end."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self._ended: int | None = None

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, when it has ended within the time."""
        if self._ended is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                if select.select([pidfd], [], [], timeout_s)[0]:
                    self._ended = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            finally:
                os.close(pidfd)
        return self._ended

    def close(self) -> None:
        """End it, and with it all children."""
        self.control.close()
        if self.wait(5.0) is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(5.0)


def start_template(environment: Mapping[str, str], module: str) -> TemplateProcess:
    """Start one by command: from any process, whatever its threads do. `main` of this module calls ours with its entries."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        # In a session of its own: Ctrl-C at a terminal is for the worker, which ends its slots in good order.
        process = subprocess.Popen(
            child_command(module, str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,
        )
    process.returncode = 0  # it is waited for here, not by Popen, which would warn
    return TemplateProcess(process.pid, ours)


def fork_template(environment: Mapping[str, str], entries: Sequence[Entry]) -> TemplateProcess:
    """Fork one off this process: saves it the imports. Only while this process has one thread and no ZeroMQ context."""
    assert threading.active_count() == 1, "a fork would copy the locks of threads that are not in the child"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gc.collect()
    gc.freeze()
    pid = os.fork()
    if pid:
        theirs.close()
        return TemplateProcess(pid, ours)
    try:
        ours.close()
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"zmqdist-slots", 0, 0, 0)  # else `ps` shows several workers of one name
        os.environ.update(environment)
        _serve(theirs, entries)
    finally:
        os._exit(0)


def _serve(control: socket.socket, entries: Sequence[Entry]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its worker, which the signal is for
    gc.collect()
    gc.freeze()  # the collector must not write into pages that the children share
    Template(control, entries).serve()


def main(entries: Sequence[Entry]) -> None:
    """Be a template: FD, its control socket."""
    add_working_directory()
    _serve(socket.socket(fileno=int(sys.argv[1])), entries)

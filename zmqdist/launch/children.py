"""The child processes of a launcher. `Children` starts them, watches them through pidfds, and stops
them.

A child that runs a module of zmqdist is forked from the zygote of this process (process/zygote.py).
If the zygote cannot fork it, `Children` starts a new Python interpreter instead. Other programs are
started as commands. One thread waits for the ends of all children, and reports each exit code
within milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import select
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from zmqdist import clock as time
from zmqdist.child_command import child_command, path_variable
from zmqdist.files import fill_standard_streams, null_streams
from zmqdist.launch.launcher_interface import LineHandler
from zmqdist.limits import LOG_TAIL_BYTES, LOG_TAIL_LINES
from zmqdist.process import zygote_client
from zmqdist.process.zygote import Order
from zmqdist.process.zygote_client import ForkedProcess
from zmqdist.transport.memory_limits import check_descriptors_and_threads

if TYPE_CHECKING:
    from zmqdist.launch.roles import TaskConfig
    from zmqdist.scheduling.shared.config import WorkerConfig

log = logging.getLogger("zmqdist.launch")

_prctl = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this child process when the launcher, or the thread of the
    launcher that started it, ends. The child calls this function before it executes its program.
    Without the signal the program would outlive the rest of the cluster.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def check_descriptors(purpose: str, children: int) -> None:
    """Raise ResourceExhaustedError if this process may not open the descriptors that a dispatcher,
    a zygote and these children need."""
    check_descriptors_and_threads(purpose, 40 + 5 * children)


@contextlib.contextmanager
def ending_signals(fn: Callable[[int], object]) -> Iterator[None]:
    """Return a context manager in which SIGINT and SIGTERM call a function. Outside the main thread
    it does nothing, because only the main thread can handle signals.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda number, _: fn(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Child:
    """One child process.

    Attributes:
      name: the name of the role that the process runs, such as "worker:0".
      host: the empty string, because a child runs on the launcher's host.
      ended: set when the exit code is known.
    """

    host = ""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes] | ForkedProcess, lifeline: int
    ) -> None:
        self.name = name
        self.process = process
        self.pid = process.pid
        self.ended = threading.Event()
        self._lifeline = lifeline
        self._tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self._reader: threading.Thread | None = None
        self._lock = threading.Lock()
        self._reaped = False

    @property
    def exit_code(self) -> int | None:
        """The exit code in the form of `subprocess`, in which -9 means that SIGKILL ended the
        process. None means that the process runs."""
        return self.process.returncode

    @property
    def tail(self) -> str:
        """The last lines of the child's output."""
        return "\n".join(self._tail)[-LOG_TAIL_BYTES:]

    def open_pidfd(self) -> int:
        """Return a file descriptor that becomes readable when the process ends. The caller closes
        the descriptor."""
        return (
            os.dup(self.process.pidfd)
            if isinstance(self.process, ForkedProcess)
            else os.pidfd_open(self.pid)
        )

    def read_lines(self, on_line: LineHandler) -> None:
        """Start a thread that calls `on_line` with each line of the child's output."""
        self._reader = threading.Thread(
            target=self._read, args=(on_line,), name=f"zmqdist-log-{self.name}", daemon=True
        )
        self._reader.start()

    def signal(self, number: int, group: bool = False) -> None:
        """Send a signal to the child. With `group=True` the signal is also sent to the other
        processes of the child's process group. These are the processes that the child has started,
        except those in a session of their own.
        """
        # While this thread has the lock, `finish` cannot reap the child, so the kernel gives its
        # pid to no other process.
        with self._lock:
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError):
                    if group:
                        os.killpg(self.pid, number)
                    elif isinstance(self.process, ForkedProcess):
                        # Do not use the pid: if the zygote has ended, the kernel may have given the
                        # pid to another process.
                        signal.pidfd_send_signal(self.process.pidfd, number)
                    else:
                        os.kill(self.pid, number)

    def break_lifeline(self) -> None:
        """Close the launcher's end of the child's lifeline. The child then ends itself."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _read(self, on_line: LineHandler) -> None:
        assert self.process.stdout is not None
        # This thread closes the pipe, and `finish` does not, because processes that the child has
        # started may write to the pipe after `finish` has returned.
        with self.process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip("\n")
                self._tail.append(line)
                try:
                    on_line(line)
                except BaseException:
                    # `on_line` fails if the terminal was closed, for example. Go on reading,
                    # because the child would block in a write.
                    log.exception("a line of output of %s could not be passed on", self.name)

    def finish(self) -> None:
        """Reap the process, which must have ended, and wait up to 2 s for its last lines of
        output.
        """
        with self._lock:
            self.process.wait()
            self._reaped = True
        if self._reader is not None:
            self._reader.join(2.0)
        self.break_lifeline()


class Children:
    """The child processes of this process. Each child is the leader of a session of its own.

    Args:
      on_exit: a function that is called with each child that has ended, in the thread that watches
        the children.
      whole_groups: whether to kill the other processes of a child's process group when the child
        has ended.
    """

    def __init__(self, on_exit: Callable[[Child], object], whole_groups: bool = False) -> None:
        self._on_exit = on_exit
        self._whole_groups = whole_groups
        self._children: list[Child] = []
        self._lock = threading.Lock()
        fill_standard_streams()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._watch, name="zmqdist-children", daemon=True)
        self._closing = False
        self._thread.start()

    def start_role(
        self,
        config: WorkerConfig | TaskConfig,
        environment: Mapping[str, str],
        on_line: LineHandler | None = None,
    ) -> Child:
        """Start a role (roles.py) in a child process. Its environment variables are those of this
        process, overridden by `environment`."""
        kind, fields = type(config).__name__, json.dumps(dataclasses.asdict(config))
        name = f"{config.job}:{config.index}"
        return self.start(
            name,
            lambda lifeline: ["zmqdist.launch.roles", str(lifeline), kind, fields],
            {**os.environ, **environment},
            on_line,
        )

    def start(
        self,
        name: str,
        command: Callable[[int], list[str]],
        environment: Mapping[str, str],
        on_line: LineHandler | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start a module of zmqdist in a child process.

        Args:
          command: a function that returns the module and its arguments. It is called with the file
            descriptor of the child's lifeline, which is a pipe that breaks when this process ends.
          environment: the child's environment variables. Without PATH_ENV among them, the child has
            the module path of this process.
          on_line: a function that is called with each line of the child's output. None means that
            the child shares the standard output and error of this process.
          pass_fds: further file descriptors that the child inherits under the same numbers.
        """
        environment = {**path_variable(), **environment}
        child_end, own_end = os.pipe2(os.O_CLOEXEC)
        try:
            module, *arguments = command(child_end)
            inherited_fds = [child_end, *pass_fds]
            forked = _fork(name, module, arguments, environment, on_line is not None, inherited_fds)
            process = forked or subprocess.Popen(
                child_command(module, *arguments),
                pass_fds=inherited_fds,
                stdin=subprocess.DEVNULL,
                stdout=None if on_line is None else subprocess.PIPE,
                stderr=None if on_line is None else subprocess.STDOUT,
                env=environment,
                # a child gets no Ctrl-C, because this process stops its children in order
                start_new_session=True,
            )
        except BaseException:
            os.close(own_end)
            raise
        finally:
            os.close(child_end)
        return self._adopt(Child(name, process, own_end), on_line)

    def start_program(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_line: LineHandler,
    ) -> Child:
        """Start any program in a child process. The program gets no lifeline. Instead the kernel
        sends it SIGTERM when the thread that calls this method ends. The arguments are those of
        `start`, except that `command` is the program and its arguments.
        """
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        return self._adopt(Child(name, process, -1), on_line)

    def _adopt(self, child: Child, on_line: LineHandler | None) -> Child:
        if on_line is not None:
            child.read_lines(on_line)
        with self._lock:
            self._children.append(child)
        os.write(self._wake_write, b"c")
        return child

    @property
    def running(self) -> list[Child]:
        with self._lock:
            return [child for child in self._children if not child.ended.is_set()]

    def stranded(self, name: str) -> str:
        """Return "", because this host can always run the role (`Launcher.stranded`)."""
        return ""

    def release(self, name: str) -> None:
        """Do nothing, because this host has room for any number of roles (`Launcher.release`)."""

    def close(self, grace_s: float) -> None:
        """Stop all children, and return when they have ended. Each child gets SIGTERM and has up to
        `grace_s` seconds to drain. A child that still runs then gets SIGKILL. A second call does
        nothing.
        """
        for child in self.running:
            child.signal(signal.SIGTERM)
        until = time.monotonic() + grace_s
        for child in self.running:
            child.ended.wait(max(0.0, until - time.monotonic()))
        for child in self.running:
            child.signal(signal.SIGKILL)
            child.ended.wait(5.0)
        if not self._closing:
            self._closing = True
            os.write(self._wake_write, b"q")
            self._thread.join(5.0)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _watch(self) -> None:
        watched: dict[int, Child] = {}
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        while not self._closing or watched:
            for fd, _ in poll.poll():
                if fd == self._wake_read:
                    os.read(fd, 64)
                    with self._lock:
                        for child in self._children:
                            if not child.ended.is_set() and child not in watched.values():
                                pidfd = child.open_pidfd()
                                watched[pidfd] = child
                                poll.register(pidfd, select.POLLIN)
                    continue
                poll.unregister(fd)
                os.close(fd)
                try:
                    self._finish(watched.pop(fd))
                except BaseException:  # the thread must go on watching the other children
                    log.exception("the exit handler of a child process failed")

    def _finish(self, child: Child) -> None:
        if self._whole_groups:
            child.signal(signal.SIGKILL, group=True)
        try:
            child.finish()
        finally:
            child.ended.set()
            with self._lock:
                self._children.remove(child)
            self._on_exit(child)


def _fork(
    name: str,
    module: str,
    arguments: list[str],
    environment: Mapping[str, str],
    piped: bool,
    inherited_fds: list[int],
) -> ForkedProcess | None:
    """Fork a child from the zygote. Return None if the zygote cannot fork.

    Args:
      piped: True if the child writes its output to a pipe, False if it shares the standard output
        and error of this process.
    """
    order = Order(name, module, arguments, dict(environment), [1, 2, *inherited_fds])
    if not piped:
        return zygote_client.fork(
            order, [*(null_streams.get(number, number) for number in (1, 2)), *inherited_fds]
        )
    own_end, child_end = os.pipe2(os.O_CLOEXEC)
    stdout = os.fdopen(own_end, "rb")
    try:
        forked = zygote_client.fork(order, [child_end, child_end, *inherited_fds], stdout)
    finally:
        os.close(child_end)
    if forked is None:
        stdout.close()
    return forked

"""The zygote (zygote.py) as seen by the process that starts it: how this process starts the zygote,
holds its control socket, and ends it.

A process starts a zygote in one of two ways. Any process can start it as a command, which costs
half a second of CPU. A process with one thread and no ZeroMQ context can fork the zygote, which
then has all modules that this process has imported.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import threading
import traceback
from collections.abc import Mapping, Sequence

from zmqdist.child_command import child_command, path_variable
from zmqdist.files import fill_standard_streams
from zmqdist.process.reaper import wait_and_reap
from zmqdist.process.zygote import NAME, SLOTS_NAME, Zygote, name_process

CLOSE_S = 5.0
"""Seconds that a zygote may take to end. After this time it is killed."""


class ZygoteProcess:
    """One zygote process.

    Args:
      control: this process's end of the control socket. This object takes ownership of the socket.
    """

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self._ended: int | None = None

    def wait(self, timeout_s: float) -> int | None:
        """Wait at most `timeout_s` until the zygote has ended. Return its exit code, or None if it
        still runs."""
        if self._ended is None:
            self._ended = wait_and_reap(self.pid, timeout_s)
        return self._ended

    def close(self) -> None:
        """End the zygote and the children that are bound to it. Unbound children continue.
        Idempotent."""
        self.control.close()
        try:
            ended = self.wait(CLOSE_S) is not None
        except KeyboardInterrupt:  # the user pressed Ctrl-C again: kill the zygote at once
            ended = False
        if not ended:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(CLOSE_S)

    def forget(self) -> None:
        """Release the zygote without ending it. This is for a process that was forked from the
        owner of the zygote."""
        self.control.close()
        self._ended = 0


def start_zygote(environment: Mapping[str, str]) -> ZygoteProcess:
    """Start a zygote for unbound children, as a command.

    The zygote's output is discarded: if the zygote does not work, children are started as commands,
    and report the error themselves.
    """
    return _start(NAME, (), environment, subprocess.DEVNULL)


def start_slots_zygote(modules: Sequence[str], environment: Mapping[str, str]) -> ZygoteProcess:
    """Start a zygote for bound children, as a command. The children have the environment of the
    zygote and the standard output of this process.

    Args:
      modules: the modules that children run. The zygote imports these modules before it forks the
        first child.
    """
    return _start(SLOTS_NAME, modules, environment, None)


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
    name: str, modules: Sequence[str], environment: Mapping[str, str], output: int | None
) -> ZygoteProcess:
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
    return ZygoteProcess(process.pid, control)

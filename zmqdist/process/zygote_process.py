"""The zygote (zygote.py) from the side of the process that starts it: its start, its control socket, its end.

A zygote is started in one of two ways. Any process can start it by command, whatever its threads do; that costs half a second of CPU. A
process with one thread and no ZeroMQ context can fork it; the zygote then has the imports that this process has done.
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

from zmqdist.child_command import child_command
from zmqdist.process.reaper import wait_and_reap
from zmqdist.process.zygote import NAME, SLOTS_NAME, Zygote, name_process

CLOSE_S = 5.0
"""Seconds that a zygote may take to end; after that it is killed."""


class ZygoteProcess:
    """One zygote process.

    Args:
      control: this process's end of the control socket; this object owns it from now on.
    """

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self._ended: int | None = None

    def wait(self, timeout_s: float) -> int | None:
        """Return the zygote's exit code; None if it has not ended within `timeout_s`."""
        if self._ended is None:
            self._ended = wait_and_reap(self.pid, timeout_s)
        return self._ended

    def close(self) -> None:
        """End the zygote, and with it the children that are bound to it; unbound children continue. Idempotent."""
        self.control.close()
        try:
            ended = self.wait(CLOSE_S) is not None
        except KeyboardInterrupt:  # the user pressed Ctrl-C again: kill the zygote at once
            ended = False
        if not ended:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(CLOSE_S)

    def forget(self) -> None:
        """Release the zygote without ending it, in a process that was forked from the one that owns it."""
        self.control.close()
        self._ended = 0


def start_zygote(environment: Mapping[str, str]) -> ZygoteProcess:
    """Start a zygote by command, for unbound children.

    Its output is discarded, because children are started by command if the zygote does not work, and these report the error.
    """
    return _start(NAME, (), environment, subprocess.DEVNULL)


def start_slots_zygote(modules: Sequence[str], environment: Mapping[str, str]) -> ZygoteProcess:
    """Start a zygote by command, for bound children. They get the zygote's environment, and this process's output.

    Args:
      modules: the modules that children run; the zygote imports them before it forks the first child.
    """
    return _start(SLOTS_NAME, modules, environment, None)


def fork_slots_zygote(environment: Mapping[str, str]) -> ZygoteProcess:
    """Fork a zygote from this process, for bound children, with all modules that this process has imported.

    Call it only while this process has one thread and no ZeroMQ context.

    Args:
      environment: variables that are added to this process's environment, for the children.
    """
    assert threading.active_count() == 1, "a fork would copy the locks of threads that are not in the child"
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    starter = os.pidfd_open(os.getpid())
    gc.collect()
    gc.freeze()  # so that the collector does not write into pages that the processes share
    pid = os.fork()
    if pid:
        theirs.close()
        os.close(starter)
        return ZygoteProcess(pid, control)
    code = 1
    try:
        control.close()
        os.setsid()
        name_process(SLOTS_NAME)
        os.environ.update(environment)
        run = Zygote(theirs, starter).serve()
        code = 0 if run is None else run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _start(
    name: str, modules: Sequence[str], environment: Mapping[str, str] | None, output: int | None
) -> ZygoteProcess:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    starter = os.pidfd_open(os.getpid())
    try:
        with theirs:
            # The zygote gets a session of its own, because Ctrl-C at a terminal is for this process, which ends its children in good order.
            process = subprocess.Popen(
                child_command("zmqdist.process.zygote", str(theirs.fileno()), str(starter), name, *modules),
                pass_fds=[theirs.fileno(), starter],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
    except BaseException:
        control.close()
        raise
    finally:
        os.close(starter)
    process.returncode = 0  # ZygoteProcess waits for the process; without a code, Popen would warn
    return ZygoteProcess(process.pid, control)

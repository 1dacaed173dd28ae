"""The zygote (zygote.py) from the side of the process that has started it: how it begins, its control socket, its end.

There are two ways to begin. By command, from any process, whatever its threads do: that costs half a second of CPU. Forked off this
process, while it has one thread and no ZeroMQ context: that saves the zygote the imports that this process has done.
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
"""So long a zygote may take to end; then it is killed."""


class ZygoteProcess:
    """One zygote.

    Args:
      control: our end of its control socket; it belongs to this object from now on.
    """

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self._ended: int | None = None

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, when it has ended within the time."""
        if self._ended is None:
            self._ended = wait_and_reap(self.pid, timeout_s)
        return self._ended

    def close(self) -> None:
        """End it, and with it the children that are bound to it; the others go on. Idempotent."""
        self.control.close()
        try:
            ended = self.wait(CLOSE_S) is not None
        except KeyboardInterrupt:  # one more Ctrl-C, while this program ends: not so patiently, then
            ended = False
        if not ended:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(CLOSE_S)

    def forget(self) -> None:
        """In a process that was forked from the starting one: the zygote is not ours."""
        self.control.close()
        self._ended = 0


def start_zygote(environment: Mapping[str, str]) -> ZygoteProcess:
    """Start one by command, for children that are not bound to it. What is wrong with it, a child that is started by command says."""
    return _start(NAME, (), environment, subprocess.DEVNULL)


def start_slots_zygote(modules: Sequence[str], environment: Mapping[str, str]) -> ZygoteProcess:
    """Start one by command, for bound children: they have its environment, and its output, which is ours.

    Args:
      modules: what children run; imported before the first one.
    """
    return _start(SLOTS_NAME, modules, environment, None)


def fork_slots_zygote(environment: Mapping[str, str]) -> ZygoteProcess:
    """Fork one off this process, for bound children, with all that this process has imported.

    Only while this process has one thread and no ZeroMQ context.

    Args:
      environment: of the children, on top of that of this process.
    """
    assert threading.active_count() == 1, "a fork would copy the locks of threads that are not in the child"
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    starter = os.pidfd_open(os.getpid())
    gc.collect()
    gc.freeze()  # the collector must not write into pages that the processes share
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
            # In a session of its own: Ctrl-C at a terminal is for the starting process, which ends its children in good order.
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
    process.returncode = 0  # it is waited for here, not by Popen, which would warn
    return ZygoteProcess(process.pid, control)

"""The host agent: a process that starts roles on its host for a launcher on another host, and ends
the roles when its standard input ends.

The agent reads orders from its standard input and writes events to its standard output
(agent_protocol.py). Its roles are its child processes (`Children`). They have lifelines, so that
the roles end even if the agent is killed with SIGKILL.

Promises
  A1  When its standard input ends, a signal arrives, or no order has arrived for the silence limit,
      the agent kills its roles, removes its folder and ends.
  A2  For each StartRole the agent sends exactly one RoleEnded or OrderRefused, after the role's
      last line.
  A3  Only events are written to the agent's standard output. Output that modules print is
      redirected to standard error.

`main` imports neither NumPy nor ZeroMQ, so that the agent sends its hello soon. Meanwhile the
zygote imports both for the roles.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from zmqdist import clock as time
from zmqdist._version import __version__
from zmqdist.addresses import VARIABLE as PORTS_ENV
from zmqdist.child_command import path_variable
from zmqdist.errors import OpError
from zmqdist.launch.agent_code import ReceivedCode
from zmqdist.launch.agent_protocol import (
    AgentClosing,
    AgentEvent,
    AgentHello,
    AgentOrder,
    AgentUnfit,
    CloseAgent,
    LauncherBeat,
    OfferCode,
    OrderRefused,
    PortReserved,
    ReservePort,
    RoleEnded,
    RoleLine,
    RoleStarted,
    SendCode,
    SignalRole,
    StartRole,
    decode_order,
    encode,
)
from zmqdist.launch.children import Child, Children
from zmqdist.launch.folders import RunFolder, write_private
from zmqdist.launch.ports import Reserved
from zmqdist.process import zygote_client
from zmqdist.scheduling.shared.config import WorkerConfig

MEMORY_FOLDER: Final = "/dev/shm"
READ_BYTES: Final = 65536
LINES_UNSENT_MAX: Final = 1000
"""The most lines of roles' output that the agent holds while the launcher does not read."""
LAST_EVENTS_S: Final = 2.0
"""Seconds that the agent spends at most on writing its last events before it ends. If the launcher
does not read, the pipe stays full."""

_ENDING_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)

_BOOT: Final = """\
import sys
sys.path[:] = [folder for folder in sys.path if folder]
try:
    from zmqdist.launch.agent import main
except Exception as error:
    import json
    unfit = {"is": "AgentUnfit", "python": sys.version.split()[0], "executable": sys.executable, "reason": str(error)}
    print(json.dumps(unfit))
    sys.exit(1)
sys.exit(main())
"""


def agent_command(python: str, silence_limit_s: float) -> list[str]:
    """Return the command that runs an agent with this Python. Quote the words of the command to
    pass it through a shell.

    On a host without zmqdist the command still runs, and writes AgentUnfit. It imports no module
    from the working directory.
    """
    return [python, "-c", f"exec({_BOOT!r})", str(silence_limit_s)]


class HostAgent:
    """The agent of this host.

    Args:
      orders: the file descriptor from which the agent reads orders.
      events: the file to which the agent writes events.
      folder: the folder for the files of its roles.
      silence_limit_s: the agent ends when no order has arrived for this many seconds.
    """

    def __init__(
        self, orders: int, events: IO[bytes], folder: RunFolder, silence_limit_s: float
    ) -> None:
        self._orders = orders
        self._events = events
        self._folder = folder
        self._silence_limit_s = silence_limit_s
        self._unsent: queue.SimpleQueue[AgentEvent | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(LINES_UNSENT_MAX)
        """Counts how many more lines of output the agent may hold. When it is used up because the
        launcher does not read, the roles block in their writes, while the agent still carries out
        orders.
        """
        self._writer = threading.Thread(target=self._write, name="zmqdist-events", daemon=True)
        self._reserved: list[Reserved] = []
        self._order_ids: dict[Child, int] = {}
        self._by_order: dict[int, Child] = {}
        self._naming = threading.Lock()
        """A lock that `_start` has while it starts a role. `_exited` waits for the lock, because it
        needs the `order_id` of the role."""
        self._children = Children(self._exited)
        self._code = ReceivedCode()
        self._closing: threading.Thread | None = None
        self._over_read, self._over_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """A pipe that becomes readable when a signal arrives, or when CloseAgent has stopped all
        roles. The agent then ends."""

    def serve(self) -> None:
        """Carry out orders until the agent has to end. When this method returns, no role runs any
        more."""
        self._writer.start()
        # The signal handlers do nothing, because an exception from a handler could interrupt code
        # that holds a lock. When a signal arrives, the interpreter writes into the pipe, and
        # `_received` returns.
        for number in _ENDING_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._over_write, warn_on_full_buffer=False)
        try:
            self._unsent.put(_hello(str(self._folder.path)))
            for order in self._received():
                self.obey(order)
        finally:
            for child in self._children.running:
                child.signal(signal.SIGKILL)
            if self._closing is not None:
                self._closing.join()
            self._children.close(0.0)
            for port in self._reserved:
                port.close()
            self._code.close()
            self._unsent.put(None)
            self._writer.join(LAST_EVENTS_S)

    def obey(self, order: AgentOrder) -> None:
        """Carry out one order. If the agent cannot carry it out, the agent sends OrderRefused."""
        match order:
            case StartRole():
                self._start(order)
            case SignalRole():
                if (child := self._by_order.get(order.order_id)) is not None:
                    child.signal(order.number)
            case ReservePort():
                if order.ports:
                    os.environ[PORTS_ENV] = order.ports
                try:
                    self._reserved.append(Reserved(order.host, order.port))
                except OpError as error:
                    self._unsent.put(OrderRefused(order.order_id, error.message))
                else:
                    self._unsent.put(PortReserved(order.order_id, self._reserved[-1].address))
            case OfferCode() | SendCode():
                if (event := self._code.answer(order)) is not None:
                    self._unsent.put(event)
            case CloseAgent():
                self._unsent.put(AgentClosing())
                if self._closing is None:
                    self._closing = threading.Thread(
                        target=self._close, args=(order.grace_s,), name="zmqdist-close"
                    )
                    self._closing.start()
            case LauncherBeat():
                pass

    def _start(self, order: StartRole) -> None:
        try:
            for name, text in order.files.items():
                write_private(self._folder.path, name, text)
            environment = {**os.environ, **order.environment}
            if self._code.imports:
                environment |= path_variable([*self._code.imports, os.getcwd()])
            if order.kind == "WorkerConfig":
                environment |= WorkerConfig(**json.loads(order.fields)).thread_variables(
                    environment
                )
            with self._naming:
                child = self._children.start(
                    order.name,
                    lambda lifeline: [
                        "zmqdist.launch.roles",
                        str(lifeline),
                        order.kind,
                        order.fields,
                    ],
                    environment,
                    lambda line: self._line(order.order_id, line),
                )
                self._order_ids[child] = order.order_id
                self._by_order[order.order_id] = child
        except OSError as error:
            self._unsent.put(
                OrderRefused(order.order_id, f"{order.name} cannot be started: {error}")
            )
        else:
            self._unsent.put(RoleStarted(order.order_id, child.pid))

    def _exited(self, child: Child) -> None:
        with self._naming:
            order_id = self._order_ids.pop(child)
            del self._by_order[order_id]
        assert child.exit_code is not None
        self._unsent.put(RoleEnded(order_id, child.pid, child.exit_code, child.tail))

    def _close(self, grace_s: float) -> None:
        self._children.close(grace_s)
        os.write(self._over_write, b"c")

    def _line(self, order_id: int, line: str) -> None:
        self._room.acquire()
        self._unsent.put(RoleLine(order_id, line))

    def _write(self) -> None:
        while (event := self._unsent.get()) is not None:
            with contextlib.suppress(OSError):
                # A write fails if the launcher has ended. `_received` notices this end, too,
                # because standard input ends.
                self._events.write(encode(event))
            if isinstance(event, RoleLine):
                self._room.release()

    def _received(self) -> Iterator[AgentOrder]:
        """Yield orders until the agent has to end: for a reason in promise A1, or because all roles
        have stopped after CloseAgent."""
        rest = b""
        while True:
            ready, _, _ = select.select(
                [self._orders, self._over_read], [], [], self._silence_limit_s
            )
            if not ready or self._over_read in ready:
                return
            data = os.read(self._orders, READ_BYTES)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from map(decode_order, lines)


def _route() -> tuple[str, str]:
    """Return the launcher's address and this host's address, as the connection between them uses
    them. "" means an unknown address.

    SLURM_LAUNCH_NODE_IPADDR precedes SSH_CONNECTION, because a job inherits the SSH_CONNECTION of
    the shell that submitted the job.
    """
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if launcher is None:
        reached_from, _, reached_at, _ = os.environ.get("SSH_CONNECTION", "   ").split(" ")
        return reached_from, reached_at
    family = socket.AF_INET6 if ":" in launcher else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # This sends nothing: the kernel only chooses the interface that leads to the launcher.
        probe.connect((launcher, 9))
        return launcher, str(probe.getsockname()[0])


def _hello(folder: str) -> AgentHello:
    reached_from, reached_at = _route()
    return AgentHello(
        python=platform.python_version(),
        version=__version__,
        path=str(Path(__file__).resolve().parents[1]),
        cores=len(os.sched_getaffinity(0)),
        clock_s=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        folder=folder,
        reached_at=reached_at,
        reached_from=reached_from,
    )


def _folder() -> RunFolder:
    """Make the agent's folder. It is in memory if possible, because its files are secrets. Raises
    OSError if no folder can be made."""
    with contextlib.suppress(OSError):
        return RunFolder(Path(MEMORY_FOLDER))
    return RunFolder(Path(tempfile.gettempdir()))


def main() -> int:
    """Run the agent of this host until the agent has to end, and return the exit code.
    `sys.argv[1]` is the silence limit in seconds."""
    orders, events = os.dup(0), os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    # ignore Ctrl-C, because the launcher decides which processes end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        folder = _folder()
    except OSError as error:
        reason = f"neither {MEMORY_FOLDER} nor a temporary folder can be written ({error})"
        unfit = AgentUnfit(
            platform.python_version(),
            sys.executable,
            reason,
            "make one writable, or set TMPDIR there",
        )
        events.write(encode(unfit))
        return 1
    try:
        zygote_client.prepare("zmqdist.launch.roles", "-1", "WorkerConfig")
        HostAgent(orders, events, folder, float(sys.argv[1])).serve()
    except Exception as error:
        # a bug: print one line, because the launcher shows standard error to its user
        print(f"the agent failed: {error!r}", file=sys.stderr)
        return 1
    finally:
        folder.close()
        events.close()
    return 0

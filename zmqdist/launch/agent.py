"""The agent of a host: starts roles there for a launcher elsewhere, and ends them with its standard input.

It reads orders from its standard input and writes events to its standard output (agent_protocol.py). Its roles are children of it, as those
of a local launcher are (`Children`), so a kill -9 of the agent ends them by their lifelines.

Promises
  A1  When its standard input ends, a signal ends it, or no order came for its silence limit, its roles are killed and its folder is
      removed: no process is left that needs their results.
  A2  For each StartRole there is exactly one RoleEnded or OrderRefused, after the role's last line.
  A3  Nothing but events goes to its standard output: what modules print goes to standard error.

`main` runs without NumPy and ZeroMQ, so that it says hello soon; the zygote imports those meanwhile.
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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from zmqdist._version import __version__
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
from zmqdist.launch.folders import RunFolder
from zmqdist.launch.ports import Reserved
from zmqdist.port_range import VARIABLE as PORTS_ENV
from zmqdist.process import zygote_client
from zmqdist.scheduling.dispatcher.config import WorkerConfig

MEMORY_FOLDER: Final = "/dev/shm"
READ_BYTES: Final = 65536
LINES_UNSENT_MAX: Final = 1000
"""Lines of output that wait for a launcher that does not read."""
LAST_EVENTS_S: Final = 2.0
"""Seconds for the last events to be written at the end: the pipe is full if the launcher does not read."""

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
    """Return the command that runs an agent with this Python; it is safe to pass through a shell once it is quoted.

    The command needs no zmqdist to report that zmqdist is missing, and nothing from the working directory is imported.
    """
    return [python, "-c", f"exec({_BOOT!r})", str(silence_limit_s)]


class HostAgent:
    """The agent.

    Args:
      orders: the descriptor of its orders.
      events: where its events go.
      folder: for the files of its roles.
      silence_limit_s: without an order for so long, it ends.
    """

    def __init__(self, orders: int, events: IO[bytes], folder: RunFolder, silence_limit_s: float) -> None:
        self._orders = orders
        self._events = events
        self._folder = folder
        self._silence_limit_s = silence_limit_s
        self._unsent: queue.SimpleQueue[AgentEvent | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(LINES_UNSENT_MAX)
        """For lines that are not written yet: while the launcher does not read, roles wait in their writes, and this agent does not."""
        self._writer = threading.Thread(target=self._write, name="zmqdist-events", daemon=True)
        self._reserved: list[Reserved] = []
        self._order_ids: dict[Child, int] = {}
        self._by_order: dict[int, Child] = {}
        self._naming = threading.Lock()
        """Held while a role is started, so that its end is not reported before the number of its order is known."""
        self._children = Children(self._exited)
        self._code = ReceivedCode()
        self._closing: threading.Thread | None = None
        self._over_read, self._over_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """Readable once a signal ends the agent, or all roles were closed as ordered."""

    def serve(self) -> None:
        """Carry out orders until the agent has to end; when this returns, no role runs any more."""
        self._writer.start()
        # The handlers do nothing, because an exception from one could interrupt code that holds a lock. The interpreter writes into the
        # pipe when a signal comes, and `_received` ends then.
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
        """Carry out one order. What goes wrong is an event."""
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
                    self._closing = threading.Thread(target=self._close, args=(order.grace_s,), name="zmqdist-close")
                    self._closing.start()
            case LauncherBeat():
                pass

    def _start(self, order: StartRole) -> None:
        try:
            for name, text in order.files.items():
                _write_private(self._folder.path, name, text)
            environment = {**os.environ, **order.environment}
            if self._code.imports:
                before = environment.get("PYTHONPATH")
                environment["PYTHONPATH"] = os.pathsep.join([*self._code.imports, *([before] if before else [])])
            if order.kind == "WorkerConfig":
                environment |= WorkerConfig(**json.loads(order.fields)).thread_variables(environment)
            with self._naming:
                child = self._children.start(
                    order.name,
                    lambda lifeline: ["zmqdist.launch.roles", str(lifeline), order.kind, order.fields],
                    environment,
                    lambda line: self._line(order.order_id, line),
                )
                self._order_ids[child] = order.order_id
                self._by_order[order.order_id] = child
        except OSError as error:
            self._unsent.put(OrderRefused(order.order_id, f"{order.name} cannot be started: {error}"))
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
            with contextlib.suppress(OSError):  # the launcher has gone: the end of the orders says so
                self._events.write(encode(event))
            if isinstance(event, RoleLine):
                self._room.release()

    def _received(self) -> Iterator[AgentOrder]:
        """Yield orders until they end, for one of the reasons of A1 or because all roles were closed as ordered."""
        rest = b""
        while True:
            ready, _, _ = select.select([self._orders, self._over_read], [], [], self._silence_limit_s)
            if not ready or self._over_read in ready:
                return
            data = os.read(self._orders, READ_BYTES)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from map(decode_order, lines)


def _route() -> tuple[str, str]:
    """Return the addresses of launcher and host at the two ends of the stream; "" where they are not known.

    Slurm's variable goes first, because its jobs inherit the SSH_CONNECTION of the shell that submitted them.
    """
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if launcher is None:
        reached_from, _, reached_at, _ = os.environ.get("SSH_CONNECTION", "   ").split(" ")
        return reached_from, reached_at
    family = socket.AF_INET6 if ":" in launcher else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((launcher, 9))  # sends nothing: the kernel chooses the interface that leads there
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


def _write_private(folder: Path, name: str, text: str) -> None:
    path = folder / name
    for parent in reversed(path.relative_to(folder).parents):
        (folder / parent).mkdir(exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)


def _folder() -> RunFolder:
    """Make the folder, in memory where that is possible: its files are secrets. Raises OSError."""
    with contextlib.suppress(OSError):
        return RunFolder(Path(MEMORY_FOLDER))
    return RunFolder(Path(tempfile.gettempdir()))


def main() -> int:
    """Run the agent of this host until it has to end. `sys.argv` has the silence limit in seconds."""
    orders, events = os.dup(0), os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher
    try:
        folder = _folder()
    except OSError as error:
        reason = f"neither {MEMORY_FOLDER} nor a temporary folder can be written ({error})"
        unfit = AgentUnfit(platform.python_version(), sys.executable, reason, "make one writable, or set TMPDIR there")
        events.write(encode(unfit))
        return 1
    try:
        zygote_client.prepare("zmqdist.launch.roles", "-1", "WorkerConfig")
        HostAgent(orders, events, folder, float(sys.argv[1])).serve()
    except Exception as error:  # a bug, in one line: standard error is shown to the user of another host
        print(f"the agent failed: {error!r}", file=sys.stderr)
        return 1
    finally:
        folder.close()
        events.close()
    return 0

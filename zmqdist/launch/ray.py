"""The launcher `ray`: its hosts are actors of a running Ray cluster. Each actor runs one host
agent, and passes lines on between the agent and the launcher.

Each worker and each ps has an actor of its own, because Ray chooses the node of an actor by the
resources that the actor requests. These are CPUs (for a worker, one for each slot), GPUs, and
resources that the user has defined. When this process ends in any way, Ray ends the actors, because
they are not detached. Then the standard input of each agent ends, and the agent ends its roles
(agent.py, A1).

The package `ray` is imported when the first byte stream to an agent is opened.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zmqdist import errors, limits
from zmqdist.background import in_background
from zmqdist.blas_threads import VARIABLES, thread_variables
from zmqdist.cluster.launcher_sections import RayConfig, RayRole
from zmqdist.launch.agent import agent_command
from zmqdist.launch.agent_stream import END_S, AgentHost, NoteHandler, ProcessStream

if TYPE_CHECKING:
    from zmqdist.cluster.config import ClusterConfig

ACTOR_THREADS: Final = 4
"""Number of methods of an actor that may run at the same time: `end` must be able to run while
`receive` and `send` block."""

_KEEPER: Final = """\
import os, sys
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) and 1)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""A program that runs the agent as its child process. When Ray kills an actor, it also kills the
child processes of the actor. The agent is a grandchild of the actor, so that it survives long
enough to remove its folder."""

_REASON_MAX: Final = 300
"""The most characters of an error of Ray that are shown, because its text may contain a
traceback.
"""

_OUTPUT: Final = "output"
_NOTE: Final = "note"
_Item = tuple[str, bytes]
"""(kind, line): a line that the agent has written to its standard output (_OUTPUT) or standard
error (_NOTE). b"" means that the standard output has ended."""


def ray_hosts(config: ClusterConfig, silence_limit_s: float) -> list[AgentHost]:
    """Return one host for each worker, and then one host for each ps, each host with one slot. If
    roles are placed in this order, each role gets the host that was made for it.

    This function starts no actor.

    Raises:
      NotFoundError: the package `ray` is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise errors.NotFoundError(errors.needs("launcher: ray", "ray"))
    cluster = RayCluster(config.ray.address)
    workers, ps = config.jobs.worker, config.jobs.ps
    hosts = []
    for job, section in (("worker", workers), ("ps", ps)):
        slots = 1 if workers is None or job == "ps" else workers.slots_here()
        options = actor_options(config.ray, job, slots)
        threads = actor_threads(options["num_cpus"], slots, os.environ)
        for index in [] if section is None else section.indices():
            stream = partial(RayStream, cluster, options, threads, silence_limit_s)
            hosts.append(AgentHost(f"ray-{job}-{index}", 1, stream))
    return hosts


def actor_options(config: RayConfig, job: str, slots: int) -> dict[str, Any]:
    """Return the options of the actor of a role: the resources that the actor requests from Ray,
    and where and how Ray starts it."""
    asked_for: RayRole = getattr(config, job)
    return {
        "num_cpus": slots if asked_for.cpus is None else asked_for.cpus,
        "num_gpus": asked_for.gpus,
        "resources": dict(asked_for.resources),
        "scheduling_strategy": "SPREAD",
        "max_concurrency": ACTOR_THREADS,
        "max_restarts": 0,
    }


def actor_threads(cpus: float, slots: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that limit the threads of BLAS in an actor. Variables in the
    launcher's environment have precedence. Without them the CPUs of the actor are divided among its
    slots.

    Ray sets OMP_NUM_THREADS in the actor's environment to the number of all CPUs of the actor.
    AgentProcess replaces this value by the returned variables, because each slot would start so
    many threads.
    """
    own_variables = {name: environment[name] for name in VARIABLES if name in environment}
    return own_variables or thread_variables(max(1, int(cpus // slots)), slots, {})


class RayCluster:
    """The connection of this process to Ray. The first `RayStream` opens the connection, and the
    last one closes it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._streams = 0
        self._is_ours = False

    def enter(self) -> Any:
        """Connect this process to Ray if it is not connected, and return the module `ray`. Raises
        UnavailableError if Ray cannot be reached.
        """
        ray = _ray()
        with self._lock:
            if not self._streams and not ray.is_initialized():
                self._connect(ray)
                self._is_ours = True
            self._streams += 1
        return ray

    def leave(self) -> None:
        """Disconnect from Ray if no other `RayStream` is left, unless the program itself had
        connected to Ray before."""
        ray = _ray()
        with self._lock:
            self._streams -= 1
            if not self._streams and self._is_ours:
                ray.shutdown()
                self._is_ours = False

    def _connect(self, ray: Any) -> None:
        """Connect to Ray in a new thread and wait at most RAY_JOIN_S. A thread is needed because
        Ray waits minutes for a cluster that does not run, and changes signal handlers if it runs in
        the main thread.
        """
        logging.getLogger("ray").setLevel(logging.ERROR)
        joined: queue.SimpleQueue[str] = queue.SimpleQueue()
        if (reason := self._unreachable()) is None:
            in_background("zmqdist-ray", self._join, ray, joined)
            try:
                reason = joined.get(timeout=limits.RAY_JOIN_S)
            except queue.Empty:
                reason = f"it has not answered within {limits.RAY_JOIN_S:g} s"
            if threading.current_thread() is threading.main_thread():
                # Ray's C++ library has replaced Python's handler of SIGTERM by one that prints a
                # stack and may abort the process. Undo it.
                signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        if reason:
            raise errors.UnavailableError(
                f"launcher: ray cannot join the Ray cluster at {self._address}: {reason}: start "
                f"one with `ray start --head`, or "
                "write its address as ray.address"
            )

    def _unreachable(self) -> str | None:
        """Return why no process listens at the address. None means that a process listens, or that
        the address has no port and Ray finds its cluster itself.
        """
        host, colon, port = self._address.rpartition(":")
        if not colon:
            return None
        try:
            socket.create_connection((host, int(port)), timeout=limits.RAY_REACH_S).close()
        except (OSError, ValueError) as error:
            return str(error)
        return None

    def _join(self, ray: Any, joined: queue.SimpleQueue[str]) -> None:
        try:
            ray.init(address=self._address, log_to_driver=False, configure_logging=False)
        except Exception as error:
            # Ray raises ConnectionError, RuntimeError, ValueError and errors of its own
            joined.put(_shortened(error))
        else:
            joined.put("")


class AgentProcess:
    """An actor of Ray, which starts the agent through a child process (`_KEEPER`) and holds the
    agent's standard input and output."""

    def __init__(
        self, silence_limit_s: float, launcher_address: str, threads: dict[str, str]
    ) -> None:
        here = _ray().util.get_node_ip_address()
        # The agent reads the addresses of launcher and host from SSH_CONNECTION. The variables of
        # Slurm are removed, because the agent would prefer them.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SLURM_") and name not in VARIABLES
        }
        environment |= threads
        environment["SSH_CONNECTION"] = f"{launcher_address} 0 {here} 0"
        command = [sys.executable, "-c", _KEEPER, *agent_command(sys.executable, silence_limit_s)]
        self._items: queue.Queue[_Item] = queue.Queue(limits.RAY_LINES_MAX)
        self._stream = ProcessStream(
            command,
            lambda exit_code, notes: notes,
            lambda line: self._items.put((_NOTE, line.encode())),
            environment,
        )
        in_background("zmqdist-output", self._read)

    def node_name(self) -> str:
        """Return the name of this host. When the caller gets the name, it knows that Ray has placed
        the actor."""
        return os.uname().nodename

    def send(self, line: bytes) -> None:
        self._stream.send(line)

    def receive(self) -> list[_Item]:
        """Wait for a line, and return the line together with all further lines that have been read
        by then."""
        items = [self._items.get()]
        with contextlib.suppress(queue.Empty):
            while len(items) < limits.RAY_LINES_MAX:
                items.append(self._items.get_nowait())
        return items

    def end(self) -> None:
        """Close the agent's standard input, and wait until the agent has ended. Kill the agent if
        this takes longer than END_S."""
        self._stream.close()

    def _read(self) -> None:
        line = b"?"
        while line:  # b"" means that the output has ended, which the launcher learns, too
            line = self._stream.receive()
            self._items.put((_OUTPUT, line))


class RayStream:
    """The byte stream to the agent in an actor (`AgentStream`). Its methods block while Ray runs
    methods of the actor. The threads of an `AgentLink` call them.
    """

    def __init__(
        self,
        cluster: RayCluster,
        options: dict[str, Any],
        threads: dict[str, str],
        silence_limit_s: float,
        on_note: NoteHandler,
    ) -> None:
        """Request the actor from Ray, without waiting until Ray has placed it. Raises
        UnavailableError if Ray cannot be reached."""
        self._cluster = cluster
        self._ray = cluster.enter()
        self._leave_once = threading.Lock()
        self._asks = _resources_text(options)
        self._on_note = on_note
        self._lines: deque[bytes] = deque()
        self._why = "its agent ended"
        self._closing = threading.Lock()
        self._is_closed = False
        self._has_node = False
        actor = self._ray.remote(AgentProcess).options(**options)
        self._actor = actor.remote(silence_limit_s, self._ray.util.get_node_ip_address(), threads)

    def send(self, line: bytes) -> None:
        try:
            self._ray.get(self._actor.send.remote(line))
        except Exception as error:
            # Ray or the agent's pipe has failed, or this process has disconnected from Ray
            raise BrokenPipeError(str(error)) from None

    def receive(self) -> bytes:
        while not self._lines:
            try:
                if not self._has_node:
                    self._ray.get(self._actor.node_name.remote(), timeout=limits.RAY_PLACE_S)
                    self._has_node = True
                items = self._ray.get(self._actor.receive.remote())
            except Exception as error:
                self._why = self._phrase(error)
                return b""
            for kind, line in items:
                if kind == _OUTPUT:
                    self._lines.append(line)
                else:
                    self._on_note(line.decode())
        return self._lines.popleft()

    def close(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            # `get` and `kill` raise if the actor or Ray has already ended. The agent has ended as
            # well, so there is nothing to do.
            with contextlib.suppress(Exception):
                if self._has_node:
                    self._ray.get(self._actor.end.remote(), timeout=2 * END_S)
            with contextlib.suppress(Exception):
                self._ray.kill(self._actor)

    def end_reason(self) -> str:
        self.close()
        if self._leave_once.acquire(blocking=False):
            self._cluster.leave()
        return self._why

    def _phrase(self, error: Exception) -> str:
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.GetTimeoutError):
            return (
                f"Ray has not placed its actor within {limits.RAY_PLACE_S:g} s, which asks for "
                f"{self._asks}: `ray status` shows "
                "what is free"
            )
        reason = _shortened(error)
        if "No module named 'zmqdist'" in reason:
            return "the Python of Ray has no zmqdist there: install it on every node of the Ray cluster"
        if isinstance(error, exceptions.RayActorError):
            return "its actor has died: the logs of Ray on its node say why"
        return f"Ray has failed: {reason}"


def _ray() -> Any:
    """Return the package `ray`. The first call imports it, which takes a second."""
    return importlib.import_module("ray")


def _shortened(error: Exception) -> str:
    """Return the text of an error as one line of bounded length."""
    return " ".join(str(error).split())[:_REASON_MAX] or type(error).__name__


def _resources_text(options: dict[str, Any]) -> str:
    """Return the resources that an actor requests, in words: "2 CPU, 1 GPU"."""
    amounts = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options["resources"]}
    return (
        ", ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount) or "nothing"
    )

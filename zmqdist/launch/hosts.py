"""The launcher that starts roles on other hosts through host agents. `agent_hosts` lists the hosts
of a cluster file, `HostSlots` places roles on them, `AgentPool` holds the connections to the
agents, and `Hosts` is the `Launcher`.

The pool is made before the dispatcher, because the pool knows the address at which the hosts reach
the dispatcher. The pool also reserves the addresses of parameter servers before the first role
starts. ssh, Slurm and Ray differ only in `AgentHost.open` (agent_stream.py), which starts the agent
of a host and returns the byte stream to the agent.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zmqdist import clock as time
from zmqdist import errors, limits
from zmqdist._version import __version__
from zmqdist.addresses import join_address
from zmqdist.background import in_background
from zmqdist.launch.agent_link import NOT_STARTED, AgentLink, RemoteRole
from zmqdist.launch.agent_protocol import AgentHello, AgentUnfit, StartRole
from zmqdist.launch.agent_stream import AgentHost, NoteHandler
from zmqdist.launch.code_bundle import CodeBundle
from zmqdist.launch.exit_codes import ExitCode
from zmqdist.launch.launcher_interface import LineHandler
from zmqdist.launch.role_files import RoleFiles
from zmqdist.transport.own_address import own_host
from zmqdist.transport.port_probe import is_local_address

if TYPE_CHECKING:
    from zmqdist.cluster.config import ClusterConfig
    from zmqdist.launch.roles import TaskConfig
    from zmqdist.scheduling.shared.config import WorkerConfig

Say = Callable[[str], object]

LOOPBACK: Final = "127.0.0.1"
ANSWER_S: Final = 5.0
"""Seconds in which an agent has to answer CloseAgent. After the grace the agent has the same time
to report the ends of its roles."""
POLL_S: Final = 0.1
ANY_PORT: Final = 9
"""A port for an address that is only looked up: any port will do, because no data is sent to it."""


def agent_hosts(config: ClusterConfig) -> list[AgentHost] | None:
    """Return the hosts whose agents start the roles of a cluster file. None means that the roles
    are child processes of the launcher. This function starts no agent.

    Raises:
      NotFoundError: a program or package that the launcher needs is missing.
      FailedPreconditionError: the launcher is slurm, and this process does not run in an allocation
        of Slurm.
      UnimplementedError: `zmqdist launch` does not have this launcher.
    """
    worker = config.jobs.worker
    orphan_limit_s = limits.ORPHAN_LIMIT_S if worker is None else worker.orphan_limit_s
    silence_limit_s = max(orphan_limit_s, limits.AGENT_SILENCE_S_MIN)
    match config.launcher:
        case "local":
            return None
        case "ssh":
            from zmqdist.launch.ssh import ssh_hosts

            return ssh_hosts(config.ssh, silence_limit_s)
        case "slurm":
            from zmqdist.launch.slurm import slurm_hosts

            return slurm_hosts(silence_limit_s)
        case "ray":
            from zmqdist.launch.ray import ray_hosts

            return ray_hosts(config, silence_limit_s)
    raise errors.UnimplementedError(
        f"`zmqdist launch` cannot run `launcher: {config.launcher}`; it runs local, ssh, slurm "
        f"and ray"
    )


class HostSlots:
    """The places of roles on hosts. Any thread may call the methods.

    A crashed role keeps its place, so that it is restarted on its host. The roles of a lost host
    lose their places: each gets one on another host when it is restarted.

    Args:
      slots: the largest number of roles of each host, in the order of the cluster file. None means
        no bound.
    """

    def __init__(self, slots: Mapping[str, int | None]) -> None:
        self._slots = dict(slots)
        self._hosts: dict[str, str] = {}
        """The host of each role that has a place."""
        self._lock = threading.Lock()

    @property
    def hosts(self) -> list[str]:
        """The hosts that are not lost, in the order of the file."""
        return list(self._slots)

    @property
    def room(self) -> int | None:
        """How many roles all hosts that are not lost may have together. None means no bound."""
        slots = list(self._slots.values())
        return None if None in slots else sum(filter(None, slots))

    def assign(self, role: str) -> str | None:
        """Return the host of a role. If the role has no place yet, choose one for it. Return None
        if no host has a free slot."""
        with self._lock:
            # a role that has a place keeps it, so that it is restarted on its host
            if role not in self._hosts:
                count = Counter(self._hosts.values())
                free = [
                    host
                    for host, slots in self._slots.items()
                    if slots is None or count[host] < slots
                ]
                if not free:
                    return None
                # If several hosts have the fewest roles, `min` returns the first of them.
                self._hosts[role] = min(free, key=count.__getitem__)
            return self._hosts[role]

    def release(self, role: str) -> None:
        """Free the place of a role that is not restarted."""
        with self._lock:
            self._hosts.pop(role, None)

    def lose(self, host: str) -> None:
        """Record that a host is lost, so that no more roles are placed on the host."""
        with self._lock:
            self._slots.pop(host, None)
            self._hosts = {
                role: role_host for role, role_host in self._hosts.items() if role_host != host
            }


class AgentPool:
    """The agents of all hosts, and the host of each role.

    Args:
      hosts: at least one host. No two hosts have the same name.
      say: a function that is called with each warning, and with each line of an agent's standard
        error, prefixed by the host's name.
      cancelled: a function that is called while the agents start. If it returns True, the
        constructor gives up.

    Raises:
      UnavailableError: a host cannot be reached.
      FailedPreconditionError: a host cannot run roles, for example because its Python or zmqdist
        has another version.
      CancelledError: `cancelled` returned True.
    """

    def __init__(
        self, hosts: Sequence[AgentHost], say: Say, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Start the agents of all hosts at the same time. Return when each agent has sent its hello
        and can run roles."""
        self._say = say
        self.slots = HostSlots({host.name: host.slots for host in hosts})
        self.links: dict[str, AgentLink] = {}
        self._reserved: dict[str, str] = {}
        """The host of each role whose port is reserved, by the name of the role."""
        try:
            for host in hosts:
                note = self._noted(host.name)
                try:
                    stream = host.open(note)
                except OSError as error:
                    raise errors.UnavailableError(
                        f"{host.name}: its agent cannot be started: {error}"
                    ) from None
                self.links[host.name] = AgentLink(host.name, stream, note)
            self._wait(cancelled)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the byte streams to all agents. Each agent then kills its roles that still run. A
        second call does nothing."""
        threads = [
            threading.Thread(target=link.close, name="zmqdist-close")
            for link in self.links.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def hello(self, host: str) -> AgentHello:
        """Return the hello of the agent of a host."""
        greeting = self.links[host].greeting
        assert isinstance(greeting, AgentHello)
        return greeting

    def reserve(
        self, role: str, port: int = 0, *, interface: str | None = None, ports: str = ""
    ) -> str:
        """Place a role, reserve a port on its host, and return the address. After this call the
        role can run on the host of the port only.

        Args:
          port: the port. 0 means a free port.
          interface: an address or interface of the role's host. None means the address at which the
            launcher has reached the host.
          ports: the range from which a free port is taken. "" means any port.

        Raises:
          UnavailableError: no host has a free slot, or the agent does not answer.
          UnknownError: the agent cannot bind the port.
        """
        host = self.slots.assign(role)
        if host is None:
            raise errors.UnavailableError(
                f"no host has a free slot for {role}: raise the number of slots or of hosts"
            )
        # Programs learn this address, so the role cannot move to another host later.
        self._reserved[role] = host
        return self.links[host].reserve(
            interface or self.hello(host).reached_at or LOOPBACK, port, ports
        )

    def send_code(self, bundle: CodeBundle) -> None:
        """Send this code to all hosts at the same time, so that all later roles run with it. Raises
        the errors of `AgentLink.send_code`. If several hosts fail, the error is that of the first
        of them.
        """

        def send(link: AgentLink) -> None:
            link.send_code(bundle, lambda: self._say(f"[{link.host}] gets {bundle.describe()}"))

        with ThreadPoolExecutor(len(self.links), thread_name_prefix="zmqdist-code") as threads:
            for sending in [threads.submit(send, link) for link in self.links.values()]:
                sending.result()

    def lost_port_host(self, role: str) -> str:
        """Return the name of the host of the role's reserved port if this host is lost, so that the
        role cannot run any more. "" means that the host is not lost, or that the role has no
        reserved port.
        """
        host = self._reserved.get(role, "")
        return "" if host in self.slots.hosts else host

    def own_address(self) -> str:
        """Return the address of this host to which processes on all hosts can connect.

        Raises:
          FailedPreconditionError: the other hosts reach this host at different addresses.
        """
        addresses = {host: _own_address(self.hello(host)) for host in self.links}
        if len(set(addresses.values())) > 1:
            (own_address, first), (second_address, second) = list(
                {address: host for host, address in addresses.items()}.items()
            )[:2]
            raise errors.FailedPreconditionError(
                f"{first} reaches this host at {own_address} and {second} at {second_address}: "
                f"write an address that all hosts reach as "
                "jobs.dispatcher.address, with port 0 for a free one"
            )
        return next(iter(addresses.values()))

    def _noted(self, host: str) -> NoteHandler:
        def note(line: str) -> None:
            link = self.links.get(host)
            if link is not None and link.greeting is not None:
                # Lines before the hello are not printed: if the agent does not start, they are in
                # `end_reason`.
                self._say(f"[{host}] {line}")

        return note

    def _wait(self, cancelled: Callable[[], bool]) -> None:
        until = time.monotonic() + limits.AGENT_HELLO_S
        for link in self.links.values():
            while not link.greeted.wait(POLL_S):
                if cancelled():
                    raise errors.CancelledError("stopped while the hosts were being reached")
                if time.monotonic() > until:
                    raise errors.UnavailableError(
                        f"{link.host}: its agent has not sent its hello within "
                        f"{limits.AGENT_HELLO_S:g} s"
                    )
            hello = _checked(link)
            ahead_s = hello.clock_s - time.time()
            if abs(ahead_s) > limits.AGENT_CLOCK_S:
                self._say(
                    f"[{link.host}] warning: its clock is {abs(ahead_s) / 60:.1f} minutes "
                    f"{'ahead of' if ahead_s > 0 else 'behind'} this host's: times in logs will "
                    f"not match; set it by NTP"
                )


class Hosts:
    """The `Launcher` (launcher_interface.py) that starts roles through the agents of a pool. Its
    `close` also closes the pool.

    Args:
      on_exit: a function that is called with each role that has ended, in the reader thread of the
        link to the role's agent. For a role that was never started a new thread calls it.
      say: a function that is called with a line for each host that is lost.
      files: the RoleFiles that makes the files that are sent with each role. None means that no
        files are sent.
      on_lost: a function that is called when a host was lost, before `on_exit` is called with the
        roles of the host.
    """

    def __init__(
        self,
        pool: AgentPool,
        on_exit: Callable[[RemoteRole], object],
        say: Say,
        files: RoleFiles | None = None,
        on_lost: Callable[[], object] = lambda: None,
    ) -> None:
        self.files = files
        self._on_lost = on_lost
        self._pool = pool
        self._on_exit = on_exit
        self._say = say
        self._lock = threading.Lock()
        self._running: set[RemoteRole] = set()
        self._closing = False
        for link in pool.links.values():
            link.on_role_end, link.on_end = self.role_exited, self.link_closed

    @property
    def running(self) -> list[RemoteRole]:
        with self._lock:
            return list(self._running)

    def start_role(
        self,
        config: WorkerConfig | TaskConfig,
        environment: Mapping[str, str],
        on_line: LineHandler | None = None,
    ) -> RemoteRole:
        """Start a role on a host that has a free slot, and return the role. If this is not
        possible, the returned role ends at once, and its `tail` is the reason.
        """
        name = f"{config.job}:{config.index}"
        # A stranded role gets no slot, because another role could use it.
        stranded = self.stranded(name)
        host = None if stranded else self._pool.slots.assign(name)
        order, problem = None, "no host has a free slot for it"
        if host is not None:
            try:
                order = self._order(host, config, environment)
            except errors.OpError as error:
                problem = error.message
        role = RemoteRole(name, host or "", on_line)
        with self._lock:
            self._running.add(role)
        # R1: `on_exit` is called also for a role that could not be started
        if stranded:
            self._fail(role, ExitCode.REFUSED, stranded)
        elif host is None or order is None:
            self._fail(role, NOT_STARTED, problem)
        elif not self._pool.links[host].start(role, order):
            self._fail(role, NOT_STARTED, self._pool.links[host].end_reason)
        return role

    def stranded(self, name: str) -> str:
        """Return why no host can run this role any more (`Launcher.stranded`). A role with a
        reserved port can run on the host of that port only."""
        lost = self._pool.lost_port_host(name)
        if not lost:
            return ""
        return (
            f"its address is on {lost}, which is lost, and programs know no other address of it: "
            f"start "
            "`zmqdist launch` again without that host; a program that restores its last "
            "checkpoint continues from it"
        )

    def release(self, name: str) -> None:
        """Free the place of a role that is not restarted (`Launcher.release`)."""
        self._pool.slots.release(name)

    def close(self, grace_s: float) -> None:
        """Stop all roles (`Launcher.close`). A role on a host whose agent does not answer is
        reported as killed."""
        self._closing = True
        start_s = time.monotonic()
        for link in self._pool.links.values():
            link.request_close(grace_s)
        for link in self._pool.links.values():
            if link.answered_close.wait(start_s + ANSWER_S - time.monotonic()):
                link.wait_for_end(max(0.0, start_s + grace_s + ANSWER_S - time.monotonic()))
        self._pool.close()

    # -- in the threads of the links ---------------------------------------------------------------

    def role_exited(self, role: RemoteRole) -> None:
        with self._lock:
            self._running.discard(role)
        self._on_exit(role)

    def link_closed(self, link: AgentLink) -> None:
        self._pool.slots.lose(link.host)
        if not self._closing:
            # first, so that no restart is planned for which the hosts have no room any more
            self._on_lost()
            self._say(f"[{link.host}] is lost: {link.end_reason.partition(': ')[2]}")

    # -----------------------------------------------------------------------------------------------------------------

    def _order(
        self, host: str, config: WorkerConfig | TaskConfig, environment: Mapping[str, str]
    ) -> StartRole:
        """Return the order that starts a role; `AgentLink.start` gives the order its number. Raises
        OpError if the dispatcher makes no join ticket for the role.
        """
        name, kind = f"{config.job}:{config.index}", type(config).__name__
        variables, files = dict(environment), dict[str, str]()
        if self.files is not None:
            hello = self._pool.hello(host)
            config, variables, files = self.files.pack(
                config, environment, hello.folder, hello.cores
            )
        return StartRole(0, name, kind, json.dumps(dataclasses.asdict(config)), variables, files)

    def _fail(self, role: RemoteRole, exit_code: int, reason: str) -> None:
        """Report a role that was never started as ended. A new thread calls `on_exit`, because
        `on_exit` may need a lock that the caller of this method holds.
        """
        role.exit_code, role.tail = exit_code, reason
        role.ended.set()
        in_background("zmqdist-not-started", self.role_exited, role)


def _checked(link: AgentLink) -> AgentHello:
    """Return the hello of a link's agent, after checking that the agent's host can run functions
    that were pickled in this process.

    Raises:
      UnavailableError: the agent's byte stream ended before the hello.
      FailedPreconditionError: the host lacks zmqdist or a package, or has another version of Python
        or zmqdist.
    """
    greeting = link.greeting
    if greeting is None:
        raise errors.UnavailableError(link.end_reason)
    here, there = sys.version.split()[0], greeting.python
    if here.split(".")[:2] != there.split(".")[:2]:
        raise errors.FailedPreconditionError(
            f"{link.host}: Python {there} there and {here} here cannot exchange functions: name a "
            f"Python "
            f"{'.'.join(here.split('.')[:2])} of that host as `python` in the file"
        )
    if isinstance(greeting, AgentUnfit):
        remedy = (
            greeting.remedy
            or f"install zmqdist {__version__} there, or name the Python that has it as `python`"
        )
        raise errors.FailedPreconditionError(
            f"{link.host}: {greeting.executable}: {greeting.reason}: {remedy}"
        )
    if greeting.version != __version__:
        raise errors.FailedPreconditionError(
            f"{link.host}: zmqdist {greeting.version} there ({greeting.path}) and {__version__} "
            f"here "
            f"({Path(__file__).resolve().parents[1]}): install the same version on both"
        )
    return greeting


def _own_address(hello: AgentHello) -> str:
    """Return the address of this host to which the agent of `hello` can connect."""
    if hello.reached_from and is_local_address(hello.reached_from):
        return hello.reached_from
    if not hello.reached_at:
        return LOOPBACK
    # The agent has reported the address of a jump host, not an address of this host. Use the
    # address of the interface that leads to the agent.
    return own_host(join_address(hello.reached_at, ANY_PORT))

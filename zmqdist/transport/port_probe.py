"""A look at a port from outside: does its name exist, does it take a connection, what does it speak, whose is it.

A ZeroMQ server sends first, before any handshake, 64 bytes in the clear that name its security mechanism. So a port that greets is
served, a port that refuses belongs to no process, and one that does neither is of a process that is stopped or busy, or lies behind a
network that drops what it is sent.

`PortProbe` never waits; the functions wait no longer than they are told to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from zmqdist.errors import InvalidArgumentError
from zmqdist.transport.address import is_ipv6, join, split
from zmqdist.transport.security import listening_sockets

GREETING_BYTES: Final = 64
PROBE_S: Final = 1.0
"""So long a probe waits for a connection, unless it is told otherwise, and then for the greeting."""

_STEP_MS: Final = 20
"""A probe that has run out of time is found so late at most."""

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_IN_PROGRESS: Final = (errno.EINPROGRESS, errno.EAGAIN, errno.ENOTCONN)


class PortProbe:
    """One look at a port, without waiting: `step` is called when its socket is ready or some milliseconds later, until it returns True.

    Attributes:
      connected: a TCP connection was made.
      failure: why none was: socket.gaierror, ConnectionRefusedError, TimeoutError, OSError.
      mechanism: at the end: "NULL", "PLAIN", "CURVE"; "" for a server that does not speak ZeroMQ; None: no answer.
    """

    def __init__(self, address: str, now: float, connect_s: float = PROBE_S) -> None:
        """Raises InvalidArgumentError: not an address."""
        self.connected = False
        self.failure: OSError | None = None
        self.mechanism: str | None = None
        self._until = now + connect_s
        self._seen = b""
        host, port = split(address)
        self._socket = socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            self._socket.connect((host, port))
        except BlockingIOError:
            pass
        except (OSError, UnicodeError) as error:  # a name that cannot be looked up; a label of more than 63 characters
            self.failure = (
                error if isinstance(error, OSError) else socket.gaierror(socket.EAI_NONAME, "not a host name")
            )

    def fileno(self) -> int:
        """Of its socket: ready for output when there is a connection or none can be made, then for input; -1 at the end."""
        return self._socket.fileno()

    def step(self, now: float) -> bool:
        """Go on; True: it has ended, and its socket is closed."""
        if self.fileno() < 0:
            return True
        ended = self.failure is not None
        try:
            ended = ended or self._talk(now)
        except OSError as error:
            if error.errno not in _IN_PROGRESS:
                ended = True
                if not self.connected:
                    self.failure = error
        if not ended and now >= self._until:
            ended = True
            if not self.connected:
                self.failure = TimeoutError()
        if ended:
            self.close()
        return ended

    def close(self) -> None:
        """Give up."""
        self._socket.close()

    def _talk(self, now: float) -> bool:
        if not self.connected:
            # The signature and major version 3: that is enough for the server to send its whole greeting, and too little
            # for it to find a mechanism that it does not like. send raises ENOTCONN until TCP stands.
            self._socket.send(_SIGNATURE + b"\x03")
            self.connected = True
            self._until = now + PROBE_S
        while len(self._seen) < GREETING_BYTES:
            part = self._socket.recv(GREETING_BYTES - len(self._seen))
            self._seen += part
            if not _SIGNATURE.startswith(self._seen[:1]):
                self.mechanism = ""
                return True
            if not part:
                return True
        self.mechanism = self._seen[12:32].rstrip(b"\0").decode("ascii", "replace")
        return True


def _run_probes(probes: Iterable[PortProbe], connect_only: bool = False) -> None:
    """Wait until all have ended, or have a connection."""
    left = list(probes)
    while True:
        now = time.monotonic()
        left = [probe for probe in left if not (probe.step(now) or (connect_only and probe.connected))]
        if not left:
            return
        poller = select.poll()
        for probe in left:
            poller.register(probe, select.POLLIN if probe.connected else select.POLLOUT)
        poller.poll(_STEP_MS)


def connect_failure(address: str, connect_s: float) -> OSError | None:
    """Why no TCP connection can be made to "host:port"; None: one was made. A refused one says that nobody listens there."""
    probe = PortProbe(address, time.monotonic(), connect_s)
    _run_probes([probe], connect_only=True)
    probe.close()
    return probe.failure


def listening(addresses: Mapping[tuple[str, int], str]) -> set[tuple[str, int]]:
    """Those tasks at whose "host:port" something speaks ZeroMQ; all are asked at the same time, and none for longer than 2 s."""
    probes: dict[tuple[str, int], PortProbe] = {}
    for task, address in addresses.items():
        with contextlib.suppress(InvalidArgumentError):  # no address: a cluster may have such, and nobody listens there
            probes[task] = PortProbe(address, time.monotonic())
    _run_probes(probes.values())
    return {task for task, probe in probes.items() if probe.mechanism}


@dataclass(frozen=True)
class ZmqBuild:
    """The ZeroMQ that this process uses."""

    pyzmq: str
    libzmq: tuple[int, int, int]
    curve: bool


@dataclass(frozen=True)
class ProbeResult:
    """What a port looks like from here.

    Attributes:
      number: the IP number that was tried; "" when the name could not be looked up.
      failure: why no connection was made; None when one was: socket.gaierror, ConnectionRefusedError, TimeoutError, OSError.
      connect_s: how long that took.
      mechanism: as of a PortProbe.
    """

    ip_address: str
    failure: OSError | None = None
    connect_s: float = 0.0
    mechanism: str | None = None


@dataclass(frozen=True)
class PortOwner:
    """Who listens on a port of this machine.

    Attributes:
      uid: of the socket.
      pid: 0 where that cannot be seen: another user's process.
      command: its command line, as the system shows it.
      state: of the process, as `ps` writes it: "T" is stopped.
    """

    uid: int
    pid: int = 0
    command: str = ""
    state: str = ""


def zmq_build() -> ZmqBuild:
    """Versions, and whether encryption is there."""
    major, minor, patch = zmq.zmq_version_info()
    return ZmqBuild(zmq.pyzmq_version(), (major, minor, patch), bool(zmq.has("curve")))


def resolve_host(host: str, timeout_s: float) -> str:
    """The IP number of a host as zmqdist connects to it: IPv4, unless an IPv6 number is written.

    Raises:
      socket.gaierror: the name cannot be looked up.
      TimeoutError: nobody answered within `timeout_s`.
    """
    outcome: list[str | OSError] = []

    def look_up() -> None:
        family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
        try:
            outcome.append(str(socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)[0][4][0]))
        except OSError as error:
            outcome.append(error)
        except UnicodeError:  # a label of more than 63 characters
            outcome.append(socket.gaierror(socket.EAI_NONAME, "not a host name"))
        except BaseException as error:  # it must not look like a name server that does not answer
            outcome.append(OSError(f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=look_up, name="zmqdist-name", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise TimeoutError
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    return outcome[0]


def is_local_address(ip_address: str) -> bool:
    """Whether an IP number is of this machine."""
    try:
        with socket.socket(socket.AF_INET6 if is_ipv6(ip_address) else socket.AF_INET) as probe:
            probe.bind((ip_address, 0))
    except OSError:
        return False
    return True


def probe(address: str, timeout_s: float) -> ProbeResult:
    """Look up, connect, and read the greeting; `timeout_s` for each of the first two."""
    host, port = split(address)
    try:
        number = resolve_host(host, timeout_s)
    except OSError as error:
        return ProbeResult("", error)
    began = time.monotonic()
    probe = PortProbe(join(number, port), began, timeout_s)
    _run_probes([probe], connect_only=True)
    connect_s = time.monotonic() - began
    _run_probes([probe])
    return ProbeResult(number, probe.failure, connect_s, probe.mechanism)


def explain_failure(address: str, result: ProbeResult, timeout_s: float) -> tuple[str, str]:
    """What a failed look means, and what to do about it."""
    host, port = split(address)
    failure = result.failure
    if not result.ip_address:
        why = "nobody answered" if isinstance(failure, TimeoutError) else failure and failure.strerror
        advice = "correct its spelling, have it in DNS or /etc/hosts of this machine, or write its IP number"
        return f"the host name {host} cannot be looked up ({why})", advice
    if isinstance(failure, ConnectionRefusedError):
        advice = "start the server, or use the address that it printed; port 0 means a new one at each start"
        return f"{host} is up, and nobody listens on port {port}", advice
    if isinstance(failure, TimeoutError):
        advice = f"see that {host} is up and that a firewall lets TCP port {port} through (nc -vz {host} {port})"
        return f"no answer to a TCP connection within {timeout_s:g} s", advice
    advice = f"see that {host} is on a network that this machine reaches (ip route get {result.ip_address})"
    return f"no TCP connection ({failure and failure.strerror})", advice


def port_owner(ip_address: str, port: int) -> PortOwner | None:
    """Who listens at an IP number of this machine; None: nobody, or this system does not tell."""
    try:
        sockets = listening_sockets(ip_address, port)
    except (OSError, ValueError, IndexError):
        return None
    if not sockets:
        return None
    wanted = {f"socket:[{inode}]" for _, inode in sockets}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _holds(folder, wanted):
            return PortOwner(min(uid for uid, _ in sockets), int(folder.name), _command(folder), _state(folder))
    return PortOwner(min(uid for uid, _ in sockets))


def _holds(folder: Path, wanted: set[str]) -> bool:
    with contextlib.suppress(OSError):  # not ours, or it has just gone
        for fd in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(fd) in wanted:
                    return True
    return False


def _command(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    return ""


def _state(folder: Path) -> str:
    with contextlib.suppress(OSError, IndexError):
        return (folder / "stat").read_text().rpartition(")")[2].split()[0]  # the name before it may have anything in it
    return ""

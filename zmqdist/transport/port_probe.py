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
import struct
import sys
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
PATIENCE_S: Final = 1.0
"""So long a probe waits for a connection, unless it is told otherwise, and then for the greeting."""

_STEP_MS: Final = 20
"""A probe that has run out of time is found so late at most."""

_IPV4_ERRORS: Final = (socket.IPPROTO_IP, 11)
_IPV6_ERRORS: Final = (socket.IPPROTO_IPV6, 25)
"""IP_RECVERR and IPV6_RECVERR of Linux: the kernel keeps the ICMP message that ends an attempt."""
_ERROR_BYTES: Final = 512
_FROM_ICMP, _FROM_ICMP6 = 2, 3
_FORBIDDEN: Final = (2, 3, 9, 10, 13)
"""Codes of "destination unreachable": protocol, port, network and host prohibited, communication prohibited (RFC 1812)."""
_FORBIDDEN6: Final = (1, 4, 5, 6)

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_IN_PROGRESS: Final = (errno.EINPROGRESS, errno.EAGAIN, errno.ENOTCONN)


@dataclass(frozen=True)
class Rejection:
    """An ICMP message that says that a connection cannot be made.

    Attributes:
      sender: the IP number of the host that sent it: a firewall, a router, or the host itself.
      forbidden: whether it forbids the connection (port or communication prohibited); else it knows no way.
    """

    sender: str
    forbidden: bool


class PortProbe:
    """One look at a port, without waiting: `step` is called when its socket is ready or some milliseconds later, until it returns True.

    Attributes:
      connected: a TCP connection was made.
      failure: why none was: socket.gaierror, ConnectionRefusedError, TimeoutError, OSError.
      rejection: the ICMP message that ended the attempt; None: a server or the kernel of the host has refused it, or nothing did.
      mechanism: at the end: "NULL", "PLAIN", "CURVE"; "" for a server that does not speak ZeroMQ; None: no answer.
    """

    def __init__(self, address: str, now: float, connect_s: float = PATIENCE_S) -> None:
        """Raises InvalidArgumentError: not an address."""
        self.connected = False
        self.failure: OSError | None = None
        self.rejection: Rejection | None = None
        self.mechanism: str | None = None
        self._until = now + connect_s
        self._seen = b""
        host, port = split(address)
        self._socket = socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        if sys.platform.startswith("linux"):
            self._socket.setsockopt(*(_IPV6_ERRORS if is_ipv6(host) else _IPV4_ERRORS), 1)
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
            if self.failure is not None:
                self.rejection = _rejection(self._socket)
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
            self._until = now + PATIENCE_S
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


def _rejection(sock: socket.socket) -> Rejection | None:
    """Return the ICMP message in a socket's queue of errors (ip(7), IP_RECVERR)."""
    try:
        _, messages, _, _ = sock.recvmsg(1, _ERROR_BYTES, socket.MSG_ERRQUEUE)
    except (OSError, AttributeError):  # none came, or this is not Linux
        return None
    for _, _, data in messages:
        origin, kind, code = data[4:7]
        family, number = struct.unpack_from("=H", data, 16)[0], data[20:24]
        if origin == _FROM_ICMP and family == socket.AF_INET:
            return Rejection(socket.inet_ntoa(number), kind == 3 and code in _FORBIDDEN)
        if origin == _FROM_ICMP6 and family == socket.AF_INET6:
            return Rejection(socket.inet_ntop(socket.AF_INET6, data[24:40]), kind == 1 and code in _FORBIDDEN6)
    return None


def _run(probes: Iterable[PortProbe], connect_only: bool = False) -> None:
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
    _run([probe], connect_only=True)
    probe.close()
    return probe.failure


def listening(addresses: Mapping[tuple[str, int], str]) -> set[tuple[str, int]]:
    """Those tasks at whose "host:port" something speaks ZeroMQ; all are asked at the same time, and none for longer than 2 s."""
    probes: dict[tuple[str, int], PortProbe] = {}
    for task, address in addresses.items():
        with contextlib.suppress(InvalidArgumentError):  # no address: a cluster may have such, and nobody listens there
            probes[task] = PortProbe(address, time.monotonic())
    _run(probes.values())
    return {task for task, probe in probes.items() if probe.mechanism}


@dataclass(frozen=True)
class Build:
    """The ZeroMQ that this process uses."""

    pyzmq: str
    libzmq: tuple[int, int, int]
    curve: bool


@dataclass(frozen=True)
class Seen:
    """What a port looks like from here.

    Attributes:
      number: the IP number that was tried; "" when the name could not be looked up.
      failure: why no connection was made; None when one was: socket.gaierror, ConnectionRefusedError, TimeoutError, OSError.
      connect_s: how long that took.
      mechanism, rejection: as of a PortProbe.
    """

    number: str
    failure: OSError | None = None
    connect_s: float = 0.0
    mechanism: str | None = None
    rejection: Rejection | None = None


@dataclass(frozen=True)
class Owner:
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


def build() -> Build:
    """Versions, and whether encryption is there."""
    major, minor, patch = zmq.zmq_version_info()
    return Build(zmq.pyzmq_version(), (major, minor, patch), bool(zmq.has("curve")))


def number_of(host: str, timeout_s: float) -> str:
    """The IP number of a host as zmqdist connects to it: IPv4, unless the host has an IPv6 number only.

    Raises:
      socket.gaierror: the name cannot be looked up.
      TimeoutError: nobody answered within `timeout_s`.
    """
    told: list[str | OSError] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, 0, socket.SOCK_STREAM)
            told.append(min((str(entry[4][0]) for entry in found), key=is_ipv6))
        except OSError as error:
            told.append(error)
        except UnicodeError:  # a label of more than 63 characters
            told.append(socket.gaierror(socket.EAI_NONAME, "not a host name"))
        except BaseException as error:  # it must not look like a name server that does not answer
            told.append(OSError(f"{type(error).__name__}: {error}"))

    asking = threading.Thread(target=ask, name="zmqdist-name", daemon=True)
    asking.start()
    asking.join(timeout_s)
    if not told:
        raise TimeoutError
    if isinstance(told[0], OSError):
        raise told[0]
    return told[0]


def is_own(number: str) -> bool:
    """Whether an IP number is of this machine."""
    try:
        with socket.socket(socket.AF_INET6 if is_ipv6(number) else socket.AF_INET) as probe:
            probe.bind((number, 0))
    except OSError:
        return False
    return True


def look(address: str, timeout_s: float) -> Seen:
    """Look up, connect, and read the greeting; `timeout_s` for each of the first two."""
    host, port = split(address)
    try:
        number = number_of(host, timeout_s)
    except OSError as error:
        return Seen("", error)
    began = time.monotonic()
    probe = PortProbe(join(number, port), began, timeout_s)
    _run([probe], connect_only=True)
    connect_s = time.monotonic() - began
    _run([probe])
    return Seen(number, probe.failure, connect_s, probe.mechanism, probe.rejection)


def explain(address: str, seen: Seen, timeout_s: float) -> tuple[str, str]:
    """What a failed look means, and what to do about it."""
    host, port = split(address)
    failure = seen.failure
    if not seen.number:
        why = "nobody answered" if isinstance(failure, TimeoutError) else failure and failure.strerror
        advice = "correct its spelling, have it in DNS or /etc/hosts of this machine, or write its IP number"
        return f"the host name {host} cannot be looked up ({why})", advice
    if seen.rejection is not None:
        return _explain_rejection(host, port, seen.rejection)
    if isinstance(failure, ConnectionRefusedError):
        advice = "start the server, or use the address that it printed; port 0 means a new one at each start"
        return f"{host} is up, and nobody listens on port {port}", advice
    if isinstance(failure, TimeoutError):
        advice = f"see that {host} is up and that a firewall lets TCP port {port} through (nc -vz {host} {port})"
        return f"no answer to a TCP connection within {timeout_s:g} s", advice
    advice = f"see that {host} is on a network that this machine reaches (ip route get {seen.number})"
    return f"no TCP connection ({failure and failure.strerror})", advice


def _explain_rejection(host: str, port: int, rejection: Rejection) -> tuple[str, str]:
    if rejection.forbidden:
        advice = (
            f"let TCP port {port} through there, or have servers take ports that it lets through (`ports:` in the "
            "cluster file, ZMQDIST_PORTS)"
        )
        return f"a firewall at {rejection.sender} rejects TCP port {port} of {host}", advice
    advice = f"see that {host} is up, and that the routes to its network are right (ip route get {host})"
    return f"{rejection.sender} says that no way leads to {host}", advice


def owner(number: str, port: int) -> Owner | None:
    """Who listens at an IP number of this machine; None: nobody, or this system does not tell."""
    try:
        sockets = listening_sockets(number, port)
    except (OSError, ValueError, IndexError):
        return None
    if not sockets:
        return None
    wanted = {f"socket:[{inode}]" for _, inode in sockets}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _holds(folder, wanted):
            return Owner(min(uid for uid, _ in sockets), int(folder.name), _command(folder), _state(folder))
    return Owner(min(uid for uid, _ in sockets))


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

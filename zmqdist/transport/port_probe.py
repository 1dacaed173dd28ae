"""A probe of a port from outside: whether its host exists, whether it accepts a connection and
speaks ZeroMQ, which process owns it.

A ZeroMQ server begins each connection: before any handshake it sends a greeting of 64 bytes in the
clear, which names its security mechanism. So a port that sends this greeting has a ZeroMQ server,
and a port that refuses a connection has no process that listens. If a port does neither, its
process is stopped or busy, or a network on the way drops packets.

The steps of a `PortProbe` never wait, but making a `PortProbe` waits for the look-up of a host
name. `connect_failure` and `listening` wait for such a look-up in addition to their time-outs.
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import zmq

from zmqdist import clock as time
from zmqdist.addresses import is_ipv6, join_address
from zmqdist.errors import InvalidArgumentError
from zmqdist.transport.endpoint import split
from zmqdist.transport.security import listening_sockets

GREETING_BYTES: Final = 64
PROBE_S: Final = 1.0
"""Seconds for which a probe waits for the connection by default, and then again for the
greeting.
"""

_STEP_MS: Final = 20
"""Milliseconds by which `_run_probes` may be late to notice that the time of a probe is over."""

_IPV4_ERRORS: Final = (socket.IPPROTO_IP, 11)
_IPV6_ERRORS: Final = (socket.IPPROTO_IPV6, 25)
"""IP_RECVERR and IPV6_RECVERR of Linux: with them, the kernel keeps the ICMP message that ends an
attempt to connect."""
_ERROR_BYTES: Final = 512
_FROM_ICMP, _FROM_ICMP6 = 2, 3
_FORBIDDEN: Final = (2, 3, 9, 10, 13)
"""Codes of "destination unreachable": protocol, port, network and host prohibited, communication
prohibited (RFC 1812)."""
_FORBIDDEN6: Final = (1, 4, 5, 6)

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_IN_PROGRESS: Final = (errno.EINPROGRESS, errno.EAGAIN, errno.ENOTCONN)


class Rejection(msgspec.Struct, frozen=True):
    """An ICMP message that reports that a connection cannot be made.

    Attributes:
      sender: the IP address of the firewall, network router or host that sent the message.
      forbidden: True if the sender forbids the connection (port or communication prohibited), False
        if it knows no route.
    """

    sender: str
    forbidden: bool


class PortProbe:
    """One probe of a port. Call `step`, which never waits, whenever the socket is ready, or every
    few milliseconds, until it returns True.

    Attributes:
      connected: whether a TCP connection was made.
      failure: why no connection was made: socket.gaierror, ConnectionRefusedError, TimeoutError or
        OSError.
      rejection: the ICMP message that ended the attempt. None means that the probed host's own
        kernel refused, or that no reply arrived.
      mechanism: after the probe "NULL", "PLAIN" or "CURVE"; "" for a server that does not speak
        ZeroMQ; None if no greeting arrived.
    """

    def __init__(self, address: str, now: float, connect_s: float = PROBE_S) -> None:
        """Begin to connect, after the look-up of a host name. Raises InvalidArgumentError if
        `address` is not an address."""
        self.connected = False
        self.failure: OSError | None = None
        self.rejection: Rejection | None = None
        self.mechanism: str | None = None
        self._until = now + connect_s
        self._greeting = b""
        host, port = split(address)
        self._socket = socket.socket(
            socket.AF_INET6 if is_ipv6(host) else socket.AF_INET, socket.SOCK_STREAM
        )
        self._socket.setblocking(False)
        if sys.platform.startswith("linux"):
            self._socket.setsockopt(*(_IPV6_ERRORS if is_ipv6(host) else _IPV4_ERRORS), 1)
        try:
            self._socket.connect((host, port))
        except BlockingIOError:
            pass
        except (OSError, UnicodeError) as error:
            # UnicodeError: a label of the name has more than 63 characters
            self.failure = (
                error
                if isinstance(error, OSError)
                else socket.gaierror(socket.EAI_NONAME, "not a host name")
            )

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 after the probe.

        The descriptor becomes ready for output when connecting has succeeded or failed, and ready
        for input when the greeting arrives.
        """
        return self._socket.fileno()

    def step(self, now: float) -> bool:
        """Take the next step of the probe. Return True if the probe has ended and its socket is
        closed."""
        if self.fileno() < 0:
            return True
        finished = self.failure is not None
        try:
            finished = finished or self._talk(now)
        except OSError as error:
            if error.errno not in _IN_PROGRESS:
                finished = True
                if not self.connected:
                    self.failure = error
        if not finished and now >= self._until:
            finished = True
            if not self.connected:
                self.failure = TimeoutError()
        if finished:
            if self.failure is not None:
                self.rejection = _read_rejection(self._socket)
            self.close()
        return finished

    def close(self) -> None:
        """End the probe early."""
        self._socket.close()

    def _talk(self, now: float) -> bool:
        if not self.connected:
            # The signature and major version 3 make the server send its whole greeting, and name no
            # mechanism that it could refuse. While there is no TCP connection, `send` raises
            # ENOTCONN.
            self._socket.send(_SIGNATURE + b"\x03")
            self.connected = True
            self._until = now + PROBE_S
        while len(self._greeting) < GREETING_BYTES:
            part = self._socket.recv(GREETING_BYTES - len(self._greeting))
            self._greeting += part
            if not _SIGNATURE.startswith(self._greeting[:1]):
                self.mechanism = ""
                return True
            if not part:
                return True
        self.mechanism = self._greeting[12:32].rstrip(b"\0").decode("ascii", "replace")
        return True


def _read_rejection(sock: socket.socket) -> Rejection | None:
    """Return the ICMP message in a socket's queue of errors (ip(7), IP_RECVERR); None if the queue
    has no such message."""
    try:
        _, messages, _, _ = sock.recvmsg(1, _ERROR_BYTES, socket.MSG_ERRQUEUE)
    except (OSError, AttributeError):  # no ICMP message arrived, or this is not Linux
        return None
    for _, _, data in messages:
        origin, kind, code = data[4:7]
        family, sender = struct.unpack_from("=H", data, 16)[0], data[20:24]
        if origin == _FROM_ICMP and family == socket.AF_INET:
            return Rejection(socket.inet_ntoa(sender), kind == 3 and code in _FORBIDDEN)
        if origin == _FROM_ICMP6 and family == socket.AF_INET6:
            return Rejection(
                socket.inet_ntop(socket.AF_INET6, data[24:40]), kind == 1 and code in _FORBIDDEN6
            )
    return None


def _run_probes(probes: Iterable[PortProbe], connect_only: bool = False) -> None:
    """Wait until each probe has ended or, if `connect_only` is set, has a connection."""
    left = list(probes)
    while True:
        now = time.monotonic()
        left = [
            probe for probe in left if not (probe.step(now) or (connect_only and probe.connected))
        ]
        if not left:
            return
        poller = select.poll()
        for probe in left:
            poller.register(probe, select.POLLIN if probe.connected else select.POLLOUT)
        poller.poll(_STEP_MS)


def connect_failure(address: str, connect_s: float) -> OSError | None:
    """Return the error because of which no TCP connection to "host:port" could be made within
    `connect_s`; None if a connection was made.

    A ConnectionRefusedError means that no process listens at the address.
    """
    probe = PortProbe(address, time.monotonic(), connect_s)
    _run_probes([probe], connect_only=True)
    probe.close()
    return probe.failure


def listening(addresses: Mapping[tuple[str, int], str]) -> set[tuple[str, int]]:
    """Return the tasks at whose "host:port" a server speaks ZeroMQ. After the host names were
    looked up, all addresses are probed at the same time, for 2 s at most.
    """
    probes: dict[tuple[str, int], PortProbe] = {}
    for task, address in addresses.items():
        # A cluster may have a task without an address, for which no process can listen.
        with contextlib.suppress(InvalidArgumentError):
            probes[task] = PortProbe(address, time.monotonic())
    _run_probes(probes.values())
    return {task for task, probe in probes.items() if probe.mechanism}


class ZmqBuild(msgspec.Struct, frozen=True):
    """The ZeroMQ that this process uses."""

    pyzmq: str
    libzmq: tuple[int, int, int]
    curve: bool


class ProbeResult(msgspec.Struct, frozen=True):
    """The results of a probe of one port.

    Attributes:
      ip_address: the address that the probe tried; "" if the name could not be looked up.
      failure: why no connection was made: socket.gaierror, ConnectionRefusedError, TimeoutError or
        OSError; None if a connection was made.
      connect_s: seconds that connecting took.
      mechanism, rejection: the attributes of PortProbe after the probe.
    """

    ip_address: str
    failure: OSError | None = None
    connect_s: float = 0.0
    mechanism: str | None = None
    rejection: Rejection | None = None


class PortOwner(msgspec.Struct, frozen=True):
    """The process that listens on a port of this host.

    Attributes:
      uid: the user id of the socket.
      pid: the number of the process; 0 if this user may not see the process, because it belongs to
        another user.
      command: the command line, as the system shows it.
      state: the letter by which `ps` shows the state; "T" means stopped.
    """

    uid: int
    pid: int = 0
    command: str = ""
    state: str = ""


def zmq_build() -> ZmqBuild:
    """Return the versions of pyzmq and libzmq in use, and whether this libzmq can encrypt."""
    major, minor, patch = zmq.zmq_version_info()
    return ZmqBuild(zmq.pyzmq_version(), (major, minor, patch), bool(zmq.has("curve")))


def resolve_host(host: str, timeout_s: float) -> str:
    """Return the IP address to which zmqdist connects for a host: IPv4, unless the host has IPv6
    addresses only.

    Raises:
      socket.gaierror: the name cannot be looked up.
      TimeoutError: the name service did not reply within `timeout_s`.
    """
    outcome: list[str | OSError] = []

    def look_up() -> None:
        try:
            outcome.append(
                min(
                    (
                        str(entry[4][0])
                        for entry in socket.getaddrinfo(host, None, 0, socket.SOCK_STREAM)
                    ),
                    key=is_ipv6,
                )
            )
        except OSError as error:
            outcome.append(error)
        except UnicodeError:  # the name has a label of more than 63 characters
            outcome.append(socket.gaierror(socket.EAI_NONAME, "not a host name"))
        except BaseException as error:
            # without this branch, a bug in this thread would look like a name service that does not
            # reply
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
    """Return whether an IP address belongs to this host."""
    family = socket.AF_INET6 if is_ipv6(ip_address) else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as probe:
        probe.bind((ip_address, 0))
        return True
    return False


def probe(address: str, timeout_s: float) -> ProbeResult:
    """Look up the host of an address, connect, and read the greeting. `timeout_s` bounds the
    look-up and, separately, the connecting."""
    host, port = split(address)
    try:
        number = resolve_host(host, timeout_s)
    except OSError as error:
        return ProbeResult("", error)
    began = time.monotonic()
    probe = PortProbe(join_address(number, port), began, timeout_s)
    _run_probes([probe], connect_only=True)
    connect_s = time.monotonic() - began
    _run_probes([probe])
    return ProbeResult(number, probe.failure, connect_s, probe.mechanism, probe.rejection)


def explain_failure(address: str, result: ProbeResult, timeout_s: float) -> tuple[str, str]:
    """Return the meaning of a failed probe, and advice for the user."""
    host, port = split(address)
    failure = result.failure
    if not result.ip_address:
        why = (
            "the name service did not reply"
            if isinstance(failure, TimeoutError)
            else failure and failure.strerror
        )
        return (
            f"the host name {host} cannot be looked up ({why})",
            "correct its spelling, have it in DNS or /etc/hosts of this host, or write its IP address",
        )
    if result.rejection is not None:
        return _explain_rejection(host, port, result.rejection)
    if isinstance(failure, ConnectionRefusedError):
        return (
            f"{host} is up, and no process listens on port {port}",
            "start the server, or use the address that it printed; port 0 means a new one at each start",
        )
    if isinstance(failure, TimeoutError):
        return (
            f"no reply to a TCP connection within {timeout_s:g} s",
            f"check that {host} is up and that a firewall lets TCP port {port} through (nc -vz {host} {port})",
        )
    return (
        f"no TCP connection ({failure and failure.strerror})",
        f"check that {host} is on a network that this host reaches (ip route get {result.ip_address})",
    )


def _explain_rejection(host: str, port: int, rejection: Rejection) -> tuple[str, str]:
    if rejection.forbidden:
        return f"a firewall at {rejection.sender} rejects TCP port {port} of {host}", (
            f"let TCP port {port} through there, or have servers take ports that it lets through "
            f"(`ports:` in the "
            "cluster file, ZMQDIST_PORTS)"
        )
    return f"{rejection.sender} reports that no route leads to {host}", (
        f"see that {host} is up, and that the routes to its network are right (ip route get {host})"
    )


def port_owner(ip_address: str, port: int) -> PortOwner | None:
    """Return the process that listens at an IP address of this host; None if no process does, or
    this system does not report it."""
    try:
        sockets = listening_sockets(ip_address, port)
    except (OSError, ValueError, IndexError):
        return None
    if not sockets:
        return None
    links = {f"socket:[{inode}]" for _, inode in sockets}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _holds(folder, links):
            return PortOwner(
                min(uid for uid, _ in sockets), int(folder.name), _command(folder), _state(folder)
            )
    return PortOwner(min(uid for uid, _ in sockets))


def _holds(folder: Path, links: set[str]) -> bool:
    with contextlib.suppress(OSError):  # the process belongs to another user, or has just ended
        for fd in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(fd) in links:
                    return True
    return False


def _command(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    return ""


def _state(folder: Path) -> str:
    with contextlib.suppress(OSError, IndexError):
        # The state is the first word after the command's name, which may contain any character.
        return (folder / "stat").read_text().rpartition(")")[2].split()[0]
    return ""

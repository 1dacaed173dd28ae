"""A first look at a port from outside: does its name exist, does it take a connection, what does it speak, whose is it.

For people who ask why something does not work (`zmqdist doctor`). Each function waits, no longer than it is told to.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from zmqdist.transport.address import is_ipv6, join, split
from zmqdist.transport.greeting import GreetingProbe
from zmqdist.transport.security import listening

STEP_S: Final = 0.005


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
      mechanism: as GreetingProbe: "NULL", "PLAIN", "CURVE", "" for something that is not ZeroMQ, None for silence.
    """

    number: str
    failure: OSError | None = None
    connect_s: float = 0.0
    mechanism: str | None = None


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
    """The IP number of a host as zmqdist connects to it: IPv4, unless an IPv6 number is written.

    Raises:
      socket.gaierror: the name cannot be looked up.
      TimeoutError: nobody answered within `timeout_s`.
    """
    told: list[str | OSError] = []

    def ask() -> None:
        family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
        try:
            told.append(str(socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)[0][4][0]))
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
    number = ""
    try:
        number = number_of(host, timeout_s)
        began = time.monotonic()
        socket.create_connection((number, port), timeout_s).close()
        connect_s = time.monotonic() - began
    except OSError as error:
        return Seen(number, error)
    probe = GreetingProbe(join(number, port), time.monotonic())
    while not probe.step(time.monotonic()):
        time.sleep(STEP_S)
    return Seen(number, None, connect_s, probe.mechanism)


def explain(address: str, seen: Seen, timeout_s: float) -> tuple[str, str]:
    """What a failed look means, and what to do about it."""
    host, port = split(address)
    failure = seen.failure
    if not seen.number:
        why = "nobody answered" if isinstance(failure, TimeoutError) else failure and failure.strerror
        advice = "correct its spelling, have it in DNS or /etc/hosts of this machine, or write its IP number"
        return f"the host name {host} cannot be looked up ({why})", advice
    if isinstance(failure, ConnectionRefusedError):
        advice = "start the server, or use the address that it printed; port 0 means a new one at each start"
        return f"{host} is up, and nobody listens on port {port}", advice
    if isinstance(failure, TimeoutError):
        advice = f"see that {host} is up and that a firewall lets TCP port {port} through (nc -vz {host} {port})"
        return f"no answer to a TCP connection within {timeout_s:g} s", advice
    advice = f"see that {host} is on a network that this machine reaches (ip route get {seen.number})"
    return f"no TCP connection ({failure and failure.strerror})", advice


def owner(number: str, port: int) -> Owner | None:
    """Who listens at an IP number of this machine; None: nobody, or this system does not tell."""
    try:
        sockets = listening(number, port)
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

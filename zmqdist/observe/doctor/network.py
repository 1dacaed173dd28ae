"""Checks an address step by step: the name of the host, the port, the server that listens on the
port, its security, and its report about itself.

Each step is tried only after the earlier steps have succeeded.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from zmqdist import clock as time
from zmqdist import errors
from zmqdist._version import __version__
from zmqdist.addresses import is_loopback, is_name
from zmqdist.observe.doctor.findings import Finding, ok, problem, warning
from zmqdist.observe.status import plural, printable, slot_deaths
from zmqdist.rpc import ZmqClient, internal_client
from zmqdist.rpc.methods import ECHO, SERVER_INFO, ServerInfo, decode_server_info
from zmqdist.transport import keys, port_probe
from zmqdist.transport.credentials import KEYS_DIR_VARIABLE, Credentials
from zmqdist.transport.endpoint import split
from zmqdist.transport.port_probe import PortOwner, ProbeResult

PROBES: Final = 5
"""Number of calls that measure the round trip and the server's clock. Only the fastest call
counts.
"""

CLOCK_OFF_S: Final = 2.0

ECHO_BYTES: Final = (256, 1024, 1300, 1450, 4096, 16384)
"""Sizes of test messages, in bytes. Some are near the usual MTUs of tunnels and of Ethernet, and
some take several packets."""

PORTS_AT_A_TIME: Final = 16

STOPPED: Final = ("T", "t")


@dataclass
class Address:
    """The findings about one address.

    Attributes:
      info: the server's report about itself. None means that no server replied at this address.
    """

    findings: list[Finding]
    info: ServerInfo | None = None


def examine_server(
    address: str, credentials: Credentials, timeout_s: float, *, subject: str = ""
) -> Address:
    """Check an address at which a server should be running now."""
    subject = subject or address
    result = port_probe.probe(address, timeout_s)
    examined = (
        _identify(subject, address, result, credentials, timeout_s)
        if result.failure is None
        else Address([problem(subject, *port_probe.explain_failure(address, result, timeout_s))])
    )
    examined.findings += _loopback_name(address, result)
    return examined


def examine_planned(
    address: str, credentials: Credentials, timeout_s: float, *, subject: str
) -> Address:
    """Check an address of a cluster file. A server may run at this address, or may be started there
    later."""
    address = f"localhost{address}" if address.startswith(":") else address
    try:
        split(address)
    except errors.InvalidArgumentError as error:
        return Address([problem(subject, error.message, "correct the address of this task")])
    result = port_probe.probe(address, timeout_s)
    examined = _examine_probed(subject, address, result, credentials, timeout_s)
    examined.findings += _loopback_name(address, result)
    return examined


def _examine_probed(
    subject: str, address: str, result: ProbeResult, credentials: Credentials, timeout_s: float
) -> Address:
    host, port = split(address)
    if result.failure is None:
        return _identify(subject, address, result, credentials, timeout_s)
    if (
        not result.ip_address
        or result.rejection is not None
        or not isinstance(result.failure, ConnectionRefusedError)
    ):
        return Address([problem(subject, *port_probe.explain_failure(address, result, timeout_s))])
    if not port_probe.is_local_address(result.ip_address):
        return Address(
            [
                warning(
                    subject,
                    f"{host} is up, and nothing listens on port {port} yet",
                    f"start it on {host}; if it runs, its address is another one",
                )
            ]
        )
    try:
        with socket.socket(
            socket.AF_INET6 if ":" in result.ip_address else socket.AF_INET
        ) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((result.ip_address, port))
    except OSError as error:
        advice = (
            "take a port from 1024 on"
            if isinstance(error, PermissionError)
            else "take another port"
        )
        return Address(
            [
                problem(
                    subject,
                    f"{address} belongs to this host and cannot be bound ({error.strerror})",
                    advice,
                )
            ]
        )
    return Address([ok(subject, f"{address} belongs to this host and is free")])


def _loopback_name(address: str, result: ProbeResult) -> list[Finding]:
    """Return a finding if this host resolves a name to a loopback address. Some systems write their
    own name with such an address into /etc/hosts.
    """
    host, _ = split(address)
    if not is_name(host) or not is_loopback(result.ip_address):
        return []
    return [
        warning(
            f"name {host}",
            f"the name {host} is {result.ip_address} here: only this host can reach a server "
            f"that binds it",
            f"take {host} out of the line of {result.ip_address} in /etc/hosts, or write the "
            f"address or an interface instead",
        )
    ]


def _identify(
    subject: str, address: str, result: ProbeResult, credentials: Credentials, timeout_s: float
) -> Address:
    """Check the server at an address that accepts connections: what kind of server it is, and
    whether it admits this process."""
    _, port = split(address)
    owner = (
        port_probe.port_owner(result.ip_address, port)
        if port_probe.is_local_address(result.ip_address)
        else None
    )
    if result.mechanism is None:
        return Address([_silent(subject, owner)])
    if not result.mechanism:
        return Address(
            [
                problem(
                    subject,
                    f"the port is taken by {_named(owner)}, which is no zmqdist server",
                    "stop that, or take another port (0 for a free one)",
                )
            ]
        )
    failed: errors.OpError | None = None
    # a worker has no server key: try the keys of workers as well
    for key in (b"", *(listening_keys(credentials) if result.mechanism == "CURVE" else [])):
        try:
            client = client_of(address, credentials, key)
        except errors.OpError as error:
            return Address(
                [
                    problem(
                        subject,
                        error.message,
                        "name this cluster's token or keys (--token-file, --keys)",
                    )
                ]
            )
        with client:
            try:
                info, rtt_s, clock_ahead_s = _probe(client, timeout_s)
            except errors.OpError as error:
                failed = failed or error
                if not isinstance(error, errors.UnauthenticatedError):
                    break
                continue
            more = _large_messages(subject, client, timeout_s)
            if info.kind == "dispatcher":
                try:
                    more += list(_of_dispatcher(subject, client, timeout_s))
                except (AttributeError, LookupError, TypeError, ValueError) as error:
                    more.append(
                        warning(
                            subject,
                            f"its status cannot be read ({error!r})",
                            "install the same zmqdist on both ends",
                        )
                    )
        return Address(
            [*_described(subject, info, rtt_s, clock_ahead_s, result.mechanism), *more], info
        )
    assert failed is not None
    return Address([_refused(subject, failed, owner, timeout_s)])


def _large_messages(subject: str, client: ZmqClient, timeout_s: float) -> list[Finding]:
    """Return a finding if a large message gets no reply. If a link drops large packets, small calls
    succeed and larger calls hang."""
    answered = 0
    for size in ECHO_BYTES:
        try:
            client.call(
                ECHO, [bytes(size)], timeout_in_ms=max(1, round(1000 * timeout_s))
            ).get_value()
        except (errors.DeadlineExceededError, errors.UnavailableError):
            return [
                problem(
                    subject,
                    f"a message of {answered:,} bytes is answered, and one of {size:,} bytes "
                    f"is not within {timeout_s:g} s",
                    "a link on the way drops large packets without an error: set the MTU of "
                    "both ends "
                    "to what it carries "
                    "(ip link set dev eth0 mtu 1400), or let ICMP `fragmentation needed` "
                    "through its "
                    "firewalls",
                )
            ]
        except errors.OpError:  # the server is of an older version that lacks this method
            return []
        answered = size
    return []


def _of_dispatcher(subject: str, client: ZmqClient, timeout_s: float) -> Iterator[Finding]:
    """Yield findings about a dispatcher: its lost workers, crashed slots and relayed payloads, and
    the ports of its workers."""
    try:
        record = internal_client.start(
            client, "facts", due=time.monotonic() + timeout_s
        ).get_value()
    except errors.OpError:  # the dispatcher is of another version, or too slow to reply in time
        return
    if lost := record.get("losses_count"):
        yield warning(
            subject,
            f"{plural(lost, 'worker has', 'workers have')} been lost since it was started",
            "zmqdist status says which, when and why",
        )
    if record.get("slot_deaths_count"):
        yield warning(
            subject,
            slot_deaths(record),
            "look for them in the log of that worker, and in the kernel's for processes "
            "that took too much memory",
        )
    for row in record.get("demands", ()):
        if row.get("why") == "no worker has so much":
            yield warning(
                subject,
                f"{plural(row['waiting'], 'function waits', 'functions wait')} for "
                f"{printable(row['request'])}, and no worker has so much",
                "start a worker with --resource, or ask for less (zmqdist status says what there "
                "is)",
            )
    if relayed := record.get("relayed"):
        yield warning(
            subject,
            f"it has passed on {plural(relayed, 'piece')} of large payloads, which should "
            f"go straight from worker to reader",
            "open the ports of the workers and programs to each other's hosts, or give "
            "workers a fixed port (--port) and open that",
        )
    yield from _data_ports(record["workers"], client.address, timeout_s)


def _data_ports(
    workers: Sequence[Mapping[str, Any]], dispatcher: str, timeout_s: float
) -> list[Finding]:
    """Check the ports of the workers, from which other processes read large results. Return a
    finding for each port that cannot be reached, or one finding if all ports can be reached.
    """
    on_loopback = is_loopback(split(dispatcher)[0])

    def examine(worker: Mapping[str, Any]) -> Finding | None:
        name, address = worker["name"], worker["address"]
        try:
            result = port_probe.probe(address, timeout_s)
        except errors.InvalidArgumentError as error:
            return problem(
                f"data port of {name}", error.message, "restart this worker with --advertise"
            )
        subject = f"data port of {printable(name)} {printable(address)}"
        if not on_loopback and is_loopback(result.ip_address):
            # other hosts work with this dispatcher, and would connect to themselves
            return problem(
                subject,
                "its address is on loopback, where only processes of its own host reach it",
                "start it with --host and an address or interface that other hosts reach, or "
                "with --advertise",
            )
        if result.failure is None:
            return None
        message, advice = port_probe.explain_failure(address, result, timeout_s)
        return warning(
            subject, f"{message}; large results will pass through the dispatcher", advice
        )

    listening = [row for row in workers if row.get("address")]
    with ThreadPoolExecutor(PORTS_AT_A_TIME, thread_name_prefix="zmqdist-doctor") as pool:
        findings = [finding for finding in pool.map(examine, listening) if finding is not None]
    if listening and not findings:
        findings.append(
            ok("data ports", f"{plural(len(listening), 'worker')} can be reached directly")
        )
    return findings


def client_of(address: str, credentials: Credentials, key: bytes = b"") -> ZmqClient:
    """Return a client of the server at an address. If the client needs a key, it uses the key of
    the first of these roles that this process has: submit, worker, admin, client.

    Args:
      key: the public key of the server. It is needed for a worker, because a worker does not have
        the cluster's server key.
    """
    problems = []
    for role in ("submit", "worker", "admin", "client", "observe"):
        try:
            return ZmqClient(
                address, "zmqdist doctor", security=credentials.client(address, role, key)
            )
        except errors.FailedPreconditionError as error:
            problems.append(error)
    raise problems[0]


def listening_keys(credentials: Credentials) -> list[bytes]:
    """Return the public keys of workers in the file `authorized` of this process's key folder; []
    if this file cannot be read."""
    folder = credentials.keys_dir or os.environ.get(KEYS_DIR_VARIABLE)
    try:
        authorized = keys.load_authorized(folder) if folder else {}
    except errors.FailedPreconditionError:
        return []
    return [key for key, role in authorized.items() if role == "worker"]


def _probe(client: ZmqClient, timeout_s: float) -> tuple[ServerInfo, float, float]:
    """Return the server's report about itself, the fastest round trip in seconds, and the seconds
    by which the server's clock is ahead."""
    until = time.monotonic() + timeout_s
    probes = []
    for _ in range(PROBES):
        left_ms = max(1, round(1000 * (until - time.monotonic())))
        before, began = time.time(), time.monotonic()
        info = decode_server_info(
            client.call(SERVER_INFO, timeout_in_ms=left_ms).get_value(), client.address
        )
        rtt_s = time.monotonic() - began
        probes.append((rtt_s, info.time_s - (before + rtt_s / 2)))
    return info, *min(probes)


def _described(
    subject: str, info: ServerInfo, rtt_s: float, clock_ahead_s: float, mechanism: str
) -> Iterator[Finding]:
    security = {"PLAIN": "token", "CURVE": "CURVE"}.get(mechanism, "no security")
    yield ok(
        subject,
        f"{info.kind} pid {info.pid} (incarnation {info.incarnation & 0xFFFFFFFF:08x}), "
        f"zmqdist {info.version}, protocol {_dotted(info.protocol)}, "
        f"Python {_dotted(info.python)}, {security}, {1000 * rtt_s:.2g} ms there and back",
    )
    if info.version != __version__:
        consequence = (
            "they understand each other"
            if info.version.split(".")[:2] == __version__.split(".")[:2]
            else "plain calls work, scheduled functions will not run"
        )
        yield warning(
            subject,
            f"zmqdist {info.version} there, {__version__} here; {consequence}",
            "install the same version on both ends",
        )
    if info.python != sys.version_info[:2]:
        yield warning(
            subject,
            f"Python {_dotted(info.python)} there, {_dotted(sys.version_info[:2])} here: "
            f"scheduled functions will not run",
            "use the same Python on all hosts; plain calls work all the same",
        )
    if abs(clock_ahead_s) > CLOCK_OFF_S:
        direction = "ahead of" if clock_ahead_s > 0 else "behind"
        yield warning(
            subject,
            f"its clock is {abs(clock_ahead_s):.1f} s {direction} this host's",
            "run NTP on both; zmqdist does not need it, but comparing log lines does",
        )


def _refused(
    subject: str, error: errors.OpError, owner: PortOwner | None, timeout_s: float
) -> Finding:
    """Return a finding that says why a ZeroMQ server did not reply. If the server refused this
    process, the message of the finding is that of the client's error.
    """
    if isinstance(error, errors.DeadlineExceededError):
        process = f" of pid {owner.pid}" if owner is not None and owner.pid else ""
        return problem(
            subject,
            f"it accepts connections, but does not answer within {timeout_s:g} s: its Python is "
            f"busy or stuck",
            f"look at its log and its threads{process} (py-spy dump), or wait longer (--timeout)",
        )
    if isinstance(error, errors.UnauthenticatedError):
        return problem(
            subject,
            error.message,
            "name this cluster's token or keys: --token-file, --keys, or the environment",
        )
    if error.error_code == errors.INVALID_ARGUMENT:
        return warning(
            subject,
            f"it admits this side, but cannot identify itself ({error.message})",
            "install the same zmqdist there",
        )
    return problem(
        subject, error.message, "give both ends the same zmqdist and the same kind of security"
    )


def _silent(subject: str, owner: PortOwner | None) -> Finding:
    if owner is not None and owner.state in STOPPED:
        return problem(
            subject,
            f"{_named(owner)} is stopped (SIGSTOP or Ctrl-Z), so it takes connections and "
            f"says nothing",
            f"`kill -CONT {owner.pid}`",
        )
    return problem(
        subject,
        f"{_named(owner)} takes connections and says nothing: it is stopped, hangs, or is "
        f"no zmqdist server",
        "look at the process that has the port (ss -ltnp; state T in ps is stopped: kill "
        "-CONT), or take another port",
    )


def _named(owner: PortOwner | None) -> str:
    if owner is None:
        return "the process that listens there"
    if not owner.pid:
        return f"a process of user {owner.uid}"
    return f"pid {owner.pid} ({printable(owner.command)})"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

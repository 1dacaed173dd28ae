"""Checks of the features of this host and this Python that zmqdist needs. If possible, a check uses
the feature itself."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from zmqdist._version import __version__
from zmqdist.observe.doctor.findings import Finding, ok, problem, warning
from zmqdist.transport import port_probe
from zmqdist.transport.shm_pool import POOL_VARIABLE, make_memfd
from zmqdist.wire.hello import PROTOCOL

LIBZMQ_MIN: Final = (4, 3, 0)
DESCRIPTORS_MIN: Final = 1024
"""The usual limit of open file descriptors. It is enough for a dispatcher with some hundred
workers, or a worker with a hundred slots."""
MEMORY_LOW: Final = 2**30
PATIENCE_S: Final = 10.0
_PAGE: Final = 4096

_READ_THROUGH_PROC: Final = (
    "import os, sys; sys.stdout.buffer.write(os.pread(os.open(sys.argv[1], os.O_RDWR), 8, 0))"
)

PROXIES: Final = (
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
)


def examine(descriptors_needed: int = DESCRIPTORS_MIN) -> list[Finding]:
    """Run all checks of this host.

    Args:
      descriptors_needed: number of file descriptors that the most demanding process of a cluster
        needs.
    """
    return [
        versions(),
        transport(port_probe.zmq_build()),
        descriptors(descriptors_needed),
        proc(),
        shared_memory(),
        memory(),
        loopback(),
        *proxies(),
    ]


def versions() -> Finding:
    """Return a finding with the versions of zmqdist, Python and libraries, for bug reports."""
    python = ".".join(map(str, sys.version_info[:3]))
    message = f"{__version__}, protocol {PROTOCOL[0]}.{PROTOCOL[1]}, Python {python}"
    return ok("zmqdist", f"{message}, NumPy {np.__version__}, msgspec {msgspec.__version__}")


def transport(build: port_probe.ZmqBuild) -> Finding:
    """Check the version of libzmq in pyzmq, and whether it was built with CURVE."""
    libzmq = ".".join(map(str, build.libzmq))
    message = f"pyzmq {build.pyzmq}, libzmq {libzmq}"
    advice = "install pyzmq from a wheel (pip install --force-reinstall pyzmq)"
    if build.libzmq < LIBZMQ_MIN:
        return problem(
            "ZeroMQ", f"{message}, which is older than {'.'.join(map(str, LIBZMQ_MIN))}", advice
        )
    if not build.curve:
        return warning(
            "ZeroMQ", f"{message}, built without CURVE: nothing but loopback can be used", advice
        )
    return ok("ZeroMQ", f"{message} with CURVE")


def descriptors(needed: int) -> Finding:
    """Check the limit of open file descriptors (`ulimit -n`), because each connection and each slot
    needs some of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ok("descriptors", f"{soft:,} may be open, {needed:,} are enough")
    raisable = hard == resource.RLIM_INFINITY or hard >= needed
    advice = f"`ulimit -n {needed}` in the shell that starts it"
    if not raisable:
        advice += (
            f"; the hard limit is {hard}, so an administrator has to raise that first (limits.conf)"
        )
    make_finding = problem if needed > DESCRIPTORS_MIN else warning
    return make_finding("descriptors", f"{soft:,} may be open, {needed:,} are wanted", advice)


def proc() -> Finding:
    """Check that /proc can be read. zmqdist reads from /proc which user listens on a port, and
    opens shared memory through /proc."""
    try:
        Path("/proc/net/tcp").read_bytes()
        os.listdir("/proc/self/fd")
    except OSError as error:
        return problem(
            "/proc",
            f"/proc cannot be read ({error.strerror})",
            "mount it (mount -t proc proc /proc), or use CURVE keys and expect slow large arrays",
        )
    return ok("/proc", "can be read")


def shared_memory() -> Finding:
    """Check shared memory. A child process opens a memfd of this process, as processes of a cluster
    do."""
    # shared memory that a user has switched off must not be tried
    if os.environ.get(POOL_VARIABLE) == "off":
        return warning(
            "shared memory",
            f"switched off by {POOL_VARIABLE}=off",
            f"unset {POOL_VARIABLE} to transfer large arrays faster",
        )
    slower = "large arrays go through sockets, which is slower"
    try:
        fd = make_memfd(_PAGE)
    except (OSError, AttributeError) as error:
        return warning(
            "shared memory",
            f"there is none ({error}): {slower}",
            "this needs memfd_create of Linux 3.17 or newer",
        )
    try:
        pattern = os.urandom(8)
        os.pwrite(fd, pattern, 0)
        command = [sys.executable, "-I", "-c", _READ_THROUGH_PROC, f"/proc/{os.getpid()}/fd/{fd}"]
        process = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return warning(
            "shared memory",
            f"it could not be tried ({error})",
            "try again when this host is less busy",
        )
    finally:
        os.close(fd)
    if process.stdout == pattern:
        return ok("shared memory", "a child could open memory of this process")
    reason = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return warning(
        "shared memory",
        f"a child could not open memory of this process ({reason}): {slower}",
        "run all processes as one user and group, in one container, and not as a program "
        "that has changed its user",
    )


def memory() -> Finding:
    """Check the amount of memory that the kernel reports as available."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {
            line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")
        }
        free, total = kilobytes["MemAvailable"] * 1024, kilobytes["MemTotal"] * 1024
    except (OSError, ValueError, KeyError):
        return ok("memory", "this system does not report how much is free")
    message = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free"
    if free < MEMORY_LOW:
        return warning(
            "memory",
            message,
            "end other programs: the kernel kills processes when memory runs out (SIGKILL)",
        )
    return ok("memory", message)


def loopback() -> Finding:
    """Check that this process can connect to itself over loopback."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), PATIENCE_S) as client,
        ):
            server.settimeout(PATIENCE_S)
            accepted, _ = server.accept()
            with accepted:
                accepted.sendall(b"z")
                client.settimeout(PATIENCE_S)
                arrived = client.recv(1) == b"z"
    except OSError as error:
        return problem(
            "loopback",
            f"127.0.0.1 cannot be used ({error})",
            "`ip link set lo up`, and allow it in the firewall",
        )
    if not arrived:
        return problem(
            "loopback", "data sent to 127.0.0.1 was lost", "allow loopback in the firewall"
        )
    return ok("loopback", "127.0.0.1 works")


def proxies() -> list[Finding]:
    """If proxy variables are set, return a finding that zmqdist ignores them, because users of gRPC
    expect them to have an effect."""
    variables = [name for name in PROXIES if os.environ.get(name)]
    return (
        [ok("proxies", f"{', '.join(variables)} set, which zmqdist ignores: it connects directly")]
        if variables
        else []
    )

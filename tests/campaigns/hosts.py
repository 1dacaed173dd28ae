"""Hosts for tests on one machine: processes that share no network, no shared memory and no process
numbers, joined by links of any speed.

    with Network("server", "client") as net:
        serving = net["server"].run([sys.executable, "-m", "serve", net["server"].address])
        net["client"].shape(rate_mbit=1, delay_ms=20)
        net["client"].cut()

Each host has namespaces of its own for the network, processes (with their /proc), its name, System
V memory and mounts. /dev/shm, and the folders in `private`, are empty there; all other files are
the machine's. The hosts know each other by name (/etc/hosts). A cable leads from each host to a
bridge, which is in a namespace of its own, so that the machine's network stays untouched.

The first process of each host reads a pipe from this process, and the kernel ends a host with its
first process. So no process is left behind, also after a kill -9 of the test. `Network` skips the
test if the machine lacks the rights or the tools.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

TOOLS: Final = ("ip", "tc", "unshare", "nsenter", "mount")
READY_S: Final = 20.0
NETWORK: Final = "10.77.0"
PREFIX: Final = 24
DEVICE: Final = "eth0"
BRIDGE: Final = "bridge0"
CLONE_NEWPID: Final = 0x20000000

_FIRST_PROCESS: Final = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a process that loses its parent ends here, and leaves no zombie
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""
_entering: Final = threading.Lock()
_libc: Final = ctypes.CDLL(None, use_errno=True)


def missing() -> str | None:
    """Return why this machine cannot have hosts; None if it can."""
    if not sys.platform.startswith("linux"):
        return "hosts of a test are namespaces of Linux"
    if os.geteuid() != 0:
        return "hosts of a test are made by root"
    tools = [tool for tool in TOOLS if shutil.which(tool) is None]
    if tools:
        return f"hosts of a test need {', '.join(tools)}"
    # The probe runs in a namespace of its own, so that it needs no clean-up.
    trial = (
        f"ip link add {BRIDGE} type bridge && ip link add near type veth peer name far && "
        "tc qdisc add dev near root tbf rate 1mbit burst 2kb latency 1s && mount -t tmpfs tmpfs "
        "/dev/shm"
    )
    tried = subprocess.run(
        ["unshare", "-n", "-p", "-u", "-i", "-m", "--fork", "--mount-proc", "sh", "-c", trial],
        capture_output=True,
        text=True,
    )
    return (
        None
        if tried.returncode == 0
        else f"this machine makes no hosts: {tried.stderr.strip() or tried.returncode}"
    )


def delays() -> bool:
    """Return whether the kernel can delay packets (netem), as `shape` needs it for `delay_ms`."""
    trial = "ip link add near type veth peer name far && tc qdisc add dev near root netem delay 1ms"
    return subprocess.run(["unshare", "-n", "sh", "-c", trial], capture_output=True).returncode == 0


def _tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_S)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


@contextlib.contextmanager
def _processes_of(pid: int) -> Iterator[None]:
    """Within this context, processes that this thread starts belong to the host whose first process
    has this number."""
    with _entering, open("/proc/self/ns/pid") as ours, open(f"/proc/{pid}/ns/pid") as theirs:
        _set_namespace(theirs.fileno())
        try:
            yield
        finally:
            _set_namespace(ours.fileno())


def _set_namespace(fd: int) -> None:
    if _libc.setns(fd, CLONE_NEWPID) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class _Namespaces:
    """A set of namespaces, which exist as long as their first process.

    Attributes:
      pid: the number of the first process, as this process sees it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # The child of `unshare` is the first process; `--kill-child` ends it with `unshare`.
        self._keeper = subprocess.Popen(
            [
                *(
                    "unshare",
                    "-n",
                    "-p",
                    "-u",
                    "-i",
                    "-m",
                    "--fork",
                    "--kill-child",
                    "--mount-proc",
                ),
                *(sys.executable, "-S", "-E", "-c", _FIRST_PROCESS),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == b"ready\n", (
            f"{name}: its first process has not come up"
        )
        children = (
            Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children").read_text().split()
        )
        assert len(children) == 1, f"{name}: {children}"
        self.pid = int(children[0])

    def tool(self, *command: str) -> None:
        """Run a tool of the machine in these namespaces (network, mounts and name). A failure of
        the tool fails the test."""
        _tool("nsenter", "-t", str(self.pid), "-n", "-u", "-i", "-m", *command)

    def close(self, running: Sequence[subprocess.Popen[Any]] = ()) -> None:
        """End each process in the namespaces, and so the namespaces.

        Args:
          running: the children of this process in them: the first process does not end before this
            process has waited for its children.
        """
        for pipe in (self._keeper.stdin, self._keeper.stdout):
            assert pipe is not None
            pipe.close()
        for process in running:
            process.wait(READY_S)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        try:
            self._keeper.wait(READY_S)
        finally:
            if self._keeper.poll() is None:
                self._keeper.kill()
                self._keeper.wait(READY_S)


class Host:
    """One host of a `Network`.

    Attributes:
      name: the host's name, as its processes see it (`socket.gethostname()`), and by which the
        other hosts reach it.
      ip: its address.
    """

    def __init__(self, network: Network, number: int, name: str, private: Sequence[str]) -> None:
        self.name = name
        self.ip = f"{NETWORK}.{number}"
        self._network = network
        self._port = f"port{number}"
        self._running: list[subprocess.Popen[Any]] = []
        self._inside = _Namespaces(name)
        inside = self._inside
        try:
            inside.tool("hostname", name)
            for folder in private:
                inside.tool("mount", "-t", "tmpfs", "tmpfs", folder)
            inside.tool("mount", "--bind", str(network.names), "/etc/hosts")
            inside.tool("ip", "link", "set", "lo", "up")
            network.switch.tool(
                *(
                    "ip",
                    "link",
                    "add",
                    self._port,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    DEVICE,
                    "netns",
                    str(inside.pid),
                )
            )
            self.mend()
            network.switch.tool("ip", "link", "set", self._port, "up")
            inside.tool("ip", "address", "add", f"{self.ip}/{PREFIX}", "dev", DEVICE)
            inside.tool("ip", "link", "set", DEVICE, "up")
        except BaseException:
            inside.close()
            raise

    @property
    def first_process(self) -> int:
        """The number of its first process, as this process sees it."""
        return self._inside.pid

    def run(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this host.

        Args:
          options: as for subprocess.Popen; `cwd` and files are the machine's, except for the
            private folders.

        Returns:
          The process. Its `pid` is the number that this process sees, so that signals reach it. It
          ends with the network at the latest.
        """
        entering = ["nsenter", "-t", str(self._inside.pid), "-n", "-u", "-i", "-m"]
        if (folder := options.pop("cwd", None)) is None:
            folder = os.getcwd()
        entering.append(f"--wdns={folder}")
        with _processes_of(self._inside.pid):
            # nsenter would fork to do that, and signals would reach nsenter alone
            process = subprocess.Popen([*entering, "--", *command], **options)
        self._running.append(process)
        return process

    def processes(self) -> dict[int, str]:
        """The command lines of the processes of this host, by their numbers as this process sees
        them; without the first process."""
        ours = os.readlink(f"/proc/{self._inside.pid}/ns/pid")
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != self._inside.pid:
                with contextlib.suppress(OSError):  # it has just ended
                    if os.readlink(folder / "ns" / "pid") == ours:
                        found[int(folder.name)] = (
                            (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                        )
        return found

    def tool(self, *command: str) -> None:
        """Run a tool of the machine on this host, as `mount`; it fails the test where it fails."""
        self._inside.tool(*command)

    def shape(
        self, *, rate_mbit: float, delay_ms: float = 0.0, buffer_bytes: int = 64 * 1024
    ) -> None:
        """Limit the cable of this host, in each direction.

        Args:
          rate_mbit: millions of bits per second.
          delay_ms: the delay of each packet; more than 0 needs a kernel with netem (`delays`).
          buffer_bytes: the most bytes that wait at each end of the cable; others are dropped. The
            default is that of a small router.
        """
        # A bucket smaller than the bytes in one tick of the kernel's clock would make the link
        # slower than its rate.
        burst_bytes = max(3200, round(rate_mbit * 1e6 / 8 / 250))
        limits = [
            "rate",
            f"{rate_mbit}mbit",
            "burst",
            str(burst_bytes),
            "limit",
            str(max(buffer_bytes, 2 * burst_bytes)),
        ]
        for end, device in ((self._inside, DEVICE), (self._network.switch, self._port)):
            if delay_ms:
                end.tool(
                    "tc", "qdisc", "replace", "dev", device, "root", "handle", "1:", "tbf", *limits
                )
                end.tool(
                    *("tc", "qdisc", "replace", "dev", device, "parent", "1:1", "handle", "2:"),
                    "netem",
                    "delay",
                    f"{delay_ms}ms",
                )
            else:
                end.tool(
                    "tc", "qdisc", "replace", "dev", device, "root", "handle", "1:", "tbf", *limits
                )

    def unshape(self) -> None:
        """Remove the limits of the cable."""
        for end, device in ((self._inside, DEVICE), (self._network.switch, self._port)):
            end.tool("tc", "qdisc", "replace", "dev", device, "root", "pfifo")

    def cut(self) -> None:
        """Drop all packets. Neither end sees a sign of that, as behind a switch whose other cable
        was pulled."""
        self._network.switch.tool("ip", "link", "set", self._port, "nomaster")

    def mend(self) -> None:
        """Undo `cut`."""
        self._network.switch.tool("ip", "link", "set", self._port, "master", BRIDGE)

    def readdress(self, ip: str) -> None:
        """Give the host another address of the network (10.77.0.1 to 10.77.0.254). Its name leads
        there, and the old address to no host."""
        self._inside.tool("ip", "address", "flush", "dev", DEVICE)
        self._inside.tool("ip", "address", "add", f"{ip}/{PREFIX}", "dev", DEVICE)
        self.ip = ip
        self._network.write_names()

    def close(self) -> None:
        """Switch the host off: each of its processes ends as by kill -9, and the other ends of its
        connections get no sign."""
        self._inside.close(self._running)


class Network:
    """Hosts by name, for a `with` statement. Skips the test if the machine cannot have hosts."""

    def __init__(self, *names: str, private: Sequence[str] = ("/dev/shm",)) -> None:
        """Describe the hosts; `__enter__` creates them.

        Args:
          names: the names of the hosts, in the order of their addresses, 10.77.0.1 and so on.
          private: folders that each host has for itself, empty at first; /tmp among them would hide
            pytest's `tmp_path`.
        """
        self.hosts: dict[str, Host] = {}
        self._names = names
        self._private = private
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Network:
        why = missing()
        if why is not None:
            pytest.skip(why)
        with contextlib.ExitStack() as closing:
            folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="zmqdist-hosts-"))
            self.names = Path(folder) / "hosts"
            self.write_names()
            self.switch = _Namespaces("switch")
            closing.callback(self.switch.close)
            self.switch.tool("ip", "link", "add", BRIDGE, "type", "bridge")
            self.switch.tool("ip", "link", "set", BRIDGE, "up")
            for number, name in enumerate(self._names, 1):
                self.hosts[name] = host = Host(self, number, name, self._private)
                closing.callback(host.close)
            self.write_names()
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def write_names(self) -> None:
        """Write the file that all hosts read as their /etc/hosts. It is written in place, because
        it is mounted."""
        lines = ["127.0.0.1 localhost", *(f"{host.ip} {host.name}" for host in self.hosts.values())]
        self.names.write_text("\n".join(lines) + "\n")


def end(process: subprocess.Popen[Any], timeout_s: float = READY_S) -> int:
    """End a process of a host by SIGTERM, and by force after `timeout_s`. Return its exit code."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(READY_S)

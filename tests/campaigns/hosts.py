"""Hosts for tests on one machine: processes that share no network, no shared memory and no process numbers, joined by links of any speed.

    with Network("server", "client") as net:
        serving = net["server"].run([sys.executable, "-m", "serve", net["server"].address])
        net["client"].shape(rate_mbit=1, delay_ms=20)
        net["client"].cut()

Each host has namespaces of its own for the network, processes (with its /proc), its name, System V memory and mounts: /dev/shm, and what
else `private` names, are empty folders there; everything else is the machine's. All hosts know each other by name (/etc/hosts). A cable
leads from each one to a bridge, which stands in a namespace of its own, so nothing of the machine's network is touched.

The first process of each host reads a pipe from this process, and the kernel ends a host with its first process: nothing is left
behind, also after a kill -9 of the test. `Network` skips the test where the machine lacks the rights or the tools.
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
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who loses its parent ends here, and leaves no zombie
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""
_entering: Final = threading.Lock()
_libc: Final = ctypes.CDLL(None, use_errno=True)


def missing() -> str | None:
    """Why there can be no hosts on this machine; None when there can."""
    if not sys.platform.startswith("linux"):
        return "hosts of a test are namespaces of Linux"
    if os.geteuid() != 0:
        return "hosts of a test are made by root"
    tools = [tool for tool in TOOLS if shutil.which(tool) is None]
    if tools:
        return f"hosts of a test need {', '.join(tools)}"
    # In a namespace of its own, so that it needs no cleaning up.
    trial = (
        f"ip link add {BRIDGE} type bridge && ip link add near type veth peer name far && "
        "tc qdisc add dev near root tbf rate 1mbit burst 2kb latency 1s && mount -t tmpfs tmpfs /dev/shm"
    )
    tried = subprocess.run(
        ["unshare", "-n", "-p", "-u", "-i", "-m", "--fork", "--mount-proc", "sh", "-c", trial],
        capture_output=True,
        text=True,
    )
    return None if tried.returncode == 0 else f"this machine makes no hosts: {tried.stderr.strip() or tried.returncode}"


def delays() -> bool:
    """Whether the kernel can delay packets (netem); without that `shape` takes no `delay_ms`."""
    trial = "ip link add near type veth peer name far && tc qdisc add dev near root netem delay 1ms"
    return subprocess.run(["unshare", "-n", "sh", "-c", trial], capture_output=True).returncode == 0


def _tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_S)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


@contextlib.contextmanager
def _processes_of(pid: int) -> Iterator[None]:
    """What this thread starts meanwhile stands among the processes of the host whose first process has this number."""
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
    """The namespaces that live as long as their first process.

    Attributes:
      pid: of the first process, as this process sees it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # The fork of `unshare` is the first process; `--kill-child` ends it with `unshare`.
        self._keeper = subprocess.Popen(
            [
                *("unshare", "-n", "-p", "-u", "-i", "-m", "--fork", "--kill-child", "--mount-proc"),
                *(sys.executable, "-S", "-E", "-c", _FIRST_PROCESS),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == b"ready\n", f"{name}: its first process has not come up"
        children = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children").read_text().split()
        assert len(children) == 1, f"{name}: {children}"
        self.pid = int(children[0])

    def tool(self, *command: str) -> None:
        """Run a tool of the machine in the network, the mounts and the name of these; it fails the test where it fails."""
        _tool("nsenter", "-t", str(self.pid), "-n", "-u", "-i", "-m", *command)

    def close(self, running: Sequence[subprocess.Popen[Any]] = ()) -> None:
        """End each process in here, and the namespaces with the last of them.

        Args:
          running: the children of this process in here: the first process does not end before this process has waited for them.
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
      name: as its processes see it (`socket.gethostname()`).
      ip: its address; the other hosts reach it by its name, too.
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
                *("ip", "link", "add", self._port, "type", "veth", "peer", "name", DEVICE, "netns", str(inside.pid))
            )
            self.mend()
            network.switch.tool("ip", "link", "set", self._port, "up")
            inside.tool("ip", "address", "add", f"{self.ip}/{PREFIX}", "dev", DEVICE)
            inside.tool("ip", "link", "set", DEVICE, "up")
        except BaseException:
            inside.close()
            raise

    def run(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this host.

        Args:
          options: of subprocess.Popen; `cwd` and files are the machine's, but for the private folders.

        Returns:
          The process; its `pid` is as this process sees it, so signals reach it. It is ended with the network at the latest.
        """
        entering = ["nsenter", "-t", str(self._inside.pid), "-n", "-u", "-i", "-m"]
        if (folder := options.pop("cwd", None)) is None:
            folder = os.getcwd()
        entering.append(f"--wdns={folder}")
        with _processes_of(self._inside.pid):  # nsenter would fork to do that, and signals would reach nsenter alone
            process = subprocess.Popen([*entering, "--", *command], **options)
        self._running.append(process)
        return process

    def processes(self) -> dict[int, str]:
        """The command lines of the processes of this host, by their numbers as this process sees them; without the first process."""
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

    def shape(self, *, rate_mbit: float, delay_ms: float = 0.0, buffer_bytes: int = 64 * 1024) -> None:
        """What the cable of this host carries from now on, in each direction.

        Args:
          rate_mbit: millions of bits a second.
          delay_ms: of each packet in each direction; more than 0 needs a kernel with netem (`delays`).
          buffer_bytes: what waits at each end of the cable; more is dropped. The default is a small router's.
        """
        # A bucket below what the kernel's clock lets through in a tick makes a link slower than its rate.
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
                end.tool("tc", "qdisc", "replace", "dev", device, "root", "handle", "1:", "tbf", *limits)
                end.tool(
                    *("tc", "qdisc", "replace", "dev", device, "parent", "1:1", "handle", "2:"),
                    "netem",
                    "delay",
                    f"{delay_ms}ms",
                )
            else:
                end.tool("tc", "qdisc", "replace", "dev", device, "root", "handle", "1:", "tbf", *limits)

    def unshape(self) -> None:
        """The cable carries what it can again."""
        for end, device in ((self._inside, DEVICE), (self._network.switch, self._port)):
            end.tool("tc", "qdisc", "replace", "dev", device, "root", "pfifo")

    def cut(self) -> None:
        """Nothing passes from now on. Neither end sees that: there is silence, as behind a switch whose other cable was pulled."""
        self._network.switch.tool("ip", "link", "set", self._port, "nomaster")

    def mend(self) -> None:
        """What was `cut` carries again."""
        self._network.switch.tool("ip", "link", "set", self._port, "master", BRIDGE)

    def readdress(self, ip: str) -> None:
        """The host has another address of the network (10.77.0.1 to 10.77.0.254), and its name leads there; the old one is nobody's."""
        self._inside.tool("ip", "address", "flush", "dev", DEVICE)
        self._inside.tool("ip", "address", "add", f"{ip}/{PREFIX}", "dev", DEVICE)
        self.ip = ip
        self._network.write_names()

    def close(self) -> None:
        """The host is switched off: each of its processes ends as by kill -9, and its connections are told nothing."""
        self._inside.close(self._running)


class Network:
    """Hosts by name, in a `with` statement. Skips the test where there can be none."""

    def __init__(self, *names: str, private: Sequence[str] = ("/dev/shm",)) -> None:
        """Args:
        names: of the hosts, in the order of their addresses, 10.77.0.1 and so on.
        private: folders that each host has for itself, empty at first; /tmp among them hides pytest's `tmp_path`.
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
        """Each host reads this one file as its /etc/hosts, so it is written in place."""
        lines = ["127.0.0.1 localhost", *(f"{host.ip} {host.name}" for host in self.hosts.values())]
        self.names.write_text("\n".join(lines) + "\n")


def end(process: subprocess.Popen[Any], timeout_s: float = READY_S) -> int:
    """Ask a process of a host to end (SIGTERM), by force after `timeout_s`; its exit code."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(READY_S)

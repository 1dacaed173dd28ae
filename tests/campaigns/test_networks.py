"""Hosts behind firewalls, NAT and bad links: what reaches the others, and what the doctor says
about the rest."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.hosts import READY_S, Host, Network, end

ROOT = Path(__file__).resolve().parents[2]
PORT = 5050
PORTS = "5050-5070"

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        shutil.which("iptables") is None, reason="firewalls of a test are made by iptables"
    ),
]

LARGE_RESULT = """
import sys
import numpy as np
from zmqdist.coordinator import ClusterCoordinator
with ClusterCoordinator(sys.argv[1]) as coordinator:
    print(coordinator.schedule(np.ones, (1 << 20,)).get(60).sum(), flush=True)
"""

LARGE_ARGUMENT_AND_DATA = """
import sys
import numpy as np
import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator
with ClusterCoordinator(sys.argv[1]) as coordinator:
    print(coordinator.schedule(np.sum, (np.ones(1 << 20),)).get(60), flush=True)
service = zd.data.service
dataset = zd.data.Dataset.range(10).apply(service.distribute("parallel_epochs", sys.argv[1]))
print(sorted(int(element) for element in dataset), flush=True)
"""

NAMED = """
import sys
from zmqdist.errors import UnavailableError
from zmqdist.rpc import Client
client = Client.create("zmq", "server:7000")
for line in sys.stdin:
    while True:
        try:
            (pid,) = client.call("pid", timeout_in_ms=30_000).get_value()
        except UnavailableError:  # the connection went with the call in flight
            continue
        break
    print(pid, flush=True)
"""

SERVING = """
import os, sys
from zmqdist.rpc import Server
server = Server.create("zmq", "*:7000")
server.register("pid", os.getpid)
server.start()
print("ready", flush=True)
sys.stdin.read()
"""


class Net:
    """Hosts, and the keys of one cluster."""

    def __init__(self, hosts: Network, folder: Path) -> None:
        self.hosts = hosts
        self.target = f"{hosts['server'].ip}:{PORT}"
        self.environment = {
            **os.environ,
            "ZMQDIST_KEYS_DIR": str(folder / "keys"),
            "XDG_STATE_HOME": str(folder),
        }
        self.command("server", "keygen", str(folder / "keys"))

    def run(self, host: str, *words: str) -> subprocess.Popen[str]:
        """Start a Python on a host."""
        return self.hosts[host].run(
            [sys.executable, *words],
            env=self.environment,
            cwd=str(ROOT),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def start(self, host: str, *words: str) -> subprocess.Popen[str]:
        """Start a role, and return when it has said that it serves."""
        process = self.run(host, "-m", "zmqdist_cli", *words)
        assert process.stdout is not None
        assert (first := process.stdout.readline()), process.wait(READY_S)
        assert " at zmq://" in first or "slot" in first, first + process.stdout.read()
        return process

    def command(self, host: str, *words: str) -> str:
        """Run a command to its end, and return its output."""
        return self.run(host, "-m", "zmqdist_cli", *words).communicate(timeout=120)[0]

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.command("server", "status", self.target, "--json")))

    def doctor(self, host: str, *words: str) -> list[str]:
        """Return the doctor's lines about addresses."""
        lines = self.command(host, "doctor", "--timeout", "2", *words).splitlines()
        return [line for line in lines if any(word.partition(":")[0] in line for word in words)]

    def program(self, host: str, text: str, *words: str) -> str:
        return self.run(host, "-c", text, *words).communicate(timeout=120)[0]


def rule(host: Host, text: str) -> None:
    """Add a rule to the firewall of a host, as for iptables."""
    done = host.run(
        ["iptables", *text.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output, _ = done.communicate(timeout=READY_S)
    assert done.returncode == 0, output


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    with Network("server", "worker", "program") as hosts:
        yield Net(hosts, tmp_path)


def test_role_binds_address_of_interface(net: Net) -> None:
    dispatcher = net.start("server", "dispatcher", "--host", "eth0", "--port", str(PORT))
    worker = net.start(
        "worker", "worker", "--dispatcher", net.target, "--host", "eth0", "--ports", PORTS
    )
    (row,) = net.status()["workers"]
    assert row["address"].partition(":")[0] == net.hosts["worker"].ip
    assert net.program("program", LARGE_RESULT, net.target) == "1048576.0\n"
    assert net.status()["relayed"] == 0
    assert end(worker) == end(dispatcher) == 0


def test_interface_without_address_is_one_sentence(net: Net) -> None:
    made = net.hosts["server"].run(["ip", "link", "add", "idle0", "type", "bridge"])
    assert made.wait(READY_S) == 0
    text = net.command("server", "dispatcher", "--host", "idle0")
    assert (
        "the interface idle0 has no address: set it up (ip address add), or name another one"
        in text
    )


def test_outer_address_is_advertised_behind_nat(net: Net) -> None:
    """The worker's host takes connections to port 6051 in for 5051, and drops those that come to
    5051 itself."""
    rule(net.hosts["worker"], "-t mangle -A PREROUTING -i eth0 -p tcp --dport 5051 -j DROP")
    rule(
        net.hosts["worker"],
        "-t nat -A PREROUTING -i eth0 -p tcp --dport 6051 -j REDIRECT --to-ports 5051",
    )
    rule(
        net.hosts["server"],
        "-t nat -A PREROUTING -i eth0 -p tcp --dport 6050 -j REDIRECT --to-ports 5050",
    )
    outer = "server:6050"
    dispatcher = net.run(
        "server",
        "-m",
        "zmqdist_cli",
        "dispatcher",
        "--host",
        "eth0",
        "--port",
        str(PORT),
        "--advertise",
        outer,
    )
    assert dispatcher.stdout is not None
    assert dispatcher.stdout.readline() == f"dispatcher at zmq://{outer}\n"
    worker = net.start(
        "worker", "worker", "--dispatcher", outer, "--port", "5051", "--advertise", "worker:6051"
    )
    assert [row["address"] for row in net.status()["workers"]] == ["worker:6051"]
    assert net.program("program", LARGE_RESULT, outer) == "1048576.0\n"
    assert net.status()["relayed"] == 0
    assert end(worker) == end(dispatcher) == 0


def test_port_range_lets_cluster_through_firewall(
    net: Net,
) -> None:
    for host in net.hosts.hosts.values():
        rule(host, f"-A INPUT -i eth0 -p tcp --syn ! --dport {PORTS.replace('-', ':')} -j DROP")
    net.environment["ZMQDIST_PORTS"] = PORTS
    dispatcher = net.start("server", "dispatcher", "--host", "eth0", "--port", str(PORT))
    workers = [
        net.start(host, "worker", "--dispatcher", net.target) for host in ("worker", "server")
    ]
    assert net.program("program", LARGE_RESULT, net.target) == "1048576.0\n"
    said = net.program("program", LARGE_ARGUMENT_AND_DATA, net.target).splitlines()
    assert said == ["1048576.0", str(sorted([*range(10), *range(10)]))]
    assert net.status()["relayed"] == 0
    assert [end(worker) for worker in workers] == [0, 0]
    assert end(dispatcher) == 0


def test_full_port_range_is_one_sentence(net: Net) -> None:
    dispatcher = net.start("server", "dispatcher", "--host", "eth0", "--port", str(PORT))
    text = net.command("server", "worker", "--dispatcher", net.target, "--ports", "5050-5050")
    assert "could not bind 10.77.0.1: each port of ZMQDIST_PORTS=5050-5050 is in use there" in text
    assert end(dispatcher) == 0


def test_reconnecting_client_resolves_name_again(net: Net) -> None:
    serving = net.run("server", "-c", SERVING)
    assert serving.stdout is not None
    assert serving.stdout.readline() == "ready\n"
    client = net.run("program", "-c", NAMED)
    assert client.stdin is not None
    assert client.stdout is not None
    pids = []
    for address in (None, "10.77.0.200", "10.77.0.201"):
        if address is not None:
            net.hosts["server"].readdress(address)
        client.stdin.write("call\n")
        client.stdin.flush()
        pids.append(client.stdout.readline())
    assert pids == [pids[0]] * 3
    assert pids[0].strip().isdecimal()


def test_name_with_only_ipv6_leads_to_server(net: Net) -> None:
    for number, host in enumerate(net.hosts.hosts.values(), 1):
        added = host.run(["ip", "address", "add", f"2001:db8::{number}/64", "dev", "eth0", "nodad"])
        assert added.wait(READY_S) == 0
    names = net.hosts.names.read_text()
    net.hosts.names.write_text(names + "2001:db8::1 six\n")
    dispatcher = net.start("server", "dispatcher", "--host", "six", "--port", str(PORT))
    worker = net.start("worker", "worker", "--dispatcher", f"six:{PORT}")
    assert net.program("program", LARGE_RESULT, f"six:{PORT}") == "1048576.0\n"
    (row,) = json.loads(net.command("program", "status", f"six:{PORT}", "--json"))["workers"]
    assert row["address"].startswith("[2001:db8::2]:")
    assert end(worker) == end(dispatcher) == 0


# -- the doctor ------------------------------------------------------------------------------------


def test_doctor_distinguishes_rejection_and_closed_port(net: Net) -> None:
    rule(net.hosts["server"], f"-A INPUT -i eth0 -p tcp --dport {PORT} -j REJECT")
    ip = net.hosts["server"].ip
    (rejected,) = net.doctor("program", f"{ip}:{PORT}")
    assert (
        f"a firewall at {ip} rejects TCP port {PORT} of {ip}: let TCP port {PORT} through there"
        in rejected
    )
    (empty,) = net.doctor("program", f"{ip}:5051")
    assert f"{ip} is up, and no process listens on port 5051" in empty


def test_doctor_names_prohibiting_firewall(net: Net) -> None:
    words = f"-A INPUT -i eth0 -p tcp --dport {PORT} -j REJECT --reject-with icmp-host-prohibited"
    rule(net.hosts["server"], words)
    (line,) = net.doctor("program", net.target)
    assert f"a firewall at {net.hosts['server'].ip} rejects TCP port {PORT}" in line


def test_doctor_names_dropping_firewall(net: Net) -> None:
    rule(net.hosts["server"], f"-A INPUT -i eth0 -p tcp --dport {PORT} -j DROP")
    (line,) = net.doctor("program", net.target)
    assert "no reply to a TCP connection within 2 s" in line
    assert f"that a firewall lets TCP port {PORT} through" in line


def test_doctor_finds_closed_data_port(
    net: Net,
) -> None:
    rule(net.hosts["worker"], "-A INPUT -i eth0 -p tcp --dport 5051 -j REJECT")
    dispatcher = net.start("server", "dispatcher", "--host", "eth0", "--port", str(PORT))
    worker = net.start("worker", "worker", "--dispatcher", net.target, "--port", "5051")
    lines = net.command("program", "doctor", "--timeout", "2", net.target).splitlines()
    ip = net.hosts["worker"].ip
    (line,) = [line for line in lines if "data port of worker:0" in line]
    assert (
        f"a firewall at {ip} rejects TCP port 5051 of {ip}; large results will pass through the "
        f"dispatcher" in line
    )
    assert end(worker) == end(dispatcher) == 0


def test_doctor_finds_worker_on_loopback(net: Net) -> None:
    dispatcher = net.start("server", "dispatcher", "--host", "eth0", "--port", str(PORT))
    worker = net.start("worker", "worker", "--dispatcher", net.target, "--host", "lo")
    lines = net.command("program", "doctor", "--timeout", "2", net.target).splitlines()
    assert [
        line
        for line in lines
        if "data port of worker:0" in line and "its address is on loopback" in line
    ]
    assert end(worker) == end(dispatcher) == 0


def test_doctor_finds_link_dropping_large_packets(net: Net) -> None:
    """As a tunnel does whose MTU its ends do not know, behind a firewall that drops ICMP."""
    for host in ("server", "program"):
        device = net.hosts[host].run(
            ["ip", "link", "set", "eth0", "gso_max_segs", "1", "gso_max_size", "1500"]
        )
        assert device.wait(READY_S) == 0
        off = net.hosts[host].run(
            ["ethtool", "-K", "eth0", "tso", "off", "gso", "off"], stdout=subprocess.DEVNULL
        )
        assert off.wait(READY_S) == 0
    rule(net.hosts["server"], "-t raw -A PREROUTING -i eth0 -m length --length 1200:65535 -j DROP")
    dispatcher = net.start("server", "dispatcher", "--host", "eth0", "--port", str(PORT))
    lines = net.doctor("program", net.target)
    (line,) = [line for line in lines if "bytes is answered" in line]
    assert "a message of 1,024 bytes is answered, and one of 1,300 bytes is not within 2 s" in line
    assert "a link on the way drops large packets without an error: set the MTU" in line
    assert end(dispatcher) == 0


def test_doctor_finds_name_of_loopback(net: Net) -> None:
    """As Debian writes the machine's own name into /etc/hosts."""
    net.hosts.names.write_text("127.0.0.1 localhost\n127.0.1.1 server\n")
    dispatcher = net.start("server", "dispatcher", "--host", "server", "--port", str(PORT))
    lines = net.doctor("server", f"server:{PORT}")
    (line,) = [line for line in lines if "name server" in line]
    assert (
        "the name server is 127.0.1.1 here: only this host can reach a server that binds it" in line
    )
    assert end(dispatcher) == 0

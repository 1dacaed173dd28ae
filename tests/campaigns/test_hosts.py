"""The hosts of tests are as separate as real ones: a host sees another's processes, memory and
files only over the network."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.campaigns.hosts import READY_S, Host, Network, delays

SERVE = """
import socket, sys
listening = socket.create_server(("0.0.0.0", 7000))
print("ready", flush=True)
while True:
    connection, _ = listening.accept()
    while data := connection.recv(1 << 20):
        pass
    connection.sendall(b"all")
    connection.close()
"""
SEND = """
import socket, sys, time
host, nbytes = sys.argv[1], int(sys.argv[2])
begun = time.monotonic()
connection = socket.create_connection((host, 7000), timeout=20)
connection.sendall(bytes(nbytes))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(3) == b"all"
print(time.monotonic() - begun)
"""


@pytest.fixture
def net() -> Iterator[Network]:
    with Network("first", "second") as network:
        yield network


def python(host: Host, code: str, *arguments: str) -> subprocess.Popen[str]:
    return host.run(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(host: Host, code: str, *arguments: str) -> str:
    out, error = python(host, code, *arguments).communicate(timeout=60)
    assert not error, error
    return out.strip()


def serving(host: Host) -> subprocess.Popen[str]:
    process = python(host, SERVE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_host_has_own_name_processes_and_memory(net: Network) -> None:
    assert output_of(net["first"], "import socket; print(socket.gethostname())") == "first"
    assert socket.gethostname() not in ("first", "second")
    output_of(net["first"], "open('/dev/shm/mine', 'w').close()")
    assert output_of(net["first"], "import os; print(os.listdir('/dev/shm'))") == "['mine']"
    assert output_of(net["second"], "import os; print(os.listdir('/dev/shm'))") == "[]"
    numbers = output_of(
        net["second"], "import os; print(*[name for name in os.listdir('/proc') if name.isdigit()])"
    ).split()
    assert len(numbers) == 2, "its first process and the one that looks"


def test_hosts_reach_each_other_by_name(net: Network) -> None:
    serving(net["first"])
    output_of(net["second"], SEND, "first", "10")
    net["first"].readdress("10.77.0.99")
    output_of(net["second"], SEND, "first", "10")
    output_of(net["second"], SEND, "10.77.0.99", "10")


def test_link_is_as_slow_as_shaped(net: Network) -> None:
    serving(net["first"])
    net["second"].shape(rate_mbit=4)
    took_s = float(output_of(net["second"], SEND, "first", str(500_000)))
    assert 0.9 < took_s < 2.5, "4 Mbit are one second"
    net["second"].unshape()
    assert float(output_of(net["second"], SEND, "first", str(500_000))) < 0.5


def test_link_delays_where_kernel_can(net: Network) -> None:
    if not delays():
        pytest.skip("this kernel has no netem")
    serving(net["first"])
    net["second"].shape(rate_mbit=100, delay_ms=50)
    assert 0.2 < float(output_of(net["second"], SEND, "first", "10")) < 2, (
        "a handshake and an answer, both ways"
    )


def test_cut_link_carries_nothing_until_mended(net: Network) -> None:
    serving(net["first"])
    net["second"].cut()
    sending = python(net["second"], SEND, "first", "10")
    with pytest.raises(subprocess.TimeoutExpired):
        sending.wait(1)
    net["second"].mend()
    assert sending.wait(READY_S) == 0, "TCP tries again"


def test_signal_reaches_process_of_host(net: Network) -> None:
    process = serving(net["first"])
    process.send_signal(signal.SIGTERM)
    assert process.wait(READY_S) == -signal.SIGTERM


def test_network_leaves_nothing() -> None:
    with Network("first") as net:
        process = serving(net["first"])
        first = net["first"].run(["sleep", "1000"])
    assert process.wait(READY_S) == -signal.SIGKILL
    assert first.wait(READY_S) == -signal.SIGKILL


def test_network_ends_with_its_process() -> None:
    code = """
import sys
from tests.campaigns.hosts import Network
with Network("first") as net:
    print(net["first"].run(["sleep", "1000"]).pid, flush=True)
    sys.stdin.read()
"""
    making = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=os.getcwd(),
    )
    with making:
        assert making.stdout is not None
        sleeping = int(making.stdout.readline())
        making.kill()
    until = time.monotonic() + READY_S
    while os.path.exists(f"/proc/{sleeping}"):
        assert time.monotonic() < until, "a process of a host is left"
        time.sleep(0.05)

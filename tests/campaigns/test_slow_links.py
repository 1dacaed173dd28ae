"""A peer whose bytes arrive counts as alive: calls, functions and small messages beside large ones,
on links from 0.5 to 100 Mbit/s.

Each test takes about as long as the link needs for the bytes, so that those at 0.5 Mbit/s take a
minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.hosts import READY_S, Host, Network, end
from tests.campaigns.slow_work import MIB

RATES = [0.5, 1, 2, 10, 100]
"""Mbit/s, in each direction."""
SMALL_S_MAX = 2.0
"""A small call beside a large transfer has its reply within this many seconds, at each of these
rates."""
ROOT = Path(__file__).resolve().parents[2]
PORT = 7000

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    with Network("server", "first", "second") as network:
        yield Net(network, tmp_path)


class Net:
    """The hosts, with keys of one cluster, and the programs that run on them."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.hosts = network
        self.address = f"{network['server'].ip}:{PORT}"
        self._environment = {
            **os.environ,
            "ZMQDIST_KEYS_DIR": str(folder / "keys"),
            "XDG_STATE_HOME": str(folder),
        }
        made = self.run(network["server"], "zmqdist_cli", "keygen", str(folder / "keys"))
        assert made.wait(READY_S) == 0

    def run(self, host: Host, module: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", module, *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return host.run(command, env=self._environment, cwd=str(ROOT), text=True, **pipes)

    def serve(self) -> None:
        serving = self.run(self.hosts["server"], "tests.campaigns.slow_work", "serve", self.address)
        assert serving.stdout is not None
        assert serving.stdout.readline() == "ready\n"

    def ask(self, host: str, role: str, *arguments: int) -> subprocess.Popen[str]:
        words = [str(argument) for argument in arguments]
        return self.run(self.hosts[host], "tests.campaigns.slow_work", role, self.address, *words)

    def status(self) -> dict[str, Any]:
        """Return the status of the dispatcher."""
        asking = self.run(self.hosts["server"], "zmqdist_cli", "status", self.address, "--json")
        return dict(json.loads(asking.communicate(timeout=60)[0]))


def figures_of(asking: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for the end of a client, and return the figures that it has printed."""
    out, error = asking.communicate(timeout=350)
    assert asking.returncode == 0, error
    return dict(json.loads(out.splitlines()[-1]))


def carried_s(nbytes: int, rate_mbit: float) -> float:
    """Return the seconds that the link needs for some bytes."""
    return nbytes * 8 / rate_mbit / 1e6


def show(name: str, rate_mbit: float, *figures: object) -> None:
    print(f"| {rate_mbit:g} | {name} |", *figures)


@pytest.mark.parametrize("rate_mbit", RATES)
def test_echo_of_mebibyte_comes_back(net: Net, rate_mbit: float) -> None:
    net.serve()
    net.hosts["first"].shape(rate_mbit=rate_mbit)
    found = figures_of(net.ask("first", "echo", MIB, 2))
    show("echo", rate_mbit, found["took_s"])
    assert found["shared_memory"] is False, "these are two hosts"
    assert max(found["took_s"]) < 1.25 * carried_s(2 * MIB, rate_mbit) + 2


@pytest.mark.parametrize("rate_mbit", RATES)
def test_clients_share_link(net: Net, rate_mbit: float) -> None:
    net.serve()
    net.hosts["server"].shape(rate_mbit=rate_mbit)
    both = [net.ask(host, "echo", MIB, 1) for host in ("first", "second")]
    took_s = [figures_of(asking)["took_s"][0] for asking in both]
    show("two echoes", rate_mbit, took_s)
    assert max(took_s) < 1.25 * carried_s(4 * MIB, rate_mbit) + 2


@pytest.mark.parametrize("rate_mbit", RATES)
def test_small_call_beside_large_call_is_fast(net: Net, rate_mbit: float) -> None:
    net.serve()
    net.hosts["first"].shape(rate_mbit=rate_mbit)
    found = figures_of(net.ask("first", "beside", MIB))
    show("small beside", rate_mbit, found)
    assert found["longest_s"] < SMALL_S_MAX
    assert rate_mbit > 10 or found["count"] > 5, "they were really beside each other"


@pytest.mark.parametrize("rate_mbit", RATES)
def test_function_with_mebibytes_loses_no_worker(net: Net, rate_mbit: float) -> None:
    server, first = net.hosts["server"], net.hosts["first"]
    dispatching = net.run(
        server, "zmqdist_cli", "dispatcher", "--host", server.ip, "--port", str(PORT)
    )
    working = net.run(
        first, "zmqdist_cli", "worker", "--dispatcher", net.address, "--host", first.ip
    )
    first.shape(rate_mbit=rate_mbit)
    found = figures_of(net.ask("server", "schedule", MIB, 1))
    show("scheduled", rate_mbit, found["took_s"])
    status = net.status()
    assert len(status["workers"]) == 1
    assert status["losses_count"] == 0
    assert found["took_s"][0] < 1.25 * carried_s(2 * MIB, rate_mbit) + 15, (
        "a worker's processes start, too"
    )
    for process in (working, dispatching):
        end(process)

"""Seconds from `zmqdist launch` to the first result: on this machine, and on three hosts by ssh.

    python -m tests.engines.first_result [RUNS]

A result counts when the program has it; the time of the command's own start is in it. The third
figure is `zmqdist --version`, which every command takes, and the last line says how busy the
machine was.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.ssh_hosts import SshNetwork

PROGRAM = """
from zmqdist.coordinator import ClusterCoordinator
with ClusterCoordinator() as coordinator:
    print("result", coordinator.schedule(sum, ([1, 2],)).get(), flush=True)
"""
FILE = "name: first\nprogram: python {program}\njobs: {{worker: {{count: 3}}, ps: {{count: 1}}}}\n"


def seconds(start: Callable[..., subprocess.Popen[Any]], *arguments: str) -> float:
    """Return the seconds until the first line of a command's output."""
    begun = time.monotonic()
    process = start(
        [sys.executable, "-m", "zmqdist_cli", *arguments], stdout=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    took = time.monotonic() - begun
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, line + rest
    return took


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        local, by_ssh = folder / "local.yaml", folder / "ssh.yaml"
        (folder / "keys").mkdir()
        local.write_text(FILE.format(program=folder / "program.py"))
        with SshNetwork(folder / "keys", "a", "b", "c") as net:
            hosts = f"launcher: ssh\nssh: {{hosts: [a, b, c], options: {net.options}}}\n"
            by_ssh.write_text(local.read_text() + hosts)
            rows = {
                "this machine": ("launch", str(local)),
                "three hosts": ("launch", str(by_ssh)),
                "the command alone": ("--version",),
            }
            took = {
                row: [seconds(net.head.run, *arguments) for _ in range(runs)]
                for row, arguments in rows.items()
            }
    for row, each in took.items():
        print(
            f"{row:18} median {statistics.median(each):5.2f} s, best {min(each):5.2f} s of {runs}"
        )
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()

"""Measures the seconds from `zmqdist scale FILE worker=8` until each of eight workers has run a
function, in a cluster that had one worker.

    python -m benchmarks.elastic_growth [RUNS]

Each run launches a cluster of its own. The time begins before the Python of the command `zmqdist
scale` starts, and ends when the program has a result of each worker. The second figure is the time
until the command has returned. The last line says how busy the host was.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKERS = 8

PROGRAM = f"""
import os, pathlib, threading, time
from zmqdist.coordinator import ClusterCoordinator

with ClusterCoordinator() as coordinator:
    coordinator.schedule(os.getpid, worker=0).get()
    values = [coordinator.schedule(os.getpid, worker=index) for index in range({WORKERS})]
    print("ready", flush=True)
    assert len({{value.get() for value in values}}) == {WORKERS}
    print(time.monotonic(), flush=True)
    while not pathlib.Path("end").exists():
        threading.Event().wait(0.02)
"""

FILE = """
name: growth
jobs:
  dispatcher: {address: 127.0.0.1:0}
  worker: {count: 1}
program: python program.py
"""


def grow() -> tuple[float, float]:
    """Launch a cluster and let it grow. Return the seconds until each worker has run a function,
    and until the command has returned."""
    command = [sys.executable, "-m", "zmqdist_cli"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        (folder / "cluster.yaml").write_text(FILE)
        environment = {**os.environ, "TMPDIR": name}
        launched = subprocess.Popen(
            [*command, "launch", "cluster.yaml"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert launched.stdout is not None
        assert launched.stdout.readline() == "ready\n"
        # the program prints a time of this clock, which all processes of a host share
        begun = time.monotonic()
        subprocess.run(
            [*command, "scale", "cluster.yaml", f"worker={WORKERS}"],
            cwd=folder,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        returned_s = time.monotonic() - begun
        ran_s = float(launched.stdout.readline()) - begun
        (folder / "end").touch()
        launched.communicate(timeout=60)
    return ran_s, returned_s


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    took = [grow() for _ in range(runs)]
    for row, each in zip(
        ("each worker has run", "the command is back"), zip(*took, strict=True), strict=True
    ):
        print(
            f"{row:20} median {statistics.median(each):5.2f} s, best {min(each):5.2f} s, worst "
            f"{max(each):5.2f} s of {runs}"
        )
    print(f"load average of the last minute {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()

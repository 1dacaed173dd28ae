"""The output of functions in several slots arrives by whole lines, with and without
PYTHONUNBUFFERED."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator

LINES = 2000


def talk(letter: str, folder: Path) -> None:
    """Print lines while the function in the other slot does the same."""
    (folder / letter).touch()
    until = time.monotonic() + 20
    while len(list(folder.glob("?"))) < 2 and time.monotonic() < until:
        time.sleep(0.001)
    for _ in range(LINES):
        print(letter * 20)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_of_two_slots_stay_whole(unbuffered: str, tmp_path: Path) -> None:
    with zd.DispatchServer() as dispatcher, open(tmp_path / "said", "w") as said:
        worker = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "zmqdist_cli",
                "worker",
                "--dispatcher",
                dispatcher.address,
                "--slots",
                "2",
            ],
            stdout=said,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
        try:
            with ClusterCoordinator(dispatcher) as coordinator:
                for letter in "ab":
                    coordinator.schedule(talk, (letter, tmp_path))
                coordinator.join()
        finally:
            worker.send_signal(signal.SIGINT)
            worker.wait(30)
    lines = [
        line
        for line in (tmp_path / "said").read_text().splitlines()
        if not line.startswith("worker:0 of ")
    ]
    assert sorted(set(lines)) == ["a" * 20, "b" * 20]
    assert len(lines) == 2 * LINES

"""Functions that schedule functions and wait for them fill all slots: one line of standard error
says so, and a cancel ends them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os
import sys

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator


def fib(n, target, token):
    if n < 2:
        return n
    os.environ["ZMQDIST_TOKEN_FILE"] = token
    with ClusterCoordinator(target) as inner:
        a, b = (inner.schedule(fib, (n - k, target, token)) for k in (1, 2))
        return a.get() + b.get()


if __name__ == "__main__":
    with zd.local_cluster(workers=2, processes=sys.argv[1] == "processes") as cluster:
        with ClusterCoordinator(cluster, cancel_grace_s=0.5) as coordinator:
            value = coordinator.schedule(fib, (4, cluster.target, cluster.credentials.token_file))
            sys.stdin.readline()
            print(value.done(), flush=True)
            if sys.argv[1] == "processes":
                value.cancel()
                print(coordinator.schedule(abs, (-1,)).get(40), flush=True)
            else:
                os._exit(0)  # threads cannot be ended
"""


@pytest.mark.parametrize("slots", ["processes", "threads"])
def test_nested_functions_that_fill_all_slots_warn_once(tmp_path: Path, slots: str) -> None:
    program = tmp_path / "nested.py"
    program.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, program, slots],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        printed, errors = process.communicate("\n", timeout=50)
    assert (
        "functions that functions have scheduled wait for a slot, all 2 slots at localhost:" in line
    )
    assert "cancel() ends them" in line
    assert "wait for a slot" not in errors
    assert printed.split() == (["False", "1"] if slots == "processes" else ["False"])

"""What a program's end, and its being stopped for a while, do to what it has scheduled."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

import zmqdist as zd

pytestmark = pytest.mark.timeout(150)

BEGIN = """
import sys
from types import SimpleNamespace
import numpy as np
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.transport.credentials import Credentials
target, token = sys.argv[1:]
coordinator = ClusterCoordinator(SimpleNamespace(target=target, credentials=Credentials(token_file=token)))
"""

FAILS = """
import time
value = coordinator.schedule(int, ("x",))
while not value.done():
    time.sleep(0.005)
"""

LARGE = """
import time
def make(number):
    time.sleep(0.02)
    return np.full(500_000, number)
values = [coordinator.schedule(make, (number,)) for number in range(100)]
values[5].get()
print("begun", flush=True)
coordinator.join()
assert [int(value.get()[0]) for value in values] == list(range(100))
coordinator.close()
"""


def started(cluster: zd.local_cluster, program: str) -> subprocess.Popen[str]:
    token = cluster.credentials.token_file
    assert token is not None
    arguments = [sys.executable, "-c", BEGIN + program, cluster.target, token]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_errors_that_the_program_never_looked_at_are_on_standard_error_when_it_ends() -> None:
    with zd.local_cluster(workers=1, processes=False) as cluster:
        process = started(cluster, FAILS)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "the program has not looked at 1 error of scheduled functions" in told
    assert "ValueError: invalid literal for int() with base 10: 'x'" in told


def test_a_program_that_was_stopped_for_longer_than_a_lease_finishes_with_large_results_by_sockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it had begun to fetch was let go of, and runs again."""
    monkeypatch.setenv("ZMQDIST_ARENA", "off")
    with zd.local_cluster(workers=2, lease_s=2.0) as cluster:
        process = started(cluster, LARGE)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(12.0)
        process.send_signal(signal.SIGCONT)
        try:
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, told

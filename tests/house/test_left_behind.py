"""The checks of tests/conftest.py find each kind of thing that a test can leave behind, and nothing
else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

LEAVERS = [
    (
        "child",
        "import subprocess; x = subprocess.Popen(['sleep', '30'])",
        "x.kill(); x.wait()",
        "child process *: sleep 30",
    ),
    (
        "ended",
        "import subprocess; x = subprocess.Popen(['true'])",
        "x.wait()",
        "child process *: ended, nobody waited*",
    ),
    (
        "thread",
        (
            "import threading; e = threading.Event(); x = threading.Thread(target=e.wait, "
            "name='zmqdist-loop'); x.start()"
        ),
        "e.set(); x.join()",
        "thread zmqdist-loop *",
    ),
    ("socket", "import socket; x = socket.socket()", "x.close()", "descriptor *: socket:*"),
    (
        "memory",
        "import os; x = os.memfd_create('arena')",
        "import os; os.close(x)",
        "descriptor *: /memfd:arena*",
    ),
]
"""What is left, the statement that leaves it, the one that tidies up in the next test, and what
must be told."""


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    """A pytest of its own with the checks under test, and less patience."""
    pytester.makeconftest(CONFTEST.read_text().replace("PATIENCE_S = 20.0", "PATIENCE_S = 0.1"))
    return pytester


def run(inner: pytest.Pytester) -> pytest.RunResult:
    return inner.runpytest_subprocess("-p", "no:cacheprovider")


def test_leftover_fails_its_test(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        "\n".join(
            f"def test_{what}_left():\n    global x, e\n    {leave}\n\ndef "
            f"test_{what}_tidied():\n    {tidy}\n"
            for what, leave, tidy, _ in LEAVERS
        )
    )
    result = run(inner)
    result.assert_outcomes(passed=2 * len(LEAVERS), errors=len(LEAVERS))
    for what, _, _, message in LEAVERS:
        result.stdout.fnmatch_lines(
            [f"*ERROR at teardown of test_{what}_left*", "*this test left behind:*", f"*{message}*"]
        )


def test_orphan_is_found_after_module(inner: pytest.Pytester) -> None:
    """The grandchild belongs to process 1 by then: no list of children has it. While it calls exec
    it has no environment to be seen."""
    inner.makepyfile(
        """
import subprocess
from pathlib import Path
def test_leaves():
    subprocess.run(["sh", "-c", "sleep 30 >/dev/null 2>&1 & echo $! >orphan"], check=True)
    command = Path("/proc", Path("orphan").read_text().strip(), "cmdline")
    while command.read_bytes() != b"sleep" + bytes(1) + b"30" + bytes(1):
        pass
"""
    )
    result = run(inner)
    os.kill(int((inner.path / "orphan").read_text()), signal.SIGKILL)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*this module left processes behind:*", "*process *: sleep 30*"])


def test_tidy_tests_pass(
    inner: pytest.Pytester,
) -> None:
    inner.makepyfile(
        """
import socket, subprocess, pytest

@pytest.fixture(scope="module")
def cluster():
    box = [subprocess.Popen(["sleep", "30"])]
    yield box
    box[0].kill()
    box[0].wait()

def test_tidies(cluster):
    subprocess.run(["true"])
    socket.socket().close()

@pytest.mark.shares_cluster
def test_replaces_a_worker(cluster):
    cluster[0].kill()
    cluster[0].wait()
    cluster[0] = subprocess.Popen(["sleep", "31"])
"""
    )
    run(inner).assert_outcomes(passed=2)

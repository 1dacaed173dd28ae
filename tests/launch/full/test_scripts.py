"""Whole scripts that make a local_cluster: from a file, from standard input, and without closing
the cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import zmqdist as zd

factor = 3

class Pair:
    def __init__(self, value):
        self.value = value

def triple(pair):
    return Pair(pair.value * factor)

cluster = zd.local_cluster(workers=1)
coordinator = zd.coordinator.ClusterCoordinator(cluster)
result = coordinator.schedule(triple, (Pair(7),)).get()
assert type(result) is Pair
print(result.value)
coordinator.close()
cluster.close()
"""


@pytest.mark.parametrize("how", ["file", "standard input"])
def test_script_needs_no_main_guard(tmp_path: Path, how: str) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, "-W", "error", file if how == "file" else "-"],
        input=None if how == "file" else SCRIPT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "21\n", "")


def test_unclosed_cluster_leaves_nothing(tmp_path: Path) -> None:
    """The check of this module finds workers that outlive the script."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = SCRIPT.replace("coordinator.close()\ncluster.close()\n", "")
    environment = {**os.environ, "TMPDIR": str(temporary)}
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "21\n"), result.stderr
    assert not list(temporary.iterdir())

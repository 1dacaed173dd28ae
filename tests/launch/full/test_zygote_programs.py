"""Whole programs whose workers are forked from a zygote: one beside files that imitate modules, one that forks itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
import zmqdist as zd
if sys.argv[1] == "command":
    from zmqdist.process import zygote_client
    zygote_client.fork = lambda *args, **kwargs: None
def work():
    import mine
    return mine.value
with zd.local_cluster(workers=1, ps=1) as cluster, zd.coordinator.ClusterCoordinator(cluster) as coordinator:
    print(coordinator.schedule(work).get())
"""


@pytest.mark.parametrize("how", ["zygote", "command"])
def test_no_file_of_the_working_directory_runs_in_place_of_a_module_that_a_child_needs(
    tmp_path: Path, how: str
) -> None:
    """Workers nevertheless find the user's own modules in the working directory."""
    script, folder = tmp_path / "script.py", tmp_path / "folder"
    folder.mkdir()
    script.write_text(PROGRAM)
    for name in ("msgspec", "numpy", "zmqdist", "json", "cloudpickle"):
        (folder / f"{name}.py").write_text("open('planted', 'w').close()\nraise SystemExit('planted')\n")
    (folder / "mine.py").write_text("value = 7\n")
    done = subprocess.run(
        [sys.executable, script, how], cwd=folder, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")
    assert not (folder / "planted").exists()


FORKED = """
import os, sys
import zmqdist as zd
with zd.local_cluster(workers=1):
    pass
pid = os.fork()
with zd.local_cluster(workers=1) as cluster, zd.coordinator.ClusterCoordinator(cluster) as coordinator:
    assert coordinator.schedule(sum, ([1, 2],)).get(20) == 3
if not pid:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""


def test_a_forked_program_has_a_zygote_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

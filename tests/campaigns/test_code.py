"""A cluster file on hosts that do not have the program: the folder of the launcher is empty
there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.helpers import FILE, Launched

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="the mounts of a host are root's"),
]

ROOT = Path(__file__).resolve().parents[2]

ELSEWHERE = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from zmqdist.cluster import ClusterConfig
from zmqdist.launch import launcher
from zmqdist.launch.agent import agent_command
from zmqdist.launch.agent_stream import ProcessStream
from zmqdist.launch.agent_stream import AgentHost

def open_agent(note):
    hide = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs "$0"; mkdir -m 700 "$0/temporary"; cd /; exec "$@"', os.getcwd()]
    return ProcessStream([*hide, *agent_command(sys.executable, 60.0)], lambda code, notes: notes, note)

launcher.agent_hosts = lambda config: [AgentHost(name, None, open_agent) for name in ("a", "b")]
sys.exit(launcher.launch(ClusterConfig.load(sys.argv[1]), sys.argv[3:], grace_s=float(sys.argv[2])))
"""

PROGRAM = """
    import os
    import helpers
    from zmqdist.coordinator import ClusterCoordinator

    with ClusterCoordinator() as coordinator:
        names = coordinator.schedule(os.listdir, (".",)).get(60)
        print("value", coordinator.schedule(helpers.value).get(60), sorted(set(names) - {'temporary'}))
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    made: list[Launched] = []

    def make() -> Launched:
        made.append(Launched(tmp_path, PROGRAM, FILE, run=ELSEWHERE))
        return made[-1]

    yield make
    for each in made:
        each.kill()


def test_edited_module_is_new_on_every_host(
    tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    for value in (1, 2):
        (tmp_path / "helpers.py").write_text(f"def value():\n    return {value}\n")
        job = launch()
        assert job.ends(60.0) == 0, job.text
        assert f"value {value} ['cluster.yaml', 'helpers.py', 'program.py']" in job.lines, job.text
        assert [line for line in job.lines if line.startswith("[a] gets 0.0 MiB of code, ")], (
            job.text
        )
        job.temporary.rmdir()

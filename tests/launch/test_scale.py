"""A launched cluster grows and shrinks: by requests of a program or a user, at every moment of its life."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.running import run_here
from tests.launch.launched import UNTIL_TOLD, Launched
from zmqdist.cluster import ClusterConfig

Launcher = Callable[..., Launched]

ONE = """
name: test
jobs:
  dispatcher: {address: 127.0.0.1:0}
  worker: {count: 1}
program: python program.py
"""


class Cluster:
    """A launched cluster, as a user at another terminal has it."""

    def __init__(self, job: Launched) -> None:
        self.job = job
        job.saw("it runs")
        (path,) = job.temporary.glob("zmqdist-*/cluster.yaml")
        self.file = str(path)

    def scale(self, size: str, *options: str) -> tuple[int, str, str]:
        done = run_here("scale", *self.target(), size, "--timeout", "20", *options)
        return done.code, done.out, done.err

    def target(self) -> list[str]:
        """TARGET and secret, as options."""
        runtime = ClusterConfig.load(self.file, runtime_allowed=True).runtime
        assert runtime is not None
        secret = ["--token-file", runtime.token_file] if runtime.token_file else ["--keys", str(runtime.keys_dir)]
        return [runtime.dispatcher, *secret]

    def status(self) -> dict[str, Any]:
        done = run_here("status", *self.target(), "--json", "--timeout", "20")
        assert done.code == 0, done.err
        return json.loads(done.out)  # type: ignore[no-any-return]

    def workers(self) -> list[str]:
        return [row["name"] for row in self.status()["workers"]]

    def end(self) -> int:
        (self.job.process_folder / "end").touch()
        return self.job.ends()


@pytest.fixture
def cluster(launch: Launcher) -> Cluster:
    return Cluster(launch(UNTIL_TOLD, file=ONE))


@pytest.mark.processes("launch")
def test_a_cluster_grows_and_shrinks_and_leaves_nothing(cluster: Cluster) -> None:
    assert cluster.scale("worker=4") == (0, "worker:1, worker:2, worker:3 start\n", "")
    assert cluster.workers() == ["worker:0", "worker:1", "worker:2", "worker:3"]
    assert cluster.scale("worker=4") == (0, "there are 4 workers already\n", "")
    assert cluster.scale("worker=1") == (0, "worker:3, worker:2, worker:1 leave\n", "")
    assert cluster.workers() == ["worker:0"]
    assert cluster.status()["scaling"]["wanted"] == 1
    assert cluster.end() == 0, cluster.job.text
    assert sorted(cluster.job.lines[1:]) == ["[worker-1] has left", "[worker-2] has left", "[worker-3] has left"]
    cluster.job.left_nothing()

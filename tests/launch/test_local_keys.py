"""With CURVE keys, children of a launcher join by tickets, as roles on other hosts do: each has
keys of its own, also after a restart."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.cli.helpers import run_here
from tests.launch.helpers import UNTIL_END_FILE, Launched, eventually
from zmqdist.cluster import ClusterConfig

FILE = """
name: test
jobs:
  dispatcher: {address: 127.0.0.1:0}
  worker: {count: 2, restarts: 1}
  ps: {count: 1}
security: {curve: true}
program: python program.py
"""


def test_children_have_keys_of_their_own(
    launch: Callable[..., Launched],
) -> None:
    job = launch(UNTIL_END_FILE, file=FILE)
    job.saw("it runs")
    (path,) = job.temporary.glob("zmqdist-*/cluster.yaml")
    runtime = ClusterConfig.load(str(path), runtime_allowed=True).runtime
    assert runtime is not None
    target = [runtime.dispatcher, "--keys", str(runtime.keys_dir), "--json", "--timeout", "20"]

    def joined() -> dict[str, str]:
        rows = json.loads(run_here("keys", "list", *target).out)
        return {row["name"]: row["key"] for row in rows if row["state"] == "joined"}

    def pids() -> dict[str, int]:
        status = json.loads(run_here("status", *target).out)
        return {row["name"]: row["pid"] for row in status["workers"]}

    eventually(lambda: sorted(joined()) == ["ps:0", "worker:0", "worker:1"], "all children join")
    before = joined()
    eventually(lambda: "worker:1" in pids(), "worker:1 registers")
    os.kill(pids()["worker:1"], signal.SIGKILL)
    eventually(
        lambda: joined().get("worker:1", before["worker:1"]) != before["worker:1"],
        "worker:1 joins again",
    )
    after = joined()
    assert {name for name in after if after[name] != before[name]} == {"worker:1"}
    Path(job.process_folder, "end").touch()
    assert job.ends() == 0
    job.left_nothing()

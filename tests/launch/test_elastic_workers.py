"""A launched cluster grows and shrinks: by requests of a program or a user, at every moment of its
life."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import run_here
from tests.launch.helpers import (
    FILE,
    ON_PIPES,
    UNTIL_END_FILE,
    Launched,
    agent_of,
    eventually,
    read,
)
from zmqdist import DispatchServer, errors
from zmqdist.cluster import ClusterConfig
from zmqdist.launch.elastic_workers import ElasticWorkers
from zmqdist.launch.elasticity_machine import (
    Elasticity,
    ElasticityEffect,
    ElasticityEvent,
    SizeBounds,
    SizeRequested,
)
from zmqdist.launch.tasks import Tasks
from zmqdist.scheduling.dispatcher.runtime import NO_LAUNCHER
from zmqdist.scheduling.shared.config import WorkerConfig

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
        # The program may run before the workers of the file have registered.
        eventually(
            lambda: not self.status()["scaling"]["starting"], "the workers of the file register"
        )

    def scale(self, size: str, *options: str) -> tuple[int, str, str]:
        result = run_here("scale", *self.target(), size, "--timeout", "20", *options)
        return result.code, result.out, result.err

    def target(self) -> list[str]:
        """TARGET and secret, as options."""
        runtime = ClusterConfig.load(self.file, runtime_allowed=True).runtime
        assert runtime is not None
        secret = (
            ["--token-file", runtime.token_file]
            if runtime.token_file
            else ["--keys", str(runtime.keys_dir)]
        )
        return [runtime.dispatcher, *secret]

    def status(self) -> dict[str, Any]:
        result = run_here("status", *self.target(), "--json", "--timeout", "20")
        assert result.code == 0, result.err
        return json.loads(result.out)  # type: ignore[no-any-return]

    def workers(self) -> list[str]:
        return [row["name"] for row in self.status()["workers"]]

    def pids(self) -> dict[str, int]:
        return {row["name"]: row["pid"] for row in self.status()["workers"]}

    def is_started(self, index: int) -> bool:
        """Whether a worker has a process, registered or not."""
        return any(
            read(item / "comm") == f"worker:{index}\n"
            for item in Path("/proc").iterdir()
            if item.name.isdigit()
            and f"TMPDIR={self.job.temporary}" in read(item / "environ").split("\0")
        )

    def end(self) -> int:
        (self.job.process_folder / "end").touch()
        return self.job.ends()


@pytest.fixture
def cluster(launch: Launcher) -> Cluster:
    return Cluster(launch(UNTIL_END_FILE, file=ONE))


@pytest.mark.processes("launch")
def test_cluster_grows_shrinks_and_leaves_nothing(cluster: Cluster) -> None:
    assert cluster.scale("worker=4") == (0, "worker:1, worker:2, worker:3 start\n", "")
    assert cluster.workers() == ["worker:0", "worker:1", "worker:2", "worker:3"]
    assert cluster.scale("worker=4") == (0, "there are 4 workers already\n", "")
    assert cluster.scale("worker=1") == (0, "worker:3, worker:2, worker:1 leave\n", "")
    assert cluster.workers() == ["worker:0"]
    assert cluster.status()["scaling"]["wanted"] == 1
    assert cluster.end() == 0, cluster.job.text
    assert sorted(cluster.job.lines[1:]) == [
        "[worker-1] has left",
        "[worker-2] has left",
        "[worker-3] has left",
    ]
    cluster.job.left_nothing()


def test_size_beyond_remaining_slots_is_refused(
    launch: Launcher,
) -> None:
    file = FILE.replace("{count: 2}", "{count: 2, restarts: 0}")
    cluster = Cluster(
        launch(
            UNTIL_END_FILE, file=file, run=ON_PIPES.replace('"a", "b", "c"', '"a", "b", slots=1')
        )
    )
    refusal = "there cannot be 3 workers: the hosts of launcher: local have slots for 2 workers"
    assert cluster.scale("worker=3")[::2] == (2, f"zmqdist scale: {refusal}\n")
    os.kill(agent_of(cluster.job.worker(1)), signal.SIGKILL)
    cluster.job.saw("[b] is lost")
    cluster.job.saw("[worker-1@b] ended")
    refusal = "there cannot be 2 workers: the hosts of launcher: local that are left have slots for 1 workers"
    assert cluster.scale("worker=2")[::2] == (2, f"zmqdist scale: {refusal}\n")
    assert cluster.scale("worker=1")[0] == 0
    eventually(lambda: cluster.workers() == ["worker:0"], "one worker is left")
    assert cluster.end() == 0, cluster.job.text


WORK = """
    import pathlib, threading, zmqdist as zd
    from zmqdist.coordinator import ClusterCoordinator

    def work(number):
        while not pathlib.Path("go").exists():
            threading.Event().wait(0.02)
        return number

    with ClusterCoordinator() as coordinator:
        values = [coordinator.schedule(work, (number,)) for number in range(8)]
        print("it runs", flush=True)
        print(sum(value.get() for value in values), flush=True)
        while not pathlib.Path("end").exists():
            threading.Event().wait(0.02)
"""


def test_work_of_workers_that_leave_runs_elsewhere(launch: Launcher) -> None:
    cluster = Cluster(launch(WORK, file=ONE))
    assert cluster.scale("worker=3")[0] == 0
    eventually(
        lambda: sum(row["running"] for row in cluster.status()["workers"]) == 3,
        "three functions run",
    )
    code, out, err = cluster.scale("worker=1", "--grace", "0.1")
    assert code == 0, err
    assert out.splitlines()[-1] == "worker:2, worker:1 leave"
    assert re.search(
        r"^worker:2: finished within the grace, else run elsewhere: 1 function: work-\d+$",
        out,
        re.M,
    )
    (cluster.job.process_folder / "go").touch()
    cluster.job.saw("28")
    assert cluster.end() == 0


KEEPS = """
    import pathlib, threading
    from zmqdist.coordinator import ClusterCoordinator

    def load(number):
        return [number]

    with ClusterCoordinator() as coordinator:
        kept = [coordinator.schedule(load, (number,), keep=True, worker=number) for number in range(2)]
        coordinator.join()
        print("it runs", flush=True)
        while not pathlib.Path("end").exists():
            threading.Event().wait(0.02)
"""


def test_size_losing_kept_values_is_refused(launch: Launcher) -> None:
    cluster = Cluster(launch(KEEPS, file=ONE.replace("count: 1", "count: 2")))
    code, out, err = cluster.scale("worker=1")
    assert re.fullmatch(r"worker:1: lost: 1 kept value that has no lineage: load-\d+\n", out)
    assert (code, err) == (
        4,
        "zmqdist scale: worker:1 stays, because something would be lost; --force drains it\n",
    )
    assert cluster.workers() == ["worker:0", "worker:1"]
    code, out, err = cluster.scale("worker=1", "--force")
    assert code == 0, err
    assert out.splitlines()[-1] == "worker:1 leaves"
    assert cluster.end() == 0


def test_bounded_size_follows_work(launch: Launcher) -> None:
    cluster = Cluster(
        launch(WORK, file=ONE.replace("count: 1", "count: 1, min: 1, max: 3, idle_s: 0.3"))
    )
    eventually(lambda: len(cluster.workers()) == 3, "it grows to max")
    (cluster.job.process_folder / "go").touch()
    cluster.job.saw("28")
    eventually(lambda: len(cluster.workers()) == 1, "it shrinks to min")
    assert cluster.scale("worker=4") == (
        2,
        "",
        "zmqdist scale: worker=4 is out of bounds: the cluster file has min 1 and max 3\n",
    )
    assert cluster.end() == 0
    cluster.job.left_nothing()


def test_killed_new_worker_returns(cluster: Cluster) -> None:
    assert cluster.scale("worker=2")[0] == 0
    before = cluster.job.worker(1)
    os.kill(before, signal.SIGKILL)
    eventually(lambda: cluster.pids().get("worker:1", before) != before, "worker:1 is back")
    assert cluster.status()["scaling"]["wanted"] == 2
    assert cluster.end() == 0


def test_launcher_killed_in_scale_leaves_nothing(
    cluster: Cluster,
) -> None:
    with ThreadPoolExecutor(1) as threads:
        scaling = threads.submit(cluster.scale, "worker=5", "--timeout", "2")
        eventually(lambda: cluster.is_started(2), "a second worker starts")
        cluster.job.process.kill()
        cluster.job.ends()
        scaling.result(60.0)
    cluster.job.left_nothing(folders=False)


def test_two_sizes_at_once_both_commands_end(cluster: Cluster) -> None:
    with ThreadPoolExecutor(2) as threads:
        first, second = (
            threads.submit(cluster.scale, "worker=2"),
            threads.submit(cluster.scale, "worker=3"),
        )
        assert (first.result(60.0)[0], second.result(60.0)[0]) == (0, 0)
    expected = cluster.status()["scaling"]["wanted"]
    assert expected in (2, 3)
    eventually(lambda: len(cluster.workers()) == expected, "the last size holds")
    assert cluster.end() == 0
    cluster.job.left_nothing()


def test_shutdown_starts_no_worker(cluster: Cluster) -> None:
    assert run_here("shutdown", *cluster.target(), "--timeout", "20").code == 0
    code, out, _ = cluster.scale("worker=3", "--timeout", "1")
    assert code != 0
    assert out == ""
    assert cluster.end() == 0
    cluster.job.left_nothing()


def test_repeated_scaling_leaks_nothing(
    cluster: Cluster,
) -> None:
    def figures() -> tuple[int, int]:
        process = Path("/proc", str(cluster.job.process.pid))
        return len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))

    sizes = []
    for _ in range(3):
        assert cluster.scale("worker=3")[0] == 0
        assert cluster.scale("worker=1")[0] == 0
        eventually(lambda: not cluster.status()["scaling"]["leaving"], "they have left")
        sizes.append(figures())
    # one more thread: the server's pool gets its first one once `scale` counts as a long method
    most = sizes[0][0] + 1, sizes[0][1]
    eventually(
        lambda: all(now <= before for now, before in zip(figures(), most, strict=True)),
        f"no more than {sizes}",
    )
    assert cluster.end() == 0
    cluster.job.left_nothing()


WRONG = """
    import pathlib, threading
    from zmqdist import errors
    from zmqdist.coordinator import ClusterCoordinator

    with ClusterCoordinator() as coordinator:
        for count in ("a", 2.5, True, None, -1, 10**9):
            try:
                coordinator.scale_workers(count)
            except errors.OpError as error:
                print(type(error).__name__, error.message, flush=True)
        try:
            coordinator.scale_workers(2, grace_s=-1)
        except errors.InvalidArgumentError as error:
            print(error.message, flush=True)
        print("it runs", flush=True)
        while not pathlib.Path("end").exists():
            threading.Event().wait(0.02)
"""


def test_bad_size_refused_and_next_decided(
    launch: Launcher,
) -> None:
    cluster = Cluster(launch(WRONG, file=ONE))
    assert cluster.job.lines[:-1] == [
        "InvalidArgumentError the number of workers is an int, as 8, not 'a'",
        "InvalidArgumentError the number of workers is an int, as 8, not 2.5",
        "InvalidArgumentError the number of workers is an int, as 8, not True",
        "InvalidArgumentError the number of workers is an int, as 8, not None",
        "FailedPreconditionError worker=-1 is out of bounds: a cluster has min 1 and max 10000",
        (
            "FailedPreconditionError worker=1000000000 is out of bounds: a cluster has min 1 and max "
            "10000"
        ),
        "grace_s is -1, wants 0 s or more",
    ]
    assert cluster.scale("worker=1") == (0, "there is 1 worker already\n", "")
    assert cluster.end() == 0


class Broken(Elasticity):
    """A machine with a bug: it fails at each request."""

    def handle(self, event: ElasticityEvent, now: float) -> list[ElasticityEffect]:
        if isinstance(event, SizeRequested):
            raise KeyError("a bug")
        return super().handle(event, now)


def test_launcher_bug_fails_request_not_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with DispatchServer() as server:
        tasks = Tasks(lambda *_: None, lambda *_: None, lambda _: None)
        workers = ElasticWorkers(Broken(SizeBounds(), []), server, tasks, lambda _: None, str)
        try:
            for _ in range(2):
                with pytest.raises(errors.InternalError, match="the launcher failed: KeyError"):
                    workers.scale("worker", 1, 1.0, False)
        finally:
            workers.stop()
            tasks.close(1.0)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_unstartable_role_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output: list[str] = []
    exits: list[tuple[Any, ...]] = []
    tasks = Tasks(lambda *exit: exits.append(exit), lambda *_: None, output.append)
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    try:
        tasks.start(WorkerConfig("127.0.0.1:1", index=3), {}, 0)
    finally:
        tasks.close(0.0)
    assert exits == [(3, None, False)]
    assert [line.partition(" was removed")[0] for line in output] == [
        "[worker-3] cannot be started: the working directory of this process"
    ]


def test_size_without_launcher_has_remedy() -> None:
    with DispatchServer() as server:
        result = run_here("scale", server.address, "worker=2")
    assert result.code == 2
    assert result.err == f"zmqdist scale: {NO_LAUNCHER}\n"


PS = """
    import pathlib, threading
    import zmqdist as zd

    strategy = zd.ParameterServerStrategy(None)
    with strategy.scope():
        variables = [zd.Variable(float(number), name=f"weights_{number}") for number in range(3)]
    print("it runs", flush=True)
    while not pathlib.Path("end").exists():
        threading.Event().wait(0.02)
    strategy.close()
"""


def test_ps_refusal_names_variables(
    launch: Launcher,
) -> None:
    cluster = Cluster(
        launch(PS, file=ONE.replace("worker: {count: 1}", "worker: {count: 1}\n  ps: {count: 2}"))
    )
    code, out, err = cluster.scale("ps=3")
    assert (code, out) == (2, "")
    assert "ps:0: weights_0, weights_2; ps:1: weights_1" in err
    assert cluster.end() == 0, cluster.job.text


SCALES = """
    import pathlib, threading
    from zmqdist.coordinator import ClusterCoordinator

    with ClusterCoordinator() as coordinator:
        coordinator.scale_workers(2)
        print(coordinator.schedule(sum, ([1, 2],), worker=1).get())
        coordinator.scale_workers(1)
"""


def test_program_changes_size(launch: Launcher) -> None:
    job = launch(SCALES, file=ONE)
    assert job.ends() == 0, job.text
    assert job.lines[0] == "3"
    job.left_nothing()


IS_REFUSED = """
    from zmqdist import errors
    from zmqdist.coordinator import ClusterCoordinator

    def load(number):
        return [number]

    with ClusterCoordinator() as coordinator:
        kept = [coordinator.schedule(load, (number,), keep=True, worker=number) for number in range(2)]
        coordinator.join()
        for remove in (lambda force: coordinator.remove_worker(1, force=force), lambda force: coordinator.scale_workers(1, force=force)):
            try:
                remove(False)
            except errors.DrainRefusedError as error:
                print(error.workers, error.values == (f"load-{kept[1].work}",), coordinator.workers())
        remove(True)
"""


def test_program_gets_names_of_losses(launch: Launcher) -> None:
    job = launch(IS_REFUSED, file=ONE.replace("count: 1", "count: 2"))
    assert job.ends() == 0, job.text
    # The program's lines may come after those of the launcher, because the program writes to a
    # pipe.
    assert [line for line in job.lines if line.startswith("(")] == [
        "('worker:1',) True ['worker:0', 'worker:1']"
    ] * 2, job.text
    job.left_nothing()


ON_HOSTS = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from tests.launch.helpers import pipe_host
from zmqdist.cluster import ClusterConfig
from zmqdist.launch import launcher
launcher.agent_hosts = lambda config: [pipe_host("a", 2), pipe_host("b", 1)]
sys.exit(launcher.launch(ClusterConfig.load(sys.argv[1]), sys.argv[3:], grace_s=float(sys.argv[2])))
"""


def test_host_slots_bound_size_and_become_free(
    launch: Launcher,
) -> None:
    cluster = Cluster(launch(UNTIL_END_FILE, file=ONE, run=ON_HOSTS))
    for _ in range(2):
        assert cluster.scale("worker=3")[0] == 0
        assert cluster.workers() == ["worker:0", "worker:1", "worker:2"]
        code, _, err = cluster.scale("worker=4")
        assert code == 2
        assert err.endswith(
            "there cannot be 4 workers: the hosts of launcher: local have slots for 3 workers\n"
        )
        assert cluster.scale("worker=1")[0] == 0
    assert cluster.end() == 0, cluster.job.text
    cluster.job.left_nothing()

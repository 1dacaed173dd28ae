"""Each job of a cluster file in processes: the environment of its tasks, and when the launcher
starts them again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tests.launch.helpers import FILE, UNTIL_END_FILE, WITH_PS, Launched, eventually
from tests.ports import free_address

Launcher = Callable[..., Launched]


def test_program_finds_workers_and_ps(launch: Launcher) -> None:
    program = """
        import zmqdist as zd
        from zmqdist.training.cluster_connection import connect

        resolver = zd.resolvers.TFConfigClusterResolver()
        assert resolver.validate() == []
        for source in (None, resolver):
            with zd.coordinator.ClusterCoordinator() as coordinator:
                found = connect(source)
                assert found.task_states() == [None] * 3
                assert found.ps == resolver.cluster_spec().job_tasks("ps")
                print(coordinator.schedule(sum, ([1, 2],)).get(), len(found.ps), list(found.workers))
                found.close()
    """
    job = launch(program, file=WITH_PS)
    assert job.ends() == 0, job.text
    assert job.lines == ["3 2 [0]", "3 2 [0]"]
    job.left_nothing()


def test_ps_listens_at_address_of_file(launch: Launcher) -> None:
    address = free_address()
    program = """
        from zmqdist.training.cluster_connection import connect
        print(*connect().ps)
    """
    job = launch(program, file=WITH_PS.replace("{count: 2}", f"{{tasks: [{address}]}}"))
    assert job.ends() == 0, job.text
    assert job.lines == [address]


def test_killed_worker_restarts_up_to_bound(launch: Launcher) -> None:
    job = launch(UNTIL_END_FILE, file=FILE.replace("count: 2", "count: 1, restarts: 1"))
    job.saw("it runs")
    before = job.worker(0)
    os.kill(before, signal.SIGKILL)
    job.saw("[worker-0] ended (killed by SIGKILL); it is started again (1 of 1)")
    eventually(lambda: job.worker(0) != before, "another is there")
    os.kill(job.worker(0), signal.SIGKILL)
    job.saw(
        "[worker-0] ended (killed by SIGKILL); no worker is left: scheduled functions fail after "
        "a while"
    )
    (job.process_folder / "end").touch()
    assert job.ends() == 0, job.text
    job.left_nothing()


def test_drained_worker_never_restarts(launch: Launcher) -> None:
    program = """
        import os, threading
        from zmqdist.cluster import ClusterConfig
        from zmqdist.training.cluster_connection import connect
        connected = connect()
        connected.remove_worker(0, 0.0)
        while connected._call_dispatcher("facts")["workers"]:
            threading.Event().wait(0.02)
    """
    job = launch(program, file=WITH_PS)
    assert job.ends() == 0, job.text
    assert not any("started again" in line for line in job.lines), job.text
    job.left_nothing()


def test_chief_is_the_program(launch: Launcher) -> None:
    program = """
        import json, os
        print(json.loads(os.environ["TF_CONFIG"])["task"], os.environ["GREETING"])
    """
    job = launch(
        program,
        file=FILE.replace("worker:", "chief: {count: 1, env: {GREETING: hello}}\n  worker:"),
    )
    assert job.ends() == 0, job.text
    assert job.lines == ["{'type': 'chief', 'index': 0} hello"]

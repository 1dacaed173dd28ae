"""The jobs of a cluster file beside the workers: parameter servers, the chief, an evaluator; and what is started again."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.launched import FILE, Launched, eventually
from zmqdist import errors
from zmqdist.cluster import ClusterConfig
from zmqdist.launch import tasks
from zmqdist.launch.launcher import launch as launch_here

Launcher = Callable[..., Launched]

WITH_PS = FILE.replace("worker: {count: 2}", "worker: {count: 1}\n  ps: {count: 2}")

UNTIL_TOLD = """
    import pathlib, signal, threading
    print("it runs", flush=True)
    while not pathlib.Path("end").exists():
        threading.Event().wait(0.02)
"""


def test_a_program_finds_workers_and_ps_in_whichever_way_it_asks(launch: Launcher) -> None:
    program = """
        import zmqdist as zd
        from zmqdist.parameter_server.connecting import connect

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


def test_a_ps_with_an_address_has_it(launch: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    program = """
        from zmqdist.parameter_server.connecting import connect
        print(*connect().ps)
    """
    job = launch(program, file=WITH_PS.replace("{count: 2}", f"{{tasks: [{place}]}}"))
    assert job.ends() == 0, job.text
    assert job.lines == [place]


def test_a_port_of_a_ps_that_is_in_use_is_told_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        file = tmp_path / "cluster.yaml"
        file.write_text(WITH_PS.replace("{count: 2}", f"{{tasks: [{place}]}}"))
        with pytest.raises(errors.UnknownError, match=f"could not bind {place}: Address already in use"):
            launch_here(ClusterConfig.load(str(file)))


def test_a_ps_that_was_killed_comes_back_at_its_address_and_its_loss_is_told(launch: Launcher) -> None:
    job = launch(UNTIL_TOLD, file=WITH_PS)
    job.saw("it runs")
    before = job.task("ps", 1)
    os.kill(before, signal.SIGKILL)
    job.saw("[ps-1] ended (killed by SIGKILL); its variables are lost; it is started again (1 of 3)")
    eventually(lambda: job.task("ps", 1) != before, "another is there")
    (job.process_folder / "end").touch()
    assert job.ends() == 0, job.text
    job.left_nothing()


def test_a_worker_that_was_killed_is_started_again_so_often_as_the_file_says(launch: Launcher) -> None:
    job = launch(UNTIL_TOLD, file=FILE.replace("count: 2", "count: 1, restarts: 1"))
    job.saw("it runs")
    before = job.worker(0)
    os.kill(before, signal.SIGKILL)
    job.saw("[worker-0] ended (killed by SIGKILL); it is started again (1 of 1)")
    eventually(lambda: job.worker(0) != before, "another is there")
    os.kill(job.worker(0), signal.SIGKILL)
    job.saw("[worker-0] ended (killed by SIGKILL); no worker is left: what is scheduled fails after a while")
    (job.process_folder / "end").touch()
    assert job.ends() == 0, job.text
    job.left_nothing()


def test_one_that_was_told_to_leave_stays_away(launch: Launcher) -> None:
    program = """
        import os, threading
        from zmqdist.cluster import ClusterConfig
        from zmqdist.parameter_server.connecting import connect
        connected = connect()
        connected.remove_worker(0, 0.0)
        while connected._ask("status")["workers"]:
            threading.Event().wait(0.02)
    """
    job = launch(program, file=WITH_PS)
    assert job.ends() == 0, job.text
    assert not any("started again" in line for line in job.lines), job.text
    job.left_nothing()


def test_pauses_between_restarts_grow_and_have_a_bound() -> None:
    told: list[str] = []
    made = tasks.Tasks(lambda child: None, told.append)
    try:
        made._start = lambda task: None  # type: ignore[method-assign]
        task = tasks._Task(None, {}, 8)  # type: ignore[arg-type]
        pauses = []
        for _ in range(8):
            task.since = float("inf")
            assert made._again(task, -9)
            assert task.pause is not None
            pauses.append(task.pause.interval)
            task.pause.cancel()
        assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
        assert made._again(task, -9) == ""
        task.since = 0.0  # it has lived long
        assert made._again(task, -9) == "it is started again (1 of 8)"
        task.pause.cancel()
        assert [made._again(task, code) for code in (0, 2, 4)] == ["", "", ""]
    finally:
        made.close(0.0)


def test_a_chief_of_the_file_is_the_program(launch: Launcher) -> None:
    program = """
        import json, os
        print(json.loads(os.environ["TF_CONFIG"])["task"], os.environ["GREETING"])
    """
    job = launch(program, file=FILE.replace("worker:", "chief: {count: 1, env: {GREETING: hello}}\n  worker:"))
    assert job.ends() == 0, job.text
    assert job.lines == ["{'type': 'chief', 'index': 0} hello"]


EVALUATOR = FILE.replace("worker: {count: 2}", "worker: {count: 1}\n  evaluator: {program: python evaluate.py}")


def test_an_evaluator_runs_beside_the_program_and_ends_by_itself(launch: Launcher, tmp_path: Path) -> None:
    """It is not told where the cluster is, and has the time to evaluate what came last."""
    (tmp_path / "evaluate.py").write_text(
        "import json, os, pathlib, threading\n"
        "print(json.loads(os.environ['TF_CONFIG'])['task'], 'ZMQDIST_CONFIG' in os.environ, flush=True)\n"
        "while not pathlib.Path('finished').exists():\n"
        "    threading.Event().wait(0.02)\n"
        "print('evaluated the last one', flush=True)\n"
    )
    program = """
        import pathlib, sys
        print("trained")
        pathlib.Path("finished").touch()
        sys.exit(5)
    """
    job = launch(program, file=EVALUATOR)
    assert job.ends() == 5, job.text
    told = ["[evaluator-0] evaluated the last one", "[evaluator-0] {'type': 'evaluator', 'index': 0} False", "trained"]
    assert sorted(job.lines) == told
    job.left_nothing()


def test_without_a_program_of_its_own_the_evaluator_runs_that_of_the_cluster(launch: Launcher) -> None:
    program = """
        import sys
        import zmqdist as zd
        print(zd.resolvers.TFConfigClusterResolver().task_type, sys.argv[1:])
    """
    job = launch(
        program, file=EVALUATOR.replace("evaluator: {program: python evaluate.py}", "evaluator:"), arguments=("x",)
    )
    assert job.ends() == 0, job.text
    assert sorted(job.lines) == ["[evaluator-0] evaluator ['x']", "chief ['x']"]


def test_an_evaluator_that_does_not_end_is_told_to_after_the_grace(launch: Launcher, tmp_path: Path) -> None:
    """With all that it has started."""
    (tmp_path / "evaluate.py").write_text(
        "import pathlib, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], stderr=subprocess.DEVNULL)\n"
        "pathlib.Path('evaluates').touch()\n"
        "signal.pause()\n"
    )
    program = """
        import pathlib, threading
        while not pathlib.Path("evaluates").exists():
            threading.Event().wait(0.02)
    """
    job = launch(program, file=EVALUATOR)
    assert job.ends() == 0, job.text
    assert job.lines == []
    job.left_nothing()


def test_an_evaluator_that_fails_is_told_of_and_ends_nothing_else(launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "evaluate.py").write_text("raise SystemExit(3)\n")
    job = launch(UNTIL_TOLD, file=EVALUATOR)
    job.saw("[evaluator-0] ended (exit code 3); nothing is evaluated any more")
    (job.process_folder / "end").touch()
    assert job.ends() == 0, job.text
    job.left_nothing()


def test_a_signal_ends_an_evaluator_and_ps_with_the_rest(launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "evaluate.py").write_text("import signal\nsignal.pause()\n")
    both = WITH_PS.replace("ps: {count: 2}", "ps: {count: 2}\n  evaluator: {program: python evaluate.py}")
    job = launch(UNTIL_TOLD, file=both)
    job.saw("it runs")
    job.process.send_signal(signal.SIGTERM)
    assert job.ends() == 128 + signal.SIGTERM, job.text
    job.left_nothing()


def test_ps_and_evaluator_end_with_a_launcher_that_is_killed(launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "evaluate.py").write_text("import pathlib, signal\npathlib.Path('evaluates').touch()\nsignal.pause()\n")
    both = WITH_PS.replace("ps: {count: 2}", "ps: {count: 2}\n  evaluator: {program: python evaluate.py}")
    job = launch(UNTIL_TOLD, file=both)
    job.saw("it runs")
    job.task("ps", 1)
    eventually(lambda: (tmp_path / "evaluates").exists(), "the evaluator runs")
    job.process.kill()
    assert job.ends() == -signal.SIGKILL
    job.left_nothing(folders=False)

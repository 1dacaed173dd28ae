"""An evaluator of a cluster file: it runs beside the program, and ends by itself, after its grace,
or with the launcher."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from tests.launch.helpers import FILE, Launched, eventually

Launcher = Callable[..., Launched]


WITH_PS = FILE.replace("worker: {count: 2}", "worker: {count: 1}\n  ps: {count: 2}")


UNTIL_END_FILE = """
    import pathlib, signal, threading
    print("it runs", flush=True)
    while not pathlib.Path("end").exists():
        threading.Event().wait(0.02)
"""


EVALUATOR = FILE.replace(
    "worker: {count: 2}", "worker: {count: 1}\n  evaluator: {program: python evaluate.py}"
)


def test_evaluator_ends_by_itself(launch: Launcher, tmp_path: Path) -> None:
    """The evaluator does not get the address of the dispatcher, and has time to evaluate the last
    checkpoint."""
    (tmp_path / "evaluate.py").write_text(
        "import json, os, pathlib, threading\n"
        "print(json.loads(os.environ['TF_CONFIG'])['task'], 'ZMQDIST_CONFIG' in os.environ, "
        "flush=True)\n"
        "while not pathlib.Path('finished').exists():\n"
        "    threading.Event().wait(0.02)\n"
        "print('evaluated the last one', flush=True)\n"
    )
    program = """
        import pathlib, sys
        print("trained", flush=True)
        pathlib.Path("finished").touch()
        sys.exit(5)
    """
    job = launch(program, file=EVALUATOR)
    assert job.ends() == 5, job.text
    text = [
        "[evaluator-0] evaluated the last one",
        "[evaluator-0] {'type': 'evaluator', 'index': 0} False",
        "trained",
    ]
    assert sorted(job.lines) == text
    job.left_nothing()


def test_evaluator_runs_cluster_program_by_default(
    launch: Launcher,
) -> None:
    program = """
        import sys
        import zmqdist as zd
        print(zd.resolvers.TFConfigClusterResolver().task_type, sys.argv[1:])
    """
    job = launch(
        program,
        file=EVALUATOR.replace("evaluator: {program: python evaluate.py}", "evaluator:"),
        arguments=("x",),
    )
    assert job.ends() == 0, job.text
    assert sorted(job.lines) == ["[evaluator-0] evaluator ['x']", "chief ['x']"]


def test_endless_evaluator_stopped_after_grace(launch: Launcher, tmp_path: Path) -> None:
    """The processes that the evaluator has started end, too."""
    (tmp_path / "evaluate.py").write_text(
        "import pathlib, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], "
        "stderr=subprocess.DEVNULL)\n"
        "pathlib.Path('evaluates').touch()\n"
        "signal.pause()\n"
    )
    program = """
        import pathlib, threading
        while not pathlib.Path("evaluates").exists():
            threading.Event().wait(0.02)
    """
    job = launch(program, file=EVALUATOR, grace_s=0.5)
    assert job.ends() == 0, job.text
    assert job.lines == []
    job.left_nothing()


def test_failed_evaluator_ends_no_other_task(launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "evaluate.py").write_text("raise SystemExit(3)\n")
    job = launch(UNTIL_END_FILE, file=EVALUATOR)
    job.saw("[evaluator-0] ended (exit code 3); nothing is evaluated any more")
    (job.process_folder / "end").touch()
    assert job.ends() == 0, job.text
    job.left_nothing()


def test_signal_ends_evaluator_and_ps(launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "evaluate.py").write_text("import signal\nsignal.pause()\n")
    file_text = WITH_PS.replace(
        "ps: {count: 2}", "ps: {count: 2}\n  evaluator: {program: python evaluate.py}"
    )
    job = launch(UNTIL_END_FILE, file=file_text)
    job.saw("it runs")
    job.process.send_signal(signal.SIGTERM)
    assert job.ends() == 128 + signal.SIGTERM, job.text
    job.left_nothing()


def test_ps_and_evaluator_end_with_a_launcher_that_is_killed(
    launch: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "evaluate.py").write_text(
        "import pathlib, signal\npathlib.Path('evaluates').touch()\nsignal.pause()\n"
    )
    file_text = WITH_PS.replace(
        "ps: {count: 2}", "ps: {count: 2}\n  evaluator: {program: python evaluate.py}"
    )
    job = launch(UNTIL_END_FILE, file=file_text)
    job.saw("it runs")
    job.task("ps", 1)
    eventually(lambda: (tmp_path / "evaluates").exists(), "the evaluator runs")
    job.process.kill()
    assert job.ends() == -signal.SIGKILL
    job.left_nothing(folders=False)

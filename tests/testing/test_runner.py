"""Section 7 of the contract, MultiProcessRunner: what TensorFlow's multi_process_runner_test asks,
by its names.

Void here: NotInitializedError, since no special main is needed, and the skips on platforms and
Python versions.
Different on purpose: a crash (SIGSEGV, SIGABRT) fails the run, although its exit code is below 0;
other signals do not.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch.helpers import eventually
from tests.testing.helpers import Bell, ends, for_ever, me
from zmqdist import errors
from zmqdist.testing import (
    MultiProcessRunner,
    SubprocessTimeoutError,
    UnexpectedSubprocessExitError,
    create_cluster_spec,
    get_barrier,
    manager,
    run,
)
from zmqdist.testing.runner.shared import end_manager


class Odd(Exception):
    """An error of this module, which need not be importable elsewhere."""


# -- values, errors, arguments ---------------------------------------------------------------------


@pytest.mark.processes("test harness")
def test_multi_process_runner() -> None:
    cluster = create_cluster_spec(has_chief=True, num_workers=2, num_ps=3)

    def check() -> str:
        config = json.loads(os.environ["TF_CONFIG"])
        assert config["cluster"] == cluster
        assert "rpc_layer" not in config
        return config["task"]["type"]

    result = run(check, cluster)
    assert sorted(result.return_value) == ["chief", "ps", "ps", "ps", "worker", "worker"]
    assert result.stdout == []


def test_multi_process_runner_error_propagates_from_subprocesses() -> None:
    def fail() -> None:
        raise ValueError("This is an error.")

    with pytest.raises(ValueError, match="This is an error") as caught:
        run(fail, create_cluster_spec(num_workers=1, num_ps=1))
    assert caught.value.mpr_result.return_value == []
    assert 'raise ValueError("This is an error.")' in str(caught.value.__cause__)


def test_error_keeps_class_and_results() -> None:
    def fail() -> str:
        get_barrier().wait()
        if me() == "worker-1":
            raise Odd("odd", 7)
        return me()

    with pytest.raises(Odd) as caught:
        run(fail, create_cluster_spec(num_workers=2))
    assert caught.value.args == ("odd", 7)
    assert caught.value.mpr_result.return_value == ["worker-0"]


def test_pytest_failure_in_task_fails_test() -> None:
    """By its name and text: pytest says that this class is one of the module builtins, where no
    pickle finds it."""
    with pytest.raises(BaseException, match="as told"):
        run(functools.partial(pytest.fail, "as told"), create_cluster_spec())


def test_multi_process_runner_queue_emptied_between_runs() -> None:
    cluster = create_cluster_spec(num_workers=2)
    assert run(lambda: "value", cluster).return_value == ["value", "value"]
    assert run(lambda: None, cluster).return_value == []


def test_multi_process_runner_args_passed_correctly() -> None:
    def give(a: str, b: str, c_k: str) -> tuple[str, ...]:
        return a, b, c_k

    outcome = run(give, create_cluster_spec(num_workers=2), args=("a", "b"), kwargs={"c_k": "c_v"})
    assert outcome.return_value == [("a", "b", "c_v")] * 2


def test_large_arrays_and_unpicklable_parts() -> None:
    array = np.arange(1_000_000)
    (twice,) = run(lambda a: a * 2, create_cluster_spec(), args=(array,)).return_value
    np.testing.assert_array_equal(twice, array * 2)
    with pytest.raises(errors.InvalidArgumentError, match=r"args\[0\]"):
        run(lambda a: a, create_cluster_spec(), args=(threading.Lock(),))
    with pytest.raises(errors.InvalidArgumentError, match="cannot be pickled"):
        run(threading.Lock, create_cluster_spec())


# -- output ----------------------------------------------------------------------------------------


def test_stdout_captured(capsys: pytest.CaptureFixture[str]) -> None:
    def say() -> str:
        print("This is something printed.")
        return "This is returned data."

    result = run(say, create_cluster_spec(num_workers=2), return_output=True)
    assert "[worker-0]:    This is something printed.\n" in result.stdout
    assert "[worker-1]:    This is something printed.\n" in result.stdout
    assert result.return_value == ["This is returned data."] * 2
    assert sorted(capsys.readouterr().out.splitlines(True)) == sorted(result.stdout)


def test_streaming(capsys: pytest.CaptureFixture[str]) -> None:
    def say(subject: str) -> None:
        print(f"{me()} prints {subject}")
        logging.info("%s logs %s", me(), subject)

    cluster = create_cluster_spec(has_chief=True, num_workers=2, num_ps=2)
    with MultiProcessRunner(
        say, cluster, args=("1",), return_output=True, dependence_on_chief=False
    ) as runner:
        runner.start()
        runner.start_single_process("worker", 2, args=("added",))
        runner.start_single_process("ps", 2, args=("added",))
        lines = runner.join().stdout
    assert capsys.readouterr().out.count("\n") == len(lines) == 14
    tasks = ["chief-0", "worker-0", "worker-1", "ps-0", "ps-1"]
    for task, subject in [
        *((task, "1") for task in tasks),
        ("worker-2", "added"),
        ("ps-2", "added"),
    ]:
        assert f"[{task}]:".ljust(15) + f"{task} prints {subject}\n" in lines
        assert f"[{task}]:".ljust(15) + f"INFO root: {task} logs {subject}\n" in lines
    assert not any("-3" in line for line in lines)


def test_output_silent_without_stream_output(capsys: pytest.CaptureFixture[str]) -> None:
    runner = MultiProcessRunner(
        lambda: print("quiet"), create_cluster_spec(), stream_output=False, return_output=True
    )
    runner.start()
    assert runner.join().stdout == ["[worker-0]:    quiet\n"]
    assert capsys.readouterr().out == ""


# -- ending tasks, adding tasks --------------------------------------------------------------------


def test_termination(bell: Callable[..., Bell]) -> None:
    start_event = bell()

    def work() -> None:
        print("index 0")
        if me() == "worker-0":
            start_event.ring()
            for_ever()
        print("index 9")

    with MultiProcessRunner(work, create_cluster_spec(num_workers=2), return_output=True) as runner:
        runner.start()
        start_event.hear()
        runner.terminate("worker", 0)
        lines = runner.join().stdout
    assert sorted(lines) == [
        "[worker-0]:    index 0\n",
        "[worker-1]:    index 0\n",
        "[worker-1]:    index 9\n",
    ]
    assert runner.get_process_exit_code("worker", 0) == -signal.SIGKILL
    assert runner.get_process_exit_code("worker", 1) == 0


def test_termination_and_start_single_process(tmp_path: Path, bell: Callable[..., Bell]) -> None:
    start_event, second = bell(), tmp_path / "second"

    def work() -> None:
        print("index 0")
        if me() == "worker-0" and not second.exists():
            start_event.ring()
            for_ever()
        print("index 9")

    with MultiProcessRunner(work, create_cluster_spec(num_workers=2), return_output=True) as runner:
        runner.start()
        start_event.hear()
        with pytest.raises(ValueError, match="worker-0 is running already"):
            runner.start_single_process("worker", 0)
        runner.terminate("worker", 0)
        second.touch()
        runner.start_single_process("worker", 0)
        lines = runner.join().stdout
    assert lines.count("[worker-0]:    index 0\n") == 2
    assert lines.count("[worker-0]:    index 9\n") == 1
    assert lines.count("[worker-1]:    index 9\n") == 1


def test_start_in_process_as(bell: Callable[..., Bell]) -> None:
    start_event, added = bell("begun"), bell("added")
    here = []

    def work() -> str:
        get_barrier().wait()
        if me() == "chief-0":
            here.append(me())
            start_event.ring()
            added.hear()
        print(f"{me()} was here")
        return me()

    def evaluate() -> str:
        added.ring()
        print(f"{me()} was here")
        return me()

    with MultiProcessRunner(
        work, create_cluster_spec(has_chief=True, num_workers=2), return_output=True
    ) as runner:

        def add() -> None:
            start_event.hear()
            runner.start_single_process("evaluator", 0, fn=evaluate)

        thread = threading.Thread(target=add)
        thread.start()
        runner.start_in_process_as("chief", 0)
        thread.join()
        result = runner.join()
    assert here == ["chief-0"]
    assert "TF_CONFIG" not in os.environ
    assert sorted(result.return_value) == ["evaluator-0", "worker-0", "worker-1"]
    for task in ("evaluator-0", "worker-0", "worker-1"):
        assert f"[{task}]:".ljust(15) + f"{task} was here\n" in result.stdout


def test_error_of_own_task_ends_others() -> None:
    def work() -> None:
        if me() == "chief-0":
            raise Odd("here")
        for_ever()

    with MultiProcessRunner(work, create_cluster_spec(has_chief=True)) as runner:
        with pytest.raises(Odd, match="here"):
            runner.start_in_process_as("chief", 0)
        runner.join()
    assert runner.get_process_exit_code("worker", 0) == -signal.SIGKILL


def test_terminate_all_does_not_ignore_error(bell: Callable[..., Bell]) -> None:
    failing = bell()

    def work() -> None:
        if me() == "worker-0":
            raise ValueError("before the end")
        for_ever()

    def wait_for_it() -> None:
        failing.ring()
        for_ever()

    with MultiProcessRunner(work, create_cluster_spec(num_workers=2)) as runner:
        runner.start()
        eventually(lambda: not runner.process_exists("worker", 0), "worker-0 has ended")
        runner.start_single_process("ps", 0, fn=wait_for_it)
        failing.hear()
        runner.terminate_all()
        with pytest.raises(ValueError, match="before the end"):
            runner.join()


def test_process_exists(bell: Callable[..., Bell]) -> None:
    start_event = bell()

    def work() -> None:
        start_event.ring(str(os.getpid()))
        for_ever()

    with MultiProcessRunner(work, create_cluster_spec()) as runner:
        assert not runner.process_exists("worker", 0)
        assert runner.get_process_id("worker", 0) is None
        assert runner.get_process_exit_code("worker", 0) is None
        runner.start()
        assert runner.get_process_id("worker", 0) == int(start_event.hear())
        assert runner.process_exists("worker", 0)
        assert runner.get_process_exit_code("worker", 0) is None
        runner.terminate("worker", 0)
        assert not runner.process_exists("worker", 0)
        runner.terminate("worker", 0)  # once more does nothing
        runner.join()


# -- the barrier -----------------------------------------------------------------------------------


def test_barrier(tmp_path: Path) -> None:
    def work() -> tuple[int, int, int]:
        barrier = get_barrier()
        (tmp_path / me()).touch()
        numbers = [barrier.wait()]
        count = len(list(tmp_path.iterdir()))
        numbers.append(barrier.wait(timeout=60))
        return count, barrier.parties, len(numbers)

    assert (
        run(work, create_cluster_spec(has_chief=True, num_workers=2)).return_value
        == [(3, 3, 2)] * 3
    )


def test_barrier_returned_to_parent_cannot_wait() -> None:
    (barrier,) = run(get_barrier, create_cluster_spec(num_workers=1)).return_value
    assert barrier.parties == 1
    with pytest.raises(ValueError, match="in the function that the runner runs"):
        barrier.wait()


@pytest.mark.parametrize("timeout", ["3", float("nan")])
def test_barrier_timeout_must_be_a_number(timeout: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="a time-out is a number of seconds"):
        run(lambda: get_barrier().wait(timeout), create_cluster_spec(num_workers=1))


def test_barrier_called_in_main_process() -> None:
    with pytest.raises(ValueError, match="in the function that the runner runs"):
        get_barrier()


def test_hopeless_barrier_fails_at_once() -> None:
    def work() -> None:
        if me() == "worker-1":
            raise Odd("first")
        get_barrier().wait()

    with pytest.raises(Odd, match="first") as caught:
        run(work, create_cluster_spec(num_workers=2), return_output=True)
    message = "".join(caught.value.mpr_result.stdout)
    assert (
        "AbortedError: the barrier cannot be complete any more: worker-1 has raised Odd: first"
        in message
    )


def test_late_barrier_fails_for_all(
    bell: Callable[..., Bell],
) -> None:
    over = bell()

    def work() -> str:
        if me() == "worker-2":
            over.hear()
        with pytest.raises(errors.DeadlineExceededError) as caught:
            get_barrier().wait(timeout=0.2 if me() == "worker-0" else None)
        if me() == "worker-0":
            over.ring()
        return str(caught.value)

    texts = run(work, create_cluster_spec(num_workers=3)).return_value
    assert len(set(texts)) == 1
    assert "when the time-out of worker-0 passed" in texts[0]
    assert texts[0].endswith(
        (
            "2/3 tasks have arrived; missing: worker-2",
            "1/3 tasks have arrived; missing: worker-1, worker-2",
        )
    )


def test_added_task_is_outside_barrier() -> None:
    with MultiProcessRunner(lambda: None, create_cluster_spec()) as runner:
        runner.start_single_process("ps", 0, fn=lambda: get_barrier().wait())
        with pytest.raises(
            errors.InvalidArgumentError, match="ps-0 is not one of the barrier's tasks: worker-0"
        ):
            runner.join()


# -- time ------------------------------------------------------------------------------------------


def test_stdout_available_when_timeout(bell: Callable[..., Bell]) -> None:
    start_event = bell()

    def work() -> None:
        print("before it sleeps")
        start_event.ring()
        for_ever()

    with MultiProcessRunner(work, create_cluster_spec(), return_output=True) as runner:
        runner.start()
        start_event.hear()
        with pytest.raises(
            SubprocessTimeoutError, match="still running 1 s after join: worker-0"
        ) as caught:
            runner.join(1)
    lines = caught.value.mpr_result.stdout
    assert lines[0] == "[worker-0]:    before it sleeps\n"
    assert any("in work" in line for line in lines), "SIGTERM makes it write its stacks"
    assert runner.get_process_exit_code("worker", 0) == -signal.SIGTERM


def test_task_ignoring_sigterm_is_killed(bell: Callable[..., Bell]) -> None:
    start_event = bell()

    def work() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        start_event.ring()
        for_ever()

    with MultiProcessRunner(work, create_cluster_spec(), term_grace_s=0.1) as runner:
        runner.start()
        start_event.hear()
        with pytest.raises(SubprocessTimeoutError):
            runner.join(0)
    assert runner.get_process_exit_code("worker", 0) == -signal.SIGKILL


def test_error_reporting_overrides_timeout_reporting() -> None:
    def work() -> None:
        if me() == "worker-0":
            raise ValueError("worker 0 errored")
        for_ever()

    with MultiProcessRunner(work, create_cluster_spec(num_workers=2)) as runner:
        runner.start()
        eventually(lambda: not runner.process_exists("worker", 0), "worker-0 has ended")
        with pytest.raises(ValueError, match="worker 0 errored"):
            runner.join(0)


def test_timeout_none() -> None:
    with MultiProcessRunner(lambda: "done", create_cluster_spec()) as runner:
        runner.start()
        assert runner.join(timeout=None).return_value == ["done"]


def test_max_run_time_ends_what_still_runs() -> None:
    with pytest.raises(
        UnexpectedSubprocessExitError, match=r"after max_run_time, 0\.5 s: worker-0"
    ):
        run(for_ever, create_cluster_spec(), max_run_time=0.5)


# -- exit codes ------------------------------------------------------------------------------------


def test_seg_fault_raises_error() -> None:
    _seg_fault_raises_error("worker-0")


def test_seg_fault_in_chief_raises_error() -> None:
    _seg_fault_raises_error("chief-0")


def _seg_fault_raises_error(task: str) -> None:
    def work() -> None:
        if me() == task:
            ctypes.string_at(0)

    with pytest.raises(
        UnexpectedSubprocessExitError,
        match=rf"{task} exited with exit code -11 \(killed by SIGSEGV",
    ) as caught:
        run(work, create_cluster_spec(has_chief=True), return_output=True)
    assert any("Segmentation fault" in line for line in caught.value.mpr_result.stdout)


def test_exit_code_is_reported_by_chief_subprocess() -> None:
    def work() -> None:
        if me() == "chief-0":
            sys.exit(20)
        for_ever()

    cluster = create_cluster_spec(has_chief=True, num_workers=1)
    with MultiProcessRunner(work, cluster, chief_grace_s=0.1) as runner:
        runner.start()
        with pytest.raises(
            UnexpectedSubprocessExitError, match="Subprocess chief-0 exited with exit code 20"
        ):
            runner.join()
    assert runner.get_process_exit_code("worker", 0) == -signal.SIGKILL


def test_exit_code_is_reported_by_subprocess() -> None:
    def work() -> None:
        print("last words", file=sys.stderr)
        sys.exit(10)

    with pytest.raises(UnexpectedSubprocessExitError) as caught:
        run(work, create_cluster_spec(num_workers=1))
    assert (
        str(caught.value)
        == "Subprocess worker-0 exited with exit code 10; its last lines:\nlast words"
    )


def test_task_ended_by_outer_signal_succeeds() -> None:
    assert (
        run(lambda: os.kill(os.getpid(), signal.SIGKILL), create_cluster_spec()).return_value == []
    )


def test_tasks_outlive_independent_chief(bell: Callable[..., Bell]) -> None:
    end_bell = bell()

    def work() -> str:
        if me() == "worker-0":
            end_bell.hear()
        return me()

    cluster = create_cluster_spec(has_chief=True)
    with MultiProcessRunner(work, cluster, dependence_on_chief=False, chief_grace_s=0.0) as runner:
        runner.start()
        eventually(lambda: not runner.process_exists("chief", 0), "the chief has ended")
        end_bell.ring()
        assert runner.join().return_value == ["chief-0", "worker-0"]


# -- starting again --------------------------------------------------------------------------------


@pytest.fixture
def _shared() -> Any:
    yield
    end_manager()


@pytest.mark.usefixtures("_shared")
def test_auto_restart() -> None:
    counter = manager().Value("i", 0)

    def work() -> None:
        counter.value += 1
        if counter.value == 1:
            raise ValueError("the first time")

    with MultiProcessRunner(work, create_cluster_spec(), auto_restart=True) as runner:
        runner.start()
        runner.join()
    assert counter.value == 2


def test_auto_restart_and_timeout(tmp_path: Path) -> None:
    def work() -> None:
        print("a run", flush=True)
        with open(tmp_path / "runs", "a") as runs:
            runs.write("a run\n")
        raise ValueError("each time")

    with MultiProcessRunner(
        work, create_cluster_spec(), auto_restart=True, return_output=True
    ) as runner:
        runner.start()
        runs = tmp_path / "runs"
        eventually(
            lambda: runs.exists() and runs.read_text().count("a run\n") > 1, "it was started again"
        )
        with pytest.raises(ValueError, match="each time") as caught:
            runner.join(0)
    assert caught.value.mpr_result.stdout.count("[worker-0]:    a run\n") > 1


def test_auto_restart_and_chief(bell: Callable[..., Bell]) -> None:
    go = bell()

    def work() -> None:
        if me() == "worker-0":
            go.hear()
            raise ValueError("after the chief")

    cluster = create_cluster_spec(has_chief=True)
    with MultiProcessRunner(
        work, cluster, auto_restart=True, return_output=True, chief_grace_s=60
    ) as runner:
        runner.start()
        eventually(lambda: not runner.process_exists("chief", 0), "the chief has ended")
        go.ring()
        with pytest.raises(ValueError, match="after the chief") as caught:
            runner.join()
    assert "".join(caught.value.mpr_result.stdout).count("Traceback") == 1


def test_auto_restart_failure_immediate_after_restart(
    tmp_path: Path, bell: Callable[..., Bell]
) -> None:
    """worker-0 is terminated when both have begun for the first time, and worker-1 for the
    second.
    """
    up, start_event = bell("up"), bell("begun")

    def work() -> str:
        again = (tmp_path / me()).exists()
        (tmp_path / me()).touch()
        if me() == "worker-1" and not again:
            raise ValueError("once")
        if me() == "worker-1":
            up.ring()
        elif not again:
            start_event.ring()
            for_ever()
        return me()

    with MultiProcessRunner(work, create_cluster_spec(num_workers=2), auto_restart=True) as runner:
        runner.start()
        start_event.hear()
        up.hear()
        runner.terminate("worker", 0)
        assert sorted(runner.join().return_value) == ["worker-0", "worker-1"]


def test_auto_restart_terminate(tmp_path: Path, bell: Callable[..., Bell]) -> None:
    start_event, second = bell(), tmp_path / "second"

    def work() -> str:
        if not second.exists():
            start_event.ring()
            for_ever()
        return "the second time"

    with MultiProcessRunner(work, create_cluster_spec(), auto_restart=True) as runner:
        runner.start()
        start_event.hear()
        second.touch()
        runner.terminate("worker", 0)
        assert runner.join().return_value == ["the second time"]


# -- devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "expected"),
    [("0,1", ["0", "1"]), ("0,1,2,3", ["0,2", "1,3"]), ("5", ["5", "5"]), ("", ["", ""])],
)
def test_gpus_divided_among_tasks(
    devices: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    with MultiProcessRunner(
        lambda: (me(), os.environ["CUDA_VISIBLE_DEVICES"]),
        create_cluster_spec(num_workers=2),
        share_gpu=False,
    ) as runner:
        runner.start()
        assert [devices for _, devices in sorted(runner.join().return_value)] == expected


# -- wrong use -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "cluster", "error", "message"),
    [
        ("fn", {"worker": ["localhost:1"]}, ValueError, "fn is 'fn', wants a function"),
        (me, {"chief": ["localhost:1", "localhost:2"]}, ValueError, "2 chiefs"),
        (me, {}, ValueError, "no tasks"),
        (me, {"worker": []}, ValueError, "no tasks"),
        (me, None, TypeError, "cluster_spec is a dict of jobs"),
        (me, ["localhost:1"], TypeError, "cluster_spec is a dict of jobs"),
        (me, {"worker": "localhost:1"}, TypeError, "must be a list or a dict"),
    ],
)
def test_bad_runner_arguments_are_refused(
    fn: Any, cluster: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        MultiProcessRunner(fn, cluster)


@pytest.mark.parametrize("timeout", [float("nan"), "1", True])
def test_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with MultiProcessRunner(me, {"worker": ["localhost:1"]}) as runner:
        runner.start()
        with pytest.raises(ValueError, match="a number of seconds"):
            runner.join(timeout)


def test_start_and_join_are_for_one_time() -> None:
    runner = MultiProcessRunner(lambda: None, {"worker": ["localhost:1"]})
    with pytest.raises(ValueError, match="call start first"):
        runner.join()
    with pytest.raises(ValueError, match="evaluator-0 is not in this cluster; it has worker-0"):
        runner.start_in_process_as("evaluator", 0)
    with pytest.raises(ValueError, match="fn is 'fn', wants a function or None"):
        runner.start_single_process("worker", 0, fn="fn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 chiefs"):
        runner.start_single_process(
            "worker", 0, cluster_spec={"chief": ["localhost:1", "localhost:2"]}
        )
    runner.start()
    for again in (runner.start, lambda: runner.start_in_process_as("worker", 0)):
        with pytest.raises(ValueError, match="started already"):
            again()
    with pytest.raises(ValueError, match="ps-0 was not started; there are: worker-0"):
        runner.terminate("ps", 0)
    runner.join()
    for late in (runner.start, runner.join, lambda: runner.start_single_process("worker", 0)):
        with pytest.raises(ValueError, match="was joined"):
            late()


# -- nothing is left -------------------------------------------------------------------------------

PARENT = """
import os, pathlib, subprocess, sys
from zmqdist.testing import MultiProcessRunner

def work(folder):
    import pathlib, re, subprocess
    grandchild = subprocess.Popen(["sleep", "1000"])
    with open(folder, "w") as bell:
        print(os.getpid(), grandchild.pid, file=bell)
    re.match(r"(a+)+$", "a" * 60 + "b")  # for ever, with the interpreter's lock

runner = MultiProcessRunner(work, {"worker": ["localhost:1"]}, args=(sys.argv[1],))
runner.start()
runner.join(None)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
@pytest.mark.killed("test harness")
def test_tasks_end_with_parent(number: int, bell: Callable[..., Bell]) -> None:
    start_event = bell()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(start_event.path)], stderr=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in start_event.hear().split()]
    parent.send_signal(number)
    _, message = parent.communicate()
    assert parent.returncode == -number
    assert ("KeyboardInterrupt" in message) == (number == signal.SIGINT)
    assert len(pids) == 2
    for pid in pids:
        ends(pid)


def test_children_end_with_task() -> None:
    def leave() -> int:
        return subprocess.Popen(["sleep", "1000"]).pid

    (pid,) = run(leave, create_cluster_spec()).return_value
    ends(pid)


def test_failed_with_statement_leaves_no_task() -> None:
    def fails(runner: MultiProcessRunner) -> None:
        with runner:
            runner.start()
            raise Odd("in the test")

    runner = MultiProcessRunner(for_ever, create_cluster_spec())
    with pytest.raises(Odd):
        fails(runner)
    assert runner.get_process_exit_code("worker", 0) == -signal.SIGKILL

"""Functions of a test module arrive in their task whichever way pytest has imported it."""

from __future__ import annotations

import ctypes
import os
import select
from typing import Any

import pytest

from tests.testing.tasks import me
from zmqdist.testing import (
    UnexpectedSubprocessExitError,
    create_cluster_spec,
    run,
)
from zmqdist.testing.runner.shared import end_manager


class Odd(Exception):
    """An error of this module, which need not be importable elsewhere."""


def _seg_fault_raises_error(task: str) -> None:
    def work() -> None:
        if me() == task:
            ctypes.string_at(0)

    with pytest.raises(
        UnexpectedSubprocessExitError, match=rf"{task} exited with exit code -11 \(killed by SIGSEGV"
    ) as caught:
        run(work, create_cluster_spec(has_chief=True), return_output=True)
    assert any("Segmentation fault" in line for line in caught.value.mpr_result.stdout)


@pytest.fixture
def _shared() -> Any:
    yield
    end_manager()


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


def _ends(pid: int) -> None:
    """Wait for the end of a process that is not a child of this one."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(20_000), f"process {pid} goes on"
    finally:
        os.close(pidfd)


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_functions_of_a_test_that_pytest_runs_in_its_own_way_arrive(pytester: pytest.Pytester, mode: str) -> None:
    pytester.mkdir("deep")
    (pytester.path / "deep" / "test_mine.py").write_text(
        """
from zmqdist.testing import create_cluster_spec, run
import pytest

class Mine(Exception):
    pass

def helper():
    return 7

def work(fail):
    if fail:
        raise Mine(helper())
    return helper()

def test_it():
    assert run(work, create_cluster_spec(), args=(False,)).return_value == [7]
    with pytest.raises(Mine):
        run(work, create_cluster_spec(), args=(True,))
"""
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", f"--import-mode={mode}")
    result.assert_outcomes(passed=1)

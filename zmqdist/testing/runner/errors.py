"""The result of a run, and the two errors that a runner raises itself. An error of a task's
function is raised unchanged."""

from __future__ import annotations

from typing import Any, NamedTuple


class MultiProcessRunnerResult(NamedTuple):
    """The results and the output of the tasks of a run.

    >>> result = zd.testing.MultiProcessRunnerResult(return_value=[1, 2], stdout=[])
    >>> result.return_value
    [1, 2]

    Attributes:
      return_value: the results of the functions, in no particular order and without None.
      stdout: the lines that the tasks wrote, each prefixed with the task and ending with a newline;
        empty without `return_output`.
    """

    return_value: list[Any]
    stdout: list[str]


class _Failed(RuntimeError):
    def __init__(self, message: str, mpr_result: MultiProcessRunnerResult) -> None:
        super().__init__(message, mpr_result)
        self.mpr_result = mpr_result

    def __str__(self) -> str:
        return str(self.args[0])


class SubprocessTimeoutError(_Failed):
    """Some tasks did not end in time, and were killed.

    Attributes:
      mpr_result: the results and the output until then.
    """


class UnexpectedSubprocessExitError(_Failed):
    """A process ended before its function had returned or raised: it exited with a code of its own,
    crashed, or ran too long.

    Attributes:
      mpr_result: the results and the output of the tasks.
    """

"""The result of a run, and the two errors of the runner itself. Errors of the tasks' functions are raised unchanged."""

from __future__ import annotations

from typing import Any, NamedTuple


class MultiProcessRunnerResult(NamedTuple):
    """What the tasks returned and wrote.

    Attributes:
      return_value: what the functions returned, in no particular order and without None.
      stdout: their lines, prefixed with the task and ending with a newline; empty without `return_output`.
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
    """Some tasks had not ended in time, and were killed.

    Attributes:
      mpr_result: what had been returned and written until then.
    """


class UnexpectedSubprocessExitError(_Failed):
    """A process ended without its function having returned or raised: by an exit code of its own, or by a crash.

    Attributes:
      mpr_result: what the tasks returned and wrote.
    """

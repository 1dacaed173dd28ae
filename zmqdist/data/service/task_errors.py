"""What readers are told when a pipeline fails: which operator, of which dataset, in which task.

An error of user code keeps its code where it is an OpError, else has one by its class (rpc/handler_errors.py), and its class and traceback
are in the text. A code that means "ask again" would be: such an error travels as UNKNOWN. What the dealing of positions raises stays as it
is.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from zmqdist.data.operator_traceback import failing_operator
from zmqdist.data.service.retry import RETRIABLE
from zmqdist.data.service.split_requests import PositionsUnavailable, WorkerDrained
from zmqdist.data.service.worker.element_replies import POSITION, SOURCE, TAKEN
from zmqdist.errors import UNKNOWN, OpError, UnknownError, from_code
from zmqdist.rpc.handler_errors import TRACEBACK, code_and_message


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """The process of a task died.

    Attributes:
      error: for readers.
      for_good: the task does not go on: all of them get it. Else one of them does.
    """

    error: OpError
    for_good: bool


def describe_error(error: BaseException, what: str, where: str) -> OpError:
    """An error of a pipeline, as readers get it.

    Args:
      what: it stands for, "element 5".
      where: dataset, job, task and worker.
    """
    if isinstance(error, (WorkerDrained, PositionsUnavailable)):
        return error
    code, message = code_and_message(error)
    if code in RETRIABLE:
        code, message = UNKNOWN, f"{type(error).__name__}: {message}"
    head, mark, trace = message.partition(TRACEBACK)
    operator = failing_operator(error)
    place = f"in the operator {operator}, " if operator else ""
    made = from_code(code, f"{head}\n{place}{what} of {where}{mark}{trace}")
    made.__cause__ = error
    return made


def process_death_error(exit_code: int, tail: str, progress: Sequence[int], where: str, goes_on: str) -> OpError:
    """The process of a task ended by itself. Permanent: it must not be tried again by those who do not know of it.

    Args:
      tail: the last lines of its standard error.
      goes_on: what becomes of the task.
    """
    at = (
        f"position {progress[POSITION]} of source {progress[SOURCE] - 1} was the last that it was given, and "
        if progress[SOURCE]
        else ""
    )
    text = (
        f"the process that ran {where} {describe_exit(exit_code)}: {at}readers had taken {progress[TAKEN]} elements. {goes_on}\n"
        f"Its standard error ended with:\n{tail or '(nothing)'}"
    )
    return UnknownError(text)


def describe_exit(code: int) -> str:
    """How a process ended, in words that follow what it was."""
    if code >= 0:
        return f"ended itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (nothing of zmqdist did: the system does when memory is short)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"

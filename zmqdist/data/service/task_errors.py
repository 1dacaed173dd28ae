"""The errors that readers get when a pipeline fails. Each error names the operator, the dataset and
the task.

An OpError of user code keeps its code. Any other error gets a code by its class
(rpc/handler_errors.py), and its text contains the class and the traceback. A code after which
readers would try again is replaced by UNKNOWN, because the pipeline would fail again. The errors of
requests for positions, which come from the dispatcher, stay unchanged.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import msgspec

from zmqdist.data.service.retry import RETRIABLE
from zmqdist.data.service.split_requests import PositionsUnavailable, WorkerDrained
from zmqdist.data.service.worker.tasks_machine import POSITION, SOURCE, TAKEN
from zmqdist.errors import UNKNOWN, OpError, UnknownError, from_code
from zmqdist.rpc.handler_errors import TRACEBACK, code_and_message


class TaskFailure(msgspec.Struct, frozen=True):
    """The crash of a task's process, as the next process of the task reports it to readers.

    Attributes:
      error: the error for readers.
      for_good: whether the task has failed for good, so that every request gets the error.
        Otherwise only one request gets it.
    """

    error: OpError
    for_good: bool


def describe_error(error: BaseException, element: str, where: str) -> OpError:
    """Return the error that readers get for an error of a pipeline.

    Args:
      what: the element that could not be computed, for example "element 5".
      where: dataset, job, task and worker, as text.
    """
    if isinstance(error, (WorkerDrained, PositionsUnavailable)):
        return error
    code, message = code_and_message(error)
    if code in RETRIABLE:
        code, message = UNKNOWN, f"{type(error).__name__}: {message}"
    # imported here, because workers load this module, and most of them run no pipeline
    from zmqdist.data.iterators import failing_operator

    head, mark, trace = message.partition(TRACEBACK)
    operator = failing_operator(error)
    operator_text = f"in the operator {operator}, " if operator else ""
    described = from_code(code, f"{head}\n{operator_text}{element} of {where}{mark}{trace}")
    described.__cause__ = error
    return described


def process_death_error(
    exit_code: int, tail: str, progress: Sequence[int], where: str, goes_on: str
) -> OpError:
    """Return the error for the crash of a task's process. Its code is not retriable, so that the
    reader raises it instead of trying again.

    Args:
      tail: the last lines of the process's standard error.
      goes_on: a sentence that tells the reader of the error text whether the task continues.
    """
    at = (
        f"position {progress[POSITION]} of source {progress[SOURCE] - 1} was the last that it "
        f"got, and "
        if progress[SOURCE]
        else ""
    )
    text = (
        f"the process that ran {where} {describe_exit(exit_code)}: {at}readers had taken "
        f"{progress[TAKEN]} elements. {goes_on}\n"
        f"Its standard error ended with:\n{tail or '(nothing)'}"
    )
    return UnknownError(text)


def describe_exit(code: int) -> str:
    """Return how a process with this exit code ended, as the predicate of a sentence: "was killed
    by SIGKILL"."""
    if code >= 0:
        return f"ended itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = (
        " (not by zmqdist; the system does so when memory is short)"
        if -code == signal.SIGKILL
        else ""
    )
    return f"was killed by {name}{hint}"

"""The errors that an Executor's Future raises when its function is not at fault. Each class is a
subclass of BrokenProcessPool of the standard library.

This module is imported when the first such error occurs, because the import of BrokenProcessPool
imports all of multiprocessing. That import fails while the program ends. The base class of the
errors is then BrokenExecutor, which is enough, because a program that has not imported
BrokenProcessPool by then cannot catch it by name.
"""

from __future__ import annotations

from concurrent.futures import BrokenExecutor
from typing import TYPE_CHECKING

from zmqdist import errors

if TYPE_CHECKING:
    from concurrent.futures.process import BrokenProcessPool
else:
    try:
        from concurrent.futures.process import BrokenProcessPool
    except RuntimeError:
        # the import registers an exit handler, which is impossible while the program ends
        BrokenProcessPool = BrokenExecutor


class ExecutorWorkerLost(errors.WorkerLost, BrokenProcessPool):
    """Too many times, the process or worker of this function was lost while the function ran."""


class ExecutorUnavailable(errors.UnavailableError, BrokenProcessPool):
    """There was no dispatcher or no worker for too long, the cluster was closed, or a large result
    could not be fetched."""

    of_the_cluster = True


class ExecutorBroken(errors.AbortedError, BrokenProcessPool):
    """The function was not run, or its result cannot be delivered, for a reason outside the
    function. The message names the reason."""

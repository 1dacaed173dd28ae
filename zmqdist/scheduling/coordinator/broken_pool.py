"""What the Futures of an Executor end with when the fault is not the function's own: each is a BrokenProcessPool of the standard library.

A module of its own, loaded with the first such error, because the standard library's class comes with all of multiprocessing. When the
program ends that can no longer be loaded; a program that has not loaded it by then catches nothing by that name.
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
    except RuntimeError:  # its module registers what is to be done at the program's end, which has come
        BrokenProcessPool = BrokenExecutor


class ExecutorWorkerLost(errors.WorkerLost, BrokenProcessPool):
    """Every process that started this function died with it."""


class ExecutorUnavailable(errors.UnavailableError, BrokenProcessPool):
    """There was no cluster, or no worker, for too long; or the cluster was closed."""

    of_the_cluster = True


class ExecutorBroken(errors.AbortedError, BrokenProcessPool):
    """The function was not run, or its result is not here, for a reason that is not the function's: the message says which."""

"""Errors of an Executor's Futures when the function itself is not at fault: each is a BrokenProcessPool of the standard library.

This module is imported with the first such error, because the standard library's class imports all of multiprocessing. That import fails
while the program ends. BrokenExecutor then replaces the class, because a program that has not imported BrokenProcessPool cannot catch it
by name.
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
    except RuntimeError:  # its module registers an exit handler, and the program is ending
        BrokenProcessPool = BrokenExecutor


class ExecutorWorkerLost(errors.WorkerLost, BrokenProcessPool):
    """Each process that started this function crashed."""


class ExecutorUnavailable(errors.UnavailableError, BrokenProcessPool):
    """There was no cluster, or no worker, for too long; or the cluster was closed."""

    of_the_cluster = True


class ExecutorBroken(errors.AbortedError, BrokenProcessPool):
    """The function was not run, or its result cannot be delivered, for a reason outside the function; the message names it."""

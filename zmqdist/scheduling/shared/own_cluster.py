"""The cluster whose work this process, or this thread, runs. With it a function that schedules
functions finds its own cluster.

Whatever runs the work of programs (a slot, the process of an actor) calls `enter` before it runs
code of users. In a process that runs one program's code at a time all threads see the entry; a slot
that is a thread has an entry of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from zmqdist.scheduling.shared import remote_results
from zmqdist.transport.credentials import Credentials


@dataclass(eq=False)
class OwnCluster:
    """The cluster, and the place in it.

    Attributes:
      dispatcher: "host:port" of the dispatcher.
      credentials: the places of the secrets with which this process may schedule work.
      safe_only: returns whether the program whose work runs accepts results in the safe form only.
      at_end: functions to call when this process, or this thread, runs no more work.
    """

    dispatcher: str
    credentials: Credentials
    safe_only: Callable[[], bool]
    at_end: list[Callable[[], object]] = field(default_factory=list)

    def end(self) -> None:
        """Record that this process, or this thread, runs no more work."""
        for function in self.at_end:
            function()


class _OfThread(threading.local):
    cluster: OwnCluster | None = None


_of_thread = _OfThread()
_of_process: OwnCluster | None = None


def enter(cluster: OwnCluster, *, whole_process: bool) -> None:
    """Record the cluster of this process, or with `whole_process=False` that of this thread."""
    global _of_process
    if whole_process:
        _of_process = cluster
    else:
        _of_thread.cluster = cluster


def present() -> OwnCluster | None:
    """Return the cluster whose work this thread runs; None in a program of its own."""
    return _of_thread.cluster or _of_process


def of_slot(dispatcher: str, credentials: Credentials) -> OwnCluster:
    """Return the entry of a slot, whose functions the calling thread will run."""
    state = remote_results.of_thread.__dict__  # that of this thread, for all of its threads
    return OwnCluster(dispatcher, credentials, lambda: bool(state.get("safe_only")))

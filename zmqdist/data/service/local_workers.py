"""The workers of this process, from which readers in the same process take elements by
reference.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from zmqdist.transport.endpoint import split

if TYPE_CHECKING:
    from zmqdist.data.service.worker.runtime import TaskThreads


_workers: dict[int, TaskThreads] = {}
_lock = threading.Lock()


def add(incarnation: int, worker: TaskThreads) -> None:
    """Record a worker of this process, so that readers of this process find it."""
    with _lock:
        _workers[incarnation] = worker


def remove(incarnation: int) -> None:
    """Forget a worker that `add` has recorded. Does nothing if there is no such worker."""
    with _lock:
        _workers.pop(incarnation, None)


def find(incarnation: int) -> TaskThreads | None:
    """Return the worker with this incarnation, or None if it is not in this process."""
    with _lock:
        return _workers.get(incarnation)


def has_worker_of(dispatcher: str, state: int = 0) -> bool:
    """Return whether this process has a worker that was started with the address `dispatcher`, or
    whose tasks belong to the durable state with the random number `state`.
    """
    with _lock:
        workers = list(_workers.values())
    return any(
        split(worker.dispatcher) == split(dispatcher) or worker.state == state > 0
        for worker in workers
    )


os.register_at_fork(after_in_child=_workers.clear)

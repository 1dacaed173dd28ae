"""The workers of this process: readers beside them take elements from hand to hand."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from zmqdist.transport.address import split

if TYPE_CHECKING:
    from zmqdist.data.service.worker import TaskThreads

_workers: dict[int, TaskThreads] = {}
_lock = threading.Lock()


def add(life: int, worker: TaskThreads) -> None:
    """From now on readers of this process find this worker."""
    with _lock:
        _workers[life] = worker


def remove(life: int) -> None:
    """Not any more."""
    with _lock:
        _workers.pop(life, None)


def find(life: int) -> TaskThreads | None:
    """The worker with this life, if it is one of this process."""
    with _lock:
        return _workers.get(life)


def some(dispatcher: str, state: int = 0) -> bool:
    """Whether there is any of this dispatcher: one that was started with its address, or has the number of its state."""
    with _lock:
        workers = list(_workers.values())
    return any(split(each.dispatcher) == split(dispatcher) or each.state == state > 0 for each in workers)


os.register_at_fork(after_in_child=_workers.clear)

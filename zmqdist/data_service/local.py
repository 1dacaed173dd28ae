"""The workers of this process: readers beside them take elements from hand to hand."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zmqdist.data_service.worker import Tasks

_workers: dict[int, Tasks] = {}
_lock = threading.Lock()


def add(life: int, worker: Tasks) -> None:
    """From now on readers of this process find this worker."""
    with _lock:
        _workers[life] = worker


def remove(life: int) -> None:
    """Not any more."""
    with _lock:
        _workers.pop(life, None)


def find(life: int) -> Tasks | None:
    """The worker with this life, if it is one of this process."""
    with _lock:
        return _workers.get(life)


def some() -> bool:
    """Whether there is any."""
    with _lock:
        return bool(_workers)


os.register_at_fork(after_in_child=_workers.clear)

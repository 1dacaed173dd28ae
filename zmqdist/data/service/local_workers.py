"""The workers of this process: readers beside them take elements from hand to hand."""

from __future__ import annotations

import os
import threading
from typing import Protocol

from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.worker.element_replies import ElementReply
from zmqdist.transport.address import split


class LocalWorker(Protocol):
    """A worker whose tasks are threads of this process.

    Attributes:
      dispatcher: the address that it was started with.
      state: number of the dispatcher's state that its tasks belong to.
    """

    dispatcher: str
    state: int

    def ask(self, state: int, number: int, wanted: Wanted, reply: ElementReply) -> None:
        """Have a task answer a reader; from any thread."""

    def delete(self, number: int) -> None:
        """End a task that only its caller read; from any thread."""


_workers: dict[int, LocalWorker] = {}
_lock = threading.Lock()


def add(incarnation: int, worker: LocalWorker) -> None:
    """From now on readers of this process find this worker."""
    with _lock:
        _workers[incarnation] = worker


def remove(incarnation: int) -> None:
    """Not any more."""
    with _lock:
        _workers.pop(incarnation, None)


def find(incarnation: int) -> LocalWorker | None:
    """The worker with this life, if it is one of this process."""
    with _lock:
        return _workers.get(incarnation)


def has_worker_of(dispatcher: str, state: int = 0) -> bool:
    """Whether there is any of this dispatcher: one that was started with its address, or has the number of its state."""
    with _lock:
        workers = list(_workers.values())
    return any(split(each.dispatcher) == split(dispatcher) or each.state == state > 0 for each in workers)


os.register_at_fork(after_in_child=_workers.clear)

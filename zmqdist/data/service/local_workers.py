"""The workers of this process, from which readers in the same process take elements by
reference.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from zmqdist import platforms
from zmqdist.data.service.reader.delivery import Demand
from zmqdist.transport.endpoint import split

if TYPE_CHECKING:
    from zmqdist.data.service.worker.task_runner import ElementReply


class LocalWorker(Protocol):
    """A worker whose tasks are threads of this process.

    Attributes:
      dispatcher: the dispatcher's address with which the worker was started.
      state: the random number that identifies the dispatcher's durable state, which has the
        worker's tasks.
    """

    dispatcher: str
    state: int

    def ask(self, state: int, number: int, demand: Demand, reply: ElementReply) -> None:
        """Have task `number` of the durable state `state` reply to a reader's request. Any thread
        may call this."""

    def delete(self, number: int) -> None:
        """Delete task `number`, which only the calling reader reads. Any thread may call this."""


_workers: dict[int, LocalWorker] = {}
_lock = threading.Lock()


def add(incarnation: int, worker: LocalWorker) -> None:
    """Record a worker of this process, so that readers of this process find it."""
    with _lock:
        _workers[incarnation] = worker


def remove(incarnation: int) -> None:
    """Forget a worker that `add` has recorded. Does nothing if there is no such worker."""
    with _lock:
        _workers.pop(incarnation, None)


def find(incarnation: int) -> LocalWorker | None:
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


platforms.register_at_fork(after_in_child=_workers.clear)

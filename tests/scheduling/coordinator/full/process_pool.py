"""zmqdist's Executor with the constructor of the standard library's ProcessPoolExecutor, for that
one's own tests."""

from __future__ import annotations

import logging
import logging.handlers
from typing import Any

import zmqdist as zd
from tests.scheduling.work import until

_clusters: list[zd.local_cluster] = []
_handlers: list[logging.Handler] = []
_log = logging.getLogger("zmqdist.coordinator")


def cluster() -> zd.local_cluster:
    """One for all tests of this process, of as many workers as the tests have."""
    if not _clusters:
        _clusters.append(zd.local_cluster(workers=5))
    return _clusters[0]


def close() -> None:
    while _handlers:
        _log.removeHandler(_handlers.pop())
    while _clusters:
        _clusters.pop().close()


class _Into(logging.handlers.QueueHandler):
    """A record is in the queue, and not with the thread that feeds it, when the next step is
    taken.
    """

    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue.put(record)
        until(lambda: not self.queue.empty())  # type: ignore[attr-defined]


class ProcessPoolExecutor(zd.Executor):
    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: Any = None,
        initializer: Any = None,
        initargs: Any = (),
    ) -> None:
        if initargs and type(initargs[0]).__name__ == "Queue":
            # Children inherit it, and log into it. An Executor logs what its initializer raises in
            # the program.
            _handlers.append(_Into(initargs[0]))
            _log.addHandler(_handlers[-1])
            initargs = ()
        super().__init__(
            cluster(), max_workers=max_workers, initializer=initializer, initargs=initargs
        )
        if max_workers is not None and initializer is None:
            self.submit(int).result()  # connected, as a pool whose processes are there

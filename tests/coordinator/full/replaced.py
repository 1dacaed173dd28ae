"""zmqdist's Executor with the constructor of the standard library's ProcessPoolExecutor, for that one's own tests."""

from __future__ import annotations

import logging
import logging.handlers
from typing import Any

import zmqdist as zd

_clusters: list[zd.local_cluster] = []


def cluster() -> zd.local_cluster:
    """One for all tests of this process, of as many workers as the tests have."""
    if not _clusters:
        _clusters.append(zd.local_cluster(workers=5))
    return _clusters[0]


def close() -> None:
    while _clusters:
        _clusters.pop().close()


class ProcessPoolExecutor(zd.Executor):
    def __init__(
        self, max_workers: int | None = None, mp_context: Any = None, initializer: Any = None, initargs: Any = ()
    ) -> None:
        if initargs and type(initargs[0]).__name__ == "Queue":
            # Children inherit it, and log into it. An Executor logs what its initializer raises in the program.
            logging.getLogger("zmqdist.coordinator").addHandler(logging.handlers.QueueHandler(initargs[0]))
            initargs = ()
        super().__init__(cluster(), max_workers=max_workers, initializer=initializer, initargs=initargs)
        if max_workers is not None and initializer is None:
            self.submit(int).result()  # connected, as a pool whose processes are there

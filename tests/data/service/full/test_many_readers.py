"""Many readers, each with a job of its own: the processes of a worker stay bounded."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.data.service.helpers import serving
from tests.data.service.worker.test_task_process import process_of, read_rest
from zmqdist.blas_threads import cores
from zmqdist.data.dataset import Dataset
from zmqdist.limits import TASK_PROCESSES_PER_CORE

READERS = 20
WORKERS = 2
ELEMENTS = 10_000
AHEAD = 400
"""Elements that a reader requests ahead. Without a bound it may hold all of them when a process is
killed."""
TAKEN = 10


def test_readers_share_few_processes() -> None:
    with serving(WORKERS) as service:
        everybody = threading.Barrier(READERS + 1, timeout=50.0)
        running: set[int] = set()
        killed: set[int] = set()

        def read(_: int) -> int:
            """Return how many elements came after the death of a process."""
            dataset = service.dealt(
                Dataset.range(ELEMENTS).map(process_of), max_outstanding_requests=AHEAD
            )
            with iter(dataset) as iterator:
                running.update(int(next(iterator)) for _ in range(TAKEN))
                everybody.wait()
                everybody.wait()  # meanwhile a process is killed
                pids, _ = read_rest(iterator)
            assert set(pids) - killed
            return len(pids)

        with ThreadPoolExecutor(READERS) as pool:
            reading = [pool.submit(read, number) for number in range(READERS)]
            everybody.wait()
            first = set(running)
            killed.add(min(first))
            os.kill(min(first), signal.SIGKILL)
            everybody.wait()
            counts = [future.result() for future in reading]
    assert len(first) <= WORKERS * TASK_PROCESSES_PER_CORE * cores()
    assert len(first) < READERS
    # a reader without a task in the killed process lost nothing
    assert max(counts) == ELEMENTS - TAKEN

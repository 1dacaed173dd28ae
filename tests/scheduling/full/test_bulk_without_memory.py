"""Large results without shared memory, with a full pool, with little memory, and after the end of
their worker."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.shared import store
from zmqdist.transport import shm_pool
from zmqdist.transport.shm_pool import this_pool

MIB = 2**20


def echo(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array


@pytest.mark.timeout(60)
def test_result_outlives_its_slot_and_worker() -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        back = coordinator.schedule(echo, (np.arange(MIB),)).fetch()
        slot = coordinator.schedule(os.getpid).fetch()
        os.kill(slot, signal.SIGKILL)
        cluster.kill_worker(0)
        assert np.array_equal(back, np.arange(MIB))
        back[:] = 0
        del back


@pytest.mark.timeout(60)
def test_payloads_arrive_without_shared_memory(no_shared_memory: None) -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        assert this_pool() is None
        array = np.arange(MIB)
        back = coordinator.schedule(echo, (array,)).fetch()
        assert np.array_equal(back, array)
        back[:] = 0
        frozen = zd.freeze(array)
        assert (
            coordinator.fetch([coordinator.schedule(np.sum, (frozen,)) for _ in range(4)])
            == [array.sum()] * 4
        )


@pytest.mark.timeout(60)
def test_full_pool_costs_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shm_pool.POOL_VARIABLE, "64")
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        kept = [
            coordinator.schedule(np.full, (8 * MIB, number, np.uint8)).fetch()
            for number in range(12)
        ]
        assert [(array[0], array[-1], array.size) for array in kept] == [
            (n, n, 8 * MIB) for n in range(12)
        ]
        kept.clear()


@pytest.mark.timeout(60)
def test_result_without_memory_fails_its_work_only(
    no_shared_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = iter([True, True])

    def empty(*args: Any) -> Any:
        if next(refused, False):
            raise MemoryError("no memory for a result")
        return np.zeros(*args)

    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        monkeypatch.setattr(
            store,
            "np",
            type(
                "numpy", (), {"empty": staticmethod(empty), "copyto": np.copyto, "uint8": np.uint8}
            ),
        )
        values = [coordinator.schedule(np.full, (MIB, number)) for number in range(4)]
        outcomes = [value.exception(30) for value in values]
        assert sorted(str(error).count("no memory for a result") for error in outcomes) == [
            0,
            0,
            1,
            1,
        ]
        with pytest.raises(errors.UnavailableError):
            coordinator.join()

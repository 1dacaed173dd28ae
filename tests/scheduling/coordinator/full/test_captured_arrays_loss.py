"""Large arrays that functions capture, where a worker dies and where one joins later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.work import begun, go, until, waits
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.transport import shm_pool

SIZE = 2**18


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "chunks"])
@pytest.mark.timeout(90)
def test_a_worker_in_the_place_of_a_dead_one_and_one_that_joins_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    if not shared:
        monkeypatch.setenv(shm_pool.POOL_VARIABLE, "off")
        monkeypatch.setattr(shm_pool, "_pool", None)
        monkeypatch.setattr(shm_pool, "_tried", False)
    array = np.ones(SIZE)

    def total(number: int) -> float:
        waits(tmp_path, str(number))
        return float(array.sum()) + number

    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        values = coordinator.map(total, range(4))
        until(lambda: begun(tmp_path))
        array[:] = 99
        cluster.kill_worker(0)
        cluster.restart_worker(0)
        cluster.add_worker()
        until(lambda: len(set(begun(tmp_path))) == 3)
        go(tmp_path)
        assert coordinator.fetch(values) == [float(SIZE) + number for number in range(4)]
        assert coordinator.snapshot().held.copies == 1
        until(lambda: coordinator.snapshot().held.parts == 0)

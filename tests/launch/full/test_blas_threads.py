"""The threads that NumPy's BLAS starts in each slot: counted while a slot multiplies."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

import zmqdist as zd
from tests.launch.helpers import FILE, Launched
from zmqdist import blas_threads
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.shared.config import WorkerConfig
from zmqdist.servers.worker_server import WorkerServer


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in blas_threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def started_by_a_product() -> int:
    """Return how many threads BLAS starts in this process for a large product of matrices."""
    before = set(os.listdir("/proc/self/task"))
    square = np.ones((512, 512), np.float32)
    assert (square @ square)[0, 0] == 512
    return len(set(os.listdir("/proc/self/task")) - before)


needs_cores = pytest.mark.skipif(
    blas_threads.cores() < 2, reason="BLAS starts no thread where there is one core"
)


@needs_cores
def test_slots_share_cores() -> None:
    slots = blas_threads.cores()
    with zd.local_cluster(workers=slots) as cluster, ClusterCoordinator(cluster) as coordinator:
        assert coordinator.schedule(started_by_a_product).get(30) == 0
        rows = cluster.dispatcher.snapshot().workers
    assert {row.threads_per_slot for row in rows} == {1}


@needs_cores
def test_single_slot_has_all_cores() -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        assert coordinator.schedule(started_by_a_product).get(30) >= 1
        assert coordinator.schedule(os.getenv, ("OMP_NUM_THREADS",)).get(30) == str(
            blas_threads.cores()
        )


@needs_cores
def test_user_variable_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with zd.local_cluster(workers=2) as cluster, ClusterCoordinator(cluster) as coordinator:
        assert coordinator.schedule(started_by_a_product).get(30) == 1
        assert coordinator.schedule(os.getenv, ("OPENBLAS_NUM_THREADS",)).get(30) is None


@needs_cores
def test_slots_bounded_despite_imported_numpy() -> None:
    with (
        zd.local_cluster(workers=0) as cluster,
        WorkerServer(
            WorkerConfig(
                cluster.dispatcher.address,
                processes=True,
                threads_per_slot=1,
                token_file=cluster.credentials.token_file,
            )
        ),
        ClusterCoordinator(cluster) as coordinator,
    ):
        assert coordinator.schedule(started_by_a_product).get(30) == 0


PROGRAM = """
    import os
    import numpy as np
    from zmqdist.coordinator import ClusterCoordinator

    def started():
        before = set(os.listdir("/proc/self/task"))
        np.ones((512, 512), np.float32) @ np.ones((512, 512), np.float32)
        return len(set(os.listdir("/proc/self/task")) - before), os.environ.get("OMP_NUM_THREADS")

    with ClusterCoordinator() as coordinator:
        print("started", coordinator.schedule(started).get(30))
"""


@needs_cores
@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("count: 1, threads_per_slot: 1", "started (0, '1')"),
        ("count: 1, threads_per_slot: 2", "started (1, '2')"),
        ('count: 2, env: {OMP_NUM_THREADS: "2"}', "started (1, '2')"),
    ],
)
def test_file_bounds_threads_per_slot(
    launch: Callable[..., Launched], keys: str, line: str
) -> None:
    launched = launch(PROGRAM, FILE.replace("count: 2", keys))
    assert launched.saw("started") == line
    assert launched.ends() == 0

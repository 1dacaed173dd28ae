"""Results that are here when the cluster is not any more."""

from __future__ import annotations

import numpy as np

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator


def test_a_ready_value_survives_the_death_of_all_workers_and_of_the_dispatcher() -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        values = [coordinator.schedule(np.full, (size, 7.0)) for size in (3, 3_000_000)]
        coordinator.join(20)
        cluster.kill_worker(0)
        cluster.dispatcher.stop()
        assert [float(value.get(20).sum()) for value in values] == [21.0, 21_000_000.0]
    # also when the coordinator has been closed
    assert [len(value.get()) for value in values] == [3, 3_000_000]

"""Scheduling functions on a cluster: `ClusterCoordinator`, `RemoteValue`, `PerWorkerValues`, and where a function runs."""

from zmqdist.coordinator.coordinator import ClusterCoordinator
from zmqdist.coordinator.per_worker import PerWorkerValues
from zmqdist.coordinator.values import RemoteValue, RemoteValueStatus
from zmqdist.running import get_current_worker_index, get_num_workers

PerWorkerValue = PerWorkerValues
experimental_get_current_worker_index = get_current_worker_index

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "RemoteValueStatus",
    "experimental_get_current_worker_index",
    "get_current_worker_index",
    "get_num_workers",
]

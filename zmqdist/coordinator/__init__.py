"""Scheduling functions on a cluster: `ClusterCoordinator`, `RemoteValue`, `Executor`."""

from zmqdist.coordinator.coordinator import ClusterCoordinator
from zmqdist.coordinator.values import RemoteValue, RemoteValueStatus

__all__ = ["ClusterCoordinator", "RemoteValue", "RemoteValueStatus"]

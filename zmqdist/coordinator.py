"""Public names for scheduling functions: `ClusterCoordinator`, its values, and the index of the
worker that runs a function."""

from zmqdist.scheduling.coordinator import metrics
from zmqdist.scheduling.coordinator.actor_groups import ActorGroup
from zmqdist.scheduling.coordinator.actors import ActorHandle
from zmqdist.scheduling.coordinator.completion import AsCompleted
from zmqdist.scheduling.coordinator.coordinator import ClusterCoordinator
from zmqdist.scheduling.coordinator.per_worker import PerSlot, PerWorkerValues
from zmqdist.scheduling.coordinator.remote_value import RemoteValue, RemoteValueStatus
from zmqdist.scheduling.coordinator.submitter import Submitter
from zmqdist.task_context import get_current_worker_index, get_num_workers
from zmqdist.tasks import coordinator_utils as utils
from zmqdist.wire.trusted import send_by_value

PerWorkerValue = PerWorkerValues
experimental_get_current_worker_index = get_current_worker_index

__all__ = [
    "ActorGroup",
    "ActorHandle",
    "AsCompleted",
    "ClusterCoordinator",
    "PerSlot",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "RemoteValueStatus",
    "Submitter",
    "experimental_get_current_worker_index",
    "get_current_worker_index",
    "get_num_workers",
    "metrics",
    "send_by_value",
    "utils",
]
__dir__ = __all__.copy  # dir() and completion show no other names

"""The public names of the data service: its servers, and the functions that send a pipeline to the
servers.

Each name is imported on first use. Importing all names here would make an import cycle, because the
servers import pipelines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqdist.lazy_names import lazy_names

if TYPE_CHECKING:
    from zmqdist.data.service.client import distribute, from_dataset_id, register_dataset
    from zmqdist.data.service.policy import CrossTrainerCache, ShardingPolicy
    from zmqdist.data.service.snapshots.distributed_save import distributed_save
    from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
    from zmqdist.servers.dispatch_server import DispatchServer
    from zmqdist.servers.worker_server import WorkerServer

_MODULES = {
    "_distribute": "zmqdist.data.service.client",
    "_from_dataset_id": "zmqdist.data.service.client",
    "_register_dataset": "zmqdist.data.service.client",
    "CrossTrainerCache": "zmqdist.data.service.policy",
    "DispatchServer": "zmqdist.servers.dispatch_server",
    "DispatcherConfig": "zmqdist.scheduling.shared.config",
    "ShardingPolicy": "zmqdist.data.service.policy",
    "WorkerConfig": "zmqdist.scheduling.shared.config",
    "WorkerServer": "zmqdist.servers.worker_server",
    "distribute": "zmqdist.data.service.client",
    "distributed_save": "zmqdist.data.service.snapshots.distributed_save",
    "from_dataset_id": "zmqdist.data.service.client",
    "register_dataset": "zmqdist.data.service.client",
}


if not TYPE_CHECKING:  # a wrong name is an error for type checkers
    __getattr__ = lazy_names("zmqdist.data.service", _MODULES)

__all__ = [
    "CrossTrainerCache",
    "DispatchServer",
    "DispatcherConfig",
    "ShardingPolicy",
    "WorkerConfig",
    "WorkerServer",
    "distribute",
    "distributed_save",
    "from_dataset_id",
    "register_dataset",
]
__dir__ = __all__.copy  # dir() and completion show no other names

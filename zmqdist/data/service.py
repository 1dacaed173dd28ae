"""The data service under its public names: dispatcher, workers, and what sends a pipeline to them.

The names load on first use, by text: pipelines stand below the servers that run them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zmqdist.data_service.client import distribute, from_dataset_id, register_dataset
    from zmqdist.data_service.policy import CrossTrainerCache, ShardingPolicy
    from zmqdist.dispatch.config import DispatcherConfig, WorkerConfig
    from zmqdist.dispatch.server import DispatchServer
    from zmqdist.dispatch.worker import WorkerServer

_WHERE = {
    "_distribute": "zmqdist.data_service.client",
    "_from_dataset_id": "zmqdist.data_service.client",
    "_register_dataset": "zmqdist.data_service.client",
    "CrossTrainerCache": "zmqdist.data_service.policy",
    "DispatchServer": "zmqdist.dispatch.server",
    "DispatcherConfig": "zmqdist.dispatch.config",
    "ShardingPolicy": "zmqdist.data_service.policy",
    "WorkerConfig": "zmqdist.dispatch.config",
    "WorkerServer": "zmqdist.dispatch.worker",
    "distribute": "zmqdist.data_service.client",
    "from_dataset_id": "zmqdist.data_service.client",
    "register_dataset": "zmqdist.data_service.client",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'zmqdist.data.service' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "CrossTrainerCache",
    "DispatchServer",
    "DispatcherConfig",
    "ShardingPolicy",
    "WorkerConfig",
    "WorkerServer",
    "distribute",
    "from_dataset_id",
    "register_dataset",
]

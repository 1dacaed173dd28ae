"""The data service and the constants under their names in tf.data.experimental. They are the same
objects as in `zmqdist.data.service` and `zmqdist.data.constants`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zmqdist.data.constants import AUTOTUNE, INFINITE_CARDINALITY, SHARD_HINT, UNKNOWN_CARDINALITY

if TYPE_CHECKING:
    from zmqdist.data.experimental import service
    from zmqdist.data.service.snapshots.distributed_save import distributed_save


def __getattr__(name: str) -> Any:
    if name == "service":
        return importlib.import_module("zmqdist.data.experimental.service")
    if name == "distributed_save":
        return importlib.import_module("zmqdist.data.service").distributed_save
    raise AttributeError(f"module 'zmqdist.data.experimental' has no attribute {name!r}")


__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "distributed_save",
    "service",
]
__dir__ = __all__.copy  # dir() and completion show no other names

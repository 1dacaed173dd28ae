"""The data service and the constants under their names in tf.data.experimental. They are the same
objects as in `zmqdist.data.service` and `zmqdist.data.constants`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqdist.data.constants import AUTOTUNE, INFINITE_CARDINALITY, SHARD_HINT, UNKNOWN_CARDINALITY
from zmqdist.lazy_names import lazy_names

if TYPE_CHECKING:
    from zmqdist.data.experimental import service
    from zmqdist.data.service.snapshots.distributed_save import distributed_save


_WHERE = {"distributed_save": "zmqdist.data.service.snapshots.distributed_save"}

if not TYPE_CHECKING:  # a wrong name is an error for type checkers
    __getattr__ = lazy_names("zmqdist.data.experimental", _WHERE, ("service",))

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "distributed_save",
    "service",
]
__dir__ = __all__.copy  # dir() and completion show no other names

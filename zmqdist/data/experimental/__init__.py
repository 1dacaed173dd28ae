"""The names of tf.data.experimental. The service and the constants are the same objects as in
`zmqdist.data.service` and `zmqdist.data.constants`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqdist.data.constants import AUTOTUNE, INFINITE_CARDINALITY, SHARD_HINT, UNKNOWN_CARDINALITY
from zmqdist.lazy_names import lazy_names

if TYPE_CHECKING:
    from zmqdist.data.csv_files import CsvDataset, make_csv_dataset
    from zmqdist.data.experimental import service
    from zmqdist.data.options import (
        AutoShardPolicy,
        AutotuneAlgorithm,
        AutotuneOptions,
        DistributeOptions,
        ExternalStatePolicy,
        OptimizationOptions,
        ServiceOptions,
        ThreadingOptions,
    )
    from zmqdist.data.record_files import TFRecordWriter, assert_cardinality
    from zmqdist.data.service.snapshots.distributed_save import distributed_save


_WHERE = {
    "distributed_save": "zmqdist.data.service.snapshots.distributed_save",
    **dict.fromkeys(("CsvDataset", "make_csv_dataset"), "zmqdist.data.csv_files"),
    **dict.fromkeys(("TFRecordWriter", "assert_cardinality"), "zmqdist.data.record_files"),
    **dict.fromkeys(
        (
            "AutoShardPolicy",
            "AutotuneAlgorithm",
            "AutotuneOptions",
            "DistributeOptions",
            "ExternalStatePolicy",
            "OptimizationOptions",
            "ServiceOptions",
            "ThreadingOptions",
        ),
        "zmqdist.data.options",
    ),
}

if not TYPE_CHECKING:  # a wrong name is an error for type checkers
    __getattr__ = lazy_names("zmqdist.data.experimental", _WHERE, ("service",))

__all__ = [
    "AUTOTUNE",
    "AutoShardPolicy",
    "AutotuneAlgorithm",
    "AutotuneOptions",
    "CsvDataset",
    "DistributeOptions",
    "ExternalStatePolicy",
    "INFINITE_CARDINALITY",
    "OptimizationOptions",
    "SHARD_HINT",
    "ServiceOptions",
    "TFRecordWriter",
    "ThreadingOptions",
    "UNKNOWN_CARDINALITY",
    "assert_cardinality",
    "distributed_save",
    "make_csv_dataset",
    "service",
]
__dir__ = __all__.copy  # dir() and completion show no other names

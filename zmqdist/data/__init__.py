"""Pipelines of elements (`Dataset`) and the service that runs them in other processes (`service`).

Each class and module is imported on first use, so that a program without the service does not load
the modules for sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqdist.data.constants import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from zmqdist.lazy_names import lazy_names

if TYPE_CHECKING:
    from zmqdist.data import experimental, service
    from zmqdist.data.composites import Ragged, Sparse
    from zmqdist.data.dataset import Dataset
    from zmqdist.data.options import Options
    from zmqdist.data.readers import (
        FixedLengthRecordDataset,
        ParquetDataset,
        TextLineDataset,
        TFRecordDataset,
    )

_MODULES = {
    "Dataset": "zmqdist.data.dataset",
    "FixedLengthRecordDataset": "zmqdist.data.readers",
    "Options": "zmqdist.data.options",
    "ParquetDataset": "zmqdist.data.readers",
    "Ragged": "zmqdist.data.composites",
    "Sparse": "zmqdist.data.composites",
    "TFRecordDataset": "zmqdist.data.readers",
    "TextLineDataset": "zmqdist.data.readers",
}


if not TYPE_CHECKING:  # a wrong name is an error for type checkers
    __getattr__ = lazy_names("zmqdist.data", _MODULES, ("experimental", "service"))

__all__ = [
    "AUTOTUNE",
    "Dataset",
    "FixedLengthRecordDataset",
    "INFINITE_CARDINALITY",
    "Options",
    "ParquetDataset",
    "Ragged",
    "Sparse",
    "TFRecordDataset",
    "TextLineDataset",
    "UNKNOWN_CARDINALITY",
    "experimental",
    "service",
]
__dir__ = __all__.copy  # dir() and completion show no other names

"""Pipelines of elements (`Dataset`) and the service that runs them in other processes (`service`).

Each class and module is imported on first use, so that a program without the service does not load
the modules for sockets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zmqdist.data.constants import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

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


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    elif name in ("experimental", "service"):
        value = importlib.import_module(f"zmqdist.data.{name}")
    else:
        raise AttributeError(f"module 'zmqdist.data' has no attribute {name!r}")
    globals()[name] = value
    return value


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

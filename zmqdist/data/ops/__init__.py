"""The operators, a module for each family; all of them are in `OPERATORS`."""

from zmqdist.data.ops import (
    background,
    batching,
    caching,
    combining,
    elementwise,
    filtering,
    padding,
    parallel,
    parquet,
    readers,
    resampling,
    saving,
    shuffling,
    sources,
    windows,
)
from zmqdist.data.ops.base import OPERATORS

__all__ = [
    "OPERATORS",
    "background",
    "batching",
    "caching",
    "combining",
    "elementwise",
    "filtering",
    "padding",
    "parallel",
    "parquet",
    "readers",
    "resampling",
    "saving",
    "shuffling",
    "sources",
    "windows",
]

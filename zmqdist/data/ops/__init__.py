"""The operators, a module for each family; importing it enters all of them into the registry of interfaces.py."""

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

__all__ = [
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

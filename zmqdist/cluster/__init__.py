"""Descriptions of a cluster: jobs, tasks, addresses, and the cluster file. No sockets, no
processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zmqdist.cluster.defs import ClusterDef, ClusterDeviceFilters, JobDef, ServerDef
from zmqdist.cluster.environment import CONFIG_ENV
from zmqdist.cluster.file_sections import (
    DispatcherJob,
    EvaluatorJob,
    Job,
    JobsConfig,
    RuntimeConfig,
    SecurityConfig,
    ServingJob,
    SingleJob,
    WorkerJob,
)
from zmqdist.cluster.spec import ClusterSpec

if TYPE_CHECKING:
    from zmqdist.cluster.config import ClusterConfig, schema

__all__ = [
    "ClusterSpec",
    "ClusterDef",
    "JobDef",
    "ServerDef",
    "ClusterDeviceFilters",
    "ClusterConfig",
    "JobsConfig",
    "DispatcherJob",
    "Job",
    "EvaluatorJob",
    "ServingJob",
    "SingleJob",
    "WorkerJob",
    "SecurityConfig",
    "RuntimeConfig",
    "CONFIG_ENV",
    "schema",
]
__dir__ = __all__.copy  # dir() and completion show no other names


def __getattr__(name: str) -> Any:
    """Import the module of cluster files on first use, because most programs never read a cluster
    file and YAML takes 20 ms to import."""
    if name in ("ClusterConfig", "schema"):
        from zmqdist.cluster import config

        return getattr(config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The options that constructors pass on to others, for type checkers: no module imports this one at
run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class CoordinatorOptions(TypedDict, total=False):
    """The options of a ClusterCoordinator."""

    queue_max: int | None
    queue_bytes_max: int | None
    cancel_grace_s: float | None
    cluster_lost_limit_s: float
    worker_recovery_timeout_s: float
    results: str | None


class DispatcherOptions(TypedDict, total=False):
    """The fields of a DispatcherConfig that are options of a local_cluster."""

    lease_s: float
    reconnect_grace_s: float
    cancel_grace_s: float
    attempts_max: int
    growth_limit_s: float
    port: int
    protocol: str | None
    work_dir: str | None
    fault_tolerant_mode: bool
    worker_addresses: Sequence[str] | None
    job_gc_check_interval_ms: int | None
    job_gc_timeout_ms: int | None
    worker_timeout_ms: int | None
    worker_max_concurrent_snapshots: int | None
    client_timeout_ms: int | None
    gc_dynamic_sharding_jobs: bool
    deployment_mode: str | None
    host: str
    advertise: str | None

"""The cluster of `zmqdist launch` in the processes that it started, for resolvers that would look elsewhere.

The launcher has decided which tasks there are and which of them a process is. What a platform says about the same process (a rank, the
labels of pods) then describes no cluster of zmqdist, so a resolver that was told no source of its own gives the launcher's answer.
"""

from __future__ import annotations

import os

from zmqdist.cluster.environment import CONFIG_ENV, TF_CONFIG_ENV, is_json
from zmqdist.cluster.resolvers.base import ClusterResolver
from zmqdist.cluster.resolvers.tf_config import TFConfigClusterResolver


def launched_cluster() -> TFConfigClusterResolver | None:
    """Return a resolver of the cluster in which `zmqdist launch` started this process; None if it did not."""
    path = os.environ.get(CONFIG_ENV)
    if not path or is_json(path) or TF_CONFIG_ENV not in os.environ:
        return None
    from zmqdist.cluster import ClusterConfig  # YAML takes 20 ms to import

    config = ClusterConfig.from_environment()
    return None if config is None or config.runtime is None else TFConfigClusterResolver()


def has_no_address(resolver: ClusterResolver, task_type: str | None) -> bool:
    """Return whether the task is of this process's own job and that is not in the cluster.

    Such a task is a program, or a worker of a file that says a count: processes do not connect to it.
    """
    own_job = task_type is None or task_type == resolver.task_type
    return own_job and resolver.task_type not in resolver.cluster_spec().jobs

"""The launcher's cluster, for resolvers that run in a process that `zmqdist launch` has started.

In such a process the launcher has decided which tasks the cluster has and which task the process
runs. The rank of the process, or the labels of its pod, do not describe this cluster. A resolver
therefore describes the launcher's cluster, unless the caller has named another source.
"""

from __future__ import annotations

import os

from zmqdist.cluster.environment import CONFIG_ENV, TF_CONFIG_ENV, is_json
from zmqdist.cluster.resolvers.base import ClusterResolver
from zmqdist.cluster.resolvers.tf_config import TFConfigClusterResolver


def launched_cluster() -> TFConfigClusterResolver | None:
    """Return a resolver of the cluster of `zmqdist launch`, or None if `zmqdist launch` has not
    started this process."""
    path = os.environ.get(CONFIG_ENV)
    if not path or is_json(path) or TF_CONFIG_ENV not in os.environ:
        return None
    from zmqdist.cluster import ClusterConfig  # YAML takes 20 ms to import

    config = ClusterConfig.from_environment()
    return None if config is None or config.runtime is None else TFConfigClusterResolver()


def has_no_address(resolver: ClusterResolver, task_type: str | None) -> bool:
    """Return whether a task belongs to the job of this process and the cluster has no addresses for
    this job.

    Such a task is the program, or a worker of a cluster file that has only a count of workers. No
    process connects to it.

    Args:
      task_type: the job of the task. None means the job of this process.
    """
    own_job = task_type is None or task_type == resolver.task_type
    return own_job and resolver.task_type not in resolver.cluster_spec().jobs

"""What the tests of resolvers share."""

from __future__ import annotations

from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.spec import Tasks

PS = ["ps0:2222", "ps1:2222"]
WORKERS = ["worker0:2222", "worker1:2222", "worker2:2222"]

DEVICES = [  # of five tasks
    "/job:worker1/task:0/device:TPU:0",
    "/job:worker1/task:0/device:TPU:1",
    "/job:worker1/task:0/device:GPU:0",
    "/job:worker1/task:0/device:GPU:1",
    "/job:worker2/task:1/device:TPU:2",
    "/job:worker2/task:2/device:TPU:3",
    "/job:worker2/task:3/device:GPU:2",
    "/job:worker2/task:4/device:GPU:3",
]


def is_cluster(spec: ClusterSpec, expected: dict[str, Tasks]) -> bool:
    """Whether the spec, and what four round trips make of it, is the expected cluster."""
    spec = ClusterSpec(expected)
    ways = (
        spec,
        ClusterSpec(spec),
        ClusterSpec(spec.as_cluster_def()),
        ClusterSpec(spec.as_dict()),
    )
    return all(way == spec and way.as_cluster_def() == spec.as_cluster_def() for way in ways)

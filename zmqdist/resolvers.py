"""Where a program finds its cluster: in its arguments, in variables of its environment, at Slurm, at Kubernetes.

One file a resolver. Each answers the same questions (`base.py`), so that a program that takes a resolver runs anywhere, and one of
your own is a class with two methods; `zmqdist.testing.check_resolver` tells whether it keeps the rules.
"""

from zmqdist.cluster.resolvers.base import ClusterResolver
from zmqdist.cluster.resolvers.kubernetes import ExecutableLocation, KubernetesClusterResolver
from zmqdist.cluster.resolvers.simple import SimpleClusterResolver
from zmqdist.cluster.resolvers.slurm import SlurmClusterResolver
from zmqdist.cluster.resolvers.tf_config import TFConfigClusterResolver
from zmqdist.cluster.resolvers.union import UnionResolver

__all__ = [
    "ClusterResolver",
    "SimpleClusterResolver",
    "UnionResolver",
    "TFConfigClusterResolver",
    "SlurmClusterResolver",
    "KubernetesClusterResolver",
    "ExecutableLocation",
]

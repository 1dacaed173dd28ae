"""Where a program finds its cluster: in its arguments, in variables of its environment, at Slurm, at Kubernetes.

One file a resolver. Each answers the same questions (`base.py`), so that a program that takes a resolver runs anywhere, and one of
your own is a class with two methods; `zmqdist.testing.check_resolver` tells whether it keeps the rules.
"""

from zmqdist.resolvers.base import ClusterResolver
from zmqdist.resolvers.kubernetes import ExecutableLocation, KubernetesClusterResolver
from zmqdist.resolvers.simple import SimpleClusterResolver
from zmqdist.resolvers.slurm import SlurmClusterResolver
from zmqdist.resolvers.tf_config import TFConfigClusterResolver
from zmqdist.resolvers.union import UnionResolver

__all__ = [
    "ClusterResolver",
    "SimpleClusterResolver",
    "UnionResolver",
    "TFConfigClusterResolver",
    "SlurmClusterResolver",
    "KubernetesClusterResolver",
    "ExecutableLocation",
]

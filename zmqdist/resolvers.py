"""Resolvers, which find the cluster of a program: in arguments, in environment variables, from
Slurm, mpirun or torchrun, or in Kubernetes.

All resolvers have the same interface (cluster/resolvers/base.py), so that a program that accepts a
resolver runs on each of these platforms. A resolver of your own is a class with two methods, which
`zmqdist.testing.check_resolver` checks.
"""

from zmqdist.cluster.resolvers.base import ClusterResolver
from zmqdist.cluster.resolvers.kubernetes import ExecutableLocation, KubernetesClusterResolver
from zmqdist.cluster.resolvers.rank import RankClusterResolver
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
    "RankClusterResolver",
    "KubernetesClusterResolver",
    "ExecutableLocation",
]
__dir__ = __all__.copy  # dir() and completion show no other names

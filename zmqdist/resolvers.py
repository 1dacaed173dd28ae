"""Resolvers find the cluster of a program: in arguments, environment variables, Slurm, mpirun or torchrun, or Kubernetes.

Each resolver has a file of its own. All have the same interface (`base.py`), so that a program that accepts a resolver runs anywhere. A
resolver of your own is a class with two methods; `zmqdist.testing.check_resolver` checks it.
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

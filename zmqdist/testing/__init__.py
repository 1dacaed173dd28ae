"""What tests of a cluster need: virtual time, a network with ZeroMQ's failures, a whole cluster in one thread.

from zmqdist.testing import simulate
simulate(seed=1234)        # raises AssertionError when a promise of the machines is broken
"""

from zmqdist.testing.clock import SimClock
from zmqdist.testing.network import SimConnection, SimProcess
from zmqdist.testing.sim_cluster import SimCluster, simulate

__all__ = ["SimClock", "SimCluster", "SimConnection", "SimProcess", "simulate"]

"""Doubles that ship: virtual time, a network with ZeroMQ's failures, and a whole cluster in one thread.

from zmqdist.testing import simulate
simulate(seed=1234)        # raises AssertionError when a promise of the machines is broken

`check_resolver(resolver)` does the same for the rules of cluster resolvers.
"""

from zmqdist.testing.conformance import check_resolver
from zmqdist.testing.simulation.clock import SimClock
from zmqdist.testing.simulation.cluster import SimCluster, simulate
from zmqdist.testing.simulation.network import SimConnection, SimProcess

__all__ = ["SimClock", "SimCluster", "SimConnection", "SimProcess", "check_resolver", "simulate"]

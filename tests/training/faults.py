"""A training program on a cluster of processes whose tasks are killed and started again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import zmqdist as zd
from tests.launch.helpers import eventually
from zmqdist.coordinator import ClusterCoordinator

WITHIN_S = 30.0
PAUSE_S = 0.01


class Program:
    """A training program on a cluster of its own.

    Attributes:
      iterations: how many steps have begun; at ps:0.
      go: steps that wait end when it is 1; at the last ps.
    """

    def __init__(self, cluster: zd.local_cluster) -> None:
        self.size = cluster.workers
        self.cluster = cluster
        heal(cluster)
        self.strategy = zd.ParameterServerStrategy(cluster)
        self.coordinator = ClusterCoordinator(self.strategy, cancel_grace_s=0.2)
        with self.strategy.scope():
            self.iterations, self.go = zd.Variable(0, name="iterations"), zd.Variable(0, name="go")

    def pid(self, task: str) -> int:
        return self.cluster.pids[task]

    def step(self) -> Callable[[], None]:
        iterations = self.iterations

        def step() -> None:
            iterations.assign_add(1)

        return step

    def waiting(self, uses_variables: bool = True) -> Callable[[], None]:
        """A step that does not end before `go`."""
        iterations, go = self.iterations, self.go

        def waiting() -> None:
            iterations.assign_add(1)
            while not uses_variables or go.numpy() == 0:
                threading.Event().wait(PAUSE_S)

        return waiting

    def begun(self, count: int) -> None:
        eventually(lambda: self.iterations.numpy() >= count, f"{count} steps have begun", WITHIN_S)

    def lost(self, *tasks: int) -> None:
        """Wait until the dispatcher misses these workers."""
        assert self.cluster.dispatcher.wait_for(
            lambda there: not any(("worker", index) in there for index in tasks), WITHIN_S
        )

    def works(self) -> None:
        """Three steps, and all is well."""
        before = self.iterations.numpy()
        for _ in range(3):
            self.coordinator.schedule(self.step())
        self.coordinator.join(WITHIN_S)
        assert self.iterations.numpy() == before + 3


def restart(cluster: zd.local_cluster, *names: str) -> None:
    """Start tasks again, all at once."""

    def again(name: str) -> None:
        job, _, index = name.partition(":")
        (cluster.restart_worker if job == "worker" else cluster.restart_ps)(int(index))

    with ThreadPoolExecutor() as pool:
        list(pool.map(again, names))


def heal(cluster: zd.local_cluster) -> None:
    """Start again what the test before has killed."""
    there = [f"worker:{index}" for index in range(cluster.workers)] + [
        f"ps:{index}" for index in range(len(cluster.ps))
    ]
    dead = [name for name in there if name not in cluster.pids]
    if dead:
        restart(cluster, *dead)

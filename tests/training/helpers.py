"""What the tests of training share: a program on a cluster of processes whose tasks are killed and
started again, and variables for checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

import zmqdist as zd
from tests.launch.helpers import eventually
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.parameter_server import ShardedVariable, Variable
from zmqdist.training.checkpoint.manifest import Part
from zmqdist.training.checkpoint.structure import shards_of

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


# -- variables for the tests of checkpoints -----------------------------------------------------------


def variable(value: Any, name: str = "v") -> Variable:
    """A variable of this process."""
    local: Variable = Variable(value, name=name)
    return local


def sharded(whole: Any, shards: int, name: str = "v") -> ShardedVariable:
    """One that is cut into so many shards."""
    pieces = np.array_split(np.asarray(whole), shards)
    return ShardedVariable(
        [Variable(piece, name=f"{name}/part_{i}") for i, piece in enumerate(pieces)], name
    )


def slots_of(target: Variable) -> dict[str, NDArray[Any]]:
    """The slots of an unsharded variable."""
    [shard] = shards_of(target)
    return shard.read().slots


def set_slots(target: Variable, **slots: Any) -> None:
    """Give a variable, or its only shard, these slots: `Adam__m` for "Adam/m"."""
    [shard] = shards_of(target)
    arrays = {name.replace("__", "/"): np.asarray(array) for name, array in slots.items()}
    shard.start_writing(Part(target.numpy(), arrays)).get_value()

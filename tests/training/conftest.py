"""Fixtures of this folder: clusters of servers, in this process or as processes of their own, and
what is connected to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zmqdist as zd
from tests.training.helpers import Program
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.ports import Reserved
from zmqdist.tasks.server import Server
from zmqdist.training.cluster_connection import ClusterConnection, connect

Make = Callable[..., zd.ParameterServerStrategy]

TASK = """
import json, sys
import zmqdist as zd
spec, job, index, config = json.loads(sys.argv[1])
zd.Server(spec, job, index, config=config).join()
"""


class Cluster:
    """Workers and ps at ports that stay theirs.

    Attributes:
      spec: job to addresses.
      threads: whether what is started from now on is a thread here.
    """

    def __init__(self, workers: int, ps: int, threads: bool) -> None:
        self.threads = threads
        self._ports: list[Reserved] = []
        self.spec = {
            "worker": [self.port() for _ in range(workers)],
            "ps": [self.port() for _ in range(ps)],
        }
        self.tasks: dict[tuple[str, int], Any] = {}
        for job, addresses in self.spec.items():
            for index in range(len(addresses)):
                self.start(job, index)

    def port(self) -> str:
        """An address for one more task."""
        self._ports.append(Reserved())
        return self._ports[-1].address

    def start(self, job: str, index: int, config: dict[str, Any] | None = None) -> None:
        """Start a task, or start it again."""
        config = {"worker_processes": False, **(config or {})}
        if self.threads:
            self.tasks[job, index] = Server(self.spec, job, index, config=config)
            return
        message = json.dumps([self.spec, job, index, config])
        self.tasks[job, index] = subprocess.Popen(
            [sys.executable, "-c", TASK, message], start_new_session=True
        )

    def add(self, index: int) -> str:
        """Start one more worker, which no other task knows of. Returns its address."""
        address = self.port()
        self.spec = {
            **self.spec,
            "worker": {**dict(enumerate(self.spec["worker"])), index: address},
        }  # type: ignore[dict-item]
        self.start("worker", index)
        return address

    def kill(self, job: str, index: int) -> None:
        """End a task without a word."""
        task = self.tasks.pop((job, index))
        if isinstance(task, Server):
            task.stop(0.0)
        else:
            task.kill()
            task.wait(30.0)

    def pid(self, job: str, index: int) -> int:
        """Of the process in which a task runs."""
        task = self.tasks[job, index]
        return os.getpid() if isinstance(task, Server) else int(task.pid)

    def ended(self) -> bool:
        """Wait until all tasks have ended by themselves, and in order."""
        return all(
            task.join(30.0) if isinstance(task, Server) else task.wait(30.0) == 0
            for task in self.tasks.values()
        )

    def close(self) -> None:
        """End all."""
        for job, index in list(self.tasks):
            self.kill(job, index)
        for port in self._ports:
            port.close()


@pytest.fixture
def in_threads() -> bool:
    """Whether `cluster` starts threads of this process; in files of full/ it starts processes."""
    return True


@pytest.fixture
def cluster(own_secrets: None, in_threads: bool) -> Iterator[Callable[..., Cluster]]:
    """cluster(workers, ps, threads=in_threads): servers in this process, or processes of their own;
    functions run in their threads."""
    made: list[Cluster] = []

    def make(workers: int, ps: int, threads: bool = in_threads) -> Cluster:
        made.append(Cluster(workers, ps, threads))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def connected() -> Iterator[Callable[..., ClusterConnection]]:
    """connected(source, ...): as `connect`; closed at the end."""
    made: list[ClusterConnection] = []

    def make(*args: Any, **options: Any) -> ClusterConnection:
        made.append(connect(*args, **{"timeout": 60.0, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


# -- clusters that the tests of a module share, and strategies on them, which are closed after each


@pytest.fixture(scope="module")
def threads() -> Iterator[zd.local_cluster]:
    """Two workers and three parameter servers, as threads of this process."""
    with zd.local_cluster(workers=2, ps=3, processes=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def processes() -> Iterator[zd.local_cluster]:
    """Two workers and two parameter servers, each a process."""
    with zd.local_cluster(workers=2, ps=2) as cluster:
        yield cluster


@pytest.fixture
def made(threads: zd.local_cluster) -> Iterator[Make]:
    """made(**options): a strategy on the threads; `cluster=` takes another one."""
    strategies: list[zd.ParameterServerStrategy] = []

    def make(
        partitioner: Any = None, cluster: Any = threads, **options: Any
    ) -> zd.ParameterServerStrategy:
        strategies.append(zd.ParameterServerStrategy(cluster, partitioner, **options))
        return strategies[-1]

    yield make
    for strategy in strategies:
        strategy.close()


@pytest.fixture
def strategy(made: Make) -> zd.ParameterServerStrategy:
    """One on the threads."""
    return made()


@pytest.fixture
def coordinator(strategy: zd.ParameterServerStrategy) -> ClusterCoordinator:
    """Of `strategy`."""
    return ClusterCoordinator(strategy)


@pytest.fixture(scope="module")
def anywhere_cluster(threads: zd.local_cluster) -> zd.local_cluster:
    """The cluster of `anywhere`: threads; in test_in_processes.py processes."""
    return threads


@pytest.fixture
def anywhere(made: Make, anywhere_cluster: zd.local_cluster) -> zd.ParameterServerStrategy:
    """A strategy for tests that test_in_processes.py runs once more."""
    return made(cluster=anywhere_cluster)


@pytest.fixture
def cut_in(made: Make, anywhere_cluster: zd.local_cluster) -> Make:
    """cut_in(n): as `anywhere`, a strategy that cuts into n shards."""
    fixed = zd.partitioners.FixedShardsPartitioner
    return lambda shards, **options: made(fixed(shards), cluster=anywhere_cluster, **options)


# -- clusters of processes, whose tasks are killed; programs on them


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[..., zd.local_cluster]]:
    """clusters(size, **options): so many workers and as many ps, the same cluster for all tests of
    a module."""
    made: dict[int, zd.local_cluster] = {}

    def cluster(size: int, **options: Any) -> zd.local_cluster:
        if size not in made:
            made[size] = zd.local_cluster(workers=size, ps=size, **options)
        return made[size]

    yield cluster
    for each in made.values():
        each.close()


@pytest.fixture
def two(clusters: Callable[..., zd.local_cluster]) -> Iterator[Program]:
    """A program with two workers and two ps."""
    program = Program(clusters(2))
    yield program
    program.strategy.close()


@pytest.fixture
def program(two: Program) -> Program:
    """In full/ also with one worker and one ps."""
    return two

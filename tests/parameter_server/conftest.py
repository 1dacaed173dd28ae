"""Clusters with parameter servers that the tests of a module share, and strategies on them, which are closed after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator

Make = Callable[..., zd.ParameterServerStrategy]


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

    def make(partitioner: Any = None, cluster: Any = threads, **options: Any) -> zd.ParameterServerStrategy:
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


@pytest.fixture(params=["threads", "processes"])
def anywhere(request: pytest.FixtureRequest, made: Make) -> zd.ParameterServerStrategy:
    """A strategy on threads, and one on processes."""
    return made(cluster=request.getfixturevalue(request.param))

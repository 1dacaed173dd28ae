"""Clusters that the tests of a module share: one with threads, which is there at once, and one with
processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator


@pytest.fixture(scope="module")
def threads() -> Iterator[zd.local_cluster]:
    """Three workers with a thread each."""
    with zd.local_cluster(workers=3, processes=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def processes() -> Iterator[zd.local_cluster]:
    """Two workers with a slot process each."""
    with zd.local_cluster(workers=2) as cluster:
        yield cluster


@pytest.fixture
def in_threads(threads: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(threads, cancel_grace_s=0.2, cluster_lost_limit_s=30.0) as coordinator:
        yield coordinator


@pytest.fixture
def in_processes(processes: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(
        processes, cancel_grace_s=0.2, cluster_lost_limit_s=30.0
    ) as coordinator:
        yield coordinator


@pytest.fixture(params=["threads", "processes"])
def in_slots(
    request: pytest.FixtureRequest, threads: zd.local_cluster, processes: zd.local_cluster
) -> Iterator[ClusterCoordinator]:
    cluster = threads if request.param == "threads" else processes
    with ClusterCoordinator(cluster, cancel_grace_s=0.2, cluster_lost_limit_s=30.0) as coordinator:
        yield coordinator


@pytest.fixture
def coordinator(in_threads: ClusterCoordinator) -> ClusterCoordinator:
    """Of a module whose tests run in full/ on processes, too."""
    return in_threads


@pytest.fixture(scope="module")
def three_processes() -> Iterator[zd.local_cluster]:
    """Three workers, a process each."""
    with zd.local_cluster(workers=3) as cluster:
        yield cluster


@pytest.fixture(params=[None, 2], ids=["roomy", "queue of 2"])
def any_queue(
    request: pytest.FixtureRequest, three_processes: zd.local_cluster
) -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(
        three_processes, queue_max=request.param, cancel_grace_s=0.3
    ) as coordinator:
        yield coordinator


@pytest.fixture
def in_three(three_processes: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(three_processes, cancel_grace_s=0.3) as coordinator:
        yield coordinator


@pytest.fixture
def single() -> Iterator[zd.local_cluster]:
    """One worker process, which a test replaces."""
    with zd.local_cluster(workers=1) as cluster:
        yield cluster


@pytest.fixture
def fragile(single: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(single) as coordinator:
        yield coordinator

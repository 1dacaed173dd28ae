"""A child that is forked from a program in the middle of its reading: what lies in the iterator is
the parent's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.data.service.helpers import TestCluster, values
from zmqdist.data import Dataset
from zmqdist.data.service import ShardingPolicy
from zmqdist.errors import FailedPreconditionError

# Tasks go on in the cluster's workers when their readers have gone.
pytestmark = pytest.mark.shares_cluster

PATIENCE_S = 40.0
KINDS: list[dict[str, Any]] = [{}, {"ordered": True}, {"data_transfer_protocol": "zmq"}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with TestCluster(1) as made:
        yield made


def in_child(do: Callable[[], int]) -> int:
    """What `do` returns in a forked child; it is ended when it takes too long."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = do()
        finally:
            os._exit(code)
    timer = threading.Timer(PATIENCE_S, os.kill, (child, 9))
    timer.start()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        timer.cancel()


def asks(iterator: Iterator[Any]) -> Callable[[], int]:
    """Ask twice; returns how often it was refused."""

    def do() -> int:
        refused = 0
        for _ in range(2):
            try:
                next(iterator)
            except FailedPreconditionError as error:
                refused += "forked" in error.message
        return refused

    return do


@pytest.mark.parametrize("options", KINDS)
def test_forked_child_cannot_continue_reader(cluster: TestCluster, options: Any) -> None:
    iterator = iter(cluster.distribute(Dataset.range(10_000), ShardingPolicy.DYNAMIC, **options))
    first = int(next(iterator))
    assert in_child(asks(iterator)) == 2
    assert [first, *map(int, iterator)] == list(range(10_000))


@pytest.mark.parametrize("options", KINDS)
def test_forked_child_drops_iterator_at_once(cluster: TestCluster, options: Any) -> None:
    iterator: Any = iter(
        cluster.distribute(Dataset.range(10_000), ShardingPolicy.DYNAMIC, **options)
    )
    first = int(next(iterator))

    def do() -> int:
        began = time.monotonic()
        iterator.close()
        return 0 if time.monotonic() - began < PATIENCE_S / 2 else 1

    assert in_child(do) == 0
    assert [first, *map(int, iterator)] == list(range(10_000))


def test_forked_child_has_own_iterator(cluster: TestCluster) -> None:
    dataset = cluster.distribute(Dataset.range(10), ShardingPolicy.DYNAMIC)
    with iter(dataset) as iterator:
        next(iterator)
        assert in_child(lambda: len(values(dataset))) == 10


def test_forked_child_has_no_prefetch_thread() -> None:
    with iter(Dataset.range(10_000).prefetch(2)) as iterator:
        assert int(next(iterator)) == 0

        def do() -> int:
            try:
                for _ in range(10):
                    next(iterator)
            except FailedPreconditionError:
                return 1
            return 0

        assert in_child(do) == 1

"""Reading and saving while dispatchers and workers, each a process, are killed: what the faster
tests do not show."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.data.service.helpers import TestCluster, process_cluster, until, worker_process
from tests.data.service.snapshots.test_service import WAIT_S, Gate, gated, loaded
from tests.data.service.test_coordinated import reading
from tests.data.service.test_exactly_once import COUNT, ONCE
from tests.data.service.test_fault_tolerance import DYNAMIC, LONG, take
from zmqdist.data import Dataset
from zmqdist.data.service import ShardingPolicy, distribute
from zmqdist.data.service.snapshots.distributed_save import distributed_save
from zmqdist.errors import UnavailableError


def test_killed_worker_costs_only_its_elements() -> None:
    with process_cluster(2) as (dispatcher, workers):
        iterator = iter(Dataset.range(4 * LONG).apply(distribute(DYNAMIC, dispatcher.address)))
        found = take(iterator, 10)
        workers[0].kill()
        found += [int(each) for each in iterator]
        assert len(set(found)) == len(found) <= 4 * LONG
        workers[0].start()


def test_restarted_worker_repeats_whole_dataset() -> None:
    with process_cluster(1, worker_timeout_ms=60_000) as (dispatcher, workers):
        iterator = iter(
            Dataset.range(LONG).apply(distribute(ShardingPolicy.OFF, dispatcher.address))
        )
        assert take(iterator, 10) == list(range(10))
        workers[0].restart()
        rest = [int(each) for each in iterator]
        again = rest.index(0)
        assert rest[:again] == list(range(10, 10 + again))
        assert rest[again:] == list(range(LONG))


def test_iteration_ends_without_absent_worker() -> None:
    with process_cluster(2) as (dispatcher, workers):
        iterator = iter(
            Dataset.range(LONG).apply(distribute(ShardingPolicy.OFF, dispatcher.address))
        )
        found = take(iterator, 10)
        workers[1].kill()
        found += [int(each) for each in iterator]
        assert all(times in (1, 2) for times in Counter(found).values())
        assert set(found) == set(range(LONG))
        workers[1].start()


def test_dispatcher_and_a_worker_are_killed() -> None:
    with process_cluster(2) as (dispatcher, workers):
        dataset = Dataset.range(COUNT).apply(
            distribute(DYNAMIC, dispatcher.address, delivery="exactly_once")
        )
        iterator = iter(dataset)
        read = [int(next(iterator)) for _ in range(2000)]
        dispatcher.kill()
        workers[0].kill()
        dispatcher.start()
        workers[0].start()
        assert sorted(read + [int(x) for x in iterator]) == list(range(COUNT))


def test_data_that_kills_workers_is_named() -> None:
    def deadly(x: Any) -> Any:
        if x == 300:
            os._exit(7)
        return x

    with TestCluster(0, fault_tolerant_mode=False) as cluster:
        workers = [worker_process(cluster.dispatcher_address()) for _ in range(3)]
        try:
            text = r"3 processes died while they computed positions 300 to 300 of the source"
            with pytest.raises(UnavailableError, match=text):
                list(cluster.distribute(Dataset.range(500).map(deadly), **ONCE))
            until(lambda: all(worker.exit_code == 7 for worker in workers))
        finally:
            for worker in workers:
                worker.kill()


def test_groups_survive_kills_of_servers() -> None:
    with process_cluster(2) as (dispatcher, workers), reading(dispatcher, 4) as read:
        read.read_until_zeros(2)
        for each in (workers[0], dispatcher, workers[1]):
            each.restart()
            read.read(200)
        workers[0].restart()
        read.read_until_zeros(1)
        read.check()


def test_killed_worker_is_replaced(tmp_path: Path) -> None:
    with process_cluster(2) as (dispatcher, workers):
        gate = Gate(tmp_path)
        handle = distributed_save(
            gated(Dataset.range(2000), gate), str(tmp_path / "s"), dispatcher.address
        )
        until(lambda: handle.progress()["streams"] == 2)
        workers[0].kill()
        gate.open()
        handle.wait(WAIT_S)
    assert loaded(tmp_path / "s") == list(range(2000))

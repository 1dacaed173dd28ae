"""A worker that leaves in good order: nothing is lost, nothing comes twice."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.data.service.helpers import READ_AHEAD, TestCluster, process_cluster, until
from zmqdist.data import Dataset
from zmqdist.data.service import ShardingPolicy, distribute
from zmqdist.data.service.dispatcher.machine.snapshot import DataTaskRow

DYNAMIC = ShardingPolicy.DYNAMIC
LONG = 3 * READ_AHEAD


@pytest.fixture
def cluster() -> Iterator[TestCluster]:
    with TestCluster(num_workers=2, worker_timeout_ms=None) as made:
        yield made


def leave(cluster: TestCluster, index: int) -> threading.Thread:
    """Have a worker leave, with more time than it needs."""
    leaving = threading.Thread(target=cluster.workers[index].stop, args=(60.0,))
    leaving.start()
    return leaving


@pytest.mark.parametrize("batch", [1, 7])
def test_leaving_worker_hands_back_unstarted_positions(cluster: TestCluster, batch: int) -> None:
    dataset = Dataset.range(LONG).map(lambda x: x)
    if batch > 1:
        dataset = dataset.batch(batch).prefetch(2)
    iterator = iter(cluster.distribute(dataset, DYNAMIC))
    found = [next(iterator) for _ in range(10)]
    leaving = leave(cluster, 0)
    found += list(iterator)
    leaving.join()
    values = [int(each) for item in found for each in ([item] if batch == 1 else item)]
    assert Counter(values) == Counter(range(LONG))
    until(lambda: cluster.num_registered_workers() == 1)


def test_successor_continues_for_only_worker(cluster: TestCluster) -> None:
    cluster.stop_worker(1)
    iterator = iter(cluster.distribute(Dataset.range(LONG), DYNAMIC))
    found = [int(next(iterator)) for _ in range(10)]
    leaving = leave(cluster, 0)
    reading = threading.Thread(target=lambda: found.extend(int(each) for each in iterator))
    reading.start()
    leaving.join()
    assert not any(each.finished for each in cluster.dispatcher.data_snapshot().iterations)
    assert reading.is_alive()
    cluster.add_worker()
    reading.join()
    assert sorted(found) == list(range(LONG))


def test_endless_task_ends_with_leaving_worker(cluster: TestCluster) -> None:
    iterator = iter(cluster.distribute(Dataset.range(10).repeat(), DYNAMIC))
    next(iterator)
    leaving = leave(cluster, 0)
    while leaving.is_alive():
        next(iterator)
    cluster.restart_dispatcher()
    found = Counter(int(next(iterator)) for _ in range(1000))
    assert set(found) == set(range(10))
    iterator.close()


def test_idle_worker_leaves_at_once(cluster: TestCluster) -> None:
    leave(cluster, 0).join()
    assert [int(each) for each in cluster.distribute(Dataset.range(10))] == list(range(10))


def test_short_grace_costs_unread_elements(cluster: TestCluster) -> None:
    iterator = iter(cluster.distribute(Dataset.range(LONG), DYNAMIC))
    found = [int(next(iterator)) for _ in range(10)]
    cluster.workers[0].stop(0.01)
    found += [int(each) for each in iterator]
    assert len(found) == len(set(found)) > 10
    until(lambda: not cluster.num_tasks_on_workers())


def test_sigterm_drains_a_worker_process() -> None:
    import os
    import subprocess
    import sys

    with process_cluster(1) as (dispatcher, _):
        environment = {**os.environ}
        command = [
            sys.executable,
            "-m",
            "zmqdist_cli",
            "worker",
            "--dispatcher",
            dispatcher.address,
            "--threads",
        ]
        worker = subprocess.Popen(
            [*command, "--grace", "60"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        try:
            assert worker.stdout is not None
            assert "worker:1 of" in worker.stdout.readline()
            iterator = iter(Dataset.range(LONG).apply(distribute(DYNAMIC, dispatcher.address)))
            found = [int(next(iterator)) for _ in range(10)]
            worker.send_signal(signal.SIGTERM)
            found += [int(each) for each in iterator]
            assert worker.wait(30) == 0
        finally:
            worker.kill()
            worker.communicate()
        assert Counter(found) == Counter(range(LONG))


def test_positions_handed_back_twice_are_given_once(cluster: TestCluster) -> None:
    from zmqdist.data.service.dispatcher.machine import events as ev
    from zmqdist.data.service.dispatcher.machine.machine import DataDispatcherMachine
    from zmqdist.data.service.dispatcher.machine.records import Terms
    from zmqdist.data.service.dispatcher.machine.tables import Rules

    machine = DataDispatcherMachine(Rules(), 5, 0.0)

    def ask(question: Any) -> Any:
        (effect,) = machine.handle(question, 0.0)
        return effect.value

    machine.handle(ev.WorkerJoined("worker:0", "a:1", 7), 0.0)
    ask(ev.RegisterRequest("t", 1, None, "f", "{}"))
    ask(ev.OpenRequest("t", 2, None, 0, Terms("1000", 1), (100,), "unnamed"))
    assert ask(ev.SplitsRequest("t", 5, 4000, 7, 0, 11, 0, 10)) == (0, 10)
    for _ in range(2):
        ask(ev.HandBackRequest("t", 5, 4000, 7, 0, 12, 0, ((4, 6),)))
    assert ask(ev.SplitsRequest("t", 5, 4000, 7, 0, 13, 0, 10)) == (4, 6)
    assert ask(ev.SplitsRequest("t", 5, 4000, 7, 0, 14, 0, 10)) == (10, 10)


def test_drain_report_names_moving_tasks(cluster: TestCluster) -> None:
    readers = [
        iter(cluster.distribute(Dataset.range(LONG), mode, job_name=name))
        for name, mode in (("moves", DYNAMIC), ("whole", ShardingPolicy.OFF))
    ]
    assert all(next(reader) is not None for reader in readers)
    until(lambda: all(len(report.data) == 2 for report in cluster.dispatcher.drain_reports()))
    for report in cluster.dispatcher.drain_reports():
        assert set(report.data) == {
            DataTaskRow("moves", "DYNAMIC", True),
            DataTaskRow("whole", "OFF", True),
        }
        assert report.losses == []
    cluster.stop_worker(1)
    until(lambda: len(cluster.dispatcher.drain_reports()) == 1)
    until(lambda: len(cluster.dispatcher.drain_reports()[0].losses) == 1)
    assert cluster.dispatcher.drain_reports()[0].losses == [
        "1 data task whose rest no other worker reads: whole (OFF)"
    ]


def test_static_share_refuses_drain() -> None:
    with TestCluster(1, worker_addresses=["localhost:%port%"]) as cluster:
        reader = iter(
            cluster.distribute(Dataset.range(LONG), ShardingPolicy.DATA, job_name="shared")
        )
        assert next(reader) == 0
        (report,) = cluster.dispatcher.drain_reports()
        assert report.losses == ["1 data task whose rest no other worker reads: shared (DATA)"]

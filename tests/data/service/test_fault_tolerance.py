"""What reading goes through when dispatchers and workers go and come back: the rows of tf.data
service's own tests, and kill -9."""

from __future__ import annotations

import itertools
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import pytest

from tests.data.service.helpers import (
    READ_AHEAD,
    TestCluster,
    process_cluster,
    until,
    values,
)
from tests.ports import free_port
from zmqdist.data import Dataset
from zmqdist.data.service import DispatcherConfig, DispatchServer, ShardingPolicy, distribute
from zmqdist.data.service.dispatcher.journal import Journal
from zmqdist.data.service.dispatcher.machine.records import ReleaseClient, encode
from zmqdist.errors import (
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import ZmqClient
from zmqdist.transport.credentials import Credentials

DYNAMIC = ShardingPolicy.DYNAMIC
LONG = 4 * READ_AHEAD
"""More elements than are buffered of two workers."""


@pytest.fixture
def cluster() -> Iterator[TestCluster]:
    with TestCluster(num_workers=1) as made:
        yield made


def take(iterator: Iterator[Any], count: int) -> list[int]:
    return [int(next(iterator)) for _ in range(count)]


def test_dispatcher_stop(cluster: TestCluster) -> None:
    iterator = iter(cluster.distribute(Dataset.range(100)))
    assert take(iterator, 1) == [0]
    cluster.stop_dispatcher()
    assert take(iterator, 99) == list(range(1, 100))
    cluster.restart_dispatcher()
    iterator.close()


def test_dispatcher_restart_before_reading(cluster: TestCluster) -> None:
    dataset = cluster.distribute(Dataset.range(100))
    cluster.restart_dispatcher()
    assert values(dataset) == list(range(100))


@pytest.mark.parametrize("mode", [ShardingPolicy.OFF, DYNAMIC])
def test_dispatcher_restart_during_reading(cluster: TestCluster, mode: ShardingPolicy) -> None:
    iterator = iter(cluster.distribute(Dataset.range(LONG), mode))
    assert take(iterator, 50) == list(range(50))
    cluster.restart_dispatcher()
    assert [int(each) for each in iterator] == list(range(50, LONG))


def test_dispatcher_restart_during_distributed_epoch_repeat(cluster: TestCluster) -> None:
    count, epochs = READ_AHEAD, 5
    iterator = iter(cluster.distribute(Dataset.range(count).repeat(epochs), DYNAMIC))
    found: list[int] = []
    for stop in (count // 2, 2 * count + count // 2, 4 * count + count // 2, 5 * count):
        found += take(iterator, stop - len(found))
        cluster.restart_dispatcher()
    found += [int(each) for each in iterator]
    assert Counter(found) == Counter(list(range(count)) * epochs)


def test_dispatcher_restart_between_iterations(cluster: TestCluster) -> None:
    dataset = cluster.distribute(Dataset.range(100))
    assert values(dataset) == list(range(100))
    cluster.restart_dispatcher()
    assert values(dataset) == list(range(100))


def test_dispatcher_restart_with_multiple_datasets(cluster: TestCluster) -> None:
    datasets = []
    for _ in range(10):
        datasets.append(cluster.distribute(Dataset.range(100)))
        cluster.restart_dispatcher()
    assert [values(dataset) for dataset in datasets] == [list(range(100))] * 10


def test_dispatcher_many_restarts(cluster: TestCluster) -> None:
    datasets = []
    for count in range(10, 15):
        datasets.append(cluster.distribute(Dataset.range(count)))
        cluster.restart_dispatcher()
    assert [values(dataset) for dataset in datasets] == [
        list(range(count)) for count in range(10, 15)
    ]


def test_dispatcher_and_worker_restart(cluster: TestCluster) -> None:
    dataset = cluster.distribute(Dataset.range(100).map(lambda x: x + 1))
    cluster.restart_dispatcher()
    cluster.restart_worker(0)
    assert values(dataset) == list(range(1, 101))
    cluster.restart_dispatcher()
    cluster.restart_worker(0)
    assert values(dataset) == list(range(1, 101))


def test_dispatcher_and_multi_worker_restart() -> None:
    with TestCluster(num_workers=2) as cluster:
        iterator = iter(cluster.distribute(Dataset.range(100)))
        for _ in range(2):
            cluster.restart_dispatcher()
            for index in range(2):
                cluster.restart_worker(index)
        found = [int(each) for each in iterator]
        assert Counter(found) == Counter(list(range(100)) * 2)
        cluster.restart_dispatcher()
        for index in range(2):
            cluster.restart_worker(index)
        assert list(iterator) == []


GATE = threading.Event()


def behind_the_gate(x: int) -> int:
    """The first elements come at once."""
    assert x < 2 or GATE.wait(30)
    return x


def test_restart_of_worker_and_dispatcher_keeps_shares() -> None:
    """If the new one is, the dispatcher gives it the number that the other had."""
    GATE.clear()
    with TestCluster(num_workers=2) as cluster:
        iterator = iter(cluster.distribute(Dataset.range(50).map(behind_the_gate)))
        found = take(iterator, 2)
        cluster.stop_dispatcher()
        cluster.stop_worker(1)
        cluster.restart_dispatcher()
        cluster.workers[1].start()
        GATE.set()
        found += [int(each) for each in iterator]
        times = Counter(found)
        assert {each: times[each] >= 2 for each in range(50)} == dict.fromkeys(range(50), True)
        assert all(worker.running.ended is None for worker in cluster.workers)


def test_start_servers_late() -> None:
    port = free_port()
    found: list[int] = []

    def read() -> None:
        dataset = Dataset.range(20).apply(distribute(ShardingPolicy.OFF, f"localhost:{port}"))
        found.extend(values(dataset))

    reading = threading.Thread(target=read)
    reading.start()
    with TestCluster(num_workers=0, dispatcher_port=port) as cluster:
        cluster.add_worker()
        reading.join()
    assert found == list(range(20))


def test_add_worker_mid_job(cluster: TestCluster) -> None:
    iterator = iter(cluster.distribute(Dataset.range(LONG)))
    found = take(iterator, LONG // 2)
    cluster.add_worker()
    until(lambda: cluster.num_registered_workers() == 2)
    found += [int(each) for each in iterator]
    assert Counter(found) == Counter(list(range(LONG)) * 2)


def test_remove_more_workers_than_max_outstanding_requests() -> None:
    with TestCluster(num_workers=5, worker_timeout_ms=None) as cluster:
        iterator = iter(cluster.distribute(Dataset.range(2**55), max_outstanding_requests=1))
        zeros = 0
        while zeros < 5:
            zeros += next(iterator) == 0
        for index in range(4):
            cluster.stop_worker(index)
        assert len(take(iterator, 10)) == 10
        iterator.close()


CLUSTERS = [{}, {"fault_tolerant_mode": False}, {"fault_tolerant_mode": False, "work_dir": ""}]


@pytest.mark.parametrize("options", CLUSTERS, ids=["journal", "work_dir", "memory"])
@pytest.mark.parametrize("use_same_port", [True, False])
def test_restart_worker(options: dict[str, Any], use_same_port: bool) -> None:
    with TestCluster(num_workers=1, worker_timeout_ms=None, **options) as cluster:
        iterator = iter(cluster.distribute(Dataset.range(LONG)))
        assert take(iterator, 100) == list(range(100))
        cluster.restart_worker(0, use_same_port)
        for expected in itertools.count(100):
            value = next(iterator)
            if value == 0:
                break
            assert value == expected
        assert take(iterator, LONG - 1) == list(range(1, LONG))
        assert next(iterator, None) is None


def test_change_processing_mode_after_restart(cluster: TestCluster) -> None:
    iterator = iter(cluster.distribute(Dataset.range(100), job_name="test"))
    assert take(iterator, 50) == list(range(50))
    cluster.restart_dispatcher()
    other = cluster.distribute(Dataset.range(100), DYNAMIC, job_name="test")
    problem = (
        "Tried to create job with name test, but found an existing job with different parameters"
    )
    with pytest.raises(InvalidArgumentError, match=problem):
        next(iter(other))
    assert [int(each) for each in iterator] == list(range(50, 100))


@pytest.mark.parametrize("work_dir", [None, ""])
def test_distribute_large_graph_then_register_worker(work_dir: str | None) -> None:
    import numpy as np

    with TestCluster(
        num_workers=0, work_dir=work_dir, fault_tolerant_mode=work_dir is None
    ) as cluster:
        large = Dataset.from_tensors(np.zeros((1 << 23,), np.uint8))
        iterator = iter(cluster.distribute(large))
        cluster.add_worker()
        assert next(iterator).nbytes == 1 << 23
        iterator.close()


# -- what a restart without a journal means --------------------------------------------------------


def test_readers_learn_of_lost_state() -> None:
    with TestCluster(num_workers=1, fault_tolerant_mode=False) as cluster:
        iterator = iter(cluster.distribute(Dataset.range(2**40)))
        assert take(iterator, 3) == [0, 1, 2]
        cluster.restart_dispatcher()
        with pytest.raises(
            NotFoundError, match=r"Unknown iteration client id 3000\.(.|\n)*lost its state"
        ):
            for _ in iterator:
                pass
        iterator.close()
        until(lambda: cluster.num_registered_workers() == 1)
        assert values(cluster.distribute(Dataset.range(10))) == list(range(10))
        until(lambda: cluster.num_tasks_on_workers() == 0)


# -- numbers, names and what has ended -------------------------------------------------------------


def test_numbers_grow_over_restarts(cluster: TestCluster) -> None:
    def ids() -> tuple[int, ...]:
        return astuple(cluster.dispatcher.data_snapshot().next_numbers)

    dataset = cluster.distribute(Dataset.range(10), job_name="once")
    other = cluster.distribute(Dataset.range(10), job_name="once")
    assert values(dataset) == list(range(10))
    before = ids()
    cluster.restart_dispatcher()
    assert ids() == before
    assert values(other) == []
    assert all(new >= old for new, old in zip(ids(), before, strict=True))


# -- kill -9 ---------------------------------------------------------------------------------------


@pytest.mark.processes("data service")
@pytest.mark.killed("data service")
def test_killed_dispatchers_lose_nothing_and_give_nothing_twice() -> None:
    count = 4 * LONG
    with process_cluster(2) as (dispatcher, _workers):
        dataset = Dataset.range(count).apply(distribute(DYNAMIC, dispatcher.address))
        iterator = iter(dataset)
        found: list[int] = []
        for _ in range(3):
            found += take(iterator, count // 5)
            dispatcher.restart()
        found += [int(each) for each in iterator]
        assert sorted(found) == list(range(count))


def test_second_dispatcher_in_folder_is_refused(
    cluster: TestCluster,
) -> None:
    config = DispatcherConfig(work_dir=cluster.work_dir, fault_tolerant_mode=True)
    with pytest.raises(RuntimeError, match="has this journal"):
        DispatchServer(config)
    assert values(cluster.distribute(Dataset.range(10))) == list(range(10))


def test_damaged_journal_prevents_start(tmp_path: Any) -> None:
    with TestCluster(num_workers=1, work_dir=str(tmp_path)) as cluster:
        assert values(cluster.distribute(Dataset.range(10))) == list(range(10))
    path = tmp_path / "journal.sqlite"
    path.write_bytes(path.read_bytes()[:5000])
    damaged = path.read_bytes()
    with pytest.raises(RuntimeError, match="corrupted record"):
        DispatchServer(DispatcherConfig(work_dir=str(tmp_path), fault_tolerant_mode=True))
    assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (b"text garbage", "Failed to parse journal record"),
        (encode(ReleaseClient(9)), "does not fit the records before it"),
    ],
)
def test_unknown_record_prevents_start(tmp_path: Any, record: bytes, text: str) -> None:

    done = threading.Event()
    journal = Journal(str(tmp_path))
    journal.append([record], lambda error: done.set())
    done.wait()
    journal.close()
    with pytest.raises(RuntimeError, match=text):
        DispatchServer(DispatcherConfig(work_dir=str(tmp_path), fault_tolerant_mode=True))


# -- a disk that is full ---------------------------------------------------------------------------


def test_full_journal_refuses_requests(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zmqdist.errors import ResourceExhaustedError

    first = cluster.distribute(Dataset.range(20), job_name="first")
    iterator = iter(first)
    assert next(iterator) == 0

    def full(self: Journal, group: Any) -> None:
        raise __import__("sqlite3").OperationalError("database or disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(Journal, "_commit", full)
        with pytest.raises(ResourceExhaustedError, match="cannot write its journal"):
            iter(cluster.distribute(Dataset.range(10), job_name="second"))
    assert [int(each) for each in iterator] == list(range(1, 20))
    assert values(cluster.distribute(Dataset.range(10), job_name="second")) == list(range(10))
    cluster.restart_dispatcher()
    kept = cluster.dispatcher.data_snapshot()
    assert kept.jobs == ("first", "second")
    assert all(each.finished for each in kept.iterations)


def test_reader_logs_full_disk_of_dispatcher(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zmqdist.data.service.reader.runtime.WAIT_LOG_S", 0.1)
    iterator = iter(cluster.distribute(Dataset.range(50_000), DYNAMIC, delivery="exactly_once"))
    seen = [int(next(iterator))]

    def full(self: Journal, group: Any) -> None:
        raise __import__("sqlite3").OperationalError("database or disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(Journal, "_commit", full)
        reading = threading.Thread(target=lambda: seen.extend(map(int, iterator)))
        reading.start()
        # Which of the two depends on whether it acknowledges while a commit fails, or while the
        # dispatcher reads its journal again.
        reason = r"(cannot write its journal .*make room on that disk|has gone back to the state in its journal)"
        told = re.compile(f"nothing has come from .*{reason}")
        until(lambda: told.search(caplog.text))
    reading.join(20)
    assert sorted(seen) == list(range(50_000))
    assert any(
        record.levelname == "WARNING"
        for record in caplog.records
        if "nothing has come" in record.message
    )


def test_unreadable_journal_is_awaited(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may be decided from changes that were lost: a later start would stumble over what
    follows them."""
    import zmqdist.data.service.dispatcher.runtime as shell

    monkeypatch.setattr(shell, "READ_AGAIN_S", 0.05)
    iterator = iter(cluster.distribute(Dataset.range(20), job_name="first"))
    assert next(iterator) == 0
    looked = threading.Event()
    looks = itertools.count()

    def broken(self: Journal, *group: Any) -> Any:
        if next(looks) > 2:
            looked.set()
        raise FailedPreconditionError(None, None, "too many open files")

    def full(self: Journal, group: Any) -> None:
        raise __import__("sqlite3").OperationalError("disk I/O error")

    with monkeypatch.context() as failing:
        failing.setattr(Journal, "_commit", full)
        failing.setattr(Journal, "load", broken)
        security = Credentials(None, None, False).client(cluster.dispatcher.address, "submit")
        with ZmqClient(cluster.dispatcher.address, "test", security=security) as client:
            refused = internal_client.start(
                client, "zmqdist.data.compression", "1000", True
            ).get_error()[0]
        assert refused in (RESOURCE_EXHAUSTED, UNAVAILABLE)
        assert looked.wait(20)
        assert cluster.dispatcher.data_snapshot().journal == "unreadable"
        cluster.workers[0].restart()
    second = cluster.distribute(Dataset.range(10), job_name="second")
    assert values(second) == list(range(10))
    assert cluster.dispatcher.data_snapshot().journal == "kept"
    iterator.close()
    cluster.restart_dispatcher()
    assert cluster.dispatcher.data_snapshot().jobs == ("first", "second")


def test_many_records_become_one_snapshot_and_all_comes_back(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zmqdist.data.service.dispatcher.runtime as shell

    monkeypatch.setattr(shell, "JOURNAL_RECORDS_MAX", 5)
    for count in range(10):
        dataset = cluster.distribute(Dataset.range(count + 1), DYNAMIC, job_name=f"job {count}")
        assert values(dataset) == list(range(count + 1))
    before = cluster.dispatcher.data_snapshot()
    assert before.journal_records < 10
    assert len(before.jobs) == 10
    cluster.stop_dispatcher()
    journal = Journal(str(cluster.work_dir))
    snapshot, records = journal.load()
    journal.close()
    assert snapshot is not None
    assert len(records) < 10
    cluster.restart_dispatcher()
    after = cluster.dispatcher.data_snapshot()
    assert (after.jobs, after.state) == (before.jobs, before.state)

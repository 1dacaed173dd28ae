"""What a dispatcher lets go: readers that are silent, iterations that nobody reads."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.data.service.helpers import TestCluster, until, values
from zmqdist.data import Dataset
from zmqdist.data.service import ShardingPolicy

SOON = {"job_gc_check_interval_ms": 50, "job_gc_timeout_ms": 20}
ENDLESS = 2**40

SILENCE_MS = 3000
"""After so long a silent reader is given up: longer than a loaded machine keeps one from
running.
"""


@pytest.fixture
def cluster() -> Iterator[TestCluster]:
    with TestCluster(num_workers=1, **SOON) as made:
        yield made


def read_one(cluster: TestCluster, *args: Any, **options: Any) -> Any:
    """An iterator that has given one element."""
    iterator = iter(cluster.distribute(Dataset.range(ENDLESS), *args, **options))
    next(iterator)
    return iterator


def tasks_become(cluster: TestCluster, count: int) -> None:
    until(lambda: cluster.num_tasks_on_workers() == count, f"{count} tasks")


def checks_pass(cluster: TestCluster, count: int = 3) -> None:
    """Wait until the dispatcher has looked for what to let go so many times."""
    checks = cluster.dispatcher.data_snapshot().checks_count + count
    until(lambda: cluster.dispatcher.data_snapshot().checks_count >= checks, f"{count} checks")


@pytest.mark.parametrize("job_name", [None, "test"])
def test_gc_unused_job(cluster: TestCluster, job_name: str | None) -> None:
    iterator = read_one(cluster, job_name=job_name)
    tasks_become(cluster, 1)
    del iterator
    tasks_become(cluster, 0)


def test_dont_gc_used_job(cluster: TestCluster) -> None:
    iterators = [read_one(cluster, job_name=name) for name in ("test1", "test2", "test2")]
    tasks_become(cluster, 2)
    del iterators[0:2]
    tasks_become(cluster, 1)
    checks_pass(cluster)
    assert cluster.num_tasks_on_workers() == 1
    iterators[0].close()


def test_dont_gc_jobs_with_visitation_guarantees(cluster: TestCluster) -> None:
    iterators = [
        read_one(cluster, mode, job_name=mode.name)
        for mode in (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC)
    ]
    tasks_become(cluster, 2)
    iterators.clear()
    tasks_become(cluster, 1)
    checks_pass(cluster)
    assert cluster.num_tasks_on_workers() == 1


def test_anonymous_iteration_ends_with_reader() -> None:
    with TestCluster(num_workers=1) as cluster:
        # its checks are a second apart, and a job is kept for minutes
        iterator = read_one(cluster, ShardingPolicy.DYNAMIC)
        tasks_become(cluster, 1)
        iterator.close()
        tasks_become(cluster, 0)


def test_gc_dynamic_sharding_job_if_requested() -> None:
    with TestCluster(num_workers=1, gc_dynamic_sharding_jobs=True, **SOON) as cluster:
        iterator = read_one(cluster, ShardingPolicy.DYNAMIC)
        tasks_become(cluster, 1)
        del iterator
        tasks_become(cluster, 0)


def test_gc_and_recreate() -> None:
    with TestCluster(num_workers=3, **SOON) as cluster:
        for _ in range(3):
            iterator = iter(cluster.distribute(Dataset.range(ENDLESS), job_name="test"))
            found = [int(next(iterator)) for _ in range(50)]
            assert 0 in found
            del iterator
            tasks_become(cluster, 0)


def test_collected_iteration_survives_restart(cluster: TestCluster) -> None:
    iterator = read_one(cluster, job_name="test")
    del iterator
    tasks_become(cluster, 0)
    cluster.restart_dispatcher()
    kept = cluster.dispatcher.data_snapshot()
    assert [each.collected for each in kept.iterations] == [True]
    assert not kept.tasks
    again = read_one(cluster, job_name="test")
    tasks_become(cluster, 1)
    again.close()


def test_unused_jobs_stay_without_time_out() -> None:
    with TestCluster(num_workers=1, job_gc_check_interval_ms=50, job_gc_timeout_ms=-1) as cluster:
        iterator = read_one(cluster, job_name="test")
        del iterator
        until(lambda: not cluster.dispatcher.data_snapshot().clients)
        checks_pass(cluster)
        assert cluster.num_tasks_on_workers() == 1
        cluster.stop_worker(0)
        until(lambda: not cluster.dispatcher.data_snapshot().workers)


READER = """
import sys
from zmqdist.data import Dataset
from zmqdist.data.service import distribute
from zmqdist.errors import NotFoundError
iterator = iter(Dataset.range(2**40).apply(distribute("parallel_epochs", sys.argv[1])))
print(int(next(iterator)), flush=True)
sys.stdin.readline()
try:
    for _ in iterator:
        pass
except NotFoundError as error:
    print(error, flush=True)
iterator.close()
"""


def test_gc_client(child: Callable[..., subprocess.Popen[str]]) -> None:
    """A reader that is stopped for longer than the dispatcher waits is told so when it goes on."""
    with TestCluster(
        num_workers=1, job_gc_check_interval_ms=50, client_timeout_ms=SILENCE_MS
    ) as cluster:
        reader = child(READER, cluster.dispatcher_address())
        assert reader.stdout is not None
        assert reader.stdin is not None
        assert reader.stdout.readline().strip() == "0"
        reader.send_signal(signal.SIGSTOP)
        until(lambda: not cluster.dispatcher.data_snapshot().clients)
        reader.send_signal(signal.SIGCONT)
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert "Unknown iteration client id" in reader.stdout.readline()


def test_gc_of_a_reader_that_was_killed(child: Callable[..., subprocess.Popen[str]]) -> None:
    with TestCluster(num_workers=1, client_timeout_ms=2000, **SOON) as cluster:
        reader = child(READER, cluster.dispatcher_address())
        assert reader.stdout is not None
        assert reader.stdout.readline().strip() == "0"
        tasks_become(cluster, 1)
        reader.kill()
        tasks_become(cluster, 0)


def test_keep_client_alive_before_reading() -> None:
    with TestCluster(
        num_workers=1, job_gc_check_interval_ms=50, client_timeout_ms=SILENCE_MS
    ) as cluster:
        iterator = iter(cluster.distribute(Dataset.range(100)))
        checks_pass(cluster, SILENCE_MS // 40)
        assert [int(each) for each in iterator] == list(range(100))


def test_slow_client_is_kept() -> None:
    with TestCluster(num_workers=1, client_timeout_ms=SILENCE_MS, **SOON) as cluster:
        iterator = read_one(cluster)
        checks_pass(cluster, SILENCE_MS // 40)
        assert int(next(iterator)) == 1
        iterator.close()


def test_ended_iteration_has_no_tasks(cluster: TestCluster) -> None:
    assert values(cluster.distribute(Dataset.range(10))) == list(range(10))
    tasks_become(cluster, 0)

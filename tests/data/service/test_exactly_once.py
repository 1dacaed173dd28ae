"""delivery="exactly_once": each element comes once, whoever dies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.service.helpers import (
    TestCluster,
    until,
    values,
    worker_process,
)
from zmqdist.data import Dataset
from zmqdist.data.service.client import distribute
from zmqdist.data.service.policy import CrossTrainerCache, ShardingPolicy
from zmqdist.errors import InvalidArgumentError, UnimplementedError

ROOT = Path(__file__).resolve().parents[3]
DYNAMIC = ShardingPolicy.DYNAMIC
ONCE = {"processing_mode": DYNAMIC, "delivery": "exactly_once"}
COUNT = 60_000


@pytest.fixture
def cluster() -> Iterator[TestCluster]:
    with TestCluster(2, fault_tolerant_mode=False) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(1000),
        Dataset.range(0),
        Dataset.range(COUNT).filter(lambda x: x % 1000 == 1),
        Dataset.range(5).flat_map(lambda x: Dataset.range(x * 10)),
        Dataset.from_tensor_slices(np.arange(5000)).map(lambda x: x * 2).repeat(3),
        Dataset.range(10_000).filter(lambda x: False),
        Dataset.range(12).map(lambda x: np.full((200, 200), x)).map(lambda x: x[0, :2].sum()),
    ],
    ids=["range", "empty", "few are left", "many of one", "repeat", "nothing is left", "arrays"],
)
def test_elements_come_once(cluster: TestCluster, dataset: Dataset) -> None:
    assert sorted(values(cluster.distribute(dataset, **ONCE))) == sorted(values(dataset))


def test_batches_are_those_of_the_pipeline_itself(cluster: TestCluster) -> None:
    dataset = Dataset.range(10_000).batch(32)
    read = [tuple(batch.tolist()) for batch in cluster.distribute(dataset, **ONCE)]
    assert sorted(read) == [tuple(batch.tolist()) for batch in dataset]


def test_readers_of_one_job_share_its_elements(cluster: TestCluster) -> None:
    dataset = Dataset.range(20_000)
    first, second = (iter(cluster.distribute(dataset, **ONCE, job_name="shared")) for _ in range(2))
    read = [int(next(first)) for _ in range(500)] + [int(next(second)) for _ in range(500)]
    first.close()
    assert sorted(read + [int(x) for x in second]) == list(range(20_000))


def test_passes_are_iterations(cluster: TestCluster) -> None:
    dataset = cluster.distribute(Dataset.range(100), **ONCE)
    assert sorted(values(dataset)) == sorted(values(dataset)) == list(range(100))


def test_error_costs_one_element(cluster: TestCluster) -> None:
    def checked(x: Any) -> Any:
        if x in (17, 99):
            raise ValueError(f"not {x}")
        return x

    iterator = iter(cluster.distribute(Dataset.range(100).map(checked), **ONCE))
    read, errors = [], []
    while True:
        try:
            read.append(int(next(iterator)))
        except StopIteration:
            break
        except InvalidArgumentError as error:
            errors.append(error.message.split("\n")[0])
    assert sorted(read) == [x for x in range(100) if x not in (17, 99)]
    assert sorted(errors) == ["ValueError: not 17", "ValueError: not 99"]


def test_leaving_worker_loses_no_element(cluster: TestCluster) -> None:
    iterator = iter(cluster.distribute(Dataset.range(COUNT), **ONCE))
    read = [int(next(iterator)) for _ in range(3000)]
    cluster.stop_worker(0)
    read += [int(next(iterator)) for _ in range(3000)]
    cluster.add_worker()
    assert sorted(read + [int(x) for x in iterator]) == list(range(COUNT))


def test_drained_worker_does_not_wait_for_readers(cluster: TestCluster) -> None:
    iterator = iter(cluster.distribute(Dataset.range(COUNT), **ONCE))
    read = [int(next(iterator)) for _ in range(3000)]
    cluster.workers[0].stop(grace_s=20.0)
    assert sorted(read + [int(x) for x in iterator]) == list(range(COUNT))


@pytest.mark.processes("exactly once")
@pytest.mark.killed("exactly once")
def test_workers_that_are_killed_take_nothing_with_them() -> None:
    with TestCluster(0, fault_tolerant_mode=False) as cluster:
        workers = [worker_process(cluster.dispatcher_address()) for _ in range(2)]
        try:
            iterator = iter(cluster.distribute(Dataset.range(COUNT).map(lambda x: x + 1), **ONCE))
            read = [int(next(iterator)) for _ in range(2000)]
            workers[0].kill()
            read += [int(next(iterator)) for _ in range(10_000)]
            workers.append(worker_process(cluster.dispatcher_address()))
            workers[1].kill()
            assert sorted(read + [int(x) for x in iterator]) == list(range(1, COUNT + 1))
        finally:
            for worker in workers:
                worker.stop()


_READ = """
import sys
from zmqdist.data import Dataset
from zmqdist.data.service.client import distribute
dataset = Dataset.range(int(sys.argv[2])).apply(distribute("distributed_epoch", sys.argv[1], "killed", delivery="exactly_once"))
for element in dataset:
    print(int(element), flush=True)
"""


def acknowledged(cluster: TestCluster) -> bool:
    """Whether the dispatcher knows of an element that a reader has had."""
    iterations = cluster.dispatcher.data_snapshot().iterations
    return any(each.portions_done or each.elements_acknowledged for each in iterations)


def test_portions_of_killed_reader_go_to_another() -> None:
    with TestCluster(
        2, fault_tolerant_mode=False, client_timeout_ms=3000, job_gc_check_interval_ms=100
    ) as cluster:
        reader = subprocess.Popen(
            [sys.executable, "-c", _READ, cluster.target, str(COUNT)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert reader.stdout is not None
        had = [int(reader.stdout.readline()) for _ in range(5000)]
        until(lambda: acknowledged(cluster), "an acknowledgement")
        reader.kill()
        had += [int(line) for line in reader.communicate()[0].split("\n")[:-1]]
        rest = [int(x) for x in cluster.distribute(Dataset.range(COUNT), **ONCE, job_name="killed")]
        assert len(set(rest)) == len(rest)
        assert {*had, *rest} == set(range(COUNT))
        assert len(rest) < COUNT, "what was acknowledged came again"


def test_closed_reader_acknowledges_its_elements(cluster: TestCluster) -> None:
    dataset = Dataset.range(5000)
    with iter(cluster.distribute(dataset, **ONCE, job_name="job")) as first:
        read = [int(next(first)) for _ in range(777)]
    rest = [int(x) for x in cluster.distribute(dataset, **ONCE, job_name="job")]
    assert sorted(read + rest) == list(range(5000))


def test_restarted_dispatcher_loses_nothing() -> None:
    with TestCluster(2) as cluster:
        iterator = iter(cluster.distribute(Dataset.range(COUNT), **ONCE))
        read = [int(next(iterator)) for _ in range(2000)]
        cluster.restart_dispatcher()
        read += [int(next(iterator)) for _ in range(2000)]
        cluster.stop_worker(1)
        assert sorted(read + [int(x) for x in iterator]) == list(range(COUNT))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"delivery": "twice"}, ValueError, "'at_most_once', 'exactly_once'"),
        ({"delivery": "at_least_once"}, ValueError, "'at_most_once', 'exactly_once'"),
        (
            {"delivery": "exactly_once", "processing_mode": ShardingPolicy.OFF},
            InvalidArgumentError,
            "DYNAMIC",
        ),
        (
            {"ordered": True, "processing_mode": ShardingPolicy.DATA},
            InvalidArgumentError,
            "DYNAMIC",
        ),
        (
            {
                "delivery": "exactly_once",
                "cross_trainer_cache": CrossTrainerCache("a"),
                "job_name": "b",
            },
            InvalidArgumentError,
            "cache",
        ),
    ],
)
def test_mistakes_are_errors_of_distribute(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        distribute(**{"processing_mode": DYNAMIC, "service": "localhost:1", **arguments})


def test_uncuttable_pipeline_is_refused_before_registration() -> None:
    with pytest.raises(UnimplementedError, match=r"shuffle.*put it behind distribute\(\)"):
        Dataset.range(10).shuffle(5).apply(
            distribute(DYNAMIC, "localhost:1", delivery="exactly_once")
        )

"""What a dispatcher and a worker tell of the data service."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.data.service.helpers import TestCluster, until
from zmqdist.data import Dataset
from zmqdist.data.service import ShardingPolicy
from zmqdist.data.service.worker import runtime as data_worker
from zmqdist.errors import UnavailableError
from zmqdist.observe.status import jobs, lines
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import ZmqClient
from zmqdist.transport.credentials import Credentials


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestCluster]:
    monkeypatch.setattr(data_worker, "REPORT_S", 0.05)
    with TestCluster(num_workers=2, client_timeout_ms=4000) as made:
        yield made


def asked(address: str, method: str) -> object:
    with ZmqClient(
        address, "test", security=Credentials(None, None, False).client(address, "submit")
    ) as client:
        return internal_client.start(client, method).get_value()


def test_active_job_has_row_with_figures(cluster: TestCluster) -> None:
    iterator = iter(
        cluster.distribute(Dataset.range(2**40), ShardingPolicy.DYNAMIC, job_name="mine")
    )

    def status() -> dict[str, object]:
        next(iterator)
        return asked(cluster.dispatcher.address, "facts")  # type: ignore[return-value]

    assert not jobs({**status(), "data": {"jobs": [], "workers_enough": None}}).rows
    until(lambda: status()["data"]["jobs"][0]["elements_per_s"] > 0)  # type: ignore[index]
    until(lambda: (status()["data"]["workers_enough"] or 0) >= 1)  # type: ignore[index]
    told = status()
    (row,) = jobs(told).rows
    assert row[:5] == ("mine", "DYNAMIC", "2000", "2/2", "1")
    assert any(line.startswith("data jobs (") and "would be enough" in line for line in lines(told))
    iterator.close()


@pytest.mark.parametrize("options", [{"delivery": "exactly_once"}, {"ordered": True}, {}], ids=repr)
def test_positions_left_fall_to_zero(cluster: TestCluster, options: dict[str, Any]) -> None:
    iterator = iter(
        cluster.distribute(
            Dataset.range(200_000), ShardingPolicy.DYNAMIC, job_name="read", **options
        )
    )

    def row() -> dict[str, Any]:
        for _ in itertools.islice(iterator, 1000):
            pass
        status: Any = asked(cluster.dispatcher.address, "facts")
        # without a row if all was taken
        return next(iter(status["data"]["jobs"]), {"positions_left": [0]})

    assert 0 < row()["positions_left"][0] < 200_000
    until(lambda: row()["elements_per_s"] > 0 and row()["room"] > 0)
    until(lambda: row()["positions_left"] == [0])
    iterator.close()


def test_whole_job_has_no_positions_left(
    cluster: TestCluster,
) -> None:
    iterator = iter(cluster.distribute(Dataset.range(2**40), job_name="all"))
    next(iterator)
    (row,) = jobs(asked(cluster.dispatcher.address, "facts")).rows  # type: ignore[arg-type]
    assert (row[1], row[-1]) == ("OFF", "")
    iterator.close()


def test_working_worker_has_figures_of_tasks(
    cluster: TestCluster,
) -> None:
    address = cluster.workers[0].running.address
    with pytest.raises(UnavailableError, match="No trace event was collected"):
        asked(address, "zmqdist.data.profile")
    iterator = iter(cluster.distribute(Dataset.range(2**40).map(lambda x: x)))
    next(iterator)
    until(lambda: cluster.workers[0].num_tasks() == 1)

    def profile() -> dict[int, dict[str, float]]:
        next(iterator)
        return asked(address, "zmqdist.data.profile")  # type: ignore[return-value]

    (told,) = profile().values()
    until(lambda: next(iter(profile().values()))["elements"] > 0)
    assert told["dataset"] == "1000"
    assert told["room"] >= 2
    iterator.close()


def slow(element: Any) -> Any:
    threading.Event().wait(0.05)
    return element


READS = [{"delivery": "exactly_once"}, {"num_consumers": 1}, {}]


@pytest.mark.parametrize("options", READS, ids=repr)
def test_workers_wait_for_a_reader_that_takes_nothing(
    cluster: TestCluster, options: dict[str, Any]
) -> None:
    iterator = iter(cluster.distribute(source(options), **sharding(options)))
    next(iterator)
    # at the start the reader waits for the first elements
    row = until(lambda: (row := job(cluster))["waits"] == "producer" and row)
    assert 0.2 <= row["workers_wait"] <= 1
    assert row["workers_wait"] > row["readers_wait"]
    iterator.close()


@pytest.mark.parametrize("options", READS, ids=repr)
def test_reader_waits_for_slow_workers(cluster: TestCluster, options: dict[str, Any]) -> None:
    iterator = iter(cluster.distribute(source(options).map(slow), **sharding(options)))
    next(iterator)

    def waiting() -> dict[str, Any] | None:
        next(iterator)
        row = job(cluster)
        return row if row["waits"] == "consumer" and row["elements_per_s"] > 0 else None

    row = until(waiting)
    assert 0.2 <= row["readers_wait"] <= 1
    assert "readers wait" in "\n".join(lines(asked(cluster.dispatcher.address, "facts")))  # type: ignore[arg-type]
    iterator.close()


def job(cluster: TestCluster) -> dict[str, Any]:
    record: Any = asked(cluster.dispatcher.address, "facts")
    return dict(record["data"]["jobs"][0])


def source(options: dict[str, Any]) -> Dataset:
    return Dataset.range(2**40).repeat() if "num_consumers" in options else Dataset.range(2**40)


def sharding(options: dict[str, Any]) -> dict[str, Any]:
    if "num_consumers" in options:
        return {**options, "consumer_index": 0, "job_name": "rounds"}
    policy = ShardingPolicy.DYNAMIC if "delivery" in options else ShardingPolicy.OFF
    return {**options, "processing_mode": policy, "job_name": "waits"}

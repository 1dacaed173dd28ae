"""Figures of what coordinators do: recorded when they are wanted, and summed up as TensorFlow
does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.coordinator import helpers
from tests.scheduling.work import begun, go, until, waits
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.rpc.client import ZmqClient
from zmqdist.scheduling.coordinator import metrics

# its dispatcher may start another thread of a pool
pytestmark = [pytest.mark.timeout(60), pytest.mark.shares_cluster]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(metrics, "enable_metrics", True)
    metrics.reset()
    yield
    metrics.reset()


@pytest.fixture
def coordinator(in_processes: ClusterCoordinator) -> ClusterCoordinator:
    return in_processes


# -- figures ---------------------------------------------------------------------------------------


def test_histogram_summary() -> None:
    histogram = metrics.Histogram(0.1, 10, 3)
    assert histogram.summary() == {"min": 0.0, "max": 0.0, "num": 0, "sum": 0.0, "histogram": {}}
    for value in (0.05, 0.5, 0.7, 1e6):
        histogram.add(value)
    summary = histogram.summary()
    assert (summary["min"], summary["max"], summary["num"]) == (0.05, 1e6, 4)
    assert summary["sum"] == pytest.approx(1e6 + 1.25)
    assert summary["histogram"] == {(0.0, 0.1): 1, (0.1, 1.0): 2, (10.0, float("inf")): 1}


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("function_tracing", [0.1 * 10**power for power in range(6)]),
        ("closure_execution", [0.1 * 10**power for power in range(6)]),
        ("remote_value_fetch", [0.001 * 10**power for power in range(7)]),
        ("server_def_update", [10.0**power for power in range(5)]),
    ],
)
def test_histograms_have_names_and_bounds(name: str, bounds: list[float]) -> None:
    assert metrics.HISTOGRAMS[name].bounds == bounds
    assert metrics.get_metric_summary(name)["num"] >= 0


def test_gauges_are_numbers_and_unknown_name_is_error() -> None:
    for name in ("queued_closures", "inflight_closures", "worker_failures"):
        assert metrics.get_metric_summary(name) >= 0
    with pytest.raises(
        ValueError, match="no metric 'tracing'; there are function_tracing, closure_execution"
    ):
        metrics.get_metric_summary("tracing")


def test_monitored_block_needs_enabled_metrics(
    recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with metrics.monitored_timer("server_def_update"):
        pass
    assert metrics.get_metric_summary("server_def_update")["num"] == 1
    monkeypatch.setattr(metrics, "enable_metrics", False)
    with metrics.monitored_timer("server_def_update"):
        pass
    metrics.count("worker_failures", 1)
    assert metrics.get_metric_summary("server_def_update")["num"] == 1
    assert metrics.get_metric_summary("worker_failures") == 0


def test_monitored_block_with_tracker_needs_change(recorded: None) -> None:
    state = [0]
    with metrics.monitored_timer("function_tracing", state_tracker=lambda: state[0]):
        pass
    assert metrics.get_metric_summary("function_tracing")["num"] == 0
    with metrics.monitored_timer("function_tracing", state_tracker=lambda: state[0]):
        state[0] += 1
    assert metrics.get_metric_summary("function_tracing")["num"] == 1


# -- of coordinators -------------------------------------------------------------------------------


class Slow:
    """Takes half a second to be pickled, and is as it was."""

    def __reduce__(self) -> Any:
        import time

        time.sleep(0.5)  # what a test of durations measures
        return Slow, ()

    def __call__(self) -> int:
        return 3


def test_cluster_coordinator_metrics(recorded: None, coordinator: ClusterCoordinator) -> None:
    function = Slow()
    values = [coordinator.schedule(function) for _ in range(2)]
    coordinator.join()
    assert coordinator.fetch(values) == [3, 3]
    tracing = metrics.get_metric_summary("function_tracing")
    assert tracing["num"] == 1
    assert tracing["sum"] > 0.5
    execution = metrics.get_metric_summary("closure_execution")
    assert execution["num"] == 2
    assert 0 < execution["min"] <= execution["max"]
    assert metrics.get_metric_summary("remote_value_fetch")["num"] == 2


def test_disabled_metrics_record_nothing(coordinator: ClusterCoordinator) -> None:
    metrics.reset()
    coordinator.schedule(helpers.identity, (1,)).fetch(20)
    assert {metrics.get_metric_summary(name)["num"] for name in metrics.HISTOGRAMS} == {0}


def test_gauges_agree_with_cluster_status(processes: zd.local_cluster, tmp_path: Path) -> None:
    """Nine functions at two slots: a part of them runs, a part waits, and one waits for its
    input.
    """
    with ClusterCoordinator(processes) as coordinator:
        values = [coordinator.schedule(waits, (tmp_path, str(number))) for number in range(8)]
        coordinator.schedule(helpers.identity, (values[0],))
        until(lambda: len(begun(tmp_path)) == 2)

        def figures() -> tuple[Any, Any, Any]:
            address = coordinator.target.removeprefix("zmq://")
            with ZmqClient(
                address, "", True, security=coordinator.credentials.client(address, "submit")
            ) as client:
                record = client.facts_blocking()
            rows = record["workers"]
            sums = SimpleNamespace(
                workers=len(rows),
                slots=sum(row["slots"] for row in rows),
                running=sum(row["running"] for row in rows),
                waiting=sum(row["leases"] - row["running"] for row in rows),
                queued=record["queued"],
            )
            return sums, *map(metrics.get_metric_summary, ("inflight_closures", "queued_closures"))

        def are_right() -> bool:
            sums, inflight, queued = figures()
            # How many functions wait at their workers depends on how fast the workers were before.
            size = (sums.running, sums.slots, sums.workers)
            at_workers, at_dispatcher = sums.running + sums.waiting, sums.queued
            return (size, inflight, at_dispatcher, queued) == (
                (2, 2, 2),
                at_workers,
                8 - inflight,
                9 - inflight,
            )

        until(are_right)
        go(tmp_path)
        coordinator.join()
        sums, inflight, queued = figures()
        assert (sums.running, sums.waiting, sums.queued, inflight, queued) == (0, 0, 0, 0, 0)


def test_gauges_without_dispatcher_count_work_as_queued(
    tmp_path: Path,
) -> None:
    with (
        zd.DispatchServer() as dispatcher,
        ClusterCoordinator(dispatcher, cluster_lost_limit_s=60) as coordinator,
    ):
        coordinator.schedule(helpers.identity, (1,))
        dispatcher.stop()
        until(lambda: not coordinator.snapshot().connected)
        assert metrics.get_metric_summary("queued_closures") == 1
        assert metrics.get_metric_summary("inflight_closures") == 0


def test_lost_worker_is_counted(recorded: None) -> None:
    with zd.local_cluster(workers=2) as cluster, ClusterCoordinator(cluster) as coordinator:
        until(lambda: len(coordinator.workers()) == 2)
        cluster.kill_worker(0)
        until(lambda: metrics.get_metric_summary("worker_failures") == 1)


def test_coordinator_metrics_have_rows_of_workers(
    coordinator: ClusterCoordinator,
) -> None:
    counts = coordinator.metrics()["workers"]["worker:1"]["done"]
    for _ in range(3):
        coordinator.schedule(helpers.identity, (1,), worker=1).fetch(20)
    summary = coordinator.metrics()
    assert summary["workers"]["worker:1"]["done"] == counts + 3
    assert summary["workers"]["worker:0"]["state"] == "alive"
    assert summary["queued_closures"] == 0
    assert summary["closure_execution"].keys() == {"min", "max", "num", "sum", "histogram"}

"""The facts of a real cluster about its RPC servers and parameter servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.work import until
from zmqdist.coordinator import ClusterCoordinator

UPDATES = 30


def updates(variable: Any) -> None:
    for _ in range(UPDATES):
        variable.assign_add(np.ones(10))


def double(number: int) -> int:
    return 2 * number


def count_to(number: int) -> Iterator[int]:
    yield from range(number)


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=1, ps=2) as made:
        made.status()  # makes its connection
        yield made


@pytest.fixture
def strategy(cluster: zd.local_cluster) -> Iterator[zd.ParameterServerStrategy]:
    made = zd.ParameterServerStrategy(cluster)
    yield made
    made.close()


@pytest.fixture
def coordinator(strategy: zd.ParameterServerStrategy) -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(strategy) as made:
        yield made


def rows(cluster: zd.local_cluster, process: str) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in cluster.status()["rpc"] if row["process"] == process}


def variables(cluster: zd.local_cluster) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in cluster.status()["variables"]}


def test_variable_has_bytes_and_updates(
    cluster: zd.local_cluster,
    strategy: zd.ParameterServerStrategy,
    coordinator: ClusterCoordinator,
) -> None:
    with strategy.scope():
        small = zd.Variable(np.zeros(10), name="small")
        large = zd.Variable(np.zeros((1000, 100)), name="large")
    until(lambda: "small" in variables(cluster))
    coordinator.schedule(updates, args=(small,))
    coordinator.join()
    until(lambda: variables(cluster)["small"]["updates"] == UPDATES)
    row = variables(cluster)["small"]
    assert (row["server"], row["shape"], row["dtype"]) == ("ps:0", [10], "float64")
    assert (row["bytes"], row["waits_s"]) == (80, 0.0)
    assert row["updates_per_s"] > 0
    assert variables(cluster)["large"]["bytes"] == large.numpy().nbytes
    update = rows(cluster, "ps:0")["zmqdist.ps.update"]
    assert update["count"] >= UPDATES
    assert 0 < update["p50_s"] <= update["p99_s"] <= update["max_s"] < 20


def test_variables_are_gone_with_their_strategy(
    cluster: zd.local_cluster, strategy: zd.ParameterServerStrategy
) -> None:
    with strategy.scope():
        kept = zd.Variable(np.zeros(10), name="kept")
    with ClusterCoordinator(strategy):
        until(lambda: kept.name in variables(cluster))
    until(lambda: not variables(cluster))


def test_methods_of_program_are_rows(cluster: zd.local_cluster) -> None:
    door = threading.Event()

    def fails() -> None:
        raise ValueError("no")

    def waits() -> None:
        door.wait(20)

    served = {"double": double, "fails": fails, "waits": waits, "count_to": count_to}
    with (
        cluster.coordinator(),
        zd.rpc.serve(methods=served) as server,
        zd.rpc.connect(server.address) as client,
    ):
        name = f"rpc {server.address}"
        for number in range(20):
            client.double_blocking(number)
        with pytest.raises(ValueError, match="no"):
            client.fails_blocking()
        assert list(client.count_to(3)) == [0, 1, 2]
        waiting = client.waits()
        until(lambda: rows(cluster, name).get("waits", {}).get("in_flight") == 1)
        methods = rows(cluster, name)
        assert (methods["double"]["count"], methods["double"]["failed"]) == (20, 0)
        assert (methods["fails"]["count"], methods["fails"]["failed"]) == (1, 1)
        assert methods["waits"]["count"] == 0
        door.set()
        waiting.get_value()
        until(lambda: rows(cluster, name)["waits"]["count"] == 1)
        assert rows(cluster, name)["count_to"]["count"] == 1
    until(lambda: not rows(cluster, name))


def test_methods_of_dispatcher_are_rows(cluster: zd.local_cluster) -> None:
    cluster.status()
    assert rows(cluster, "dispatcher")["facts"]["count"] >= 1


def test_server_in_threads_of_the_program_counts_once() -> None:
    with zd.local_cluster(workers=2, ps=1, processes=False) as cluster:
        strategy = zd.ParameterServerStrategy(cluster)
        with strategy.scope():
            zd_variable = zd.Variable(np.zeros(10), name="once")
        with ClusterCoordinator(strategy) as coordinator:
            coordinator.schedule(updates, args=(zd_variable,))
            coordinator.join()
            until(lambda: variables(cluster).get("once", {}).get("updates") == UPDATES)
            names = [row["name"] for row in cluster.status()["variables"]]
            assert names == ["once"]
        strategy.close()


def test_parameter_server_that_dies_is_shown_no_more() -> None:
    with zd.local_cluster(workers=1, ps=1) as cluster:
        strategy = zd.ParameterServerStrategy(cluster)
        with strategy.scope():
            lost = zd.Variable(np.zeros(10), name="lost")
        with ClusterCoordinator(strategy):
            until(lambda: lost.name in variables(cluster))
            cluster.kill_ps(0)
            until(lambda: not variables(cluster))
        strategy.close()

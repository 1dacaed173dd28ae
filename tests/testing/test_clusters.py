"""Addresses that stay free, and the servers of a cluster in this process."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

import zmqdist as zd
from zmqdist.rpc import Client, ZmqServer
from zmqdist.testing import create_cluster_spec, create_in_process_cluster, get_barrier, run
from zmqdist.testing.runner.clusters import InProcessCluster


def _ports(cluster: dict[str, list[str]]) -> list[int]:
    addresses = [address for tasks in cluster.values() for address in tasks]
    assert all(address.startswith("localhost:") for address in addresses)
    return [int(address.partition(":")[2]) for address in addresses]


def _serving(address: str) -> ZmqServer:
    server = ZmqServer(address)
    server.register("where", lambda: address)
    return server


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ({}, {"worker": 1}),
        (
            {"has_chief": True, "num_workers": 2, "num_ps": 3, "has_eval": True},
            {"chief": 1, "worker": 2, "ps": 3, "evaluator": 1},
        ),
        ({"num_workers": 0, "num_ps": 1}, {"ps": 1}),
    ],
)
def test_cluster_has_requested_tasks(arguments: Any, counts: dict[str, int]) -> None:
    cluster = create_cluster_spec(**arguments)
    assert {job: len(tasks) for job, tasks in cluster.items()} == counts
    assert json.loads(json.dumps(cluster)) == cluster
    assert isinstance(cluster, dict)


def test_reserved_port_is_for_its_server_only() -> None:
    cluster = create_cluster_spec(num_workers=1)
    (port,) = _ports(cluster)
    rest = [create_cluster_spec(num_workers=20) for _ in range(10)]
    ports = [port, *(item for second in rest for item in _ports(second))]
    assert len(set(ports)) == 201
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    with _serving(cluster["worker"][0]):
        client = Client.create("zmq", cluster["worker"][0])
        assert client.where_blocking() == cluster["worker"][0]
        client.close()


def test_port_of_unreferenced_cluster_is_free() -> None:
    cluster = create_cluster_spec()
    (port,) = _ports(cluster)
    del cluster
    gc.collect()
    with socket.socket() as anybody:
        anybody.bind(("127.0.0.1", port))


def test_tasks_call_each_other() -> None:
    def work() -> str:
        config = json.loads(os.environ["TF_CONFIG"])
        workers, index = config["cluster"]["worker"], config["task"]["index"]
        with _serving(workers[index]):
            client = Client.create("zmq", workers[1 - index], timeout_in_ms=20_000)
            message = client.where_blocking()
            client.close()
            get_barrier().wait()  # the other one still needs this server
        return message

    cluster = create_cluster_spec(num_workers=2)
    assert sorted(run(work, cluster).return_value) == sorted(cluster["worker"])


@pytest.mark.parametrize("number", [-1, 1.5, "2", None])
def test_bad_task_count_is_refused(number: Any) -> None:
    with pytest.raises(
        ValueError, match=r"0 or more tasks of ps|num_ps is .*, wants a whole number"
    ):
        create_cluster_spec(num_ps=number)
    with pytest.raises(
        ValueError, match=r"0 or more tasks of worker|num_workers is .*, wants a whole number"
    ):
        create_in_process_cluster(num_workers=number, num_ps=0)


def test_threads_cluster_serves_until_stopped() -> None:
    with create_in_process_cluster(num_workers=2, num_ps=1, has_chief=True) as cluster:
        assert {job: len(tasks) for job, tasks in cluster.items()} == {
            "chief": 1,
            "worker": 2,
            "ps": 1,
        }
        for port in _ports(cluster):
            socket.create_connection(("127.0.0.1", port)).close()
    for port in _ports(cluster):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    cluster.stop()


def test_unreferenced_in_process_cluster_serves() -> None:
    addresses = [
        address
        for tasks in create_in_process_cluster(num_workers=1, num_ps=1).values()
        for address in tasks
    ]
    gc.collect()
    for address in addresses:
        socket.create_connection(("127.0.0.1", int(address.partition(":")[2]))).close()
    (cluster,) = [item for item in gc.get_objects() if isinstance(item, InProcessCluster)]
    assert [address for tasks in cluster.values() for address in tasks] == addresses
    cluster.stop()


def test_threads_cluster_has_one_layer() -> None:
    with pytest.raises(ValueError, match="rpc_layer must be 'zmq', not 'grpc'"):
        create_in_process_cluster(1, 0, rpc_layer="grpc")


def test_names_load_on_first_use() -> None:
    program = "import sys, zmqdist.testing; print([name for name in ('numpy', 'zmq', 'cloudpickle') if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
    assert set(zd.testing.__all__) <= set(dir(zd.testing))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        zd.testing.nothing  # noqa: B018

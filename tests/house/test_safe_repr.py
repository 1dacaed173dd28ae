"""Objects say at a prompt what they are: address, workers, state; no memory address, no secret, and
never an error."""

from __future__ import annotations

import re
from typing import Any

import pytest

import zmqdist as zd
from zmqdist.launch.connection import Cluster

HALF_MADE: list[type] = [
    zd.local_cluster,
    Cluster,
    zd.DispatchServer,
    zd.WorkerServer,
    zd.Server,
    zd.rpc.ZmqServer,
    zd.rpc.ZmqClient,
    zd.Executor,
    zd.ParameterServerStrategy,
    zd.Variable,
]


@pytest.mark.parametrize("cls", HALF_MADE, ids=[cls.__name__ for cls in HALF_MADE])
def test_half_made_object_has_repr(cls: type) -> None:
    half = object.__new__(cls)
    assert re.fullmatch(rf"<{cls.__name__} [^<>]*>", repr(half))
    assert hex(id(half)) not in repr(half)


def test_repr_of_clusters_and_executors() -> None:
    with zd.local_cluster(workers=1, ps=1, processes=False) as cluster:
        place = re.escape(cluster.target)
        assert re.fullmatch(f"<local_cluster at {place}, workers=1, ps=1>", repr(cluster))
        assert re.fullmatch(f"<DispatchServer at {place}, workers=1>", repr(cluster.dispatcher))
        worker, ps = cluster.servers
        assert re.fullmatch("<WorkerServer worker:0 at 127.0.0.1:[0-9]+>", repr(worker))
        assert re.fullmatch("<Server of ps:0 at 127.0.0.1:[0-9]+>", repr(ps))
        with zd.ParameterServerStrategy(cluster) as strategy:
            assert re.fullmatch(
                f"<ParameterServerStrategy of {place}, workers=1, ps=1>", repr(strategy)
            )
            with strategy.scope():
                variable = zd.Variable([1.0, 2.0], name="w", dtype="float32")
            assert repr(variable) == "<Variable 'w' shape=(2,) dtype=float32 on ps:0>"
        with zd.Executor(cluster) as executor:
            assert re.fullmatch("<Executor of zmq://.*: 0 unfinished>", repr(executor))
    assert repr(executor).endswith(": 0 unfinished, shut down>")
    assert repr(cluster) == "<local_cluster closed>"
    assert repr(cluster.dispatcher) == "<DispatchServer stopped>"
    assert repr(worker).endswith(", stopped>")
    assert repr(ps).endswith(", stopped>")


def test_repr_of_rpc_servers_and_clients() -> None:
    server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
    assert repr(server) == "<ZmqServer at 127.0.0.1:0: not started>"
    with server, zd.rpc.Client.create("zmq", server.address) as client:
        assert repr(server) == f"<ZmqServer at {server.address}: serving>"
        assert repr(client) == f"<ZmqClient of {server.address}>"
    assert repr(server).endswith(": stopped>")


def test_repr_of_unstarted_dispatcher() -> None:
    assert repr(zd.DispatchServer(start=False)) == "<DispatchServer not started>"


def test_repr_of_connection() -> None:
    with zd.DispatchServer() as dispatcher, zd.connect(dispatcher.target) as cluster:
        assert repr(cluster) == f"<Cluster at {dispatcher.target}>"
    assert repr(cluster).endswith(", closed>")


def secret_of(cluster: zd.local_cluster) -> str:
    with open(str(cluster.credentials.token_file)) as file:
        return file.read().strip()


def test_repr_contains_no_secret() -> None:
    with zd.local_cluster(workers=1, processes=False) as cluster, zd.Executor(cluster) as executor:
        every: list[Any] = [
            cluster,
            cluster.dispatcher,
            *cluster.servers,
            executor,
            cluster.credentials,
        ]
        assert not [value for value in every if secret_of(cluster) in repr(value)]

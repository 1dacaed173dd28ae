"""A program as a task of a cluster: contract U1, U2, U4. U3 (tasks that come and go while
connected) is void: to change the cluster is to connect again. `make_master_device_default` is, too:
what a session does without a task, it does on its target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zmqdist as zd
from tests.ports import free_addresses
from zmqdist.errors import InvalidArgumentError, NotFoundError, UnknownError
from zmqdist.tasks import connect

Made = Callable[..., zd.Server]


@pytest.fixture(autouse=True)
def _leave() -> Iterator[None]:
    yield
    connect.disconnect()


class Resolver:
    """What the cluster resolvers have."""

    def __init__(self, spec: zd.ClusterSpec, master: str, rpc_layer: str | None = "zmq") -> None:
        self._spec, self._master, self.rpc_layer = spec, master, rpc_layer

    def cluster_spec(self) -> zd.ClusterSpec:
        return self._spec

    def master(self) -> str:
        return self._master


def task() -> str:
    return zd.Server.current().task


def test_program_without_job_is_added(made: Made) -> None:
    addresses = free_addresses(2)
    for index in range(2):
        made({"worker": addresses}, "worker", index)
    server = zd.connect_to_cluster(zd.ClusterSpec({"worker": addresses}))
    assert server is not None
    assert (server.task, server.cluster_spec.jobs) == ("localhost:0", ["localhost", "worker"])
    with zd.Session(server) as session:
        assert [session.run(task, task=name) for name in ("worker:0", "worker:1", None)] == [
            "worker:0",
            "worker:1",
            "localhost:0",
        ]


def test_program_in_cluster_serves_its_address() -> None:
    addresses = free_addresses(2)
    server = zd.connect_to_cluster(zd.ClusterSpec({"worker": addresses}), "worker", 1)
    assert server is not None
    assert (server.task, server.address) == ("worker:1", addresses[1])


def test_connecting_again_leaves_first_cluster() -> None:
    (address,) = free_addresses(1)
    first = zd.connect_to_cluster(zd.ClusterSpec({"worker": [address]}), "worker", 0)
    second = zd.connect_to_cluster(zd.ClusterSpec({"worker": [address]}), "worker", 0)
    assert first is not None
    assert second is not None
    assert first.join(0)
    assert not second.join(0)


@pytest.mark.parametrize("given", [None, {"worker": ["a:1"]}, "a:1", 7])
def test_bad_cluster_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="takes a ClusterSpec or a cluster resolver"):
        zd.connect_to_cluster(given)


def test_resolver_gives_cluster_and_layer() -> None:
    spec = zd.ClusterSpec({"worker": free_addresses(1)})
    for master in ("", "local"):
        assert zd.connect_to_cluster(Resolver(spec, master)) is None
    server = zd.connect_to_cluster(Resolver(spec, "zmq://x:1"))
    assert server is not None
    assert server.cluster_spec.jobs == ["localhost", "worker"]
    with pytest.raises(NotFoundError, match="'grpc'"):
        zd.connect_to_cluster(Resolver(spec, "grpc://x:1", "grpc"))


def test_connect_to_host_takes_addresses(made: Made) -> None:
    addresses = free_addresses(2)
    for index in range(2):
        made({"worker": addresses}, "worker", index)
    server = zd.connect_to_host(f"zmq://{addresses[0]}")
    assert server is not None
    assert server.check_alive("worker:0")
    server = zd.connect_to_host([addresses[0], f"zmq://{addresses[1]}"], "compute")
    assert server is not None
    assert [server.check_alive(f"compute:{index}") for index in range(2)] == [True, True]
    for nothing in (None, "", []):
        with pytest.raises(ValueError, match="at least one address"):
            zd.connect_to_host(nothing)
    for wrong in (5, [5], "nohost", ["127.0.0.1:1", "127.0.0.1:1"]):
        with pytest.raises(ValueError, match="connect_to_host"):
            zd.connect_to_host(wrong)  # type: ignore[arg-type]


def test_check_alive(made: Made) -> None:
    """testCheckAlive"""
    with pytest.raises(ValueError, match="connected to no cluster"):
        zd.check_alive("/job:worker/replica:0/task:0")
    addresses = free_addresses(2)
    made({"worker": addresses}, "worker", 0)
    zd.connect_to_host(addresses)
    assert zd.check_alive("/job:worker/replica:0/task:0")
    assert zd.check_alive("/job:localhost/replica:0/task:0")
    assert not zd.check_alive("/job:worker/replica:0/task:1")
    for name in ("/job:worker/replica:0/task:2", "/job:ps/replica:0/task:0"):
        with pytest.raises(InvalidArgumentError, match="no task"):
            zd.check_alive(name)
    for name in ("/job:worker", "/job:worker/task:0", "worker:0"):
        with pytest.raises(InvalidArgumentError, match="wanted /job:NAME/replica:0/task:N"):
            zd.check_alive(name)


def test_taken_port_leaves_no_cluster(made: Made) -> None:
    (address,) = free_addresses(1)
    made({"worker": [address]})
    with pytest.raises(UnknownError, match="in use"):
        zd.connect_to_cluster(zd.ClusterSpec({"worker": [address]}), "worker", 0)
    with pytest.raises(ValueError, match="connected to no cluster"):
        zd.check_alive("/job:worker/replica:0/task:0")

"""What programs for TensorFlow type: keywords of its servers that work, and gRPC, which is refused
with the line to type instead."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import zmqdist as zd
from zmqdist import coordinator, resolvers
from zmqdist.data import Dataset
from zmqdist.data.experimental import service
from zmqdist.errors import InvalidArgumentError, NotFoundError
from zmqdist.tasks.coordinator_utils import start_server
from zmqdist.testing import create_in_process_cluster

SPEC = zd.ClusterSpec({"worker": ["localhost:1"], "ps": ["localhost:2"]})


def resolver() -> resolvers.SimpleClusterResolver:
    return resolvers.SimpleClusterResolver(SPEC, "localhost:1", "worker", 0, rpc_layer="grpc")


def through(target: Any) -> Any:
    return Dataset.range(3).apply(service.distribute("parallel_epochs", target))


def test_data_servers_take_their_configs() -> None:
    with (
        service.DispatchServer(port=0, protocol=None, start=True) as dispatcher,
        service.WorkerServer(port=0, dispatcher_address=dispatcher.address),
    ):
        assert sorted(map(int, through(dispatcher.target))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: service.DispatchServer(0),
            "config is 0, wants a DispatcherConfig, or no config and keywords such as port=0",
        ),
        (
            lambda: service.DispatchServer(service.DispatcherConfig(), port=0),
            "wants a DispatcherConfig, or no config",
        ),
        (
            lambda: service.WorkerServer("localhost:1"),
            "wants a WorkerConfig, or no config and keywords .* dispatcher_address",
        ),
        (lambda: service.WorkerServer(port=0), "Must specify a `dispatcher_address`"),
    ],
)
def test_server_reports_its_signature(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        make()


def test_method_takes_tensorflow_keywords() -> None:
    server = zd.rpc.Server.create("zmq", "localhost:0")
    server.register(method_name="double", func=lambda x: 2 * x)
    server.start()
    with server, zd.rpc.Client.create("zmq", server.address) as client:
        assert client.call("double", 21).get_value() == [42]


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: zd.rpc.Server.create("grpc", "localhost:1"),
        ValueError,
        r'write Server.create\("zmq", \'localhost:1\'\)',
    ),
    (
        lambda: zd.rpc.Client.create("grpc", "localhost:1"),
        ValueError,
        r'write Client.create\("zmq", \'localhost:1\'\)',
    ),
    (
        lambda: zd.rpc.Client.create("zmq", "grpc://localhost:1"),
        InvalidArgumentError,
        "write host:port without grpc://",
    ),
    (
        lambda: service.DispatcherConfig(protocol="grpc"),
        RuntimeError,
        r"write DispatcherConfig\(protocol='zmq'\)",
    ),
    (
        lambda: service.DispatchServer(port=0, protocol="grpc"),
        RuntimeError,
        r"write DispatcherConfig\(protocol='zmq'\)",
    ),
    (
        lambda: service.WorkerConfig("localhost:1", protocol="grpc"),
        RuntimeError,
        r"write WorkerConfig\(protocol='zmq'\)",
    ),
    (
        lambda: service.WorkerConfig("localhost:1", data_transfer_protocol="grpc"),
        NotFoundError,
        'write data_transfer_protocol="zmq"',
    ),
    (lambda: through("grpc://localhost:1"), NotFoundError, 'write "zmq://localhost:1"'),
    (lambda: through(("grpc", "localhost:1")), NotFoundError, 'write "zmq://localhost:1"'),
    (lambda: zd.Server(SPEC, "ps", 0, protocol="grpc"), NotFoundError, 'Write protocol="zmq"'),
    (lambda: zd.ParameterServerStrategy(resolver()), ValueError, 'write rpc_layer="zmq"'),
    (lambda: start_server(resolver()), NotFoundError, 'rpc_layer="zmq"'),
    (lambda: zd.connect_to_cluster(resolver()), NotFoundError, 'rpc_layer="zmq"'),
    (
        lambda: zd.connect_to_host("grpc://localhost:1"),
        ValueError,
        "write host:port without grpc://",
    ),
    (lambda: zd.Session("grpc://localhost:1"), NotFoundError, 'wanted "zmq://host:port"'),
    (
        lambda: coordinator.ClusterCoordinator("grpc://localhost:1"),
        ValueError,
        "write host:port without grpc://",
    ),
    (
        lambda: create_in_process_cluster(1, 1, rpc_layer="grpc"),
        ValueError,
        'write rpc_layer="zmq"',
    ),
]


@pytest.mark.parametrize(("use", "error", "text"), REFUSED)
def test_grpc_is_refused_with_hint(
    use: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        use()


def test_strategy_refuses_grpc_in_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        os.environ,
        "TF_CONFIG",
        '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "rpc_layer": "grpc"}',
    )
    with pytest.raises(ValueError, match=r"rpc_layer is 'grpc'.*write rpc_layer=.zmq.*TF_CONFIG"):
        zd.ParameterServerStrategy(resolvers.TFConfigClusterResolver())

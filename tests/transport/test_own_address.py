"""Addresses of this host's interfaces, ports of a range, advertised addresses."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

import zmqdist as zd
from zmqdist.addresses import VARIABLE, advertised_address, parse_ports
from zmqdist.errors import InvalidArgumentError, UnknownError
from zmqdist.launch.ports import Reserved
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.servers.dispatch_server import DispatchServer
from zmqdist.servers.worker_server import WorkerServer
from zmqdist.transport.own_address import bindable, listen


def free_range(count: int) -> range:
    """Return ports that were free a moment ago, above the range from which the system takes free
    ports."""
    for first in range(61_100, 65_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return range(first, first + count)
    raise AssertionError("no free ports")


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> range:
    found = free_range(3)
    monkeypatch.setenv(VARIABLE, f"{found[0]}-{found[-1]}")
    return found


def test_interface_stands_for_its_address() -> None:
    assert bindable("lo") == "127.0.0.1"
    assert bindable("127.0.0.2") == "127.0.0.2"
    assert bindable("localhost") == "localhost"
    assert bindable("*") == "*"


@pytest.mark.parametrize(
    "start",
    [
        lambda: DispatchServer(DispatcherConfig(host="nosuch0")),
        lambda: zd.Server(
            {"ps": ["127.0.0.1:0"]}, job_name="ps", task_index=0, bind_host="nosuch0"
        ),
        lambda: Reserved("nosuch0"),
    ],
    ids=["dispatcher", "task", "launcher"],
)
def test_unknown_interface_is_named_with_known_ones(start: Callable[[], object]) -> None:
    with pytest.raises(
        UnknownError, match=r"this host has no interface nosuch0, and .* its interfaces are .*lo"
    ):
        start()


def test_dispatcher_binds_interface() -> None:
    with DispatchServer(DispatcherConfig(host="lo")) as dispatcher:
        assert dispatcher.address.startswith("127.0.0.1:")


def test_servers_fill_range_of_ports(ports: range) -> None:
    servers = [zd.rpc.Server.create("zmq", "127.0.0.1:0") for _ in ports]
    try:
        for server in servers:
            server.start()
        assert {int(server.address.rpartition(":")[2]) for server in servers} == set(ports)
        sentence = f"could not bind 127.0.0.1: each port of {VARIABLE}={ports[0]}-{ports[-1]} is in use there; "
        for take in (
            lambda: listen("127.0.0.1"),
            Reserved,
            zd.rpc.Server.create("zmq", "127.0.0.1:0").start,
        ):
            with pytest.raises(UnknownError) as caught:
                take()
            assert sentence in str(caught.value)
    finally:
        for server in servers:
            server.stop()


def test_ports_of_range_are_reserved_once(ports: range) -> None:
    reserved = [Reserved() for _ in ports]
    try:
        assert {int(each.address.rpartition(":")[2]) for each in reserved} == set(ports)
        with zd.rpc.Server.create("zmq", reserved[0].address) as server:
            assert server.address == reserved[0].address
    finally:
        for each in reserved:
            each.close()


def test_server_avoids_reserved_ports(ports: range) -> None:
    reserved = [Reserved() for _ in ports[1:]]
    (free,) = set(ports) - {int(each.address.rpartition(":")[2]) for each in reserved}
    try:
        with zd.rpc.Server.create("zmq", "127.0.0.1:0") as server:
            assert server.address == f"127.0.0.1:{free}"
    finally:
        for each in reserved:
            each.close()


@pytest.mark.parametrize(
    "text", ["5000", "5000-", "x-y", "0-5", "6000-5000", "5000-70000", "5000-5100-5200"]
)
def test_invalid_range_of_ports_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="is not a range of ports"):
        parse_ports(text)
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(InvalidArgumentError, match=f"^{VARIABLE}: .* is not a range of ports"):
        listen("127.0.0.1")


def test_dispatcher_announces_advertised_address() -> None:
    with DispatchServer(DispatcherConfig(advertise="gateway.example")) as dispatcher:
        assert dispatcher.target == f"zmq://gateway.example:{dispatcher.address.rpartition(':')[2]}"
    with DispatchServer(DispatcherConfig(advertise="gateway.example:7000")) as dispatcher:
        assert dispatcher.target == "zmq://gateway.example:7000"


def test_large_results_use_advertised_address() -> None:
    with (
        DispatchServer() as dispatcher,
        WorkerServer(
            WorkerConfig(dispatcher.address, worker_address="127.0.0.7:%port%", insecure=False)
        ) as worker,
    ):
        port = worker.address.rpartition(":")[2]
        (row,) = dispatcher.snapshot().workers
        assert row.address == worker.advertised_address == f"127.0.0.7:{port}"


@pytest.mark.parametrize(
    ("told", "address"),
    [
        ("gateway", "gateway:5050"),
        ("gateway:7000", "gateway:7000"),
        ("::1", "[::1]:5050"),
        ("[::1]", "[::1]:5050"),
        ("[::1]:7000", "[::1]:7000"),
    ],
)
def test_advertised_address_may_lack_port(told: str, address: str) -> None:
    assert advertised_address(told, 5050) == address


def test_data_task_leaves_full_range_of_ports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (port,) = free_range(1)
    with DispatchServer() as dispatcher:
        monkeypatch.setenv(VARIABLE, f"{port}-{port}")
        with WorkerServer(WorkerConfig(dispatcher.address, processes=True)):
            service = zd.data.service
            elements = zd.data.Dataset.range(3).apply(
                service.distribute("parallel_epochs", dispatcher.target)
            )
            assert sorted(int(element) for element in elements) == [0, 1, 2]
    assert (
        "of the data service takes a port that a firewall may reject: could not bind 127.0.0.1: "
        "each port" in caplog.text
    )

"""Which task a Server is: contract S1.1 to S1.11, S2.1, S4.2, S4.3, C15.

There is one protocol: on one host "zmq" uses shared memory, which ipc and inproc would not make
faster (S1.5).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from zmqdist.cluster.defs import ClusterDef, ServerDef
from zmqdist.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnknownError,
)
from zmqdist.tasks.definition import EVERYWHERE, address_to_bind, effective
from zmqdist.tasks.server import Server
from zmqdist.transport import keys

Made = Callable[..., Server]

TWO_JOBS = {"ps": ["ps0:1"], "worker": ["w0:1", "w1:1"]}


@pytest.mark.parametrize(
    ("given", "job", "index", "wanted"),
    [
        ({"local": ["a:1"]}, None, None, ("local", 0)),
        ({"local": {37: "a:1"}}, None, None, ("local", 37)),
        (TWO_JOBS, "ps", None, ("ps", 0)),
        (TWO_JOBS, "worker", 1, ("worker", 1)),
        (zd.ClusterSpec(TWO_JOBS), "worker", 0, ("worker", 0)),
        (zd.ClusterSpec(TWO_JOBS).as_cluster_def(), "worker", 0, ("worker", 0)),
        (
            ServerDef(zd.ClusterSpec(TWO_JOBS).as_cluster_def(), "worker", 1),
            None,
            None,
            ("worker", 1),
        ),
        (ServerDef(zd.ClusterSpec(TWO_JOBS).as_cluster_def(), "worker", 1), "ps", 0, ("ps", 0)),
    ],
)
def test_task_is_named_or_the_only_task(given: Any, job: Any, index: Any, wanted: Any) -> None:
    found = effective(given, job, index)
    assert (found.job_name, found.task_index, found.protocol) == (*wanted, "zmq")
    assert zd.ClusterSpec(found.cluster) == zd.ClusterSpec(getattr(given, "cluster", given))


@pytest.mark.parametrize(
    ("given", "job", "index", "error", "expected"),
    [
        (TWO_JOBS, None, None, ValueError, "which job"),
        (TWO_JOBS, "worker", None, ValueError, "which task of job 'worker'"),
        (TWO_JOBS, "chief", None, ValueError, "no job 'chief'"),
        (TWO_JOBS, "chief", 0, InvalidArgumentError, "not defined in cluster"),
        (TWO_JOBS, "worker", 2, InvalidArgumentError, "not defined in cluster"),
        (TWO_JOBS, "worker", -1, InvalidArgumentError, "not defined in cluster"),
        ({}, None, None, ValueError, "which job"),
        ({"worker": []}, None, None, ValueError, "which task"),
        (None, None, None, TypeError, "a cluster is"),
        (["a:1"], None, None, TypeError, "a cluster is"),
        ({"worker": "a:1"}, None, None, TypeError, "'worker'"),
        ({"worker": [7]}, None, None, TypeError, "'worker'"),
        (
            ServerDef(ClusterDef(), "worker", 0),
            None,
            None,
            InvalidArgumentError,
            "not defined in cluster",
        ),
        (TWO_JOBS, "worker", True, InvalidArgumentError, "task_index is True, wants int"),
        (TWO_JOBS, "worker", "0", InvalidArgumentError, "task_index is '0', wants int"),
    ],
)
def test_missing_task_is_refused(
    given: Any, job: Any, index: Any, error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        effective(given, job, index)


def test_config_must_be_a_dict() -> None:
    with pytest.raises(TypeError, match="the config of a server is a dict of options, not 5"):
        effective({"local": ["a:1"]}, config=5)  # type: ignore[arg-type]


def test_unknown_protocol_is_refused() -> None:
    with pytest.raises(NotFoundError, match=r"'grpc'.*there is: zmq"):
        effective({"local": ["a:1"]}, protocol="grpc")


def test_server_def_stays_unchanged() -> None:
    given = ServerDef(zd.ClusterSpec(TWO_JOBS).as_cluster_def(), "worker", 1)
    found = effective(given, config={"x": 1})
    assert (given.protocol, given.default_session_config) == ("", {})
    assert (found.protocol, found.default_session_config) == ("zmq", {"x": 1})
    assert found.cluster is not given.cluster


def test_set_configuration(made: Made) -> None:
    """testSetConfiguration"""
    config = {"gpu_options": {"per_process_gpu_memory_fraction": 0.1}}
    local = Server.create_local_server(config, start=False)
    assert local.server_def.default_session_config == config
    local.stop()
    given = ServerDef(
        zd.ClusterSpec({"localhost": ["localhost:0"]}).as_cluster_def(),
        "localhost",
        0,
        protocol="zmq",
        default_session_config={"gpu_options": {"growth": True}, "slots": 2},
    )
    server = made(given, config=config, start=False)
    assert server.server_def.default_session_config == {
        "gpu_options": {"growth": True, "per_process_gpu_memory_fraction": 0.1},
        "slots": 2,
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"slotz": 4}, r"config\['slotz'\] is no option of a server: did you mean 'slots'\?"),
        (
            {"colour": 1},
            (
                r"config\['colour'\] is no option of a server: it may have isolate_session_state, .*, "
                r"coordination"
            ),
        ),
        (
            {"cluster_def": {}},
            r"config\['cluster_def'\] .*a session works on the cluster of its target",
        ),
        (
            {"device_filters": []},
            r"config\['device_filters'\] .*the `cluster_device_filters` of its ServerDef",
        ),
    ],
)
def test_unknown_option_is_refused(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidArgumentError, match=expected):
        Server.create_local_server(config, start=False)


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:", "localhost:x", "localhost:70000", "::1:5050"]
)
def test_invalid_hostname(address: str) -> None:
    """testInvalidHostname"""
    with pytest.raises(InvalidArgumentError, match="port"):
        Server({"local": [address]}, protocol="zmq")


@pytest.mark.parametrize("start", [True, False])
def test_two_servers_same_port(made: Made, start: bool) -> None:
    """testTwoServersSamePort, also where neither serves yet"""
    first = made({"local": ["localhost:0"]}, start=start)
    with pytest.raises(UnknownError, match=r"could not start the server of local:0.*in use"):
        Server({"local": [first.target.removeprefix("zmq://")]}, start=start)


def test_target_has_written_host_and_real_port(made: Made) -> None:
    server = made({"local": ["localhost:0"]}, start=False)
    host, _, port = server.target.removeprefix("zmq://").rpartition(":")
    assert host == "localhost"
    assert int(port) > 0
    assert server.server_def.cluster.job[0].tasks == {0: "localhost:0"}
    assert server.cluster_spec == {"local": {0: "localhost:0"}}
    assert (server.task, server.address) == ("local:0", f"localhost:{port}")
    assert made({"local": [":0"]}).target.startswith("zmq://localhost:")


def test_port_of_server_def_comes_first(made: Made) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
    cluster = zd.ClusterSpec({"local": ["localhost:1"]}).as_cluster_def()
    assert made(ServerDef(cluster, "local", 0, port=port)).target == f"zmq://localhost:{port}"


def test_listening_address_is_chosen() -> None:
    assert address_to_bind("localhost:5", None) == "127.0.0.1:5"
    assert address_to_bind("127.0.0.1:5", None) == "127.0.0.1:5"
    assert address_to_bind("[::1]:5", "127.0.0.1") == "127.0.0.1:5"
    assert address_to_bind("some.other.host.invalid:5", None) == f"{EVERYWHERE}:5"
    assert address_to_bind("192.0.2.1:5", None) == f"{EVERYWHERE}:5"
    assert address_to_bind("some.other.host.invalid:5", "localhost") == "localhost:5"
    assert address_to_bind("some.other.host.invalid:5", "::1") == "[::1]:5"


def test_public_host_needs_keys(made: Made, tmp_path: Path) -> None:
    cluster = {"local": ["some.other.host.invalid:0"]}
    with pytest.raises(FailedPreconditionError, match=r"no address of this host.*zmqdist keygen"):
        Server(cluster)
    keys.keygen(tmp_path / "keys")
    assert made(cluster, keys_dir=tmp_path / "keys").target.startswith(
        "zmq://some.other.host.invalid:"
    )
    assert made(cluster, bind_host="127.0.0.1").target.startswith("zmq://some.other.host.invalid:")


def test_listening_socket_is_used(made: Made) -> None:
    reserved = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{reserved.getsockname()[1]}"
    server = made({"local": [address]}, listener=reserved.detach())
    with zd.Session(server) as session:
        assert (server.address, session.run(len, "abc")) == (address, 3)

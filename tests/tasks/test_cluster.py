"""Sessions with the tasks of a cluster: contract 3.5, S7.2, S7.5, S7.6, N2, each bullet by name."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.tasks.helpers import cluster_of, start_child
from zmqdist.cluster.defs import ClusterDeviceFilters, ServerDef
from zmqdist.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from zmqdist.rpc import internal_client
from zmqdist.tasks.server import Server
from zmqdist.tasks.session import Session, TaskInfo
from zmqdist.transport import keys

Made = Callable[..., Server]
Child = Callable[..., "subprocess.Popen[str]"]


def all_of(made: Made, cluster: dict[str, list[str]], **options: Any) -> dict[str, Server]:
    return {
        f"{job}:{index}": made(cluster, job, index, **options)
        for job, addresses in cluster.items()
        for index in range(len(addresses))
    }


def where() -> str:
    return Server.current().task


def test_sparse_job(made: Made) -> None:
    """testSparseJob"""
    server = made({"local": {37: "localhost:0"}})
    with Session(server.target) as session:
        assert session.run(lambda: np.float32(1.0), task="/job:local/task:37") == 1.0
        assert session.run(where, task="/job:local/task:37") == "local:37"


def test_multiple_containers(made: Made) -> None:
    """testMultipleContainers"""
    server = made({"local": ["localhost:0"]})
    with Session(server) as first:
        first.assign("v0", 1.0, "test0")
        first.assign("v1", 2.0, "test1")
        assert (first.read("v0", "test0"), first.read("v1", "test1")) == (1.0, 2.0)
        Session.reset(server.target, ["test0"])
        with pytest.raises(AbortedError):
            first.read("v1", "test1")
    with Session(server) as second:
        with pytest.raises(FailedPreconditionError, match="container 'test0'"):
            second.read("v0", "test0")
        assert second.read("v1", "test1") == 2.0
        assert list(second.variables("test1")) == ["v1"]
        assert second.variables() == second.variables("test0") == {}


def test_same_variables_clear(made: Made) -> None:
    """testSameVariablesClear"""
    server = made({"local": ["localhost:0"]})

    def product() -> Any:
        variables = Server.current().variables
        return variables.read("v0") @ variables.read("v1")

    with Session(server) as first, Session(server) as second:
        first.assign("v0", [[2.0, 2.0]])
        first.assign("v1", [[1.0], [1.0]])
        assert first.run(product) == second.run(product) == [[4.0]]
        Session.reset(server.target)
        for session in (second, first):
            with pytest.raises(AbortedError, match="make a new one"):
                session.run(product)
    with Session(server) as third:
        with pytest.raises(FailedPreconditionError):
            third.run(product)
        third.assign("v0", [[2.0, 2.0]])
        third.assign("v1", [[1.0], [1.0]])
        assert third.run(product) == [[4.0]]


def test_same_variables_clear_container(made: Made) -> None:
    """testSameVariablesClearContainer"""
    servers = [made({"local0": ["localhost:0"]}), made({"local1": ["localhost:0"]})]
    for server, value in zip(servers, (1.0, 2.0), strict=True):
        with Session(server) as session:
            session.assign("v", value)
    Session.reset(servers[0].target, ["local0"])
    with Session(servers[0]) as session, pytest.raises(FailedPreconditionError):
        session.read("v")
    with Session(servers[1]) as session:
        assert session.read("v") == 2.0
    with Session(servers[0]) as session:
        session.assign("v", 1.0)
    Session.reset(servers[1].target, ["local1"])
    with Session(servers[1]) as session, pytest.raises(FailedPreconditionError):
        session.read("v")
    with Session(servers[0]) as session:
        assert session.read("v") == 1.0


def test_same_variables_no_clear(made: Made) -> None:
    """testSameVariablesNoClear"""
    server = made({"local": ["localhost:0"]})
    with Session(server) as first:
        first.assign("v0:0", [[2.0, 2.0]])
        first.assign("v1:0", [[1.0], [1.0]])
    with Session(server) as second:
        np.testing.assert_array_equal(second.read("v0:0") @ second.read("v1:0"), [[4.0]])


def test_create_local_cluster(made: Made) -> None:
    """testCreateLocalCluster"""
    servers = all_of(made, cluster_of(worker=2, ps=2))
    with (
        Session(servers["worker:0"].target) as first,
        Session(servers["worker:1"].target) as second,
    ):
        for number, session in ((0, first), (2, second)):
            session.assign(f"var{number}", float(number), task="ps:0")
            session.assign(f"var{number + 1}", float(number + 1), task="ps:1")
        for session in (first, second):
            assert [
                session.read(f"var{number}", task=("ps", number % 2)) for number in range(4)
            ] == [0, 1, 2, 3]
        assert servers["ps:0"].variables.read("var2") == 2


@pytest.mark.parametrize(
    ("name", "task"),
    [
        (None, "worker:0"),
        ("worker:0", "worker:0"),
        (("worker", 1), "worker:1"),
        ("/job:ps/replica:0/task:0/device:CPU:0", "ps:0"),
        ("/job:ps", "ps:0"),
        ("/task:1", "worker:1"),
        ("/job:worker/task:1/cpu:0", "worker:1"),
        ("/device:CPU:0", "worker:0"),
    ],
)
def test_task_names_in_any_form(made: Made, name: Any, task: str) -> None:
    servers = all_of(made, cluster_of(worker=2, ps=1))
    with Session(servers["worker:0"]) as session:
        assert session.run(where, task=name) == task


@pytest.mark.parametrize(
    "name",
    ["ps:1", ("ps", 1), "ps", "", "/job:ps/task:7", "/gpu:0", "/job:ps/replica:1", "/", 7, ("ps",)],
)
def test_unknown_task_is_refused_with_list(made: Made, name: Any) -> None:
    server = made(cluster_of(worker=1, ps=1), "worker", 0)
    with Session(server) as session, pytest.raises(InvalidArgumentError) as raised:
        session.run(where, task=name)
    available = "available devices: /job:worker/replica:0/task:0/device:CPU:0, /job:ps/replica:0/task:0/device:CPU:0"
    assert repr(name) in str(raised.value).replace("\\\\", "\\")
    assert sorted(str(raised.value).partition("available devices: ")[2].split(", ")) == sorted(
        available.partition(": ")[2].split(", ")
    )


def test_filtered_task_is_unknown(made: Made) -> None:
    cluster = cluster_of(worker=2, ps=1)
    servers = all_of(made, cluster)
    servers["worker:0"].stop()
    filters = ClusterDeviceFilters()
    filters.set_device_filters("worker", 0, ["/job:ps"])
    definition = ServerDef(
        zd.ClusterSpec(cluster).as_cluster_def(), "worker", 0, cluster_device_filters=filters
    )
    with Session(made(definition)) as session:
        assert session.run(where, task="ps:0") == "ps:0"
        assert session.run(where, task="worker:0") == "worker:0"
        with pytest.raises(InvalidArgumentError, match="filtered out"):
            session.run(where, task="worker:1")
        Session.reset(f"zmq://{cluster['worker'][0]}")
    with Session(f"zmq://{cluster['worker'][1]}") as other:
        assert other.run(where) == "worker:1"


def test_session_waits_only_for_needed_tasks(
    made: Made,
) -> None:
    cluster = cluster_of(worker=1, ps=2)
    made(cluster, "worker", 0)
    with Session(f"zmq://{cluster['worker'][0]}") as session:
        assert session.run(where) == "worker:0"
        with pytest.raises(
            DeadlineExceededError, match=f"read of 'v' .* missing task ps:1 at {cluster['ps'][1]}"
        ):
            session.read("v", task="ps:1", timeout_in_ms=50)
        answers: list[str] = []
        waiting = threading.Thread(target=lambda: answers.append(session.run(where, task="ps:0")))
        waiting.start()
        made(cluster, "ps", 0)
        waiting.join(20)
        assert answers == ["ps:0"]


def test_list_tasks_has_address_and_state(made: Made) -> None:
    cluster = cluster_of(worker=2, ps=1)
    server = made(cluster, "worker", 1)
    other = made(cluster, "ps", 0)
    with Session(server) as session:
        listed = session.list_tasks()
    assert listed == [
        TaskInfo(
            "ps:0",
            cluster["ps"][0],
            "/job:ps/replica:0/task:0/device:CPU:0",
            "up",
            other.snapshot().incarnation,
        ),
        TaskInfo(
            "worker:0",
            cluster["worker"][0],
            "/job:worker/replica:0/task:0/device:CPU:0",
            "missing",
            0,
        ),
        TaskInfo(
            "worker:1",
            server.address,
            "/job:worker/replica:0/task:1/device:CPU:0",
            "up",
            server.snapshot().incarnation,
        ),
    ]


def test_task_without_address_is_missing(made: Made) -> None:
    server = made({"worker": ["localhost:0"], "ps": ["somewhere", "host.invalid:5"]}, "worker", 0)
    with Session(server) as session:
        assert [info.state for info in session.list_tasks()] == ["missing", "missing", "up"]
        Session.reset(server.target)


def test_endless_wait_is_logged(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zmqdist.transport.channel.WAIT_LOG_S", 0.01)
    cluster = cluster_of(worker=1, ps=1)
    with Session(made(cluster, "worker", 0)) as session:
        waiting = threading.Thread(target=session.run, args=(where,), kwargs={"task": "ps:0"})
        waiting.start()
        while f"wait for a server at {cluster['ps'][0]}" not in caplog.text:
            waiting.join(0.01)
        made(cluster, "ps", 0)
        waiting.join(20)


def test_device_lists_are_equal(made: Made) -> None:
    """N2"""
    servers = all_of(made, cluster_of(worker=2, ps=1))
    found = []
    for server in servers.values():
        with Session(server) as session:
            found.append({info.device for info in session.list_tasks()})
    wanted = {
        f"/job:{job}/replica:0/task:{index}/device:CPU:0"
        for job, index in (("ps", 0), ("worker", 0), ("worker", 1))
    }
    assert found == [wanted] * 3


def test_reset_ends_only_sessions_of_its_master(made: Made) -> None:
    cluster = cluster_of(worker=2, ps=2)  # ps:1 is never started: a reset does not wait for it
    for job, index in (("worker", 0), ("worker", 1), ("ps", 0)):
        made(cluster, job, index)
    first, second = (f"zmq://{address}" for address in cluster["worker"])
    own = {"isolate_session_state": True}
    with (
        Session(first) as mine,
        Session(second) as others,
        Session(first, own) as isolated,
        Session(second, own) as others_isolated,
    ):
        for session in (mine, isolated, others_isolated):
            session.assign("v", 1, task="ps:0")
        others.assign("v", 2, task="worker:1")
        Session.reset(first)
        for session in (mine, isolated):
            with pytest.raises(AbortedError, match="worker:0"):
                session.read("v", task="ps:0")
        for task in ("ps:0", "worker:1"):
            with pytest.raises(FailedPreconditionError):
                others.read("v", task=task)
        assert others_isolated.read("v", task="ps:0") == 1


def test_check_alive_of_a_server(made: Made) -> None:
    cluster = cluster_of(worker=1, ps=1)
    server = made(cluster, "worker", 0)
    assert server.check_alive("worker:0")
    assert not server.check_alive("/job:ps/task:0")
    made(cluster, "ps", 0)
    assert server.check_alive(("ps", 0))
    with pytest.raises(
        InvalidArgumentError, match="no task 'ps:1' in this cluster; it has ps:0, worker:0"
    ):
        server.check_alive("ps:1")


# -- processes -------------------------------------------------------------------------------------


def block() -> None:
    print("running", flush=True)
    threading.Event().wait()


@pytest.mark.processes("cluster servers")
@pytest.mark.killed("cluster servers")
def test_killed_task_is_named_at_once(made: Made, child: Child) -> None:
    cluster = cluster_of(worker=1, ps=1)
    made(cluster, "worker", 0)
    process = start_child(child, cluster, "ps", 0)
    with Session(f"zmq://{cluster['worker'][0]}") as session:
        raised: list[UnavailableError] = []

        def run() -> None:
            try:
                session.run(block, task="ps:0")
            except UnavailableError as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGKILL)
        thread.join(20)
        assert "block on ps:0" in str(raised[0])
        assert cluster["ps"][0] in str(raised[0])
        assert session.run(where) == "worker:0"


def test_cluster_with_keys_serves_members(made: Made, tmp_path: Path) -> None:
    keys.keygen(tmp_path / "keys")
    keys.keygen(tmp_path / "others")
    cluster = cluster_of(worker=1, ps=1)
    servers = all_of(made, cluster, keys_dir=tmp_path / "keys")
    target = servers["worker:0"].target
    with Session(target, keys_dir=tmp_path / "keys") as session:
        session.assign("v", np.arange(200_000), task="ps:0")
        assert (
            session.run(lambda: int(Server.current().variables.read("v").sum()), task="ps:0")
            == 19999900000
        )
        assert {info.state for info in session.list_tasks()} == {"up"}
    assert servers["worker:0"].check_alive("ps:0")  # with the worker's key
    Session.reset(target, keys_dir=tmp_path / "keys")
    with Session(servers["ps:0"]) as session, pytest.raises(FailedPreconditionError):
        session.read("v")
    for options in ({}, {"keys_dir": tmp_path / "others"}):
        with Session(target, **options) as stranger, pytest.raises(zd.errors.OpError) as refused:  # type: ignore[arg-type]
            stranger.run(where, timeout_in_ms=20_000)
        assert refused.value.error_code in (
            zd.errors.UNAUTHENTICATED,
            zd.errors.FAILED_PRECONDITION,
        )


def test_caller_without_rights_sends_no_code(made: Made) -> None:
    server = made({"local": ["localhost:0"]})
    with zd.rpc.Client.create("zmq", server.address) as client:
        listed = internal_client.start(client, "zmqdist.methods").get_value()
        methods = [info[0] for info in listed]
        offered = {name.partition(".")[0] for name in methods}
        assert offered == {"session", "server", "coordination", "mail", "collective"}
        for method in methods:
            code, raised = client.call(method, [0]).get_error()
            assert (code, "role client may not call" in raised) == (
                zd.errors.PERMISSION_DENIED,
                True,
            ), method

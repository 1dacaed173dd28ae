"""DispatchServer and WorkerServer: start, stop, join, status."""

from __future__ import annotations

import gc
import math
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import zmqdist as zd
from tests.scheduling.work import begun, go, until, waits
from zmqdist import errors, limits
from zmqdist._version import __version__
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.messages import Assign, Beat, Message
from zmqdist.rpc import Client
from zmqdist.scheduling.coordinator.dispatcher_target import resolve
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.servers.dispatch_server import report_exit
from zmqdist.transport.router import Router
from zmqdist.wire.hello import our_hello


@pytest.fixture
def dispatcher() -> Iterator[zd.DispatchServer]:
    with zd.DispatchServer(DispatcherConfig(reconnect_grace_s=0.2)) as server:
        yield server


@pytest.fixture(params=["dispatcher", "worker"])
def server(request: pytest.FixtureRequest, dispatcher: zd.DispatchServer) -> Iterator[Any]:
    """One of the two servers, not started."""
    made: Any = (
        zd.DispatchServer(start=False)
        if request.param == "dispatcher"
        else zd.WorkerServer(WorkerConfig(dispatcher.address), start=False)
    )
    yield made
    made.stop()


def listened(address: str) -> bool:
    """Return whether a process accepts connections at the address."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_server_serves_from_start_to_stop(server: Any) -> None:
    assert server.join(0) is False
    server.start()
    assert re.fullmatch(r"127\.0\.0\.1:\d+", server.address)
    assert server.target.replace("localhost", "127.0.0.1") == f"zmq://{server.address}"
    client = Client.create("zmq", server.address)
    client.close()
    server.start()
    assert server.join(0) is False
    server.stop()
    assert server.join(0) is True
    server.stop()
    with pytest.raises(
        errors.FailedPreconditionError, match="Server cannot be started after it has been stopped"
    ):
        server.start()


def test_worker_stops_after_failed_start(tmp_path: Path) -> None:
    worker = zd.WorkerServer(
        WorkerConfig("127.0.0.1:1", token_file=str(tmp_path / "nowhere")), start=False
    )
    with pytest.raises(errors.FailedPreconditionError, match="cannot read the token file"):
        worker.start()
    worker.stop()
    assert worker.join(0) is True


def test_late_exit_report_is_no_error() -> None:
    with zd.DispatchServer() as dispatcher:
        pass
    report_exit(dispatcher, "worker", 0, 1, -9)


def test_unstarted_server_can_be_stopped(server: Any) -> None:
    server.stop()
    assert server.join(1) is True
    with pytest.raises(errors.FailedPreconditionError):
        server.start()


def test_server_in_with_statement(server: Any) -> None:
    with server as same:
        assert same is server
        assert server.address
    assert server.join(0) is True


def test_dropped_server_stops(dispatcher: zd.DispatchServer) -> None:
    """This holds for a server in a reference cycle, too, which the garbage collector finds."""
    first: Any = zd.DispatchServer()
    second: Any = zd.DispatchServer()
    worker: Any = zd.WorkerServer(WorkerConfig(dispatcher.address))
    second.itself = second
    addresses = [first.address, second.address, worker.address]
    del first, second, worker
    gc.collect()
    until(lambda: not dispatcher.num_workers and not any(map(listened, addresses)))
    assert dispatcher.snapshot().losses_count == 0  # the worker has left in good order


def test_forked_child_does_not_stop_parents_server(
    dispatcher: zd.DispatchServer,
) -> None:
    program = (
        "import gc, os, time, warnings\n"
        "import zmqdist as zd\n"
        "server = zd.DispatchServer()\n"
        "address = server.address\n"
        # a warning about a fork with threads, since Python 3.12
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    del server\n"
        "    gc.collect()\n"
        "    import threading\n"
        "    os._exit(any(thread.name == 'zmqdist-dispatcher-stop' for thread in "
        "threading.enumerate()))\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        "zd.rpc.Client.create('zmq', address, timeout_in_ms=20_000).close()\n"
        "server.stop()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_dispatcher_lives_as_long_as_coordinator() -> None:
    with ClusterCoordinator(zd.DispatchServer()) as coordinator:
        gc.collect()
        with zd.WorkerServer(WorkerConfig(coordinator.target)):
            assert coordinator.schedule(int, ("7",)).get(20) == 7


def test_join_returns_after_stop_in_other_thread(server: Any) -> None:
    server.start()
    joined: list[bool] = []
    joining = threading.Thread(target=lambda: joined.append(server.join(20)))
    joining.start()
    server.stop()
    joining.join(20)
    assert joined == [True]


def test_numbers_of_workers_and_tasks(dispatcher: zd.DispatchServer, tmp_path: Path) -> None:
    assert dispatcher.num_workers == 0
    with zd.WorkerServer(WorkerConfig(dispatcher.address)) as first:
        assert (first.name, first.num_tasks, dispatcher.num_workers) == ("worker:0", 0, 1)
        with zd.WorkerServer(WorkerConfig(dispatcher.address, job="other", index=7)) as second:
            assert (second.name, dispatcher.num_workers) == ("other:7", 2)
            names = [row.name for row in dispatcher.snapshot().workers]
            assert names == ["other:7", "worker:0"]
        until(lambda: dispatcher.num_workers == 1)
        with ClusterCoordinator(dispatcher) as coordinator:
            value = coordinator.schedule(waits, (tmp_path,))
            until(lambda: first.num_tasks == 1)
            # reported after the worker has looked at the slot
            until(lambda: [row.running for row in dispatcher.snapshot().workers] == [1])
            go(tmp_path)
            value.get(20)
            until(lambda: first.num_tasks == 0)
    until(lambda: dispatcher.num_workers == 0)
    assert dispatcher.snapshot().losses_count == 0


def test_worker_starts_before_dispatcher(port: int) -> None:
    worker = zd.WorkerServer(WorkerConfig(f"zmq://127.0.0.1:{port}"), start=False)
    starting = threading.Thread(target=worker.start)
    starting.start()
    assert worker.join(0.05) is False
    with (
        zd.DispatchServer(DispatcherConfig(port=port)) as dispatcher,
        ClusterCoordinator(dispatcher) as coordinator,
    ):
        starting.join(20)
        assert dispatcher.num_workers == 1
        assert coordinator.schedule(int).get(20) == 0
        worker.stop()


def test_worker_without_dispatcher_can_be_stopped(port: int) -> None:
    worker = zd.WorkerServer(WorkerConfig(f"127.0.0.1:{port}"), start=False)
    starting = threading.Thread(target=worker.start)
    starting.start()
    until(lambda: worker.address)
    worker.stop()
    starting.join(20)
    assert not starting.is_alive()
    assert worker.ended is not None


def test_wait_for_dispatcher_is_logged(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import zmqdist.scheduling.worker.runtime as module

    monkeypatch.setattr(module, "FIRST_CONTACT_LOG_S", 0.05)
    address = f"127.0.0.1:{port}"
    with (
        caplog.at_level("INFO"),
        pytest.raises(errors.UnavailableError, match=r"no dispatcher for 2 s"),
    ):
        zd.WorkerServer(WorkerConfig(address, orphan_limit_s=2.0))
    assert f"worker waits for the dispatcher at {address}" in caplog.text


def test_worker_without_limit_waits_forever() -> None:
    assert WorkerConfig("127.0.0.1:1").orphan_limit_s == math.inf
    dispatcher = zd.DispatchServer(DispatcherConfig(lease_s=1.0))
    with zd.WorkerServer(WorkerConfig(dispatcher.address)) as worker:
        dispatcher.stop()
        until(lambda: not worker.in_contact)
        assert not worker.join(0)
        with zd.DispatchServer(
            DispatcherConfig(port=int(dispatcher.address.rpartition(":")[2]))
        ) as other:
            until(lambda: other.num_workers == 1)


OTHERS = {
    "Python": ({"python": (2, 7)}, r"it has Python 2\.7 \(the dispatcher 3\.\d+\); install"),
    "zmqdist": (
        {"version": "99.1.2"},
        rf"it has zmqdist 99\.1\.2 \(the dispatcher {re.escape(__version__)}\); install",
    ),
    "both": (
        {"python": (2, 7), "version": "99.1.2"},
        r"Python 2\.7 \(the dispatcher 3\.\d+\) and zmqdist 99\.1\.2 \(",
    ),
}
"""What a hello says, and what both sides are told."""


@pytest.mark.parametrize("differs", OTHERS)
def test_worker_with_other_python_is_refused(
    dispatcher: zd.DispatchServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    differs: str,
) -> None:
    said, problem = OTHERS[differs]
    monkeypatch.setattr(
        "zmqdist.scheduling.worker.runtime.our_hello",
        lambda *args: replace(our_hello(*args), **said),
    )
    with pytest.raises(errors.FailedPreconditionError, match=problem):
        zd.WorkerServer(WorkerConfig(dispatcher.address))
    assert dispatcher.num_workers == 0
    assert re.search(f"refused: worker:.*{problem}", caplog.text)


@pytest.mark.parametrize("differs", OTHERS)
def test_program_with_other_python_is_refused(
    dispatcher: zd.DispatchServer, monkeypatch: pytest.MonkeyPatch, differs: str
) -> None:
    said, problem = OTHERS[differs]
    monkeypatch.setattr(
        "zmqdist.scheduling.coordinator.runtime.our_hello",
        lambda *args: replace(our_hello(*args), **said),
    )
    with (
        ClusterCoordinator(dispatcher) as coordinator,
        pytest.raises(errors.FailedPreconditionError, match=problem),
    ):
        coordinator.schedule(go).get(20)


@pytest.mark.parametrize(
    "said", [{"python": (0, 0), "version": ""}, {"version": f"{__version__}.post1"}]
)
def test_patch_version_may_differ(
    dispatcher: zd.DispatchServer, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]
) -> None:
    monkeypatch.setattr(
        "zmqdist.scheduling.worker.runtime.our_hello",
        lambda *args: replace(our_hello(*args), **said),
    )
    with zd.WorkerServer(WorkerConfig(dispatcher.address)):
        assert dispatcher.num_workers == 1


def test_second_worker_of_one_name_is_refused(
    dispatcher: zd.DispatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second worker repeats its registration for a while, because the first one might have died
    a moment ago."""
    monkeypatch.setattr("zmqdist.scheduling.worker.machine.REGISTER_AGAIN_S", 100.0)
    with zd.WorkerServer(WorkerConfig(dispatcher.address, index=3)) as first:
        with pytest.raises(errors.AlreadyExistsError, match="worker:3"):
            zd.WorkerServer(WorkerConfig(dispatcher.address, index=3))
        assert dispatcher.num_workers == 1
        assert first.join(0) is False


def test_worker_gets_lowest_free_index(dispatcher: zd.DispatchServer) -> None:
    config = WorkerConfig(dispatcher.address)
    with zd.WorkerServer(config) as first, zd.WorkerServer(config) as second:
        assert (first.name, second.name) == ("worker:0", "worker:1")
        first.stop()
        until(lambda: dispatcher.num_workers == 1)
        with zd.WorkerServer(config) as third:
            assert third.name == "worker:0"


def test_graceful_stop_gives_back_waiting_work(
    dispatcher: zd.DispatchServer, tmp_path: Path
) -> None:
    with (
        ClusterCoordinator(dispatcher) as coordinator,
        zd.WorkerServer(WorkerConfig(dispatcher.address)) as first,
    ):
        values = [coordinator.schedule(waits, (tmp_path, str(i))) for i in range(3)]
        until(lambda: begun(tmp_path))
        stopping = threading.Thread(target=first.stop, args=(20,))
        stopping.start()
        until(lambda: first.num_tasks == 1)  # the running function
        go(tmp_path)
        stopping.join(20)
        assert values[0].get(20) == "0"
        with zd.WorkerServer(WorkerConfig(dispatcher.address)):
            assert coordinator.fetch(values) == ["0", "1", "2"]
    assert len(list(tmp_path.glob("begun-*"))) == 3


def test_last_messages_of_lost_worker_are_read(
    dispatcher: zd.DispatchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dispatcher is busy while its worker ends, and notices the end when it cannot send a
    message any more."""
    assigned: list[tuple[Router, Any]] = []
    send = Router.send

    def noting(self: Router, peer: Any, message: Message, *rest: Any) -> bool:
        if isinstance(message, Assign):
            assigned.append((self, peer))
        return send(self, peer, message, *rest)

    monkeypatch.setattr(Router, "send", noting)
    with (
        ClusterCoordinator(dispatcher) as coordinator,
        zd.WorkerServer(WorkerConfig(dispatcher.address)) as worker,
    ):
        value = coordinator.schedule(waits, (tmp_path,))
        until(lambda: begun(tmp_path))
        until(lambda: dispatcher.snapshot().workers[0].running)
        ((router, peer),) = assigned
        found: list[bool] = []

        def busy(_: Any) -> None:
            """Have the worker end while the dispatcher's loop is busy with this callback."""
            if found:
                return
            go(tmp_path)
            until(lambda: worker.num_tasks == 0)
            worker.stop()
            until(lambda: not router.send(peer, Beat()))
            found.append(True)

        dispatcher.watch_members(busy)
        assert value.get(20) == "x"
        assert found
        until(lambda: dispatcher.num_workers == 0)
        assert dispatcher.snapshot().losses_count == 0
        assert len(begun(tmp_path)) == 1


def test_leaving_worker_gets_no_more_work(dispatcher: zd.DispatchServer, tmp_path: Path) -> None:
    with (
        ClusterCoordinator(dispatcher) as coordinator,
        zd.WorkerServer(WorkerConfig(dispatcher.address)) as worker,
    ):
        values = [coordinator.schedule(waits, (tmp_path, str(i))) for i in range(4)]
        until(lambda: begun(tmp_path))
        stopping = threading.Thread(target=worker.stop, args=(20,))
        stopping.start()
        until(
            lambda: (
                [(row.state, row.leases) for row in dispatcher.snapshot().workers]
                == [("leaving", 1)]
            )
        )
        until(lambda: dispatcher.snapshot().queued == 3)
        go(tmp_path)
        stopping.join(20)
        assert values[0].get(20) == "0"
        assert not any(value.done() for value in values[1:])


@pytest.fixture
def ask(dispatcher: zd.DispatchServer) -> Iterator[Callable[..., Any]]:
    """Return `ask(method, ...)`, which calls the dispatcher."""
    from zmqdist.rpc import ZmqClient
    from zmqdist.transport.credentials import Credentials

    security = Credentials().client(dispatcher.address, "submit")
    client = ZmqClient(dispatcher.address, "", True, 20_000, security=security)
    yield lambda method, *args: getattr(client, f"{method}_blocking")(*args)
    client.close()


def test_drain_by_rpc_gives_back_unstarted_work(
    dispatcher: zd.DispatchServer, ask: Callable[..., Any], tmp_path: Path
) -> None:
    with (
        ClusterCoordinator(dispatcher) as coordinator,
        zd.WorkerServer(WorkerConfig(dispatcher.address)) as first,
    ):
        values = [coordinator.schedule(waits, (tmp_path, str(i))) for i in range(4)]
        until(lambda: begun(tmp_path))
        ask("drain", "worker", 0, 20.0)
        until(lambda: first.num_tasks == 1)
        until(lambda: [row.state for row in dispatcher.snapshot().workers] == ["leaving"])
        go(tmp_path)
        assert first.join(20)
        with zd.WorkerServer(WorkerConfig(dispatcher.address)):
            assert coordinator.fetch(values) == ["0", "1", "2", "3"]
    assert dispatcher.snapshot().losses_count == 0


def test_second_drain_shortens_grace(
    dispatcher: zd.DispatchServer, ask: Callable[..., Any], tmp_path: Path
) -> None:
    with (
        ClusterCoordinator(dispatcher) as coordinator,
        zd.WorkerServer(WorkerConfig(dispatcher.address)) as worker,
    ):
        coordinator.schedule(waits, (tmp_path,))
        until(lambda: begun(tmp_path))
        ask("drain", "worker", 0, 100.0)
        until(lambda: worker.snapshot().leaving)
        worker.stop()  # logs an error if it takes too long
        assert worker.join(0)
        go(tmp_path)


def test_drain_of_unknown_worker_lists_workers(
    dispatcher: zd.DispatchServer, ask: Callable[..., Any]
) -> None:
    text = "no worker worker:9 is registered here; the registered workers are: worker:0"
    with (
        zd.WorkerServer(WorkerConfig(dispatcher.address)),
        pytest.raises(errors.NotFoundError, match=text),
    ):
        ask("drain", "worker", 9, 1.0)


def test_status_and_shutdown_by_rpc(dispatcher: zd.DispatchServer, ask: Callable[..., Any]) -> None:
    with zd.WorkerServer(WorkerConfig(dispatcher.address)) as worker:
        status = ask("facts")
        assert (status["address"], status["queued"]) == (dispatcher.address, 0)
        assert [row["name"] for row in status["workers"]] == ["worker:0"]
        assert ask("shutdown", 5.0) == 1
        assert worker.join(20)
        assert worker.ended is not None
        assert worker.ended.code == errors.OK
        assert dispatcher.join(20)


def test_worker_ends_without_dispatcher() -> None:
    dispatcher = zd.DispatchServer(DispatcherConfig(lease_s=1.0))
    with zd.WorkerServer(WorkerConfig(dispatcher.address, orphan_limit_s=2.0)) as worker:
        dispatcher.stop()
        assert worker.join(20)
        assert worker.ended is not None
        assert worker.ended.code == errors.UNAVAILABLE
        assert worker.ended.error == "no dispatcher for 2 s"


# -- invalid arguments -----------------------------------------------------------------------------

CONFIGS: list[tuple[Any, dict[str, Any], str]] = [
    (DispatcherConfig, {"port": -1}, "port is -1, wants 0 to 65535"),
    (DispatcherConfig, {"port": 65536}, "port is 65536, wants 0 to 65535"),
    (DispatcherConfig, {"lease_s": 0}, "lease_s is 0, wants more than 0 s"),
    (DispatcherConfig, {"lease_s": float("nan")}, "lease_s is nan, wants more than 0 s"),
    (DispatcherConfig, {"reconnect_grace_s": -1}, "reconnect_grace_s is -1, wants more than 0 s"),
    (DispatcherConfig, {"cancel_grace_s": -0.1}, "cancel_grace_s is -0.1, wants 0 s or more"),
    (DispatcherConfig, {"attempts_max": 0}, "attempts_max is 0, wants 1 or more"),
    (WorkerConfig, {"dispatcher_address": ""}, "Must specify a `dispatcher_address`"),
    (WorkerConfig, {"slots": 0}, "slots is 0, wants 1 to 4096"),
    (WorkerConfig, {"slots": limits.SLOTS_MAX + 1}, "slots is 4097, wants 1 to 4096"),
    (WorkerConfig, {"index": -1}, "index is -1, wants 0 to 999999999, or None"),
    (WorkerConfig, {"port": 70000}, "port is 70000, wants 0 to 65535"),
    (WorkerConfig, {"orphan_limit_s": 0}, "orphan_limit_s is 0, wants more than 0 s"),
]


@pytest.mark.parametrize(("config", "options", "text"), CONFIGS, ids=[row[2] for row in CONFIGS])
def test_invalid_config_is_refused(config: Any, options: dict[str, Any], text: str) -> None:
    if config is WorkerConfig:
        options = {"dispatcher_address": "127.0.0.1:1", **options}
    with pytest.raises(errors.InvalidArgumentError, match=re.escape(text)):
        config(**options)


ADDRESSES = ["nonsense", "127.0.0.1", "127.0.0.1:port", "127.0.0.1:70000", "http://127.0.0.1:80"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_invalid_dispatcher_address_is_explained(address: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"host:port|port"):
        zd.WorkerServer(WorkerConfig(address))


TARGETS: list[tuple[Any, str]] = [
    (5, "cannot schedule on 5"),
    (object, "cannot schedule on <class 'object'>"),
    ("", "host:port"),
    ("nonsense", "nonsense"),
    ("127.0.0.1", r"127\.0\.0\.1"),
    ("zmq://127.0.0.1:0x", "127"),
    ("tcp://127.0.0.1:5050", "tcp://"),
]


@pytest.mark.parametrize(("target", "text"), TARGETS, ids=[repr(target) for target, _ in TARGETS])
@pytest.mark.parametrize("kind", [ClusterCoordinator, zd.Executor])
def test_invalid_target_lists_accepted_targets(kind: Any, target: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        kind(target)
    assert 'a DispatchServer, a local_cluster, "host:port" or "zmq://host:port"' in str(
        caught.value
    )


def test_missing_target_names_environment() -> None:
    with pytest.raises(
        ValueError,
        match="no target was given and ZMQDIST_CONFIG names no running cluster: wanted a ",
    ):
        ClusterCoordinator()


def test_negative_queue_max_is_refused(dispatcher: zd.DispatchServer) -> None:
    with pytest.raises(ValueError, match="queue_max is -1, wants 1 or more, or 0 for no bound"):
        ClusterCoordinator(dispatcher, queue_max=-1)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
@pytest.mark.parametrize("name", ["cluster_lost_limit_s", "cancel_grace_s"])
def test_invalid_duration_is_refused(
    dispatcher: zd.DispatchServer, name: str, seconds: float
) -> None:
    with pytest.raises(
        errors.InvalidArgumentError, match=f"{name} is {seconds}, wants 0 s or more"
    ):
        ClusterCoordinator(dispatcher, **{name: seconds})


def test_target_server_gives_cancel_grace() -> None:
    with zd.local_cluster(workers=0, processes=False, cancel_grace_s=0.25) as cluster:
        assert resolve(cluster).cancel_grace_s == resolve(cluster.dispatcher).cancel_grace_s == 0.25
        assert resolve(cluster.target).cancel_grace_s == limits.CANCEL_GRACE_S


def test_tcp_target_is_accepted_by_worker() -> None:
    with zd.DispatchServer(DispatcherConfig(protocol="tcp")) as server:
        assert server.target.startswith("zmq://")
        assert WorkerConfig(dispatcher_address=server.target).dispatcher_address == server.target


def test_target_argument_overrides_environment(
    dispatcher: zd.DispatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZMQDIST_CONFIG", "gone.yaml")
    monkeypatch.setenv("TF_CONFIG", "junk")
    for target in (dispatcher, dispatcher.address, dispatcher.target):
        with ClusterCoordinator(target) as coordinator:
            assert resolve(target).address.replace("localhost", "127.0.0.1") == dispatcher.address
            coordinator.join(timeout=20.0)
    with pytest.raises(errors.ConfigError, match=r"gone\.yaml"):
        ClusterCoordinator()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda: DispatcherConfig(advertise="0.0.0.0:5050"),
            "advertise is '0.0.0.0:5050': no process can connect to it",
        ),
        (
            lambda: DispatcherConfig(advertise="tcp://node1:5050"),
            "advertise is .*: write host:port without tcp://",
        ),
        (
            lambda: WorkerConfig("a:1", worker_address="node1:%dts_port%"),
            "worker_address is .*: .* is not an IPv6 address",
        ),
        (
            lambda: WorkerConfig("a:1", worker_address="*:%port%"),
            "worker_address is .*: no process can connect to it",
        ),
        (
            lambda: WorkerConfig(
                "a:1", data_transfer_protocol="zmq", data_transfer_address="a b:%dts_port%"
            ),
            "data_transfer_address is .*: 'a b' is not a host name",
        ),
    ],
)
def test_unreachable_advertised_address_is_refused(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=problem):
        make()


def test_advertised_address_with_port_placeholder() -> None:
    assert (
        WorkerConfig("a:1", worker_address="[::1]:%port%").advertised("127.0.0.1:5051")
        == "[::1]:5051"
    )
    assert WorkerConfig("a:1", worker_address="node1").advertised("127.0.0.1:5051") == "node1:5051"

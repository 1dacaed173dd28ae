"""The doctor at addresses: each is broken for real, and the finding says what is wrong and what to
do."""

from __future__ import annotations

import os
import re
import signal
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
from tests.ports import free_port
from zmqdist.cluster import ClusterSpec
from zmqdist.observe.doctor import cluster, network
from zmqdist.observe.doctor.findings import Finding
from zmqdist.rpc import ZmqClient, ZmqServer, internal_client, methods
from zmqdist.rpc.service import RpcService
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.servers.dispatch_server import DispatchServer
from zmqdist.servers.worker_server import WorkerServer
from zmqdist.tasks.server import Server
from zmqdist.transport import keys, port_probe
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Router
from zmqdist.transport.security import server_security
from zmqdist.wire.hello import PROTOCOL, encode_hello, our_hello

PATIENCE_S = 20.0
NONE = Credentials()

SPEAKER = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(b"SSH-2.0-OpenSSH_9.6\\r\\n")
"""

SERVER = """
import signal
from zmqdist.rpc import Server
server = Server.create("zmq", "127.0.0.1:0")
server.start()
print(server.address.rpartition(":")[2], flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def _own_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def child() -> Iterator[Callable[[str], tuple[subprocess.Popen[str], str]]]:
    """child(PROGRAM): the process, and "127.0.0.1:port" from the port that it prints."""
    processes: list[subprocess.Popen[str]] = []

    def run(program: str) -> tuple[subprocess.Popen[str], str]:
        processes.append(
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        )
        assert processes[-1].stdout is not None
        return processes[-1], f"127.0.0.1:{int(processes[-1].stdout.readline())}"

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def serve() -> Iterator[Callable[..., ZmqServer]]:
    servers: list[ZmqServer] = []

    def make(**options: Any) -> ZmqServer:
        servers.append(ZmqServer("127.0.0.1:0", **options))
        servers[-1].start()
        return servers[-1]

    yield make
    for server in servers:
        server.stop(0.0)


def check_single(findings: list[Finding], level: str, message: str, advice: str) -> None:
    """There is exactly this finding, and its line is one that can be read."""
    (finding,) = findings
    assert (finding.level, bool(finding.advice)) == (level, bool(advice)), finding
    assert re.search(message, finding.message, re.DOTALL), finding.message
    assert advice in finding.advice, finding.advice
    assert finding.line().startswith(f"{level:<8} {finding.subject}: ")
    assert "\n" not in finding.line()


def look(
    address: str, credentials: Credentials = NONE, timeout_s: float = PATIENCE_S
) -> list[Finding]:
    return network.examine_server(address, credentials, timeout_s).findings


def test_healthy_server_identifies_itself(serve: Callable[..., ZmqServer]) -> None:
    result = network.examine_server(serve().address, NONE, PATIENCE_S)
    message = rf"rpc pid {os.getpid()} \(incarnation [0-9a-f]{{8}}\), "
    message += rf"zmqdist {zd.__version__}, protocol \d+\.\d+, Python \d\.\d+, token, \S+ ms there and back"
    check_single(result.findings, "ok", message, "")
    assert result.info is not None
    assert result.info.incarnation
    assert network.examine_server(serve().address, NONE, PATIENCE_S).info != result.info


def status_gives(record: Any) -> list[Finding]:
    """Look at a dispatcher that gives this record as its status."""
    service = RpcService("dispatcher")
    service.register("facts", lambda: record, inline=True)
    loop = Loop("zmqdist-test-dispatcher")
    router = Router(loop, server_security("127.0.0.1"), our_hello("server", 5, "a dispatcher"))
    address = router.bind("127.0.0.1:0")
    service.attach(router, loop, 5)
    loop.start()
    try:
        return look(address)
    finally:
        service.close()
        loop.stop()


@pytest.mark.parametrize(
    "record", [5, {}, {"workers": [{}]}, {"workers": [{"address": "a:1"}]}, {"workers": 1}], ids=str
)
def test_unreadable_status_is_a_finding(record: Any) -> None:
    assert all(finding.line() for finding in status_gives(record))


@pytest.mark.parametrize("address", ["nowhere", "a\x1b[31m:5", "a:99999", "\x00:1"], ids=ascii)
def test_bad_worker_address_is_a_problem(address: str) -> None:
    *_, problem = status_gives({"workers": [{"name": "worker:0", "address": address}]})
    assert problem.line().startswith(
        f"problem  data port of worker:0: {address!r} is not an address: "
    )


def test_dispatcher_losses_are_warnings() -> None:
    last = {"name": "worker:1", "exit_code": -9, "ago_s": 12.0}
    record = {
        "losses_count": 1,
        "workers": [],
        "slot_deaths_count": 2,
        "last_slot_death": last,
        "relayed": 3,
    }
    well, *rest = status_gives(record)
    assert well.level == "ok"
    assert [finding.level for finding in rest] == ["warning"] * 3
    assert [finding.message.partition(":")[0] for finding in rest] == [
        "1 worker has been lost since it was started",
        "2 slot processes died while running a function",
        (
            "it has passed on 3 pieces of large payloads, which should go straight from worker to "
            "reader"
        ),
    ]


def test_request_that_no_worker_can_satisfy_is_a_warning() -> None:
    rows = [
        {"request": "gpu 4", "worker": "", "waiting": 2, "why": "no worker has so much"},
        {"request": "gpu 1", "worker": "", "waiting": 1, "why": "all is in use"},
    ]
    _, warning = status_gives({"workers": [], "demands": rows})
    assert (warning.level, warning.message) == (
        "warning",
        "2 functions wait for gpu 4, and no worker has so much",
    )


def test_port_without_listener() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        message = f"127.0.0.1 is up, and no process listens on port {port}"
        check_single(
            look(f"127.0.0.1:{port}"),
            "problem",
            message,
            "start the server, or use the address that it printed",
        )


@pytest.mark.parametrize("name", ["no-such-host.invalid", "x" * 70])
def test_unresolvable_name(name: str) -> None:
    check_single(
        look(f"{name}:5050"),
        "problem",
        f"the host name {name} cannot be looked up",
        "DNS or /etc/hosts",
    )


def test_silent_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    end_event = threading.Event()

    def slow(*_: Any) -> None:
        end_event.wait(PATIENCE_S)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        check_single(
            look("host:5050", timeout_s=0.1),
            "problem",
            "cannot be looked up .the name service did not reply.",
            "IP address",
        )
    finally:
        end_event.set()


def test_host_dropping_packets() -> None:
    """A listener with a full queue: the kernel drops what comes, as a firewall does."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for entry in (first, second):
            entry.setblocking(False)
            entry.connect_ex(full.getsockname())
        message = "no reply to a TCP connection within 0.2 s"
        check_single(
            look(f"127.0.0.1:{full.getsockname()[1]}", timeout_s=0.2),
            "problem",
            message,
            "a firewall lets TCP port",
        )


def test_unreachable_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(113, "No route to host")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    check_single(
        look("127.0.0.1:5050"),
        "problem",
        "no TCP connection .No route to host.",
        "ip route get 127.0.0.1",
    )


def test_port_of_other_program(
    child: Callable[[str], tuple[subprocess.Popen[str], str]],
) -> None:
    process, address = child(SPEAKER)
    message = rf"the port is taken by pid {process.pid} \(.*python.*\), which is no zmqdist server"
    check_single(look(address), "problem", message, "stop that, or take another port")


def test_port_of_silent_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        message = rf"pid {os.getpid()} \(.*\) takes connections and says nothing"
        check_single(
            look(f"127.0.0.1:{silent.getsockname()[1]}"),
            "problem",
            message,
            "state T in ps is stopped",
        )


def test_stopped_process(
    child: Callable[[str], tuple[subprocess.Popen[str], str]],
) -> None:
    process, address = child(SERVER)
    assert look(address)[0].level == "ok"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    message = rf"pid {process.pid} \(.*\) is stopped \(SIGSTOP or Ctrl-Z\)"
    check_single(look(address), "problem", message, f"`kill -CONT {process.pid}`")
    process.send_signal(signal.SIGCONT)
    assert look(address)[0].level == "ok"


def test_server_with_stuck_python() -> None:
    server, entered, go = ZmqServer("127.0.0.1:0"), threading.Event(), threading.Event()

    def stuck() -> bool:
        entered.set()
        return go.wait(PATIENCE_S)

    server.register("stuck", stuck, inline=True)
    with server, ZmqClient(server.address) as client:
        call = internal_client.start(client, "stuck")
        assert entered.wait(PATIENCE_S)
        try:
            message = "it accepts connections, but does not answer within 0.3 s: its Python is busy or stuck"
            check_single(
                look(server.address, timeout_s=0.3),
                "problem",
                message,
                f"of pid {os.getpid()} (py-spy dump)",
            )
        finally:
            go.set()
        assert call.get_value() is True


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What a server and a client are given, by a name."""
    for name in ("keys", "others"):
        keys.keygen(tmp_path / name)
    (tmp_path / "tokens").mkdir(mode=0o700)
    keys.create(tmp_path / "tokens" / "token")
    return {
        "the token": {},
        "another token": {"token_file": str(tmp_path / "tokens" / "token")},
        "keys": {"keys_dir": str(tmp_path / "keys")},
        "other keys": {"keys_dir": str(tmp_path / "others")},
        "a missing token": {"token_file": str(tmp_path / "nowhere")},
    }


REFUSED = [
    (
        "the token",
        "another token",
        (
            "it belongs to another user or to a cluster with a token of its own .local_cluster, "
            "launch., or was started"
        ),
        "--token",
    ),
    ("keys", "other keys", "does not have the key that this side expects", "--keys"),
    (
        "keys",
        "the token",
        "uses CURVE keys, this side the user's token",
        "the same kind of security",
    ),
    (
        "the token",
        "keys",
        "uses the user's token .PLAIN., this side CURVE keys",
        "the same kind of security",
    ),
    ("the token", "a missing token", "cannot read the token file", "--token-file"),
]


@pytest.mark.parametrize(
    ("theirs", "ours", "message", "advice"), REFUSED, ids=lambda value: str(value)[:20]
)
def test_refusing_server(
    theirs: str,
    ours: str,
    message: str,
    advice: str,
    serve: Callable[..., ZmqServer],
    secrets: dict[str, dict[str, Any]],
) -> None:
    server = serve(**secrets[theirs])
    assert look(server.address, Credentials(**secrets[theirs]))[0].level == "ok"
    check_single(look(server.address, Credentials(**secrets[ours])), "problem", message, advice)


def test_plaintext_peer(secrets: dict[str, dict[str, Any]]) -> None:
    with Server({"worker": ["127.0.0.1:0"]}, insecure=True) as server:
        message = "uses no security, in plaintext, this side the user's token"
        check_single(look(server.address), "problem", message, "the same kind of security")
        check_single(
            look(server.address, Credentials(insecure=True)),
            "ok",
            "server-worker:0 pid .* no security",
            "",
        )


def test_single_role_key_is_admitted(
    serve: Callable[..., ZmqServer], secrets: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    part = tmp_path / "part"
    part.mkdir(mode=0o700)
    for name in ("client.key", "server.pub"):
        (part / name).write_bytes((tmp_path / "keys" / name).read_bytes())
        (part / name).chmod(0o600)
    check_single(
        look(serve(**secrets["keys"]).address, Credentials(keys_dir=str(part))), "ok", "CURVE", ""
    )


def test_worker_found_by_its_own_key(secrets: dict[str, dict[str, Any]]) -> None:
    with (
        DispatchServer(DispatcherConfig(**secrets["keys"])) as dispatcher,
        WorkerServer(WorkerConfig(dispatcher.address, **secrets["keys"])) as worker,
    ):
        check_single(look(worker.address, Credentials(**secrets["keys"])), "ok", "CURVE", "")
        message = "does not have the key that this side expects"
        check_single(
            look(worker.address, Credentials(**secrets["other keys"])), "problem", message, "--keys"
        )


def test_protocol_version_mismatch(serve: Callable[..., ZmqServer]) -> None:
    server = serve()
    router = (
        server._service._router
    )  # reach: no server of another protocol version can be installed beside this one
    output = replace(router._hello_fields, protocol=(9, 1))  # reach: the greeting of that version
    router._hello_fields, router._hello = output, encode_hello(output)  # reach: as above
    message = rf"speaks zmqdist protocol 9\.1, this side {PROTOCOL[0]}\.{PROTOCOL[1]}: install the same zmqdist on both ends"
    check_single(look(server.address), "problem", message, "the same zmqdist")


ODD: list[tuple[dict[int, Any], str, str, str]] = [
    ({1: "0.0.1"}, "warning", r"zmqdist 0\.0\.1 there, .* here", "install the same version"),
    (
        {4: 3, 5: 7},
        "warning",
        r"Python 3\.7 there, .*: scheduled functions will not run",
        "the same Python",
    ),
    ({8: 0.0}, "warning", r"its clock is \d+\.\d s behind this host's", "NTP"),
    ({8: 1e10}, "warning", r"its clock is \d+\.\d s ahead of this host's", "NTP"),
    ({8: "x"}, "warning", "its report about itself cannot be read", "the same zmqdist"),
    ({1: "\x1b[2J\nok"}, "warning", "zmqdist .*2J.*ok there", "install the same version"),
]


@pytest.mark.parametrize(
    ("changes", "level", "message", "advice"), ODD, ids=lambda value: str(value)[:20]
)
def test_server_report_findings(
    changes: dict[int, Any],
    level: str,
    message: str,
    advice: str,
    serve: Callable[..., ZmqServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = methods.describe_server
    monkeypatch.setattr(
        "zmqdist.rpc.service.describe_server",
        lambda kind, incarnation: [
            changes.get(at, item) for at, item in enumerate(answer(kind, incarnation))
        ],
    )
    findings = look(serve().address)
    check_single([finding for finding in findings if finding.level != "ok"], level, message, advice)
    assert not [char for finding in findings for char in finding.line() if not char.isprintable()]


def test_server_without_server_info(serve: Callable[..., ZmqServer]) -> None:
    server = serve()
    registered = server._service._methods  # reach: a method cannot be unregistered
    del registered[methods.SERVER_INFO]
    check_single(
        look(server.address),
        "warning",
        "zmqdist.about is not registered",
        "install the same zmqdist there",
    )


# -- the addresses of a cluster that may run already, or will --------------------------------------


def plan(address: str, credentials: Credentials = NONE) -> list[Finding]:
    return network.examine_planned(address, credentials, PATIENCE_S, subject="worker:0").findings


def test_planned_port_is_free() -> None:
    check_single(plan(f"127.0.0.1:{free_port()}"), "ok", "belongs to this host and is free", "")


def test_address_without_host_is_local() -> None:
    check_single(
        plan(f":{free_port()}"), "ok", r"localhost:\d+ belongs to this host and is free", ""
    )


def test_address_without_port() -> None:
    check_single(
        plan("10.1.2.3"),
        "problem",
        "'10.1.2.3' is not an address",
        "correct the address of this task",
    )


def test_planned_port_bound_without_listener() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        message = "belongs to this host and cannot be bound"
        check_single(
            plan(f"127.0.0.1:{bound.getsockname()[1]}"), "problem", message, "take another port"
        )


def test_planned_port_of_other_program(
    child: Callable[[str], tuple[subprocess.Popen[str], str]],
) -> None:
    process, address = child(SPEAKER)
    check_single(
        plan(address), "problem", f"the port is taken by pid {process.pid}", "take another port"
    )


def test_planned_port_on_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_probe, "is_local_address", lambda number: False)
    message = "127.0.0.1 is up, and nothing listens on port .* yet"
    check_single(plan(f"127.0.0.1:{free_port()}"), "warning", message, "start it on 127.0.0.1")


def test_planned_port_with_unresolvable_name() -> None:
    check_single(plan("no-such-host.invalid:5050"), "problem", "cannot be looked up", "/etc/hosts")


def test_running_tasks_report_reachability() -> None:
    """Three tasks: one is well, one is missing, one refuses the others, which only they can see."""
    ports = [free_port() for _ in range(3)]
    spec = ClusterSpec(
        {"worker": [f"127.0.0.1:{port}" for port in ports[:2]], "ps": [f"127.0.0.1:{ports[2]}"]}
    )
    with Server(spec, "worker", 0), Server(spec, "worker", 1):
        findings = cluster.examine_tasks(spec, NONE, 2.0)
    lines = [finding.line() for finding in findings]
    assert len(lines) == 7
    assert (
        f"ok       ps:0 127.0.0.1:{ports[2]}: 127.0.0.1:{ports[2]} belongs to this host and is free"
        in lines
    )
    for at in (0, 1):
        assert any(
            line.startswith(f"ok       worker:{at} 127.0.0.1:{ports[at]}: server-worker:{at} pid")
            for line in lines
        )
        assert f"ok       from worker:{at}: reaches worker:{1 - at}" in lines
        message = f"it cannot reach ps:0 at 127.0.0.1:{ports[2]} (127.0.0.1 is up, and no process listens on port {ports[2]})"
        (found,) = (
            entry for entry in findings if entry.subject == f"from worker:{at}" and entry.advice
        )
        assert (found.level, found.message) == ("problem", message)
        assert f"run zmqdist doctor 127.0.0.1:{ports[2]} on the host of worker:{at}" in found.advice


def test_wrong_task_at_address_is_a_problem() -> None:
    address = f"127.0.0.1:{free_port()}"
    with Server({"worker": {1: address}}):
        findings = cluster.examine_tasks(ClusterSpec({"worker": [address]}), NONE, 2.0)
    assert [finding.level for finding in findings] == ["ok", "problem"]
    assert (
        findings[1].message
        == "the task that listens there is worker:1, of this cluster or of another"
    )
    assert "the same addresses" in findings[1].advice


def test_unwilling_task_is_reported(secrets: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "keys" / "submit.key").unlink()
    (tmp_path / "keys" / "worker.key").unlink()
    (tmp_path / "keys" / "admin.key").unlink()
    spec = ClusterSpec({"worker": [f"127.0.0.1:{free_port()}"]})
    with Server(spec, keys_dir=secrets["keys"]["keys_dir"]):
        findings = cluster.examine_tasks(spec, Credentials(**secrets["keys"]), 2.0)
    assert [finding.level for finding in findings] == ["ok", "problem"]
    assert "role client may not call server.reach" in findings[1].message

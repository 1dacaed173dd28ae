"""Barriers, keys and the states of tasks as methods of zmqdist.Server; what they promise is in
tests/coordination."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.coordination.helpers import Caller, assert_waited_for, until
from tests.ports import free_addresses
from zmqdist import errors
from zmqdist.coordination.machine import CoordinationConfig
from zmqdist.coordination.service import KeeperSnapshot
from zmqdist.tasks.coordination import config_of
from zmqdist.tasks.server import Server
from zmqdist.transport import keys

Made = Callable[..., Server]
Child = Callable[..., "subprocess.Popen[str]"]

TASK = """
import json, sys
from zmqdist.tasks.server import Server
server = Server(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
server.coordination.register(30)
print("registered", flush=True)
sys.stdin.read()
"""


def cluster(**jobs: int) -> dict[str, list[str]]:
    addresses = iter(free_addresses(sum(jobs.values())))
    return {job: [next(addresses) for _ in range(count)] for job, count in jobs.items()}


def tasks_of(spec: dict[str, list[str]]) -> list[tuple[str, int]]:
    return [(job, index) for job, addresses in spec.items() for index in range(len(addresses))]


def kept(leader: Server) -> KeeperSnapshot:
    keeper = leader.snapshot().keeper
    assert keeper is not None
    return keeper


def all_call(servers: list[Server], name: str, **given: Any) -> list[BaseException | None]:
    callers = [Caller(lambda server=server: server.barrier(name, **given)) for server in servers]
    return [caller.ended() for caller in callers]


def test_tasks_meet_and_share_keys(made: Made) -> None:
    spec = cluster(worker=2, ps=1)
    servers = [made(spec, *task) for task in tasks_of(spec)]
    assert [server.snapshot().keeper is not None for server in servers] == [False, False, True]
    for _ in range(2):
        assert all_call(servers, "epoch", timeout=30) == [None] * 3
    servers[0].kv.set("best/loss", 0.5)
    assert servers[1].kv.get("best/loss", timeout=30) == 0.5
    assert servers[2].kv.list("best") == {"best/loss": 0.5}
    assert {name: state.state for name, state in servers[1].task_states().items()} == {
        "worker:0": "up",
        "worker:1": "up",
        "ps:0": "up",
    }
    assert servers[0].task_states()["worker:1"].incarnation == servers[1].snapshot().incarnation


def test_registration_is_known_from_the_start(made: Made) -> None:
    spec = cluster(worker=3)
    early = made(spec, "worker", 1, start=False)
    with pytest.raises(errors.FailedPreconditionError, match="worker:1 was not started yet"):
        early.coordination.check_alive("worker:0")
    servers = [made(spec, "worker", 0), early]
    early.start()
    for server in servers:
        server.coordination.register(30)
    assert [
        servers[0].coordination.check_alive(task)
        for task in ("worker:0", "/job:worker/replica:0/task:1", ("worker", 2))
    ] == [
        True,
        True,
        False,
    ]
    with pytest.raises(errors.InvalidArgumentError, match="worker:3 is not in the cluster"):
        servers[1].coordination.check_alive("worker:3")


def test_single_task_meets_itself(made: Made) -> None:
    server = made({"localhost": ["localhost:0"]}, start=False)
    server.start()
    server.barrier("b", timeout=30)
    server.kv.set("k", 1)
    assert server.kv.get("k") == 1


def test_tasks_with_secrets_meet(made: Made, tmp_path: Path) -> None:
    keys.keygen(tmp_path / "keys")
    keys.keygen(tmp_path / "others")
    spec = cluster(worker=2)
    servers = [made(spec, "worker", index, keys_dir=tmp_path / "keys") for index in range(2)]
    assert all_call(servers, "b", timeout=30) == [None] * 2
    servers[1].stop()
    stranger = made(spec, "worker", 1, keys_dir=tmp_path / "others")
    with pytest.raises(errors.UnauthenticatedError):
        stranger.barrier("b", timeout=30)


def test_evaluator_has_keys_but_no_barriers(made: Made) -> None:
    spec = cluster(chief=1, worker=1, evaluator=1)
    chief, worker, evaluator = (made(spec, *task) for task in tasks_of(spec))
    assert all_call([chief, worker], "b", timeout=30) == [None] * 2
    evaluator.kv.set("score", 1)
    assert chief.kv.get("score", timeout=30) == 1
    with pytest.raises(errors.FailedPreconditionError, match="no task of the cluster"):
        evaluator.barrier("b")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_killed_task_ends_barriers(made: Made, child: Child, how: signal.Signals) -> None:
    spec = cluster(worker=3)
    config = {"coordination": {"heartbeat_timeout_s": 3.0}}
    servers = [made(spec, "worker", index, config=config) for index in range(2)]
    victim = child(TASK, json.dumps(spec), "worker", "2")
    assert victim.stdout is not None
    assert victim.stdout.readline().strip() == "registered"
    callers = [Caller(server.barrier, "b") for server in servers]
    until(lambda: kept(servers[0]).barriers.get("b") == ("worker:2",))
    victim.send_signal(how)
    for caller in callers:
        error = caller.ended()
        assert isinstance(error, errors.InternalError)
        assert "worker:2 is lost" in str(error)


def test_stopped_leader_is_named_to_waiters(
    made: Made,
) -> None:
    spec = cluster(worker=2)
    leader, other = made(spec, "worker", 0), made(spec, "worker", 1)
    waiting = Caller(other.kv.get, "k")
    until(lambda: kept(leader).key_waits)
    leader.stop()
    error = waiting.ended()
    assert isinstance(error, errors.CancelledError)
    assert "the leader worker:0, which keeps barriers and keys, stops" in str(error)
    until(lambda: isinstance(Caller(other.kv.try_get, "k").ended(), errors.UnavailableError))
    with pytest.raises(errors.UnavailableError, match=r"the leader worker:0 at .* has gone"):
        other.barrier("b")


def test_restarted_leader_meets_earlier_members(made: Made) -> None:
    spec = cluster(worker=2)
    leader, other = made(spec, "worker", 0), made(spec, "worker", 1)
    for _ in range(3):
        assert all_call([leader, other], "b", timeout=30) == [None, None]
    leader.stop()
    until(lambda: other.coordination.snapshot().state == "lost")
    leader = made(spec, "worker", 0)
    until(lambda: other.coordination.snapshot().state == "up")
    assert all_call([leader, other], "b", timeout=30) == [None, None]


def test_number_of_barriers_is_bounded(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmqdist.coordination.client.BARRIERS_MAX", 2)
    server = made(cluster(worker=1))
    for name in "abcb":
        server.barrier(name, timeout=30)
    assert server.coordination.snapshot().barriers == ("c", "b")
    server.barrier("b", timeout=30)  # whose rounds are still counted alike at both ends


def test_stopped_server_takes_no_part(made: Made) -> None:
    spec = cluster(worker=2)
    leader, other = made(spec, "worker", 0), made(spec, "worker", 1)
    other.coordination.register(30)
    other.stop()
    assert leader.task_states()["worker:1"].state == "left"
    with pytest.raises(errors.FailedPreconditionError, match="the server of worker:1 was stopped"):
        other.barrier("b")


def test_absent_leader_is_named(made: Made) -> None:
    spec = cluster(worker=2)
    server = made(spec, "worker", 1)
    with pytest.raises(errors.DeadlineExceededError) as caught:
        server.barrier("b", timeout=0.1)
    assert_waited_for(f"the leader worker:0 at {spec['worker'][0]}", caught.value, 0.1)


def test_leader_without_port_is_refused(made: Made) -> None:
    server = made({"worker": ["localhost:0", *free_addresses(1)]}, "worker", 1)
    with pytest.raises(
        errors.FailedPreconditionError, match="the leader worker:0 has port 0 in this cluster"
    ):
        server.kv.set("k", 1)


@pytest.mark.parametrize(
    "section",
    [
        {"heartbeat_timeout": 1},
        {"heartbeat_timeout_s": 0},
        {"reconnect_grace_s": float("nan")},
        {"register_timeout_s": "5"},
        {"recoverable_jobs": "worker"},
        7,
    ],
    ids=str,
)
def test_bad_section_is_refused_by_key(section: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="coordination"):
        config_of(section)


def test_bad_config_frees_the_port(made: Made) -> None:
    spec = cluster(worker=1)
    with pytest.raises(errors.InvalidArgumentError) as caught:
        made(spec, config={"coordination": 7})
    made(spec)
    # kept until now, with all that its traceback refers to
    assert "coordination" in str(caught.value)


def test_section_has_the_fields_of_the_machine() -> None:
    given = {"heartbeat_timeout_s": 2, "recoverable_jobs": ["worker"], "shutdown_timeout_s": 0}
    assert config_of(given) == CoordinationConfig(
        heartbeat_timeout_s=2, recoverable_jobs=frozenset(("worker",))
    )

"""Actors as real processes: a dispatcher, workers, and a program that makes actors by messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import zmqdist as zd
from tests.ports import free_port
from tests.scheduling.actor_owner import Counter, Owner, spec
from tests.scheduling.work import until
from zmqdist.launch.children import Child
from zmqdist.messages import ActorFound, DropActor, FindActor
from zmqdist.scheduling.shared.actors import ActorState
from zmqdist.wire import trusted

LIVE, PENDING, AWAY, ENDED = (
    ActorState.LIVE,
    ActorState.PENDING,
    ActorState.AWAY,
    ActorState.ENDED,
)
LEASE_S = 2.0


class Process(Counter):
    """A counter that names its process, and can end it."""

    def pid(self) -> int:
        return os.getpid()

    def variable(self, name: str) -> str:
        return os.environ[name]

    def crash(self) -> None:
        print("the last line", file=sys.stderr, flush=True)
        os._exit(7)


class Refusing:
    def __init__(self) -> None:
        raise ValueError("no object")


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=2, actors_max=2, lease_s=LEASE_S) as made:
        made.status()  # makes its connection
        yield made


@pytest.fixture
def owner(cluster: zd.local_cluster) -> Iterator[Owner]:
    made = Owner(cluster.target.removeprefix("zmq://"), cluster.credentials)
    yield made
    made.close()
    until(lambda: not cluster.status()["actors"])


def ends(pid: int) -> None:
    """Wait for the end of a process that is no child of this one."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        until(lambda: _readable(fd), f"the end of {pid}")
    finally:
        os.close(fd)


def _readable(fd: int) -> bool:
    import select

    return bool(select.select([fd], [], [], 0)[0])


def test_actor_keeps_its_state_between_calls(owner: Owner) -> None:
    change = owner.reaches(owner.create(spec(Process, 5, owner=owner.number)), LIVE)
    assert [owner.call(change, "add", 2) for _ in range(2)] == [7, 9]


def test_process_of_actor_ends_with_its_program(cluster: zd.local_cluster) -> None:
    owner = Owner(cluster.target.removeprefix("zmq://"), cluster.credentials)
    change = owner.reaches(owner.create(spec(Process, owner=owner.number)), LIVE)
    pid = owner.call(change, "pid")
    owner.close()
    ends(pid)
    until(lambda: not cluster.status()["actors"])


def test_actor_ends_a_lease_after_its_program_died(cluster: zd.local_cluster) -> None:
    owner = Owner(cluster.target.removeprefix("zmq://"), cluster.credentials)
    change = owner.reaches(owner.create(spec(Process, owner=owner.number)), LIVE)
    pid = owner.call(change, "pid")
    owner.close(goodbye=False)
    ends(pid)


def test_killed_actor_ends_with_its_reason(owner: Owner) -> None:
    wanted = owner.create(spec(Process, owner=owner.number))
    change = owner.reaches(wanted, LIVE)
    os.kill(owner.call(change, "pid"), signal.SIGKILL)
    assert "killed by SIGKILL" in owner.reaches(wanted, ENDED).reason


def test_crashed_actor_names_its_last_lines(owner: Owner) -> None:
    wanted = owner.create(spec(Process, owner=owner.number))
    change = owner.reaches(wanted, LIVE)
    owner.cast(change, "crash")
    reason = owner.reaches(wanted, ENDED).reason
    assert reason == "its process ended: exit code 7; it last wrote:\nthe last line"


def test_actor_with_restarts_begins_again(owner: Owner) -> None:
    wanted = owner.create(spec(Process, 3, owner=owner.number, restarts=1))
    change = owner.reaches(wanted, LIVE)
    assert owner.call(change, "add", 4) == 7
    os.kill(owner.call(change, "pid"), signal.SIGKILL)
    again = owner.reaches(wanted, LIVE, change.incarnation)
    assert owner.call(again, "add", 0) == 3
    assert again.restarts_left == 0
    os.kill(owner.call(again, "pid"), signal.SIGKILL)
    owner.reaches(wanted, ENDED)


def test_error_of_init_ends_actor(owner: Owner) -> None:
    wanted = owner.create(spec(Refusing, owner=owner.number, restarts=5))
    with pytest.raises(ValueError, match="no object"):
        raise trusted.unpack_error(owner.reaches(wanted, ENDED).error)


def test_dropped_actor_ends(owner: Owner) -> None:
    wanted = owner.create(spec(Process, owner=owner.number))
    change = owner.reaches(wanted, LIVE)
    pid = owner.call(change, "pid")
    owner.send(DropActor(wanted.actor, "killed by the program", 0.0))
    assert owner.reaches(wanted, ENDED).reason == "killed by the program"
    ends(pid)


def test_actor_beyond_the_bound_waits(owner: Owner, cluster: zd.local_cluster) -> None:
    live = [owner.create(spec(Process, owner=owner.number)) for _ in range(4)]
    for wanted in live:
        owner.reaches(wanted, LIVE)
    late = owner.create(spec(Process, owner=owner.number))
    assert "room for 0 of 4 actors (actors_max)" in owner.reaches(late, PENDING).reason
    assert [row["actors"] for row in cluster.status()["workers"]] == [2, 2]
    owner.send(DropActor(live[0].actor, "room"))
    owner.reaches(late, LIVE)


def test_detached_actor_outlives_its_program(owner: Owner, cluster: zd.local_cluster) -> None:
    first = Owner(cluster.target.removeprefix("zmq://"), cluster.credentials)
    wanted = first.create(spec(Process, 1, name="shared"))
    change = first.reaches(wanted, LIVE)
    first.close()
    owner.send(FindActor(1, "shared"))
    found = owner.next(ActorFound)
    assert (found.actor, found.cls) == (wanted.actor, "Process")
    assert owner.call(change, "add", 1) == 2
    owner.send(DropActor(wanted.actor, "the test ends"))


def test_name_without_actor_is_not_found(owner: Owner) -> None:
    owner.send(FindActor(2, "nothing"))
    assert owner.next(ActorFound).actor == 0


def test_lost_worker_takes_its_actors_along(
    start_dispatcher: Callable[..., subprocess.Popen[str]], start_worker: Callable[..., Child]
) -> None:
    port = free_port()
    start_dispatcher(port=port, lease_s=LEASE_S)
    address = f"127.0.0.1:{port}"
    workers = [start_worker(address, index=index) for index in range(2)]
    owner = Owner(address)
    plain = owner.create(spec(Process, owner=owner.number, worker="worker:0"))
    restarted = owner.create(spec(Process, owner=owner.number, restarts=1))
    owner.reaches(plain, LIVE)
    change = owner.reaches(restarted, LIVE)
    index = int(change.worker.partition(":")[2])
    workers[index].signal(signal.SIGKILL)
    again = owner.reaches(restarted, LIVE, change.incarnation)
    assert again.worker != change.worker
    workers[0].signal(signal.SIGKILL)
    assert "worker:0 was lost: its process ended" in owner.reaches(plain, ENDED).reason
    owner.close()


@pytest.mark.parametrize("restarts", [0, 2])
def test_actor_survives_restart_of_dispatcher(
    start_dispatcher: Callable[..., subprocess.Popen[str]],
    start_worker: Callable[..., Child],
    restarts: int,
) -> None:
    port = free_port()
    dispatcher = start_dispatcher(port=port, lease_s=30.0)
    address = f"127.0.0.1:{port}"
    start_worker(address, index=0)
    owner = Owner(address)
    wanted = owner.create(spec(Process, owner=owner.number, name="n", restarts=restarts))
    change = owner.reaches(wanted, LIVE)
    assert owner.call(change, "add", 4) == 4
    dispatcher.kill()
    dispatcher.wait()
    assert owner.call(change, "add", 4) == 8
    start_dispatcher(port=port, lease_s=30.0)
    after = owner.reaches(wanted, LIVE)
    assert (after.incarnation, after.address) == (change.incarnation, change.address), after
    assert owner.call(after, "add", 4) == 12
    owner.close()


def test_frozen_worker_never_doubles_its_actor(
    start_dispatcher: Callable[..., subprocess.Popen[str]], start_worker: Callable[..., Child]
) -> None:
    port = free_port()
    start_dispatcher(port=port, lease_s=LEASE_S)
    address = f"127.0.0.1:{port}"
    workers = [start_worker(address, index=index) for index in range(2)]
    owner = Owner(address)
    wanted = owner.create(spec(Process, owner=owner.number, restarts=1))
    change = owner.reaches(wanted, LIVE)
    pid = owner.call(change, "pid")
    fd = os.pidfd_open(pid)
    frozen = workers[int(change.worker.partition(":")[2])]
    frozen.signal(signal.SIGSTOP)
    again = owner.reaches(wanted, LIVE, change.incarnation)
    assert _readable(fd), "the earlier process has ended"
    assert again.worker != change.worker
    frozen.signal(signal.SIGCONT)
    assert owner.call(again, "add", 1) == 1
    os.close(fd)
    owner.close()


def test_drain_names_actors_that_end(owner: Owner, cluster: zd.local_cluster) -> None:
    wanted = owner.create(spec(Process, owner=owner.number, worker="worker:1", name="n"))
    owner.reaches(wanted, LIVE)
    with pytest.raises(zd.errors.DrainRefusedError, match="1 actor that ends: Process n"):
        cluster.scale(1)


def test_actor_without_a_free_port_says_so(
    monkeypatch: pytest.MonkeyPatch,
    start_dispatcher: Callable[..., subprocess.Popen[str]],
    start_worker: Callable[..., Child],
) -> None:
    port = free_port()
    start_dispatcher(port=port, lease_s=LEASE_S)
    used = free_port()
    monkeypatch.setenv("ZMQDIST_PORTS", f"{used}-{used}")
    start_worker(f"127.0.0.1:{port}", index=0)
    owner = Owner(f"127.0.0.1:{port}")
    change = owner.reaches(owner.create(spec(Process, owner=owner.number)), ENDED)
    assert change.reason.startswith("its process could not be started: could not bind")
    owner.close()


def test_worker_with_thread_slots_has_no_actors() -> None:
    with zd.local_cluster(workers=1, processes=False) as cluster:
        owner = Owner(cluster.target.removeprefix("zmq://"), cluster.credentials)
        change = owner.reaches(owner.create(spec(Process, owner=owner.number)), PENDING)
        assert "their slots are threads" in change.reason
        owner.close()


def test_actor_uses_its_devices_alone(
    monkeypatch: pytest.MonkeyPatch,
    start_dispatcher: Callable[..., subprocess.Popen[str]],
    start_worker: Callable[..., Child],
) -> None:
    port = free_port()
    start_dispatcher(port=port, lease_s=LEASE_S)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    start_worker(f"127.0.0.1:{port}", index=0, resources={"gpu": 2})
    owner = Owner(f"127.0.0.1:{port}")
    wants = [
        owner.create(spec(Process, owner=owner.number, resources={"gpu": 1000})) for _ in range(2)
    ]
    live = [owner.reaches(wanted, LIVE) for wanted in wants]
    devices = [owner.call(change, "variable", "CUDA_VISIBLE_DEVICES") for change in live]
    assert sorted(devices) == ["4", "6"]
    owner.close()

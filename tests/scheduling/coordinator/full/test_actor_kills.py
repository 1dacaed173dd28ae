"""Kills of actors, workers, dispatchers and callers under calls: each value is right, or its error
is honest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.scheduling.dispatcher_kills import StartDispatcher, StartWorker
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

CALLS = 10_000
LEASE_S = 2.0


class Recorder:
    """Writes each call to a file before it answers."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def record(self, number: int) -> int:
        os.write(self.file, b"%d\n" % number)
        return number

    def pid(self) -> int:
        return os.getpid()


def check_calls(values: list[Any], path: Path) -> Counter[str]:
    """Check the end of each call against the file, and return how many ended in which way."""
    for value in values:
        value.exception(60)
    written = Counter(map(int, path.read_text().split()))
    ends: Counter[str] = Counter()
    for number, value in enumerate(values):
        error = value.exception()
        if error is None:
            assert value.result() == number
            assert written[number] == 1
            ends["right"] += 1
            continue
        assert isinstance(error, errors.ActorLostError), error
        assert written[number] <= error.maybe_executed
        ends["maybe" if error.maybe_executed else "never"] += 1
    assert max(written.values()) == 1
    assert list(written) == sorted(written), "calls ran in another order"
    return ends


@pytest.fixture
def address(port: int, start_dispatcher: StartDispatcher) -> str:
    start_dispatcher(port=port, lease_s=LEASE_S)
    return f"127.0.0.1:{port}"


def test_killed_actor_under_calls(address: str, start_worker: StartWorker, tmp_path: Path) -> None:
    start_worker(address, index=0)
    with ClusterCoordinator(address) as coordinator:
        recorder = coordinator.options(restarts=5).actor(Recorder, str(tmp_path / "calls"))
        values: list[Any] = []
        for _ in range(5):
            pid = until(lambda: _pid_of(recorder))
            values += [recorder.record(len(values) + n) for n in range(CALLS // 5)]
            until(values[-CALLS // 10].done)
            os.kill(pid, signal.SIGKILL)
        ends = check_calls(values, tmp_path / "calls")
    assert ends["right"] > 0


def test_killed_worker_under_calls(address: str, start_worker: StartWorker, tmp_path: Path) -> None:
    workers = [start_worker(address, index=index) for index in range(2)]
    with ClusterCoordinator(address) as coordinator:
        recorder = coordinator.options(restarts=1, worker=None).actor(
            Recorder, str(tmp_path / "calls")
        )
        pid = recorder.pid().result(30)
        hosts = [_parents(pid) & {worker.pid} for worker in workers]
        values = [recorder.record(number) for number in range(CALLS)]
        workers[0 if hosts[0] else 1].signal(signal.SIGKILL)
        check_calls(values, tmp_path / "calls")
        assert until(lambda: _pid_of(recorder), within_s=60) != pid
        until(lambda: not os.path.exists(f"/proc/{pid}"))


def _pid_of(recorder: Any) -> int | None:
    """None while the actor begins again."""
    try:
        pid: int = recorder.pid().result(30)
        return pid
    except errors.ActorLostError:
        return None


def _parents(pid: int) -> set[int]:
    parents: set[int] = set()
    while pid > 1:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pid = int(fields[1])
        parents.add(pid)
    return parents


# An actor with restarts ends itself after half a lease without a dispatcher.
@pytest.mark.parametrize(("restarts", "lease_s"), [(0, LEASE_S), (1, 12.0)])
def test_killed_dispatcher_costs_no_call(
    restarts: int,
    lease_s: float,
    port: int,
    start_worker: StartWorker,
    start_dispatcher: StartDispatcher,
    tmp_path: Path,
) -> None:
    dispatcher = start_dispatcher(port=port, lease_s=lease_s)
    address = f"127.0.0.1:{port}"
    start_worker(address, index=0)
    with ClusterCoordinator(address, cluster_lost_limit_s=60.0) as coordinator:
        recorder = coordinator.options(restarts=restarts, name="recorder").actor(
            Recorder, str(tmp_path / "calls")
        )
        pid = recorder.pid().result(30)
        values = [recorder.record(number) for number in range(CALLS // 2)]
        dispatcher.kill()
        dispatcher.wait()
        values += [recorder.record(number) for number in range(CALLS // 2, CALLS)]
        dispatcher = start_dispatcher(port=port, lease_s=lease_s)
        assert check_calls(values, tmp_path / "calls") == {"right": CALLS}
        assert coordinator.get_actor("recorder", 60).pid().result(30) == pid
        assert recorder.pid().result(30) == pid


CALLER = """
import sys
import zmqdist as zd
from tests.scheduling.coordinator.full.test_actor_kills import Recorder
co = zd.ClusterCoordinator(sys.argv[1])
recorder = co.actor(Recorder, sys.argv[2])
print(recorder.pid().result(30), flush=True)
for number in range(10**9):
    recorder.record(number)
"""


def test_killed_caller_ends_its_actor(
    address: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    start_worker(address, index=0)
    path = str(tmp_path / "calls")
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, address, path], stdout=subprocess.PIPE, text=True
    )
    try:
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        until(lambda: os.path.getsize(path) > 1000)
    finally:
        caller.kill()
        caller.communicate()
    until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_stopped_worker_leaves_no_second_actor(
    address: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    """A worker that is frozen beyond its lease comes back when another worker has the actor."""
    workers = [start_worker(address, index=index) for index in range(2)]
    with ClusterCoordinator(address) as coordinator:
        recorder = coordinator.options(restarts=1).actor(Recorder, str(tmp_path / "calls"))
        pid = recorder.pid().result(30)
        frozen = next(worker for worker in workers if worker.pid in _parents(pid))
        frozen.signal(signal.SIGSTOP)
        try:
            until(lambda: not os.path.exists(f"/proc/{pid}"), within_s=60)
            assert until(lambda: _pid_of(recorder), within_s=60) != pid
        finally:
            frozen.signal(signal.SIGCONT)
        assert recorder.record(1).result(30) == 1


def test_stopped_worker_keeps_actor_without_restarts(
    address: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    """Nobody takes it over, so a host that is too busy to run its worker costs no actor."""
    worker = start_worker(address, index=0)
    with ClusterCoordinator(address) as coordinator:
        recorder = coordinator.actor(Recorder, str(tmp_path / "calls"))
        pid = recorder.pid().result(30)
        other = coordinator.options(restarts=1).actor(Recorder, str(tmp_path / "others"))
        ended = other.pid().result(30)
        worker.signal(signal.SIGSTOP)
        try:
            until(lambda: not os.path.exists(f"/proc/{ended}"), within_s=60)
            assert recorder.pid().result(30) == pid
        finally:
            worker.signal(signal.SIGCONT)
        assert coordinator.schedule(os.getpid).get(60) != pid
        assert recorder.pid().result(30) == pid


def test_unsent_call_ends_when_worker_and_dispatcher_die(
    port: int, start_worker: StartWorker, start_dispatcher: StartDispatcher, tmp_path: Path
) -> None:
    """The next dispatcher knows nothing of the worker, and would wait for it for a minute; that
    nobody listens at the actor's address is certain before."""
    dispatcher = start_dispatcher(port=port, lease_s=LEASE_S)
    worker = start_worker(f"127.0.0.1:{port}", index=0)
    with ClusterCoordinator(f"127.0.0.1:{port}", cluster_lost_limit_s=60.0) as coordinator:
        recorder = coordinator.actor(Recorder, str(tmp_path / "calls"))
        pid = recorder.pid().result(30)
        dispatcher.kill()
        worker.signal(signal.SIGKILL)
        dispatcher.wait()
        until(lambda: not os.path.exists(f"/proc/{pid}"))
        until(lambda: not coordinator.snapshot().connected)
        unsent = recorder.record(1)
        start_dispatcher(port=port, lease_s=LEASE_S)
        error = unsent.exception(25)
        assert isinstance(error, errors.ActorLostError)
        assert not error.maybe_executed or "connection to its process" in str(error)
        last = recorder.record(2).exception(25)
        assert isinstance(last, errors.ActorLostError)
        assert "nothing listens at" in str(last)
        assert not last.maybe_executed

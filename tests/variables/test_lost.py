"""Answers that are lost, connections that end, a ps that is killed, stopped, or started again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.launch.helpers import stop
from tests.variables.conftest import PROGRAM, SESSION, Make
from tests.variables.helpers import Wire
from zmqdist import limits
from zmqdist.errors import DeadlineExceededError, PSUnavailableError, UnavailableError
from zmqdist.optimizers import SGD
from zmqdist.tasks.server import Server
from zmqdist.variables import client as c
from zmqdist.variables.client import PsClient, Ref, client_of


@pytest.fixture
def wire(ps: Server) -> Iterator[Wire]:
    wire = Wire(ps.address)
    yield wire
    client_of(wire.address).close()
    wire.close()


def version(client: PsClient, ref: Ref) -> int:
    return int(client.read([ref]).get_value()[0][0])


def until(condition: Callable[[], bool]) -> None:
    due = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < due
        time.sleep(0.01)


# -- connections -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4,), (1 << 19,)])
def test_update_with_lost_reply_is_applied_once(
    shape: tuple[int, ...], ps: Server, client: PsClient, make: Make, wire: Wire
) -> None:
    ref = make(np.zeros(shape))
    other = client_of(wire.address)
    assert version(other, ref) == 1
    wire.holding = True
    started = other.update([(ref, c.add(ref, np.ones(shape, "f4")))])
    until(lambda: version(client, ref) == 2)
    wire.cut()
    wire.holding = False
    assert started.get_value() == [(2, True, None)]
    ((_, value),) = client.read([ref]).get_value()
    assert (value == 1).all()


def test_step_of_lost_connection_counts_once(client: PsClient, make: Make, wire: Wire) -> None:
    ref = make([10])
    other = client_of(wire.address)
    assert version(other, ref) == 1
    gone = other.update([(ref, c.apply(ref, SGD(1.0), [1]))], step=0, workers_per_step=2)
    until(lambda: client.status().get_value()["variables"][0]["bytes"] == 8)
    waiting = threading.Thread(target=gone.get_value)
    waiting.start()
    before = wire.taken
    wire.cut()
    until(lambda: wire.taken > before)
    message = client.update(
        [(ref, c.apply(ref, SGD(1.0), [3]))], step=0, workers_per_step=2, want=True
    ).get_value()
    assert message[0].value.tolist() == [8]
    waiting.join()
    assert gone.get_value() == [(2, True, None)]


def test_abandoned_update_is_settled(client: PsClient, make: Make, ps: Server) -> None:
    ref = make([0])
    for _ in range(5):
        client.update([(ref, c.add(ref, [1]))])
    until(lambda: version(client, ref) == 6)

    def the_ps_keeps_only_the_last_answer() -> bool:
        client.update([(ref, c.add(ref, [1]))]).get_value()
        return bool(client.status().get_value()["answers"] == 1)

    until(the_ps_keeps_only_the_last_answer)


def test_deadline_of_a_request_is_kept(client: PsClient, make: Make) -> None:
    ref = make([0])
    change = [(ref, c.apply(ref, SGD(1.0), [1]))]
    with pytest.raises(DeadlineExceededError):
        client.update(change, step=0, workers_per_step=2, due=time.monotonic() + 0.05).get_value()


def test_silence_counts_from_the_wait(client: PsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two questions one asks for both; the other has waited as long."""
    now, looked, asking = [0.0], threading.Semaphore(0), threading.Event()

    def monotonic() -> float:
        looked.release()
        return now[0]

    def hears_nothing(_client: object, until: float) -> None:
        assert asking.wait(20)
        raise DeadlineExceededError(None, None, "no answer")

    message: list[str] = []

    def reach() -> None:
        try:
            client.reach(10.0)
        except UnavailableError as error:
            message.append(error.message)

    client.reached = False
    with monkeypatch.context() as slow:
        slow.setattr(c, "time", SimpleNamespace(monotonic=monotonic))
        slow.setattr(c.internal_client, "reach", hears_nothing)
        threads = [threading.Thread(target=reach) for _ in range(2)]
        for thread in threads:
            thread.start()
            assert looked.acquire(timeout=20)
        now[0] = 12.0
        asking.set()
        for thread in threads:
            thread.join()
    assert message == [f"no reply from {client.address} for 12.0 s"] * 2


# -- processes -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    """One parameter server, a process."""
    with zd.local_cluster(workers=0, ps=1) as cluster:
        yield cluster


@pytest.fixture
def mortal(cluster: zd.local_cluster) -> Iterator[zd.local_cluster]:
    """The same, with its ps:0 alive whatever the test before has done to it."""
    if "ps:0" not in cluster.pids:
        cluster.restart_ps(0)
    yield cluster
    client_of(cluster.ps[0]).close()


def variable(cluster: zd.local_cluster) -> tuple[PsClient, Ref]:
    client = client_of(cluster.ps[0], cluster.credentials)
    client.open(PROGRAM, SESSION)
    ref = Ref("w/part_1", (2,), np.dtype("f4"), "ps:0", cluster.ps[0], SESSION, 0)
    client.create(ref, np.array([1, 2], "f4")).get_value()
    return client, ref


@pytest.mark.processes("variables")
@pytest.mark.killed("variables")
@pytest.mark.shares_cluster
def test_killed_ps_is_named_at_once(mortal: zd.local_cluster) -> None:
    client, ref = variable(mortal)
    pending = client.update([(ref, c.apply(ref, SGD(1.0), [1, 1]))], step=0, workers_per_step=2)
    mortal.kill_ps(0)
    began = time.monotonic()
    for started in (pending, client.read([ref]), client.update([(ref, c.add(ref, [1, 1]))])):
        with pytest.raises(
            PSUnavailableError, match=r"variable 'w/part_1' on ps:0 .*no process listens at"
        ) as caught:
            started.get_value()
        assert isinstance(caught.value.original_exception, UnavailableError)
    assert time.monotonic() - began < limits.PS_PATIENCE_S


@pytest.mark.shares_cluster
def test_restarted_ps_has_lost_its_variables(
    mortal: zd.local_cluster,
) -> None:
    client, ref = variable(mortal)
    mortal.kill_ps(0)
    mortal.restart_ps(0)
    with pytest.raises(
        PSUnavailableError, match=r"variable 'w/part_1' on ps:0 .* is lost: .* was restarted"
    ):
        client.read([ref]).get_value()
    _, ref = variable(mortal)
    assert client.update([(ref, c.add(ref, [1, 1]))]).get_value() == [(2, True, None)]


@pytest.mark.shares_cluster
def test_recovery_waits_for_the_variable(
    mortal: zd.local_cluster,
) -> None:
    client, ref = variable(mortal)
    patient = replace(ref, recovery_s=60.0)
    mortal.kill_ps(0)
    read: list[Any] = []
    waiting = threading.Thread(target=lambda: read.append(client.read([patient]).get_value()))
    waiting.start()
    mortal.restart_ps(0)
    with pytest.raises(PSUnavailableError):
        client.read([ref]).get_value()
    variable(mortal)
    waiting.join()
    assert read[0][0][1].tolist() == [1, 2]


@pytest.mark.shares_cluster
def test_stopped_ps_is_given_up(mortal: zd.local_cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    client, ref = variable(mortal)
    try:
        stop(mortal.pids["ps:0"])
        with monkeypatch.context() as hasty:
            hasty.setattr(c, "PS_PATIENCE_S", 0.2)
            with pytest.raises(PSUnavailableError, match="no reply from"):
                client.update([(ref, c.add(ref, [1, 1]))]).get_value()
    finally:
        os.kill(mortal.pids["ps:0"], signal.SIGCONT)
    assert client.update([(ref, c.add(ref, [1, 1]))]).get_value()[0].applied


def test_orderly_stop_of_ps_ends_waits(client: PsClient, make: Make, ps: Server) -> None:
    ref = make([1])
    pending = client.update([(ref, c.apply(ref, SGD(1.0), [1]))], step=0, workers_per_step=2)
    version(client, ref)
    ps.stop(0.1)
    with pytest.raises(PSUnavailableError, match="variable 'w' on ps:0"):
        pending.get_value()


@pytest.mark.shares_cluster
def test_watch_ends_with_session_or_ps(mortal: zd.local_cluster) -> None:
    client, _ = variable(mortal)
    ended, lost = client.watch("ps:0", SESSION, 0.0), threading.Event()
    ended.when_done(lost.set)
    assert not lost.is_set()
    client.close_session(SESSION).get_value()
    assert lost.wait(30)
    assert ended.get_value() is None
    variable(mortal)
    watched = client.watch("ps:0", SESSION, 0.0)
    mortal.kill_ps(0)
    with pytest.raises(
        PSUnavailableError, match=rf"ps:0 \({mortal.ps[0]}\) .*no process listens at"
    ) as caught:
        watched.get_value()
    assert caught.value.address == mortal.ps[0]

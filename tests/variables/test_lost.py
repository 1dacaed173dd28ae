"""Answers that are lost, connections that end, a ps that is killed, stopped, or started again."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.launch.launched import stop
from tests.ports import free_addresses
from tests.variables.conftest import PROGRAM, SESSION, Make
from tests.variables.middle import Wire
from zmqdist import limits
from zmqdist.errors import DeadlineExceededError, PSUnavailableError, UnavailableError
from zmqdist.optimizers import SGD
from zmqdist.server.server import Server
from zmqdist.variables import client as c
from zmqdist.variables.client import PsClient, Ref, client_of

Child = Callable[..., "subprocess.Popen[str]"]

PS = """
import sys
import zmqdist as zd
with zd.Server({"ps": ["127.0.0.1:1", sys.argv[1]]}, "ps", 1) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


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


# -- connections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4,), (1 << 19,)])
def test_an_update_whose_answer_was_lost_is_asked_again_and_applied_once(
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


def test_a_step_of_a_worker_whose_connection_went_counts_once(client: PsClient, make: Make, wire: Wire) -> None:
    ref = make([10])
    other = client_of(wire.address)
    assert version(other, ref) == 1
    gone = other.update([(ref, c.apply(ref, SGD(1.0), [1]))], step=0, workers_per_step=2)
    until(lambda: client.about().get_value()["variables"][0]["bytes"] == 8)
    waiting = threading.Thread(target=gone.get_value)
    waiting.start()
    wire.cut()
    until(lambda: bool(wire._pairs))
    told = client.update([(ref, c.apply(ref, SGD(1.0), [3]))], step=0, workers_per_step=2, want=True).get_value()
    assert told[0].value.tolist() == [8]
    waiting.join()
    assert gone.get_value() == [(2, True, None)]


def test_what_nobody_waits_for_any_more_is_settled(client: PsClient, make: Make, ps: Server) -> None:
    ref = make([0])
    for _ in range(5):
        client.update([(ref, c.add(ref, [1]))])
    until(lambda: version(client, ref) == 6)
    until(lambda: not client._ids._loose or client._ids.next()[2] >= 5)
    client.update([(ref, c.add(ref, [1]))]).get_value()
    assert client._ids.next()[2] >= 5


def test_the_time_of_a_question_is_kept(client: PsClient, make: Make) -> None:
    ref = make([0])
    change = [(ref, c.apply(ref, SGD(1.0), [1]))]
    with pytest.raises(DeadlineExceededError):
        client.update(change, step=0, workers_per_step=2, due=time.monotonic() + 0.05).get_value()


# -- processes --------------------------------------------------------------------------------------------------------


def begun(child: Child, address: str) -> subprocess.Popen[str]:
    process = child(PS, address)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == address
    return process


def variable(address: str) -> tuple[PsClient, Ref]:
    client = client_of(address)
    client.open(PROGRAM, SESSION)
    ref = Ref("w/part_1", (2,), np.dtype("f4"), "ps:1", address, SESSION, 0)
    client.create(ref, np.array([1, 2], "f4")).get_value()
    return client, ref


@pytest.fixture
def address() -> Iterator[str]:
    (address,) = free_addresses(1)
    yield address
    client_of(address).close()


def test_a_killed_ps_is_told_at_once_with_variable_and_task(address: str, child: Child) -> None:
    process = begun(child, address)
    client, ref = variable(address)
    pending = client.update([(ref, c.apply(ref, SGD(1.0), [1, 1]))], step=0, workers_per_step=2)
    process.kill()
    began = time.monotonic()
    for started in (pending, client.read([ref]), client.update([(ref, c.add(ref, [1, 1]))])):
        with pytest.raises(PSUnavailableError, match=r"variable 'w/part_1' on ps:1 .*nobody listens at") as caught:
            started.get_value()
        assert isinstance(caught.value.original_exception, UnavailableError)
    assert time.monotonic() - began < limits.PS_PATIENCE_S


def test_a_ps_that_was_started_again_has_lost_its_variables_and_works_with_new_ones(address: str, child: Child) -> None:
    process = begun(child, address)
    client, ref = variable(address)
    process.kill()
    process.wait()
    begun(child, address)
    with pytest.raises(PSUnavailableError, match=r"variable 'w/part_1' on ps:1 .* is lost: .* was started again"):
        client.read([ref]).get_value()
    _, ref = variable(address)
    assert client.update([(ref, c.add(ref, [1, 1]))]).get_value() == [(2, True, None)]


def test_with_recovery_a_lost_variable_is_waited_for_until_it_is_there_again(address: str, child: Child) -> None:
    process = begun(child, address)
    client, ref = variable(address)
    patient = replace(ref, recovery_s=60.0)
    process.kill()
    process.wait()
    read: list[Any] = []
    waiting = threading.Thread(target=lambda: read.append(client.read([patient]).get_value()))
    waiting.start()
    begun(child, address)
    with pytest.raises(PSUnavailableError):
        client.read([ref]).get_value()
    variable(address)
    waiting.join()
    assert read[0][0][1].tolist() == [1, 2]


def test_a_ps_that_is_stopped_is_given_up_after_a_while_and_one_that_goes_on_answers(
    address: str, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c, "PS_PATIENCE_S", 0.2)
    process = begun(child, address)
    client, ref = variable(address)
    stop(process.pid)
    with pytest.raises(PSUnavailableError, match="no answer from"):
        client.update([(ref, c.add(ref, [1, 1]))]).get_value()
    monkeypatch.undo()
    os.kill(process.pid, signal.SIGCONT)
    assert client.update([(ref, c.add(ref, [1, 1]))]).get_value()[0].applied


def test_a_ps_that_stops_in_order_ends_what_waits(client: PsClient, make: Make, ps: Server) -> None:
    ref = make([1])
    pending = client.update([(ref, c.apply(ref, SGD(1.0), [1]))], step=0, workers_per_step=2)
    version(client, ref)
    ps.stop(0.1)
    with pytest.raises(PSUnavailableError, match="variable 'w' on ps:0"):
        pending.get_value()


def test_a_watch_ends_with_its_session_and_fails_with_its_ps(address: str, child: Child) -> None:
    process = begun(child, address)
    client, _ = variable(address)
    ended, lost = client.watch("ps:1", SESSION, 0.0), threading.Event()
    ended.when_done(lost.set)
    assert not lost.is_set()
    client.close_session(SESSION).get_value()
    assert lost.wait(30)
    assert ended.get_value() is None
    variable(address)
    watched = client.watch("ps:1", SESSION, 0.0)
    process.kill()
    with pytest.raises(PSUnavailableError, match=rf"ps:1 \({address}\) .*nobody listens at") as caught:
        watched.get_value()
    assert caught.value.address == address

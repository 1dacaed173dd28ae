"""The worker's machine of its actors, promise by promise, in a worker's machine with contact to a
dispatcher."""

from __future__ import annotations

from typing import Any

import pytest

from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import (
    ActorExited,
    ActorReady,
    ActorSpec,
    Beat,
    KeepActor,
    Leave,
    Register,
    Registered,
    StartActor,
    StopActor,
)
from zmqdist.scheduling.worker.machine import DISPATCHER, WorkerMachine
from zmqdist.scheduling.worker.worker_events import (
    ActorEnded,
    ActorServing,
    DispatcherConnected,
    DispatcherDisconnected,
    EndActor,
    Exit,
    KillActor,
    SlotReady,
    SpawnActor,
)

SPEC = ActorSpec(5, "Counter", b"call", 1, restarts=2)
ORDER = StartActor(SPEC, 70, 2)
OTHER_ORDER = StartActor(SPEC, 71, 2)
LEASE_S = 10.0


def worker() -> WorkerMachine:
    """Return a worker that is registered."""
    machine = WorkerMachine(
        incarnation=9,
        job="worker",
        index=0,
        slots=1,
        pid=100,
        host="host",
        orphan_limit_s=60.0,
        can_kill=True,
        now=0.0,
        actors_max=4,
    )
    machine.handle(SlotReady(0), 0.0)
    register(machine, 0.0)
    return machine


def register(machine: WorkerMachine, now: float, dispatcher: int = 77) -> Register:
    """Connect and register, and return the Register."""
    sends = machine.handle(DispatcherConnected(dispatcher), now)
    message = next(e.message for e in sends if isinstance(e, Send))
    assert isinstance(message, Register)
    hear(machine, Registered(0, 1.0, LEASE_S, 5.0, message.serial), now)
    return message


def hear(machine: WorkerMachine, message: Any, now: float = 0.0) -> list[Any]:
    """Return the effects of a message: those to the dispatcher as their messages."""
    return told(machine.handle(Heard(DISPATCHER, message), now))


def told(effects: list[Any]) -> list[Any]:
    return [effect.message if isinstance(effect, Send) else effect for effect in effects]


def started(machine: WorkerMachine, *, keep: bool = False) -> None:
    assert hear(machine, ORDER) == [SpawnActor(SPEC, 70)]
    if keep:
        assert hear(machine, KeepActor(5, 70)) == [KeepActor(5, 70)]
        assert hear(machine, KeepActor(5, 69)) == []


def test_process_is_started_and_reported() -> None:
    machine = worker()
    started(machine)
    assert told(machine.handle(ActorServing(70, "host:1", b"k"), 1.0)) == [
        ActorReady(5, 70, "host:1", b"k")
    ]
    assert told(machine.handle(ActorEnded(70, "crashed"), 2.0)) == [ActorExited(5, 70, "crashed")]


def test_error_of_init_is_final() -> None:
    machine = worker()
    started(machine)
    exited = told(machine.handle(ActorEnded(70, "no object", b"error"), 2.0))
    assert exited == [ActorExited(5, 70, "no object", True, b"error")]


@pytest.mark.parametrize("keep", [False, True])
def test_process_ends_without_contact_unless_kept(keep: bool) -> None:
    machine = worker()
    started(machine, keep=keep)
    machine.handle(DispatcherDisconnected(), 1.0)
    assert machine.handle(Ticked(), 5.9) == []
    kills = [KillActor(70)] * (not keep)
    assert machine.handle(Ticked(), 6.0) == kills
    assert isinstance(machine.handle(Ticked(), 61.0)[-1], Exit)


def test_registration_names_processes_until_their_end() -> None:
    machine = worker()
    started(machine)
    machine.handle(ActorServing(70, "host:1", b""), 1.0)
    machine.handle(DispatcherDisconnected(), 1.0)
    machine.handle(Ticked(), 6.0)
    (hosted,) = register(machine, 6.1, dispatcher=78).actors
    assert (hosted.incarnation, hosted.address) == (70, "host:1")
    machine.handle(DispatcherDisconnected(), 6.2)
    machine.handle(ActorEnded(70, "killed"), 6.3)
    assert register(machine, 6.4, dispatcher=78).actors == []


def test_process_is_killed_after_its_grace() -> None:
    machine = worker()
    started(machine)
    assert hear(machine, StopActor(5, 70, 3.0), 1.0) == [EndActor(70)]
    assert hear(machine, StopActor(5, 70, 9.0), 1.0) == []
    assert KillActor(70) not in machine.handle(Ticked(), 3.9)
    assert KillActor(70) in machine.handle(Ticked(), 4.0)


def test_repeated_order_starts_no_process() -> None:
    machine = worker()
    started(machine)
    assert hear(machine, ORDER) == []
    machine.handle(ActorEnded(70, "crashed"), 1.0)
    assert hear(machine, ORDER, 1.0) == [ActorExited(5, 70, "its process has ended before")]


def test_order_of_a_suspended_worker_waits_for_contact() -> None:
    machine = worker()
    assert hear(machine, ORDER, 7.6) == [Beat()]
    assert hear(machine, OTHER_ORDER, 7.7) == []
    assert SpawnActor(SPEC, 70) in hear(machine, Beat(), 7.8)


def test_order_that_waits_is_dropped_with_its_connection() -> None:
    machine = worker()
    hear(machine, ORDER, 7.6)
    machine.handle(DispatcherDisconnected(), 7.7)
    assert register(machine, 7.8).actors == []
    assert machine.actors.orders == []


def test_leaving_worker_starts_no_process() -> None:
    machine = worker()
    started(machine)
    assert EndActor(70) in hear(machine, Leave(4.0), 1.0)
    assert machine.exit is None
    other = StartActor(SPEC, 71, 2)
    refusal = ActorExited(5, 71, "its worker leaves", has_begun=False)
    assert hear(machine, other, 1.0) == [refusal]
    effects = machine.handle(ActorEnded(70, "ended"), 2.0)
    assert told(effects)[0] == ActorExited(5, 70, "ended")
    assert isinstance(effects[-1], Exit)


def test_worker_that_ends_kills_its_processes_first() -> None:
    machine = worker()
    started(machine, keep=True)
    machine.handle(DispatcherDisconnected(), 1.0)
    effects = machine.handle(Ticked(), 61.0)
    assert effects[:1] == [KillActor(70)]

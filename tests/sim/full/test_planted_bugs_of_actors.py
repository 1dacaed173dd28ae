"""Does the simulation of actors find bugs? One is planted at a time; within SEEDS_MAX seeds a
promise must be seen broken."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from tests.sim.planted import Plant, around, effects, expect_report, heard
from tests.sim.simulations.actors import simulate_actors
from zmqdist.messages import (
    ActorChanged,
    ActorExited,
    ActorReady,
    CreateActor,
    Register,
    StopActor,
)
from zmqdist.scheduling.dispatcher.actors_machine import ActorDirectory
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.dispatcher.resources import Stocks
from zmqdist.scheduling.shared.actors import ActorState
from zmqdist.scheduling.worker.actor_host_machine import ActorHost

pytestmark = pytest.mark.timeout(300)

SEEDS_MAX = 400


def directory_with(**options: Any) -> Plant:
    """Each directory is made with these options."""
    return around(
        ActorDirectory,
        "__init__",
        lambda former, self, *args, **kwargs: former(self, *args, **{**kwargs, **options}),
    )


def settled(former: Any, self: ActorDirectory, loss: Any, now: float) -> Any:
    return former(self, dataclasses.replace(loss, settled=True), now)


def keeps_all(former: Any, self: ActorHost, order: Any, **options: Any) -> Any:
    returned = former(self, order, **options)
    for process in self.processes.values():
        process.is_kept = True
    return returned


def dropped(kind: type) -> Plant:
    """The dispatcher does not send messages of this kind."""
    return effects(
        Broker,
        lambda self, event, sends: [s for s in sends if not isinstance(s.message, kind)],
    )


def ends_doubled(self: Broker, event: Any, sends: list[Any]) -> list[Any]:
    return [
        copy
        for send in sends
        for copy in [send]
        * (1 + (isinstance(send.message, ActorChanged) and send.message.state == ActorState.ENDED))
    ]


def registers(**fields: Any) -> Plant:
    """Workers register with other fields."""
    return heard(Broker, Register, lambda register: replace(register, **fields))


def creates(**fields: Any) -> Plant:
    """Actors are made with another spec."""
    return heard(
        Broker, CreateActor, lambda create: replace(create, spec=replace(create.spec, **fields))
    )


BUGS: list[tuple[str, Plant, str | tuple[str, ...]]] = [
    ("a lost worker counts as ended", around(ActorDirectory, "lost", settled), "directory A1"),
    ("a new dispatcher is not silent", directory_with(silent_until=0.0), "directory A"),
    (
        "processes live on without contact",
        around(ActorHost, "kill_unkept", lambda former, self: []),
        "directory A1",
    ),
    ("each process is kept", around(ActorHost, "start", keeps_all), "directory A1"),
    ("workers do not name their processes", registers(actors=[]), "directory A"),
    ("ends of processes are not heard", heard(Broker, ActorExited, lambda m: None), "directory A"),
    (
        "an end costs no restart",
        heard(Broker, ActorExited, lambda m: replace(m, has_begun=False)),
        "directory A",
    ),
    (
        "the end of a program is missed",
        around(ActorDirectory, "coordinator_gone", lambda former, self, peer, now, left: []),
        "directory A5",
    ),
    ("processes are not stopped", dropped(StopActor), "directory A"),
    ("an end is reported twice", effects(Broker, ends_doubled), "directory A2"),
    ("a live actor is not reported", heard(Broker, ActorReady, lambda m: None), "directory A"),
    ("the bound of a worker is ignored", registers(actors_max=99), "directory A9"),
    ("a group is placed one by one", creates(size=1, rank=0), "directory A10"),
    (
        "an actor waits for ever for more than a worker has",
        around(Stocks, "can_ever", lambda former, self, request, worker="": True),
        "directory A12",
    ),
    ("a worker has more devices", registers(resources=(("gpu", 9000),)), "directory A11"),
]


def complaint(seed: int) -> str | None:
    try:
        simulate_actors(seed)
    except (AssertionError, KeyError, IndexError) as error:
        return str(error)
    return None


@pytest.mark.parametrize(("bug", "plant", "promise"), BUGS, ids=[bug[0] for bug in BUGS])
def test_simulation_finds_bug(
    bug: str, plant: Plant, promise: str | tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    expect_report(complaint, SEEDS_MAX, bug, promise)

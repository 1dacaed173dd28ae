"""The directory of actors, promise by promise, in the dispatcher's machine. The simulation
(tests/sim/simulations/actors.py) has the faults."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.scheduling.dispatcher.helpers import LEASE_S, coordinator, hear
from zmqdist.events import PeerGone, ProcessExited, Ticked
from zmqdist.limits import GROWTH_LIMIT_S, ORPHAN_LIMIT_S
from zmqdist.messages import (
    ActorChanged,
    ActorExited,
    ActorFound,
    ActorKnown,
    ActorReady,
    ActorsOwned,
    ActorSpec,
    CreateActor,
    DropActor,
    FindActor,
    Goodbye,
    HostedActor,
    KeepActor,
    Leave,
    Refused,
    Register,
    StartActor,
    StopActor,
    WatchActor,
)
from zmqdist.scheduling.dispatcher.machine import SLOTS_END_S, Broker
from zmqdist.scheduling.shared.actors import ActorState
from zmqdist.scheduling.shared.broker_settings import BrokerSettings

SPEC = ActorSpec(5, "Counter", b"call", 1)


def new_broker(silent_until: float = 0.0) -> Broker:
    settings = BrokerSettings(lease_s=LEASE_S, reconnect_grace_s=1.0)
    return Broker(settings, first_actor=100, silent_until=silent_until)


def host(
    broker: Broker,
    peer: str = "w",
    index: int = 0,
    actors: list[HostedActor] | None = None,
    now: float = 0.0,
    **fields: Any,
) -> list[Any]:
    register = Register(
        index + 1,
        "worker",
        index,
        1,
        [],
        [],
        100 + index,
        "host",
        actors=actors or [],
        **{"actors_max": 2, **fields},
    )
    return sent(hear(broker, peer, register, now))


def sent(effects: list[Any]) -> list[Any]:
    """Return what concerns actors: the messages, each with its receiver."""
    kinds = (ActorChanged, ActorFound, StartActor, StopActor, KeepActor, Refused)
    return [(e.to, e.message) for e in effects if isinstance(e.message, kinds)]


def says(broker: Broker, peer: str, message: Any, now: float = 0.0) -> list[Any]:
    return sent(hear(broker, peer, message, now))


def states(effects: list[Any]) -> list[ActorState]:
    return [ActorState(m.state) for _, m in effects if isinstance(m, ActorChanged)]


def live(broker: Broker, spec: ActorSpec = SPEC, peer: str = "c", now: float = 0.0) -> int:
    """Make an actor, and have it serve. Return its incarnation."""
    (worker, order), *_ = [
        (to, m) for to, m in says(broker, peer, CreateActor(spec), now) if isinstance(m, StartActor)
    ]
    says(broker, worker, ActorReady(spec.actor, order.incarnation, "host:1"), now)
    return int(order.incarnation)


@pytest.fixture
def broker() -> Broker:
    """A dispatcher with the program c, whose number is 1, and the worker w."""
    made = new_broker()
    coordinator(made)
    host(made)
    return made


def test_actor_is_placed_and_reported(broker: Broker) -> None:
    assert says(broker, "c", CreateActor(SPEC)) == [("w", StartActor(SPEC, 100, 0))]
    (report,) = says(broker, "w", ActorReady(5, 100, "host:1", b"k"))
    assert report == (
        "c",
        ActorChanged(5, ActorState.LIVE, 100, 0, "host:1", b"k", "worker:0"),
    )


def test_end_without_restarts_is_reported_once(broker: Broker) -> None:
    live(broker)
    exited = ActorExited(5, 100, "crashed")
    assert states(says(broker, "w", exited)) == [ActorState.ENDED]
    assert says(broker, "w", exited) == []


def test_restarts_are_counted(broker: Broker) -> None:
    live(broker, replace(SPEC, restarts=1))
    effects = says(broker, "w", ActorExited(5, 100, "crashed"))
    assert states(effects) == [ActorState.PENDING]
    assert effects[-1] == ("w", StartActor(replace(SPEC, restarts=1), 101, 0))
    assert states(says(broker, "w", ActorExited(5, 101, "crashed"))) == [ActorState.ENDED]


def test_refused_start_costs_no_restart(broker: Broker) -> None:
    says(broker, "c", CreateActor(SPEC))
    effects = says(broker, "w", ActorExited(5, 100, "leaves", has_begun=False))
    assert [type(m) for _, m in effects] == [ActorChanged, StartActor]


def test_final_error_uses_no_restart(broker: Broker) -> None:
    live(broker, replace(SPEC, restarts=3))
    exited = ActorExited(5, 100, "no object", final=True, error=b"e")
    ((_, change),) = says(broker, "w", exited)
    assert (change.state, change.error) == (ActorState.ENDED, b"e")


def test_message_of_earlier_incarnation_changes_nothing(broker: Broker) -> None:
    live(broker, replace(SPEC, restarts=2))
    says(broker, "w", ActorExited(5, 100, "crashed"))
    assert says(broker, "w", ActorReady(5, 100, "old:1")) == []
    assert says(broker, "w", ActorExited(5, 100, "crashed")) == []


def test_lost_worker_is_replaced_after_its_lease(broker: Broker) -> None:
    host(broker, "v", 1)
    spec = replace(SPEC, restarts=1, worker="")
    live(broker, spec)
    broker.handle(PeerGone("w"), 1.0)
    assert states(sent(broker.handle(Ticked(), 2.0))) == [ActorState.AWAY]
    assert sent(broker.handle(Ticked(), LEASE_S - 0.1)) == []
    effects = sent(broker.handle(Ticked(), LEASE_S))
    assert effects[-1] == ("v", StartActor(spec, 101, 0))


def test_ended_worker_is_replaced_soon(broker: Broker) -> None:
    host(broker, "v", 1)
    spec = replace(SPEC, restarts=1)
    live(broker, spec)
    gone = ProcessExited(100, -9, job="worker", index=0)
    effects = sent(broker.handle(gone, 1.0))
    assert states(effects) == [ActorState.PENDING]
    assert "killed by SIGKILL" in effects[0][1].reason
    assert sent(broker.handle(Ticked(), 1.0 + SLOTS_END_S))[-1][0] == "v"


def test_acknowledged_process_without_restarts_is_kept(broker: Broker) -> None:
    live(broker)
    assert says(broker, "c", ActorKnown(5, 100)) == [("w", KeepActor(5, 100))]
    broker.handle(PeerGone("w"), 1.0)
    broker.handle(Ticked(), 2.0)
    assert sent(broker.handle(Ticked(), LEASE_S + 3.0)) == []
    assert states(sent(broker.handle(Ticked(), 2.0 + ORPHAN_LIMIT_S))) == [ActorState.ENDED]


def test_worker_that_comes_back_brings_its_actor(broker: Broker) -> None:
    live(broker)
    says(broker, "c", ActorKnown(5, 100))
    broker.handle(PeerGone("w"), 1.0)
    broker.handle(Ticked(), 2.0)
    effects = host(broker, "w2", 0, [HostedActor(SPEC, 100, 0, False, "host:1")], 20.0)
    assert effects == [
        ("w2", KeepActor(5, 100)),
        ("c", broker.actors.actors[5].change()),
    ]
    assert states(effects) == [ActorState.LIVE]


def test_late_process_of_earlier_incarnation_is_stopped(broker: Broker) -> None:
    spec = replace(SPEC, restarts=1)
    live(broker, spec)
    says(broker, "w", ActorExited(5, 100, "crashed"))
    effects = host(broker, "v", 1, [HostedActor(spec, 100, 1, False, "host:1")])
    assert effects == [("v", StopActor(5, 100, 0.0))]


def test_lost_order_is_repeated(broker: Broker) -> None:
    says(broker, "c", CreateActor(SPEC))
    broker.handle(PeerGone("w"), 0.1)
    assert host(broker, "w2", 0, now=0.2) == [("w2", StartActor(SPEC, 100, 0))]


def test_actors_beyond_the_bound_wait_in_order(broker: Broker) -> None:
    for number in (5, 6):
        live(broker, replace(SPEC, actor=number))
    for number in (7, 8):
        ((_, change),) = says(broker, "c", CreateActor(replace(SPEC, actor=number)))
        assert change.reason == "the workers have room for 0 of 2 actors (actors_max)"
    effects = says(broker, "w", ActorExited(6, 101, "crashed"))
    assert [m.spec.actor for _, m in effects if isinstance(m, StartActor)] == [7]


def test_pinned_actor_does_not_hold_up_others(broker: Broker) -> None:
    ((_, change),) = says(broker, "c", CreateActor(replace(SPEC, worker="worker:9")))
    assert change.reason == "worker:9 has not registered"
    live(broker, replace(SPEC, actor=6))


def test_worker_with_thread_slots_has_no_actors() -> None:
    broker = new_broker()
    coordinator(broker)
    host(broker, actors_max=0)
    ((_, change),) = says(broker, "c", CreateActor(SPEC))
    assert change.reason.startswith("the workers have actors_max 0: their slots are threads")


def test_name_is_taken_once(broker: Broker) -> None:
    live(broker, replace(SPEC, name="n"))
    ((_, change),) = says(broker, "c", CreateActor(replace(SPEC, actor=6, name="n")))
    assert (change.state, change.reason) == (
        ActorState.ENDED,
        "the name n is taken by another actor",
    )
    says(broker, "w", ActorExited(5, 100, "crashed"))
    live(broker, replace(SPEC, actor=7, name="n"))


def test_program_takes_its_actors_along(broker: Broker) -> None:
    live(broker)
    live(broker, replace(SPEC, actor=6, owner=0))
    assert says(broker, "c", Goodbye()) == [("w", StopActor(5, 100, 0.0))]


def test_program_that_comes_back_keeps_its_actors(broker: Broker) -> None:
    live(broker)
    broker.handle(PeerGone("c"), 1.0)
    coordinator(broker, "c2", now=LEASE_S)
    assert sent(broker.handle(Ticked(), 1.0 + LEASE_S)) == []


def test_absent_program_loses_its_actors_after_a_lease(broker: Broker) -> None:
    live(broker)
    broker.handle(PeerGone("c"), 1.0)
    assert broker.deadline == 1.0 + LEASE_S
    assert sent(broker.handle(Ticked(), 1.0 + LEASE_S)) == [("w", StopActor(5, 100, 0.0))]


def test_actor_that_its_program_does_not_name_ends(broker: Broker) -> None:
    live(broker)
    assert says(broker, "c", ActorsOwned([])) == [("w", StopActor(5, 100, 0.0))]


def test_dropped_actor_ends_with_its_process(broker: Broker) -> None:
    live(broker)
    assert says(broker, "c", DropActor(5, "killed", 2.0)) == [("w", StopActor(5, 100, 2.0))]
    ((_, change),) = says(broker, "w", ActorExited(5, 100, "ended"))
    assert (change.state, change.reason) == (ActorState.ENDED, "killed")


def test_watcher_hears_of_changes_and_late_ends(broker: Broker) -> None:
    live(broker)
    coordinator(broker, "d", 2)
    assert states(says(broker, "d", WatchActor(5))) == [ActorState.LIVE]
    effects = says(broker, "w", ActorExited(5, 100, "crashed"))
    assert {to for to, _ in effects} == {"c", "d"}
    ((_, change),) = says(broker, "d", WatchActor(5))
    assert change.reason == "crashed"


def test_foreign_owner_is_refused(broker: Broker) -> None:
    ((_, refused),) = says(broker, "c", CreateActor(replace(SPEC, owner=2)))
    assert isinstance(refused, Refused)


def test_new_dispatcher_answers_after_a_lease() -> None:
    broker = new_broker(silent_until=LEASE_S)
    coordinator(broker)
    host(broker)
    assert says(broker, "c", FindActor(1, "n")) == []
    assert says(broker, "c", CreateActor(replace(SPEC, name="m"), 0, -1)) == []
    effects = sent(broker.handle(Ticked(), LEASE_S))
    assert [type(m) for _, m in effects] == [StartActor, ActorFound]


def test_new_dispatcher_answers_for_a_named_actor_at_once() -> None:
    broker = new_broker(silent_until=LEASE_S)
    coordinator(broker, "d", 2)
    says(broker, "d", FindActor(1, "n"))
    spec = replace(SPEC, name="n", owner=0)
    effects = host(broker, actors=[HostedActor(spec, 50, 0, True, "host:1")])
    assert effects == [("d", ActorFound(1, 5, "Counter"))]


def test_adopted_actor_ends_without_its_program() -> None:
    broker = new_broker(silent_until=LEASE_S)
    host(broker, actors=[HostedActor(SPEC, 50, 0, True, "host:1")])
    assert sent(broker.handle(Ticked(), LEASE_S)) == [("w", StopActor(5, 50, 0.0))]


def test_incarnations_grow_beyond_those_of_earlier_dispatchers() -> None:
    broker = new_broker(silent_until=LEASE_S)
    coordinator(broker)
    host(broker, actors=[HostedActor(SPEC, 500, 0, True, "host:1")])
    assert live(broker, replace(SPEC, actor=6)) == 501


def test_group_is_placed_together(broker: Broker) -> None:
    members = [replace(SPEC, actor=n, group=3, rank=n, size=3) for n in range(1, 3)]
    last = replace(SPEC, actor=9, group=3, rank=0, size=3)
    for member in members:
        assert states(says(broker, "c", CreateActor(member))) == [ActorState.PENDING]
    reasons = {m.actor: m.reason for _, m in says(broker, "c", CreateActor(last))}
    text = "its group needs 3 places at a time, and too few of the workers' 2 (actors_max) are free"
    assert reasons == dict.fromkeys((1, 2, 9), text)
    orders = [m for _, m in host(broker, "v", 1) if isinstance(m, StartActor)]
    assert {order.spec.actor for order in orders} == {1, 2, 9}


def test_resources_of_actors_are_reserved() -> None:
    broker = new_broker()
    coordinator(broker)
    host(broker, resources=(("gpu", 1000),))
    first, second = (replace(SPEC, actor=n, resources={"gpu": 1000}) for n in (5, 6))
    assert says(broker, "c", CreateActor(first)) == [("w", StartActor(first, 100, 0, (0,)))]
    ((_, change),) = says(broker, "c", CreateActor(second))
    assert "too little of gpu 1 is free" in change.reason
    effects = says(broker, "w", ActorExited(5, 100, "crashed"))
    assert effects[-1] == ("w", StartActor(second, 101, 0, (0,)))


TPU = replace(SPEC, resources={"tpu": 1000})
LACK = "it needs tpu 1, which is more than a worker has in all (worker:0 has gpu 1)"


def test_resources_beyond_all_workers_end_the_actor() -> None:
    broker = new_broker()
    coordinator(broker)
    host(broker, resources=(("gpu", 1000),))
    ((_, change),) = says(broker, "c", CreateActor(TPU))
    assert (change.state, change.reason.partition(": ask")[0]) == (ActorState.PENDING, LACK)
    assert sent(broker.handle(Ticked(), GROWTH_LIMIT_S - 0.1)) == []
    assert broker.actors.deadline == GROWTH_LIMIT_S
    ((_, change),) = sent(broker.handle(Ticked(), GROWTH_LIMIT_S))
    assert (change.state, change.reason.partition(": ask")[0]) == (ActorState.ENDED, LACK)
    ((_, change),) = says(broker, "c", CreateActor(replace(TPU, actor=6)), 99.0)
    assert change.state == ActorState.ENDED, "nothing has changed for long enough"


def test_actor_waits_for_resources_of_workers_to_come() -> None:
    broker = new_broker()
    coordinator(broker)
    ((_, change),) = says(broker, "c", CreateActor(TPU), 99.0)
    assert change.reason == "no worker has registered"
    host(broker, resources=(("gpu", 1000),), now=99.0)
    assert sent(broker.handle(Ticked(), 99.0 + GROWTH_LIMIT_S - 0.1)) == []
    orders = host(broker, "v", 1, resources=(("tpu", 1000),), now=99.0 + GROWTH_LIMIT_S - 0.1)
    assert orders == [("v", StartActor(TPU, 100, 0))]


def test_group_beyond_all_resources_ends() -> None:
    broker = new_broker()
    coordinator(broker)
    for index in range(2):
        host(broker, f"w{index}", index, resources=(("gpu", 1000),))
    group = [
        replace(SPEC, actor=7 + n, group=3, rank=n, size=3, resources={"gpu": 1000})
        for n in range(3)
    ]
    for member in group:
        effects = says(broker, "c", CreateActor(member))
    text = "3 members of its group need gpu 1 each, and the workers can have 2 of them at a time"
    assert all(m.reason.startswith(text) for _, m in effects)
    assert states(sent(broker.handle(Ticked(), GROWTH_LIMIT_S))) == [ActorState.ENDED] * 3


def test_reason_of_waiting_actor_follows_what_it_waits_for() -> None:
    broker = new_broker()
    coordinator(broker)
    says(broker, "c", CreateActor(SPEC))
    assert broker.actors.rows()[0].reason == "no worker has registered"
    (_, change), *_ = host(broker, actors_max=0)
    assert change.reason.startswith("the workers have actors_max 0")
    assert [type(m) for _, m in host(broker, "v", 1)] == [StartActor]


def test_drain_costs_no_restart(broker: Broker) -> None:
    for number, restarts in ((5, 1), (6, 0)):
        live(broker, replace(SPEC, actor=number, restarts=restarts))
    host(broker, "v", 1)
    hear(broker, "w", Leave(0.0), 1.0)
    for number in (5, 6):
        effects = says(broker, "w", ActorExited(number, 95 + number, "its worker leaves"), 1.0)
        if number == 5:
            assert effects[-1] == ("v", StartActor(replace(SPEC, restarts=1), 102, 1))
    assert states(effects) == [ActorState.ENDED], "an actor without restarts is never begun again"


def test_hosted_device_beyond_those_of_the_worker_is_refused() -> None:
    broker = new_broker()
    hosted = HostedActor(replace(SPEC, resources={"gpu": 1000}), 50, 0, devices=(7,))
    ((_, refused),) = host(broker, actors=[hosted], resources=(("gpu", 1000),))
    assert "has the devices (7,)" in refused.message


def test_drain_names_actors(broker: Broker) -> None:
    live(broker)
    live(broker, replace(SPEC, actor=6, name="n", restarts=1))
    holdings = broker.holdings("worker", 0)
    assert (holdings.lost_actors, holdings.actors) == (["Counter 5"], ["Counter n"])

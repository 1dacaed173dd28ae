"""Functions that wait for what they have scheduled fill all slots (P18 of the dispatcher): one of
their coordinators is told, once."""

from __future__ import annotations

import pytest

from tests.scheduling.dispatcher.helpers import (
    begin,
    coordinator,
    finish,
    hear,
    leases_of,
    submit,
    worker,
)
from zmqdist.events import PeerGone, Send, Ticked
from zmqdist.messages import Define, RegisterCoordinator, Stalled, Submit
from zmqdist.scheduling.dispatcher.machine import STALLED_S, Broker
from zmqdist.scheduling.shared.broker_settings import BrokerSettings

LATER = 100.0


def nested(broker: Broker, peer: str = "n", number: int = 2, now: float = 0.0) -> None:
    """A scheduled function makes a coordinator."""
    hear(broker, peer, RegisterCoordinator(number, 1000, 1, False, nested=True), now)
    coordinator_functions(broker, peer)


def coordinator_functions(broker: Broker, peer: str) -> None:
    hear(broker, peer, Define([(7, b"f")]))


def told(effects: list[Send]) -> list[Send]:
    return [effect for effect in effects if isinstance(effect.message, Stalled)]


def tick(broker: Broker, now: float) -> list[Send]:
    """One turn, in which no worker is lost because of its silence."""
    return told(broker.dispatch.settle(now))


@pytest.fixture
def full() -> Broker:
    """One worker of one slot, in which a function runs that has scheduled two functions at 100
    s.
    """
    broker = Broker(BrokerSettings())
    coordinator(broker)
    worker(broker)
    begin(broker, *leases_of(submit(broker, 1)))
    nested(broker, now=LATER)
    submit(broker, 11, 12, peer="n", now=LATER)
    return broker


def test_stall_is_reported_once(full: Broker) -> None:
    assert full.dispatch.deadline == LATER + STALLED_S
    assert tick(full, LATER + STALLED_S - 0.1) == []
    assert tick(full, LATER + STALLED_S) == [Send("n", Stalled(2, 1))]
    assert tick(full, LATER + 10 * STALLED_S) == []


def test_progress_postpones_report(full: Broker) -> None:
    submit(full, 13, peer="n", now=LATER + 1)
    assert full.dispatch.deadline == LATER + 1 + STALLED_S
    finish(full, 1, now=LATER + 2)
    assert full.dispatch.deadline == LATER + 2 + STALLED_S


def test_free_slots_are_no_stall(full: Broker) -> None:
    worker(full, "v", 1, slots=2, now=LATER)
    assert tick(full, LATER + STALLED_S) == []
    assert full.dispatch.deadline == LATER + 2 * STALLED_S


def test_begun_work_waits_for_no_slot() -> None:
    broker = Broker(BrokerSettings())
    coordinator(broker)
    worker(broker, slots=2)
    begin(broker, *leases_of(submit(broker, 1)))
    nested(broker)
    begin(broker, *leases_of(submit(broker, 11, peer="n")))
    assert tick(broker, STALLED_S) == []


def test_work_of_program_alone_is_no_stall() -> None:
    broker = Broker(BrokerSettings())
    coordinator(broker)
    worker(broker)
    begin(broker, *leases_of(submit(broker, 1, 2, 3))[:1])
    assert tick(broker, LATER) == []


def test_program_without_nested_work_is_not_watched(full: Broker) -> None:
    tick(full, LATER + STALLED_S)
    full.handle(PeerGone("n"), LATER + STALLED_S)
    assert full.dispatch.deadline is None
    nested(full, "m", 3, now=2 * LATER)
    submit(full, 31, peer="m", now=2 * LATER)
    assert tick(full, 2 * LATER + STALLED_S) == [Send("m", Stalled(1, 1))]


def test_detached_work_counts_as_waiting() -> None:
    broker = Broker(BrokerSettings())
    coordinator(broker)
    worker(broker)
    begin(broker, *leases_of(submit(broker, 1)))
    nested(broker)
    hear(broker, "n", Submit(1, [(11, 0, 0, 7, b"11")], worker="worker:0", detached=True))
    assert tick(broker, STALLED_S) == [Send("n", Stalled(1, 1))]


def test_stall_is_reported_by_tick(full: Broker) -> None:
    # refused, but the worker was heard
    hear(full, "w", RegisterCoordinator(9, 10, 1, False), LATER + STALLED_S - 0.1)
    assert told(full.handle(Ticked(), LATER + STALLED_S)) == [Send("n", Stalled(2, 1))]

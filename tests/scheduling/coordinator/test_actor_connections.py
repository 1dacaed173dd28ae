"""A program's connections to the processes of actors, over real sockets."""

from __future__ import annotations

import threading

import pytest

from zmqdist.scheduling.coordinator.actor_connections import ActorConnections
from zmqdist.scheduling.coordinator.coordinator_events import ActorDisconnected, Event
from zmqdist.scheduling.coordinator.work import CalledActor
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop
from zmqdist.wire.hello import our_hello


@pytest.mark.parametrize("restarts_left", [0, 1])
def test_actor_without_restarts_that_is_gone_is_noticed(port: int, restarts_left: int) -> None:
    """Nothing listens at the address, so no connection was ever up that could be lost. An actor
    that begins again is left to its dispatcher."""
    events: list[Event] = []
    noticed = threading.Semaphore(0)

    def handle(event: Event) -> None:
        events.append(event)
        noticed.release()

    loop = Loop("actors")
    connections = ActorConnections(
        loop, Credentials(insecure=True), our_hello("coordinator", 1, "c"), handle
    )
    actor, other = CalledActor(5, "Counter"), CalledActor(6, "Counter")
    actor.address = other.address = f"127.0.0.1:{port}"
    actor.restarts_left, other.restarts_left = restarts_left, 0
    loop.call_soon(connections.connect, actor)
    loop.call_soon(connections.connect, other)  # whose report comes last
    loop.start()
    try:
        for _ in range(1 if restarts_left else 2):
            assert noticed.acquire(timeout=30)
    finally:
        loop.stop()
    problem = f"its process has ended: nothing listens at 127.0.0.1:{port} any more"
    gone = [actor, other] if not restarts_left else [other]
    assert events == [ActorDisconnected(called, problem) for called in gone]

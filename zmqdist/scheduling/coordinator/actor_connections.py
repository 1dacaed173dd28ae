"""The connections of a program to the actors that it calls. Everything here runs in the loop's
thread of the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from zmqdist.batches import split
from zmqdist.errors import OpError
from zmqdist.messages import ActorResults, CallActor, Message
from zmqdist.scheduling.coordinator.coordinator_events import (
    ActorConnected,
    ActorDisconnected,
    CallsEnded,
    Event,
)
from zmqdist.scheduling.coordinator.work import CalledActor, MethodCall
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.dealer import PROBE_STEP_S, DealerConnection
from zmqdist.transport.loop import Loop
from zmqdist.transport.port_probe import PortProbe
from zmqdist.wire.hello import Hello

EXAMINED_AFTER_S: Final = 2.0
"""Seconds after which a lost connection is examined, in which the dispatcher tells how the process
has ended. A host that does not answer is examined again after as many."""


class ActorConnections:
    """One connection for each actor that has an address.

    Args:
      hello: what this program says of itself.
      handle: passes an event to the coordinator's machine.
    """

    def __init__(
        self, loop: Loop, credentials: Credentials, hello: Hello, handle: Callable[[Event], None]
    ) -> None:
        self._loop, self._credentials, self._hello = loop, credentials, hello
        self._handle = handle
        self._dealers: dict[CalledActor, DealerConnection] = {}

    def connect(self, actor: CalledActor) -> None:
        dealer = DealerConnection(
            self._loop,
            actor.address,
            self._credentials.client(actor.address, "submit", actor.key),
            self._hello,
            on_up=lambda _hello: self._handle(ActorConnected(actor)),
            on_message=partial(self._hear, actor),
            on_down=lambda: self._lost(actor, dealer),
            on_refused=lambda error: self._refused(actor, error),
        )
        self._dealers[actor] = dealer
        dealer.connect()
        self._examine_later(actor, dealer)

    def disconnect(self, actor: CalledActor) -> None:
        dealer = self._dealers.pop(actor, None)
        if dealer is not None:
            dealer.close()

    def send(self, actor: CalledActor, message: Message) -> None:
        # if this fails, ActorDisconnected comes next
        if actor in self._dealers:
            self._dealers[actor].send(message)

    def send_calls(
        self, actor: CalledActor, calls: list[MethodCall], pack: Callable[[MethodCall], bytes]
    ) -> None:
        items = [(call.number, call.attempt, call.method, pack(call)) for call in calls]
        for part in split(items):
            self.send(actor, CallActor(actor.number, actor.incarnation, part))

    def _hear(self, actor: CalledActor, message: Message, _frames: object) -> None:
        if isinstance(message, ActorResults) and message.incarnation == actor.incarnation:
            self._handle(CallsEnded(actor, message.items))

    def _lost(self, actor: CalledActor, dealer: DealerConnection) -> None:
        self._handle(ActorDisconnected(actor))
        self._examine_later(actor, dealer)

    def _examine_later(self, actor: CalledActor, dealer: DealerConnection) -> None:
        """Find out after some seconds without connection whether the process has ended. A dispatcher
        that was started meanwhile cannot tell, and waits for the worker."""
        if not actor.restarts_left:
            at = self._loop.now() + EXAMINED_AFTER_S
            self._loop.set_timer((self, dealer), at, lambda: self._examine(actor, dealer, None))

    def _examine(
        self, actor: CalledActor, dealer: DealerConnection, probe: PortProbe | None
    ) -> None:
        is_present = self._dealers.get(actor) is dealer and not dealer.up
        if probe is None and is_present:
            probe = PortProbe(dealer.address, self._loop.now())
        if probe is None or not is_present:
            if probe is not None:
                probe.close()
        elif not probe.step(self._loop.now()):
            at = self._loop.now() + PROBE_STEP_S
            self._loop.set_timer((self, dealer), at, lambda: self._examine(actor, dealer, probe))
        elif isinstance(probe.failure, ConnectionRefusedError) and probe.rejection is None:
            problem = f"its process has ended: nothing listens at {dealer.address} any more"
            self._handle(ActorDisconnected(actor, problem))
        else:
            self._examine_later(actor, dealer)

    def _refused(self, actor: CalledActor, error: OpError) -> None:
        self._handle(ActorDisconnected(actor, error.message))

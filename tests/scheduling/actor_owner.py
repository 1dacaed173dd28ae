"""A program that makes actors by messages to the dispatcher, without a coordinator."""

from __future__ import annotations

import queue
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from zmqdist.messages import (
    VALUE,
    ActorChanged,
    ActorKnown,
    ActorResults,
    ActorsOwned,
    ActorSpec,
    CallActor,
    CoordinatorRegistered,
    CreateActor,
    Goodbye,
    Message,
    RegisterCoordinator,
)
from zmqdist.scheduling.shared.actors import ActorState
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.dealer import DealerConnection
from zmqdist.transport.loop import Loop
from zmqdist.wire import trusted
from zmqdist.wire.hello import our_hello

M = TypeVar("M", bound=Message)


class Counter:
    """An actor that counts, and says in which process it does."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def add(self, amount: int) -> int:
        self.count += amount
        return self.count


def spec(cls: type = Counter, *args: Any, owner: int = 0, **fields: Any) -> ActorSpec:
    """Return the spec of a new actor, which is detached without an owner."""
    call = trusted.pack((cls, args, {}))
    return ActorSpec(secrets.randbits(62) | 1, cls.__name__, call, owner, **fields)


class Owner:
    """One program. It registers again on each new connection, as a coordinator does, and wants the
    actors in `wanted` again.

    Attributes:
      number: the number of its coordinator.
      changes: what it was told last of each actor.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        credentials = credentials or Credentials()
        self.number = secrets.randbits(62) | 1
        self.wanted: dict[int, ActorSpec] = {}
        self.changes: dict[int, ActorChanged] = {}
        self.history: dict[int, list[ActorChanged]] = {}
        self._messages: queue.Queue[Message] = queue.Queue()
        self._unread: deque[Message] = deque()
        self._sent_to: dict[int, object] = {}
        self._dispatcher = 0
        self._credentials = credentials
        self.loop = Loop("owner")
        self._dealer = DealerConnection(
            self.loop,
            address,
            credentials.client(address, "submit"),
            our_hello("submit", self.number, "owner"),
            on_up=self._up,
            on_message=self._heard,
            on_down=lambda: None,
            on_refused=lambda error: None,
        )
        self.loop.call_soon(self._dealer.connect)
        self.loop.start()
        self.next(CoordinatorRegistered)

    def _up(self, hello: Any) -> None:
        self._dispatcher = hello.incarnation
        self._dealer.send(RegisterCoordinator(self.number, 1000, 1, False))
        self._dealer.send(ActorsOwned([*self.wanted]))
        for wanted in self.wanted.values():
            self._create(wanted)

    def _create(self, wanted: ActorSpec) -> None:
        before = self._sent_to.get(wanted.actor)
        self._sent_to[wanted.actor] = self._dispatcher
        change = self.changes.get(wanted.actor)
        self._dealer.send(
            CreateActor(
                wanted,
                change.incarnation if change else 0,
                change.restarts_left if change else -1,
                before not in (None, self._dispatcher),
            )
        )

    def _heard(self, message: Message, _: Any) -> None:
        if isinstance(message, ActorChanged):
            self.changes[message.actor] = message
            self.history.setdefault(message.actor, []).append(message)
            if message.state == ActorState.LIVE:
                self._dealer.send(ActorKnown(message.actor, message.incarnation))
            elif message.state == ActorState.ENDED:
                self.wanted.pop(message.actor, None)
        self._messages.put(message)

    def create(self, wanted: ActorSpec) -> ActorSpec:
        self.loop.call_soon(self._want, wanted)
        return wanted

    def _want(self, wanted: ActorSpec) -> None:
        self.wanted[wanted.actor] = wanted
        self._create(wanted)

    def send(self, message: Message) -> None:
        self.loop.call_soon(self._dealer.send, message)

    def next(self, kind: type[M], fits: Callable[[M], bool] = lambda message: True) -> M:
        """Wait for the next message of this kind, and keep the others."""
        until = time.monotonic() + 40
        skipped: deque[Message] = deque()
        try:
            while True:
                message = (
                    self._unread.popleft()
                    if self._unread
                    else self._messages.get(timeout=max(0.01, until - time.monotonic()))
                )
                if isinstance(message, kind) and fits(message):
                    return message
                skipped.append(message)
        finally:
            self._unread.extendleft(reversed(skipped))

    def reaches(self, wanted: ActorSpec, state: ActorState, incarnation: int = -1) -> ActorChanged:
        """Wait until this actor is in a state, with a later incarnation."""
        return self.next(
            ActorChanged,
            lambda message: (
                message.actor == wanted.actor
                and message.state == state
                and message.incarnation > incarnation
            ),
        )

    def call(self, change: ActorChanged, method: str, *args: Any) -> Any:
        """Call a method of a live actor, at the address that `change` names."""
        replies = self.cast(change, method, *args)
        message = replies.get(timeout=40)
        assert isinstance(message, ActorResults)
        ((_, _, kind, payload),) = message.items
        value = trusted.unpack(payload)
        if kind == VALUE:
            return value
        raise value

    def cast(self, change: ActorChanged, method: str, *args: Any) -> queue.Queue[Message]:
        """Call a method, and return the queue in which the actor's reply arrives."""
        replies: queue.Queue[Message] = queue.Queue()
        calls = [(1, 0, method, trusted.pack((args, {})))]
        dealer = DealerConnection(
            self.loop,
            change.address,
            self._credentials.client(change.address, "submit"),
            our_hello("submit", secrets.randbits(62), "caller"),
            on_up=lambda hello: dealer.send(CallActor(change.actor, change.incarnation, calls)),
            on_message=lambda message, frames: replies.put(message),
            on_down=lambda: None,
            on_refused=lambda error: None,
        )
        self.loop.call_soon(dealer.connect)
        return replies

    def close(self, *, goodbye: bool = True) -> None:
        if goodbye:
            self.loop.run(lambda: self._dealer.send(Goodbye()))
        self.loop.run(lambda: self._dealer.close(linger_s=0.5))
        self.loop.stop()

"""A server and its clients over real sockets, for the tests of this folder."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from zmqdist.messages import Call, Calls, Reply
from zmqdist.transport.dealer import DealerConnection
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Peer, Router
from zmqdist.transport.security import ClientSecurity, ServerSecurity
from zmqdist.wire.hello import Hello, our_hello


def until(condition: Callable[[], Any], within_s: float = 20.0) -> Any:
    """Return the first true value of `condition`; fail if there is none within `within_s`."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.002)  # the pause of a poll with a deadline
    return value


class Served:
    """A router on a loop of its own, which replies to each Call with the body and frames of the
    call."""

    def __init__(
        self,
        security: ServerSecurity,
        address: str = "127.0.0.1:0",
        *,
        start: bool = True,
        hello: Hello | None = None,
    ) -> None:
        self.loop = Loop("zmqdist-served")
        self.shown: list[Peer] = []
        self.gone: list[Peer] = []
        try:
            self.router = Router(self.loop, security, hello or our_hello("server", 1, "served"))
            self.router.on(Call, lambda peer, call, frames: self.answer(peer, call, frames))
            self.router.on(
                Calls,
                lambda peer, calls, frames: [self.answer(peer, call, []) for call in calls.items],
            )
            self.router.on_hello = self.shown.append
            self.router.on_gone.append(self.gone.append)
            self.address = self.router.bind(address)
        except BaseException:
            self.loop.stop()
            raise
        if start:
            self.loop.start()

    def answer(self, peer: Peer, call: Call, frames: list[memoryview]) -> None:
        self.router.send(peer, Reply(call.id, 0, peer.role, call.body), frames)


class Dialled:
    """A dealer on a loop of its own; `events` has its events as tuples that begin with a name."""

    def __init__(self, address: str, security: ClientSecurity, name: str = "dialled") -> None:
        self.loop = Loop("zmqdist-dialled")
        self.events: queue.Queue[tuple[Any, ...]] = queue.Queue()
        put = self.events.put
        self.dealer = DealerConnection(
            self.loop,
            address,
            security,
            our_hello("client", 2, name),
            on_up=lambda hello: put(("up", hello)),
            on_message=lambda message, frames: put(("message", message, frames)),
            on_down=lambda: put(("down",)),
            on_refused=lambda error: put(("refused", error)),
        )
        self.dealer.connect()
        self.loop.start()

    def expect(self, name: str, within_s: float = 20.0) -> tuple[Any, ...]:
        """Return the next event, which must have this name."""
        event = self.events.get(timeout=within_s)
        assert event[0] == name, event
        return event

    def send(self, *args: Any) -> bool:
        return self.loop.run(self.dealer.send, *args)

    def ask(self, number: int, body: bytes = b"") -> Reply:
        assert self.send(Call(number, "echo", 0, 0, body))
        reply = self.expect("message")[1]
        assert isinstance(reply, Reply)
        assert reply.id == number
        return reply

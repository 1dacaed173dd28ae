"""A service whose reserved methods a test may replace, and peers that send what they like, for the
tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.transport.wired import Dialled
from zmqdist.limits import HANDLER_THREADS_MAX
from zmqdist.rpc import StatusOrResult, payload
from zmqdist.rpc.client import as_returned
from zmqdist.rpc.service import RpcService
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.channel import Channel
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Router
from zmqdist.transport.security import client_security, server_security
from zmqdist.wire.hello import our_hello


class Hosted:
    """An RpcService on a router of its own. What is registered before `start` is served."""

    def __init__(self, threads_max: int = HANDLER_THREADS_MAX) -> None:
        self.service = RpcService("hosted", threads_max)
        self.address = ""

    def start(self) -> Hosted:
        self._loop = Loop("zmqdist-hosted")
        router = Router(self._loop, server_security("127.0.0.1"), our_hello("server", 77, "hosted"))
        self.address = router.bind("127.0.0.1:0")
        self.service.attach(router, self._loop, 77)
        self._loop.start()
        return self

    def stop(self) -> None:
        self.service.stop(0.5)
        self._loop.stop()
        assert self.service.snapshot().faults == 0

    def __enter__(self) -> Hosted:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


@contextmanager
def channel_to(address: str) -> Iterator[Channel]:
    """A connection whose calls nothing has checked."""
    channel = Channel(address, client_security(address, "client"), our_hello("client", 78))
    yield channel
    channel.close()


def unchecked(channel: Channel, method: str, given: Any) -> StatusOrResult:
    """A call with this body, whatever the method takes."""
    call = ClientCall(method, payload.pack(given)[0])
    channel.submit(call)
    return StatusOrResult(channel, call, as_returned)


@contextmanager
def stranger_to(address: str) -> Iterator[tuple[Dialled, int]]:
    """A peer that sends messages of its own making, and the incarnation of the server."""
    dialled = Dialled(address, client_security(address, "client"))
    try:
        yield dialled, dialled.expect("up", 20.0)[1].incarnation
    finally:
        dialled.loop.stop()

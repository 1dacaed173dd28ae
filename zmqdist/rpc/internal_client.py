"""Calls between parts of zmqdist. Such a call names its method, keeps the structure of its
arguments, and has a point in time as its deadline.

Users call differently: by an attribute of the client, or by `Client.call`, which flattens the
arguments; and with a time-out instead of a deadline.

A LoopClient calls over a connection that a loop already owns, as a worker calls its dispatcher. All
its methods run in the loop. A call ends once, either with its reply or, when the connection ends,
with UNAVAILABLE. The arguments of a call must fit into the header of a message, so large arrays
cannot be sent.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

from numpy.typing import NDArray

from zmqdist import clock as time
from zmqdist.errors import OpError, UnavailableError, from_code
from zmqdist.messages import Call, Replies, Reply
from zmqdist.rpc import payload
from zmqdist.rpc.client import (
    InternalResult,
    StatusOrResult,
    ZmqClient,
    as_returned,
    channel_of,
    receive_into,
)
from zmqdist.rpc.handler_errors import code_and_message
from zmqdist.rpc.methods import SERVER_INFO
from zmqdist.rpc.payload import snapshot
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.dealer import DealerConnection
from zmqdist.transport.port_probe import connect_failure
from zmqdist.transport.shm_pool import Block
from zmqdist.transport.transfers import Source

CONNECT_S: Final = 1.0
"""Seconds for which `reach` waits until the kernel of the server's host accepts or refuses a
connection. If the kernel does neither, the first call reports why.
"""

PROBE_AGAIN_S: Final = 0.25
"""Seconds between two probes of the port while `reach` waits for the first reply."""


class NotListeningError(UnavailableError):
    """The error for a server whose port refuses connections, because its process has ended or has
    not started."""


def start(
    client: ZmqClient,
    method: str,
    *args: Any,
    due: float = inf,
    still: bool = False,
    block: Block | None = None,
    waits_for_server: bool = True,
    out: NDArray[Any] | None = None,
) -> StatusOrResult:
    """Call a method without waiting for the reply. The arguments are sent as they are now.

    Args:
      due: when the caller stops waiting, on the clock of `time.monotonic`.
      still: whether the caller promises that the arrays in `args` do not change before the call has
        ended. Then they are not copied.
      block: shared memory with the content of the only large array in `args`. The content must not
        change.
      waits_for_server: if False, the call ends with UNAVAILABLE if no server is connected, or if
        the connection ends before the call was sent.
      out: as in `Client.call`.

    Raises:
      InvalidArgumentError: a value in `args` cannot travel.
    """
    body, sources = packed(client, args, still=still, block=block)
    return start_packed(
        client, method, body, sources, due=due, waits_for_server=waits_for_server, out=out
    )


def packed(
    client: ZmqClient, args: tuple[Any, ...], *, still: bool = False, block: Block | None = None
) -> tuple[bytes, Sequence[Source]]:
    """Return the arguments of a call in the packed form that `start_packed` takes. The parameters
    are those of `start`."""
    body, parts = payload.pack(args)
    if not parts:
        return body, ()
    return body, snapshot(
        parts, lends=channel_of(client).shares_memory, still=still
    ) if block is None else [block]


def start_packed(
    client: ZmqClient,
    method: str,
    body: bytes,
    sources: Sequence[Source],
    *,
    due: float = inf,
    waits_for_server: bool = True,
    later: bool = False,
    out: NDArray[Any] | None = None,
) -> StatusOrResult:
    """Call a method with arguments that `packed` has returned, without waiting for the reply.
    `ClientCall` describes `later`, and `start` the other parameters."""
    call = ClientCall(method, body, sources, due)
    call.waits_for_server = waits_for_server
    call.later = later
    call.bounded = False
    read = as_returned if out is None else receive_into(call, out)
    channel = channel_of(client)
    channel.submit(call)
    return InternalResult(channel, call, read)


def reach(client: ZmqClient, due: float) -> None:
    """Wait until the server of a client has replied to a first small call.

    The kernel accepts connections even for a busy process. So a port that refuses connections means
    that no server runs there, and `reach` does not wait for the server's next incarnation.

    Args:
      due: when to stop waiting, on the clock of `time.monotonic`.

    Raises:
      NotListeningError: the port refuses connections, at first or while this function waits for the
        reply.
      DeadlineExceededError: no reply arrived before `due`.
      OpError: the error with which the first call ended.
    """
    _check_port(client.address, due)
    call, end_event = start(client, SERVER_INFO, due=due), threading.Event()
    call.add_done_callback(lambda _: end_event.set())
    try:
        while not end_event.wait(PROBE_AGAIN_S):
            _check_port(client.address, due)
        call.get_value()
    finally:
        call.cancel()


def _check_port(address: str, due: float) -> None:
    """Raise NotListeningError if the port refuses connections. The first call reports any other
    fault, such as a slow network."""
    connect_s = max(0.0, min(CONNECT_S, due - time.monotonic()))
    if isinstance(connect_failure(address, connect_s), ConnectionRefusedError):
        raise NotListeningError(
            f"no process listens at {address}: the server has ended or has not started"
        )


Then = Callable[[Any, OpError | None], None]
"""A function that is called with (value, None) or, if the call ended with an error, with (None,
error)."""


class LoopClient:
    """Calls to the server at the other end of a DealerConnection. The connection's owner reports
    its events and messages to this object."""

    def __init__(self, dealer: DealerConnection) -> None:
        self._dealer = dealer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Then] = {}
        self._incarnation = 0

    @property
    def connected(self) -> bool:
        return self._dealer.up

    def up(self, incarnation: int) -> None:
        """Record that the connection is up, and which incarnation of the server it leads to."""
        self._incarnation = incarnation

    def down(self) -> None:
        """End all waiting calls with UNAVAILABLE, because the connection has ended."""
        waiting, self._waiting = self._waiting, {}
        for then in waiting.values():
            then(None, UnavailableError(f"the connection to {self._dealer.address} ended"))

    def call(self, method: str, args: tuple[Any, ...], then: Then) -> None:
        """Call a method of the server, without a deadline. The loop calls `then` with the
        outcome.
        """
        body, parts = payload.pack(args)
        assert not parts, "arguments that do not fit into a header need a ZmqClient"
        number = next(self._numbers)
        self._waiting[number] = then
        # Not connected: no `down` will follow that could end this call.
        if not self._dealer.send(Call(number, method, self._incarnation, 0, body)):
            del self._waiting[number]
            then(None, UnavailableError(f"not connected to {self._dealer.address}"))

    def handle_message(self, message: Reply | Replies) -> None:
        """Process a message of the server that has replies."""
        for reply in message.items if isinstance(message, Replies) else (message,):
            self._settle(reply)

    def _settle(self, reply: Reply) -> None:
        # A reply over an earlier connection: its call has ended with the connection.
        then = self._waiting.pop(reply.id, None)
        if then is None:
            return
        if reply.code:
            then(None, from_code(reply.code, reply.message))
            return
        try:
            value = payload.unpack(reply.body, [], self._dealer.address)
        except Exception as error:  # for example, there is no memory for the value
            then(None, error if isinstance(error, OpError) else from_code(*code_and_message(error)))
        else:
            then(value, None)

"""Calls between the parts of zmqdist themselves: by a method's name, with the structure of the arguments, up to a point in time.

What users have instead: `Client.call` (which flattens the arguments) and a client's own attributes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from math import inf
from typing import Any, Final

from numpy.typing import NDArray

from zmqdist.errors import UnavailableError
from zmqdist.rpc import payload
from zmqdist.rpc.client import ZmqClient, channel_of
from zmqdist.rpc.future import StatusOrResult, as_returned
from zmqdist.rpc.output_array import OutputArray
from zmqdist.rpc.server_info import ABOUT
from zmqdist.rpc.snapshots import snapshot
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.port_probe import connect_failure
from zmqdist.transport.shm_pool import Block
from zmqdist.transport.transfers import Source

CONNECT_S: Final = 1.0
"""So long the kernel of a server has to take or refuse a connection, before the first question tells."""

PROBE_AGAIN_S: Final = 0.25
"""Between two looks at the port, while a first answer is waited for."""


class NotListeningError(UnavailableError):
    """The port of a server refuses connections: its process has ended, or has not begun."""


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
    """Call a method, and do not wait. The arguments are as they are now.

    Args:
      due: when the caller stops waiting, on `time.monotonic`.
      still: nobody changes the arrays in `args` before the call has ended: they are not copied where they need not be.
      block: shared memory that shows the one large array in `args`, which nobody changes.
      waits_for_server: False: it ends with UNAVAILABLE where the server is not there, or leaves before the call has left.
      out: as of `Client.call`.

    Raises:
      InvalidArgumentError: something in `args` cannot travel.
    """
    body, sources = packed(client, args, still=still, block=block)
    return start_packed(client, method, body, sources, due=due, waits_for_server=waits_for_server, out=out)


def packed(
    client: ZmqClient, args: tuple[Any, ...], *, still: bool = False, block: Block | None = None
) -> tuple[bytes, Sequence[Source]]:
    """The arguments of a call as they travel, for `start_packed`. As `start`."""
    body, parts = payload.pack(args)
    if not parts:
        return body, ()
    return body, snapshot(parts, lends=channel_of(client).lends, still=still) if block is None else [block]


def start_packed(
    client: ZmqClient,
    method: str,
    body: bytes,
    sources: Sequence[Source],
    *,
    due: float = inf,
    waits_for_server: bool = True,
    out: NDArray[Any] | None = None,
) -> StatusOrResult:
    """As `start`, for arguments that were packed before."""
    call = ClientCall(method, body, sources, due)
    call.waits_for_server = waits_for_server
    call.bounded = False
    read = as_returned
    if out is not None:
        output = OutputArray(out)
        call.room, read = output.room, output.read
    channel = channel_of(client)
    channel.call(call)
    return StatusOrResult(channel, call, read)


def reach(client: ZmqClient, due: float) -> None:
    """Wait until the server of a client answers a first small question.

    A process that is only busy has its kernel take connections; one whose port refuses them has ended, and its successor is not waited for.

    Args:
      due: on `time.monotonic`.

    Raises:
      NotListeningError: its port refuses connections, now or while the answer is waited for.
      DeadlineExceededError: no answer up to `due`.
      OpError: what the question ended with.
    """
    _check_port(client.address, due)
    started, ended = start(client, ABOUT, due=due), threading.Event()
    started.add_done_callback(lambda _: ended.set())
    try:
        while not ended.wait(PROBE_AGAIN_S):
            _check_port(client.address, due)
        started.get_value()
    finally:
        started.cancel()


def _check_port(address: str, due: float) -> None:
    """Raises NotListeningError. Anything else - slow, or a name that is looked up elsewhere - the first question tells."""
    connect_s = max(0.0, min(CONNECT_S, due - time.monotonic()))
    if isinstance(connect_failure(address, connect_s), ConnectionRefusedError):
        raise NotListeningError(f"nobody listens at {address}: its process has ended")

"""Calls between the parts of zmqdist themselves: by a method's name, with the structure of the arguments, up to a point in time.

What users have instead: `Client.call` (which flattens the arguments) and a client's own attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from zmqdist.rpc import payload
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.result import StatusOrResult, as_returned
from zmqdist.rpc.snapshots import snapshot
from zmqdist.transport.arena import Block
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.transfers import Source


def start(
    client: ZmqClient,
    method: str,
    *args: Any,
    due: float = inf,
    still: bool = False,
    block: Block | None = None,
    waits_for_server: bool = True,
) -> StatusOrResult:
    """Call a method, and do not wait. The arguments are as they are now.

    Args:
      due: when the caller stops waiting, on `time.monotonic`.
      still: nobody changes the arrays in `args` before the call has ended: they are not copied where they need not be.
      block: shared memory that shows the one large array in `args`, which nobody changes.
      waits_for_server: False: it ends with UNAVAILABLE where the server is not there, or leaves before the call has left.

    Raises:
      InvalidArgumentError: something in `args` cannot travel.
    """
    body, sources = packed(client, args, still=still, block=block)
    return start_packed(client, method, body, sources, due=due, waits_for_server=waits_for_server)


def packed(
    client: ZmqClient, args: tuple[Any, ...], *, still: bool = False, block: Block | None = None
) -> tuple[bytes, Sequence[Source]]:
    """The arguments of a call as they travel, for `start_packed`. As `start`."""
    body, parts = payload.pack(args)
    if not parts:
        return body, ()
    return body, snapshot(parts, lends=client._channel.lends, still=still) if block is None else [block]


def start_packed(
    client: ZmqClient,
    method: str,
    body: bytes,
    sources: Sequence[Source],
    *,
    due: float = inf,
    waits_for_server: bool = True,
) -> StatusOrResult:
    """As `start`, for arguments that were packed before."""
    call = ClientCall(method, body, sources, due)
    call.waits_for_server = waits_for_server
    call.bounded = False
    client._channel.call(call)
    return StatusOrResult(client._channel, call, as_returned)


def has_left(started: StatusOrResult) -> bool:
    """Whether a call was sent: then it ends by itself when the connection does. Else it waits for a server, or for company."""
    return not started._channel._line.table.waits(started._call)

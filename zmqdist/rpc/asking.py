"""Calls between the parts of zmqdist themselves: by a method's name, with the structure of the arguments, up to a point in time.

What users have instead: `Client.call` (which flattens the arguments) and a client's own attributes.
"""

from __future__ import annotations

from math import inf
from typing import Any

from zmqdist.core.calls import ClientCall
from zmqdist.rpc import payload
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.result import StatusOrResult, as_returned
from zmqdist.rpc.snapshots import snapshot


def start(client: ZmqClient, method: str, *args: Any, due: float = inf) -> StatusOrResult:
    """Call a method, and do not wait. The arguments are as they are now.

    Args:
      due: when the caller stops waiting, on `time.monotonic`.

    Raises:
      InvalidArgumentError: something in `args` cannot travel.
    """
    channel = client._channel
    body, parts = payload.pack(args)
    call = ClientCall(method, body, snapshot(parts, lends=channel.lends, still=False) if parts else (), due)
    channel.call(call)
    return StatusOrResult(channel, call, as_returned)


def has_left(started: StatusOrResult) -> bool:
    """Whether a call was sent: then it ends by itself when the connection does. Else it waits for a server, or for company."""
    return started._call.id not in started._channel._line.table.waiting

"""Calls by name whose arguments keep their structure: how the parts of zmqdist talk to each other.

`Client.call` sends the leaves of its arguments and gives the leaves of the answer, as TensorFlow's does; here both arrive as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import Any

from zmqdist.core.calls import ClientCall
from zmqdist.net.arena import Block
from zmqdist.net.transfers import Source
from zmqdist.rpc import payload
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.result import StatusOrResult, as_returned
from zmqdist.rpc.snapshots import snapshot


def ask(
    client: ZmqClient,
    method: str,
    args: tuple[Any, ...],
    timeout_s: float = inf,
    *,
    still: bool = False,
    block: Block | None = None,
) -> StatusOrResult:
    """Call any method, and wait for nothing.

    Args:
      args: given to the method one by one.
      timeout_s: the call's deadline; `inf` for none.
      still: nobody changes the arrays in `args` before the call has ended; by default they are copied where somebody could.
      block: shared memory that shows the one large array in `args`, which nobody changes.

    Raises:
      InvalidArgumentError: something in `args` cannot travel.
    """
    channel = client._channel
    body, parts = payload.pack(args)
    sources: Sequence[Source] = ()
    if parts:
        sources = snapshot(parts, lends=channel.lends, still=still) if block is None else [block]
    call = ClientCall(method, body, sources, monotonic() + timeout_s)
    channel.call(call)
    return StatusOrResult(channel, call, as_returned)

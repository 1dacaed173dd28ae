"""Events and effects that several machines share.

Most machines have a method `handle(event, now)`, which returns a list of effects. Events have names
in the past tense and effects have names in the imperative. Events and effects are immutable. A
message from a peer is the event `Heard`, and a message to a peer is the effect `Send`. A machine
does not look inside a `peer`: runtimes put connections there, and simulations put simulated
connections or names. If an effect fails, the runtime reports the failure to the machine as an
event.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import msgspec

from zmqdist.messages import Message

Peer: TypeAlias = Hashable
"""One connection to another process. A process that reconnects is a new Peer."""


class Heard(msgspec.Struct, frozen=True):
    """A message arrived from a peer."""

    peer: Peer
    message: Message


class PeerGone(msgspec.Struct, frozen=True):
    """The connection to a peer has ended, or a message could not be sent to the peer. No more
    messages arrive from the peer or reach it."""

    peer: Peer


class PeerExpelled(msgspec.Struct, frozen=True):
    """A peer must not be served any more, although its process may still run. No more messages
    arrive from the peer or reach it."""

    peer: Peer
    reason: str


class ProcessExited(msgspec.Struct, frozen=True):
    """The process of a worker has ended, and its slots have ended with it. The parent of the
    process, or the kernel of its host, has reported this.

    `peer` or (job, index) names the worker. With `pid` the machine can check that the event is not
    about an earlier process of the worker.
    """

    pid: int
    exit_code: int | None
    log: str = ""
    job: str = ""
    index: int = -1
    peer: Peer = None


class Ticked(msgspec.Struct, frozen=True):
    """The machine's `deadline` has passed."""


class Send(msgspec.Struct, frozen=True):
    """Send a message to a peer."""

    to: Peer
    message: Message

"""Events and effects that several machines share.

A machine is `handle(event, now) -> list[Effect]`. Events are named in the past tense, effects in the imperative; both are frozen.
A message from a peer is the event `Heard`, a message to a peer is the effect `Send`. Peers are opaque: the runtimes use
connections, the simulation uses names. If an effect fails, the runtime reports that by an event.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

from zmqdist.messages import Message

Peer: TypeAlias = Hashable
"""One connection. A peer that reconnects is another Peer."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A message arrived from a peer."""

    peer: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A connection has ended, or a message could not be sent over it. No message arrives from it or reaches it any more."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerExpelled:
    """A peer may not be served any more, although its process may still run. No message arrives from it or reaches it any more."""

    peer: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """A worker's process was seen to end, by its parent or by the kernel of its host. Its slots have ended with it.

    `peer` or (job, index) names the worker. `pid` shows that the event is about this process and not about its successor.
    """

    pid: int
    exit_code: int | None
    log: str = ""
    job: str = ""
    index: int = -1
    peer: Peer = None


@dataclass(frozen=True, slots=True)
class Ticked:
    """The machine's `deadline` has passed."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer."""

    to: Peer
    message: Message

"""What goes into the machines and comes out of them, where several machines share it.

A machine is `handle(event, now) -> list[Effect]`: events are in the past tense, effects in the imperative, both are frozen. A
message from a peer is an event as it is (`Heard`), a message to a peer is an effect as it is (`Send`). Peers are opaque: the
shells use connections, the simulation uses names. An effect that could not be carried out comes back as an event.
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
    """A connection has ended, or something could not be sent to it. Nothing more comes from it and nothing more reaches it."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """Somebody who knows saw a worker's process end: its parent, or the kernel on the same host.

    `peer` or (job, index) names it; `pid` guards against taking its successor for it. Its slots have died with it.
    """

    pid: int
    exit_code: int | None
    log: str = ""
    job: str = ""
    index: int = -1
    peer: Peer = None


@dataclass(frozen=True, slots=True)
class Ticked:
    """The machine's `deadline` has come."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer."""

    to: Peer
    message: Message

"""A peer of a server: one connection, and the facts that ZeroMQ attaches to its messages.

Not here: what a server does with it (router.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import zmq

from zmqdist.transport.zap import LIMITED

if TYPE_CHECKING:
    from zmqdist.transport.transfers import BulkChannel
    from zmqdist.wire.hello import Hello

NAME_CHARS_MAX: Final = 100


class Peer:
    """One connection.

    Attributes:
      routing_id: ZeroMQ's name for it.
      fd: its descriptor number; -1 if unknown.
      role: "client", "submit", "worker" or "admin"; "joining" or "revoked" for a peer that gets one reply only.
      key: its public key, 32 bytes; empty without CURVE.
      limited: its role is "joining" or "revoked".
      hello: None until it has arrived; `on_hello` and `peers` show no peer without one.
      name: for log lines and errors; until the hello it contains the address.
      bulk: the large parts on the way in either direction; None until it is needed.
      session: set by the owner of the router.
      gone: the connection is known to have ended; nothing can be sent to the peer.
      fault_logged: a wrong message of this peer was logged; further ones are only counted.
      refusals: number of Refused messages sent to it.
      ignored: its messages are dropped from now on.
    """

    __slots__ = (
        "bulk",
        "fault_logged",
        "fd",
        "gone",
        "hello",
        "ignored",
        "key",
        "limited",
        "name",
        "refusals",
        "role",
        "routing_id",
        "session",
    )

    def __init__(self, routing_id: bytes, fd: int, role: str, name: str, key: bytes = b"") -> None:
        self.routing_id = routing_id
        self.fd = fd
        self.role = role
        self.key = key
        self.limited = role in LIMITED
        self.name = name
        self.hello: Hello | None = None
        self.bulk: BulkChannel | None = None
        self.session: Any = None
        self.gone = False
        self.fault_logged = False
        self.refusals = 0
        self.ignored = False

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, {self.role}{', gone' if self.gone else ''})"


def fd_of(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection from which a frame came; -1 if ZeroMQ does not know it."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError, TypeError):
        return -1


def property_of(frame: zmq.Frame, name: str) -> str:
    """Return a property of the connection from which a frame came; "" if it has none of this name."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""


def printable(text: str) -> str:
    """Return a peer's text so that it is fit for a log line."""
    return "".join(char if char.isprintable() else "?" for char in text[:NAME_CHARS_MAX])

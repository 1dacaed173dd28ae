"""A peer of a server: one connection, and the data that ZeroMQ attaches to each message of this
connection.

Not here: what a server does with a peer (router.py).
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
    """One connection of a server.

    Attributes:
      routing_id: ZeroMQ's name for the connection.
      fd: the descriptor number of the connection; -1 if unknown.
      port: the port of this server to which the peer is connected; 0 if unknown.
      role: "client", "submit", "worker" or "admin"; "joining" or "revoked" for a peer to which the
        server sends only one reply.
      key: the peer's public key, 32 bytes; empty without CURVE.
      limited: whether the role is "joining" or "revoked".
      hello: the peer's hello; None until it has arrived. The router lists only peers with a hello
        in `peers`, and passes only these to `on_hello`.
      name: the peer's name for log lines and errors; it contains the address until the hello
        arrives.
      bulk: the channel for large parts in either direction; None until the router needs it.
      session: any object that the owner of the router stores here.
      gone: whether the router knows that the connection has ended. Then no message can be sent to
        the peer.
      fault_logged: whether a wrong message of this peer was logged. Then the router only counts
        further wrong messages.
      refusals: number of Refused messages that the router sent to the peer.
      ignored: whether the router drops all further messages of the peer.
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
        "port",
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
        self.port = 0
        self.fault_logged = False
        self.refusals = 0
        self.ignored = False

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, {self.role}{', gone' if self.gone else ''})"


def fd_of(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection through which a frame arrived; -1 if ZeroMQ does not
    know it."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError, TypeError):
        return -1


def property_of(frame: zmq.Frame, name: str) -> str:
    """Return a property of the connection through which a frame arrived; "" if the connection has
    no property of this name."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""


def printable(text: str) -> str:
    """Return a text that a peer has sent, shortened and without unprintable characters, for a log
    line."""
    return "".join(char if char.isprintable() else "?" for char in text[:NAME_CHARS_MAX])

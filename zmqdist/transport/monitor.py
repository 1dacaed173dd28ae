"""The events that ZeroMQ's monitor reports about a socket, and their meaning for the connecting
side.

`ConnectionWatch` does no I/O. Its owner feeds it the events of all attempts to connect a DEALER to
one address. The watch returns whether the connection is up, was lost, has failed for now, or is
refused for good, and formulates the error of a refusal.

The events of libzmq for each fault (found by experiment)
    a refused token or key     HANDSHAKE_FAILED_AUTH, at once and every time
    another mechanism          FAILED_PROTOCOL with MECHANISM_MISMATCH, or FAILED_NO_DETAIL with EPIPE: a race decides which
    a wrong key of the server  FAILED_NO_DETAIL with EPIPE in each attempt, and no other event
    a busy server              FAILED_NO_DETAIL with EAGAIN after HANDSHAKE_IVL: this is not a refusal
Some faults look alike, so after a mismatch, and after the third closed handshake in a row, the
watch asks its owner for the server's greeting (`ProbeNeeded`; port_probe.py reads it), which names
the server's mechanism. `judge` then decides.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

import zmq

from zmqdist.errors import FailedPreconditionError, OpError, UnauthenticatedError, UnavailableError
from zmqdist.transport.keyring_machine import JOINING
from zmqdist.transport.security import CURVE, NONE, PLAIN, ClientSecurity

CONNECTED: Final = int(zmq.EVENT_CONNECTED)
ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)
CLOSED: Final = int(zmq.EVENT_CLOSED)
DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
SUCCEEDED: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
FAILED_NO_DETAIL: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
FAILED_PROTOCOL: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
FAILED_AUTH: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
MISMATCH: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)

CLIENT_EVENTS: Final = (
    CONNECTED | CLOSED | DISCONNECTED | SUCCEEDED | FAILED_NO_DETAIL | FAILED_PROTOCOL | FAILED_AUTH
)

CLOSES_MAX: Final = 3
"""Number of handshakes in a row that the server may close before a probe reads its greeting."""

_EVENT: Final = struct.Struct("=HI")
_serial = itertools.count()


def open_monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Start the monitor of `socket`, and return a second socket that receives the events. Close the
    second socket after `socket.disable_monitor()`.

    The queue of events has no bound. While a bounded queue is full, ZeroMQ's own thread, which
    serves all connections, would block.
    """
    context = socket.context
    endpoint = f"inproc://zmqdist.monitor.{next(_serial)}"
    socket.monitor(endpoint, events)
    monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(endpoint)
    return monitor


def decode_event(frame: bytes) -> tuple[int, int]:
    """Return the (event, value) that the first frame of a monitor message contains. The event
    decides whether the value is a descriptor, an errno, a protocol error of libzmq, or the status
    of a ZAP reply.
    """
    event, value = _EVENT.unpack_from(frame)
    return event, value


@dataclass(frozen=True)
class Up:
    """Verdict of the watch: the handshake succeeded, so the owner sends its hello."""


@dataclass(frozen=True)
class Down:
    """Verdict of the watch: a connection that was up is lost. The owner can still read the messages
    that had arrived."""


@dataclass(frozen=True)
class AttemptFailed:
    """Verdict of the watch: this attempt to connect failed, and the next attempt may succeed."""

    why: str


@dataclass(frozen=True)
class ProbeNeeded:
    """Verdict of the watch: this attempt to connect failed in a way that only the server's greeting
    can explain."""


@dataclass(frozen=True)
class Rejected:
    """Verdict of the watch: no attempt to connect will succeed until the security of the client or
    of the server is changed."""

    error: OpError


Verdict: TypeAlias = "Up | Down | AttemptFailed | ProbeNeeded | Rejected"

_MECHANISM_NAMES: Final = {
    PLAIN: "the user's token (PLAIN)",
    CURVE: "CURVE keys",
    NONE: "no security",
}
_MECHANISMS: Final = {"PLAIN": PLAIN, "CURVE": CURVE, "NULL": NONE}
_ADVICE: Final = {
    PLAIN: "leave out the keys or insecure=True on this side, or start the server with keys",
    CURVE: "give this side the folder of the server's keys (ZMQDIST_KEYS_DIR)",
    NONE: "start the server with the user's token or with keys; a server without security is "
    "reached with insecure=True",
}


class ConnectionWatch:
    """The state of one connecting side over all its attempts to connect; the module's docstring
    explains it.

    Attributes:
      connected: whether a TCP connection exists and the handshake has not ended.
      up: whether the handshake succeeded and the connection has not been lost since.
    """

    def __init__(self, address: str, security: ClientSecurity) -> None:
        self.address = address
        self.security = security
        self.connected = False
        self.up = False
        self._closes = 0
        self._mismatch = False

    def begin(self) -> None:
        """Forget the state of the last attempt, because the next attempt uses a new socket."""
        self.connected = self.up = False

    def feed(self, event: int, value: int) -> Verdict | None:
        """Process one event of the monitor. Return the verdict, or None if the owner need not
        act.
        """
        if event == CONNECTED:
            self.connected = True
            return None
        if event not in (
            SUCCEEDED,
            DISCONNECTED,
            CLOSED,
            FAILED_AUTH,
            FAILED_PROTOCOL,
            FAILED_NO_DETAIL,
        ):
            return None
        was_up, was_connected = self.up, self.connected
        self.begin()
        if event == SUCCEEDED:
            self.up = True
            self._closes = 0
            self._mismatch = False
            return Up()
        if event == FAILED_AUTH:
            return Rejected(self._refusal(value))
        if event == FAILED_PROTOCOL and value == MISMATCH:
            self._mismatch = True
            return ProbeNeeded()
        if event in (FAILED_PROTOCOL, FAILED_NO_DETAIL):
            return self._handshake_closed(value)
        if was_up:
            return Down()
        if not was_connected:
            self._closes = 0
            return AttemptFailed("no process listens there")
        return self._handshake_closed(0)  # the server does not speak ZeroMQ, or has ended

    def _handshake_closed(self, value: int) -> Verdict:
        if value == zmq.EAGAIN:
            return AttemptFailed(
                "the server did not finish the handshake in time: it may be very busy"
            )
        self._closes += 1
        return (
            ProbeNeeded()
            if self._closes >= CLOSES_MAX
            else AttemptFailed("the server closed the connection during the handshake")
        )

    def judge(self, mechanism: str | None) -> Rejected | None:
        """Decide what the mechanism in the server's greeting means for further attempts.

        Args:
          mechanism: the mechanism in the greeting; "" for a server that does not speak ZeroMQ; None
            if no greeting arrived.

        Returns:
          The refusal; or None if another attempt may succeed.
        """
        closes, self._closes = self._closes, 0
        mismatch, self._mismatch = self._mismatch, False
        ours, address = self.security.mechanism, self.address
        if mechanism is None:
            if not mismatch:
                return None
            text = f"{address} does not use {_MECHANISM_NAMES[ours]}, as this side does: give both the same security"
            return Rejected(FailedPreconditionError(text))
        theirs = _MECHANISMS.get(mechanism)
        if theirs is None:
            text = (
                f"the process that listens on {address} is not a zmqdist server: is the port right?"
            )
            return Rejected(FailedPreconditionError(text))
        if theirs != ours:
            plaintext = ", in plaintext" if theirs == NONE else ""
            text = (
                f"the server at {address} uses {_MECHANISM_NAMES[theirs]}{plaintext}, this side "
                f"{_MECHANISM_NAMES[ours]}: "
                f"{_ADVICE[theirs]}"
            )
            return Rejected(FailedPreconditionError(text))
        if closes < CLOSES_MAX:
            self._closes = closes
            return None
        if ours == CURVE:
            text = (
                f"the server at {address} does not have the key that this side expects: most "
                f"likely `server.pub` is of "
                f"another cluster, or a worker listens there (this side uses "
                f"{self.security.source})"
            )
            return Rejected(UnauthenticatedError(text))
        text = f"the server at {address} closed {closes} handshakes in a row: its log may say why"
        return Rejected(UnavailableError(text))

    def _refusal(self, status: int) -> OpError:
        source = self.security.source or "nothing"
        if status != 400:
            why = f"its authentication failed with status {status}"
        elif self.security.mechanism == PLAIN:
            why = (
                "it belongs to another user or to a cluster with a token of its own "
                "(local_cluster, launch), "
                "or was started with another ZMQDIST_TOKEN_FILE"
            )
        elif self.security.role == JOINING:
            why = "the dispatcher has no open join token, so the ticket was used or has ended: ask for a new one"
        elif (
            self.security.mechanism == CURVE and self.security.folder and self.security.key is None
        ):
            why = (
                "it does not know the key with which this process had joined, as after a restart "
                "without its work_dir: "
                "join again with a new ticket"
            )
        elif self.security.mechanism == CURVE:
            why = "that public key is not in the server's `authorized` file"
        else:
            why = "it wants a token or a key"
        return UnauthenticatedError(
            f"the server at {self.address} refused this side as {self.security.role} ({source}): "
            f"{why}"
        )

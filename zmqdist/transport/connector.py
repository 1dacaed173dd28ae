"""The connection of one DEALER to one address: its attempts, their back-off, and the meaning of the
monitor's events.

Rules
    Each attempt has a new socket and a new monitor. So no message that was queued for one
    incarnation of the server reaches the next incarnation, and no event of an earlier attempt is
    mistaken for an event of the current attempt.
    ZeroMQ's own reconnecting is off, because `ClientSecurity.may_connect` must be called before
    each attempt (security.py). Each attempt looks a host name up again, so that the client finds a
    server that has returned at another address. The attempts for a name use IPv4 and IPv6 in turn,
    because the name may have only one kind of address, and the server may listen on only one kind.
    Heartbeats are ZeroMQ's own, and this side sends most of them. The heartbeats begin
    HEARTBEAT_IVL_S after the handshake, and the first heartbeat tells the server how long to wait
    for the next. If the client's process is stopped before the first heartbeat, only the server's
    own, rarer heartbeats show the server that the client is silent.

A connector starts no thread, and waits for nothing but the look-up of a host name before a probe.
The owner's threads use it one at a time. The owner
    polls the descriptors of `socket` and `monitor` (edge-triggered, see loop.py); calls `read`
    after input of the monitor, and `tick` at the time `due`: both methods return the changes of the
    connection; reads all messages in the socket after a Down, and then calls `retry`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils import z85

from zmqdist.addresses import is_name
from zmqdist.errors import OpError
from zmqdist.limits import FRAME_BYTES_MAX, HANDSHAKE_S, HEARTBEAT_IVL_S, HEARTBEAT_TIMEOUT_S
from zmqdist.random import chance
from zmqdist.transport import forks
from zmqdist.transport.endpoint import endpoint, split
from zmqdist.transport.listener import limit_unsent, shut_down
from zmqdist.transport.monitor import (
    CLIENT_EVENTS,
    CONNECTED,
    SUCCEEDED,
    AttemptFailed,
    ConnectionWatch,
    Down,
    ProbeNeeded,
    Rejected,
    Up,
    decode_event,
    open_monitor,
)
from zmqdist.transport.port_probe import PortProbe
from zmqdist.transport.security import PLAIN, ClientSecurity

log = logging.getLogger("zmqdist.transport")

BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 1.0
CONNECT_S: Final = 5.0
"""Seconds after which an attempt without a TCP connection is abandoned. A name that cannot be
looked up causes no event at all."""
FIRST_LOOKUP_S: Final = 1.0
"""Seconds for the first attempt to reach a name. It looks for IPv4 addresses only, and the second
attempt accepts any address."""
PROBE_STEP_S: Final = 0.005

_open_sockets: Final[set[zmq.Socket[bytes]]] = set()
"""Sockets of all connectors. This set keeps each socket alive until its connector closes the
socket. Without this set, the garbage collector, which finalizes the parts of a dropped client in
any order, could close a socket before the client's finalizer has sent the waiting calls.
"""


class Connector:
    """One connection and its attempts; the module's docstring has the rules.

    Attributes:
      socket, monitor: the sockets of the current attempt; None between two attempts.
      due: the time at which the owner calls `tick`, on the clock of the arguments `now`; None if
        only input of the monitor matters.
      trouble: why the last attempt failed, for the log line about a caller that waits for the
        server.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        security: ClientSecurity,
        *,
        opened: Callable[[], None],
        closing: Callable[[], None],
    ) -> None:
        """Make a connector. Its first `tick` begins the first attempt.

        Args:
          opened: a function that is called when `socket` and `monitor` exist, before any message or
            event can arrive through them.
          closing: a function that is called before the two sockets are closed.
        """
        self.address = address
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        self.due: float | None = 0.0
        self.trouble = "not tried yet"
        self._context = context
        self._security = security
        self._opened = opened
        self._closing = closing
        self._watch = ConnectionWatch(address, security)
        self._failures = 0
        self._is_name = is_name(split(address)[0])
        self._probe: PortProbe | None = None
        self._between_attempts = True
        self._fd = -1
        self._server_key = b""

    @property
    def up(self) -> bool:
        """Whether the handshake succeeded and the connection has not been lost since."""
        return self._watch.up

    def tick(self, now: float) -> Rejected | None:
        """If `due` has come, begin an attempt to connect, abandon an attempt, or take the next step
        of a probe. Return the refusal if no attempt can succeed.
        """
        if self.due is None or now < self.due:
            return None
        if self._probe is not None:
            return self._step_probe(self._probe, now)
        if self._between_attempts:
            return self._begin(now)
        self._fail("no connection was made in time", now)
        return None

    def read(self, now: float) -> list[Up | Down | Rejected]:
        """Read the monitor's events, and return the changes of the connection that matter to the
        owner. Call this again while the monitor's EVENTS show input.
        """
        changes: list[Up | Down | Rejected] = []
        while self.monitor is not None and int(self.monitor.getsockopt(zmq.EVENTS)) & int(
            zmq.POLLIN
        ):
            event, value = decode_event(self.monitor.recv_multipart(zmq.NOBLOCK)[0])
            self._fd = value if event == CONNECTED else self._fd if event == SUCCEEDED else -1
            if event == CONNECTED:
                forks.connections[value] = limit_unsent(value)
            verdict = self._watch.feed(event, value)
            if isinstance(verdict, AttemptFailed):
                self._fail(verdict.why, now)
            elif isinstance(verdict, ProbeNeeded):
                self._drop()
                self._start_probe(now)
            elif isinstance(verdict, Rejected):
                changes.append(self._refuse(verdict))
            elif verdict is not None:
                self._note_change(isinstance(verdict, Up))
                changes.append(verdict)
            elif self._watch.connected:
                # from here ZeroMQ bounds the time of the handshake (HANDSHAKE_IVL)
                self.trouble = (
                    "the server accepted the connection, but has not finished the handshake"
                )
                self.due = None
        return changes

    def retry(self, now: float) -> None:
        """Drop the current connection, or disregard the refusal, and try again after the
        back-off.
        """
        self._drop()
        self._schedule_attempt(now)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connection; sent messages have `linger_s` seconds to leave. A later `retry`
        connects again."""
        self._drop(linger_s)
        self.due = None
        if self._security.voucher is not None:
            self._security.voucher.detach(self)

    def key_revoked(self, key: bytes, problem: str) -> None:
        """End the connection if its server has shown this key, because the key was revoked. Any
        thread may call this.

        ZeroMQ notices that its descriptor was shut down. The owner of this connector then gets a
        Down, as after any other lost connection.
        """
        fd = self._fd
        if fd >= 0 and key == self._server_key:
            shut_down(fd)

    # -- one attempt -------------------------------------------------------------------------------

    def _begin(self, now: float) -> Rejected | None:
        try:
            if self._security.voucher is not None:
                self._security.voucher.attach(self)
            if not self._security.may_connect(self.address):
                token = self._security.mechanism == PLAIN
                self._fail(
                    "no process listens there"
                    if token
                    else "the dispatcher has not vouched for its key yet",
                    now,
                )
                return None
            self._open()
        except OpError as error:
            return self._refuse(Rejected(error))
        self._between_attempts = False
        self.due = now + (FIRST_LOOKUP_S if self._is_name and not self._failures else CONNECT_S)
        return None

    def _open(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        try:
            configure(socket)
            self._security.apply(socket, self.address)
            if self._is_name and self._failures % 2:
                socket.setsockopt(zmq.IPV6, 1)
            self._fd = -1
            if self._security.voucher is not None:
                self._server_key = z85.decode(self._security.expected(self.address) or b"")
            self._watch.begin()
            monitor = open_monitor(socket, CLIENT_EVENTS)
        except BaseException:
            socket.close(linger=0)
            raise
        self.socket, self.monitor = socket, monitor
        _open_sockets.update((socket, monitor))
        self._opened()
        socket.connect(endpoint(self.address))

    def _note_change(self, up: bool) -> None:
        if up:
            self._failures = 0
            self.trouble = ""
        else:
            self.trouble = "the connection was lost"
        self.due = None

    def _fail(self, why: str, now: float) -> None:
        self.trouble = why
        self._drop()
        self._schedule_attempt(now)

    def _refuse(self, refusal: Rejected) -> Rejected:
        self.trouble = str(refusal.error)
        self._drop()
        return refusal

    def _schedule_attempt(self, now: float) -> None:
        self._between_attempts = True
        pause_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(self._failures, 10))
        self._failures += 1
        self.due = now + pause_s * chance.uniform(0.5, 1.0)

    def _drop(self, linger_s: float = 0.0) -> None:
        """Close the socket, the monitor and the probe, and clear `due`."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None
        self.due = None
        self._between_attempts = False
        self._watch.begin()
        self._fd = -1
        socket, monitor = self.socket, self.monitor
        if socket is None or monitor is None:
            return
        self._closing()
        self.socket = self.monitor = None
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=round(linger_s * 1000))
        _open_sockets.difference_update((socket, monitor))

    # -- the probe of the server -------------------------------------------------------------------

    def _start_probe(self, now: float) -> None:
        self._probe = PortProbe(self.address, now)
        self.due = now

    def _step_probe(self, probe: PortProbe, now: float) -> Rejected | None:
        if not probe.step(now):
            self.due = now + PROBE_STEP_S
            return None
        self._probe = None
        refusal = self._watch.judge(probe.mechanism)
        if refusal is not None:
            return self._refuse(refusal)
        self._schedule_attempt(now)
        return None


def configure(socket: zmq.Socket[bytes]) -> None:
    """Set the options that all connecting sockets have in common. `ClientSecurity.apply` sets the
    security options."""
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    # The handshake has a bound of its own, because ZeroMQ sends no heartbeats before the handshake
    # has ended.
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(HEARTBEAT_IVL_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(HEARTBEAT_TIMEOUT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TTL, round(HEARTBEAT_TIMEOUT_S * 1000))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, round(CONNECT_S * 1000))

"""Read the greeting that a ZeroMQ server sends first: 64 bytes in the clear, which name its security mechanism.

Without waiting: `step` is called now and then (every few milliseconds) until it says that it has ended.
"""

from __future__ import annotations

import errno
import socket
from typing import Final

from zmqdist.transport.address import is_ipv6, split

GREETING_BYTES: Final = 64
PATIENCE_S: Final = 1.0

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"


class GreetingProbe:
    """One look at a server.

    Attributes:
      mechanism: after the end: "NULL", "PLAIN", "CURVE"; "" for a server that does not speak ZeroMQ; None: no answer.
    """

    def __init__(self, address: str, now: float) -> None:
        self.mechanism: str | None = None
        self._until = now + PATIENCE_S
        self._seen = b""
        self._sent = False
        host, port = split(address)
        self._socket = socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            self._failed = self._socket.connect_ex((host, port)) not in (0, errno.EINPROGRESS)
        except OSError:  # a host name that cannot be looked up
            self._failed = True

    def step(self, now: float) -> bool:
        """Go on; True: it has ended, and its socket is closed."""
        try:
            ended = self._failed or self._talk()
        except BlockingIOError:
            ended = False
        except OSError:
            ended = True
        if ended or now >= self._until:
            self.close()
            return True
        return False

    def close(self) -> None:
        """Give up."""
        self._socket.close()

    def _talk(self) -> bool:
        if not self._sent:
            # The signature and major version 3: that is enough for the server to send its whole greeting, and too little
            # for it to find a mechanism that it does not like. send raises ENOTCONN until TCP stands.
            try:
                self._socket.send(_SIGNATURE + b"\x03")
            except OSError as error:
                if error.errno in (errno.ENOTCONN, errno.EAGAIN):
                    return False
                raise
            self._sent = True
        while len(self._seen) < GREETING_BYTES:
            part = self._socket.recv(GREETING_BYTES - len(self._seen))
            self._seen += part
            if not _SIGNATURE.startswith(self._seen[:1]):
                self.mechanism = ""
                return True
            if not part:
                return True
        self.mechanism = self._seen[12:32].rstrip(b"\0").decode("ascii", "replace")
        return True

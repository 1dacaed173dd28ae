"""Ports that stay reserved for children: known before they start, and the same when they are started again.

The socket is bound and never listens: the kernel gives the port to nobody who asks for a free one, and a child that says SO_REUSEADDR, as
ZeroMQ does, may bind it. Nobody can connect while no child has it, so a client knows at once that nobody is there: a socket that listened
here would take connections that nobody answers.
"""

from __future__ import annotations

import os
import socket

from zmqdist.errors import UnknownError
from zmqdist.transport.address import is_ipv6, join


class Reserved:
    """A port of this machine, until `close`.

    Attributes:
      address: "host:port".
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Port 0 takes a free one. Raises UnknownError: it is in use, or `host` is not of this machine."""
        with socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET) as bound:
            try:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind((host, port))
            except OSError as error:
                raise UnknownError(f"could not bind {join(host, port)}: {error.strerror}") from None
            self.address = join(host, bound.getsockname()[1])
            self._descriptor = bound.detach()

    def close(self) -> None:
        """Let it go. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

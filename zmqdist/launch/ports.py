"""Reserved ports for child processes: known before the children start, and unchanged when they are started again.

The socket is bound but never listens. The kernel therefore gives the port to no process that requests a free one, while a child that sets
SO_REUSEADDR, as ZeroMQ does, may bind it. While no child has the port, connections are refused, so a client knows at once that the
server is absent; a listening socket here would accept connections that no process serves.
"""

from __future__ import annotations

import os
import socket

from zmqdist.errors import UnknownError
from zmqdist.transport.address import is_ipv6, join
from zmqdist.transport.own_address import bind_free, bindable


class Reserved:
    """A reserved port of this host, until `close`.

    Attributes:
      address: "host:port".
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Reserve a port; 0 takes a free one. Raises UnknownError: the port is in use, or `host` is not an address of this host.

        Args:
          host: an address, or the name of an interface.
        """
        host = bindable(host)
        with socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET) as bound:
            try:
                if port:
                    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    bound.bind((host, port))
                else:
                    # Without the option, because with it two launchers would reserve the same port of a range.
                    bind_free(bound, host)
                    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            except OSError as error:
                raise UnknownError(f"could not bind {join(host, port)}: {error.strerror}") from None
            self.address = join(host, bound.getsockname()[1])
            self._descriptor = bound.detach()

    def close(self) -> None:
        """Release the port. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

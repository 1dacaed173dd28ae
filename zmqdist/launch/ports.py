"""Reserved ports for child processes. The launcher knows a port before the child starts, and a restarted child has the same port.

A reserved port is bound by a socket that never listens. The kernel then assigns the port to no process that requests a free port, but a
child that sets SO_REUSEADDR, as ZeroMQ does, may bind it. While no child listens, connections are refused, so a client knows at once that
the server does not run; if this socket listened, it would accept connections that no process serves.
"""

from __future__ import annotations

import os
import socket

from zmqdist.addresses import is_ipv6, join_address
from zmqdist.errors import UnknownError
from zmqdist.transport.own_address import bind_free, bindable


class Reserved:
    """A reserved port of this host, until `close`.

    Attributes:
      address: "host:port".
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Reserve a port. Raises UnknownError if the port is in use, or `host` is not an address of this host.

        Args:
          host: an address, or the name of an interface.
          port: the port; 0: a free port.
        """
        host = bindable(host)
        with socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET) as bound:
            try:
                if port:
                    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    bound.bind((host, port))
                else:
                    # The option is set only afterwards, because with it two launchers could reserve the same port of a range.
                    bind_free(bound, host)
                    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            except OSError as error:
                raise UnknownError(f"could not bind {join_address(host, port)}: {error.strerror}") from None
            self.address = join_address(host, bound.getsockname()[1])
            self._descriptor = bound.detach()

    def close(self) -> None:
        """Release the port. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

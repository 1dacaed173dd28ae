"""Reserved ports for child processes. The launcher knows the port of a child before the child
starts, and a restarted child has the same port.

The launcher reserves a port by binding a socket that never listens. The kernel then gives the port
to no process that requests a free port, but a child that sets SO_REUSEADDR, as ZeroMQ does, may
bind the port. While no child listens, the kernel refuses connections, so that a client knows at
once that the server does not run.
"""

from __future__ import annotations

import os
import socket

from zmqdist.addresses import is_ipv6, join_address
from zmqdist.errors import UnknownError
from zmqdist.transport.own_address import bind_free, bindable


def bound_socket(host: str, port: int, hint: str = "") -> socket.socket:
    """Return a TCP socket that is bound to a port of `host`, to a free one if `port` is 0.

    Raises:
      UnknownError: the port cannot be bound. The text ends with `hint`.
    """
    with socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET) as bound:
        try:
            if port:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind((host, port))
            else:
                bind_free(bound, host)
        except OSError as error:
            raise UnknownError(
                f"could not bind {join_address(host, port)}: {error.strerror}{hint}"
            ) from None
        return socket.socket(fileno=bound.detach())


class Reserved:
    """A port of this host, which is reserved until `close`.

    Attributes:
      address: "host:port".
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Reserve a port. Raises UnknownError if the port is in use, or if `host` is not an address
        of this host.

        Args:
          host: an address, or the name of an interface.
          port: the port. 0 means a free port.
        """
        host = bindable(host)
        bound = bound_socket(host, port)
        # Set SO_REUSEADDR, which lets a child bind the port, only after the bind to a free port, so
        # that no two launchers reserve one port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.address = join_address(host, bound.getsockname()[1])
        self._descriptor = bound.detach()

    def close(self) -> None:
        """Release the port. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

"""A link of few bytes per second, as a proxy of TCP: what it holds waits in small buffers, as
before a real slow link."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Final

MBIT: Final = 1e6 / 8
"""Bytes per second."""
BUFFER_BYTES: Final = 8192
PIECE_BYTES: Final = 2048
STEP_S: Final = 0.2


class SlowLink:
    """A link that carries `rate` bytes per second in each direction of each connection.

    Attributes:
      address: where it listens.
      connections: how many connections it has passed on. With one client, more than one means that
        a connection was lost.
      carried: bytes that have passed, in both directions together.
    """

    def __init__(self, server: str, rate: float = MBIT) -> None:
        host, _, port = server.removeprefix("zmq://").rpartition(":")
        self.connections = self.carried = 0
        self._server, self._rate = (host, int(port)), rate
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = self._narrow()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._ended = threading.Event()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._begin(self._accept)

    def __enter__(self) -> SlowLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
        for end in (self._listener, *self._open):
            end.close()

    def _begin(self, fn, *args) -> None:  # type: ignore[no-untyped-def]
        thread = threading.Thread(target=fn, args=args, name="slow-link")
        self._threads.append(thread)
        thread.start()

    def _narrow(self) -> socket.socket:
        end = socket.socket()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        return end

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was shut down
            while not self._ended.is_set():
                near, far = self._listener.accept()[0], self._narrow()
                self._open += (near, far)
                with contextlib.suppress(OSError):
                    far.connect(self._server)
                    self.connections += 1
                    self._begin(self._carry, near, far)
                    self._begin(self._carry, far, near)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        free_at = 0.0
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                now = time.monotonic()
                free_at = max(now, free_at) + len(data) / self._rate
                self._ended.wait(free_at - now)
                target.sendall(data)
                self.carried += len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

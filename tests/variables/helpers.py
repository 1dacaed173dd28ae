"""A wire that can be held and cut: it stands between a client and a ps, byte for byte."""

from __future__ import annotations

import contextlib
import socket
import threading

from zmqdist.transport.endpoint import split


class Wire:
    """Takes connections at `address` and hands on what they say to `target`, and back.

    Attributes:
      holding: what the ps says goes nowhere.
      taken: connections so far.
    """

    def __init__(self, target: str) -> None:
        self._target = split(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.holding = False
        self.taken = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections; new ones are taken."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for each in pair:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all, and take no more."""
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._pairs.append((near, far))
            self.taken += 1
            threading.Thread(target=self._copy, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._copy, args=(far, near, True), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not (answers and self.holding):
                    sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        source.close()

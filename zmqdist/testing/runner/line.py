"""Messages between the parent and one process: a word, facts that JSON can hold, and payloads as bytes.

A socket pair that only these two have: what is unpickled from it was sent by a process of this run.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any


class ParentLine:
    """One end. Any thread may send; one at a time receives."""

    def __init__(self, fd: int) -> None:
        """Args:
        fd: of a stream socket; it belongs to the line from now on, and is not inherited.
        """
        os.set_inheritable(fd, False)
        self._connection = Connection(fd)
        self._sending = threading.Lock()

    def send(self, word: str, facts: Any = None, payloads: Sequence[Any] = ()) -> None:
        """Raises OSError when the other end is closed."""
        with self._sending:
            self._connection.send_bytes(json.dumps([word, facts, len(payloads)]).encode())
            for payload in payloads:
                self._connection.send_bytes(payload)

    def receive(self) -> tuple[str, Any, list[bytes]]:
        """Wait for the next message. Raises EOFError or OSError when the other end is closed."""
        word, facts, count = json.loads(self._connection.recv_bytes())
        return word, facts, [self._connection.recv_bytes() for _ in range(count)]

    def poll(self, timeout_s: float | None) -> bool:
        """Whether something can be received within this time; None waits for ever."""
        return self._connection.poll(timeout_s)

    def close(self) -> None:
        """Idempotent. Nobody may be receiving: that would not wake them."""
        self._connection.close()


def pair() -> tuple[ParentLine, int]:
    """The parent's end, and the descriptor of the other one."""
    ours, theirs = socket.socketpair()
    return ParentLine(ours.detach()), theirs.detach()

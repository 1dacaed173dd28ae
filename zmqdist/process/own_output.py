"""The copy of what children write to this process's own standard output and error.

A thread writes it, because a terminal or pipe without a reader would stop the loop. A child whose
bytes cannot be written waits, as it would if it wrote to the pipe itself: nothing is lost, and at
most UNWRITTEN_BYTES_MAX wait here.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Final

UNWRITTEN_BYTES_MAX: Final = 1 << 20
CLOSE_S: Final = 2.0
"""Seconds for the last bytes, if the reader of the pipe is slow."""


class OwnOutput:
    """Writes to the descriptors 1 and 2 of this process.

    Args:
      on_room: called in the writing thread when bytes may be passed to `write` again.
    """

    def __init__(self, on_room: Callable[[], object]) -> None:
        self._on_room = on_room
        self._chunks: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unwritten = 0
        self._is_full = False
        self._thread: threading.Thread | None = None

    @property
    def is_full(self) -> bool:
        """Whether the caller must wait for `on_room`."""
        with self._lock:
            self._is_full = self._unwritten > UNWRITTEN_BYTES_MAX
            return self._is_full

    def write(self, descriptor: int, data: bytes) -> None:
        """Have the thread write these bytes. Does not wait."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write_all, name="zmqdist-output", daemon=True
            )
            self._thread.start()
        with self._lock:
            self._unwritten += len(data)
        self._chunks.put((descriptor, data))

    def close(self) -> None:
        """Wait at most CLOSE_S until all is written."""
        if self._thread is not None:
            self._chunks.put(None)
            self._thread.join(CLOSE_S)

    def _write_all(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            descriptor, data = chunk
            rest = memoryview(data)
            with contextlib.suppress(OSError):  # such as a closed pipe
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            with self._lock:
                self._unwritten -= len(data)
                has_room = self._is_full and self._unwritten <= UNWRITTEN_BYTES_MAX // 2
                if has_room:
                    self._is_full = False
            if has_room:
                self._on_room()

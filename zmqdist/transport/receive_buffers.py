"""Private memory for large arrays that this process receives or copies. The memory is reused when
no array refers to it any more.

Touching fresh memory takes several times as long as writing to used memory, and the C library
returns large blocks to the system at once. So this module keeps the memory of collected arrays for
the next array of about the same size, up to RECEIVED_IDLE_BYTES_MAX.

Not here: memory that processes share (shm_pool.py).
"""

from __future__ import annotations

import os
from collections import deque
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from zmqdist.limits import RECEIVED_IDLE_BYTES_MAX
from zmqdist.transport.shm_mapping import Exporter

_KEPT_BYTES_MIN = 2**20
"""Bytes. Smaller arrays get no memory of the pool, because the C library itself keeps smaller freed
blocks for later use."""


class ReceivedMemory(Exporter):
    """The memory of one array. The array and its views keep this object alive; its finalizer gives
    the memory back to the pool."""

    __slots__ = ("_memory", "_pool")

    def __init__(self, memory: NDArray[np.uint8], nbytes: int) -> None:
        super().__init__(memory.__array_interface__["data"][0], nbytes, writable=True)
        self._memory = memory
        self._pool = _pool

    def __del__(self) -> None:
        self._pool.give_back(self._memory)


class _Pool:
    """Free memory in the order in which it was given back. `give_back` takes no lock, because
    finalizers call it at any point of any thread.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self._free: list[NDArray[np.uint8]] = []
        self._returned: deque[NDArray[np.uint8]] = deque()

    def give_back(self, memory: NDArray[np.uint8]) -> None:
        if (
            memory.nbytes + sum(other.nbytes for other in tuple(self._returned))
            <= RECEIVED_IDLE_BYTES_MAX
        ):
            self._returned.append(memory)

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        with self.lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            while sum(memory.nbytes for memory in self._free) > RECEIVED_IDLE_BYTES_MAX:
                del self._free[0]
            for index in reversed(range(len(self._free))):
                if nbytes <= self._free[index].nbytes <= nbytes + nbytes // 4:
                    return self._free.pop(index)
        return np.empty(nbytes, np.uint8)


_pool = _Pool()


def memory_for(nbytes: int) -> NDArray[np.uint8]:
    """Return `nbytes` uninitialized bytes that no other array uses. Raises MemoryError."""
    if nbytes < _KEPT_BYTES_MIN:
        return np.empty(nbytes, np.uint8)
    return ReceivedMemory(_pool.take(nbytes), nbytes).array()


def _in_child() -> None:
    _pool.lock = Lock()


os.register_at_fork(after_in_child=_in_child)

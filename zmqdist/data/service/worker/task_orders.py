"""What a worker and its processes of data tasks say to each other (task_process.py, task_main.py),
and the method that readers call. This module loads no operators.
"""

from __future__ import annotations

import mmap
from typing import Any, Final

import msgspec

from zmqdist.data.service.worker.tasks_machine import PROGRESS
from zmqdist.transport.keys import KeyPair

ELEMENTS: Final = "zmqdist.data.elements"

ROWS_BYTES: Final = 1 << 20
"""The size of the shared memory. Only those pages of it that are written take memory."""

HAND_BACK: Final = b"hand back"
REFUSE: Final = b"refuse"
FINISHED: Final = b"finished"
ANSWERED: Final = b"answered"

ANSWERS_S: Final = 2.0
"""Seconds between the last reply of a task, or a later look that found replies unsent, and the next
look."""


class Surroundings(msgspec.Struct, array_like=True):
    """The first message from the worker to a process of data tasks.

    Attributes:
      incarnation: the incarnation of the worker.
      worker: address of the worker, for error texts.
      host: address that the listening sockets are bound to.
      key: the key pair that the sockets show, as the worker publishes it; None without CURVE. The
        key in the folder may have been replaced.
    """

    incarnation: int
    dispatcher: str
    dispatcher_timeout_s: float
    worker: str
    host: str
    cache_bytes: int
    key: KeyPair | None


class Begin(msgspec.Struct, array_like=True):
    """The first message about a task from the worker to the task's process.

    Attributes:
      task: definition of the task, as the dispatcher sent it.
      row: the number of the task's row in the shared memory.
      state: random number of the dispatcher's durable state.
      failure: error code and text of the crash of the previous process of this task; None if there
        was no crash.
      for_good: whether the task has failed for good, so that every request gets `failure`.
        Otherwise only one request gets it.
      finished: whether the task has ended, so that every request gets END.
    """

    task: list[Any]
    row: int
    state: int
    failure: tuple[int, str] | None = None
    for_good: bool = False
    finished: bool = False


def row(memory: mmap.mmap, number: int) -> memoryview:
    """Return a row of the shared memory: PROGRESS numbers."""
    return memoryview(memory).cast("Q")[number * PROGRESS : (number + 1) * PROGRESS]


def progress_of_replies(memory: mmap.mmap) -> memoryview:
    """Return the number in the shared memory that a process without tasks changes as its last
    replies move on."""
    return memoryview(memory).cast("Q")[-1:]


def tasks_ended(memory: mmap.mmap) -> memoryview:
    """Return the number in the shared memory that counts the dropped tasks whose user code has
    ended."""
    return memoryview(memory).cast("Q")[-2:-1]

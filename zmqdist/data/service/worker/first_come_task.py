"""The runner of a task that serves requests in order of arrival. A thread runs the pipeline and
fills the machine's buffer (first_come_machine.py).

The thread starts with the first request. A request takes the elements in the buffer at once. If the
buffer is empty, the request waits. Once the thread has computed an element, it has the reply sent a
little later, so that a fast pipeline sends many elements in one reply. After `close` the thread may
compute one more element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence
from itertools import chain
from math import inf
from typing import Any

from zmqdist import clock as time
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service.elements import fits, is_scalar
from zmqdist.data.service.task_errors import TaskFailure
from zmqdist.data.service.worker.first_come_machine import FirstComeBuffer
from zmqdist.data.service.worker.task_runner import (
    BUFFER_ELEMENTS_MAX,
    BUFFER_ELEMENTS_MIN,
    BufferRunner,
    DescribeError,
)
from zmqdist.data.service.worker.tasks_machine import TAKEN


class FirstComeRunner(BufferRunner[FirstComeBuffer]):
    """Runs a task that serves requests in order of arrival."""

    def __init__(
        self,
        name: str,
        open: Callable[[], DatasetIterator],
        finished: Callable[[], None],
        describe_error: DescribeError,
        progress: MutableSequence[int],
        failed: TaskFailure | None = None,
    ) -> None:
        """Create the runner. Its thread starts with the first request, or with `start`.

        Args:
          open: a function that opens the pipeline. The runner's thread calls it.
          finished: a function that is called once, in any thread, when the last element has been
            taken.
          describe_error: a DescribeError (task_runner.py), which makes the errors that readers
            get.
          progress: the task's progress (tasks_machine.py), which this object updates.
          failed: the crash of an earlier process of this task. One request gets this error before
            any element, or every request if the task has failed for good.
        """
        buffer = FirstComeBuffer(BUFFER_ELEMENTS_MIN, fitting)
        super().__init__(name, open, describe_error, buffer)
        self._progress = progress
        self._finished = finished
        self._started_at = inf
        self._taken_before = progress[TAKEN]
        if failed is not None and failed.for_good:
            self._machine.end(failed.error)
        elif failed is not None:
            self._machine.failed(failed.error)

    def figures(self) -> tuple[Any, ...]:
        """Return the task's figures: the fields of a TaskReport
        (dispatcher/machine/events.py). The sizes are estimates, computed from the size of one
        recent element.
        """
        machine = self._machine
        elements_count = self._progress[TAKEN]
        computed = elements_count + len(machine.elements)
        room_wait_s, element_wait_s = self._room_waits.seconds, self._element_waits.seconds
        busy_s = max(0.0, time.monotonic() - self._started_at - room_wait_s)
        element_s = busy_s / computed if computed and not machine.finished else 0.0
        nbytes = elements_count * machine.element_bytes
        buffered = len(machine.elements)
        return (
            elements_count,
            nbytes,
            buffered,
            machine.room,
            element_s,
            room_wait_s,
            element_wait_s,
        )

    # -- the thread --------------------------------------------------------------------------------

    def _compute(self) -> None:
        if not self._machine.finished:
            self._started_at = time.monotonic()
            with self._open() as iterator:
                self._fill(iterator, self._machine.elements, self._note_failure)

    def _note_failure(self, error: BaseException) -> None:
        with self._lock:
            number = self._progress[TAKEN] + len(self._machine.elements)
            self._machine.failed(self._describe_error(error, f"element {number}"))

    # -- replies, in any thread --------------------------------------------------------------------

    def _note_reply(self) -> None:
        self._progress[TAKEN] = self._taken_before + self._machine.taken_count
        self._changed.notify()

    def _note_served(self) -> None:
        with self._lock:
            # If another thread is sending replies, the last elements may not have been sent yet.
            # That thread calls this method afterwards.
            finished = not self._is_sending and self._machine.has_finished()
        if finished:
            self._finished()


def fitting(elements: Iterable[Any], bytes_max: int) -> int:
    """Return how many of these elements fit into a reply of `bytes_max` bytes, at least 1. If the
    first element is a scalar, return the largest possible number without looking at the others,
    because scalars are small.
    """
    iterator = iter(elements)
    first = next(iterator)
    return BUFFER_ELEMENTS_MAX if is_scalar(first) else fits(chain((first,), iterator), bytes_max)

"""The runner of a task that serves requests in order of arrival. A thread runs the pipeline and
fills the machine's buffer (first_come_machine.py).

The thread starts with the first request. A request takes the elements in the buffer at once. If the
buffer is empty, the request waits. Once the thread has computed an element, it has the reply sent a
little later, so that a fast pipeline sends many elements in one reply. After `close` the thread may
compute one more element.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, MutableSequence
from itertools import chain
from math import inf
from typing import Any, Final

from zmqdist import clock as time
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service.elements import fits, is_scalar, weigh
from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.split_requests import WorkerDrained
from zmqdist.data.service.task_errors import TaskFailure
from zmqdist.data.service.worker.element_replies import TAKEN, DescribeError, ElementReply
from zmqdist.data.service.worker.first_come_machine import FirstComeBuffer
from zmqdist.data.service.worker.request_queue import RequestQueue

BUFFER_BYTES: Final = 32 << 20
BUFFER_ELEMENTS_MAX: Final = 4096
BUFFER_ELEMENTS_MIN: Final = 2


class FirstComeRunner:
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
          describe_error: a DescribeError (element_replies.py), which makes the errors that readers
            get.
          progress: the task's progress (element_replies.py), which this object updates.
          failed: the crash of an earlier process of this task. One request gets this error before
            any element, or every request if the task has failed for good.
        """
        self._describe_error = describe_error
        self._progress = progress
        self._open = open
        self._finished = finished
        self._machine = FirstComeBuffer(BUFFER_ELEMENTS_MIN, fitting)
        self._bytes = 1
        self._started = inf
        self._idle_s = 0.0
        self._requests = RequestQueue(
            self._machine, describe_error, self._note_taken, self._end_if_finished
        )
        self._lock = self._requests.lock
        self._room = threading.Condition(self._lock)
        self._taken_before = progress[TAKEN]
        if failed is not None and failed.for_good:
            self._machine.end(failed.error)
        elif failed is not None:
            self._machine.failed(failed.error)
        self._thread = threading.Thread(target=self._run, name=f"zmqdist-task-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread before the first request, when the caller knows that a request will soon
        arrive."""
        if not self._thread.ident:
            self._thread.start()

    def ask(self, wanted: Wanted, reply: ElementReply) -> None:
        self.start()
        self._requests.ask(wanted, reply)

    def figures(self) -> tuple[Any, ...]:
        """Return the task's figures: the fields of a TaskReport
        (dispatcher/machine/status_rows.py). The sizes are estimates, computed from the size of one
        recent element.
        """
        machine = self._machine
        taken = self._progress[TAKEN]
        computed = taken + len(machine.elements)
        busy_s = max(0.0, time.monotonic() - self._started - self._idle_s)
        element_s = busy_s / computed if computed and not machine.ended else 0.0
        return taken, taken * self._bytes, len(machine.elements), machine.limit, element_s

    def expire(self, reply: ElementReply) -> None:
        self._requests.expire(reply)

    def close(self) -> None:
        with self._lock:
            self._machine.close()
            self._room.notify_all()
        self._requests.serve()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            if not self._machine.ended:
                self._started = time.monotonic()
                self._read(self._open())
        except BaseException as failure:  # opening or closing the pipeline has failed
            error = failure
        with self._lock:
            self._machine.end(error)
        self._requests.serve()

    def _read(self, iterator: DatasetIterator) -> None:
        machine = self._machine
        elements, waiting, requests = machine.elements, machine.waiting, self._requests
        with iterator:
            while not machine.closed:
                try:
                    for element in iterator:
                        elements.append(element)
                        if waiting and not requests.woken:
                            requests.wake()
                        if len(elements) >= machine.limit and not self._wait_for_room(element):
                            break
                    else:
                        break
                except WorkerDrained:
                    break
                except BaseException as error:
                    with self._lock:
                        number = self._progress[TAKEN] + len(elements)
                        machine.failed(self._describe_error(error, f"element {number}"))
                    requests.wake()
                    self._wait()

    def _wait_for_room(self, element: Any) -> bool:
        """Weigh `element`, adapt the buffer's limit to its size, and wait until the buffer has
        room. Return False if the task is closed."""
        element_bytes = max(1, weigh(element))
        with self._lock:
            if not self._machine.closed:
                self._bytes = element_bytes
                self._machine.limit = min(
                    BUFFER_ELEMENTS_MAX, max(BUFFER_ELEMENTS_MIN, BUFFER_BYTES // element_bytes)
                )
        since = time.monotonic()
        self._wait()
        self._idle_s += time.monotonic() - since
        return not self._machine.closed

    def _wait(self) -> None:
        """Wait until another element may be computed, or the task is closed."""
        with self._lock:
            while not (self._machine.may_go_on or self._machine.closed):
                self._room.wait()

    # -- replies, in any thread --------------------------------------------------------------------

    def _note_taken(self) -> None:
        self._progress[TAKEN] = self._taken_before + self._machine.taken
        self._room.notify()

    def _end_if_finished(self) -> None:
        with self._lock:
            # If another thread is sending replies, the last elements may not have been sent yet.
            # That thread calls this method afterwards.
            finished = not self._requests.is_serving and self._machine.has_finished()
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

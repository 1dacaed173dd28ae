"""The runner of a task that serves requests in order of arrival. A thread runs the pipeline and fills the machine's buffer
(first_come_machine.py).

The thread starts with the first request. A request takes the elements in the buffer at once. If the buffer is empty, the request waits.
When the thread has then computed an element, it schedules the reply a little later, so that a fast pipeline sends many elements in one
reply. After `close` the thread may compute one more element.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, MutableSequence
from itertools import chain
from math import inf
from typing import Any, Final

from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service.elements import fits, is_scalar, weigh
from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.split_requests import WorkerDrained
from zmqdist.data.service.task_errors import TaskFailure
from zmqdist.data.service.worker.element_replies import TAKEN, DescribeError, ElementReply, send_reply, skip_late
from zmqdist.data.service.worker.first_come_machine import FirstComeBuffer

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
          finished: a function that is called once, in any thread, when the last element has been taken.
          describe_error: see element_replies.py.
          progress: the task's progress (element_replies.py), which this object updates.
          failed: the crash of an earlier process of this task. A request gets this error before any element.
        """
        self._describe_error = describe_error
        self._progress = progress
        self._open = open
        self._finished = finished
        self._machine = FirstComeBuffer(BUFFER_ELEMENTS_MIN, fitting)
        self._bytes = 1
        self._started = inf
        self._idle_s = 0.0
        self._woken = self._serving = False
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._taken_before = progress[TAKEN]
        if failed is not None and failed.for_good:
            self._machine.end(failed.error)
        elif failed is not None:
            self._machine.failed(failed.error)
        self._thread = threading.Thread(target=self._run, name=f"zmqdist-task-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread before the first request, when the caller knows that a request will soon arrive."""
        if not self._thread.ident:
            self._thread.start()

    def ask(self, wanted: Wanted, reply: ElementReply) -> None:
        self.start()
        with self._lock:
            self._machine.add_request(wanted, reply)
        self._serve()

    def figures(self) -> tuple[Any, ...]:
        """Return the fields of a TaskReport (machine/figures.py). The sizes are estimates from the last element that was weighed."""
        machine = self._machine
        taken = self._progress[TAKEN]
        computed = taken + len(machine.elements)
        busy_s = max(0.0, time.monotonic() - self._started - self._idle_s)
        element_s = busy_s / computed if computed and not machine.ended else 0.0
        return taken, taken * self._bytes, len(machine.elements), machine.limit, element_s

    def expire(self, reply: ElementReply) -> None:
        skip_late(self._machine.waiting, self._lock, reply)

    def close(self) -> None:
        with self._lock:
            self._machine.close()
            self._room.notify_all()
        self._serve()

    # -- the thread ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            if not self._machine.ended:
                self._started = time.monotonic()
                self._read(self._open())
        except BaseException as failure:  # opening or closing the pipeline raised an error
            error = failure
        with self._lock:
            self._machine.end(error)
        self._wake()
        self._serve()

    def _read(self, iterator: DatasetIterator) -> None:
        machine = self._machine
        elements, waiting = machine.elements, machine.waiting
        with iterator:
            while not machine.closed:
                try:
                    for element in iterator:
                        elements.append(element)
                        if waiting and not self._woken:
                            self._wake()
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
                    self._wake()
                    self._wait()

    def _wake(self) -> None:
        with self._lock:
            if not self._machine.waiting or self._woken:
                return
            self._woken = True
            reply = self._machine.waiting[0][1]
        reply.soon(self._serve)

    def _wait_for_room(self, element: Any) -> bool:
        """Weigh `element`, adapt the buffer's limit to its size, and wait until the buffer has room. Return False if the task is closed."""
        element_bytes = max(1, weigh(element))
        with self._lock:
            if not self._machine.closed:
                self._bytes = element_bytes
                self._machine.limit = min(BUFFER_ELEMENTS_MAX, max(BUFFER_ELEMENTS_MIN, BUFFER_BYTES // element_bytes))
        since = time.monotonic()
        self._wait()
        self._idle_s += time.monotonic() - since
        return not self._machine.closed

    def _wait(self) -> None:
        """Wait until another element may be computed, or the task is closed."""
        with self._lock:
            while not (self._machine.may_go_on or self._machine.closed):
                self._room.wait()

    # -- replies, in any thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Send all replies that are ready. Only one thread at a time sends replies, because they must be sent in the order in which their
        elements were taken.
        """
        machine = self._machine
        with self._lock:
            if self._serving:
                return  # the serving thread checks for further replies before it returns
            self._serving = True
        while True:
            with self._lock:
                self._woken = False
                while machine.waiting and not machine.waiting[0][1].wanted():
                    machine.waiting.popleft()
                answer = machine.next_reply()
                if answer is None:
                    self._serving = False
                    finished = machine.has_finished()
                    break
                self._progress[TAKEN] = self._taken_before + machine.taken
                self._room.notify()
            send_reply(answer)
        if finished:
            self._finished()


def fitting(elements: Iterable[Any], bytes_max: int) -> int:
    """Return how many of these elements fit into a reply of `bytes_max` bytes. The result is at least 1."""
    iterator = iter(elements)
    first = next(iterator)
    return BUFFER_ELEMENTS_MAX if is_scalar(first) else fits(chain((first,), iterator), bytes_max)

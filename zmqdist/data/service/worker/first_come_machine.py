"""The machine of a task that serves requests in order of arrival: a buffer of elements.

Promises
    B1  Each element is sent in the reply to one request. Requests are served in order of arrival,
        with elements in the order of the pipeline. If the buffer has elements, a request gets its
        reply at once, with as many elements as it allows.
    B2  An error takes the place of its element: one request gets the error, and the next request
        gets the elements after it. While an error waits in the buffer, no further element is
        computed, so that a pipeline that can compute no element at all fails only once for each
        request.
    B3  After the last element every request gets END, and `has_finished` returns True once. If a
        pipeline could not be opened or has failed for good, every request gets its error instead of
        END.
    B4  The number of elements in the buffer is bounded.
    B5  `close` drops the buffer, and no request gets elements afterwards.

One thread computes elements and other threads take them. The callers hold a lock while they call a
method of FirstComeBuffer. Without the lock, the computing thread may only append to `elements`, up
to `room`. This is safe because appending is atomic, and because the other threads only remove
elements from the left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from zmqdist.data.service.reader.delivery import END, FAILED, SOME, Demand
from zmqdist.data.service.worker.task_replies import BufferedMachine, TaskReply
from zmqdist.errors import CancelledError


class ElementFailure(NamedTuple):
    """Stands in the buffer in place of an element whose computation raised."""

    error: BaseException


class FirstComeBuffer(BufferedMachine):
    """The elements of one task that wait for requests, and the requests that wait for elements.

    Args:
      elements_min: the value of `room` until the size of an element is known.
      fits: `fits(elements, bytes)` returns how many of the elements fit into a reply of this number
        of bytes. It returns at least 1.

    Attributes:
      elements: the elements that were computed and not taken yet.
      taken_count: number of elements that were taken, including failures.
    """

    def __init__(self, elements_min: int, fits: Callable[[Iterable[Any], int], int]) -> None:
        super().__init__(elements_min)
        self.elements: deque[Any] = deque()
        self.taken_count = 0
        self._fits = fits
        self._failures = 0
        self._finished = False

    # -- called by the thread that computes elements -----------------------------------------------

    def may_add(self) -> bool:
        return not self._failures and len(self.elements) < self.room

    def failed(self, error: BaseException) -> None:
        """Record that computing the next element raised `error`."""
        self.elements.append(ElementFailure(error))
        self._failures += 1

    def close(self) -> None:
        super().close()
        self.room = 0
        self.elements.clear()

    # -- called by the threads that take elements --------------------------------------------------

    def next_reply(self) -> TaskReply | None:
        if not self.waiting or not (self.elements or self.finished):
            return None
        demand, reply = self.waiting.popleft()
        if self.elements and not self.closed:
            return self._take(demand, reply)
        if self.error is not None:
            return TaskReply(reply, FAILED, self.error)
        if self.closed:
            return TaskReply(reply, FAILED, CancelledError("the task was stopped"))
        return TaskReply(reply, END)

    def has_finished(self) -> bool:
        """Return whether the pipeline has ended, and its last element has been taken. Return True
        only once, and never after `close` or after the pipeline has failed.
        """
        finished = (
            self.finished
            and not (self.elements or self.closed or self._finished)
            and self.error is None
        )
        self._finished = self._finished or finished
        return finished

    def _take(self, demand: Demand, reply: Any) -> TaskReply:
        elements = self.elements
        popleft = elements.popleft
        count = min(len(elements), demand.elements_max)
        # Take the elements by index, because an iterator over the deque raises RuntimeError once
        # the computing thread has appended an element.
        count = min(count, self._fits((elements[at] for at in range(count)), demand.bytes_max))
        batch: list[Any]
        if not self._failures:
            batch = [popleft() for _ in range(count)]
        else:
            batch = []
            while len(batch) < count and type(elements[0]) is not ElementFailure:
                batch.append(popleft())
            if not batch:
                self._failures -= 1
                self.taken_count += 1
                return TaskReply(reply, FAILED, popleft().error)
        self.taken_count += len(batch)
        return TaskReply(reply, SOME, batch)

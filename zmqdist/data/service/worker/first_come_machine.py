"""The buffer of a task that serves requests in order of arrival.

Promises
    B1  Each element goes to one request. Requests get elements in the order of the pipeline, and replies in the order of arrival. Elements
        in the buffer go out at once, as many in one reply as the request allows.
    B2  An error takes the place of its element: one request gets the error, and the next request gets the elements after it. While an
        error waits in the buffer, no further element is computed: a pipeline that cannot work at all fails once for each request, and no
        more often.
    B3  At the end every request gets END; `has_finished` is True once, when the last element was taken. A pipeline that could not be
        opened, or that has failed for good, has no end: every request gets its error.
    B4  The number of elements in the buffer is bounded.
    B5  After `close` no request gets elements: the buffer is dropped.

One thread computes elements and other threads take them. The callers hold a lock around each call of this class. Exception: between the
calls, the computing thread appends to `elements`, up to `limit`, without the lock. Appending is atomic, and no other thread changes that
end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.worker.task_replies import GiveElements, GiveEnd, GiveError, TaskReply
from zmqdist.errors import CancelledError


class ElementFailure(NamedTuple):
    """Stands in the buffer in place of an element whose computation raised."""

    error: BaseException


class FirstComeBuffer:
    """Elements that wait for requests, and requests that wait for elements. `reply` is any object by which the caller identifies a request.

    Args:
      elements_min: the initial limit, before the size of an element is known.
      fits: `fits(elements, bytes)` returns how many of these elements fit into a reply of so many bytes, at least one.

    Attributes:
      elements: the elements that were computed and not taken.
      waiting: the requests, the next one to be served first.
      limit: how many elements may wait in the buffer.
      taken: number of elements that were taken, failures included.
      closed: the task was dropped: no further element is to be computed.
    """

    def __init__(self, elements_min: int, fits: Callable[[Iterable[Any], int], int]) -> None:
        self.elements: deque[Any] = deque()
        self.waiting: deque[tuple[Wanted, Any]] = deque()
        self.limit = elements_min
        self.taken = 0
        self.closed = False
        self._fits = fits
        self._failures = 0
        self._over = False
        self._finished = False
        self._error: BaseException | None = None

    # -- called by the thread that computes elements ------------------------------------------------------------------------

    @property
    def may_go_on(self) -> bool:
        """Whether another element may be computed."""
        return not self._failures and len(self.elements) < self.limit

    @property
    def ended(self) -> bool:
        """Whether no further element will be computed."""
        return self._over

    def failed(self, error: BaseException) -> None:
        """Note that computing the next element raised `error`."""
        self.elements.append(ElementFailure(error))
        self._failures += 1

    def end(self, error: BaseException | None = None) -> None:
        """Note that there are no more elements, or, with an error, that no further element can be computed."""
        self._over = True
        self._error = self._error or error

    def close(self) -> None:
        """Drop the buffer, because the task was dropped."""
        self.closed = self._over = True
        self.limit = 0
        self.elements.clear()

    # -- called by the threads that take elements ------------------------------------------------------------------------------

    def add_request(self, wanted: Wanted, reply: Any) -> None:
        """Add a request; `next_reply` returns its reply."""
        self.waiting.append((wanted, reply))

    def next_reply(self) -> TaskReply | None:
        """Return the next reply to send; None if no request can be served now."""
        if not self.waiting or not (self.elements or self._over):
            return None
        wanted, reply = self.waiting.popleft()
        if self.elements and not self.closed:
            return self._take(wanted, reply)
        if self._error is not None:
            return GiveError(reply, self._error)
        return GiveError(reply, CancelledError("the task was stopped")) if self.closed else GiveEnd(reply)

    def has_finished(self) -> bool:
        """Return whether the last element has been taken. Returns True only once."""
        finished = self._over and not (self.elements or self.closed or self._finished) and self._error is None
        self._finished = self._finished or finished
        return finished

    def _take(self, wanted: Wanted, reply: Any) -> TaskReply:
        elements = self.elements
        popleft = elements.popleft
        count = min(len(elements), wanted.elements_max)
        # By their positions, because an iterator over a deque raises RuntimeError once the computing thread has appended.
        count = min(count, self._fits((elements[at] for at in range(count)), wanted.bytes_max))
        taken: list[Any]
        if not self._failures:
            taken = [popleft() for _ in range(count)]
        else:
            taken = []
            while len(taken) < count and type(elements[0]) is not ElementFailure:
                taken.append(popleft())
            if not taken:
                self._failures -= 1
                self.taken += 1
                return GiveError(reply, popleft().error)
        self.taken += len(taken)
        return GiveElements(reply, taken)

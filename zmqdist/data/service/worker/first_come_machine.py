"""The buffer of a task whose elements go to whoever asks first.

Promises
    B1  Each element goes to one question, in the order in which they were made, and questions are answered in their order. What is there
        goes out at once, as many together as the question wants.
    B2  An error costs its element: one question gets it, and the next goes on behind it. Nothing is made ahead of a failure that nobody has
        taken: a pipeline that cannot work at all fails as often as it is asked, and no more.
    B3  At the end every question is answered so; that the last element was taken is said once. A pipeline that could not be opened, or that
        died for good, has no end: every question gets its error.
    B4  What is made and not taken is bounded.
    B5  After `close` no question gets elements: what was made is gone.

One thread makes elements and others take them, with a lock around each call here. Between the calls the thread adds to `elements`, up to
`limit`, without the lock: appending is one step, and nobody else touches that end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.worker.task_answers import GiveElements, GiveEnd, GiveError, TaskAnswer
from zmqdist.errors import CancelledError


class ElementFailure(NamedTuple):
    """In place of an element: what making it raised."""

    error: BaseException


class FirstComeBuffer:
    """See the module's docstring. What stands for a question, `reply`, is the caller's.

    Args:
      elements_min: so many elements may be made ahead before any is weighed.
      fits: how many of these elements make an answer of so many bytes, at least one.

    Attributes:
      elements: what was made and not taken.
      waiting: the questions, the one that is answered next first.
      limit: so many elements may be made ahead.
      taken: elements that went out, failures too.
      closed: nothing more is to be made.
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

    # -- who makes elements -------------------------------------------------------------------------------------------------

    @property
    def may_go_on(self) -> bool:
        """Whether another element may be made."""
        return not self._failures and len(self.elements) < self.limit

    @property
    def ended(self) -> bool:
        """Whether no element will be made any more."""
        return self._over

    def failed(self, error: BaseException) -> None:
        """Making the next element raised this."""
        self.elements.append(ElementFailure(error))
        self._failures += 1

    def end(self, error: BaseException | None = None) -> None:
        """There are no more; with an error, none can be made."""
        self._over = True
        self._error = self._error or error

    def close(self) -> None:
        """The task was dropped."""
        self.closed = self._over = True
        self.limit = 0
        self.elements.clear()

    # -- who takes them -----------------------------------------------------------------------------------------------------

    def asked(self, wanted: Wanted, reply: Any) -> None:
        """A question has come; `next_answer` answers it."""
        self.waiting.append((wanted, reply))

    def next_answer(self) -> TaskAnswer | None:
        """Return what to answer now; None: nothing can be answered."""
        if not self.waiting or not (self.elements or self._over):
            return None
        wanted, reply = self.waiting.popleft()
        if self.elements and not self.closed:
            return self._take(wanted, reply)
        if self._error is not None:
            return GiveError(reply, self._error)
        return GiveError(reply, CancelledError("the task was stopped")) if self.closed else GiveEnd(reply)

    def has_finished(self) -> bool:
        """Whether the last element has been taken; True once."""
        finished = self._over and not (self.elements or self.closed or self._finished) and self._error is None
        self._finished = self._finished or finished
        return finished

    def _take(self, wanted: Wanted, reply: Any) -> TaskAnswer:
        elements = self.elements
        popleft = elements.popleft
        count = min(len(elements), wanted.elements_max)
        count = min(count, self._fits(islice(elements, count), wanted.bytes_max))
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

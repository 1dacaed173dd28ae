"""What the machines share that reply to requests in order of arrival."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from zmqdist.data.service.reader.delivery import Demand


class TaskReply(NamedTuple):
    """The reply to one request of a reader.

    Attributes:
      reply: the handle of the request, an ElementReply (task_runner.py).
      kind: SOME, END, SKIP or FAILED (reader/delivery.py).
      value: the elements in order (SOME), or the error (FAILED): an element could not be computed,
        the task cannot continue, or the request was wrong.
      tag: rounds_machine.py and portions_machine.py define it for their kinds of tasks.
    """

    reply: Any
    kind: int
    value: Any = None
    tag: Any = None


class ServingMachine:
    """Base class of the machines that reply to requests in order of arrival. A caller identifies
    its request by any object, `reply`.

    Attributes:
      waiting: the requests, in the order in which they will be served.
      closed: whether the task was dropped, so that no further element may be computed.
      finished: whether no further element will be computed.
      error: the error that has ended the pipeline. None while there is none.
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[Demand, Any]] = deque()
        self.closed = self.finished = False
        self.error: BaseException | None = None

    def add_request(self, demand: Demand, reply: Any) -> None:
        """Add a request, to which `next_reply` will return the reply."""
        self.waiting.append((demand, reply))

    def next_reply(self) -> TaskReply | None:
        """Remove a request from `waiting`, and return the reply to it. Return None if no request
        waits or no reply is possible yet."""
        raise NotImplementedError

    def end(self, error: BaseException | None = None) -> None:
        """Record that the pipeline has ended. With an error, record that it has failed and that no
        further element can be computed. Only the first error counts."""
        self.finished = True
        self.error = self.error or error

    def close(self) -> None:
        """Drop the elements, because the task was dropped."""
        self.closed = self.finished = True


class BufferedMachine(ServingMachine):
    """Base class of the machines with a bounded buffer of elements.

    Attributes:
      room: how many elements the deque to which the thread appends may have.
      element_bytes: the size of the element that was weighed last.
    """

    def __init__(self, elements_min: int) -> None:
        super().__init__()
        self.room = elements_min
        self.element_bytes = 1

    def may_add(self) -> bool:
        """Return whether another element may be computed."""
        raise NotImplementedError

    def weighed(self, element_bytes: int, elements_max: int) -> None:
        """Record the size of an element, and how many elements of this size the buffer may have."""
        self.element_bytes = element_bytes
        self.room = elements_max

"""The interfaces by which a task replies to readers in this process and in other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from zmqdist.data.service.compression import compress_batch
from zmqdist.data.service.worker.tasks_machine import PROGRESS

TAKEN, SOURCE, POSITION = range(PROGRESS)
"""Indexes into a task's progress. At TAKEN is the number of elements that readers have taken. At
POSITION is the last position that the task got, and at SOURCE is 1 + the number of its source, or 0
if the task has got no position yet."""


DescribeError: TypeAlias = Callable[[BaseException, str], BaseException]
"""`describe_error(error, subject)` returns the error that readers get for an error of a pipeline.
`subject` is the element that could not be computed, for example "element 5".
"""


class Packed:
    """Elements that are sent to several readers. They are packed once, and compressed once for each
    codec."""

    def __init__(self, value: Any) -> None:
        """Take the result of elements.pack, which the caller must not change afterwards."""
        self._forms: dict[str, Any] = {"": value}

    def form(self, codec: str) -> Any:
        """Return the elements compressed with `codec`. Any thread may call this. If two threads
        compress at the same time, only one of the results is cached.
        """
        encoded = self._forms.get(codec)
        if encoded is None:
            encoded = self._forms[codec] = compress_batch(self._forms[""], codec)
        return encoded


class ElementReply(Protocol):
    """The protocol of an object that sends the reply to one request.

    Attributes:
      answered: whether the task has called `answer`.
    """

    answered: bool

    def wanted(self) -> bool:
        """Return whether the reader still waits for the reply."""

    def soon(self, fn: Callable[[], None]) -> bool:
        """Have the loop that sends this reply call `fn` a little later, so that the reply can
        contain elements that are computed meanwhile. Return False if that loop has ended and will
        not call `fn`.
        """

    def answer(self, kind: int, value: Any = None, tag: Any = None) -> None:
        """Send the reply, whose fields are those of a TaskReply. With the kind SOME, `value` is a
        list of elements, or Packed. The task calls this once, in any thread.
        """

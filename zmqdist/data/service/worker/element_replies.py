"""The interfaces by which a task replies to readers in this process and in other processes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from zmqdist.data.service.batch_compression import compress_batch
from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.worker.task_replies import GiveElements, GiveEnd, GiveError, GiveSkip, TaskReply
from zmqdist.data.service.worker.tasks_machine import PROGRESS

TAKEN, SOURCE, POSITION = range(PROGRESS)
"""Indexes into a task's progress. At TAKEN is the number of elements that readers have taken. At POSITION is the last position that the
task got, and at SOURCE is 1 + the number of its source, or 0 if the task has got no position yet."""


DescribeError: TypeAlias = Callable[[BaseException, str], BaseException]
"""`describe_error(error, subject)` returns the error that readers get for an error of a pipeline. `subject` is the element that could not
be computed, for example "element 5".
"""


class Packed:
    """Elements for several readers. They are packed once, and compressed once for each codec."""

    def __init__(self, value: Any) -> None:
        """Take the result of elements.pack, which the caller must not change afterwards."""
        self._forms: dict[str, Any] = {"": value}

    def form(self, codec: str) -> Any:
        """Return the elements compressed with `codec`. Any thread may call this. If two threads compress at the same time, one result is
        cached.
        """
        encoded = self._forms.get(codec)
        if encoded is None:
            encoded = self._forms[codec] = compress_batch(self._forms[""], codec)
        return encoded


class ElementReply(Protocol):
    """The protocol of an object that sends the reply to one request. The task calls exactly one of its replying methods, once, in any
    thread.
    """

    answered: bool

    def wanted(self) -> bool:
        """Return whether the reader still waits for the reply."""

    def soon(self, fn: Callable[[], None]) -> None:
        """Call `fn` a little later in the loop that sends this reply, so that the reply can contain the elements that are computed in the
        meantime.
        """

    def elements(self, elements: list[Any], tag: Any = None) -> None:
        """Reply with some elements, in order. rounds_machine.py and portions_machine.py define the `tag` for their kinds of tasks."""

    def packed(self, batch: Packed) -> None:
        """Reply with elements that are packed already."""

    def end(self) -> None:
        """Reply that the task has no more elements."""

    def skip(self, tag: Any = None) -> None:
        """Reply that the task has no elements at the moment."""

    def fail(self, error: BaseException) -> None:
        """Reply that an element could not be computed, or that the task cannot continue."""


def send_reply(answer: TaskReply) -> None:
    """Send a reply on which a task's machine has decided."""
    reply: ElementReply = answer.reply
    match answer:
        case GiveElements(_, elements, tag):
            reply.elements(elements, tag)
        case GiveSkip(_, tag):
            reply.skip(tag)
        case GiveError(_, error):
            reply.fail(error)
        case GiveEnd():
            reply.end()


class Runner(Protocol):
    """The protocol of an object that runs one task."""

    def ask(self, wanted: Wanted, reply: ElementReply) -> None:
        """Reply to a request as soon as elements are ready. Does not block."""

    def expire(self, reply: ElementReply) -> None:
        """Reply with `skip` to a request whose waiting time is over, if it has no reply yet."""

    def close(self) -> None:
        """Stop the task, and reply to the waiting requests with an error. Does not wait for user code."""


def skip_late(waiting: deque[tuple[Wanted, ElementReply]], lock: threading.Lock, reply: ElementReply) -> None:
    """Reply with `skip` to a request whose waiting time is over, if it has no reply yet."""
    with lock:
        found = next((each for each in waiting if each[1] is reply), None)
        if found is None:
            return
        waiting.remove(found)
    reply.skip()

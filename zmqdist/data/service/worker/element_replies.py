"""The interfaces by which a task replies to readers in this process and in other processes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeAlias

from zmqdist.data.service.batch_compression import compress_batch
from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.worker.task_replies import (
    GiveElements,
    GiveEnd,
    GiveError,
    GiveSkip,
    TaskReply,
)
from zmqdist.data.service.worker.tasks_machine import PROGRESS
from zmqdist.errors import InternalError
from zmqdist.rpc.handler_errors import code_and_message

log = logging.getLogger("zmqdist.data")

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
    """The protocol of an object that sends the reply to one request. The task calls exactly one of
    `elements`, `packed`, `end`, `skip` and `fail`, once, in any thread.

    Attributes:
      answered: whether the task has called one of these methods.
    """

    answered: bool

    def wanted(self) -> bool:
        """Return whether the reader still waits for the reply."""

    def soon(self, fn: Callable[[], None]) -> bool:
        """Have the loop that sends this reply call `fn` a little later, so that the reply can
        contain elements that are computed meanwhile. Return False if that loop has ended and will
        not call `fn`.
        """

    def elements(self, elements: list[Any], tag: Any = None) -> None:
        """Reply with some elements, in order. rounds_machine.py and portions_machine.py define the
        `tag` for their kinds of tasks."""

    def packed(self, batch: Packed) -> None:
        """Reply with elements that are packed already."""

    def end(self) -> None:
        """Reply that the task has no more elements."""

    def skip(self, tag: Any = None) -> None:
        """Reply that the task has no elements at the moment."""

    def fail(self, error: BaseException) -> None:
        """Reply that an element could not be computed, or that the task cannot continue."""


class ReplySender:
    """Sends the replies of one task. If a bug prevents a reply, the request gets an INTERNAL error
    that names the task, so that no reader waits for ever. The task goes on with the other requests.
    """

    def __init__(self, describe_error: DescribeError) -> None:
        self._describe_error = describe_error
        self._has_logged = False

    def send(self, answer: TaskReply) -> None:
        """Carry out a reply that a machine has decided on. Does not raise."""
        self.attempt(answer.reply, partial(_carry_out, answer))

    def attempt(self, reply: ElementReply, answer: Callable[[], None]) -> None:
        """Call `answer`, which replies to the request of `reply`. If `answer` raises, reply with an
        error. Does not raise."""
        try:
            answer()
        except BaseException as error:
            failure = self.failure(error)
            if not reply.answered:
                reply.fail(failure)

    def failure(self, error: BaseException) -> BaseException:
        """Return the error for requests that cannot be served because of `error`. Only the first
        error of the task is logged, because a bug may fail each request.
        """
        _, text = code_and_message(error)
        failure = self._describe_error(InternalError(f"a bug in zmqdist: {text}"), "a reply")
        if not self._has_logged:
            self._has_logged = True
            log.error("requests of readers fail: %s", failure)
        return failure


def _carry_out(answer: TaskReply) -> None:
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
        """Stop the task, and reply to the waiting requests with an error. Does not wait for user
        code."""


def withdraw(waiting: deque[tuple[Wanted, ElementReply]], reply: ElementReply) -> bool:
    """Remove a request from the waiting requests. Return whether it was among them. Call it with
    the lock of the task held."""
    found = next((each for each in waiting if each[1] is reply), None)
    if found is not None:
        waiting.remove(found)
    return found is not None

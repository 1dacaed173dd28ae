"""How a task replies to a reader, in this process or another."""

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
"""Indexes into a task's progress. It holds the number of elements that readers have taken, 1 + the source of the last position that the
task got (0: none yet), and that position."""


DescribeError: TypeAlias = Callable[[BaseException, str], BaseException]
"""`describe_error(error, subject)` returns the error that readers get for an error of a pipeline. `subject` is the element that could not
be computed, for example "element 5".
"""


class Packed:
    """Elements for several readers: packed once, and compressed once for each codec."""

    def __init__(self, value: Any) -> None:
        """`value` is the result of elements.pack, and must not change."""
        self._forms: dict[str, Any] = {"": value}

    def form(self, codec: str) -> Any:
        """Return the elements compressed with `codec`. Two threads may compress at the same time: the result of one of them is kept."""
        encoded = self._forms.get(codec)
        if encoded is None:
            encoded = self._forms[codec] = compress_batch(self._forms[""], codec)
        return encoded


class ElementReply(Protocol):
    """Takes the reply to one request. The task calls exactly one of the replying methods, once, from any thread."""

    answered: bool

    def wanted(self) -> bool:
        """Return whether the reader still waits for the reply."""

    def soon(self, fn: Callable[[], None]) -> None:
        """Call `fn` a little later in the loop that sends this reply, so that the reply can carry the elements that are computed until
        then.
        """

    def elements(self, elements: list[Any], tag: Any = None) -> None:
        """Reply with some elements, in order. Each kind of task has its own `tag`: see rounds_machine.py and portions_machine.py."""

    def packed(self, batch: Packed) -> None:
        """Reply with elements that are packed already."""

    def end(self) -> None:
        """Reply that the task has no more elements."""

    def skip(self, tag: Any = None) -> None:
        """Reply that the task has no elements now."""

    def fail(self, error: BaseException) -> None:
        """Reply that an element could not be computed, or that the task cannot continue."""


def send_reply(answer: TaskReply) -> None:
    """Carry out a reply that a machine has decided on."""
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
    """Runs one task."""

    def ask(self, wanted: Wanted, reply: ElementReply) -> None:
        """Reply when there are elements. Does not block."""

    def expire(self, reply: ElementReply) -> None:
        """Reply with `skip` to a request whose time is over, if it still waits."""

    def close(self) -> None:
        """Stop the task; waiting requests get an error. Does not wait for user code."""


def skip_late(waiting: deque[tuple[Wanted, ElementReply]], lock: threading.Lock, reply: ElementReply) -> None:
    """Reply with `skip` to a request whose time is over, if it still waits."""
    with lock:
        found = next((each for each in waiting if each[1] is reply), None)
        if found is None:
            return
        waiting.remove(found)
    reply.skip()

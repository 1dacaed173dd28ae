"""What a reader asks of a task, and how it is answered: the same whether it is in this process or another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from zmqdist.data.service.batch_compression import squeeze
from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.worker.task_answers import GiveElements, GiveEnd, GiveError, GiveSkip, TaskAnswer
from zmqdist.data.service.worker.tasks_machine import PROGRESS

TAKEN, SOURCE, POSITION = range(PROGRESS)
"""What a task is at, in numbers: elements that readers have taken; 1 + the source, and its position, that it was given last."""


Named: TypeAlias = Callable[[BaseException, str], BaseException]
"""What readers are told of an error of a pipeline, given what it stands for: "element 5"."""


class Packed:
    """Elements that go to several readers: packed, and compressed for those elsewhere, once."""

    def __init__(self, value: Any) -> None:
        """`value` is what elements.pack made, and nobody changes it."""
        self._forms: dict[str, Any] = {"": value}

    def form(self, codec: str) -> Any:
        """As it travels with this codec. Two threads may both make it: then one of them wins."""
        encoded = self._forms.get(codec)
        if encoded is None:
            encoded = self._forms[codec] = squeeze(self._forms[""], codec)
        return encoded


class ElementReply(Protocol):
    """Where the answer goes. Exactly one of the methods that answer is called, once, from any thread."""

    answered: bool

    def wanted(self) -> bool:
        """Whether anybody still waits."""

    def soon(self, fn: Callable[[], None]) -> None:
        """Call `fn` a little later, where this reply is made: what is ready by then goes with it."""

    def elements(self, elements: list[Any], tag: Any = None) -> None:
        """Some elements, in order; `tag` says what they are parts of."""

    def packed(self, batch: Packed) -> None:
        """The same, packed before."""

    def end(self) -> None:
        """There is nothing more in this task."""

    def skip(self, tag: Any = None) -> None:
        """There is nothing now."""

    def fail(self, error: BaseException) -> None:
        """One element could not be computed, or the task cannot go on."""


def give(answer: TaskAnswer) -> None:
    """Carry out what the machine of a task has decided."""
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
    """One task at work."""

    def ask(self, wanted: Wanted, reply: ElementReply) -> None:
        """Answer when there is something. Never waits."""

    def expire(self, reply: ElementReply) -> None:
        """The time of a question is over: it is skipped if it still waits."""

    def close(self) -> None:
        """Stop; all who wait are told that it ended. Does not wait for user code."""


def skip_late(waiting: deque[tuple[Wanted, ElementReply]], lock: threading.Lock, reply: ElementReply) -> None:
    """The time of a question is over: it is skipped if it still waits."""
    with lock:
        found = next((each for each in waiting if each[1] is reply), None)
        if found is None:
            return
        waiting.remove(found)
    reply.skip()

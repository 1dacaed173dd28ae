"""The delivery machine for plain reading. It delivers batches of all tasks to the consumer in order
of arrival.

Promises
    F1  Each batch that arrives is delivered once. Batches of one task are delivered in the task's
        order.
    F2  If a worker or the dispatcher does not reply, the reader tries again. Every other error is
        delivered once, in the place of its batch.
    F3  Reading ends when no request is in flight and either the iteration has finished or all tasks
        that this reader reads have ended.
"""

from __future__ import annotations

from zmqdist.data.service.reader.delivery import (
    END,
    SOME,
    Deliver,
    Effect,
    Event,
    ReadingEnded,
    TaskReplied,
)
from zmqdist.data.service.reader.window_machine import TaskWindow, WindowDelivery
from zmqdist.data.service.retry import RETRIABLE
from zmqdist.errors import OpError, from_code


class PlainDelivery(WindowDelivery):
    """The delivery machine for plain reading. The docstring of the module gives the promises."""

    def __init__(self, reader: int, trainer: str, outstanding_max: int) -> None:
        """Start without tasks. TaskWindow explains the arguments."""
        super().__init__(TaskWindow(reader, trainer, outstanding_max))

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, TaskReplied):
            return self._answered(event, now) + self._next_effects()
        self._note(event, now)
        return self._next_effects()

    def _answered(self, event: TaskReplied, now: float) -> list[Effect]:
        source, error = event.source, event.error
        source.in_flight -= 1
        if event.kind == SOME:
            self._window.succeed(source)
            return [Deliver([event.value])]
        if error is not None and error.error_code not in RETRIABLE:
            return [Deliver([_from_worker(source.address, error)])]
        if error is not None:
            self._window.fail(source, now)
        else:
            self._window.outstanding -= 1
            source.exhausted = source.exhausted or event.kind == END
        return []

    def _next_effects(self) -> list[Effect]:
        if self._over or not self._is_consuming:
            return []
        window = self._window
        effects: list[Effect] = [*window.requests(window.available())]
        # promise F3: replies in flight may still bring elements
        if (self._finished and not window.has_in_flight) or window.exhausted:
            self._over = True
            effects.append(ReadingEnded(None))
        return effects


def _from_worker(address: str, error: OpError) -> OpError:
    """Return a task's permanent error, with the words of tf.data service before its own text."""
    text = f"Failed to get element from worker {address}: Failed to get an element, with a nonretryable error: "
    described = from_code(error.error_code, text + error.message)
    described.__cause__ = error.__cause__
    return described

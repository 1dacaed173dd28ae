"""The runner of a task that computes portions. The dispatcher gives the task portions for each
reader, and the task opens a pipeline for each portion.

The task has a lane for each reader. The lane's thread requests portions, runs their pipelines one
after the other, and puts the elements into the lane's buffer (portions_machine.py). The reply to a
request may have elements of several portions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from zmqdist import clock as time
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service.reader.delivery import END, Demand
from zmqdist.data.service.worker.portions_machine import PortionSegment, PortionsLane
from zmqdist.data.service.worker.task_runner import (
    BUFFER_ELEMENTS_MIN,
    BufferRunner,
    DescribeError,
    ElementReply,
    Runner,
)
from zmqdist.rpc.handler_errors import code_and_message

Portion: TypeAlias = tuple[int, int, int, int, int]
"""(number, repetition, first position, number of positions, elements to skip)"""


class PortionsRunner(Runner):
    """Runs a task that computes portions."""

    def __init__(
        self,
        name: str,
        open: Callable[[int, int, int], DatasetIterator],
        describe_error: DescribeError,
        more: Callable[[int, int], list[Portion]],
    ) -> None:
        """Create the runner. The thread of a lane starts with the first request of its reader.

        Args:
          open: `open(number, start, length)` opens the pipeline over the positions of this portion.
            A lane's thread calls it.
          describe_error: a DescribeError (task_runner.py), which makes the errors that readers
            get.
          more: `more(client, count)` returns the next portions for a client. It blocks until the
            dispatcher has a portion, and returns an empty list when no more portions will come. A
            lane's thread calls it.
        """
        self._new_lane = partial(_Lane, name, open, describe_error, more)
        self._lanes: dict[int, _Lane] = {}
        self._closed = False

    def ask(self, demand: Demand, reply: ElementReply) -> None:
        lane = self._lanes.get(demand.reader)
        if lane is None:
            if self._closed:
                reply.answer(END)
                return
            lane = self._lanes[demand.reader] = self._new_lane(demand.reader)
        lane.ask(demand, reply)

    def figures(self) -> tuple[Any, ...]:
        """Return the task's figures: the fields of a TaskReport
        (dispatcher/machine/events.py). The time for an element is reported as unknown. Waits are
        the mean of those of the readers' lanes.
        """
        lanes = [lane.figures() for lane in list(self._lanes.values())]
        *counts, room_s, element_s = map(sum, zip((0, 0, 0, 0, 0.0, 0.0), *lanes, strict=True))
        return (*counts, 0.0, room_s / max(1, len(lanes)), element_s / max(1, len(lanes)))

    def expire(self, reply: ElementReply) -> None:
        for lane in self._lanes.values():
            lane.expire(reply)

    def join(self) -> None:
        for lane in self._lanes.values():
            lane.join()

    def close(self) -> None:
        self._closed = True
        for lane in self._lanes.values():
            lane.close()


class _Lane(BufferRunner[PortionsLane]):
    """Computes the portions for one reader of a task."""

    def __init__(
        self,
        name: str,
        open: Callable[[int, int, int], DatasetIterator],
        describe_error: DescribeError,
        more: Callable[[int, int], list[Portion]],
        client: int,
    ) -> None:
        buffer = PortionsLane(BUFFER_ELEMENTS_MIN)
        super().__init__(f"{name}-{client}", open, describe_error, buffer)
        self._more = partial(more, client)

    def figures(self) -> tuple[int, int, int, int, float, float]:
        with self._lock:
            waits_s = self._room_waits.seconds, self._element_waits.seconds
            return (*self._machine.figures(), *waits_s)

    # -- the thread --------------------------------------------------------------------------------

    def _compute(self) -> None:
        machine = self._machine
        while not machine.closed:
            portions = self._more(machine.request_size(time.monotonic()))
            if not portions:
                return
            with self._lock:
                numbers = [number for number, *_ in portions]
                machine.portions_received(numbers, time.monotonic())
            for number, _, start, length, skip in portions:
                self._compute_portion(number, start, length, skip)

    def _compute_portion(self, number: int, start: int, length: int, skip: int) -> None:
        machine = self._machine
        with self._lock:
            while not machine.closed and not machine.may_begin():
                self._changed.wait()
            if machine.closed:
                return
            segment = machine.begin(number, skip)
        note_failure = partial(self._note_failure, segment, start, length)
        with self._open(number, start, length) as iterator:
            _leave_out(iterator, skip)
            has_ended = self._fill(iterator, segment.elements, note_failure)
        if has_ended:
            segment.is_complete = True
            self._wake()

    def _note_failure(
        self, segment: PortionSegment, start: int, length: int, error: BaseException
    ) -> None:
        """Put the error of an element into the buffer."""
        with self._lock:
            offset = segment.first + len(segment.elements)
        element = f"element {offset} of positions {start} to {start + length - 1}"
        failure = code_and_message(self._describe_error(error, element))
        with self._lock:
            self._machine.failed(segment, *failure)


def _leave_out(iterator: DatasetIterator, count: int) -> None:
    """Skip `count` elements of a pipeline. Elements whose computation raises an error count too."""
    for _ in range(count):
        try:
            next(iterator)
        except StopIteration:
            return
        except Exception:
            continue

"""The runner of a task that computes portions. The dispatcher gives the task portions for each
reader, and the task opens a pipeline for each portion.

The task has a lane for each reader. The lane's thread requests portions, runs their pipelines one
after the other, and puts the elements into the lane's buffer (portions_machine.py). The reply to a
request may have elements of several portions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from zmqdist import clock as time
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service.elements import weigh
from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.worker.element_replies import DescribeError, ElementReply
from zmqdist.data.service.worker.first_come_task import (
    BUFFER_BYTES,
    BUFFER_ELEMENTS_MAX,
    BUFFER_ELEMENTS_MIN,
)
from zmqdist.data.service.worker.portions_machine import PortionSegment, PortionsLane
from zmqdist.data.service.worker.request_queue import RequestQueue
from zmqdist.rpc.handler_errors import code_and_message

Portion: TypeAlias = tuple[int, int, int, int, int]
"""(number, repetition, first position, number of positions, elements to skip)"""


class PortionsRunner:
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
          describe_error: a DescribeError (element_replies.py), which makes the errors that readers
            get.
          more: `more(client, count)` returns the next portions for a client. It blocks until the
            dispatcher has a portion, and returns an empty list when no more portions will come. A
            lane's thread calls it.
        """
        self._name = name
        self._open = open
        self._describe_error = describe_error
        self._more = more
        self._lanes: dict[int, _Lane] = {}
        self._closed = False

    def ask(self, wanted: Wanted, reply: ElementReply) -> None:
        lane = self._lanes.get(wanted.reader)
        if lane is None:
            if self._closed:
                reply.end()
                return
            lane = self._lanes[wanted.reader] = _Lane(
                self._name, wanted.reader, self._open, self._describe_error, self._more
            )
        lane.requests.ask(wanted, reply)

    def figures(self) -> tuple[Any, ...]:
        """Return the task's figures: the fields of a TaskReport
        (dispatcher/machine/status_rows.py). The time for an element is reported as unknown.
        """
        lanes = [lane.figures() for lane in list(self._lanes.values())]
        return (*map(sum, zip((0, 0, 0, 0), *lanes, strict=True)), 0.0)

    def expire(self, reply: ElementReply) -> None:
        for lane in self._lanes.values():
            lane.requests.expire(reply)

    def close(self) -> None:
        self._closed = True
        for lane in self._lanes.values():
            lane.close()


class _Lane:
    """Computes the portions for one reader of a task.

    Attributes:
      requests: the requests of the reader.
    """

    def __init__(
        self,
        name: str,
        client: int,
        open: Callable[[int, int, int], DatasetIterator],
        describe_error: DescribeError,
        more: Callable[[int, int], list[Portion]],
    ) -> None:
        self._client = client
        self._open = open
        self._describe_error = describe_error
        self._more = more
        self._machine = PortionsLane(BUFFER_ELEMENTS_MIN)
        self.requests = RequestQueue(self._machine, describe_error, lambda: self._taken.notify())
        self._lock = self.requests.lock
        self._taken = threading.Condition(self._lock)
        threading.Thread(
            target=self._run, name=f"zmqdist-task-{name}-{client}", daemon=True
        ).start()

    def figures(self) -> tuple[int, int, int, int]:
        with self._lock:
            return self._machine.figures()

    def close(self) -> None:
        with self._lock:
            self._machine.close()
            self._taken.notify_all()
        self.requests.serve()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        machine, error = self._machine, None
        try:
            while not machine.closed:
                portions = self._more(self._client, machine.portions_wanted(time.monotonic()))
                if not portions:
                    break
                with self._lock:
                    machine.portions_received([each[0] for each in portions], time.monotonic())
                for number, _, start, length, skip in portions:
                    self._compute(number, start, length, skip)
        except BaseException as failure:
            error = failure
        with self._lock:
            machine.end(error)
        self.requests.serve()

    def _compute(self, number: int, start: int, length: int, skip: int) -> None:
        machine = self._machine
        with self._lock:
            while not machine.closed and not machine.may_begin():
                self._taken.wait()
            if machine.closed:
                return
            segment = machine.begin(number, skip)
        elements = segment.elements
        with self._open(number, start, length) as iterator:
            _leave_out(iterator, skip)
            while not machine.closed:
                try:
                    for element in iterator:
                        elements.append(element)
                        if machine.waiting and not self.requests.woken:
                            self.requests.wake()
                        if len(elements) >= machine.room:
                            self._weigh(element)
                            if not self._wait_for_room():
                                return
                    break
                except BaseException as error:
                    self._note(error, segment, f"positions {start} to {start + length - 1}")
                    if not self._wait_for_room():
                        return
        segment.done = True
        self.requests.wake()

    def _note(self, error: BaseException, segment: PortionSegment, where: str) -> None:
        """Put the error of an element into the buffer."""
        with self._lock:
            offset = segment.first + len(segment.elements)
        failure = code_and_message(self._describe_error(error, f"element {offset} of {where}"))
        with self._lock:
            self._machine.failed(segment, *failure)
        self.requests.wake()

    def _weigh(self, element: Any) -> None:
        """Compute from the size of `element` how many elements fit into the buffer."""
        element_bytes = max(1, weigh(element))
        fit = min(BUFFER_ELEMENTS_MAX, max(BUFFER_ELEMENTS_MIN, BUFFER_BYTES // element_bytes))
        with self._lock:
            if not self._machine.closed:
                self._machine.weighed(element_bytes, fit)

    def _wait_for_room(self) -> bool:
        """Wait until another element may be computed. Return False if the task is closed."""
        with self._lock:
            while not self._machine.closed and not self._machine.may_add():
                self._taken.wait()
            return not self._machine.closed


def _leave_out(iterator: DatasetIterator, count: int) -> None:
    """Skip `count` elements of a pipeline. Elements whose computation raises an error count too."""
    for _ in range(count):
        try:
            next(iterator)
        except StopIteration:
            return
        except Exception:
            continue

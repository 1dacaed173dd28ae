"""The runner of a data task in a coordinated read. A thread computes groups ahead (a group has one
element for each consumer), and the machine (rounds_machine.py) decides when the consumers get a
group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final

from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service.elements import weigh
from zmqdist.data.service.reader.delivery import FAILED, Demand
from zmqdist.data.service.worker.rounds_machine import RoundsMachine
from zmqdist.data.service.worker.task_replies import TaskReply
from zmqdist.data.service.worker.task_runner import DescribeError, ElementReply, PipelineRunner
from zmqdist.errors import CancelledError, FailedPreconditionError

GROUPS_MAX: Final = 64
GROUPS_BYTES: Final = 16 << 20
"""The largest number of groups, and about the largest number of bytes, that the thread computes
ahead of the consumers. It always computes at least one group ahead."""


class RoundsRunner(PipelineRunner):
    """Runs one data task of a coordinated read."""

    def __init__(
        self,
        name: str,
        open: Callable[[], DatasetIterator],
        describe_error: DescribeError,
        consumers: int,
    ) -> None:
        """Create the runner. Its thread starts with the first request.

        Args:
          open: a function that opens the pipeline. The runner's thread calls it.
          describe_error: a DescribeError (task_runner.py), which makes the errors that readers
            get.
        """
        super().__init__(name, open, describe_error)
        self._computed = 0
        self._consumers = consumers
        self._group_bytes = 1
        self._machine = RoundsMachine(consumers)
        self._closed = False

    def ask(self, demand: Demand, reply: ElementReply) -> None:
        self.start()
        self._decide(lambda: self._machine.add_request(demand, reply), reply)

    def expire(self, reply: ElementReply) -> None:
        """Have all consumers skip the round that this request asks for, because its waiting time is
        over."""
        self._decide(lambda: self._machine.expired(reply))

    def close(self) -> None:
        self._end(CancelledError("the task was stopped"))

    def figures(self) -> tuple[Any, ...]:
        """Return the task's figures: the fields of a TaskReport
        (dispatcher/machine/events.py). The sizes are estimates from the last group. The time
        for an element is reported as unknown.
        """
        with self._lock:
            buffered = self._machine.groups * self._consumers
            elements_count = self._computed - buffered
            nbytes = elements_count * self._group_bytes // self._consumers
            waits_s = self._room_waits.seconds, self._element_waits.seconds
            room = self._groups_max() * self._consumers
            return elements_count, nbytes, buffered, room, 0.0, *waits_s

    def _decide(self, decision: Callable[[], Sequence[TaskReply]], *new: ElementReply) -> None:
        """Call `decision`, which has the machine decide, and send the replies that it returns.
        `new` is the request that the decision adds, if any. Any thread may call this.
        """
        with self._lock:
            for reply in self._machine.waiting():
                if not reply.wanted():
                    self._machine.withdraw(reply)
            before, waiting = self._machine.groups, self._machine.waiting()
            try:
                answers = decision()
            except BaseException as error:
                failure = self._failure(error)
                answers = [TaskReply(reply, FAILED, failure) for reply in (*waiting, *new)]
                for answer in answers:
                    self._machine.withdraw(answer.reply)
            if self._closed or self._machine.groups < before:
                self._changed.notify()
            self._element_waits.note(waits=bool(self._machine.waiting()))
        for answer in answers:
            self._send(answer)

    def _serve(self) -> None:
        self._decide(self._machine.serve)

    # -- the thread --------------------------------------------------------------------------------

    def _compute(self) -> None:
        with self._open() as iterator:
            while not self._closed:
                group: list[Any] = []
                try:
                    group.extend(islice(iterator, self._consumers))
                except BaseException as error:
                    element = f"element {self._computed + len(group)}"
                    raise self._describe_error(error, element) from None
                # the consumers at the end of the group would lack an element
                if len(group) < self._consumers:
                    raise FailedPreconditionError(ENDED)
                self._add(group)

    def _add(self, group: list[Any]) -> None:
        """Add a group, send the replies that are ready, and wait until another group may be
        computed."""
        with self._lock:
            self._computed += len(group)
            self._group_bytes = max(1, sum(map(weigh, group)))
            self._machine.add(group, self._group_bytes)
            waiting = self._machine.waiting()
        if waiting and not waiting[0].soon(self._serve):
            # the loop that would reply to the first request has ended, so serve other readers in
            # this thread
            self._serve()
        with self._lock:
            while self._machine.groups >= self._groups_max() and not self._closed:
                self._room_waits.note(waits=True)
                self._changed.wait()
            self._room_waits.note(waits=False)

    def _groups_max(self) -> int:
        """Return how many groups may be computed ahead. Call this with the lock held."""
        return min(GROUPS_MAX, max(1, GROUPS_BYTES // self._group_bytes))

    def _end(self, error: BaseException | None) -> None:
        self._closed = True
        if error is not None:
            self._decide(lambda: self._machine.end(error))


ENDED: Final = (
    "Encountered end of sequence on a round-robin read iterator. Please ensure that the dataset "
    "used for round-robin "
    "reading has infinite cardinality."
)


def require_infinite(cardinality: int) -> None:
    """Raise FailedPreconditionError if the pipeline is known to end."""
    if cardinality >= 0:
        raise FailedPreconditionError(
            "Round robin reads require that the input dataset has infinite cardinality, but the "
            "dataset has cardinality "
            f"{cardinality}. Consider adding `.repeat()`",
        )

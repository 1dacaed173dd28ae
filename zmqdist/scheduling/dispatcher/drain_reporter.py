"""The part of the dispatcher that asks the programs about their values and work at a worker, and
makes drain reports (drain_report.py).

The dispatcher knows the values that a worker keeps and the work that it runs for each program, but
only by number. Only the programs know the names, the lineages and the per-worker resources. The
dispatcher waits at most DESCRIBED_S for their replies.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

from zmqdist import errors
from zmqdist.events import Peer
from zmqdist.limits import DESCRIBED_S, DESCRIBED_WORKS_MAX
from zmqdist.messages import DescribeWork, Message, WorkDescribed
from zmqdist.scheduling.dispatcher.broker import Broker
from zmqdist.scheduling.dispatcher.drain_report import DrainReport, report_of
from zmqdist.scheduling.shared.parts import DispatcherPart
from zmqdist.transport.loop import Loop


@dataclass(eq=False)
class _Question:
    """A request for drain reports that waits for replies of programs.

    Attributes:
      then: called with the reports.
      in_question: for each program, the work items that the dispatcher asked about.
      awaited: the programs that have not replied yet.
    """

    workers: list[tuple[str, int]]
    then: Callable[[list[DrainReport]], object]
    in_question: dict[Peer, set[int]] = field(default_factory=dict)
    awaited: set[Peer] = field(default_factory=set)
    replies: dict[Peer, WorkDescribed] = field(default_factory=dict)


class DrainReporter:
    """Makes the drain reports of one dispatcher.

    Args:
      send: sends a message to a peer, and returns False if the peer is not connected.
    """

    def __init__(
        self,
        loop: Loop,
        broker: Broker,
        part: DispatcherPart,
        send: Callable[[Peer, Message], bool],
    ) -> None:
        self._loop = loop
        self._broker = broker
        self._part = part
        self._send = send
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}

    def reports(self) -> list[DrainReport]:
        """Return a drain report for each registered worker. Waits at most DESCRIBED_S for the
        programs' replies.

        Do not call this in the loop's thread, because it blocks.

        Raises:
          FailedPreconditionError: the dispatcher has been stopped already.
          UnavailableError: the dispatcher was stopped while it waited for the programs.
        """
        reports: Future[list[DrainReport]] = Future()
        self._loop.run(
            lambda: self.ask(sorted(self._broker.membership.members), reports.set_result)
        )
        try:
            return reports.result(2 * DESCRIBED_S)
        except FutureTimeoutError:
            raise errors.UnavailableError(
                "the dispatcher was stopped, or too busy, before it knew what a drain would lose"
            ) from None

    def described(self, peer: Peer, message: Message) -> None:
        """Record the reply of a program to DescribeWork. Call it in the loop's thread."""
        assert isinstance(message, WorkDescribed)
        question = self._questions.get(message.request)
        if question is not None and peer in question.awaited:
            question.awaited.discard(peer)
            question.replies[peer] = message
            if not question.awaited:
                self._finish(message.request)

    def ask(
        self, workers: list[tuple[str, int]], then: Callable[[list[DrainReport]], object]
    ) -> None:
        """Make drain reports for these workers and pass them to `then`, at the latest after
        DESCRIBED_S. Call it in the loop's thread.

        The list for `then` leaves out each worker that is lost meanwhile.

        Raises:
          NotFoundError: one of the workers is not registered now.
        """
        present = self._broker.membership.members
        for job, index in workers:
            if (job, index) not in present:
                raise not_registered(job, index, present)
        question = _Question(workers, then)
        number = next(self._numbers)
        self._questions[number] = question
        works: dict[Peer, list[int]] = {peer: [] for peer in self._broker.dispatch.sessions}
        for worker in question.workers:
            holdings = self._broker.holdings(*worker)
            for peer, work in (
                *holdings.kept,
                *holdings.pinned,
                *holdings.running,
                *holdings.others,
            ):
                if peer in works:
                    works[peer].append(work)
        for peer, numbers in works.items():
            del numbers[DESCRIBED_WORKS_MAX:]
            question.in_question[peer] = set(numbers)
            if self._send(peer, DescribeWork(number, numbers)):
                question.awaited.add(peer)
        if question.awaited:
            self._loop.set_timer(
                (self, number), self._loop.now() + DESCRIBED_S, lambda: self._finish(number)
            )
        else:
            self._finish(number)

    def _finish(self, number: int) -> None:
        question = self._questions.pop(number)
        self._loop.set_timer((self, number), None, lambda: None)
        reports = []
        for worker in question.workers:
            with contextlib.suppress(KeyError):  # the worker was lost meanwhile
                holdings = self._broker.holdings(*worker)
                data, streams = (
                    self._part.tasks_of(holdings.worker),
                    self._part.streams_of(holdings.worker),
                )
                reports.append(
                    report_of(holdings, data, streams, question.in_question, question.replies)
                )
        question.then(reports)


def not_registered(
    job: str, index: int, present: Collection[tuple[str, int]]
) -> errors.NotFoundError:
    """Return the error for a worker that is not registered. `present` has the (job, index) of each
    registered worker."""
    names = ", ".join(f"{job}:{index}" for job, index in sorted(present)) or "none"
    return errors.NotFoundError(
        f"no worker {job}:{index} is registered here; the registered workers are: {names}"
    )

"""The drain report: what becomes of a worker's values, work and data tasks when the worker is
drained.

The dispatcher knows the values that a worker keeps and the work that it runs for each program, but
only by number. Only the programs know the names, the lineages and the per-worker resources, so
DrainReporter asks them, and waits at most DESCRIBED_S for their replies.

The dispatcher refuses a drain that would lose something that only this worker has: kept values
without a lineage, work that waits for this worker alone, and data tasks whose remaining elements no
other worker would read. A kept value about which its program did not reply in time counts as lost,
because it may have no lineage.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, Final

from zmqdist import errors
from zmqdist.events import Peer
from zmqdist.limits import DESCRIBED_S, DESCRIBED_WORKS_MAX
from zmqdist.messages import DescribeWork, Message, WorkDescribed
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.dispatcher.records import WorkerHoldings
from zmqdist.scheduling.shared.parts import DispatcherPart, StreamAtWorker, TaskAtWorker
from zmqdist.transport.loop import Loop

NAMES_SHOWN_MAX: Final = 10
"""The largest number of names that a sentence lists. The sentence only counts the other names."""


@dataclass(frozen=True, slots=True)
class DrainReport:
    """The drain report of one worker. The name of a value or function is, for example, "sum-12":
    the function and the work item's number.

    Attributes:
      recomputed: kept values with a lineage.
      lost: kept values without a lineage.
      unknown: the number of kept values about which the dispatcher did not ask, or about which the
        program did not reply in time.
      running: functions that run.
      pinned: functions that wait for this worker alone.
      resources: per-worker resources of the programs.
      data: data tasks of this worker.
      streams: streams of distributed snapshots that the worker writes.
      lost_actors: actors without restarts, each as its class and name.
      actors: actors that begin again on other workers.
    """

    worker: str
    recomputed: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    unknown: int = 0
    running: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    data: tuple[TaskAtWorker, ...] = ()
    streams: tuple[StreamAtWorker, ...] = ()
    lost_actors: tuple[str, ...] = ()
    actors: tuple[str, ...] = ()

    @property
    def losses(self) -> list[str]:
        """The losses for which the dispatcher refuses the drain, each as a sentence; empty if the
        drain loses nothing."""
        stranded = [f"{task.job} ({task.mode})" for task in self.data if not task.moves]
        silent = f"about which their programs said nothing within {DESCRIBED_S:g} s"
        only = f"that only {self.worker} may run"
        values = _count(self.unknown, "kept value")
        undescribed = [f"{values} {silent}, so they may have no lineage"] if self.unknown else []
        nobody_else = "whose rest no other worker reads"
        return [
            *_listed(
                self.lost, "kept value that has no lineage", "kept values that have no lineage"
            ),
            *undescribed,
            *_listed(self.pinned, f"function {only}", f"functions {only}"),
            *_listed(stranded, f"data task {nobody_else}", f"data tasks {nobody_else}"),
            *_listed(self.lost_actors, "actor that ends", "actors that end"),
        ]

    @property
    def lines(self) -> list[str]:
        """The sentences of the report, one for each kind of values, work or data tasks; empty if
        the worker has none."""
        recomputed = _listed(
            self.recomputed,
            "kept value with a lineage, computed again when it is needed",
            "kept values with a lineage, computed again when they are needed",
        )
        moved = [f"{task.job} ({task.mode})" for task in self.data if task.moves]
        streams = {
            moves: [
                f"{stream.path} (stream {stream.stream})"
                for stream in self.streams
                if stream.moves == moves
            ]
            for moves in (True, False)
        }
        sentences = {
            "lost": self.losses,
            "recomputed": recomputed,
            "finished within the grace, else run elsewhere": _listed(self.running, "function"),
            "built again elsewhere, without its state": _listed(
                self.resources, "per-worker resource"
            ),
            "begun again elsewhere, without their state": _listed(self.actors, "actor"),
            "read on by other workers": _listed(moved, "data task"),
            "continued by other workers": _listed(streams[True], "snapshot stream"),
            "continued by the next worker that joins": _listed(streams[False], "snapshot stream"),
        }
        return [f"{fate}: {text}" for fate, texts in sentences.items() for text in texts]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict for the RPC reply, including the sentences of `lines` and
        `losses`."""
        return {
            "worker": self.worker,
            "lines": self.lines,
            "losses": self.losses,
            "lost": list(self.lost),
            "unknown": self.unknown,
            "recomputed": list(self.recomputed),
            "running": list(self.running),
            "pinned": list(self.pinned),
            "resources": list(self.resources),
            "data": [[each.job, each.mode, each.moves] for each in self.data],
            "streams": [[each.path, each.stream, each.moves] for each in self.streams],
            "lost_actors": list(self.lost_actors),
            "actors": list(self.actors),
        }


def report_of(
    holdings: WorkerHoldings,
    data: Sequence[TaskAtWorker],
    streams: Sequence[StreamAtWorker],
    in_question: Mapping[Peer, Collection[int]],
    replies: Mapping[Peer, WorkDescribed],
) -> DrainReport:
    """Make the drain report of a worker from the dispatcher's knowledge and the programs' replies.

    If the reply of a program does not name a kept value that the dispatcher asked about, the value
    is left out of the report, because the program no longer needs it.

    Args:
      holdings: the numbers of the worker's kept values and work items.
      data: the data tasks of the worker.
      in_question: for each program, the work items that the dispatcher asked about.
      replies: the reply of each program that replied in time.
    """
    described = {
        peer: {work: (name, again) for work, name, again in reply.works}
        for peer, reply in replies.items()
    }
    order = sorted(holdings.kept, key=lambda item: item[1])
    # A value that a reply does not name is no longer needed by its program.
    kept_values = [
        described[peer][work]
        for peer, work in order
        if peer in described and work in described[peer]
    ]

    def names(items: Sequence[tuple[Peer, int]]) -> tuple[str, ...]:
        return tuple(
            described.get(peer, {}).get(work, (f"work item {work}", False))[0]
            for peer, work in items
        )

    return DrainReport(
        worker=holdings.worker,
        recomputed=tuple(name for name, again in kept_values if again),
        lost=tuple(name for name, again in kept_values if not again),
        unknown=sum(
            peer not in described or work not in in_question[peer] for peer, work in holdings.kept
        ),
        running=names(holdings.running),
        pinned=names(holdings.pinned),
        resources=tuple(name for reply in replies.values() for name in reply.resources),
        data=tuple(data),
        streams=tuple(streams),
        lost_actors=tuple(holdings.lost_actors),
        actors=tuple(holdings.actors),
    )


def _listed(names: Sequence[str], singular: str, plural: str = "") -> list[str]:
    """Return a sentence such as "3 kept values: sum-1, sum-2, sum-3", with at most NAMES_SHOWN_MAX
    names; no sentence for no names."""
    if not names:
        return []
    more = "" if len(names) <= NAMES_SHOWN_MAX else f" and {len(names) - NAMES_SHOWN_MAX} more"
    return [f"{_count(len(names), singular, plural)}: {', '.join(names[:NAMES_SHOWN_MAX])}{more}"]


def _count(count: int, singular: str, plural: str = "") -> str:
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


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
            # What is not asked about is reported as unknown, which refuses the drain.
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

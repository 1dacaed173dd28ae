"""The machine of a data task in a coordinated read, in which consumer i gets the i-th element of
each group of consecutive elements.

Promises
    K1  A round is either served to all consumers, with one group, or skipped by all consumers. The
        task serves a round when all consumers have requested the round and a group is ready. If the
        waiting time of one of the requests ends before that, all consumers skip the round. A
        consumer that requests a round after it was skipped is told to skip to the current round.
    K2  Groups are served in order. A skipped round uses up no group. The next round gets the group
        instead.
    K3  A reply may have the elements of several rounds if several groups are ready. The number of
        rounds is equal for all consumers.
    K4  If a consumer repeats a request after a lost reply, it gets the same reply again.
    K5  At most one request of each consumer waits. A newer request of the consumer replaces the
        waiting request, which is refused. The refusal has the code ABORTED if both requests are
        from the same reader, and FAILED_PRECONDITION if two readers send requests as the same
        consumer.
    K6  When an error has ended the pipeline, the task first serves the groups that are ready. After
        that, every waiting and later request gets the error.

When this machine starts, some consumers may have received a round that the others have not. As soon
as all consumers have sent a request, the consumers that lack this round get a group for it, unless
the request of a consumer that is ahead says that the round was skipped.

The tag of a reply is (next round of this consumer, the last round that all consumers have
received). The machine computes the second number from the requests, because a consumer that
requests a round has received all earlier rounds.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from zmqdist.data.service.reader.delivery import FAILED, SKIP, SOME, Demand
from zmqdist.data.service.worker.task_replies import TaskReply
from zmqdist.errors import AbortedError, CancelledError, FailedPreconditionError, OpError


class _Served(msgspec.Struct):
    """The last reply to a consumer. `elements` is None for a skip."""

    reader: int
    round: int
    next: int
    elements: list[Any] | None


class RoundsMachine:
    """The groups of one task of a coordinated read, and the requests of its consumers. A caller
    identifies its request by any object, `reply`.
    """

    def __init__(self, consumers: int) -> None:
        self._consumers = consumers
        self._groups: deque[list[Any]] = deque()
        self._group_bytes = 1
        self._round: int | None = None
        """The next round to be served or skipped; None before the first round."""
        self._waiting: dict[int, tuple[Demand, Any]] = {}
        self._requested_rounds: dict[int, int] = {}
        self._served: dict[int, _Served] = {}
        self._error: BaseException | None = None

    @property
    def groups(self) -> int:
        """Number of groups that no consumer has received."""
        return len(self._groups)

    def waiting(self) -> list[Any]:
        """Return the requests of consumers that wait for a reply."""
        return [reply for _, reply in self._waiting.values()]

    def add(self, group: list[Any], group_bytes: int) -> None:
        """Add a group, one element for each consumer. `serve` sends it when all consumers have
        requested the same round."""
        self._groups.append(group)
        self._group_bytes = group_bytes

    def end(self, error: BaseException) -> list[TaskReply]:
        """Record that `error` has ended the pipeline, and return the replies that are ready. Only
        the first error counts. After a CancelledError the groups that are ready are not served.
        """
        self._error = self._error or error
        return self.serve()

    def add_request(self, demand: Demand, reply: Any) -> list[TaskReply]:
        """Add a request, and return the replies that are ready."""
        return [*self._note(demand, reply), *self.serve()]

    def withdraw(self, reply: Any) -> None:
        """Withdraw a request whose reader no longer waits."""
        self._waiting = {
            consumer: request
            for consumer, request in self._waiting.items()
            if request[1] is not reply
        }

    def expired(self, reply: Any) -> list[TaskReply]:
        """Have all consumers skip the round that this request asks for, because its waiting time is
        over. Return the replies that are ready.
        """
        late = next((demand for demand, handle in self._waiting.values() if handle is reply), None)
        if late is None:
            return []
        effects: list[TaskReply] = []
        for consumer, (demand, handle) in list(self._waiting.items()):
            if demand.round <= late.round:
                del self._waiting[consumer]
                effects.append(self._skip(demand, handle, late.round + 1))
        self._round = max(self._round or 0, late.round + 1)
        return [*effects, *self.serve()]

    def serve(self) -> list[TaskReply]:
        """Return all replies that are ready."""
        effects: list[TaskReply] = []
        while answers := self._next_replies():
            effects += answers
        return effects

    def _note(self, demand: Demand, reply: Any) -> list[TaskReply]:
        """Add a request to the waiting requests, or return its reply if a reply is possible at
        once. If the request replaces an older request, return the error for the older request.
        """
        consumer, requested = demand.consumer, demand.round
        if not 0 <= consumer < self._consumers:
            text = f"Requesting data for consumer index {consumer}, but the task has only {self._consumers} consumers"
            return [TaskReply(reply, FAILED, FailedPreconditionError(text))]
        before = self._served.get(consumer)
        if before is not None and requested < before.next:
            if (before.reader, before.round) == (demand.reader, requested):
                # promise K4: repeat a reply that was lost
                tag = before.next, self._received_by_all()
                kind = SKIP if before.elements is None else SOME
                return [TaskReply(reply, kind, before.elements, tag)]
            refusal = FailedPreconditionError(restarted(consumer, requested, before.next))
            return [TaskReply(reply, FAILED, refusal)]
        self._requested_rounds[consumer] = requested
        # promise K1: all consumers skip a round that one of them has skipped
        if self._round is not None and requested < self._round:
            return [self._skip(demand, reply, self._round)]
        replaced = self._waiting.get(consumer)
        self._waiting[consumer] = demand, reply
        if replaced is None:
            return []
        return [TaskReply(replaced[1], FAILED, displaced(replaced[0], demand))]

    def _received_by_all(self) -> int:
        return (
            min(self._requested_rounds.values()) - 1
            if len(self._requested_rounds) == self._consumers
            else -1
        )

    def _skip(self, demand: Demand, reply: Any, next_round: int) -> TaskReply:
        self._served[demand.consumer] = _Served(demand.reader, demand.round, next_round, None)
        return TaskReply(reply, SKIP, None, (next_round, self._received_by_all()))

    def _next_replies(self) -> list[TaskReply]:
        """Return the replies for the next round or rounds. Return an empty list if no reply is
        possible yet."""
        # Promise K6: while groups are ready, send them and not the error, unless the task was
        # closed.
        if self._error is not None and (not self._groups or type(self._error) is CancelledError):
            error = self._error
            refused = self.waiting()
            self._waiting.clear()
            return [TaskReply(reply, FAILED, error) for reply in refused]
        if len(self._waiting) < self._consumers:
            return []
        first = min(demand.round for demand, _ in self._waiting.values())
        ahead = [demand for demand, _ in self._waiting.values() if demand.round > first]
        here = [request for request in self._waiting.values() if request[0].round == first]
        answers: list[TaskReply]
        if any(demand.skipped for demand in ahead):
            # promise K1: one consumer has skipped this round, so all skip it
            count = 1
            answers = [self._skip(*request, first + 1) for request in here]
        elif self._groups:
            count = 1 if ahead else self._count([demand for demand, _ in here])
            groups = [self._groups.popleft() for _ in range(count)]
            answers = [self._part(*request, groups) for request in here]
        else:
            return []
        self._round = first + count
        for demand, _ in here:
            del self._waiting[demand.consumer]
        return answers

    def _count(self, requests: list[Demand]) -> int:
        """Return how many rounds fit into one reply to each consumer."""
        fits = min(request.bytes_max for request in requests) * self._consumers // self._group_bytes
        return max(1, min(len(self._groups), fits, *(request.elements_max for request in requests)))

    def _part(self, demand: Demand, reply: Any, groups: list[list[Any]]) -> TaskReply:
        elements = [group[demand.consumer] for group in groups]
        next_round = demand.round + len(elements)
        self._served[demand.consumer] = _Served(demand.reader, demand.round, next_round, elements)
        return TaskReply(reply, SOME, elements, (next_round, self._received_by_all()))


def restarted(consumer: int, requested: int, reached: int) -> str:
    """Return the error text for a consumer that begins again while the other consumers continue."""
    return (
        f"Consumer {consumer} requested data for round {requested}, but the current round has "
        f"already reached {reached}. "
        "This may indicate that the consumer was restarted with the same job name."
    )


def displaced(older: Demand, newer: Demand) -> OpError:
    """Return the error for a waiting request that a newer request of its consumer replaces."""
    consumer = older.consumer
    if older.reader == newer.reader:
        text = f"the request of consumer {consumer} for round {newer.round} took the place of this one for round {older.round}"
        return AbortedError(text)
    text = (
        f"Another reader (client {newer.reader}) requests round {newer.round} as consumer "
        f"{consumer}, while this one (client "
        f"{older.reader}) waited for round {older.round}. This may indicate that two readers have "
        f"the same consumer_index, or that the "
        "consumer was restarted with the same job name."
    )
    return FailedPreconditionError(text)

"""The leader's side of collectives: the task of rank 0 compares the announcements of all members,
and replies to each member.

If the members' values are small, they travel with the announcements, and the reply has the result.
agreement_machine.py compares the announcements.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from typing import Any

import numpy as np

from zmqdist.clock import monotonic
from zmqdist.coordination.replies import task_name
from zmqdist.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
    from_code,
)
from zmqdist.rpc.service import PendingCall
from zmqdist.tasks import collectives_machine as core
from zmqdist.tasks.agreement_machine import Agreed, Agreements, Announcement, Verdict
from zmqdist.tasks.liveness import Watches
from zmqdist.tasks.node import TASKS, Node
from zmqdist.tasks.snapshot import GroupRow
from zmqdist.transport.router import Peer

RESULT, GO, FAILED = 0, 1, 2
"""The kinds of a reply. A reply is a tuple: the number of the round that has ended, the kind, and
more items. After RESULT follows the value; after GO the name of the exchange, the details of all
members and their incarnations; after FAILED the code and the message.
"""


@dataclass(slots=True)
class Contribution:
    """One member's part in an operation, apart from the signature, which must be equal at all
    members.

    Attributes:
      incarnation: incarnation of the member.
      kind, op, root: the kind of the operation, the name of its reduction, and the rank of its
        root.
      detail: data that the other members need, such as the number of rows.
      value: a tuple with the member's value if the value is small; None if it is large, or if this
        member has no value.
    """

    incarnation: int
    kind: str
    op: str
    root: int
    detail: Any
    value: tuple[Any] | None


class Leader:
    """The groups of which this task is the leader."""

    def __init__(self, node: Node, watches: Watches) -> None:
        self._node = node
        self._watches = watches
        self._lock = threading.Lock()
        self._closed = False
        self._agreements = Agreements()
        self._exchanges = count(1)
        self._timer_at = inf
        node.service.register_later("collective.announce", self._announce_call, roles=TASKS)
        node.service.register("collective.abort", self.abort, inline=True, roles=TASKS)
        node.service.register("collective.reset", self.reset, inline=True, roles=TASKS)
        watches.listen(
            lambda task, incarnation: None, partial(self._apply, self._agreements.member_gone)
        )

    def _announce_call(
        self, call: PendingCall, group: str, tasks: list[Any], *announcement: Any
    ) -> None:
        call.on_dropped(partial(self.announcement_withdrawn, group, call))
        self.announce(group, tasks, *announcement, token=call, peer=call.peer)

    def announce(
        self,
        group: str,
        tasks: Sequence[Any],
        rank: int,
        incarnation: int,
        counter: int | None,
        signature: str,
        timeout_s: float,
        failure: tuple[int, str] | None,
        contribution: tuple[Any, ...],
        *,
        token: Any,
        peer: Peer | None = None,
    ) -> None:
        """Process a member's announcement. The leader replies by `token`, perhaps later.

        Args:
          counter: the number of the member's round, or None, as agreement_machine.py explains.
          signature: a text with all parts that must be equal at all members; error texts contain
            it, too.
          token: an object with the methods `reply` and `fail`, as PendingCall has them.
          peer: the connection on which the announcement arrived; None if this task itself
            announces.
        """
        if self._node.closed:
            raise self._stop_error(token)
        members = [self._node.task(tuple(task)) for task in tasks]
        for task in members:
            self._watches.watch(task)
        self._watches.heard_from(members[rank], incarnation, peer)
        load = Contribution(incarnation, *contribution)
        announcement = Announcement(
            rank, counter, signature, monotonic() + timeout_s, load, failure, token
        )
        with self._lock:
            if self._closed:
                raise self._stop_error(token)
            verdicts = self._agreements.announced(group, members, announcement)
            for task in members:
                if message := self._watches.gone_message(task):
                    verdicts += self._agreements.member_gone(task, message)
                    break
            # only the loop may set the timer
            earlier = self._agreements.deadline < self._timer_at
        self._send_verdicts(verdicts)
        if earlier:
            try:
                self._node.loop.call_soon(self._tick)
            except FailedPreconditionError:
                # the loop has ended, and `stopped` has failed the announcements
                pass

    def abort(self, group: str, tasks: Sequence[Any], code: int, message: str) -> None:
        """Fail all operations of this group, now and until `reset`."""
        self._apply(
            self._agreements.aborted,
            group,
            [self._node.task(tuple(task)) for task in tasks],
            code,
            message,
        )

    def reset(self, group: str) -> None:
        """End an abort, so that the group's operations work again."""
        with self._lock:
            self._agreements.reset(group)

    def rows(self) -> tuple[GroupRow, ...]:
        """Return the groups of this leader in which some members wait for the others."""
        with self._lock:
            waiting = self._agreements.waiting()
        return tuple(
            GroupRow(group, tuple(map(task_name, arrived)), tuple(map(task_name, missing)))
            for group, (arrived, missing) in waiting.items()
        )

    # -- events ------------------------------------------------------------------------------------

    def _apply(self, event: Callable[..., list[Verdict]], *args: Any) -> None:
        """Pass an event to Agreements, and send its verdicts to the members."""
        with self._lock:
            verdicts = event(*args)
        self._send_verdicts(verdicts)

    def _tick(self) -> None:
        """End the rounds whose deadline has passed, and set the timer for the next deadline. The
        loop calls this."""
        with self._lock:
            verdicts = self._agreements.ticked(monotonic())
            self._timer_at = self._agreements.deadline
        self._send_verdicts(verdicts)
        if self._timer_at < inf:
            self._node.loop.set_timer("collective", self._timer_at, self._tick)

    def stop(self) -> None:
        """Fail the waiting announcements and refuse new ones, because this task's server stops."""
        with self._lock:
            self._closed = True
            verdicts = self._agreements.stopped(self._node.stopped.message)
        for announcement in (
            announcement for verdict in verdicts for announcement in verdict.members
        ):
            announcement.token.fail(self._stop_error(announcement.token))

    def _stop_error(self, token: Any) -> OpError:
        """Return the error for an announcement while this task stops. This task's own caller learns
        that its server was stopped. Another member learns that the leader of the group was stopped.
        """
        if not isinstance(token, PendingCall):
            return self._node.stopped
        return UnavailableError(f"{self._node.stopped.message}, which led this group")

    def announcement_withdrawn(self, group: str, token: Any) -> None:
        """Record that the caller that announced with this token does not wait any more."""
        self._apply(self._agreements.announcement_withdrawn, group, token)

    def _send_verdicts(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            if isinstance(verdict, Agreed):
                exchange = f"{self._node.incarnation:016x}.{next(self._exchanges)}"
                try:
                    replies = replies_to(
                        [announcement.load for announcement in verdict.members], exchange
                    )
                except Exception as error:
                    # send all members an error of NumPy, such as MemoryError
                    for announcement in verdict.members:
                        announcement.token.fail(
                            error
                            if isinstance(error, OpError)
                            else InvalidArgumentError(str(error))
                        )
                    continue
                # Reply last to the caller in the leader's own process, because this caller may
                # change the value, which all replies share.
                for announcement, reply in reversed(
                    list(zip(verdict.members, replies, strict=True))
                ):
                    announcement.token.reply((verdict.counter, *reply))
            else:
                for announcement in verdict.members:
                    if verdict.counter is None:
                        announcement.token.fail(from_code(verdict.code, verdict.message))
                    else:
                        announcement.token.reply(
                            (verdict.counter, FAILED, verdict.code, verdict.message)
                        )


def replies_to(contributions: Sequence[Contribution], exchange: str) -> list[tuple[Any, ...]]:
    """Return the reply to each member when all members are about to do the same operation. A reply
    has the result, or the instruction to exchange pieces.
    """
    first = contributions[0]
    rooted = first.kind == "broadcast"
    if any(
        member.value is None
        for rank, member in enumerate(contributions)
        if not rooted or rank == first.root
    ):
        details, incarnations = zip(
            *((member.detail, member.incarnation) for member in contributions), strict=True
        )
        return [(GO, exchange, [*details], [*incarnations])] * len(contributions)
    if rooted:
        value = contributions[first.root].value
        assert value is not None
        return [(RESULT, value[0])] * len(contributions)
    values = [
        contribution.value[0] for contribution in contributions if contribution.value is not None
    ]
    return [(RESULT, value) for value in results_of(first, values)]


def results_of(first: Contribution, values: list[Any]) -> list[Any]:
    """Return the result of each rank, which the leader computes from all values. The result of a
    gather is the list of values."""
    size = len(values)
    if first.kind == "all_reduce":
        return [core.folded(values, first.op)] * size
    if first.kind == "reduce_scatter":
        total = core.folded(values, first.op)
        return [total[part] for part in core.shares(len(total), size)]
    if first.kind == "all_to_all":
        return [
            np.stack([value[rank] for value in values], dtype=values[0].dtype)
            for rank in range(size)
        ]
    return [
        values if first.kind == "all_gather" or rank == first.root else None for rank in range(size)
    ]

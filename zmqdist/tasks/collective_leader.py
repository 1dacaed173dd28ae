"""The leader's end of collectives: the lowest rank of a group hears what each member is about to do, and tells all whether they may.

What is small has come along with it: then the answer is the result. What decides is agreement_machine.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from time import monotonic
from typing import Any

import numpy as np

from zmqdist.coordination.answers import named
from zmqdist.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
    from_code,
)
from zmqdist.rpc.pending_call import Asked
from zmqdist.tasks import collectives_machine as core
from zmqdist.tasks.agreement_machine import Agreed, Agreements, Announcement, Verdict
from zmqdist.tasks.liveness import Watches
from zmqdist.tasks.node import TASKS, Node
from zmqdist.tasks.snapshot import GroupRow
from zmqdist.transport.router import Peer

RESULT, GO, FAILED = 0, 1, 2
"""What an answer is, after the number of the round that has ended: RESULT and the value; GO, the name of the exchange, what each
member says of its value, and their incarnations; or FAILED, code and message."""


@dataclass(slots=True)
class Contribution:
    """What a member says of its value, beside what must be equal for all.

    Attributes:
      incarnation: of the member.
      kind, op, root: of the operation.
      told: for the other members, such as how many rows it brings.
      value: the value itself where it is small, in a tuple; None where it is not, or this member brings none.
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
        self._stopped = False
        self._agreements = Agreements()
        self._exchanges = count(1)
        self._timer_at = inf
        node.service.register_later("collective.announce", self._announce_call, roles=TASKS)
        node.service.register("collective.abort", self.abort, inline=True, roles=TASKS)
        node.service.register("collective.reset", self.reset, inline=True, roles=TASKS)
        watches.listen(lambda task, life: None, partial(self._apply, self._agreements.gone))

    def _announce_call(self, call: Asked, group: str, tasks: list[Any], *announcement: Any) -> None:
        call.on_dropped(partial(self.withdrew, group, call))
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
        """A member of a group says what it is about to do.

        Args:
          counter: the round that it means, or None: see Agreements.
          what: what must be equal for all, for people, too.
          token: has `answer` and `fail`, as Asked.
          peer: the connection that it said so by; None for the own task.
        """
        if self._node.closed:
            raise self._stop_error(token)
        members = [self._node.task(tuple(task)) for task in tasks]
        for task in members:
            self._watches.watch(task)
        self._watches.heard_from(members[rank], incarnation, peer)
        load = Contribution(incarnation, *contribution)
        announcement = Announcement(rank, counter, signature, monotonic() + timeout_s, load, failure, token)
        with self._lock:
            if self._stopped:
                raise self._stop_error(token)
            verdicts = self._agreements.announced(group, members, announcement)
            for task in members:
                if message := self._watches.gone_message(task):
                    verdicts += self._agreements.gone(task, message)
                    break
            earlier = self._agreements.deadline < self._timer_at
        self._send_verdicts(verdicts)
        if earlier:
            try:
                self._node.loop.call_soon(self._tick)
            except FailedPreconditionError:  # stopped meanwhile, and its members were told
                pass

    def abort(self, group: str, tasks: Sequence[Any], code: int, message: str) -> None:
        """Everything of this group fails from now on."""
        self._apply(self._agreements.aborted, group, [self._node.task(tuple(task)) for task in tasks], code, message)

    def reset(self, group: str) -> None:
        """The end of an abort."""
        with self._lock:
            self._agreements.reset(group)

    def rows(self) -> tuple[GroupRow, ...]:
        """The groups some of whose members wait for the others."""
        with self._lock:
            waiting = self._agreements.waiting()
        return tuple(
            GroupRow(group, tuple(map(named, arrived)), tuple(map(named, missing)))
            for group, (arrived, missing) in waiting.items()
        )

    # -- what happens meanwhile -------------------------------------------------------------------------------------------

    def _apply(self, event: Callable[..., list[Verdict]], *args: Any) -> None:
        """Something has happened to groups: have Agreements decide, and tell the members."""
        with self._lock:
            verdicts = event(*args)
        self._send_verdicts(verdicts)

    def _tick(self) -> None:
        """In the loop: what is late, and when to look again."""
        with self._lock:
            verdicts = self._agreements.ticked(monotonic())
            self._timer_at = self._agreements.deadline
        self._send_verdicts(verdicts)
        if self._timer_at < inf:
            self._node.loop.set_timer("collective", self._timer_at, self._tick)

    def stopped(self) -> None:
        """The own server stops: its members get no more answers from it, and no more are expected."""
        with self._lock:
            self._stopped = True
            verdicts = self._agreements.stopped(self._node.stopped.message)
        for announcement in (announcement for verdict in verdicts for announcement in verdict.members):
            announcement.token.fail(self._stop_error(announcement.token))

    def _stop_error(self, token: Any) -> OpError:
        """What a member is told while this task stops: the own one that it was stopped, another one that its leader has gone."""
        if not isinstance(token, Asked):
            return self._node.stopped
        return UnavailableError(f"{self._node.stopped.message}, which led this group")

    def withdrew(self, group: str, token: Any) -> None:
        """The caller with this token does not wait any more."""
        self._apply(self._agreements.withdrew, group, token)

    def _send_verdicts(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            if isinstance(verdict, Agreed):
                exchange = f"{self._node.incarnation:016x}.{next(self._exchanges)}"
                try:
                    replies = replies_to([announcement.load for announcement in verdict.members], exchange)
                except Exception as error:  # of NumPy, such as no memory
                    for announcement in verdict.members:
                        announcement.token.fail(
                            error if isinstance(error, OpError) else InvalidArgumentError(str(error))
                        )
                    continue
                # Ours is the first: it may be changed by our caller, so it is told last.
                for announcement, reply in reversed(list(zip(verdict.members, replies, strict=True))):
                    announcement.token.answer((verdict.counter, *reply))
            else:
                for announcement in verdict.members:
                    if verdict.counter is None:
                        announcement.token.fail(from_code(verdict.code, verdict.message))
                    else:
                        announcement.token.answer((verdict.counter, FAILED, verdict.code, verdict.message))


def replies_to(contributions: Sequence[Contribution], exchange: str) -> list[tuple[Any, ...]]:
    """What each member is answered when all are about to do the same: the result, or that they go on by themselves."""
    first = contributions[0]
    rooted = first.kind == "broadcast"
    if any(member.value is None for rank, member in enumerate(contributions) if not rooted or rank == first.root):
        details, incarnations = zip(*((member.detail, member.incarnation) for member in contributions), strict=True)
        return [(GO, exchange, [*details], [*incarnations])] * len(contributions)
    if rooted:
        value = contributions[first.root].value
        assert value is not None
        return [(RESULT, value[0])] * len(contributions)
    values = [contribution.value[0] for contribution in contributions if contribution.value is not None]
    return [(RESULT, value) for value in results_of(first, values)]


def results_of(first: Contribution, values: list[Any]) -> list[Any]:
    """The result of each rank, of values that are all here; of gathering the values themselves."""
    size = len(values)
    if first.kind == "all_reduce":
        return [core.folded(values, first.op)] * size
    if first.kind == "reduce_scatter":
        total = core.folded(values, first.op)
        return [total[part] for part in core.shares(len(total), size)]
    if first.kind == "all_to_all":
        return [np.stack([value[rank] for value in values]) for rank in range(size)]
    return [values if first.kind == "all_gather" or rank == first.root else None for rank in range(size)]

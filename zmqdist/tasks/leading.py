"""The leader's end of collectives: the lowest rank of a group hears what each member is about to do, and tells all whether they may.

What is small has come along with it: then the answer is the result. Who decides is rounds_machine.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic
from typing import Any

import numpy as np

from zmqdist.coordination.answers import Task, named
from zmqdist.errors import (
    CANCELLED,
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
    from_code,
)
from zmqdist.rpc.asked import Asked
from zmqdist.tasks import collectives_machine as core
from zmqdist.tasks.node import TASKS, Node
from zmqdist.tasks.rounds_machine import Agreed, Announcement, Rounds, Verdict
from zmqdist.tasks.snapshot import GroupRow
from zmqdist.tasks.watch import Watches

RESULT, GO = 0, 1
"""What an answer is: (RESULT, value), or (GO, name of the exchange, what each member has told of its value, their lives)."""


@dataclass(slots=True)
class Brought:
    """What a member says of its value, beside what must be equal for all.

    Attributes:
      kind, op, root: of the operation.
      told: for the other members, such as how many rows it brings.
      value: the value itself where it is small, in a tuple; None where it is not, or this member brings none.
    """

    kind: str
    op: str
    root: int
    told: Any
    value: tuple[Any] | None


class Leader:
    """The groups of which this task is the leader."""

    def __init__(self, node: Node, watches: Watches) -> None:
        self._node = node
        self._watches = watches
        self._lock = threading.Lock()
        self._stopped = False
        self._groups: dict[str, tuple[list[Task], Rounds]] = {}
        node.service.register_later("collective.announce", self._asked, roles=TASKS)
        node.service.register("collective.abort", self.abort, inline=True, roles=TASKS)
        node.service.register("collective.reset", self.reset, inline=True, roles=TASKS)
        watches.listen(lambda task, life: None, self._gone)

    def _asked(self, asked: Asked, group: str, tasks: list[Any], *given: Any) -> None:
        asked.on_dropped(partial(self.withdrew, group, asked))
        self.announce(group, tasks, *given, token=asked)

    def announce(
        self,
        group: str,
        tasks: Sequence[Any],
        rank: int,
        life: int,
        number: int,
        anew: bool,
        what: str,
        timeout_s: float,
        failure: tuple[int, str] | None,
        brought: tuple[Any, ...],
        *,
        token: Any,
    ) -> None:
        """A member of a group says what it is about to do.

        Args:
          what: what must be equal for all, for people, too.
          token: has `answer` and `fail`, as Asked.
        """
        if self._node.closed:
            raise self._no_more(token)
        members = [self._node.task(tuple(task)) for task in tasks]
        for task in members:
            self._watches.watch(task)
        self._watches.speaks(members[rank], life)
        due = monotonic() + timeout_s
        one = Announcement(rank, life, number, what, what, due, Brought(*brought), failure, token, anew)
        with self._lock:
            if self._stopped:
                raise self._no_more(token)
            known, rounds = self._groups.setdefault(group, (members, Rounds([named(task) for task in members])))
            if known != members:
                told = f"group {group} has the members {', '.join(map(named, known))}"
                raise InvalidArgumentError(f"{told}, not {', '.join(map(named, members))}")
            verdicts = rounds.announced(one)
            for task in members if rounds.come else ():
                if told := self._watches.gone(task):
                    verdicts += rounds.gone(members.index(task), told)
                    break
            waits = rounds.deadline < inf
        self._tell(group, verdicts)
        if waits:
            try:
                self._node.loop.call_soon(self._tick, group)
            except FailedPreconditionError:  # stopped meanwhile, and its members were told
                pass

    def abort(self, group: str, tasks: Sequence[Any], code: int, message: str) -> None:
        """Everything of this group fails from now on."""
        members = [self._node.task(tuple(task)) for task in tasks]
        with self._lock:
            _, rounds = self._groups.setdefault(group, (members, Rounds([named(task) for task in members])))
            verdicts = rounds.aborted(code, message)
        self._tell(group, verdicts)

    def reset(self, group: str) -> None:
        """The end of an abort."""
        with self._lock:
            if group in self._groups:
                self._groups[group][1].reset()

    def rows(self) -> tuple[GroupRow, ...]:
        """The groups some of whose members wait for the others."""
        rows = []
        with self._lock:
            for group, (members, rounds) in self._groups.items():
                come = tuple(named(task) for rank, task in enumerate(members) if rank in rounds.come)
                missing = tuple(named(task) for rank, task in enumerate(members) if rank not in rounds.come)
                if come:
                    rows.append(GroupRow(group, come, missing))
        return tuple(rows)

    # -- what happens meanwhile -------------------------------------------------------------------------------------------

    def _event(self, group: str, event: Callable[[Rounds], list[Verdict]]) -> float:
        """What has happened to a group, if it is still there; when its next deadline is."""
        with self._lock:
            if group not in self._groups:
                return inf
            _, rounds = self._groups[group]
            verdicts, deadline = event(rounds), rounds.deadline
        self._tell(group, verdicts)
        return deadline

    def _tick(self, group: str) -> None:
        """In the loop: what is late, and when to look again."""
        deadline = self._event(group, lambda rounds: rounds.ticked(monotonic()))
        if deadline < inf:
            self._node.loop.set_timer(("collective", group), deadline, partial(self._tick, group))

    def _gone(self, task: Task, message: str) -> None:
        with self._lock:
            groups = list(self._groups.items())
        for group, (members, _) in groups:
            if task in members:
                rank = members.index(task)
                self._event(group, lambda rounds, rank=rank: rounds.gone(rank, message))  # type: ignore[misc]

    def stopped(self) -> None:
        """The own server stops: its members get no more answers from it, and no more are expected."""
        with self._lock:
            groups, self._groups = self._groups, {}
            self._stopped = True
        for _, rounds in groups.values():
            for verdict in rounds.aborted(CANCELLED, self._node.stopped.message):
                for one in verdict.members:
                    one.token.fail(self._no_more(one.token))

    def _no_more(self, token: Any) -> OpError:
        """What a member is told while this task stops: the own one that it was stopped, another one that its leader has gone."""
        if not isinstance(token, Asked):
            return self._node.stopped
        return UnavailableError(f"{self._node.stopped.message}, which led this group")

    def withdrew(self, group: str, token: Any) -> None:
        """Who announced this does not wait any more."""
        self._event(group, lambda rounds: rounds.withdrew(token))

    def _tell(self, group: str, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            if isinstance(verdict, Agreed):
                exchange = f"{self._node.incarnation:016x}.{verdict.round}"
                try:
                    answers = answers_to(
                        [one.load for one in verdict.members], exchange, [one.life for one in verdict.members]
                    )
                except Exception as error:  # of NumPy, such as no memory
                    for one in verdict.members:
                        one.token.fail(error if isinstance(error, OpError) else InvalidArgumentError(str(error)))
                    continue
                # Ours is the first: it may be changed by our caller, so it is told last.
                for one, answer in reversed(list(zip(verdict.members, answers, strict=True))):
                    one.token.answer(answer)
            else:
                for one in verdict.members:
                    one.token.fail(from_code(verdict.code, verdict.message))


def answers_to(brought: Sequence[Brought], exchange: str, lives: Sequence[int]) -> list[tuple[Any, ...]]:
    """What each member is answered when all are about to do the same: the result, or that they go on by themselves."""
    first = brought[0]
    rooted = first.kind == "broadcast"
    if any(one.value is None for rank, one in enumerate(brought) if not rooted or rank == first.root):
        return [(GO, exchange, [one.told for one in brought], lives)] * len(brought)
    if rooted:
        value = brought[first.root].value
        assert value is not None
        return [(RESULT, value[0])] * len(brought)
    values = [one.value[0] for one in brought if one.value is not None]
    return [(RESULT, value) for value in results_of(first, values)]


def results_of(first: Brought, values: list[Any]) -> list[Any]:
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

"""What the leader of a group decides: whether all members are about to do the same thing together. No I/O.

Rule 1: a method is an event (past tense); it returns what the members must now be told: Agreed or Disagreed.
Rule 2: one Agreements for all groups that a task leads; the leader calls it under a lock.

Theory of operation
    Each member announces what it brings to the next common operation: its kind, dtype, shape and options, and perhaps the value itself.
    The announcements of one operation meet at a barrier (coordination/barriers_machine.py), which has the name of the group. When all have
    come, the leader compares what they bring, and there is one verdict for all of them. A round ends early, for those that have come, when
    one of them can wait no longer, is cancelled, fails, or has ended. A member that comes later to a round that has ended that way gets the
    same error at once.

    A member names the round that it means: the one after the last whose end it knows, well or not; None where it does not know that,
    as after an abort or when its leader was lost; and 0 when its life begins. With None it is taken into the round that is on, with 0
    too, unless a round has failed without it. So after a failure all are together again after one error each, wherever each was when
    it happened, and a leader or member that has begun another life goes on where the others are. A member that could not take part in
    a round says so with its number, and where that comes late it ends no other round.

Promises, checked by tests/machines/test_agreement.py and tests/sim/test_tasks.py
    A1  a verdict goes to all members or an error to each, the same one to all that meet the round, and each is told once
    A2  members agree only when everything that must be equal is equal
    A3  no announcement outlives its deadline, the end of a member, an abort
    A4  after a round that failed, whatever the reason, the next one works (after an abort: when there was a reset)
    A5  announcements of different rounds never meet, but for members that have been told of an error
    A6  a failure that comes late ends no later round than its own

Not here: how a result is made (collectives.py), who is alive (liveness.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias

from zmqdist.coordination.answers import Effect, Fail, Task, named
from zmqdist.coordination.barriers_machine import Barriers
from zmqdist.errors import ABORTED, INVALID_ARGUMENT, OK, UNAVAILABLE, InvalidArgumentError


@dataclass(slots=True, eq=False)
class Announcement:
    """One member's part in one operation.

    Attributes:
      rank: of the member in the group.
      counter: the round that it means: see the module's docstring.
      what: what must be equal for all, as people read it.
      due: when it stops waiting, in seconds on the leader's clock.
      load: what the leader needs of it, such as its value.
      failure: (code, message): this member takes no part, and the round fails with it. None: it does.
      token: the leader's own: whom to answer.
      group: filled in by Agreements.
    """

    rank: int
    counter: int | None
    signature: str
    due: float = inf
    load: Any = None
    failure: tuple[int, str] | None = None
    token: Any = None
    group: str = ""


@dataclass(frozen=True, slots=True)
class Agreed:
    """All members of the round, by rank, are about to do the same. They go on with the round after this one."""

    counter: int
    members: list[Announcement]


@dataclass(frozen=True, slots=True)
class Disagreed:
    """These members end their part with an error.

    Attributes:
      counter: the round that has ended with it; they go on with the next one. None: nobody can say which one is next.
    """

    members: list[Announcement]
    code: int
    message: str
    counter: int | None = None


Verdict: TypeAlias = Agreed | Disagreed


class Agreements:
    """The groups of one leader."""

    def __init__(self) -> None:
        self._barriers = Barriers(earliest_deadline=True, out_of_step=ABORTED)
        self._members: dict[str, tuple[Task, ...]] = {}
        self._aborted: dict[str, tuple[int, str]] = {}

    @property
    def deadline(self) -> float:
        """When `ticked` must be called at the latest; `inf` for never."""
        return self._barriers.deadline

    def waiting(self) -> dict[str, tuple[list[Task], list[Task]]]:
        """The groups some of whose members wait for the others: those that have come, and those that have not, by rank."""
        missing = {name: self._barriers.missing(name) for name in self._barriers.open}
        return {
            name: (
                [task for task in self._members[name] if task not in absent],
                [task for task in self._members[name] if task in absent],
            )
            for name, absent in missing.items()
        }

    # -- events -----------------------------------------------------------------------------------------------------------

    def announced(self, group: str, members: Sequence[Task], announcement: Announcement) -> list[Verdict]:
        """A member says what it brings. Raises InvalidArgumentError: the group of this name has other members."""
        self._check(group, members)
        if group in self._aborted:
            return [Disagreed([announcement], *self._aborted[group])]
        announcement.group = group
        task, tasks = members[announcement.rank], frozenset(members)
        if announcement.failure and announcement.counter and self._barriers.is_over(group, announcement.counter, task):
            return [
                Disagreed([announcement], *announcement.failure, announcement.counter)
            ]  # late: the next operation must not end with it
        owed = self._barriers.owes(group, task)
        # A failure in the place of an operation that has failed already must not end the next one.
        counter = 0 if owed and (announcement.counter == 0 or announcement.failure) else announcement.counter or None
        effects = self._barriers.came(
            announcement,
            group,
            counter,
            task,
            tasks,
            due=announcement.due,
            problem=announcement.failure,
            title=announcement.signature,
        )
        return self._verdicts(effects)

    def withdrew(self, group: str, token: Any) -> list[Verdict]:
        """The caller that announced with this token does not wait any more: it was cancelled, or its process has ended."""
        for announcement in self._barriers.tickets(group):
            if isinstance(announcement, Announcement) and announcement.token is token:
                name = named(self._members[group][announcement.rank])
                message = f"{name} does not wait any more: it was cancelled there, or has ended"
                return self._verdicts(self._barriers.failed(group, UNAVAILABLE, message))
        return []

    def gone(self, task: Task, message: str) -> list[Verdict]:
        """A member has ended: those that have come wait in vain. Its next life has missed nothing."""
        effects = self._barriers.task_failed(task, message, UNAVAILABLE)
        self._barriers.restarted(task)
        return self._verdicts(effects)

    def ticked(self, now: float) -> list[Verdict]:
        """Time has passed."""
        return self._verdicts(self._barriers.ticked(now))

    def aborted(self, group: str, members: Sequence[Task], code: int, message: str) -> list[Verdict]:
        """Everything of this group fails, now and until the reset. A second abort changes nothing."""
        self._check(group, members)
        if group in self._aborted:
            return []
        self._aborted[group] = code, message
        verdicts = self._verdicts(self._barriers.failed(group, code, message))
        return [Disagreed(verdict.members, code, message) for verdict in verdicts]

    def reset(self, group: str) -> None:
        """The abort is over: whoever comes first says which round is on. Without an abort nothing happens."""
        if self._aborted.pop(group, None) is not None:
            self._barriers.forgotten(group)

    def stopped(self, reason: str) -> list[Verdict]:
        """The leader itself ends: so do all that wait here."""
        return self._verdicts(self._barriers.stopped(reason))

    # -- within -----------------------------------------------------------------------------------------------------------

    def _check(self, group: str, members: Sequence[Task]) -> None:
        known = self._members.setdefault(group, tuple(members))
        if known != tuple(members):
            text = f"group {group} has the members {', '.join(map(named, known))}"
            raise InvalidArgumentError(f"{text}, not {', '.join(map(named, members))}")

    def _verdicts(self, effects: list[Effect]) -> list[Verdict]:
        """What the barriers say to each caller, as one verdict for all callers of a round."""
        ended: dict[tuple[str, int, str, int | None], list[Announcement]] = {}
        for effect in effects:
            announcement = effect.ticket
            assert isinstance(announcement, Announcement)
            outcome = (effect.code, effect.message, None) if isinstance(effect, Fail) else effect.value
            ended.setdefault((announcement.group, *outcome), []).append(announcement)
        return [
            self._verdict(group, code, message, counter, members)
            for (group, code, message, counter), members in ended.items()
        ]

    def _verdict(
        self, group: str, code: int, message: str, counter: int | None, members: list[Announcement]
    ) -> Verdict:
        members.sort(key=lambda announcement: announcement.rank)
        tasks = self._members[group]
        if code != OK:
            return Disagreed(members, code, message, counter)
        if len(members) < len(tasks):
            return Disagreed(members, ABORTED, f"round {counter} of group {group} has ended already", counter)
        if len({announcement.signature for announcement in members}) > 1:
            by_signature: dict[str, list[str]] = {}
            for announcement in members:
                by_signature.setdefault(announcement.signature, []).append(named(tasks[announcement.rank]))
            parts = "; ".join(f"{', '.join(names)}: {signature}" for signature, names in by_signature.items())
            message = f"the members of the group are not about to do the same: {parts}"
            return Disagreed(members, INVALID_ARGUMENT, message, counter)
        assert counter is not None
        return Agreed(counter, members)

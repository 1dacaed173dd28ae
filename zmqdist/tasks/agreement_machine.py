"""The decision of a group's leader: whether all members are about to do the same operation together. No I/O.

Rule 1: a method is an event (past tense); it returns the verdicts that the leader must send to the members: Agreed or Disagreed.
Rule 2: one Agreements serves all groups that a task leads; the leader calls it under a lock.

Theory of operation
    Each member announces its part in the next common operation: the kind, dtype, shape and options, and perhaps the value itself. The
    announcements of one operation meet at a barrier (coordination/barriers_machine.py) with the name of the group. When all have arrived,
    the leader compares them, and sends one verdict to all members. A round ends early, for the members that have announced, when one of
    them reaches its deadline, is cancelled, fails, or has ended. A member that announces later in such a round gets the same error at once.

    A member names the round that it means, one more than the last round whose end it knows, whatever the outcome. It passes None where it
    does not know that round, as after an abort or after its leader was lost, and 0 at its start. None joins the round that is on; so does
    0, unless a round has failed without this member. So after a failure all members are in step again after one error each, wherever each
    was when it happened, and a restarted leader or member goes on where the others are. A member that could not take part in a round
    reports that with the round's number, so that a late report ends no other round.

Promises, checked by tests/machines/test_agreement.py and tests/sim/test_tasks.py
    A1  all members get a verdict, or each gets an error, the same one for all that meet in the round; each gets it once
    A2  members agree only when everything that must be equal is equal
    A3  no announcement outlives its deadline, the end of a member, an abort
    A4  after a round that failed, for whatever reason, the next one works (after an abort: once there was a reset)
    A5  announcements of different rounds never meet, except those of members that have received an error
    A6  a failure that is reported late ends no later round than its own

Not here: how a result is computed (collectives.py), which tasks are up (watches_machine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias

from zmqdist.coordination.barriers_machine import Barriers
from zmqdist.coordination.replies import Effect, Fail, Task, task_name
from zmqdist.errors import ABORTED, INVALID_ARGUMENT, OK, UNAVAILABLE, InvalidArgumentError


@dataclass(slots=True, eq=False)
class Announcement:
    """One member's part in one operation.

    Attributes:
      rank: of the member in the group.
      counter: the round that it means: see the module's docstring.
      signature: the text of everything that must be equal at all members.
      due: when it stops waiting, in seconds on the leader's clock.
      load: what the leader needs besides, such as the value.
      failure: (code, message) if this member cannot take part: then the round fails with it. Else None.
      token: the leader's own, for its reply.
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
    """All members of the round, by rank, are about to do the same. They go on with the next round."""

    counter: int
    members: list[Announcement]


@dataclass(frozen=True, slots=True)
class Disagreed:
    """These members end their part with an error.

    Attributes:
      counter: the round that has ended with it; the members go on with the next one. None: the number of the next round is unknown.
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
        """Return the groups of which some members wait for the others: the members that have announced, and those that have
        not, by rank.
        """
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
        """A member announces its part. Raises InvalidArgumentError: the group of this name has other members."""
        self._check(group, members)
        if group in self._aborted:
            return [Disagreed([announcement], *self._aborted[group])]
        announcement.group = group
        task, tasks = members[announcement.rank], frozenset(members)
        if announcement.failure and announcement.counter and self._barriers.is_over(group, announcement.counter, task):
            # A6: its round is over, and the next one must not end with it.
            return [Disagreed([announcement], *announcement.failure, announcement.counter)]
        owed = self._barriers.missed_failure(group, task)
        # A6: a failure reported for a round that has already failed without this member must not end the next one.
        counter = 0 if owed and (announcement.counter == 0 or announcement.failure) else announcement.counter or None
        effects = self._barriers.arrived(
            announcement,
            group,
            counter,
            task,
            tasks,
            announcement.due,
            announcement.failure,
            announcement.signature,
        )
        return self._verdicts(effects)

    def announcement_withdrawn(self, group: str, token: Any) -> list[Verdict]:
        """The caller that announced with this token does not wait any more: it was cancelled, or its process has ended."""
        for announcement in self._barriers.tickets(group):
            if isinstance(announcement, Announcement) and announcement.token is token:
                name = task_name(self._members[group][announcement.rank])
                message = f"{name} does not wait any more: it was cancelled there, or has ended"
                return self._verdicts(self._barriers.failed(group, UNAVAILABLE, message))
        return []

    def member_gone(self, task: Task, message: str) -> list[Verdict]:
        """A member has ended: the round that it belongs to fails. Its next incarnation has missed no round."""
        effects = self._barriers.task_failed(task, message, UNAVAILABLE)
        self._barriers.restarted(task)
        return self._verdicts(effects)

    def ticked(self, now: float) -> list[Verdict]:
        """Time has passed."""
        return self._verdicts(self._barriers.ticked(now))

    def aborted(self, group: str, members: Sequence[Task], code: int, message: str) -> list[Verdict]:
        """All operations of this group fail, now and until the reset. A second abort changes nothing."""
        self._check(group, members)
        if group in self._aborted:
            return []
        self._aborted[group] = code, message
        verdicts = self._verdicts(self._barriers.failed(group, code, message))
        return [Disagreed(verdict.members, code, message) for verdict in verdicts]

    def reset(self, group: str) -> None:
        """End an abort: the next announcement determines the number of the round. Without an abort, do nothing."""
        if self._aborted.pop(group, None) is not None:
            self._barriers.forgotten(group)

    def stopped(self, reason: str) -> list[Verdict]:
        """The leader itself stops: all waiting announcements fail."""
        return self._verdicts(self._barriers.stopped(reason))

    # -- within -----------------------------------------------------------------------------------------------------------

    def _check(self, group: str, members: Sequence[Task]) -> None:
        known = self._members.setdefault(group, tuple(members))
        if known != tuple(members):
            text = f"group {group} has the members {', '.join(map(task_name, known))}"
            raise InvalidArgumentError(f"{text}, not {', '.join(map(task_name, members))}")

    def _verdicts(self, effects: list[Effect]) -> list[Verdict]:
        """Combine the outcomes of the callers of each round into one verdict."""
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
                by_signature.setdefault(announcement.signature, []).append(task_name(tasks[announcement.rank]))
            parts = "; ".join(f"{', '.join(names)}: {signature}" for signature, names in by_signature.items())
            message = f"the members of the group are not about to do the same: {parts}"
            return Disagreed(members, INVALID_ARGUMENT, message, counter)
        assert counter is not None
        return Agreed(counter, members)

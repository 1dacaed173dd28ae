"""The decision of a group's leader whether all members are about to do the same collective
operation. No I/O.

Rule 1: each method is an event; it returns the verdicts (Agreed or Disagreed) that the leader must
send to the members.
Rule 2: one `Agreements` object serves all groups whose leader is this task. The leader uses it only
under a lock.

Theory of operation
    Each member announces its part in the next common operation: the kind, dtype, shape and options,
    and perhaps the value itself. The announcements of one operation are one round of a barrier
    (coordination/barriers_machine.py) that has the name of the group. When all announcements have
    arrived, the leader compares them, and sends one verdict to all members. A round fails early
    when a member reaches its deadline, is cancelled, fails or has ended. The members that have
    announced then get an error, and a member that announces later in that round gets the same error
    at once.

    Each announcement names the round that the member means: the round after the last round whose
    end the member knows, whatever the outcome of that round was. The member passes None if it does
    not know that number, as after an abort or after the loss of its leader, and 0 when it starts.
    With None it joins the current round. With 0 it also joins the current round, unless a round has
    failed without
    this member: then it gets the error of that round. So after a failure each member gets one
    error, and then all members are in the same round again. A restarted leader or member joins the
    round of the other members. A member that cannot take part in a round reports this with the
    round's number, so that a late report ends no other round.

Promises, checked by tests/tasks/test_agreement_machine.py and tests/sim/test_tasks.py
    A1  either all members of a round get Agreed, or each member gets an error, which is the same
        for all members that have announced in the round; each member gets one reply
    A2  members agree only if all parts of their announcements that must be equal are equal
    A3  no announcement outlives its deadline, the end of a member, or an abort
    A4  after a round that failed for whatever reason, the next round works; after an abort,
        operations work again once the group was reset
    A5  the leader compares only announcements of one round; a member that does not know the number
        of its round joins the current round
    A6  a failure that is reported late never ends a later round than its own

Not here: how a result is computed (collectives.py), and which tasks are up (watches_machine.py).
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
      rank: rank of the member in the group.
      counter: the number of the member's round; None or 0 if the member does not know it, as the
        module's docstring explains.
      signature: a text with all parts that must be equal at all members.
      due: when the member stops waiting, in seconds on the leader's clock.
      load: any other data that the leader needs, such as the value.
      failure: (code, message) of the error with which the round fails, because this member cannot
        take part; None if it takes part.
      token: an object by which the leader replies to the member.
      group: name of the group; Agreements sets it.
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
    """The verdict that all members of the round, listed by rank, are about to do the same
    operation. The members continue with the next round.
    """

    counter: int
    members: list[Announcement]


@dataclass(frozen=True, slots=True)
class Disagreed:
    """The verdict that a round has failed: these members of the round end their operation with an
    error.

    Attributes:
      members: the announcements of these members.
      code, message: the error.
      counter: the round that has ended with the error; the members continue with the next round.
        None if the number is unknown.
    """

    members: list[Announcement]
    code: int
    message: str
    counter: int | None = None


Verdict: TypeAlias = Agreed | Disagreed


class Agreements:
    """The announcements and the aborts of all groups of which one task is the leader."""

    def __init__(self) -> None:
        self._barriers = Barriers(earliest_deadline=True, out_of_step=ABORTED)
        self._members: dict[str, tuple[Task, ...]] = {}
        self._aborted: dict[str, tuple[int, str]] = {}

    @property
    def deadline(self) -> float:
        """The time at which `ticked` must next be called; `inf` if no announcement has a
        deadline.
        """
        return self._barriers.deadline

    def waiting(self) -> dict[str, tuple[list[Task], list[Task]]]:
        """Return, by the name of each group in which members wait for others, two lists in order of
        rank: the members that have announced, and the members that have not.
        """
        missing = {name: self._barriers.missing(name) for name in self._barriers.open}
        return {
            name: (
                [task for task in self._members[name] if task not in absent],
                [task for task in self._members[name] if task in absent],
            )
            for name, absent in missing.items()
        }

    # -- events ------------------------------------------------------------------------------------

    def announced(
        self, group: str, members: Sequence[Task], announcement: Announcement
    ) -> list[Verdict]:
        """Record a member's announcement. Raises InvalidArgumentError if the group of this name has
        other members."""
        self._check(group, members)
        if group in self._aborted:
            return [Disagreed([announcement], *self._aborted[group])]
        announcement.group = group
        task, tasks = members[announcement.rank], frozenset(members)
        if (
            announcement.failure
            and announcement.counter
            and self._barriers.is_over(group, announcement.counter, task)
        ):
            # A6: the round of this failure is over, and the failure must not end the next round.
            return [Disagreed([announcement], *announcement.failure, announcement.counter)]
        owed = self._barriers.missed_failure(group, task)
        # A6: if a round has failed without this member, the member's failure belongs to that round,
        #   and must not end the next round.
        counter = (
            0
            if owed and (announcement.counter == 0 or announcement.failure)
            else announcement.counter or None
        )
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
        """Record that the caller that announced with this token no longer waits, because it was
        cancelled or its process has ended."""
        for announcement in self._barriers.tickets(group):
            if isinstance(announcement, Announcement) and announcement.token is token:
                name = task_name(self._members[group][announcement.rank])
                message = f"{name} does not wait any more: it was cancelled there, or has ended"
                return self._verdicts(self._barriers.failed(group, UNAVAILABLE, message))
        return []

    def member_gone(self, task: Task, message: str) -> list[Verdict]:
        """Record that a member has ended: fail the current round of each of its groups. The
        member's next incarnation does not get this error.
        """
        # A3: the others must not wait for an announcement that cannot come
        effects = self._barriers.task_failed(task, message, UNAVAILABLE)
        self._barriers.restarted(task)
        return self._verdicts(effects)

    def ticked(self, now: float) -> list[Verdict]:
        """End the rounds whose deadline has come."""
        return self._verdicts(self._barriers.ticked(now))

    def aborted(
        self, group: str, members: Sequence[Task], code: int, message: str
    ) -> list[Verdict]:
        """Fail all operations of this group, now and until `reset`. A second abort changes
        nothing.
        """
        self._check(group, members)
        if group in self._aborted:
            return []
        self._aborted[group] = code, message
        verdicts = self._verdicts(self._barriers.failed(group, code, message))
        return [Disagreed(verdict.members, code, message) for verdict in verdicts]

    def reset(self, group: str) -> None:
        """End an abort. The next announcement then decides the number of the round. Without an
        abort, do nothing."""
        if self._aborted.pop(group, None) is not None:
            self._barriers.forgotten(group)

    def stopped(self, reason: str) -> list[Verdict]:
        """Fail all waiting announcements, because the leader itself stops."""
        return self._verdicts(self._barriers.stopped(reason))

    # -- within ------------------------------------------------------------------------------------

    def _check(self, group: str, members: Sequence[Task]) -> None:
        recorded_members = self._members.setdefault(group, tuple(members))
        if recorded_members != tuple(members):
            text = f"group {group} has the members {', '.join(map(task_name, recorded_members))}"
            raise InvalidArgumentError(f"{text}, not {', '.join(map(task_name, members))}")

    def _verdicts(self, effects: list[Effect]) -> list[Verdict]:
        """Return the verdicts for these effects of the barriers. Members of a round that get the
        same outcome share one verdict."""
        outcomes: dict[tuple[str, int, str, int | None], list[Announcement]] = {}
        for effect in effects:
            announcement = effect.ticket
            assert isinstance(announcement, Announcement)
            outcome = (
                (effect.code, effect.message, None) if isinstance(effect, Fail) else effect.value
            )
            outcomes.setdefault((announcement.group, *outcome), []).append(announcement)
        return [
            self._verdict(group, code, message, counter, members)
            for (group, code, message, counter), members in outcomes.items()
        ]

    def _verdict(
        self, group: str, code: int, message: str, counter: int | None, members: list[Announcement]
    ) -> Verdict:
        members.sort(key=lambda announcement: announcement.rank)
        tasks = self._members[group]
        if code != OK:
            return Disagreed(members, code, message, counter)
        # a member that announces again for a round that has ended is alone in it
        if len(members) < len(tasks):
            return Disagreed(
                members, ABORTED, f"round {counter} of group {group} has ended already", counter
            )
        if len({announcement.signature for announcement in members}) > 1:
            by_signature: dict[str, list[str]] = {}
            for announcement in members:
                by_signature.setdefault(announcement.signature, []).append(
                    task_name(tasks[announcement.rank])
                )
            parts = "; ".join(
                f"{', '.join(names)}: {signature}" for signature, names in by_signature.items()
            )
            message = f"the members of the group are not about to do the same: {parts}"
            return Disagreed(members, INVALID_ARGUMENT, message, counter)
        assert counter is not None
        return Agreed(counter, members)

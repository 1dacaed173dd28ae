"""What the leader of a group decides: whether all members are about to do the same thing together. No I/O.

Rule 1: a method is an event (past tense); it returns what the members must now be told: Agreed or Failed, with the shell's own tokens.
Rule 2: one Rounds for each group, at its leader; its shell calls it under a lock.

Theory of operation
    Each member announces what it brings to the next common operation: its kind, dtype, shape and options, and perhaps the value itself.
    When all have come there is a verdict for all of them, and the next round begins. A round ends early, for those that have come, when one
    of them can wait no longer, is cancelled, fails, or has ended. Whoever comes later to a round that has ended that way gets the same
    error at once: so each member meets each round once, and the next one fits again.

    Members count their announcements, and that number says which round is meant. A member that has begun a new life counts from 1: it
    is taken into the round that is open, and so is one whose last announcement ended with an error. It knows of that, and those that do
    not are told when they come: so all are together again after one error each, wherever each was when it happened.
    The first announcement that a leader hears of from another tells it where all are (it may be the leader that has begun a new life).
    Whoever is then first heard of with a round before all that this leader knows has begun a new life, too, like the leader itself.
    A member that is ahead has given up a round that the others still wait for: that one ends for them. One that is behind gets the error
    of the round that it has missed.

Promises, checked by tests/machines/test_rounds.py
    P1  a verdict goes to all members or an error to each, the same one to all that meet the round, and each is told once
    P2  members agree only when everything that must be equal is equal, and all announced the same round
    P3  no announcement outlives its deadline, the end of a member, an abort
    P4  after a round that failed, whatever the reason, the next one works (after an abort: when there was a reset)
    P5  announcements of different rounds never meet, but for members that have been told of an error

Not here: how a result is made (collectives.py), who is alive (watch.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, TypeAlias

from zmqdist.errors import ABORTED, DEADLINE_EXCEEDED, INVALID_ARGUMENT, UNAVAILABLE

FAILED_KEPT_MAX = 64
"""Failed rounds of a group whose error is remembered for members that come late; for older ones it is a general one."""


FIRST: Final = 1
"""The first round of a leader's life."""


@dataclass(slots=True)
class Announcement:
    """One member's part in one round.

    Attributes:
      rank: of the member in the group.
      life: its incarnation.
      number: of its announcements to this group in that life, from 1.
      what: what must be equal for all.
      told: the same for people, with what may differ.
      due: when it stops waiting, in seconds on the shell's clock.
      load: what the shell needs of it, such as its value.
      failure: (code, message): this member takes no part, and the round fails with it. None: it does.
      token: the shell's own: who is to be answered.
      anew: what it announced before ended with an error, so it has been told that the others may be elsewhere.
    """

    rank: int
    life: int
    number: int
    what: Hashable
    told: str
    due: float = inf
    load: Any = None
    failure: tuple[int, str] | None = None
    token: Any = None
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Agreed:
    """All members of the round, by rank, are about to do the same."""

    round: int
    members: list[Announcement]


@dataclass(frozen=True, slots=True)
class Failed:
    """These members end their part with an error."""

    members: list[Announcement]
    code: int
    message: str


Verdict: TypeAlias = Agreed | Failed


@dataclass(slots=True)
class _Member:
    life: int = 0
    shift: int | None = None
    """What its own numbers lack to those of the rounds; None: nothing was heard of it yet."""
    welcome: bool = False
    """Its next announcement belongs to the open round, whatever its number."""


@dataclass(slots=True)
class Rounds:
    """The rounds of one group.

    Attributes:
      names: of the members, by rank.
      round: the one that is open.
      come: who has come to it, by rank.
    """

    names: Sequence[str]
    round: int = FIRST
    come: dict[int, Announcement] = field(default_factory=dict)
    _members: list[_Member] = field(default_factory=list)
    _failed: OrderedDict[int, tuple[int, str]] = field(default_factory=OrderedDict)
    _status: tuple[int, str] | None = None
    _shift: int | None = None

    def __post_init__(self) -> None:
        self._members = [_Member() for _ in self.names]

    @property
    def deadline(self) -> float:
        """When `ticked` must be called; `inf` for never."""
        return min((one.due for one in self.come.values()), default=inf)

    # -- events -----------------------------------------------------------------------------------------------------------

    def announced(self, one: Announcement) -> list[Verdict]:
        """A member says what it brings."""
        if self._status is not None:
            return [Failed([one], *self._status)]
        meant = one.number + self._shift_of(one)
        if meant < self.round:
            code, message = self._failed.get(meant, (ABORTED, f"round {meant} of the group has ended without it"))
            return [Failed([one], code, message)]
        verdicts: list[Verdict] = []
        if meant > self.round:
            verdicts += self._skipped(one, meant)
        twice = self.come.pop(one.rank, None)
        if twice is not None:  # its caller gave it up, and we were not told
            verdicts.append(Failed([twice], ABORTED, "announced again"))
        self.come[one.rank] = one
        if one.failure is not None:
            return [*verdicts, *self._fail(*one.failure)]
        if len(self.come) == len(self.names):
            verdicts.append(self._verdict())
        return verdicts

    def withdrew(self, token: Any) -> list[Verdict]:
        """Who announced this does not wait any more: it was cancelled, or its process has ended."""
        for one in self.come.values():
            if one.token is token:
                name = self.names[one.rank]
                return self._fail(UNAVAILABLE, f"{name} does not wait any more: it was cancelled there, or has ended")
        return []

    def gone(self, rank: int, message: str) -> list[Verdict]:
        """A member has ended: who has come waits in vain. Without anybody nothing happens."""
        if not self._members[rank].life:
            self._members[rank].welcome = True
        return self._fail(UNAVAILABLE, message) if self.come else []

    def ticked(self, now: float) -> list[Verdict]:
        """Time has passed."""
        if now < self.deadline:
            return []
        come = ", ".join(one.told + " of " + self.names[one.rank] for one in self._in_order()[:1])
        absent = [name for rank, name in enumerate(self.names) if rank not in self.come]
        told = f"{come} waited for {len(absent)} of {len(self.names)} members that have not come within the time: {', '.join(absent)}"
        return self._fail(DEADLINE_EXCEEDED, told)

    def aborted(self, code: int, message: str) -> list[Verdict]:
        """Everything of this group fails, now and until the reset. A second abort changes nothing."""
        if self._status is not None:
            return []
        self._status = code, message
        return self._fail(code, message) if self.come else []

    def reset(self) -> None:
        """The abort is over; every member's next announcement belongs to the same round. Without an abort nothing happens."""
        if self._status is not None:
            self._status = None
            self.round += 1
            self._members = [_Member(welcome=True) for _ in self.names]

    # -- within -----------------------------------------------------------------------------------------------------------

    def _shift_of(self, one: Announcement) -> int:
        member = self._members[one.rank]
        if one.anew:
            member.life, member.welcome, member.shift = one.life, False, self.round - one.number
        elif member.life != one.life or member.shift is None:
            if member.welcome or member.life not in (0, one.life):
                member.shift = self.round - one.number
            elif self._shift is None:  # no more than what the leader has begun without it was missed
                member.shift = min(0, self.round - one.number)
            else:
                member.shift = self._shift if one.number + self._shift >= FIRST else self.round - one.number
            member.life, member.welcome = one.life, False
            if self._shift is None and one.rank:  # the leader's own says nothing: it may have begun anew
                self._shift = member.shift
        return member.shift

    def _skipped(self, one: Announcement, meant: int) -> list[Verdict]:
        """It is ahead of the others: for them the round is over, and their next one is its present one."""
        name = self.names[one.rank]
        told = f"{name} is at its operation {one.number} of this group and has given up round {self.round}"
        for other in self.come.values():
            self._members[other.rank].shift = meant - other.number - 1
        verdicts = self._fail(ABORTED, told) if self.come else []
        self._remember(range(self.round, meant), ABORTED, told)
        self.round = meant
        return verdicts

    def _fail(self, code: int, message: str) -> list[Verdict]:
        members = self._in_order()
        self.come = {}
        self._remember((self.round,), code, message)
        self.round += 1
        return [Failed(members, code, message)]

    def _remember(self, rounds: Sequence[int], code: int, message: str) -> None:
        for number in rounds[-FAILED_KEPT_MAX:]:
            self._failed.setdefault(number, (code, message))
        while len(self._failed) > FAILED_KEPT_MAX:
            self._failed.popitem(last=False)

    def _verdict(self) -> Verdict:
        members = self._in_order()
        if len({one.what for one in members}) > 1:
            brought: dict[str, list[str]] = {}
            for one in members:
                brought.setdefault(one.told, []).append(self.names[one.rank])
            parts = "; ".join(f"{', '.join(names)}: {told}" for told, names in brought.items())
            return self._fail(INVALID_ARGUMENT, f"the members of the group are not about to do the same: {parts}")[0]
        agreed = Agreed(self.round, members)
        self.come = {}
        self.round += 1
        return agreed

    def _in_order(self) -> list[Announcement]:
        return [self.come[rank] for rank in sorted(self.come)]

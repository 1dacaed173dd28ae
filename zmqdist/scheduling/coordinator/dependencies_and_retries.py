"""What the coordinator decides about work with inputs, retries, a time-out or a lineage, before and after the dispatcher; no I/O.

Theory of operation
    Work that has one of these is a *plan*; all other work passes this by. A plan waits for its inputs, which are other pieces of
    work, and is then handed in as an *attempt*: a piece of work of its own for closures.py, under a number that no
    other has. What becomes of the attempt decides what becomes of the plan: it ends, or there is another attempt.
    A plan with a lineage stays after it has ended well, for as long as its value can be used: when the value is lost, another attempt
    makes it again, and its inputs before it where they are lost, too.

Promises, checked by tests/machines/test_graph.py with random events, and tests/sim
    G1  each plan ends exactly once; with its round at the latest
    G2  an attempt is handed in only when all inputs of its plan are there
    G3  a plan one of whose inputs has ended badly ends with that, and is not handed in any more
    G4  there are at most 1 + retries attempts that ended with an error of the function; nothing else is tried again but what is lost
    G5  between the question for a round's end and that end nothing is handed in
    G6  a plan that is not done at its `until` ends then, and its attempt is withdrawn
    G7  a lost value with a lineage is made again when somebody asks for it, at most `remakes_max` times; who waits for it goes on then
    G8  a function is dropped when no plan can be handed in with it any more, and not before
    G9  what a plan holds is freed exactly once, after it has ended and, with a lineage, after its value was let go of

Not here: payloads, and values that users hold (task_specs.py).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from zmqdist.events import Ticked
from zmqdist.messages import CANCELLED, ERROR, KEPT, VALUE
from zmqdist.scheduling.coordinator.affinity import PLAIN, Scheduled, WorkOptions

LOST: Final = 10
"""Kind of an end: every start was lost."""
UNAVAILABLE: Final = 11
"""Kind of an end: no dispatcher or no worker for too long, or its result cannot be reached."""
INPUT_FAILED: Final = 12
"""Kind of an end: an input has ended badly."""
TIMED_OUT: Final = 13
"""Kind of an end: `until` has come."""

FIRST_ATTEMPT: Final = 1 << 48
"""Numbers of attempts begin here; those of users' work stay below."""

DUE_SPARE: Final = 64
"""So many times that have no meaning any more are not worth clearing away."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The user scheduled work with options.

    Attributes:
      inputs: pieces of work that it needs: those that have not ended, and those with a lineage. What is there for good is not named.
      failed: an input that has ended badly already; 0 for none.
      retries: so many errors of the function are tried again.
      until: seconds on the machine's clock.
      lineage: its value is kept by its worker, and made again when it is lost.
      keep, options: as those of Scheduled, for each attempt.
    """

    work: int
    fn: int
    inputs: tuple[int, ...] = ()
    failed: int = 0
    retries: int = 0
    until: float | None = None
    lineage: bool = False
    keep: bool = False
    options: WorkOptions = PLAIN


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt, or a piece of work that somebody waits for, has ended. `lost` is the input that its worker could not get."""

    number: int
    kind: int
    lost: int = 0


@dataclass(frozen=True, slots=True)
class ValueLost:
    """Somebody asks for the value of an attempt, and it is not where it was kept."""

    work: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ValueDropped:
    """Nobody can use the value of this attempt any more."""

    attempt: int


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """The user cancelled these; others than plans are ignored."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class FunctionsUnused:
    """The user's side names these functions no more."""

    functions: list[int]


@dataclass(frozen=True, slots=True)
class RoundEnding:
    """Somebody waits to raise the round's error."""


@dataclass(frozen=True, slots=True)
class RoundOver:
    """Nothing of the round can be executing any more."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No plan goes on: those that have not ended end with an error of the asker's."""


Event: TypeAlias = (
    Planned
    | GiveUp
    | Ended
    | ValueLost
    | ValueDropped
    | CancelAsked
    | FunctionsUnused
    | RoundEnding
    | RoundOver
    | Ticked
)


@dataclass(frozen=True, slots=True)
class HandIn:
    """Schedule this plan under the number of an attempt."""

    work: int
    attempt: int


@dataclass(frozen=True, slots=True)
class End:
    """A plan has ended; one that had ended well before has lost its value for good.

    Attributes:
      kind: CANCELLED, INPUT_FAILED, TIMED_OUT or UNAVAILABLE (lost too often); None: as the attempt that has just ended.
      cause: for INPUT_FAILED, which input.
      made: it had ended well before.
    """

    work: int
    kind: int | None = None
    cause: int = 0
    made: bool = False


@dataclass(frozen=True, slots=True)
class Remade:
    """The value of a plan is there again: the attempt that has just ended has it, or there was a newer one than the asker's."""

    work: int
    new: bool


@dataclass(frozen=True, slots=True)
class WithdrawAttempts:
    """Nobody waits for these any more."""

    attempts: list[int]


@dataclass(frozen=True, slots=True)
class DropFunctions:
    """No plan needs these any more."""

    functions: list[int]


@dataclass(frozen=True, slots=True)
class Free:
    """What a plan holds is not needed any more."""

    work: int


Effect: TypeAlias = HandIn | End | Remade | WithdrawAttempts | DropFunctions | Free


class _Plan:
    """One plan.

    Attributes:
      inputs: as planned; `missing`: those that it still waits for.
      attempt: the one that is under way; 0 for none.
      made: the attempt that made its value; 0 before.
      used: which attempt of each input with a lineage the present attempt was given.
      wanted: its value was asked for and will be made again when the round is over.
      dropped: nobody can use its old value.
    """

    __slots__ = (
        "attempt",
        "dropped",
        "fn",
        "inputs",
        "keep",
        "lineage",
        "made",
        "missing",
        "options",
        "remakes",
        "retries",
        "until",
        "used",
        "wanted",
        "work",
    )

    def __init__(self, planned: Planned) -> None:
        self.work = planned.work
        self.fn = planned.fn
        self.inputs = planned.inputs
        self.retries = planned.retries
        self.until = planned.until
        self.lineage = planned.lineage
        self.keep = planned.keep
        self.options = planned.options
        self.missing: set[int] = set()
        self.attempt = self.made = self.remakes = 0
        self.used: dict[int, int] = {}
        self.wanted = self.dropped = False

    @property
    def is_available(self) -> bool:
        return self.made > 0 and not self.attempt and not self.missing


class Dependencies:
    """See the module's docstring.

    Args:
      remakes_max: so often a lost value is made again.
      first: the number of the first attempt.
    """

    def __init__(self, *, remakes_max: int, first: int = FIRST_ATTEMPT) -> None:
        self.remakes_max = remakes_max
        self.next_attempt = first
        self._plans: dict[int, _Plan] = {}
        self._attempts: dict[int, _Plan] = {}
        self._made: dict[int, _Plan] = {}
        """Plans with a lineage that have ended well, by the attempt that made their value."""
        self._awaited: dict[int, dict[int, None]] = {}
        """Who waits for an input, in order."""
        self._lost: set[int] = set()
        """Plans that have ended well, whose value is known to be lost, and for which nobody asks at present."""
        self._followups: deque[tuple[int, bool | None]] = deque()
        """What follows from an event, in order and not nested, for chains may be long: (work, whether it has ended well, None: is to
        be made again)."""
        self._due: list[tuple[float, int]] = []
        self._uses: dict[int, int] = {}
        self._unused: set[int] = set()
        self._ending = False
        self.waiting = 0
        """Plans that have not ended and are not handed in."""

    def __len__(self) -> int:
        return len(self._plans)

    def awaits(self, work: int) -> bool:
        """Whether the end of this piece of work is worth telling."""
        return work in self._awaited or work in self._attempts

    def work_of(self, attempt: int) -> int:
        """The plan of an attempt that is under way; 0 where there is none."""
        plan = self._attempts.get(attempt)
        return 0 if plan is None else plan.work

    def has_lineage(self, work: int) -> bool:
        """Whether it is a plan whose value is made again when it is lost."""
        plan = self._plans.get(work)
        return plan is not None and plan.lineage

    def scheduled(self, attempt: int, payload: bytes) -> Scheduled | None:
        """This attempt as work like any other; None where it is not under way any more."""
        plan = self._attempts.get(attempt)
        if plan is None:
            return None
        options = None if plan.options is PLAIN else {attempt: plan.options}
        return Scheduled([(attempt, plan.fn, payload)], (attempt,) if plan.keep else (), options)

    def waiting_for(self, work: int) -> Sequence[int]:
        """The plans that wait for this piece of work."""
        return tuple(self._awaited.get(work, ()))

    @property
    def attempts(self) -> list[int]:
        """Those that are under way."""
        return list(self._attempts)

    @property
    def deadline(self) -> float | None:
        """When `handle(Ticked(), now)` is next worth calling; None for never."""
        while self._due:
            until, work = self._due[0]
            plan = self._plans.get(work)
            if plan is not None and not plan.made:
                return until
            heapq.heappop(self._due)
        return None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event and return what must be done about it, in order. `now` is monotonic seconds."""
        effects: list[Effect] = []
        match event:
            case Planned():
                self._plan(event, effects)
            case Ended(number, kind, lost):
                self._ended(number, kind, lost, effects)
            case ValueLost(work, attempt):
                self._value_lost(work, attempt, effects)
            case ValueDropped(attempt):
                self._value_dropped(attempt, effects)
            case CancelAsked(works):
                self._cancel(works, effects)
            case FunctionsUnused(functions):
                self._unused.update(functions)
                self._drop(functions, effects)
            case RoundEnding():
                self._ending = True
            case RoundOver():
                self._round_over(effects)
            case GiveUp():
                self._give_up(effects)
            case Ticked():
                self._tick(now, effects)
        while self._followups:
            work, well = self._followups.popleft()
            if well is not None:
                self._tell(work, well, effects)
            elif work in self._lost and not self._ending:
                self._make_again(self._plans[work], effects)
        return effects

    # -- beginning ----------------------------------------------------------------------------------------------

    def _plan(self, planned: Planned, effects: list[Effect]) -> None:
        plan = self._plans[planned.work] = _Plan(planned)
        self._uses[plan.fn] = self._uses.get(plan.fn, 0) + 1
        self.waiting += 1
        if planned.until is not None:
            heapq.heappush(self._due, (planned.until, plan.work))
        if planned.failed:
            self._end(plan, INPUT_FAILED, effects, planned.failed)
            return
        for work in plan.inputs:
            if not self._is_available(work):
                self._await(plan, work)
        self._go_on(plan, effects)

    def _begin_again(self, plan: _Plan, effects: list[Effect]) -> None:
        """All that it needs was there once; what has a lineage may be lost since."""
        for work in plan.inputs:
            if work not in self._plans:
                self._end(plan, INPUT_FAILED, effects, work)
                return
            if not self._is_available(work):
                self._await(plan, work)
        self._go_on(plan, effects)

    def _is_available(self, work: int) -> bool:
        plan = self._plans.get(work)
        return plan is not None and plan.is_available and work not in self._lost

    def _await(self, plan: _Plan, work: int) -> None:
        plan.missing.add(work)
        self._awaited.setdefault(work, {})[plan.work] = None
        if work in self._lost:
            self._followups.append((work, None))

    def _go_on(self, plan: _Plan, effects: list[Effect]) -> None:
        if plan.missing or self._ending:
            return
        plan.attempt = self.next_attempt
        self.next_attempt += 1
        plan.used = {work: self._plans[work].made for work in plan.inputs}
        self._attempts[plan.attempt] = plan
        if not plan.made:
            self.waiting -= 1
        effects.append(HandIn(plan.work, plan.attempt))

    # -- ends of attempts and of inputs ----------------------------------------------------------------------------

    def _ended(self, number: int, kind: int, lost: int, effects: list[Effect]) -> None:
        plan = self._attempts.pop(number, None)
        if plan is None:
            if number < FIRST_ATTEMPT:
                self._followups.append((number, kind in (VALUE, KEPT)))
            return
        plan.attempt = 0
        if not plan.made:
            self.waiting += 1
        if kind in (VALUE, KEPT):
            self._succeed(plan, number, kind, effects)
        elif lost and self.has_lineage(lost):
            self._input_lost(plan, lost, effects)
        elif kind == ERROR and not lost and plan.retries and not self._ending:
            plan.retries -= 1
            self._begin_again(plan, effects)
        elif kind == CANCELLED and plan.made and self._ending:
            self._rest(plan)
        else:
            self._end(plan, None, effects)

    def _succeed(self, plan: _Plan, number: int, kind: int, effects: list[Effect]) -> None:
        if plan.made:
            effects.append(Remade(plan.work, new=True))
        else:
            self.waiting -= 1
            effects.append(End(plan.work))
        if plan.lineage and kind == KEPT:
            self._made.pop(plan.made, None)
            plan.made = number
            plan.wanted = plan.dropped = False
            self._made[number] = plan
        else:
            self._remove(plan, effects)
        self._followups.append((plan.work, True))

    def _tell(self, work: int, well: bool, effects: list[Effect]) -> None:
        """Those who wait for this piece of work learn that it has ended."""
        if not well and self._ending:
            return  # who waits ends with the round
        for waiting in self._awaited.pop(work, ()):
            plan = self._plans.get(waiting)
            if plan is None or work not in plan.missing:
                continue
            if not well:
                self._end(plan, INPUT_FAILED, effects, work)
                continue
            plan.missing.discard(work)
            if work not in self._plans:  # it is there for good
                plan.inputs = tuple(other for other in plan.inputs if other != work)
            if plan.missing:
                continue
            if self._ending:
                self._rest(
                    plan
                )  # its value is lost still: without inputs that it waits for it would pass for one that is there
            else:
                self._begin_again(plan, effects)

    def _end(self, plan: _Plan, kind: int | None, effects: list[Effect], cause: int = 0) -> None:
        if not plan.made and not plan.attempt:
            self.waiting -= 1
        effects.append(End(plan.work, kind, cause, plan.made > 0))
        self._remove(plan, effects)
        self._followups.append((plan.work, False))

    def _remove(self, plan: _Plan, effects: list[Effect]) -> None:
        del self._plans[plan.work]
        self._made.pop(plan.made, None)
        self._lost.discard(plan.work)
        if plan.attempt:
            del self._attempts[plan.attempt]
            effects.append(WithdrawAttempts([plan.attempt]))
        for work in plan.missing:
            waiting = self._awaited.get(work)
            if waiting is not None:
                waiting.pop(plan.work, None)
                if not waiting:
                    del self._awaited[work]
        if len(self._due) > 2 * len(self._plans) + DUE_SPARE:  # of work that ended long before its time
            self._due = [(each.until, each.work) for each in self._plans.values() if each.until is not None]
            heapq.heapify(self._due)
        self._uses[plan.fn] -= 1
        self._drop([plan.fn], effects)
        effects.append(Free(plan.work))

    def _drop(self, functions: Iterable[int], effects: list[Effect]) -> None:
        unused = [fn for fn in functions if fn in self._unused and not self._uses.get(fn)]
        self._unused.difference_update(unused)
        for fn in functions:
            if not self._uses.get(fn):
                self._uses.pop(fn, None)
        if unused:
            effects.append(DropFunctions(unused))

    # -- values that are lost -----------------------------------------------------------------------------------

    def _input_lost(self, plan: _Plan, lost: int, effects: list[Effect]) -> None:
        maker = self._plans[lost]
        if maker.is_available and maker.made == plan.used.get(lost):
            self._lost.add(lost)
        if self._ending:
            self._rest(plan)
        else:
            self._begin_again(plan, effects)

    def _make_again(self, plan: _Plan, effects: list[Effect]) -> None:
        """`plan` has been made and is lost."""
        self._lost.discard(plan.work)
        if plan.remakes == self.remakes_max:
            self._end(plan, UNAVAILABLE, effects)
            return
        plan.remakes += 1
        self._begin_again(plan, effects)

    def _rest(self, plan: _Plan) -> None:
        """The round ends, and what it was making with it. A value that is asked for is made again after that."""
        if plan.made:
            plan.missing = set()
            plan.remakes -= 1
            self._lost.add(plan.work)

    def _value_lost(self, work: int, attempt: int, effects: list[Effect]) -> None:
        plan = self._plans.get(work)
        if plan is None or (plan.is_available and plan.made != attempt):
            effects.append(Remade(work, new=False))
        elif plan.is_available:
            self._lost.add(work)
            plan.wanted = True
            if not self._ending:
                self._followups.append((work, None))
        else:
            plan.wanted = True  # should it be given up with the round

    def _value_dropped(self, attempt: int, effects: list[Effect]) -> None:
        plan = self._made.get(attempt)
        if plan is None:
            return
        if plan.is_available:
            self._remove(plan, effects)
        else:
            plan.dropped = True

    # -- from the user, and time ----------------------------------------------------------------------------------

    def _cancel(self, works: list[int], effects: list[Effect]) -> None:
        for work in works:
            plan = self._plans.get(work)
            if plan is None or plan.made:
                continue
            plan.retries = 0
            if plan.attempt:
                effects.append(WithdrawAttempts([plan.attempt]))
            else:
                self._end(plan, CANCELLED, effects)

    def _round_over(self, effects: list[Effect]) -> None:
        for plan in list(self._plans.values()):
            if not plan.made:
                self._end(plan, CANCELLED, effects)
            elif not plan.is_available:
                if plan.attempt:
                    effects.append(WithdrawAttempts([plan.attempt]))
                    del self._attempts[plan.attempt]
                    plan.attempt = 0
                self._rest(plan)
        self._awaited.clear()
        self._followups.clear()
        self._ending = False
        for work in sorted(self._lost):
            plan = self._plans[work]
            if plan.dropped:
                self._remove(plan, effects)
            elif plan.wanted:
                self._followups.append((work, None))

    def _give_up(self, effects: list[Effect]) -> None:
        for plan in list(self._plans.values()):
            if plan.made:
                effects.append(Remade(plan.work, new=False))
                self._remove(plan, effects)
            else:
                self._end(plan, None, effects)
        self._awaited.clear()
        self._followups.clear()

    def _tick(self, now: float, effects: list[Effect]) -> None:
        while (deadline := self.deadline) is not None and deadline <= now:
            _, work = heapq.heappop(self._due)
            self._end(self._plans[work], TIMED_OUT, effects)

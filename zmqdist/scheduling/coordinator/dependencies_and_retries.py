"""Decisions about work with inputs, retries, a timeout or a lineage, before and after the dispatcher; no I/O.

Theory of operation
    A work item with one of these is a *plan*; other work bypasses this module. A plan waits for its inputs, which are other work
    items. It is then handed in as an *attempt*: a work item for closures.py, with a number of its own. The end of the attempt decides
    about the plan: the plan ends, or another attempt begins.
    A plan with a lineage remains after its success, as long as its value can be used. If the value is lost, another attempt
    recomputes it, after its lost inputs have been recomputed.

Promises, checked by tests/machines/test_graph.py with random events, and tests/sim
    G1  each plan ends exactly once; with its round at the latest
    G2  an attempt is handed in only when all inputs of its plan are available
    G3  a plan with a failed input fails for that reason and is not handed in any more
    G4  at most 1 + retries attempts end with an error of the function; apart from these only lost work is tried again
    G5  between the request for the end of a round and that end no attempt is handed in
    G6  a plan that is not done at its `until` ends then, and its attempt is cancelled
    G7  a lost value with a lineage is recomputed on request, at most `recomputations_max` times; then the waiting requests are served
    G8  a function is dropped once no plan can be handed in with it any more, and not before
    G9  the data held for a plan is freed exactly once: after the plan has ended and, with a lineage, after its value was released

Not here: payloads, and the values that the program holds (task_specs.py).
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
"""Kind of an end: no dispatcher or no worker for too long, or the result cannot be reached."""
INPUT_FAILED: Final = 12
"""Kind of an end: an input has failed."""
TIMED_OUT: Final = 13
"""Kind of an end: `until` has passed."""

FIRST_ATTEMPT: Final = 1 << 48
"""The first number of an attempt; the numbers of the program's work items stay below."""

DUE_SPARE: Final = 64
"""How many obsolete entries the heap of due times may have before it is rebuilt."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The program scheduled a plan.

    Attributes:
      inputs: the work items it needs that are pending or have a lineage. Inputs whose values are available for good are left out.
      failed: an input that has failed already; 0 for none.
      retries: how many errors of the function are followed by another attempt.
      until: seconds on the machine's clock.
      lineage: whether its worker keeps the value and a lost value is recomputed.
      keep, options: as in Scheduled, for each attempt.
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
    """An attempt, or a work item that plans wait for, has ended. `lost` is the input that its worker could not get; 0 for none."""

    number: int
    kind: int
    lost: int = 0


@dataclass(frozen=True, slots=True)
class ValueLost:
    """The program requests the value of an attempt, and the value is no longer where it was kept."""

    work: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ValueDropped:
    """The value of this attempt can no longer be used by anything."""

    attempt: int


@dataclass(frozen=True, slots=True)
class PlansCancelled:
    """The program cancelled these work items; those that are not plans are ignored."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class FunctionsUnused:
    """The program will schedule no more work with these functions."""

    functions: list[int]


@dataclass(frozen=True, slots=True)
class RoundEnding:
    """A thread waits to raise the round's error."""


@dataclass(frozen=True, slots=True)
class RoundOver:
    """No work of the round can be executing any more."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """All plans stop; unfinished ones end with the error that the sender of this event has."""


Event: TypeAlias = (
    Planned
    | GiveUp
    | Ended
    | ValueLost
    | ValueDropped
    | PlansCancelled
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
    """A plan has ended; or one that had succeeded has lost its value for good (`had_succeeded`).

    Attributes:
      kind: CANCELLED, INPUT_FAILED, TIMED_OUT or UNAVAILABLE (lost too often); None: as the attempt that has just ended.
      cause: the failed input, for INPUT_FAILED.
      had_succeeded: whether the plan had succeeded before.
    """

    work: int
    kind: int | None = None
    cause: int = 0
    had_succeeded: bool = False


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The value of a plan is available again: from the attempt that has just ended (`new`), or it is newer than the requested one."""

    work: int
    new: bool


@dataclass(frozen=True, slots=True)
class CancelAttempts:
    """The results of these attempts are no longer needed."""

    attempts: list[int]


@dataclass(frozen=True, slots=True)
class DropFunctions:
    """No plan needs these functions any more."""

    functions: list[int]


@dataclass(frozen=True, slots=True)
class Free:
    """The data held for a plan is no longer needed."""

    work: int


Effect: TypeAlias = HandIn | End | Recomputed | CancelAttempts | DropFunctions | Free


class _Plan:
    """One plan.

    Attributes:
      inputs, missing: the inputs as planned, and those of them that it waits for.
      attempt: the attempt in progress; 0 for none.
      value_attempt: the attempt that computed its value; 0 before the first success.
      recomputations: how often its lost value was recomputed.
      used: for each input with a lineage, the attempt whose value the present attempt got.
      wanted: whether its value was requested and must be recomputed when the round is over.
      dropped: whether its old value can no longer be used by anything.
    """

    __slots__ = (
        "attempt",
        "dropped",
        "fn",
        "inputs",
        "keep",
        "lineage",
        "missing",
        "options",
        "recomputations",
        "retries",
        "until",
        "used",
        "value_attempt",
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
        self.attempt = self.value_attempt = self.recomputations = 0
        self.used: dict[int, int] = {}
        self.wanted = self.dropped = False

    @property
    def is_available(self) -> bool:
        return self.value_attempt > 0 and not self.attempt and not self.missing


class Dependencies:
    """All plans of a coordinator; the module's docstring has the rules.

    Args:
      recomputations_max: how often a lost value is recomputed.
      first: the number of the first attempt.

    Attributes:
      waiting: how many plans have neither ended nor been handed in.
    """

    def __init__(self, *, recomputations_max: int, first: int = FIRST_ATTEMPT) -> None:
        self.recomputations_max = recomputations_max
        self.next_attempt = first
        self._plans: dict[int, _Plan] = {}
        self._attempts: dict[int, _Plan] = {}
        self._by_value: dict[int, _Plan] = {}
        """Plans with a lineage that have succeeded, by the attempt that computed their value."""
        self._awaited: dict[int, dict[int, None]] = {}
        """The plans that wait for an input, in order of arrival."""
        self._lost: set[int] = set()
        """Plans that have succeeded, whose value is lost and is not being recomputed."""
        self._followups: deque[tuple[int, bool | None]] = deque()
        """What follows from an event: (work, whether it succeeded; None: recompute it). A queue, because recursion could be too deep."""
        self._due: list[tuple[float, int]] = []
        self._uses: dict[int, int] = {}
        self._unused: set[int] = set()
        self._ending = False
        self.waiting = 0

    def __len__(self) -> int:
        return len(self._plans)

    def awaits(self, work: int) -> bool:
        """Return whether plans must learn of the end of this work item."""
        return work in self._awaited or work in self._attempts

    def work_of(self, attempt: int) -> int:
        """Return the plan of an attempt in progress; 0 if there is none."""
        plan = self._attempts.get(attempt)
        return 0 if plan is None else plan.work

    def has_lineage(self, work: int) -> bool:
        """Return whether this is a plan whose lost value is recomputed."""
        plan = self._plans.get(work)
        return plan is not None and plan.lineage

    def scheduled(self, attempt: int, payload: bytes) -> Scheduled | None:
        """Return this attempt as an ordinary work item; None if it is no longer in progress."""
        plan = self._attempts.get(attempt)
        if plan is None:
            return None
        options = None if plan.options is PLAIN else {attempt: plan.options}
        return Scheduled([(attempt, plan.fn, payload)], (attempt,) if plan.keep else (), options)

    def waiting_for(self, work: int) -> Sequence[int]:
        """Return the plans that wait for this work item."""
        return tuple(self._awaited.get(work, ()))

    @property
    def attempts(self) -> list[int]:
        """The attempts in progress."""
        return list(self._attempts)

    @property
    def deadline(self) -> float | None:
        """When `handle(Ticked(), now)` is next worth calling; None for never."""
        while self._due:
            until, work = self._due[0]
            plan = self._plans.get(work)
            if plan is not None and not plan.value_attempt:
                return until
            heapq.heappop(self._due)
        return None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event and return the effects to carry out, in order. `now` is monotonic seconds."""
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
            case PlansCancelled(works):
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
            work, succeeded = self._followups.popleft()
            if succeeded is not None:
                self._notify_waiting(work, succeeded, effects)
            elif work in self._lost and not self._ending:
                self._recompute(self._plans[work], effects)
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
        self._hand_in_when_ready(plan, effects)

    def _begin_again(self, plan: _Plan, effects: list[Effect]) -> None:
        """Hand in another attempt once the inputs are available. All were available before; those with a lineage may be lost by now."""
        if plan.dropped and plan.work not in self._awaited:  # no program can get its value
            self._remove(plan, effects)
            return
        for work in plan.inputs:
            if work not in self._plans:
                self._end(plan, INPUT_FAILED, effects, work)
                return
            if not self._is_available(work):
                self._await(plan, work)
        self._hand_in_when_ready(plan, effects)

    def _is_available(self, work: int) -> bool:
        plan = self._plans.get(work)
        return plan is not None and plan.is_available and work not in self._lost

    def _await(self, plan: _Plan, work: int) -> None:
        plan.missing.add(work)
        self._awaited.setdefault(work, {})[plan.work] = None
        if work in self._lost:
            self._followups.append((work, None))

    def _hand_in_when_ready(self, plan: _Plan, effects: list[Effect]) -> None:
        if plan.missing or self._ending:
            return
        plan.attempt = self.next_attempt
        self.next_attempt += 1
        plan.used = {work: self._plans[work].value_attempt for work in plan.inputs}
        self._attempts[plan.attempt] = plan
        if not plan.value_attempt:
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
        if not plan.value_attempt:
            self.waiting += 1
        if kind in (VALUE, KEPT):
            self._succeed(plan, number, kind, effects)
        elif lost and self.has_lineage(lost):
            self._input_lost(plan, lost, effects)
        elif kind == ERROR and not lost and plan.retries and not self._ending:  # G4, G5
            plan.retries -= 1
            self._begin_again(plan, effects)
        elif kind == CANCELLED and plan.value_attempt and self._ending:
            self._suspend_recomputation(plan)
        else:
            self._end(plan, None, effects)

    def _succeed(self, plan: _Plan, number: int, kind: int, effects: list[Effect]) -> None:
        if plan.value_attempt:
            effects.append(Recomputed(plan.work, new=True))
        else:
            self.waiting -= 1
            effects.append(End(plan.work))
        if plan.lineage and kind == KEPT:
            self._by_value.pop(plan.value_attempt, None)
            plan.value_attempt = number
            plan.wanted = plan.dropped = False
            self._by_value[number] = plan
        else:
            self._remove(plan, effects)
        self._followups.append((plan.work, True))

    def _notify_waiting(self, work: int, succeeded: bool, effects: list[Effect]) -> None:
        """Continue the plans that wait for this work item, which has ended."""
        if not succeeded and self._ending:
            return  # the waiting plans end with the round
        for waiting in self._awaited.pop(work, ()):
            plan = self._plans.get(waiting)
            if plan is None or work not in plan.missing:
                continue
            if not succeeded:
                self._end(plan, INPUT_FAILED, effects, work)
                continue
            plan.missing.discard(work)
            if work not in self._plans:  # its value is available for good
                plan.inputs = tuple(other for other in plan.inputs if other != work)
            if plan.missing:
                continue
            if self._ending:
                # Its value is still lost, but with no missing inputs it would count as available.
                self._suspend_recomputation(plan)
            else:
                self._begin_again(plan, effects)

    def _end(self, plan: _Plan, kind: int | None, effects: list[Effect], cause: int = 0) -> None:
        if not plan.value_attempt and not plan.attempt:
            self.waiting -= 1
        effects.append(End(plan.work, kind, cause, plan.value_attempt > 0))
        self._remove(plan, effects)
        self._followups.append((plan.work, False))

    def _remove(self, plan: _Plan, effects: list[Effect]) -> None:
        del self._plans[plan.work]
        self._by_value.pop(plan.value_attempt, None)
        self._lost.discard(plan.work)
        if plan.attempt:
            del self._attempts[plan.attempt]
            effects.append(CancelAttempts([plan.attempt]))
        for work in plan.missing:
            waiting = self._awaited.get(work)
            if waiting is not None:
                waiting.pop(plan.work, None)
                if not waiting:
                    del self._awaited[work]
        # Plans that ended before their time leave their entries behind.
        if len(self._due) > 2 * len(self._plans) + DUE_SPARE:
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
        if maker.is_available and maker.value_attempt == plan.used.get(lost):
            self._lost.add(lost)
        if self._ending:
            self._suspend_recomputation(plan)
        else:
            self._begin_again(plan, effects)

    def _recompute(self, plan: _Plan, effects: list[Effect]) -> None:
        """Recompute the lost value of `plan`, at most `recomputations_max` times (G7)."""
        self._lost.discard(plan.work)
        if plan.recomputations == self.recomputations_max:
            self._end(plan, UNAVAILABLE, effects)
            return
        plan.recomputations += 1
        self._begin_again(plan, effects)

    def _suspend_recomputation(self, plan: _Plan) -> None:
        """Stop recomputing a value because the round ends. A requested value is recomputed after the round."""
        if plan.value_attempt:
            plan.missing = set()
            plan.recomputations -= 1
            self._lost.add(plan.work)

    def _value_lost(self, work: int, attempt: int, effects: list[Effect]) -> None:
        plan = self._plans.get(work)
        if plan is None or (plan.is_available and plan.value_attempt != attempt):
            effects.append(Recomputed(work, new=False))
        elif plan.is_available:
            self._lost.add(work)
            plan.wanted = True
            if not self._ending:
                self._followups.append((work, None))
        else:
            plan.wanted = True  # in case the end of the round stops the computation in progress

    def _value_dropped(self, attempt: int, effects: list[Effect]) -> None:
        plan = self._by_value.get(attempt)
        if plan is None:
            return
        if plan.is_available or not (plan.attempt or plan.work in self._awaited):
            self._remove(plan, effects)
        else:
            plan.dropped = True

    # -- from the user, and time ----------------------------------------------------------------------------------

    def _cancel(self, works: list[int], effects: list[Effect]) -> None:
        for work in works:
            plan = self._plans.get(work)
            if plan is None or plan.value_attempt:
                continue
            plan.retries = 0
            if plan.attempt:
                effects.append(CancelAttempts([plan.attempt]))
            else:
                self._end(plan, CANCELLED, effects)

    def _round_over(self, effects: list[Effect]) -> None:
        for plan in list(self._plans.values()):
            if not plan.value_attempt:
                self._end(plan, CANCELLED, effects)
            elif not plan.is_available:
                if plan.attempt:
                    effects.append(CancelAttempts([plan.attempt]))
                    del self._attempts[plan.attempt]
                    plan.attempt = 0
                self._suspend_recomputation(plan)
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
            if plan.value_attempt:
                effects.append(Recomputed(plan.work, new=False))
                self._remove(plan, effects)
            else:
                self._end(plan, None, effects)
        self._awaited.clear()
        self._followups.clear()

    def _tick(self, now: float, effects: list[Effect]) -> None:
        while (deadline := self.deadline) is not None and deadline <= now:
            _, work = heapq.heappop(self._due)
            self._end(self._plans[work], TIMED_OUT, effects)

"""Decisions about work with inputs, retries, a timeout or a lineage: when it is handed in and how
it ends; no I/O.

Theory of operation
    A work item with inputs, retries, a timeout or a lineage is a *plan*; other work bypasses this
    module. A plan waits for its inputs, which are other work items. It is then handed in as an
    *attempt*: a work item for closures.py, with a number of its own. When the attempt ends, either
    the plan ends or another attempt begins.
    A plan with a lineage remains after its success, as long as its value can be used. If the value
    is lost, another attempt recomputes the value, after the lost inputs of the plan have been
    recomputed.

Promises, checked by tests/machines/test_graph.py with random events, and tests/sim
    G1  each plan ends exactly once, at the latest when its round ends
    G2  an attempt is handed in only when all inputs of its plan are available
    G3  a plan with a failed input fails with INPUT_FAILED, and no attempt of the plan is handed in
        after that
    G4  at most 1 + retries attempts of a plan end with an error of the function; further attempts
        begin only because a value was lost
    G5  from the request for the end of a round until the round has ended, no attempt is handed in
    G6  a plan that has not ended by its `until` ends then, and its attempt is cancelled
    G7  a lost value with a lineage is recomputed on request, at most `recomputations_max` times;
        then the waiting requests are served
    G8  a function that the program no longer uses is dropped as soon as no remaining plan uses it,
        and not earlier
    G9  the data held for a plan is freed exactly once: after the plan has ended and, with a
        lineage, after its value was released

Not here: payloads, and the RemoteValues that the program holds (task_specs.py).
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
"""A way in which work ends: each of its starts was lost, and the dispatcher allows no further
start."""
UNAVAILABLE: Final = 11
"""A way in which work ends: there was no dispatcher or no worker for too long, or its result cannot
be reached."""
INPUT_FAILED: Final = 12
"""A way in which work ends: an input has failed."""
TIMED_OUT: Final = 13
"""A way in which work ends: its `until` has passed."""

FIRST_ATTEMPT: Final = 1 << 48
"""The first number of an attempt; all numbers of the program's work items are lower."""

DUE_SPARE: Final = 64
"""The heap of deadlines is rebuilt when the number of its entries exceeds twice the number of plans
by more than this."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The program scheduled a plan.

    Attributes:
      inputs: the inputs that are pending or have a lineage. Inputs whose values are available for
        good are left out.
      failed: an input that has failed already; 0 if no input has failed.
      retries: how often the plan is attempted again after an error of the function.
      until: the time at which the plan ends at the latest, in seconds by the machine's clock; None
        for no limit.
      lineage: whether the worker keeps the value, and the plan recomputes the value when it is
        lost.
      keep, options: as in Scheduled; they apply to each attempt.
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
    """An attempt, or a work item that plans wait for, has ended. `lost` is the input that the
    worker could not fetch; 0 means that no input was lost."""

    number: int
    kind: int
    lost: int = 0


@dataclass(frozen=True, slots=True)
class ValueLost:
    """The program requests the value of an attempt, but its worker no longer holds that value."""

    work: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ValueDropped:
    """Neither the program nor any work item needs the value of this attempt any more."""

    attempt: int


@dataclass(frozen=True, slots=True)
class PlansCancelled:
    """The program cancelled these work items. The machine ignores work items that are not plans."""

    works: list[int]


@dataclass(frozen=True, slots=True)
class FunctionsUnused:
    """The program will schedule no more work with these functions."""

    functions: list[int]


@dataclass(frozen=True, slots=True)
class RoundEnding:
    """A thread of the program waits to raise the error of the round, so no more attempts may
    begin.
    """


@dataclass(frozen=True, slots=True)
class RoundOver:
    """No work of the round can be executing any more."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """All plans must be dropped. The `End` of an unfinished plan has kind None, because
    CoordinatorMachine chooses the error."""


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
    """Pack this plan and schedule it as an ordinary work item under the number of the attempt."""

    work: int
    attempt: int


@dataclass(frozen=True, slots=True)
class End:
    """A plan has ended; or, with `had_succeeded`, a plan that ended earlier with success has lost
    its value for good.

    Attributes:
      kind: CANCELLED, INPUT_FAILED, TIMED_OUT or UNAVAILABLE (lost too often). None means the kind
        of the attempt that has just ended.
      cause: the failed input, for INPUT_FAILED.
      had_succeeded: whether the plan had ended with success before.
    """

    work: int
    kind: int | None = None
    cause: int = 0
    had_succeeded: bool = False


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Wake the threads that wait for a plan's lost value, because the value was recomputed or never
    will be. `new` says whether the attempt that has just ended has recomputed the value."""

    work: int
    new: bool


@dataclass(frozen=True, slots=True)
class CancelAttempts:
    """Cancel these attempts, because their results are no longer needed."""

    attempts: list[int]


@dataclass(frozen=True, slots=True)
class DropFunctions:
    """Drop these functions, because no plan needs them any more."""

    functions: list[int]


@dataclass(frozen=True, slots=True)
class Free:
    """Release the data held for this plan, because it is no longer needed."""

    work: int


Effect: TypeAlias = HandIn | End | Recomputed | CancelAttempts | DropFunctions | Free


class _Plan:
    """One plan, from its scheduling until its data is freed.

    Attributes:
      inputs, missing: the inputs, as in Planned; the subset of the inputs for which the plan still
        waits.
      attempt: the attempt in progress; 0 if no attempt is in progress.
      value_attempt: the attempt that computed the value; 0 before the first success.
      recomputations: how often the lost value was recomputed.
      used: for each input with a lineage, the attempt whose value this plan's latest attempt got.
      wanted: whether the program has requested the lost value, so that the value must be recomputed
        when the round is over.
      dropped: whether neither the program nor any work item needs the lost value any more.
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
      recomputations_max: how often the lost value of one plan is recomputed.
      first: the number of the first attempt.

    Attributes:
      waiting: the number of plans that have not ended and have no attempt in progress.
    """

    def __init__(self, *, recomputations_max: int, first: int = FIRST_ATTEMPT) -> None:
        self.recomputations_max = recomputations_max
        self.next_attempt = first
        self._plans: dict[int, _Plan] = {}
        self._attempts: dict[int, _Plan] = {}
        self._by_value: dict[int, _Plan] = {}
        """Plans with a lineage that have succeeded, by the attempt that computed their value."""
        self._awaited: dict[int, dict[int, None]] = {}
        """The plans that wait for each input, in order of arrival: input -> plans."""
        self._lost: set[int] = set()
        """The plans that have succeeded and whose value is lost, but is not being recomputed
        yet.
        """
        self._followups: deque[tuple[int, bool | None]] = deque()
        """What `handle` has yet to process: (work, whether it has succeeded) for ended work, (work,
        None) for a value to recompute."""
        self._due: list[tuple[float, int]] = []
        self._uses: dict[int, int] = {}
        self._unused: set[int] = set()
        self._ending = False
        self.waiting = 0

    def __len__(self) -> int:
        return len(self._plans)

    def awaits(self, work: int) -> bool:
        """Return whether a plan depends on the end of this work item or attempt."""
        return work in self._awaited or work in self._attempts

    def work_of(self, attempt: int) -> int:
        """Return the work number of the plan that has this attempt in progress; 0 if the attempt is
        not in progress."""
        plan = self._attempts.get(attempt)
        return 0 if plan is None else plan.work

    def has_lineage(self, work: int) -> bool:
        """Return whether this work item is a plan with a lineage, whose value is recomputed when it
        is lost."""
        plan = self._plans.get(work)
        return plan is not None and plan.lineage

    def scheduled(self, attempt: int, payload: bytes) -> Scheduled | None:
        """Return the event that schedules this attempt as an ordinary work item; None if the
        attempt is no longer in progress."""
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
        """The time at which the runtime must next call `handle(Ticked(), now)`; None means
        never.
        """
        while self._due:
            until, work = self._due[0]
            plan = self._plans.get(work)
            if plan is not None and not plan.value_attempt:
                return until
            heapq.heappop(self._due)
        return None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event and return the effects to carry out, in order. `now` is monotonic
        seconds."""
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

    # -- beginning ---------------------------------------------------------------------------------

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
        """Hand in another attempt once all inputs are available. An input with a lineage may have
        been lost since the last attempt."""
        if plan.dropped and plan.work not in self._awaited:
            # neither the program nor another plan needs the value
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

    # -- ends of attempts and of inputs ------------------------------------------------------------

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
        elif kind == ERROR and not lost and plan.retries and not self._ending:
            # G4, G5: the function itself failed
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
        """If this work item failed, fail the plans that wait for it. If it succeeded, hand in those
        plans that wait for no other input."""
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
            if work not in self._plans:
                # the input's value is available for good, so it is no longer tracked
                plan.inputs = tuple(other for other in plan.inputs if other != work)
            if plan.missing:
                continue
            if self._ending:
                # Mark the plan's own value as lost again. Otherwise it would count as available,
                # because the plan has no missing inputs.
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
        # A plan that ends before its deadline leaves its entry in the heap. Make the heap anew when
        # most entries are of ended plans.
        if len(self._due) > 2 * len(self._plans) + DUE_SPARE:
            self._due = [
                (each.until, each.work) for each in self._plans.values() if each.until is not None
            ]
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

    # -- values that are lost ----------------------------------------------------------------------

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
        """Stop recomputing a value while the round ends. After the round, a value that the program
        has requested is recomputed."""
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
            # if the end of the round stops this recomputation, `_round_over` begins it again
            plan.wanted = True

    def _value_dropped(self, attempt: int, effects: list[Effect]) -> None:
        plan = self._by_value.get(attempt)
        if plan is None:
            return
        if plan.is_available or not (plan.attempt or plan.work in self._awaited):
            self._remove(plan, effects)
        else:
            plan.dropped = True

    # -- from the user, and time -------------------------------------------------------------------

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

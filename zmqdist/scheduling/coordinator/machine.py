"""The coordinator's machine: it decides how all scheduled work proceeds and ends; no I/O.

Theory of operation
    The machine consists of two parts, which never call each other:
      closures.py                   work that the dispatcher has or will get, and the workers that pinned work waits for (affinity.py)
      dependencies_and_retries.py   plans: work with inputs, retries, a timeout or a lineage
    A plan becomes attempts, which are work items for closures.py with numbers from FIRST_ATTEMPT
    on. Only this module passes the end of an attempt to its plan, and the effects of plans to
    closures.py. It passes these one after the other, never nested. A HandIn requests that the
    runtime pack an attempt. The runtime replies with AttemptPacked before it passes another event.

Promises, in addition to those of the parts, checked by tests/machines/test_coordinator_machine.py
and tests/sim
    C1  each work item of the program, plan or not, is resolved exactly once; the number of an
        attempt is never resolved
    C2  a round fails if and only if a work item of the program fails after all its retries: by an
        error of the function, too many lost starts, a failed input, its timeout, or a lack of
        workers. Detached work never fails a round; with `rounds=False` no work does
    C3  Resolve precedes the effects that it makes possible: KeepInput, then HandIn
    C4  as soon as the dispatcher has refused the coordinator for good, all work ends with the
        dispatcher's error

Not here: payloads and exceptions, which are opaque to the machine, and threads that wait
(runtime.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final

from zmqdist.events import Heard, Ticked
from zmqdist.messages import ERROR, INPUT_LOST, KEPT, VALUE
from zmqdist.scheduling.coordinator import dependencies_and_retries as dependencies
from zmqdist.scheduling.coordinator.affinity import Scheduled
from zmqdist.scheduling.coordinator.closures import Closures
from zmqdist.scheduling.coordinator.coordinator_events import (
    AttemptPacked,
    CancelRequested,
    CoordinatorRefused,
    DispatcherDown,
    EndRoundRequested,
    Event,
    FunctionsDropped,
    KeptDropped,
    PackingFailed,
    UnfinishedFailed,
)
from zmqdist.scheduling.coordinator.dependencies_and_retries import (
    FIRST_ATTEMPT,
    INPUT_FAILED,
    LOST,
    TIMED_OUT,
    UNAVAILABLE,
    Dependencies,
    Planned,
    ValueLost,
)
from zmqdist.scheduling.coordinator.effects import (
    Effect,
    KeepInput,
    KeptAt,
    Replace,
    Resolve,
    RoundRefused,
    RoundSettled,
)

FAILURES: Final = frozenset({ERROR, LOST, UNAVAILABLE, INPUT_FAILED, TIMED_OUT})
"""The kinds of ends with which a work item fails its round."""

ROUND: Final = 0
"""Stands for the whole round in a field that otherwise has a work number. No work item has this
number."""


class CoordinatorMachine:
    """The machine of a coordinator, made of two parts; the module's docstring has the rules.

    Args:
      closures, plans: the two parts. The CoordinatorMachine owns them; other code may only read
        them.
      decode_loss: decodes the payload of an INPUT_LOST into the lost input and the packed error.
      rounds: whether failed work fails its round.

    Attributes:
      failed: the work item whose error was the first of the present round; ROUND if the round
        failed because the dispatcher refused the coordinator; None while the round has not failed.
    """

    def __init__(
        self,
        closures: Closures,
        plans: Dependencies,
        decode_loss: Callable[[bytes], tuple[int, bytes]],
        *,
        rounds: bool = True,
    ) -> None:
        self.closures, self.plans = closures, plans
        self.failed: int | None = None
        self._decode_loss = decode_loss
        self._rounds = rounds
        self._refusal: bytes | None = None
        self._planned = False
        """Whether a plan was ever scheduled. Until then results need not be translated, because no
        result can belong to an attempt."""
        self._events: deque[Event] = deque()
        """Events that the closures have yet to handle, in order."""
        self._ended: list[tuple[int, int, Any]] = []
        self._replaced: list[Effect] = []
        """The Replace effects that must precede the Resolve of `_ended`, because work may have
        failed for lack of a replaced value."""
        self._after_resolve: list[Effect] = []
        """The effects of the plans that must follow the Resolve of `_ended` (C3)."""

    @property
    def deadline(self) -> float | None:
        """The time at which the runtime must next call `handle(Ticked(), now)`; None means
        never.
        """
        first = self.closures.deadline
        if not self.plans:
            return first
        other = self.plans.deadline
        return other if first is None or (other is not None and other < first) else first

    def user_of(self, number: int) -> int:
        """Return the work number of the plan that has this attempt in progress; 0 if none has. If
        `number` is a work number, return it."""
        return number if number < FIRST_ATTEMPT else self.plans.work_of(number)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event and return the effects to carry out, in order. `now` is monotonic
        seconds."""
        effects: list[Effect] = []
        # Nearly all events are of these two types, which only the closures handle.
        if type(event) is Heard or type(event) is Scheduled:
            self._apply(self.closures.handle(event, now), now, effects)
        else:
            self._route(event, now, effects)
            if self._after_resolve or self._ended or self._replaced:
                self._flush(effects)
        while self._events:
            self._apply(self.closures.handle(self._events.popleft(), now), now, effects)
        if self._refusal is not None and (self.closures.unfinished or self.plans):
            self._fail_all(self._refusal, now)
            self._flush(effects)
            while self._events:
                self._apply(self.closures.handle(self._events.popleft(), now), now, effects)
        return effects

    def _route(self, event: Event, now: float, effects: list[Effect]) -> None:
        """Pass the event to the plans, queue it for the closures, or both, as the kind of event
        requires."""
        match event:
            case Planned():
                self._planned = True
                self._decide(event, now)
                return
            case ValueLost():
                self._decide(event, now)
                return
            case AttemptPacked(attempt, payload):
                scheduled = self.plans.scheduled(attempt, payload)
                if scheduled is not None:
                    self._events.append(scheduled)
                return
            case PackingFailed(work, error):
                self._ended.append((work, ERROR, error))
                return
            case FunctionsDropped(functions):
                self._decide(dependencies.FunctionsUnused(functions), now)
                return
            case CoordinatorRefused(error):
                self._refused(error, now, effects)
                return
            case CancelRequested(works):
                if self.plans:
                    self._decide(dependencies.PlansCancelled(works), now)
            case EndRoundRequested(number):
                if number == self.closures.round:
                    self._decide(dependencies.RoundEnding(), now)
            case KeptDropped(works):
                for work in works:
                    if work >= FIRST_ATTEMPT:
                        self._decide(dependencies.ValueDropped(work), now)
            case Ticked():
                if self.plans:
                    self._decide(event, now)
            case _:
                pass
        self._events.append(event)

    def _apply(self, closure_effects: list[Effect], now: float, effects: list[Effect]) -> None:
        """Append the effects that `self.closures` returned to `effects`, and tell the plans which
        work has ended."""
        for effect in closure_effects:
            match effect:
                case Resolve(items, _, detached):
                    if self._planned:
                        self._end_all(items, now)
                    else:
                        self._ended = items
                    self._flush(effects, detached)
                case RoundSettled():
                    self._decide(dependencies.RoundOver(), now)
                    after, self._after_resolve = self._after_resolve, [effect]
                    self._flush(effects)
                    self.failed = None
                    effects += after
                case _:
                    effects.append(effect)

    def _flush(self, effects: list[Effect], detached: Collection[int] = ()) -> None:
        """Resolve the program's work that has ended, and decide which of it fails the round
        (C2).
        """
        # Replace precedes Resolve, because work may have failed for lack of a value that Replace
        # reports as lost.
        if self._replaced:
            effects += self._replaced
            self._replaced = []
        if self._ended:
            ended, self._ended = self._ended, []
            failures = [
                work
                for work, kind, _ in ended
                if kind and kind in FAILURES and self._rounds and work not in detached
            ]
            if failures and self.failed is None:
                self.failed = failures[0]
            effects.append(Resolve(ended, frozenset(failures) if failures else (), detached))
        if self._after_resolve:
            effects += self._after_resolve
            self._after_resolve = []

    # -- refusal -----------------------------------------------------------------------------------

    def _refused(self, error: bytes, now: float, effects: list[Effect]) -> None:
        """Fail all unfinished work. If the coordinator is not registered, fail all later work as
        well (C4)."""
        # A coordinator that is not registered was refused when it registered, and the dispatcher
        # would refuse it again.
        for_good = not self.closures.registered
        if self.failed is None:
            self.failed = ROUND
        effects.append(RoundRefused(error, for_good))
        if for_good:
            self._refusal = error
            self._events.append(DispatcherDown(for_good=True))
        self._fail_all(error, now)

    def _fail_all(self, error: bytes, now: float) -> None:
        self._decide(dependencies.GiveUp(), now, (ERROR, error))
        self._events.append(UnfinishedFailed(error))

    # -- plans -------------------------------------------------------------------------------------

    def _end_all(self, items: list[tuple[int, int, Any]], now: float) -> None:
        """Translate the ends of ordinary work and of attempts into ends of the program's work."""
        for number, kind, payload in items:
            if number < FIRST_ATTEMPT:
                self._ended.append((number, kind, payload))
                if not self.plans.awaits(number):
                    continue
            elif not self.plans.awaits(number):
                # The plan of this attempt has ended, so the attempt resolves no work (C1).
                if kind == KEPT:
                    # release the value here, because no RemoteValue does
                    self._events.append(KeptDropped([number]))
                continue
            self._end_of(number, kind, payload, now)

    def _end_of(self, number: int, kind: int, payload: Any, now: float) -> None:
        lost, outcome_payload = 0, payload
        work = self.user_of(number)
        lineage = self.plans.has_lineage(work)
        if kind == INPUT_LOST:
            lost, outcome_payload = self._decode_loss(payload)
        elif kind == KEPT:
            outcome_payload = KeptAt(number, payload, lineage)
        if kind in (VALUE, KEPT) and not lineage:
            waiting = self.plans.waiting_for(work)
            if waiting:
                self._after_resolve.append(KeepInput(work, payload, waiting))
        self._decide(
            dependencies.Ended(number, kind, lost),
            now,
            (ERROR if kind == INPUT_LOST else kind, outcome_payload),
        )

    def _decide(
        self, event: dependencies.Event, now: float, outcome: tuple[int, Any] = (VALUE, b"")
    ) -> None:
        """Pass an event to the plans and translate their effects. If the event is an Ended,
        `outcome` says how the attempt has ended, as (kind, payload)."""
        for effect in self.plans.handle(event, now):
            match effect:
                case dependencies.End(work, kind, cause, had_succeeded):
                    ending = outcome if kind is None else (kind, self._reason(kind, cause))
                    if had_succeeded:
                        self._replaced.append(Replace(work, *ending))
                    else:
                        self._ended.append((work, *ending))
                case dependencies.Recomputed(work, True):
                    self._replaced.append(Replace(work, *outcome))
                case dependencies.CancelAttempts(attempts):
                    self._events.append(CancelRequested(attempts))
                case dependencies.DropFunctions(functions):
                    self._events.append(FunctionsDropped(functions))
                case dependencies.HandIn() | dependencies.Free() | dependencies.Recomputed():
                    self._after_resolve.append(effect)

    def _reason(self, kind: int, cause: int) -> Any:
        if kind == INPUT_FAILED:
            return cause
        if kind != UNAVAILABLE:
            return b""
        times = self.plans.recomputations_max
        return (
            f"its value was lost with its worker, recomputed {times} times, and lost again".encode()
        )

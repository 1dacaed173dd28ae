"""The coordinator's machine: what becomes of all that it has scheduled; no I/O.

Theory of operation
    The machine is composed of two parts, which never call each other:
      closures.py                   what is with the dispatcher or on its way there, and its pins (affinity.py)
      dependencies_and_retries.py   plans: work with inputs, retries, a time-out or a lineage
    A plan becomes attempts, which are work for the first part under numbers from FIRST_ATTEMPT on. This module alone passes the end of an
    attempt to its plan, and what a plan wants to the first part, one after the other and not nested.
    What has to be packed is a HandIn, answered by AttemptPacked; the runtime answers before it hands in another event.

Promises, beside those of the parts, checked by tests/machines/test_coordinator_machine.py and tests/sim
    C1  the user's work is resolved exactly once, whether it is a plan or not; the number of an attempt is never resolved
    C2  work fails its round when the user's work ends badly, after all its retries, and only then: an error of the function, all starts
        lost, a failed input, its time-out, or nothing to run it on; not what is apart from the rounds, and not where there are none
    C3  Resolve comes before what it makes possible: KeepInput, then HandIn
    C4  after the dispatcher has refused the coordinator for good, everything ends with that error, at once

Not here: payloads and exceptions, which are opaque, and threads that wait (runtime.py).
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
    CoordinatorRefused,
    DispatcherDown,
    EndAsked,
    Event,
    FunctionsDropped,
    KeptDropped,
    UnfinishedFailed,
    Unpackable,
    WithdrawAsked,
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
from zmqdist.scheduling.coordinator.effects import Effect, KeepInput, KeptAt, Replace, Resolve, RoundEnded, RoundRefused

FAILURES: Final = frozenset({ERROR, LOST, UNAVAILABLE, INPUT_FAILED, TIMED_OUT})
"""The kinds of ends that fail a round."""

ROUND: Final = 0
"""The number of no work: an error of the whole round."""


class CoordinatorMachine:
    """See the module's docstring.

    Args:
      closures, plans: the parts; they are this object's from now on, and others only read them.
      decode_loss: the input that was lost, and the packed error, of the payload of an INPUT_LOST.
      rounds: whether work that ends badly fails a round.

    Attributes:
      failed: the work by whose end the present round has failed first; ROUND for a refusal, None while nothing has.
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
        """Whether there was a plan ever: the closures may still have an attempt of it."""
        self._events: deque[Event] = deque()
        """For the closures, in order."""
        self._ended: list[tuple[int, int, Any]] = []
        self._after_resolve: list[Effect] = []
        """What the plans want done after `_ended` has been resolved."""

    @property
    def deadline(self) -> float | None:
        """When `handle(Ticked(), now)` is next worth calling; None for never."""
        first = self.closures.deadline
        if not self.plans:
            return first
        other = self.plans.deadline
        return other if first is None or (other is not None and other < first) else first

    def user_of(self, number: int) -> int:
        """The number of the user's work for that of an attempt, or of work that is no plan; 0 where nobody waits for the attempt."""
        return number if number < FIRST_ATTEMPT else self.plans.work_of(number)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event and return what must be done about it, in order. `now` is monotonic seconds."""
        effects: list[Effect] = []
        if type(event) is Heard or type(event) is Scheduled:  # nearly all events: the plans have no part in these
            self._apply(self.closures.handle(event, now), now, effects)
        else:
            self._route(event, now, effects)
            if self._after_resolve or self._ended:
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
        """Tell the plans what they have to know of it, and queue what the closures have to."""
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
            case Unpackable(work, error):
                self._ended.append((work, ERROR, error))
                return
            case FunctionsDropped(functions):
                self._decide(dependencies.FunctionsUnused(functions), now)
                return
            case CoordinatorRefused(error):
                self._refused(error, now, effects)
                return
            case WithdrawAsked(works):
                if self.plans:
                    self._decide(dependencies.CancelAsked(works), now)
            case EndAsked(number):
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
        """What the closures want done, with what follows from it for the plans."""
        for effect in closure_effects:
            match effect:
                case Resolve(items, _, apart):
                    if self._planned:
                        self._end_all(items, now)
                    else:
                        self._ended = items
                    self._flush(effects, apart)
                case RoundEnded():
                    self._decide(dependencies.RoundOver(), now)
                    after, self._after_resolve = self._after_resolve, [effect]
                    self._flush(effects)
                    self.failed = None
                    effects += after
                case _:
                    effects.append(effect)

    def _flush(self, effects: list[Effect], apart: Collection[int] = ()) -> None:
        """Resolve what has ended for the user: here is decided which of it fails the round."""
        if self._ended:
            ended, self._ended = self._ended, []
            failures = [
                work for work, kind, _ in ended if kind and kind in FAILURES and self._rounds and work not in apart
            ]
            if failures and self.failed is None:
                self.failed = failures[0]
            effects.append(Resolve(ended, frozenset(failures) if failures else (), apart))
        if self._after_resolve:
            effects += self._after_resolve
            self._after_resolve = []

    # -- refusal ------------------------------------------------------------------------------------------------

    def _refused(self, error: bytes, now: float, effects: list[Effect]) -> None:
        """A complaint that comes over a connection that stands ends what is unfinished; any other is for good."""
        for_good = not self.closures.enlisted
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

    # -- plans --------------------------------------------------------------------------------------------------

    def _end_all(self, items: list[tuple[int, int, Any]], now: float) -> None:
        """What these ends of work and of attempts mean for the user's work."""
        for number, kind, payload in items:
            if number < FIRST_ATTEMPT:
                self._ended.append((number, kind, payload))
                if not self.plans.awaits(number):
                    continue
            elif not self.plans.awaits(number):
                if kind == KEPT:
                    self._events.append(KeptDropped([number]))  # nobody wants it
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
            dependencies.Ended(number, kind, lost), now, (ERROR if kind == INPUT_LOST else kind, outcome_payload)
        )

    def _decide(self, event: dependencies.Event, now: float, outcome: tuple[int, Any] = (VALUE, b"")) -> None:
        """Have the plans decide. `present`: how the attempt has ended by which they do, (kind, payload)."""
        for effect in self.plans.handle(event, now):
            match effect:
                case dependencies.End(work, kind, cause, made):
                    ending = outcome if kind is None else (kind, self._reason(kind, cause))
                    if made:
                        self._after_resolve.append(Replace(work, *ending))
                    else:
                        self._ended.append((work, *ending))
                case dependencies.Remade(work, True):
                    self._after_resolve.append(Replace(work, *outcome))
                case dependencies.WithdrawAttempts(attempts):
                    self._events.append(WithdrawAsked(attempts))
                case dependencies.DropFunctions(functions):
                    self._events.append(FunctionsDropped(functions))
                case dependencies.HandIn() | dependencies.Free() | dependencies.Remade():
                    self._after_resolve.append(effect)

    def _reason(self, kind: int, cause: int) -> Any:
        if kind == INPUT_FAILED:
            return cause
        if kind != UNAVAILABLE:
            return b""
        times = self.plans.remakes_max
        return f"its value was lost with its worker, made again {times} times, and lost again".encode()

"""The plans of a simulated coordinator (work with inputs, retries, time-outs or lineages), and a
model of the program, which holds and drops the values of the plans.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from tests.sim.simulations.clock import SimClock
from tests.sim.simulations.network import SimConnection
from zmqdist.messages import ERROR, KEPT, SUBMISSION_SHIFT, VALUE, Message, Results
from zmqdist.scheduling.coordinator.coordinator_events import (
    DecideRetry,
    Event,
    KeepInput,
    KeptDropped,
    RetryDecided,
    ValueLost,
)
from zmqdist.scheduling.coordinator.machine import CoordinatorMachine
from zmqdist.scheduling.coordinator.options import Retries, WorkOptions
from zmqdist.scheduling.coordinator.work import (
    AWAITING_RESULT,
    ENDED,
    INPUT_FAILED,
    TIMED_OUT,
    Extra,
    KeptAt,
    Work,
)

RECOMPUTATIONS_MAX = 3
SLACK_S = 0.001

INPUT_GONE = b"gone"
"""Stands for the packed error of an input that could not be fetched."""


def decode_loss(payload: bytes) -> tuple[int, bytes]:
    """Decode the payload of an INPUT_LOST outcome. Return the number of the input that a simulated
    worker could not get, and the packed error."""
    return int(payload), INPUT_GONE


@dataclass(eq=False)
class SimPlan:
    """One plan, with the facts that the model of the program and the checks need.

    Attributes:
      inputs: the work whose values are inputs of the plan.
      arrived: the inputs whose values the coordinator's runtime has.
      errors: number of attempts that ended with an error of the function.
      value: where the plan's value is, once the plan has succeeded.
      users: the plans that hold the value, and 0 for the program.
      replaced: how often the value was recomputed.
      is_awaited: whether the program waits until the lost value is recomputed.
      lost: whether the value is lost for good.
      freed: whether the machine has freed the plan.
      policy: when its retries begin.
      decisions: how often the program has decided about a retry.
      is_refused: whether the program has decided against a retry.
      not_before: the time before which its next attempt must not begin.
    """

    work: int
    fn: int
    kind: str
    inputs: tuple[int, ...]
    retries: int
    until: float | None
    lineage: bool
    arrived: set[int] = field(default_factory=set)
    attempts: list[int] = field(default_factory=list)
    errors: int = 0
    value: KeptAt | None = None
    users: set[int] = field(default_factory=lambda: {0})
    replaced: int = 0
    is_awaited: bool = False
    lost: bool = False
    freed: bool = False
    policy: Retries | None = None
    decisions: int = 0
    is_refused: bool = False
    not_before: float = 0.0


class PlanSurroundings(Protocol):
    """The part of the simulated cluster that plans use."""

    clock: SimClock

    def holder(self, reference: bytes) -> object | None:
        """Return the live worker that holds the value of this reference, or None."""


class PlanningUser(Protocol):
    """The simulated coordinator to which the plans belong; coordinator.py describes its
    attributes.
    """

    number: int
    machine: CoordinatorMachine
    connection: SimConnection | None
    kinds: dict[int, str]
    resolved: Counter[int]
    outcomes: dict[int, int]
    works: dict[int, Work]
    kept_results: dict[int, SimConnection | None]
    ending: bool

    @property
    def cluster(self) -> PlanSurroundings: ...

    def handle(self, event: Event) -> None:
        """Have the machine handle an event, and carry out its effects."""

    def later(self, event: Event) -> None:
        """Have the machine handle an event after the current event. The real program defers the
        events of its finalizers, too."""

    def was_cancelled(self, work: int) -> bool:
        """Return whether the program has ever cancelled this work."""

    def options_of(self, work: int) -> WorkOptions: ...


class SimPlans:
    """All plans of one coordinator."""

    def __init__(self, owner: PlanningUser, random: Random, *, calm: bool) -> None:
        self._owner = owner
        self._random = random
        self._calm = calm
        self._decisions = Random(owner.number)
        """Decides about retries, so that this does not change all other events."""
        self.plans: dict[int, SimPlan] = {}

    @property
    def finished(self) -> bool:
        """Whether neither a plan nor the program holds the value of a plan, and the program waits
        for no lost value."""
        return not any(
            plan.is_awaited or (plan.value is not None and plan.users)
            for plan in self.plans.values()
        )

    # -- the program -------------------------------------------------------------------------------

    def plan(self, work: int, fn: int) -> Work:
        """Return the record of this work, with random earlier work as its inputs."""
        owner, random = self._owner, self._random
        usable = [number for number in owner.kinds if number != work and self._usable(number)]
        recent = usable[-8:]
        inputs = tuple(sorted(random.sample(recent, min(len(recent), random.choice((0, 1, 1, 2))))))
        lineage = random.random() < 0.4
        kinds = (
            ("quick", "bulk", "long")
            if self._calm
            else ("quick", "flaky", "flaky", "bulk", "long", "slow", "poison")
        )
        kind = "keep" if lineage else random.choice(kinds)
        until = None
        if not self._calm and random.random() < 0.3:
            until = owner.cluster.clock.now + random.uniform(0.01, 4.0)
        plan = SimPlan(work, fn, kind, inputs, random.choice((0, 1, 3)), until, lineage)
        if plan.retries and self._decisions.random() < 0.9:
            plan.policy = Retries(plan.retries, self._decisions.choice((0.0, 0.5)), 1.5, 0.5)
        self.plans[work] = plan
        for number in inputs:
            source = self.plans.get(number)
            if source is not None:
                source.users.add(work)
            if owner.resolved[number] and owner.outcomes[number] == VALUE:
                plan.arrived.add(number)
        if until is not None:
            owner.cluster.clock.at(until + SLACK_S, lambda: self._check_time(plan))
        record = Work(work, fn, kind, b"")
        record.extra = Extra(
            owner.options_of(work),
            keep=lineage,
            retries=plan.retries,
            until=until,
            lineage=lineage,
            inputs=[owner.works[number] for number in inputs],
        )
        record.extra.policy = plan.policy
        return record

    def _usable(self, work: int) -> bool:
        """Return whether work can be an input. The program must hold its RemoteValue, and if only a
        worker has the value, the work must have a lineage."""
        plan = self.plans.get(work)
        if plan is not None:
            return 0 in plan.users
        return self._owner.kinds[work] != "keep"

    def _check_time(self, plan: SimPlan) -> None:
        assert self._owner.resolved[plan.work], (
            f"coordinator P26: work {plan.work} has not ended at its time"
        )

    def look(self) -> None:
        """Have the program read each kept value. If a value is lost, the program waits until it is
        recomputed."""
        for plan in self.plans.values():
            value = plan.value
            if value is None or 0 not in plan.users or plan.is_awaited:
                continue
            if self._owner.cluster.holder(value.reference) is None:
                plan.is_awaited = True
                self._owner.handle(ValueLost(self._owner.works[plan.work], value.attempt))

    def drop(self, work: int, user: int = 0) -> None:
        """Have one user drop a value. The user is a plan, or 0 for the program."""
        plan = self.plans.get(work)
        if plan is None or user not in plan.users:
            return
        if plan.is_awaited and user == 0:
            self._owner.cluster.clock.after(0.5, lambda: self.drop(work))
            return
        plan.users.discard(user)
        self._let_go(plan)

    def _let_go(self, plan: SimPlan) -> None:
        if not plan.users and plan.value is not None:
            self._forget(plan)

    def _forget(self, plan: SimPlan) -> None:
        assert plan.value is not None
        value, plan.value = plan.value, None
        self._owner.kept_results.pop(_run_of(value), None)
        self._owner.later(KeptDropped([plan.work]))

    # -- effects of the machine --------------------------------------------------------------------

    def hear(self, message: Message) -> None:
        """Count the attempts that, according to a message of the dispatcher, ended with an error of
        their function."""
        if not isinstance(message, Results):
            return
        for number, attempt, kind, _ in message.items:
            work = self._owner.machine.works.get(number)
            if (
                kind == ERROR
                and number in self.plans
                and work is not None
                and work.state in AWAITING_RESULT
                and work.is_of_present(attempt)
            ):
                self.plans[number].errors += 1

    def submitted(self, work: Work) -> None:
        """Check that the machine may submit this work now, and name its inputs in its payload."""
        plan = self.plans[work.number]
        owner = self._owner
        assert not owner.ending, (
            f"coordinator P25: work {plan.work} is submitted while its round ends"
        )
        assert (
            not owner.resolved[plan.work] or plan.value is not None or plan.is_awaited or plan.users
        ), f"coordinator P21: work {plan.work} is submitted after its end"
        assert plan.errors <= plan.retries or plan.lost, (
            f"coordinator P24: work {plan.work} is tried too often"
        )
        if not owner.resolved[plan.work]:
            # the end of a round may end the wait of a recomputation, which then begins anew
            assert plan.policy is None or plan.decisions >= plan.errors, (
                f"coordinator P30: work {plan.work} runs again before the program has decided"
            )
            assert not plan.is_refused, (
                f"coordinator P30: work {plan.work} runs again, though the program has refused"
            )
            assert owner.cluster.clock.now >= plan.not_before - SLACK_S, (
                f"coordinator P30: work {plan.work} runs again before its time"
            )
        runs = []
        for number in plan.inputs:
            source = self.plans.get(number)
            if source is not None and source.value is not None and source.lineage:
                runs.append(f"{number}:{_run_of(source.value)}")
                continue
            assert owner.resolved[number], (
                f"coordinator P22: work {plan.work} is submitted before its input {number}"
            )
            assert owner.outcomes[number] == VALUE, (
                f"coordinator P23: work {plan.work} is submitted with the failed {number}"
            )
            assert number in plan.arrived, (
                f"coordinator P19: work {plan.work} is submitted and has not got its input {number}"
            )
        assert len(plan.attempts) < 200, (
            f"coordinator P24: work {plan.work} is submitted again and again"
        )
        plan.attempts.append(work.attempt)
        kind = self._random.choice(("raise", "quick")) if plan.kind == "flaky" else plan.kind
        work.name = "|".join((kind, *runs))

    def decide(self, asked: DecideRetry) -> None:
        """Have the program decide about a retry, a while later."""
        plan, clock = self.plans[asked.work.number], self._owner.cluster.clock
        assert plan.policy is not None, f"coordinator P30: work {plan.work} has no policy"
        again, draw = self._decisions.random() < 0.8, self._decisions.random()
        wait_s = plan.policy.delay_s(plan.errors, draw)

        def decided() -> None:
            plan.decisions += 1
            plan.is_refused = not again
            plan.not_before = clock.now + wait_s
            self._owner.handle(RetryDecided(asked, again, draw))

        clock.after(self._decisions.uniform(0.0, 0.5), decided)

    def keep_input(self, effect: KeepInput) -> None:
        assert self._owner.outcomes.get(effect.work.number) == VALUE, (
            "coordinator P19: an input is here before its end was reported"
        )
        for dependent in effect.dependents:
            plan = self.plans[dependent.number]
            if dependent.state in ENDED:
                continue  # another of its inputs has failed in the same event
            assert not plan.freed, "coordinator P29: an input for a freed plan"
            plan.arrived.add(effect.work.number)

    def resolved(self, work: int, kind: int, payload: Any) -> None:
        """Check that a plan may end with this outcome, and record where its value is."""
        plan = self.plans[work]
        if kind == KEPT:
            self._has_value(plan, payload)
            return
        if kind == INPUT_FAILED:
            assert payload in plan.inputs, (
                f"coordinator P23: work {work} fails by {payload}, which is no input"
            )
            source = self.plans.get(payload)
            bad = self._owner.outcomes.get(payload) not in (None, VALUE, KEPT)
            assert bad or (source is not None and source.lost), (
                f"coordinator P23: input {payload} has not failed"
            )
        elif kind == TIMED_OUT:
            assert plan.until is not None, "coordinator P26: it has no time"
            assert self._owner.cluster.clock.now >= plan.until, "coordinator P26: too early"
        elif kind == ERROR and payload != INPUT_GONE:
            spent = (
                plan.errors > plan.retries
                or plan.is_refused
                or self._owner.was_cancelled(work)
                or self._owner.ending
            )
            assert spent, (
                f"coordinator P24: work {work} ends after {plan.errors} errors, and has "
                f"{plan.retries} retries"
            )
        self.free(work)

    def replaced(self, work: int, kind: int, payload: Any) -> None:
        plan = self.plans[work]
        assert plan.lineage, "coordinator P27: a value without a lineage is recomputed"
        assert self._owner.resolved[plan.work], "coordinator P27: it has no value yet"
        plan.is_awaited = False
        if plan.value is not None:
            self._owner.kept_results.pop(_run_of(plan.value), None)
            plan.value = None
        if kind == KEPT:
            plan.replaced += 1
            assert plan.replaced <= RECOMPUTATIONS_MAX, (
                f"coordinator P27: work {plan.work} is made again too often"
            )
            self._has_value(plan, payload)
        else:
            plan.lost = True
            self.free(work)

    def _has_value(self, plan: SimPlan, value: KeptAt) -> None:
        assert value.attempt >> SUBMISSION_SHIFT << SUBMISSION_SHIFT in plan.attempts, (
            "coordinator P16: the value of an attempt that was not submitted"
        )
        plan.value = value
        self._owner.kept_results[_run_of(value)] = self._owner.connection
        self._let_go(plan)
        if plan.replaced == 0:
            after = self._random.uniform(0.0, 6.0)
            self._owner.cluster.clock.after(after, lambda: self.drop(plan.work))

    def remade(self, work: int) -> None:
        self.plans[work].is_awaited = False

    def free(self, work: int) -> None:
        plan = self.plans[work]
        assert not plan.freed, f"coordinator P29: work {work} is freed twice"
        assert self._owner.resolved[work], f"coordinator P29: work {work} is freed before its end"
        assert plan.value is None or not plan.lineage or plan.lost, (
            f"coordinator P29: the value of work {work} is in use"
        )
        plan.freed = True
        for number in plan.inputs:
            self.drop(number, work)

    def check_forgotten(self, functions: list[int]) -> None:
        for plan in self.plans.values():
            assert plan.freed or plan.fn not in functions, (
                f"coordinator P28: function {plan.fn} is forgotten too early"
            )

    def check_end(self) -> None:
        left = [plan.work for plan in self.plans.values() if not plan.freed]
        assert not left, f"coordinator P29: {left} are not freed at the end"


def _run_of(value: KeptAt) -> int:
    return int(value.reference.split(b"|")[3])

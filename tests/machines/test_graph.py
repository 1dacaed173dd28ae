"""The machine for plans against its promises: rule by rule, and with random events against a
second, simple record."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from zmqdist.events import Ticked
from zmqdist.messages import CANCELLED, ERROR, KEPT, VALUE
from zmqdist.scheduling.coordinator.dependencies_and_retries import (
    FIRST_ATTEMPT,
    INPUT_FAILED,
    TIMED_OUT,
    UNAVAILABLE,
    CancelAttempts,
    Dependencies,
    DropFunctions,
    Effect,
    End,
    Ended,
    Event,
    Free,
    FunctionsUnused,
    HandIn,
    Planned,
    PlansCancelled,
    Recomputed,
    RoundEnding,
    RoundOver,
    ValueDropped,
    ValueLost,
)

A, B, C, D = (FIRST_ATTEMPT + number for number in range(4))
"""The first attempts."""
INPUT_LOST = 5
REMAKES_MAX = 2


@pytest.fixture
def graph() -> Dependencies:
    return Dependencies(recomputations_max=2)


def do(graph: Dependencies, *events: Event, now: float = 0.0) -> list[Effect]:
    return [effect for event in events for effect in graph.handle(event, now)]


# -- one rule each ---------------------------------------------------------------------------------


def test_the_deadlines_of_ended_plans_are_not_remembered(graph: Dependencies) -> None:
    do(graph, Planned(1, 7, until=50.0))
    for number in range(1000):
        (handed,) = do(graph, Planned(number + 2, 7, until=100.0))
        assert isinstance(handed, HandIn)
        do(graph, Ended(handed.attempt, VALUE))
    assert len(graph._due) < 100  # reach: a leak shows nowhere else
    assert End(1, TIMED_OUT) in do(graph, Ticked(), now=50.0)
    assert graph.deadline is None


def test_a_plan_without_inputs_is_handed_in_at_once_and_ends_as_its_attempt(
    graph: Dependencies,
) -> None:
    assert do(graph, Planned(1, 7)) == [HandIn(1, A)]
    assert graph.work_of(A) == 1
    assert do(graph, Ended(A, VALUE)) == [End(1), Free(1)]
    assert len(graph) == graph.waiting == 0


def test_g2_a_plan_waits_for_all_its_inputs(graph: Dependencies) -> None:
    assert do(graph, Planned(3, 7, (1, 2))) == []
    assert (graph.waiting, graph.awaits(1), graph.awaits(4)) == (1, True, False)
    assert do(graph, Ended(2, VALUE)) == []
    assert do(graph, Ended(1, KEPT)) == [HandIn(3, A)]
    assert graph.waiting == 0


def test_g2_a_plan_may_wait_for_another_plan(graph: Dependencies) -> None:
    assert do(graph, Planned(1, 7), Planned(2, 7, (1,)), Ended(A, VALUE)) == [
        HandIn(1, A),
        End(1),
        Free(1),
        HandIn(2, B),
    ]


def test_g3_the_first_failed_input_ends_the_waiting_plan_and_the_plans_that_wait_for_it(
    graph: Dependencies,
) -> None:
    do(graph, Planned(3, 7, (1, 2)), Planned(4, 7, (3,)))
    assert do(graph, Ended(2, ERROR)) == [
        End(3, INPUT_FAILED, 2),
        Free(3),
        End(4, INPUT_FAILED, 3),
        Free(4),
    ]
    assert do(graph, Ended(1, VALUE)) == []
    assert do(graph, Planned(5, 7, (), failed=2)) == [End(5, INPUT_FAILED, 2), Free(5)]


def test_a_long_chain_ends_without_a_deep_stack(graph: Dependencies) -> None:
    for work in range(2, 5000):
        do(graph, Planned(work, 7, (work - 1,)))
    assert sum(isinstance(effect, End) for effect in do(graph, Ended(1, ERROR))) == 4998


def test_g4_only_errors_of_the_function_are_retried(graph: Dependencies) -> None:
    do(graph, Planned(1, 7, retries=2), Planned(2, 7, retries=2))
    assert do(graph, Ended(A, ERROR)) == [HandIn(1, C)]
    assert do(graph, Ended(C, ERROR)) == [HandIn(1, D)]
    assert do(graph, Ended(D, ERROR)) == [End(1), Free(1)]
    assert do(graph, Ended(B, UNAVAILABLE)) == [End(2), Free(2)]


def test_g4_a_cancelled_plan_is_not_retried(graph: Dependencies) -> None:
    do(graph, Planned(1, 7, retries=2), Planned(2, 7, (1,)))
    assert do(graph, PlansCancelled([1])) == [CancelAttempts([A])]
    assert do(graph, Ended(A, ERROR)) == [End(1), Free(1), End(2, INPUT_FAILED, 1), Free(2)]
    do(graph, Planned(4, 7, (3,)))
    assert do(graph, PlansCancelled([4])) == [End(4, CANCELLED), Free(4)], "it was not running"


def test_g5_the_end_of_a_round_ends_all_waiting_plans(graph: Dependencies) -> None:
    do(graph, Planned(1, 7, retries=1), Planned(2, 7, (1,)), RoundEnding())
    assert do(graph, Ended(A, ERROR)) == [End(1), Free(1)], (
        "it is neither retried, nor does it fail the waiting plan"
    )
    assert do(graph, Planned(3, 7)) == []
    assert do(graph, RoundOver()) == [End(2, CANCELLED), Free(2), End(3, CANCELLED), Free(3)]
    assert do(graph, Planned(4, 7)) == [HandIn(4, B)]


def test_g6_a_plan_ends_at_its_deadline_in_every_state(graph: Dependencies) -> None:
    do(graph, Planned(2, 7, until=5.0), Planned(3, 7, (1,), until=4.0), Planned(4, 7, (2,)))
    assert graph.deadline == 4.0
    assert do(graph, Ticked(), now=3.9) == []
    assert do(graph, Ticked(), now=4.0) == [End(3, TIMED_OUT), Free(3)]
    assert do(graph, Ticked(), now=5.0) == [
        End(2, TIMED_OUT),
        CancelAttempts([A]),
        Free(2),
        End(4, INPUT_FAILED, 2),
        Free(4),
    ]
    assert do(graph, Ended(A, VALUE)) == []
    assert graph.deadline is None


@pytest.fixture
def kept(graph: Dependencies) -> Dependencies:
    """Values 1 and 2 have been computed with a lineage; 1 is an input of 2."""
    do(
        graph,
        Planned(1, 7, lineage=True),
        Ended(A, KEPT),
        Planned(2, 7, (1,), lineage=True),
        Ended(B, KEPT),
    )
    return graph


def test_g7_a_lost_input_is_recomputed_for_each_plan_that_needs_it(kept: Dependencies) -> None:
    assert do(kept, Planned(3, 7, (2,))) == [HandIn(3, C)]
    assert do(kept, Ended(C, INPUT_LOST, lost=2)) == [HandIn(2, D)]
    assert do(kept, Ended(D, INPUT_LOST, lost=1)) == [HandIn(1, D + 1)]
    assert do(kept, Ended(D + 1, KEPT)) == [Recomputed(1, new=True), HandIn(2, D + 2)]
    assert do(kept, Ended(D + 2, KEPT)) == [Recomputed(2, new=True), HandIn(3, D + 3)]
    assert do(kept, Ended(D + 3, VALUE)) == [End(3), Free(3)]


def test_g7_a_plan_that_found_an_old_value_lost_takes_the_new_one(kept: Dependencies) -> None:
    do(
        kept,
        Planned(3, 7, (2,)),
        Planned(4, 7, (2,)),
        Ended(C, INPUT_LOST, lost=2),
        Ended(D + 1, KEPT),
    )
    assert do(kept, Ended(D, INPUT_LOST, lost=2)) == [HandIn(4, D + 3)]


def test_g7_a_get_of_a_lost_value_ends_when_there_is_a_new_one(kept: Dependencies) -> None:
    assert do(kept, ValueLost(1, A)) == [HandIn(1, C)]
    assert do(kept, ValueLost(1, A)) == [], "it is being recomputed"
    assert do(kept, Ended(C, KEPT)) == [Recomputed(1, new=True)]
    assert do(kept, ValueLost(1, A)) == [Recomputed(1, new=False)]
    assert do(kept, ValueLost(9, A)) == [Recomputed(9, new=False)]


def test_g7_a_value_is_recomputed_a_bounded_number_of_times(kept: Dependencies) -> None:
    do(kept, ValueLost(1, A), Ended(C, KEPT), ValueLost(1, C), Ended(D, KEPT))
    assert do(kept, ValueLost(1, D)) == [End(1, UNAVAILABLE, had_succeeded=True), Free(1)]


def test_g7_a_value_that_cannot_be_recomputed_ends_the_plans_that_need_it(
    kept: Dependencies,
) -> None:
    do(kept, Planned(3, 7, (2,)), Ended(C, INPUT_LOST, lost=2))
    assert do(kept, Ended(D, ERROR)) == [
        End(2, had_succeeded=True),
        Free(2),
        End(3, INPUT_FAILED, 2),
        Free(3),
    ]
    do(kept, Planned(4, 7))
    assert do(kept, Ended(D + 1, INPUT_LOST, lost=2)) == [End(4), Free(4)]


def test_g7_the_end_of_a_round_gives_up_recomputed_values_except_for_a_get(
    kept: Dependencies,
) -> None:
    do(kept, Planned(3, 7, (2,)), Ended(C, INPUT_LOST, lost=2), RoundEnding(), Ended(D, CANCELLED))
    assert do(kept, RoundOver()) == [End(3, CANCELLED), Free(3)]
    assert do(kept, ValueLost(2, B)) == [HandIn(2, D + 1)]
    do(kept, RoundEnding(), Ended(D + 1, CANCELLED))
    assert do(kept, RoundOver()) == [HandIn(2, D + 2)]


def test_g7_a_value_whose_input_returns_while_a_round_ends_is_recomputed_after_the_round(
    kept: Dependencies,
) -> None:
    """A bug counted such a value as present, so that a `get` waited for ever, and a plan got the
    reference of the lost value."""
    do(kept, ValueLost(2, B), Ended(C, INPUT_LOST, lost=1), RoundEnding())
    assert do(kept, Ended(D, KEPT)) == [Recomputed(1, new=True)]
    assert do(kept, RoundOver()) == [HandIn(2, D + 1)]
    assert do(kept, Ended(D + 1, KEPT)) == [Recomputed(2, new=True)]


def test_g8_a_function_stays_while_a_plan_may_need_it(kept: Dependencies) -> None:
    assert do(kept, FunctionsUnused([8, 7])) == [DropFunctions([8])]
    assert do(kept, ValueDropped(B)) == [Free(2)]
    assert do(kept, ValueDropped(A)) == [DropFunctions([7]), Free(1)]


def test_g9_a_dropped_value_is_not_recomputed(kept: Dependencies) -> None:
    do(kept, ValueLost(2, B), Ended(C, INPUT_LOST, lost=1))
    assert do(kept, ValueDropped(B)) == [Free(2)], (
        "its input is being recomputed, and the plan need not wait for it"
    )
    assert do(kept, Ended(D, KEPT)) == [Recomputed(1, new=True)]


def test_g9_a_value_that_was_dropped_while_it_was_recomputed_is_freed(kept: Dependencies) -> None:
    do(kept, ValueLost(2, B), RoundEnding(), Ended(C, CANCELLED))
    assert do(kept, ValueDropped(B), RoundOver()) == [Free(2)]


# -- random events ---------------------------------------------------------------------------------


class Story:
    """A random history of a graph, with checks of the promises. A broken promise is an
    AssertionError that begins with its number."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.graph = Dependencies(recomputations_max=REMAKES_MAX)
        self.now = 0.0
        self.numbers = iter(range(1, 10**6))
        self.plans: dict[int, Planned] = {}
        self.open: set[int] = set()
        self.plain: set[int] = set()
        self.well: set[int] = set()
        self.badly: set[int] = set()
        self.made: dict[int, int] = {}
        """Values with a lineage: by which attempt."""
        self.made_again: dict[int, int] = {}
        self.recomputations: dict[int, int] = {}
        """Attempts at that; there are more, where an input is lost, too, or one is given up with
        its round."""
        self.used: dict[int, dict[int, int]] = {}
        """Which values an attempt was given."""
        self.lost: set[tuple[int, int]] = set()
        self.under_way: dict[int, int] = {}
        self.errors: dict[int, int] = {}
        self.freed: set[int] = set()
        self.dropped: set[int] = set()
        self.withdrawn: set[int] = set()
        self.asked: set[int] = set()
        self.ending = False
        self.present: tuple[int, int] = (0, VALUE)

    def tell(self, event: Event) -> None:
        for effect in self.graph.handle(event, self.now):
            self.see(effect)
        assert self.graph.waiting == len(self.open - set(self.under_way.values())), (
            "waiting is counted"
        )

    def see(self, effect: Effect) -> None:
        match effect:
            case HandIn(work, attempt):
                plan = self.plans[work]
                assert not self.ending, "G5"
                assert work in self.open or work in self.made, "G1"
                assert work not in self.under_way.values(), "G1: two attempts at once"
                assert set(plan.inputs) <= self.well, "G2"
                assert not set(plan.inputs) & self.badly, "G3"
                assert plan.fn not in self.dropped, "G8"
                used = self.used[attempt] = {i: self.made[i] for i in plan.inputs if i in self.made}
                assert not self.lost & used.items(), "G7: given a value that is lost"
                if work in self.made:
                    self.recomputations[work] = self.recomputations.get(work, 0) + 1
                self.under_way[attempt] = work
            case End(work, kind, cause, made):
                assert made == (work in self.made), "G1: whether it had ended well before"
                self.see_end(work, kind, cause)
            case Recomputed(work, new):
                if new:
                    self.made[work] = self.present[0]
                    self.made_again[work] = self.made_again.get(work, 0) + 1
                    assert self.made_again[work] <= REMAKES_MAX, "G7"
                self.asked.discard(work)
            case CancelAttempts(attempts):
                for attempt in attempts:
                    if self.under_way.get(attempt) not in self.open:
                        self.under_way.pop(attempt, None)
                    else:
                        self.withdrawn.add(attempt)
            case DropFunctions(functions):
                self.dropped.update(functions)
            case Free(work):
                assert work not in self.freed, "G9: twice"
                assert work not in self.open, "G9: before its end"
                self.freed.add(work)

    def see_end(self, work: int, kind: int | None, cause: int) -> None:
        plan = self.plans[work]
        assert work in self.open or work in self.made, "G1"
        if kind == INPUT_FAILED:
            assert cause in self.badly, "G3"
        elif kind == TIMED_OUT:
            assert plan.until is not None, "G6"
            assert plan.until <= self.now, "G6"
        for attempt, other in list(self.under_way.items()):
            if other == work and (work in self.made or kind is not None):
                del self.under_way[attempt]
        how = self.present[1] if kind is None else kind
        self.open.discard(work)
        if how in (VALUE, KEPT):
            self.well.add(work)
            if plan.lineage:
                self.made[work] = self.present[0]
        else:
            self.well.discard(work)
            self.made.pop(work, None)
            self.badly.add(work)
            self.asked.discard(work)

    # -- random events -----------------------------------------------------------------------------

    def step(self) -> None:
        self.random.choice(
            (self.plan, self.plan, self.schedule, self.end, self.end, self.end, self.others)
        )()

    def others(self) -> None:
        self.random.choice(
            (self.cancel, self.tick, self.lose, self.drop_value, self.end_round, self.drop_function)
        )()

    def schedule(self) -> None:
        self.plain.add(next(self.numbers))

    def plan(self) -> None:
        work = next(self.numbers)
        known = sorted(self.plain | self.open | self.well | self.badly)
        given = self.random.sample(known, min(len(known), self.random.randint(0, 3)))
        given = [
            g
            for g in given
            if g not in self.plans or g not in self.freed or g in self.badly or g not in self.made
        ]
        failed = next((g for g in given if g in self.badly), 0)
        inputs = [
            g
            for g in given
            if g in self.plain or g in self.open or (g in self.made and g not in self.freed)
        ]
        until = self.now + self.random.randint(1, 30) if self.random.random() < 0.3 else None
        lineage = self.random.random() < 0.4
        functions = [fn for fn in range(5) if fn not in self.dropped] or [9]
        planned = Planned(
            work,
            self.random.choice(functions),
            tuple(inputs),
            failed,
            self.random.randint(0, 2),
            until,
            lineage,
        )
        self.plans[work] = planned
        self.open.add(work)
        self.tell(planned)

    def end(self) -> None:
        if self.plain and self.random.random() < 0.3:
            work = self.random.choice(sorted(self.plain))
            self.plain.discard(work)
            kind = self.random.choice((VALUE, VALUE, ERROR, CANCELLED))
            (self.well if kind == VALUE else self.badly).add(work)
            if self.graph.awaits(work):
                self.tell(Ended(work, kind))
            return
        if not self.under_way:
            return
        self.end_attempt(self.random.choice(sorted(self.under_way)))

    def end_attempt(self, attempt: int) -> None:
        work = self.under_way.pop(attempt)
        plan = self.plans[work]
        kinds = [KEPT if plan.lineage else VALUE] * 3 + [ERROR, UNAVAILABLE]
        kind = self.random.choice(
            [*kinds, CANCELLED] if self.ending or attempt in self.withdrawn else kinds
        )
        lost = 0
        kept = [i for i in plan.inputs if i in self.made]
        if kept and self.random.random() < 0.4:
            kind, lost = INPUT_LOST, self.random.choice(kept)
            self.lost.add((lost, self.used[attempt].get(lost, 0)))
        if kind == ERROR:
            self.errors[work] = self.errors.get(work, 0) + 1
            assert self.errors[work] <= 1 + plan.retries + self.recomputations.get(work, 0), "G4"
        self.present = (attempt, kind)
        self.tell(Ended(attempt, kind, lost))

    def cancel(self) -> None:
        if self.open:
            self.tell(PlansCancelled([self.random.choice(sorted(self.open)), 10**7]))

    def tick(self) -> None:
        self.now += self.random.randint(0, 10)
        self.tell(Ticked())
        late = [
            w for w in self.open if (until := self.plans[w].until) is not None and until <= self.now
        ]
        assert not late, "G6"

    def lose(self) -> None:
        alive = sorted(set(self.made) - self.freed)
        if alive:
            work = self.random.choice(alive)
            self.asked.add(work)
            attempt = self.random.choice((self.made[work], 0))  # 0: an attempt that it had before
            self.lost.add((work, attempt))
            self.tell(ValueLost(work, attempt))

    def drop_value(self) -> None:
        used = {i for w in self.open | set(self.under_way.values()) for i in self.plans[w].inputs}
        used |= {
            i for w in self.made if w not in self.freed for i in self.plans[w].inputs
        } | self.asked
        free = sorted(set(self.made) - self.freed - used - set(self.under_way.values()))
        if free:
            work = self.random.choice(free)
            attempt = self.made[work]
            self.tell(ValueDropped(attempt))
            if work in self.freed:
                del self.made[work]

    def drop_function(self) -> None:
        if self.random.random() < 0.1:
            fn = self.random.randint(0, 4)
            self.plans[0] = Planned(0, fn)
            self.tell(FunctionsUnused([fn]))

    def end_round(self) -> None:
        if not self.ending:
            self.ending = True
            self.tell(RoundEnding())
            return
        for attempt in sorted(self.under_way):
            if attempt in self.under_way:
                self.present = (attempt, CANCELLED)
                del self.under_way[attempt]
                self.tell(Ended(attempt, CANCELLED))
        for work in sorted(self.plain):
            self.badly.add(work)
            if self.graph.awaits(work):
                self.tell(Ended(work, CANCELLED))
        self.plain.clear()
        self.ending = False
        self.tell(RoundOver())
        assert not self.open, "G1: with its round at the latest"

    def live(self, steps: int = 150) -> None:
        for _ in range(steps):
            self.step()
        if not self.ending:
            self.settle()
        for _ in range(2):
            self.end_round()
        assert all(work in self.freed for work in self.plans if work and work not in self.made), (
            "G9: leaked"
        )

    def settle(self) -> None:
        """Let all running attempts succeed: then each plan that can end does, and each `get` has
        its reply."""
        for _ in range(10_000):
            if not (self.under_way or self.plain):
                break
            for work in sorted(self.plain):
                self.plain.discard(work)
                self.well.add(work)
                if self.graph.awaits(work):
                    self.tell(Ended(work, VALUE))
            for attempt in sorted(self.under_way):
                if attempt in self.under_way:
                    work = self.under_way.pop(attempt)
                    self.present = (attempt, KEPT if self.plans[work].lineage else VALUE)
                    self.tell(Ended(*self.present))
        assert not self.open, f"G1: something never ends: {self.open}"
        assert not self.asked, "G7: somebody was never told"


def test_random_histories_keep_all_promises(seed: int) -> None:
    Story(seed).live()


# -- planted bugs ----------------------------------------------------------------------------------

SEEDS_MAX = 400


def hands_in_too_early(self: Any, plan: Any, effects: Any) -> None:
    plan.missing = set()
    HAND_IN(self, plan, effects)


def hands_in_while_ending(self: Any, plan: Any, effects: Any) -> None:
    self._ending, ending = False, self._ending
    HAND_IN(self, plan, effects)
    self._ending = ending


def tells_well(self: Any, work: int, well: bool, effects: Any) -> None:
    NOTIFY(self, work, True, effects)


def tells_nobody(self: Any, work: int, well: bool, effects: Any) -> None:
    if well:
        NOTIFY(self, work, well, effects)


def tries_again_for_ever(self: Any, plan: Any, effects: Any) -> None:
    plan.retries += 1
    BEGIN_AGAIN(self, plan, effects)


def does_not_look_again(self: Any, plan: Any, effects: Any) -> None:
    self._hand_in_when_ready(plan, effects)


def ends_twice(self: Any, plan: Any, kind: Any, effects: Any, cause: int = 0) -> None:
    END(self, plan, kind, effects, cause)
    effects.append(End(plan.work, kind, cause))


def frees_early(self: Any, planned: Any, effects: Any) -> None:
    PLAN(self, planned, effects)
    effects.append(Free(planned.work))


def never_frees(self: Any, plan: Any, effects: Any) -> None:
    REMOVE(self, plan, effects)
    effects[:] = [effect for effect in effects if not isinstance(effect, Free)]


def drops_at_once(self: Any, functions: Any, effects: Any) -> None:
    effects.append(DropFunctions([fn for fn in functions if fn in self._unused]))


def never_in_time(self: Any, now: float, effects: Any) -> None: ...


def keeps_waiting(self: Any, effects: Any) -> None:
    waiting, self._plans = self._plans, {w: p for w, p in self._plans.items() if not p.inputs}
    ROUND_OVER(self, effects)
    self._plans = {**waiting, **self._plans}


def forgets_who_asks(self: Any, work: int, attempt: int, effects: Any) -> None:
    if self._plans.get(work) is not None:
        VALUE_LOST(self, work, attempt, [])


def makes_it_for_ever(self: Any, plan: Any, effects: Any) -> None:
    plan.recomputations = 0
    RECOMPUTE(self, plan, effects)


def forgets_what_is_lost(self: Any, plan: Any, lost: int, effects: Any) -> None:
    BEGIN_AGAIN(self, plan, effects)


def gives_up_who_asks(self: Any, plan: Any) -> None:
    SUSPEND(self, plan)
    plan.wanted = False


Plans = Dependencies
HAND_IN, NOTIFY, END, PLAN = (
    Plans._hand_in_when_ready,
    Plans._notify_waiting,
    Plans._end,
    Plans._plan,
)  # reach: a bug
REMOVE, ROUND_OVER, BEGIN_AGAIN = (
    Plans._remove,
    Plans._round_over,
    Plans._begin_again,
)  # reach: plants a bug
SUSPEND, RECOMPUTE, VALUE_LOST = (
    Plans._suspend_recomputation,
    Plans._recompute,
    Plans._value_lost,
)  # reach: a bug


PLANTED: list[tuple[str, Callable[..., Any], str]] = [
    ("_hand_in_when_ready", hands_in_too_early, "G2|KeyError"),
    ("_hand_in_when_ready", hands_in_while_ending, "G5"),
    ("_notify_waiting", tells_well, "G"),
    ("_notify_waiting", tells_nobody, "G1"),
    ("_begin_again", tries_again_for_ever, "G4"),
    ("_begin_again", does_not_look_again, "G2|G7|KeyError"),
    ("_end", ends_twice, "G1"),
    ("_plan", frees_early, "G9"),
    ("_remove", never_frees, "G9"),
    ("_drop", drops_at_once, "G8"),
    ("_tick", never_in_time, "G6"),
    ("_round_over", keeps_waiting, "G1|waiting"),
    ("_value_lost", forgets_who_asks, "G"),
    ("_recompute", makes_it_for_ever, "G7"),
    ("_input_lost", forgets_what_is_lost, "G|a story without an end"),
    ("_suspend_recomputation", gives_up_who_asks, "G7"),
]


@pytest.mark.parametrize(
    ("name", "bug", "told"), PLANTED, ids=[bug.__name__ for _, bug, _ in PLANTED]
)
def test_a_planted_bug_is_found(
    name: str, bug: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dependencies, name, bug)
    for seed in range(SEEDS_MAX):
        try:
            Story(seed).live()
        except Exception as error:
            found = f"{type(error).__name__} {error}"
            assert any(word in found for word in told.split("|")), found
            return
    pytest.fail(f"nothing noticed it in {SEEDS_MAX} seeds")

"""Does the simulation find bugs of the coordinator's machine? One bug is planted at a time, as a
fault of an event, an effect, a transition or the data of a record.

A row has the name of the bug, the fault that plants it, and the start of the simulation's report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from tests.sim.full.test_planted_bugs import first_complaint
from tests.sim.planted import Plant, effects, events, expect_report, no_arrow, unheard, without
from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import (
    ERROR,
    Begun,
    CancelWork,
    CoordinatorRegistered,
    Define,
    Forget,
    Message,
    Results,
    Submit,
)
from zmqdist.scheduling.coordinator import machine
from zmqdist.scheduling.coordinator.coordinator_events import (
    Free,
    FunctionsDropped,
    KeepInput,
    KeptDropped,
    Resolve,
    RetryDecided,
    Scheduled,
    SubmitWork,
    ValueLost,
)
from zmqdist.scheduling.coordinator.machine import FAILURES, CoordinatorMachine
from zmqdist.scheduling.coordinator.options import PLAIN
from zmqdist.scheduling.coordinator.work import INPUT_FAILED, TRANSITIONS, State, Work

pytestmark = pytest.mark.timeout(300)

SEEDS_MAX = 1000
RARE = {"a lost value is recomputed for ever": 1_200}
"""The first seed for a bug that one seed in a thousand finds."""


def is_heard(event: Any, *kinds: type[Message]) -> bool:
    return isinstance(event, Heard) and isinstance(event.message, kinds)


def data(alter: Callable[[Work], None], *causes: type) -> Plant:
    """The records are altered before each event, or before those of these kinds."""

    def altered(self: CoordinatorMachine, event: Any) -> Any:
        if not causes or isinstance(event, causes) or is_heard(event, *causes):
            scheduled = event.works if isinstance(event, Scheduled) else []
            for work in (*self.works.values(), *scheduled):
                if work.extra is not None:
                    alter(work)
        return event

    return events(CoordinatorMachine, altered)


def set_extra(**fields: Any) -> Callable[[Work], None]:
    def alter(work: Work) -> None:
        for name, value in fields.items():
            setattr(work.extra, name, value)

    return alter


def unsent(kind: type[Message], cause: type[Message] | None = None) -> Plant:
    """Messages of this kind are not sent, or not in reply to a message of the kind `cause`."""
    return effects(
        CoordinatorMachine,
        lambda self, event, answer: [
            effect
            for effect in answer
            if not (
                isinstance(effect, Send)
                and isinstance(effect.message, kind)
                and (cause is None or is_heard(event, cause))
            )
        ],
    )


def altered_effects(kind: type, alter: Callable[[Any], Any]) -> Plant:
    return effects(
        CoordinatorMachine,
        lambda self, event, answer: [
            alter(effect) if isinstance(effect, kind) else effect for effect in answer
        ],
    )


def altered_events(kind: type, alter: Callable[[Any], Any]) -> Plant:
    return events(
        CoordinatorMachine, lambda self, event: alter(event) if isinstance(event, kind) else event
    )


def not_submitted_again(self: Any, event: Any, answer: list[Any]) -> list[Any]:
    again = is_heard(event, CoordinatorRegistered)
    return [effect for effect in answer if not (again and isinstance(effect, SubmitWork))]


def detached_fails(resolve: Resolve) -> Resolve:
    detached = {w for w, kind, _ in resolve.items if kind in FAILURES and w.is_detached}
    return Resolve(resolve.items, {*resolve.failures, *detached})


class WithoutLosses(SubmitWork):
    def messages(self, pack: Callable[[Work], bytes], near: Any = None) -> Iterator[Submit]:
        for message in super().messages(pack, near):
            message.items = [
                (work, attempt, 0, fn, payload) for work, attempt, _, fn, payload in message.items
            ]
            yield message


def no_end_of_rounds(self: CoordinatorMachine, event: Any) -> Any:
    self.ending = False
    return event


def failed_counts_as_good(resolve: Resolve) -> Resolve:
    for work, _, _ in resolve.items:
        if work.state is State.FAILED:
            work.state = State.SUCCEEDED
    return resolve


def names_itself(resolve: Resolve) -> Resolve:
    items = [
        (work, kind, work.number if kind == INPUT_FAILED else payload)
        for work, kind, payload in resolve.items
    ]
    return replace(resolve, items=items)


def as_if_unused(self: CoordinatorMachine, event: Any) -> Any:
    if isinstance(event, FunctionsDropped):
        self._uses = dict.fromkeys(self._uses, 0)
    return event


def fails_by_any_error(self: CoordinatorMachine, event: Any, answer: list[Any]) -> list[Any]:
    if is_heard(event, Results) and self.failed is None:
        errors = [item for item in event.message.items if item[2] == ERROR]
        self.failed = errors[0][0] if errors else None
    return answer


def fails_by_the_last(self: CoordinatorMachine, event: Any, answer: list[Any]) -> list[Any]:
    for effect in answer:
        if isinstance(effect, Resolve) and effect.failures:
            self.failed = [w.number for w, _, _ in effect.items if w in effect.failures][-1]
    return answer


def inputs_last(self: Any, event: Any, answer: list[Any]) -> list[Any]:
    return sorted(answer, key=lambda effect: isinstance(effect, KeepInput))


def of_the_present(self: CoordinatorMachine, event: Any) -> Any:
    """Each result counts for the present attempt of its work item."""
    if not is_heard(event, Results):
        return event
    items = [
        (number, self.works[number].attempt if number in self.works else attempt, kind, payload)
        for number, attempt, kind, payload in event.message.items
    ]
    return Heard(event.peer, Results(items))


def any_width(self: CoordinatorMachine, event: Any) -> Any:
    self._width = None
    return event


def tries_for_ever(work: Work) -> None:
    if work.state in machine.AWAITING_RESULT:
        work.with_extra().retries = 1


BUGS: list[tuple[str, Plant, str | tuple[str, ...]]] = [
    (
        "a result is accepted twice",
        altered_effects(Resolve, lambda resolve: replace(resolve, items=resolve.items * 2)),
        ("coordinator P1", "coordinator P27"),
    ),
    (
        "a late result of an earlier attempt ends a later one",
        events(CoordinatorMachine, of_the_present),
        ("coordinator", "dispatch P"),
    ),
    (
        "unfinished work is not submitted again",
        effects(CoordinatorMachine, not_submitted_again),
        ("dispatch P7", "dispatch P17"),
    ),
    (
        "lost starts are not counted over dispatchers",
        altered_effects(
            SubmitWork, lambda submit: WithoutLosses(submit.round, submit.works, submit.options)
        ),
        "coordinator P5",
    ),
    (
        "functions are not sent to a new dispatcher",
        unsent(Define, CoordinatorRegistered),
        "dispatch P7",
    ),
    ("functions are never forgotten", unsent(Forget), "coordinator P7"),
    ("a dropped value stays with its worker", unheard(CoordinatorMachine, KeptDropped), ""),
    (
        "the options of work are not sent",
        altered_effects(SubmitWork, lambda submit: replace(submit, options=PLAIN)),
        ("dispatch P1", "coordinator P13"),
    ),
    (
        "an error of detached work fails the round",
        altered_effects(Resolve, detached_fails),
        "coordinator P10",
    ),
    ("time does not pass", unheard(CoordinatorMachine, Ticked), ""),
    ("the width is ignored", events(CoordinatorMachine, any_width), "coordinator P13"),
    (
        "work does not wait for its inputs",
        data(set_extra(inputs=()), Scheduled),
        ("coordinator P2", "coordinator P19"),
    ),
    (
        "work is submitted while its round ends",
        events(CoordinatorMachine, no_end_of_rounds),
        ("coordinator P25", "coordinator P3", "coordinator P14", ""),
    ),
    (
        "an error is tried again for ever",
        data(tries_for_ever, Results),
        ("coordinator P24", "dispatch P7"),
    ),
    ("an error is never tried again", data(set_extra(retries=0)), "coordinator P24"),
    (
        "a retry does not wait",
        altered_events(RetryDecided, lambda decided: replace(decided, draw=decided.draw - 1)),
        "coordinator P30",
    ),
    ("a retry is not asked for", data(set_extra(policy=None), Results), "coordinator P30"),
    (
        "a retry that the program refuses begins",
        altered_events(RetryDecided, lambda decided: replace(decided, again=True)),
        ("coordinator P30", "coordinator P24"),
    ),
    ("a decision about a retry is lost", unheard(CoordinatorMachine, RetryDecided), ""),
    ("a retry never begins", no_arrow(TRANSITIONS, State.DELAYED, State.WAITING), ""),
    (
        "a failed input counts as a good one",
        altered_effects(Resolve, failed_counts_as_good),
        "coordinator P23",
    ),
    ("the wrong input is named", altered_effects(Resolve, names_itself), "coordinator P23"),
    ("no time-out is kept", data(set_extra(until=None), Scheduled), "coordinator P26"),
    ("a lost value is not recomputed", unheard(CoordinatorMachine, ValueLost), ""),
    ("a lost value is recomputed for ever", data(set_extra(recomputations=0)), "coordinator P27"),
    (
        "a function is forgotten while work needs it",
        events(CoordinatorMachine, as_if_unused),
        ("coordinator P28", "coordinator P7", ""),
    ),
    (
        "held data is freed twice",
        effects(
            CoordinatorMachine,
            lambda self, event, answer: [*answer, *(e for e in answer if isinstance(e, Free))],
        ),
        "coordinator P29",
    ),
    (
        "held data is not freed",
        without(CoordinatorMachine, Free),
        ("coordinator P29", "coordinator P28"),  # its function is forgotten first
    ),
    ("attempts of ended work go on", unsent(CancelWork), "coordinator P26"),
    (
        "a round fails by an error that is tried again",
        effects(CoordinatorMachine, fails_by_any_error),
        "coordinator P18",
    ),
    (
        "a round fails by the last error",
        effects(CoordinatorMachine, fails_by_the_last),
        "coordinator P18",
    ),
    (
        "a time-out fails no round",
        lambda patch: patch.setattr(machine, "FAILURES", frozenset({ERROR})),
        "coordinator P18",
    ),
    (
        "an input arrives after its work was submitted",
        effects(CoordinatorMachine, inputs_last),
        "coordinator P19",
    ),
    (
        "the program is not told what has begun",
        events(
            CoordinatorMachine,
            lambda self, event: None if is_heard(event, Begun) else event,
        ),
        "dispatch P17",
    ),
    (
        "work is not queued again for another dispatcher",
        no_arrow(TRANSITIONS, State.SUBMITTED, State.QUEUED),
        "",
    ),
    (
        "a lost start of a fetch ends nothing",
        no_arrow(TRANSITIONS, State.FETCHING, State.QUEUED),
        "",
    ),
]


@pytest.mark.parametrize(("bug", "plant", "promise"), BUGS, ids=[bug[0] for bug in BUGS])
def test_simulation_finds_bug(
    bug: str, plant: Plant, promise: str | tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    begin = RARE.get(bug, 0)
    expect_report(lambda seed: first_complaint(begin + seed), SEEDS_MAX, bug, promise)

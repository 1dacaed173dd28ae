"""The tables of the dispatcher's machine: what they forget, and what reaches the journal."""

from __future__ import annotations

from typing import Any

import pytest

from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.machine import DataDispatcherMachine
from zmqdist.data.service.dispatcher.machine.state import decode_state
from zmqdist.data.service.dispatcher.machine.tables import Rules
from zmqdist.errors import (
    RESOURCE_EXHAUSTED,
)
from zmqdist.events import Ticked

STATE = 77
OFF, DYNAMIC = r.OFF, r.DYNAMIC


class Driven:
    """A machine with a journal that commits each record at once, unless it is `full`."""

    def __init__(self, **rules: Any) -> None:
        self.machine = DataDispatcherMachine(Rules(fault_tolerant=True, **rules), STATE, 0.0)
        self.first = r.encode(self.machine.state)
        self.records: list[bytes] = []
        self.full = False
        self.now = 0.0
        self.answers: dict[Any, Any] = {}

    def __call__(self, event: Any) -> Any:
        effects = list(self.machine.handle(event, self.now))
        while effects:
            effect = effects.pop(0)
            match effect:
                case ev.CommitJournal(records):
                    if self.full:
                        effects += self.machine.handle(
                            ev.JournalFailed(RESOURCE_EXHAUSTED, "disk full"), self.now
                        )
                    else:
                        self.records += records
                        effects += self.machine.handle(ev.JournalCommitted(), self.now)
                case ev.Reload():
                    self.reload(self.machine)
                case ev.ReplyToRequest(token, value):
                    self.answers[token] = value
                case ev.FailRequest(token, code, message):
                    self.answers[token] = (code, message)
        return self.answers.pop(getattr(event, "token", None), None)

    def reload(self, machine: DataDispatcherMachine) -> None:
        machine.restore(
            decode_state(self.first), [r.decode(record) for record in self.records], self.now
        )

    def tick(self, now: float) -> None:
        self.now = now
        self(Ticked())


@pytest.fixture
def driven() -> Driven:
    made = Driven()
    made(ev.WorkerJoined("worker:0", "a:1", 11))
    made(ev.WorkerJoined("worker:1", "b:1", 12))
    assert made(ev.RegisterRequest("t", 1, None, "print", "{}")) == ("1000", False)
    return made


def opened(
    driven: Driven, name: str | None, request: int, mode: int = OFF, repetition: int = 0
) -> Any:
    terms = r.Terms("1000", mode)
    return driven(
        ev.OpenRequest(
            "t",
            request,
            name,
            repetition,
            terms,
            (100,) if mode == DYNAMIC else (),
            f"anonymous_{request}",
        )
    )


@pytest.mark.parametrize("ends", ["read to the end", "closed", "given up"])
def test_thousand_anonymous_iterations_leave_nothing(driven: Driven, ends: str) -> None:
    live = driven.machine._tables  # reach: a leak shows nowhere else
    tables = (
        *(
            "watches",
            "portion_requests",
            "iterations_to_serve",
            "last_heard",
            "unread_since",
            "versions",
            "serving",
        ),
        *("client_by_request", "iteration_by_key", "job_by_name"),
    )

    def size() -> tuple[int, ...]:
        driven.tick(driven.now + 700.0)
        kept = [len(getattr(live, name)) for name in tables]
        figures = driven.machine.figures
        left = (
            figures._reports,
            figures._rates,
            figures._scalers,
        )  # reach: a leak shows nowhere else
        kept += [len(left[0]), len(left[1]), len(left[2])]
        return (len(r.encode(driven.machine.state)) // 16, *kept, driven.machine.num_tasks)

    before = size()
    for request in range(1000, 2000):
        client, _, _, _ = opened(driven, None, request, DYNAMIC)
        tasks = dict.fromkeys(live.tasks_of[1], "a:1")
        driven(
            ev.WorkRequest(
                "w", STATE, 11, tasks, (), {task: ev.TaskReport(1, 1, 1, 1, 0.1) for task in tasks}
            )
        )
        driven(ev.WatchRequest("news", STATE, client, 0, target_s=0.1))
        if ends == "read to the end":
            for worker, incarnation in ((1, 11), (2, 12)):
                driven(ev.WorkRequest("w", STATE, incarnation, {}, tuple(live.tasks_of[worker])))
        if ends == "given up":
            driven.tick(driven.now + 1000.0)
        else:
            driven(ev.ReleaseRequest("t", STATE, client))
        driven.answers.clear()
    assert size() == before
    other = DataDispatcherMachine(Rules(fault_tolerant=True), 5, 0.0)
    driven.reload(other)
    assert r.encode(other.state) == r.encode(driven.machine.state)


def test_impossible_change_is_not_journaled(driven: Driven) -> None:
    told = len(driven.records)
    with pytest.raises(KeyError):
        driven.machine._tables.change(r.ReleaseClient(9))  # reach: a leak shows nowhere else
    driven(Ticked())
    assert len(driven.records) == told

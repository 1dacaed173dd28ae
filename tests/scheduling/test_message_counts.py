"""How many messages a thousand work items take on each hop, with all machines connected: these
counts show that batching works."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import pytest

from zmqdist.events import Heard, Send
from zmqdist.limits import BATCH_ITEMS_MAX
from zmqdist.messages import VALUE
from zmqdist.scheduling.coordinator.coordinator_events import (
    DispatcherUp,
    FunctionsDefined,
    FunctionsDropped,
    Resolve,
    Scheduled,
    SubmitWork,
)
from zmqdist.scheduling.coordinator.machine import CoordinatorMachine
from zmqdist.scheduling.coordinator.work import Work
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.shared.broker_settings import BrokerSettings
from zmqdist.scheduling.worker.machine import WorkerMachine
from zmqdist.scheduling.worker.records import SLOT_BATCH_MAX
from zmqdist.scheduling.worker.worker_events import (
    DispatcherConnected,
    ForgetFunctions,
    Give,
    SlotFinished,
    SlotReady,
)

WORKS = 1000
WORKERS = ("w0", "w1")
QUICK_S = 2e-6
"""A function that does nothing takes about this long."""


class Wired:
    """A coordinator, a dispatcher and two workers with one slot each; each message arrives before
    the next one is sent."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        self.resolved: Counter[int] = Counter()
        self._mail: deque[tuple[str, Any]] = deque()
        self.broker = Broker(BrokerSettings())
        self.coordinator = CoordinatorMachine(
            coordinator=5,
            queue_max=10**6,
            cancel_grace_s=1.0,
            lost_limit_s=60.0,
            now=0.0,
            decode_loss=lambda payload: (int(payload), b""),
            recomputations_max=1,
        )
        self.workers = {
            name: WorkerMachine(
                incarnation=number + 1,
                job="worker",
                index=number,
                slots=1,
                pid=number + 1,
                host="host",
                orphan_limit_s=60.0,
                can_kill=True,
                now=0.0,
            )
            for number, name in enumerate(WORKERS)
        }
        for name in WORKERS:
            self.tell(name, SlotReady(0), DispatcherConnected(77))
        self.tell("c", DispatcherUp())
        self.counts.clear()

    def tell(self, who: str, *events: Any) -> None:
        """Have a machine handle an event, and deliver all messages that follow until there are
        none."""
        self._mail.extend((who, event) for event in events)
        while self._mail:
            to, event = self._mail.popleft()
            machine = {"b": self.broker, "c": self.coordinator, **self.workers}[to]
            for effect in machine.handle(event, self.now):  # type: ignore[attr-defined]
                self._follow(to, effect)

    def _follow(self, who: str, effect: Any) -> None:
        match effect:
            case SubmitWork():
                for message in effect.messages(lambda work: work.payload):
                    self._follow(who, Send("dispatcher", message))
            case Send(to, message):
                self.counts[type(message).__name__] += 1
                self.functions[type(message).__name__] += len(getattr(message, "functions", ()))
                whom = "b" if to == "dispatcher" else str(to)
                self._mail.append((whom, Heard(who, message)))
            case Give(slot, functions, items):
                self.counts["Give"] += 1
                self.functions["Give"] += len(functions)
                self.now += QUICK_S * len(items)
                self._mail.append(
                    (who, SlotFinished(slot, [(position, VALUE, b"r") for position, *_ in items]))
                )
            case Resolve(items):
                self.resolved.update(work.number for work, _, _ in items)
            case ForgetFunctions():
                self.counts["forgotten by slots"] += 1


def works_of(numbers: Iterable[int]) -> list[Work]:
    return [Work(number, 7, "f", b"") for number in numbers]


@pytest.fixture
def wired() -> Wired:
    """A cluster that has done so much quick work that all windows have adapted."""
    wired = Wired()
    wired.tell("c", FunctionsDefined([(7, b"f")]))
    for start in range(0, 20 * WORKS, WORKS):
        wired.tell("c", Scheduled(works_of(-1 - number for number in range(start, start + WORKS))))
    return wired


def test_quick_work_takes_few_messages_per_hop(wired: Wired) -> None:
    wired.counts.clear()
    wired.resolved.clear()
    wired.tell("c", Scheduled(works_of(range(1, WORKS + 1))))
    assert wired.resolved == Counter(range(1, WORKS + 1)), "each work item once"
    full = math.ceil(WORKS / BATCH_ITEMS_MAX)
    per_worker = math.ceil(WORKS / SLOT_BATCH_MAX) + 1
    assert wired.counts.pop("Submit") == full
    assert wired.counts.pop("Assign") <= len(WORKERS) * (full + 1)
    assert wired.counts.pop("Give") <= len(WORKERS) * per_worker
    assert wired.counts.pop("Done") <= len(WORKERS) * per_worker
    assert wired.counts.pop("Results") <= len(WORKERS) * per_worker
    assert not wired.counts, "no other message: starts travel with outcomes"


def test_work_item_takes_four_messages(wired: Wired) -> None:
    wired.counts.clear()
    wired.tell("c", Scheduled(works_of([1])))
    assert wired.counts == {"Submit": 1, "Assign": 1, "Give": 1, "Done": 1, "Results": 1}


def test_function_travels_once_per_hop(
    wired: Wired,
) -> None:
    sent = {message: count for message, count in wired.functions.items() if count}
    assert sent == {"Define": 1, "Assign": len(WORKERS), "Give": len(WORKERS)}


def test_ended_work_leaves_nothing(wired: Wired) -> None:
    coordinator, dispatch = wired.coordinator, wired.broker.dispatch
    (session,) = dispatch.sessions.values()
    assert (coordinator.unfinished, coordinator.queued) == (0, 0)
    assert not any((coordinator.works, coordinator._unsent))  # reach: a leak shows nowhere else
    assert (dispatch.placement.queued, session.queued, session.outstanding, len(session.held)) == (
        0,
        0,
        0,
        0,
    )
    for hands in dispatch.loads.values():
        assert not any((hands.leases, hands.held, hands.steals))
    for worker in wired.workers.values():
        assert (worker.running, worker.busy_slots) == (0, 0)
        (slot,), queue = worker.slots, worker.queue
        assert not any((worker._outcomes, worker._starts))  # reach: a leak shows nowhere else
        assert not any((queue, queue.report_before_start, queue.pinned, worker.results))
        assert not any((slot.given, slot.abort_at, slot.to_return))


def test_dropped_function_leaves_nothing(wired: Wired) -> None:
    wired.tell("c", FunctionsDropped([7]))
    (session,) = wired.broker.dispatch.sessions.values()
    assert wired.counts["forgotten by slots"] == len(WORKERS)
    coordinator = wired.coordinator
    left = (
        coordinator._functions,
        coordinator._uses,
        coordinator._dropped,
    )  # reach: a leak shows nowhere else
    assert not any((*left, session.functions))
    assert not any(hands.known_functions for hands in wired.broker.dispatch.loads.values())
    for worker in wired.workers.values():
        assert not any((worker.functions, *(slot.known for slot in worker.slots)))

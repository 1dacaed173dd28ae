"""Small parts that are large together travel in several messages: each fits into a header, and no
function is used before it was sent. Many work items take neither a deep stack nor memory after
their end."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from tests.scheduling.dispatcher.helpers import SEEN, begin, coordinator, hear, submit, worker
from zmqdist.events import Heard, ProcessExited, Send
from zmqdist.limits import BATCH_ITEMS_MAX, HEADER_BYTES_MAX, INLINE_BYTES_MAX
from zmqdist.messages import (
    Assign,
    CancelWork,
    CoordinatorRegistered,
    Define,
    Message,
    StartsLost,
    Submit,
)
from zmqdist.scheduling.coordinator.coordinator_events import (
    CancelRequested,
    DispatcherUp,
    Effect,
    FunctionsDefined,
    Resolve,
    Scheduled,
    SubmitWork,
)
from zmqdist.scheduling.coordinator.machine import CANCEL_MAX, CoordinatorMachine
from zmqdist.scheduling.coordinator.work import INPUT_FAILED, Extra, Work
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.wire.headers import encode

FUNCTIONS = [(fn, bytes(INLINE_BYTES_MAX)) for fn in range(1000, 1300)]
"""Together larger than a header may be."""


def fit(messages: list[Message]) -> bool:
    return (
        len(messages) > 1 and max(len(encode(message)) for message in messages) < HEADER_BYTES_MAX
    )


def test_functions_for_worker_are_split_before_work(
    broker: Broker,
) -> None:
    coordinator(broker)
    hear(broker, "c", Define(FUNCTIONS))
    hear(broker, "c", Submit(1, [(fn, 0, 0, fn, b"") for fn, _ in FUNCTIONS]))
    assigns = [
        e.message for e in worker(broker, slots=len(FUNCTIONS)) if isinstance(e.message, Assign)
    ]
    assert fit([*assigns])
    known: set[int] = set()
    for assign in assigns:
        known.update(fn for _, fn, _ in assign.functions)
        assert known.issuperset(item[3] for item in assign.items)
    assert sum(len(assign.functions) for assign in assigns) == len(FUNCTIONS)
    assert [item[3] for assign in assigns for item in assign.items] == [fn for fn, _ in FUNCTIONS]


def test_many_lost_starts_take_several_messages(
    broker: Broker,
) -> None:
    count = 250
    coordinator(broker)
    worker(broker, slots=count)
    submit(broker, *range(count))
    begin(broker, *range(1, count + 1))
    last_lines = "x" * (HEADER_BYTES_MAX // 200)
    effects = broker.handle(ProcessExited(SEEN.pid, -9, last_lines, SEEN.job, SEEN.index), 0.0)
    told = [e.message for e in effects if isinstance(e.message, StartsLost)]
    assert fit([*told])
    assert [item[0] for message in told for item in message.items] == list(range(count))


# -- the coordinator -------------------------------------------------------------------------------


def coordinator_machine() -> CoordinatorMachine:
    return CoordinatorMachine(
        coordinator=5,
        queue_max=10,
        cancel_grace_s=2.0,
        lost_limit_s=60.0,
        now=0.0,
        decode_loss=lambda payload: (int(payload), b""),
        recomputations_max=1,
    )


def connect(machine: CoordinatorMachine) -> list[Effect]:
    registered = Heard("dispatcher", CoordinatorRegistered(3, 1))
    return machine.handle(DispatcherUp(), 0.0) + machine.handle(registered, 0.0)


def works_of(numbers: Iterable[int], until: float | None = None) -> list[Work]:
    works = [Work(number, 7, "f", b"") for number in numbers]
    for work in works if until is not None else ():
        work.extra = Extra(until=until)
    return works


def sent(effects: list[Effect], kind: type[Message]) -> list[Any]:
    messages = (effect.message for effect in effects if isinstance(effect, Send))
    return [message for message in messages if isinstance(message, kind)]


def test_many_functions_are_defined_in_several_messages() -> None:
    machine = coordinator_machine()
    for is_first in (True, False):  # at this dispatcher, and again after a reconnect
        effects = connect(machine)
        effects += machine.handle(FunctionsDefined(FUNCTIONS), 0.0) if is_first else []
        defines = sent(effects, Define)
        assert fit([*defines])
        assert [function for message in defines for function in message.functions] == FUNCTIONS


def test_much_work_is_submitted_in_several_messages() -> None:
    machine = coordinator_machine()
    connect(machine)
    (effect,) = machine.handle(Scheduled(works_of(range(1, BATCH_ITEMS_MAX + 2))), 0.0)
    assert isinstance(effect, SubmitWork)
    sizes = [len(message.items) for message in effect.messages(lambda work: work.payload)]
    assert sizes == [BATCH_ITEMS_MAX, 1]


def test_much_work_is_cancelled_in_several_messages() -> None:
    machine = coordinator_machine()
    connect(machine)
    numbers = range(1, CANCEL_MAX + 2)
    machine.handle(Scheduled(works_of(numbers)), 0.0)
    cancels = sent(machine.handle(CancelRequested([*numbers]), 0.0), CancelWork)
    assert fit([*cancels])
    assert [work for message in cancels for work, _ in message.works] == [*numbers]


def test_long_chain_of_work_needs_no_deep_stack() -> None:
    machine = coordinator_machine()
    first, *rest = works = works_of(range(1, 5000))
    for source, work in pairwise(works):
        work.extra = Extra(inputs=[source])
    machine.handle(Scheduled([first]), 0.0)
    machine.handle(Scheduled(rest), 0.0)
    (resolve,) = machine.handle(CancelRequested([1]), 0.0)
    assert isinstance(resolve, Resolve)
    assert [work for work, _, _ in resolve.items] == works
    assert {kind for _, kind, _ in resolve.items[1:]} == {INPUT_FAILED}
    assert (machine.unfinished, machine.waiting) == (0, 0)


def test_deadlines_of_ended_work_are_forgotten() -> None:
    machine = coordinator_machine()
    machine.handle(Scheduled(works_of([1], until=50.0)), 0.0)
    for number in range(2, 1002):
        machine.handle(Scheduled(works_of([number], until=40.0)), 0.0)
        machine.handle(CancelRequested([number]), 0.0)
    assert len(machine._due) < 100  # reach: a leak shows nowhere else
    assert machine.deadline == 50.0

"""Small parts that are large together travel in several messages: each fits into a header, and no
function is used before it was sent."""

from __future__ import annotations

from tests.machines.dispatched import SEEN, begin, coordinator, hear, submit, worker
from zmqdist.events import Heard, ProcessExited, Send
from zmqdist.limits import HEADER_BYTES_MAX, INLINE_BYTES_MAX
from zmqdist.messages import Assign, CoordinatorRegistered, Define, Message, StartsLost, Submit
from zmqdist.scheduling.coordinator.closures import Closures
from zmqdist.scheduling.coordinator.coordinator_events import DispatcherUp, FunctionsDefined
from zmqdist.scheduling.dispatcher.broker import Broker
from zmqdist.wire.headers import encode

FUNCTIONS = [(fn, bytes(INLINE_BYTES_MAX)) for fn in range(1000, 1300)]
"""Together larger than a header may be."""


def fit(messages: list[Message]) -> bool:
    return (
        len(messages) > 1 and max(len(encode(message)) for message in messages) < HEADER_BYTES_MAX
    )


def test_many_functions_go_to_a_worker_in_several_messages_each_before_the_first_work_that_uses_it(
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


def test_many_lost_starts_with_their_last_lines_are_reported_in_several_messages(
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


def test_many_functions_are_defined_in_several_messages_at_once_and_for_another_dispatcher() -> (
    None
):
    closures = Closures(coordinator=5, queue_max=10, cancel_grace_s=2.0, lost_limit_s=60.0, now=0.0)
    for enlisted in (True, False):  # at this dispatcher, and again after a reconnect
        effects = closures.handle(DispatcherUp(), 0.0) + closures.handle(
            Heard("dispatcher", CoordinatorRegistered(3, 1)), 0.0
        )
        effects += closures.handle(FunctionsDefined(FUNCTIONS), 0.0) if enlisted else []
        defines = [
            e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Define)
        ]
        assert fit([*defines])
        assert [function for message in defines for function in message.functions] == FUNCTIONS

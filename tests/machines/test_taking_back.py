"""Work that an Executor takes back unless it has begun, and the bound on a coordinator's work at
the dispatcher.

First the coordinator's part, then the dispatcher's. For the worker it is a recall like any other
(test_worker.py).
"""

from __future__ import annotations

import pytest

from tests.machines.dispatched import LEASE_S, SEEN, cancelled, hear, submit, worker
from zmqdist.events import Heard, PeerGone, Send
from zmqdist.messages import (
    CANCELLED,
    VALUE,
    Begun,
    CancelWork,
    CoordinatorRegistered,
    Define,
    Done,
    LeasesReturned,
    Message,
    Register,
    RegisterCoordinator,
    Results,
    SlotsLost,
    StealRequest,
    Submit,
)
from zmqdist.scheduling.coordinator.affinity import Scheduled, WorkOptions
from zmqdist.scheduling.coordinator.closures import DISPATCHER, Closures
from zmqdist.scheduling.coordinator.coordinator_events import (
    DispatcherDown,
    DispatcherUp,
    Event,
    FunctionsDefined,
    TakeBackRequested,
)
from zmqdist.scheduling.coordinator.effects import Effect, Resolve, WorkBegun
from zmqdist.scheduling.dispatcher.broker import Broker
from zmqdist.scheduling.shared.broker_settings import BrokerSettings

# -- the coordinator -------------------------------------------------------------------------------


def coordinator(width: int | None = None) -> Closures:
    """A coordinator with a dispatcher and a worker."""
    made = Closures(
        coordinator=5,
        queue_max=1000,
        cancel_grace_s=2.0,
        lost_limit_s=60.0,
        now=0.0,
        starts=True,
        width=width,
    )
    effects = do(
        made,
        DispatcherUp(),
        Heard(DISPATCHER, CoordinatorRegistered(3, 1)),
        FunctionsDefined([(7, b"f")]),
    )
    assert isinstance(effects[0], Send)
    assert effects[0].message == RegisterCoordinator(5, 1000, 1, False, report_starts=True)
    return made


def do(closures: Closures, *events: Event) -> list[Effect]:
    return [effect for event in events for effect in closures.handle(event, 0.0)]


def schedule(closures: Closures, *works: int) -> list[Effect]:
    return do(closures, Scheduled([(work, 7, b"") for work in works]))


def ended(*works: int) -> Heard:
    return Heard(DISPATCHER, Results([(work, 0, VALUE, b"r") for work in works]))


def submitted(effects: list[Effect]) -> list[int]:
    messages = [effect.message for effect in effects if isinstance(effect, Send)]
    return [
        item[0] for message in messages if isinstance(message, Submit) for item in message.items
    ]


def resolved(*works: int) -> Resolve:
    return Resolve([(work, CANCELLED, b"") for work in works])


def test_p13_no_more_work_than_the_width_is_with_the_dispatcher_and_the_oldest_goes_first() -> None:
    closures = coordinator(width=2)
    assert submitted(schedule(closures, 1, 2, 3, 4, 5)) == [1, 2]
    assert submitted(schedule(closures, 6)) == []
    assert submitted(do(closures, ended(2))) == [3]
    assert submitted(do(closures, ended(1, 3))) == [4, 5]
    assert closures.queued == 3


def test_p13_a_new_dispatcher_gets_no_more_work_than_the_width_either() -> None:
    closures = coordinator(width=2)
    schedule(closures, 1, 2, 3, 4)
    do(closures, DispatcherDown())
    assert submitted(
        do(closures, DispatcherUp(), Heard(DISPATCHER, CoordinatorRegistered(3, 1)))
    ) == [1, 2]


def test_p13_detached_work_is_not_counted() -> None:
    closures = coordinator(width=1)
    assert submitted(schedule(closures, 1, 2)) == [1]
    apart = {3: WorkOptions(detached=True), 4: WorkOptions(detached=True)}
    assert submitted(do(closures, Scheduled([(3, 7, b""), (4, 7, b"")], (), apart))) == [3, 4]
    assert submitted(do(closures, ended(3, 4))) == []
    assert submitted(do(closures, ended(1))) == [2]


def test_p14_work_that_was_not_submitted_is_cancelled_at_once_and_the_rest_is_requested_back() -> (
    None
):
    closures = coordinator(width=2)
    schedule(closures, 1, 2, 3)
    assert do(closures, TakeBackRequested([1, 3, 99])) == [
        resolved(3),
        Send(DISPATCHER, CancelWork([1], 2.0, unless_begun=True)),
    ]


@pytest.mark.parametrize(
    ("answer", "effects"),
    [
        (Results([(1, 0, CANCELLED, b"")]), [resolved(1)]),
        (Results([(1, 0, VALUE, b"r")]), [Resolve([(1, VALUE, b"r")])]),
        (Begun([1]), [WorkBegun([1])]),
    ],
    ids=["taken back", "ended", "begun"],
)
def test_p14_each_request_is_answered(answer: Message, effects: list[Effect]) -> None:
    closures = coordinator()
    schedule(closures, 1, 2)
    do(closures, TakeBackRequested([1]))
    assert do(closures, Heard(DISPATCHER, answer)) == effects


def test_p14_the_start_of_ended_work_is_not_reported() -> None:
    """A program that remembers which work has begun forgets it when the work ends."""
    closures = coordinator()
    schedule(closures, 1, 2)
    do(closures, ended(1))
    assert do(closures, Heard(DISPATCHER, Begun([1, 2]))) == [WorkBegun([2])]
    assert do(closures, Heard(DISPATCHER, Begun([1]))) == []


def test_p14_work_that_no_dispatcher_can_decide_about_is_cancelled_and_not_submitted_again() -> (
    None
):
    closures = coordinator()
    schedule(closures, 1, 2, 3)
    do(closures, TakeBackRequested([1, 2]), Heard(DISPATCHER, Begun([2])))
    assert do(closures, DispatcherDown()) == [resolved(1)]
    assert submitted(
        do(closures, DispatcherUp(), Heard(DISPATCHER, CoordinatorRegistered(3, 1)))
    ) == [2, 3]


# -- the dispatcher --------------------------------------------------------------------------------


@pytest.fixture
def broker() -> Broker:
    """A dispatcher with a coordinator that hears which work has begun, and two work items at worker
    0, under leases 1 and 2."""
    made = Broker(BrokerSettings(lease_s=LEASE_S, reconnect_grace_s=1.0))
    hear(made, "c", RegisterCoordinator(1, 1000, 1, False, report_starts=True))
    hear(made, "c", Define([(7, b"f")]))
    worker(made, slots=2)
    submit(made, 1, 2)
    return made


def take_back(broker: Broker, *works: int) -> list[Send]:
    return hear(broker, "c", CancelWork([*works], 2.0, unless_begun=True))


def begun(*works: int) -> Send:
    return Send("c", Begun([*works]))


def test_a_coordinator_that_requested_starts_hears_which_work_has_begun(broker: Broker) -> None:
    assert hear(broker, "w", Done([], [2])) == [begun(2)]
    assert hear(broker, "w", Done([(2, VALUE, b"r")], [1])) == [
        begun(1),
        Send("c", Results([(2, 0, VALUE, b"r")])),
    ]


def test_a_start_that_a_worker_reports_again_is_reported_once(broker: Broker) -> None:
    hear(broker, "w", Done([], [2]))
    assert hear(broker, "w", Done([], [2])) == []


def test_p17_waiting_work_is_cancelled_and_work_that_may_not_have_begun_is_recalled(
    broker: Broker,
) -> None:
    submit(broker, *range(3, 51))
    hear(broker, "w", Done([], [2]))
    assert take_back(broker, 1, 2, 50) == [cancelled(50), Send("w", StealRequest([1])), begun(2)]
    assert cancelled(1) in hear(broker, "w", LeasesReturned([1]))
    assert Send("c", Results([(2, 0, VALUE, b"r")])) in hear(
        broker, "w", Done([(2, VALUE, b"r")], [])
    )


def test_p17_work_that_has_begun_meanwhile_continues(broker: Broker) -> None:
    take_back(broker, 1)
    assert hear(broker, "w", LeasesReturned([])) == []
    assert hear(broker, "w", Done([], [1])) == [begun(1)]
    assert hear(broker, "w", Done([(1, VALUE, b"r")], [])) == [
        Send("c", Results([(1, 0, VALUE, b"r")]))
    ]


def test_p17_work_that_had_begun_and_lost_its_process_runs_again(broker: Broker) -> None:
    take_back(broker, 1)
    hear(broker, "w", Done([], [1]))
    effects = hear(broker, "w", SlotsLost([(1, -9, "")]))
    assert cancelled(1) not in effects
    assert [effect.to for effect in effects] == ["c", "w"], (
        "the coordinator hears of the loss, the worker gets it again"
    )


@pytest.mark.parametrize(
    "loss", [SEEN, PeerGone("c")], ids=["its worker is lost", "its coordinator is gone"]
)
def test_p17_work_that_was_requested_back_does_not_run_again(broker: Broker, loss: Event) -> None:
    take_back(broker, 1, 2)
    effects = broker.handle(loss, 0.0)  # type: ignore[arg-type]
    assert (cancelled(2, 1) in effects) == (loss is SEEN)
    assert broker.snapshot().queued == 0


def test_p17_work_of_a_disconnected_worker_counts_as_begun(broker: Broker) -> None:
    broker.handle(PeerGone("w"), 0.0)
    assert take_back(broker, 1) == [begun(1)]


def test_p17_work_that_counts_as_begun_continues_although_it_was_requested_back_before(
    broker: Broker,
) -> None:
    """There are two requests, the second after the worker has disconnected. The reply to the second
    applies to both."""
    take_back(broker, 1)
    broker.handle(PeerGone("w"), 0.0)
    assert take_back(broker, 1) == [begun(1)]
    again = Register(1, "worker", 0, 2, [1, 2], [], 100, "host")
    assert not any(isinstance(effect.message, StealRequest) for effect in hear(broker, "w2", again))
    assert cancelled(1) not in hear(broker, "w2", LeasesReturned([1]))


def test_p17_the_recall_is_repeated_when_the_worker_comes_back(broker: Broker) -> None:
    take_back(broker, 1)
    broker.handle(PeerGone("w"), 0.0)
    again = Register(1, "worker", 0, 2, [1, 2], [], 100, "host")
    assert Send("w2", StealRequest([1])) in hear(broker, "w2", again)


def test_p17_begun_work_is_never_aborted_and_a_late_request_gets_the_same_reply(
    broker: Broker,
) -> None:
    hear(broker, "w", Done([], [1, 2]))
    assert take_back(broker, 1, 2) == [begun(1, 2)]

"""Work that a coordinator takes back: the dispatcher cancels it unless it has begun. For the worker
it is a recall like any other (test_worker.py)."""

from __future__ import annotations

import pytest

from tests.scheduling.dispatcher.dispatched import LEASE_S, SEEN, cancelled, hear, submit, worker
from zmqdist.events import PeerGone, ProcessExited, Send
from zmqdist.messages import (
    SUBMISSION_SHIFT,
    VALUE,
    AbortLeases,
    Begun,
    CancelWork,
    Define,
    Done,
    LeasesReturned,
    Register,
    RegisterCoordinator,
    Results,
    SlotsLost,
    StealRequest,
    Submit,
)
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.shared.broker_settings import BrokerSettings


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
    return hear(broker, "c", CancelWork([(work, 0) for work in works], 2.0, unless_begun=True))


def begun(*works: int) -> Send:
    return Send("c", Begun([(work, 0) for work in works]))


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
def test_p17_work_that_was_requested_back_does_not_run_again(
    broker: Broker, loss: ProcessExited | PeerGone
) -> None:
    take_back(broker, 1, 2)
    effects = broker.handle(loss, 0.0)
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


@pytest.mark.parametrize("unless_begun", [True, False])
def test_the_cancellation_of_a_submission_leaves_the_next_one_of_the_same_work_alone(
    broker: Broker, unless_begun: bool
) -> None:
    """A retry is submitted while the cancellation of the first attempt is on its way."""
    retry = 1 << SUBMISSION_SHIFT
    hear(broker, "w", Done([(1, VALUE, b"r")], []))
    hear(broker, "c", Submit(1, [(1, retry, 0, 7, b"1")]))
    hear(broker, "c", Submit(1, [(3, retry, 0, 7, b"3")], "worker:9"))
    late = CancelWork([(1, 5), (3, 5)], 2.0, unless_begun)
    assert hear(broker, "c", late) == []
    now = CancelWork([(1, retry), (3, retry + 5)], 2.0, unless_begun)
    result, request = hear(broker, "c", now)
    assert result == cancelled(3, attempt=retry)
    assert isinstance(request.message, StealRequest if unless_begun else AbortLeases)

"""The bounds of the membership: heartbeats, workers, and the history of losses.

How a worker joins, returns, is lost, and leaves is in transcripts/membership.txt.
"""

from __future__ import annotations

import pytest

from tests.scheduling.dispatcher.helpers import BACK_S, CUT_S, coordinator, hear, submit, worker
from zmqdist import errors
from zmqdist.events import Heard, PeerGone, Send, Ticked
from zmqdist.limits import WORKERS_MAX
from zmqdist.messages import Beat, EndRound, Refused, Register, Registered, RoundEnded
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.dispatcher.membership_and_leases import LOSSES_KEPT
from zmqdist.scheduling.shared.broker_settings import BrokerSettings


@pytest.mark.parametrize(
    ("workers", "lease_s", "beat_s"),
    [(1, 10.0, 1.0), (200, 10.0, 2.0), (1000, 10.0, 2.5), (1, 2.0, 0.5)],
    ids=["few", "two hundred", "at least four times a lease", "a short lease"],
)
def test_beats_are_rarer_with_more_workers(workers: int, lease_s: float, beat_s: float) -> None:
    broker = Broker(BrokerSettings(lease_s=lease_s, cancel_grace_s=CUT_S))
    for index in range(workers):
        effects = worker(broker, f"w{index}", index)
    assert effects == [Send(f"w{workers - 1}", Registered(workers - 1, beat_s, lease_s, CUT_S))]


def test_full_dispatcher_takes_back_its_members(broker: Broker) -> None:
    for index in range(WORKERS_MAX):
        worker(broker, f"w{index}", index)
    (effect,) = worker(broker, "w", WORKERS_MAX)
    assert isinstance(effect.message, Refused)
    assert effect.message.code == errors.RESOURCE_EXHAUSTED
    broker.handle(PeerGone("w7"), 0.0)
    assert isinstance(worker(broker, "again", 7)[0].message, Registered)


def test_history_holds_last_losses(broker: Broker) -> None:
    for number in range(LOSSES_KEPT + 5):
        worker(broker, f"w{number}", 0, life=number, now=2.0 * number)
        broker.handle(PeerGone(f"w{number}"), 2.0 * number)
        broker.handle(Ticked(), 2.0 * number + BACK_S)
    snapshot = broker.snapshot()
    assert (snapshot.losses_count, len(snapshot.losses)) == (LOSSES_KEPT + 5, LOSSES_KEPT)
    assert snapshot.losses[-1][3] == 2.0 * (LOSSES_KEPT + 4) + BACK_S


def test_idle_beats_share_five_a_second(broker: Broker) -> None:
    for index in range(40):
        worker(broker, f"w{index}", index)
    assert hear(broker, "w3", Beat()) == [Send("w3", Beat(8.0))]


def test_unwatched_worker_beats_while_idle(broker: Broker) -> None:
    """Its silence alone shows that it is lost."""
    register = Register(1, "worker", 0, 1, [], [], 100, "host")
    broker.handle(Heard("w", register), 0.0, watched=False)
    assert hear(broker, "w", Beat()) == [Send("w", Beat(0.0))]


def test_lease_counts_from_work_of_an_idle_worker(broker: Broker) -> None:
    """A worker that was silent while it was idle may run the work that it got after that."""
    coordinator(broker)
    worker(broker)
    submit(broker, 1, now=100.0)
    broker.handle(PeerGone("w"), 101.0)
    hear(broker, "c", EndRound(1, 0.0), 102.0)
    told = [broker.handle(Ticked(), now) for now in (103.0, 109.9, 110.0)]
    ended = [any(isinstance(send.message, RoundEnded) for send in sends) for sends in told]
    assert ended == [False, False, True]

"""The bounds of the membership: heartbeats, workers, and the history of losses.

How a worker joins, returns, is lost, and leaves is in transcripts/membership.txt.
"""

from __future__ import annotations

import pytest

from tests.scheduling.dispatcher.helpers import BACK_S, CUT_S, worker
from zmqdist import errors
from zmqdist.events import PeerGone, Send, Ticked
from zmqdist.limits import WORKERS_MAX
from zmqdist.messages import Refused, Registered
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

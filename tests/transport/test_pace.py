"""How many bytes may be in flight: the promises of the pace, on simulated links of several
rates.
"""

from __future__ import annotations

import heapq
import random
from itertools import count
from typing import Any

import pytest

from zmqdist.limits import (
    BULK_CHANNEL_WINDOW_BYTES,
    BULK_CHANNEL_WINDOW_BYTES_START,
    CHUNK_BYTES,
    CHUNK_BYTES_MIN,
    HEARTBEAT_TIMEOUT_S,
)
from zmqdist.transport.pace import QUEUE_S, SOJOURN_S_MAX, TRIP_KEPT_S, Pace

MIB = 2**20
MBIT = 125_000.0


class Sim:
    """Senders that share a link with a rate and a delay; the way back has only the delay.

    Attributes:
      waits: the seconds that each chunk needed until it arrived.
      arrived: the bytes of all senders that have arrived.
      delay_s: one way; may be changed.
      windows: of the first sender, after each acknowledgment.
    """

    def __init__(self, rate: float, delay_s: float, *paces: Pace, burst_bytes: int = 0) -> None:
        self.now = 0.0
        self.arrived = 0
        self.waits: list[float] = []
        self.windows: list[int] = []
        self.rate = rate
        self.delay_s = delay_s
        self._paces = paces
        self._burst_s = burst_bytes / rate
        self._free_at = -self._burst_s
        self._events: list[Any] = []
        self._order = count()

    def run(self, for_s: float) -> Sim:
        """Have all senders send as much as they may."""
        until = self.now + for_s
        for pace in self._paces:
            self._send(pace)
        while self._events and self._events[0][0] <= until:
            self.now, _, pace, nbytes, began = heapq.heappop(self._events)
            self.waits.append(self.now - self.delay_s - began)
            self.arrived += nbytes
            assert pace.acknowledged(nbytes, self.now)
            if pace is self._paces[0]:
                self.windows.append(pace.window_bytes)
            assert CHUNK_BYTES_MIN <= pace.chunk_bytes <= min(CHUNK_BYTES, pace.window_bytes)
            assert CHUNK_BYTES_MIN <= pace.window_bytes <= BULK_CHANNEL_WINDOW_BYTES
            self._send(pace)
        self.now = until
        return self

    def _send(self, pace: Pace) -> None:
        while pace.fits(nbytes := pace.chunk_bytes):
            pace.sent(nbytes, self.now)
            self._free_at = max(self._free_at, self.now - self._burst_s) + nbytes / self.rate
            heapq.heappush(
                self._events,
                (
                    max(self._free_at, self.now) + 2 * self.delay_s,
                    next(self._order),
                    pace,
                    nbytes,
                    self.now,
                ),
            )


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("mbit", [0.5, 1, 2, 10, 100])
def test_chunks_wait_briefly_on_busy_link(mbit: float, delay_s: float) -> None:
    sim = Sim(mbit * MBIT, delay_s, Pace()).run(60.0)
    assert max(sim.waits) < SOJOURN_S_MAX + delay_s, "half of the heartbeat's time-out"
    carried = min(
        mbit * MBIT, BULK_CHANNEL_WINDOW_BYTES / (2 * delay_s) if delay_s else mbit * MBIT
    )
    assert sim.arrived >= 0.8 * 60.0 * carried


@pytest.mark.parametrize("mbit", [0.5, 1, 2, 10, 100])
def test_two_transfers_spare_heartbeats(mbit: float) -> None:
    sim = Sim(mbit * MBIT, 0.01, Pace(), Pace()).run(60.0)
    assert max(sim.waits) < 0.75 * HEARTBEAT_TIMEOUT_S
    assert sim.arrived >= 0.8 * 60.0 * mbit * MBIT


def test_fast_link_has_full_window_after_ten_trips() -> None:
    pace = Pace()
    sim = Sim(10_000 * MBIT, 0.0005, pace).run(0.02)
    assert pace.window_bytes == BULK_CHANNEL_WINDOW_BYTES
    assert pace.chunk_bytes == CHUNK_BYTES
    assert sim.windows[0] > BULK_CHANNEL_WINDOW_BYTES_START


def test_window_follows_rate_of_link() -> None:
    pace = Pace()
    sim = Sim(10 * MBIT, 0.01, pace).run(10.0)
    sim.rate = 1 * MBIT
    sim.run(10.0)
    sim.waits.clear()
    sim.run(30.0)
    assert max(sim.waits) < SOJOURN_S_MAX
    sim.rate = 100 * MBIT
    sim.run(5.0)
    assert pace.window_bytes == BULK_CHANNEL_WINDOW_BYTES


def test_busy_receiver_narrows_window_briefly() -> None:
    pace = Pace()
    sim = Sim(1000 * MBIT, 0.0005, pace).run(1.0)
    assert pace.window_bytes == BULK_CHANNEL_WINDOW_BYTES
    while pace.fits(pace.chunk_bytes):
        pace.sent(pace.chunk_bytes, sim.now)
    pace.acknowledged(pace.unacknowledged, sim.now + 3.0)
    assert pace.window_bytes < BULK_CHANNEL_WINDOW_BYTES
    again = Sim(1000 * MBIT, 0.0005, pace)
    again.now = sim.now + 3.0
    again.run(0.1)
    assert pace.window_bytes == BULK_CHANNEL_WINDOW_BYTES


def test_longer_trip_is_learnt_during_transfer() -> None:
    pace = Pace()
    sim = Sim(10 * MBIT, 0.005, pace).run(5.0)
    sim.delay_s = 0.3
    sim.run(TRIP_KEPT_S + 10.0)
    assert 0.6 <= pace.trip_s < 0.6 + QUEUE_S
    arrived = sim.arrived
    sim.run(30.0)
    assert sim.arrived - arrived >= 0.8 * 30.0 * 10 * MBIT, (
        "the first round trip allows less than half of that"
    )


def test_first_chunk_after_pause_measures_trip() -> None:
    pace = Pace()
    for at, trip_s in [(0.0, 0.001), (1.0, 0.5), (2.0 + TRIP_KEPT_S, 0.5)]:
        assert pace.trip_s == min(pace.trip_s, 0.001) or at == 0.0
        pace.sent(pace.chunk_bytes, at)
        assert pace.acknowledged(pace.chunk_bytes, at + trip_s)
    assert pace.trip_s == pytest.approx(0.5)


def test_paired_acknowledgment_measures_trip() -> None:
    pace = Pace(window_bytes=BULK_CHANNEL_WINDOW_BYTES)
    now, trips = 0.0, []
    pending = 0
    for _ in range(200):
        while pace.fits(CHUNK_BYTES):
            pace.sent(CHUNK_BYTES, now)
            pending += 1
        assert pending >= 2, "the other side waits for a second chunk"
        now += 0.2
        assert pace.acknowledged(2 * CHUNK_BYTES, now)
        pending -= 2
        trips.append(pace.trip_s)
    assert trips[0] == pytest.approx(0.2)
    assert pace.window_bytes == BULK_CHANNEL_WINDOW_BYTES


def test_fast_link_has_full_window_soon() -> None:
    pace = Pace()
    sim = Sim(10_000 * MBIT, 0.0005, pace)
    while pace.window_bytes < BULK_CHANNEL_WINDOW_BYTES:
        sim.run(0.0001)
        assert sim.arrived <= 0.75 * MIB


@pytest.mark.parametrize("mbit", [0.5, 1, 2])
def test_burst_on_slow_link_is_recognised(mbit: float) -> None:
    sim = Sim(mbit * MBIT, 0.01, Pace(), burst_bytes=CHUNK_BYTES_MIN).run(60.0)
    assert max(sim.waits) < HEARTBEAT_TIMEOUT_S


def test_second_chunk_always_fits() -> None:
    pace = Pace(CHUNK_BYTES_MIN, CHUNK_BYTES_MIN)
    for _ in range(2):
        assert pace.fits(pace.chunk_bytes)
        pace.sent(pace.chunk_bytes, 0.0)
    assert not pace.fits(1)
    assert pace.acknowledged(pace.chunk_bytes, 100.0), "a window cannot fall below one chunk"
    assert pace.fits(pace.chunk_bytes)


def test_idle_sender_keeps_window() -> None:
    pace = Pace()
    for at in range(100):
        pace.sent(100, float(at))
        assert pace.acknowledged(100, at + 0.001)
    assert pace.window_bytes == BULK_CHANNEL_WINDOW_BYTES_START, (
        "a link that was not filled gives no measurement"
    )


@pytest.mark.parametrize("nbytes", [101, 10**12, -1])
def test_acknowledgment_of_unsent_bytes_changes_nothing(nbytes: int) -> None:
    pace = Pace()
    pace.sent(100, 0.0)
    assert not pace.acknowledged(nbytes, 1.0)
    assert (pace.unacknowledged, pace.window_bytes) == (100, BULK_CHANNEL_WINDOW_BYTES_START)


def test_random_acknowledgments_keep_bounds(seed: int) -> None:
    rng = random.Random(seed)
    pace = Pace()
    now, on_the_way, chunks = 0.0, 0, 0
    for _ in range(500):
        now += rng.choice([0.0, 1e-5, 0.01, 1.0]) * rng.random()
        nbytes = rng.randrange(1, pace.chunk_bytes + 1)
        if rng.random() < 0.6 and pace.fits(nbytes):
            assert chunks < 2 or on_the_way + nbytes <= pace.window_bytes
            chunks += 1
            pace.sent(nbytes, now)
            on_the_way += nbytes
        elif on_the_way:
            part = rng.choice([on_the_way, rng.randrange(1, on_the_way + 1)])
            assert pace.acknowledged(part, now)
            on_the_way -= part
            chunks = 0 if not on_the_way else 1  # at least
        assert pace.unacknowledged == on_the_way
        assert CHUNK_BYTES_MIN <= pace.window_bytes <= BULK_CHANNEL_WINDOW_BYTES

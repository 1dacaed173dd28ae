"""How much may be on the way: the windows for work and for bytes, held to their promises."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from math import inf

import pytest

from zmqdist.limits import WORKER_WINDOW_MAX
from zmqdist.scheduling.dispatcher.records import HORIZON_S, WorkWindow

Step = tuple[int, float]
"""(pieces that came back, the time at which they did)."""


def after(steps: list[Step], slots: int = 1, per_slot_max: int = WORKER_WINDOW_MAX) -> WorkWindow:
    """The window of a worker that got work at 0 s and has had work ever since."""
    window = WorkWindow(slots, per_slot_max)
    window.note_handed_out(0.0)
    before = 0.0
    for count, now in steps:
        window.note_returned(count, now - before, 0.0, now, idle=False)
        before = now
    return window


@pytest.mark.parametrize(
    ("slots", "per_slot_max", "steps", "limit"),
    [
        (1, 1024, [], 2),
        (16, 1024, [], 32),
        (1, 1024, [(1, 100.0)], 2),
        (4, 1024, [(1, 100.0), (1, 200.0)], 8),
        (1, 1024, [(1_000_000, 1.0)], 1024),
        (4, 1024, [(1_000_000, 1.0)], 4096),
        (2, 10, [(1_000_000, 1.0)], 20),
        (1, 1024, [(1_000_000, 1.0), (1, 1000.0)], 2),
    ],
    ids=[
        "new",
        "new, 16 slots",
        "slow",
        "slow, 4 slots",
        "quick",
        "quick, 4 slots",
        "own bound",
        "quick, then slow",
    ],
)
def test_p1_limit_is_between_two_and_maximum_per_slot(
    slots: int, per_slot_max: int, steps: list[Step], limit: int
) -> None:
    assert after(steps, slots, per_slot_max).limit == limit


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("takes_s", [HORIZON_S, 2 * HORIZON_S, 60.0])
def test_p2_slot_gets_two_items_of_long_work(slots: int, takes_s: float) -> None:
    steps = [(slots, takes_s * turn) for turn in range(1, 20)]
    for turns in range(1, 20):
        assert after(steps[:turns], slots).limit == 2 * slots


def test_limit_follows_falling_rate_at_once() -> None:
    window = after([(1000, 1.0)])
    assert (window.rate, window.limit) == (500.0, 25)
    window.note_returned(1000, 1.0, 0.0, 2.0, idle=False)
    assert (window.rate, window.limit) == (750.0, 37)
    window.note_returned(100, 1.0, 0.0, 3.0, idle=False)
    assert (window.rate, window.limit) == (100.0, 5)


def test_rate_is_measured_over_five_milliseconds() -> None:
    window = after([(1, 0.002), (1, 0.004)])
    assert (window.rate, window.limit) == (0.0, 2)
    # five in 5 ms: the earlier outcomes count
    window.note_returned(3, 0.001, 0.0, 0.005, idle=False)
    assert window.rate == pytest.approx(500.0)


def test_rate_counts_reported_busy_time_only() -> None:
    window = WorkWindow(1)
    for turn in range(2):
        window.note_handed_out(turn * 100.0)
        window.note_returned(1000, 1.0, 0.0, turn * 100.0 + 50.0, idle=True)
    assert window.rate == pytest.approx(750.0)


def held_up(
    trip_s: float, takes_s: Callable[[int], float], seconds: float, slots: int = 1
) -> tuple[int, WorkWindow]:
    """Simulate endless work for a worker with a round trip of `trip_s` that reports every 2 ms.
    Return how much work it does."""
    window = WorkWindow(slots)
    due: list[tuple[float, int, str]] = [(0.0, 0, "give")]
    numbers = itertools.count(1)
    outstanding = done = queued = ended = 0
    busy_until = busy_s = reported_at = 0.0
    while due:
        now, _, what = heapq.heappop(due)
        if now > seconds:
            break
        if what == "back":
            count, busy = reports.popleft()
            outstanding -= count
            done += count
            window.note_returned(count, busy, trip_s, now, idle=not outstanding)
        if what in ("back", "give") and (room := window.limit - outstanding) > 0:
            window.note_handed_out(now)
            outstanding += room
            parcels.append(room)
            heapq.heappush(due, (now + trip_s / 2, next(numbers), "there"))
        if what == "there":
            queued += parcels.popleft()
        if what == "ran":
            ended += 1
        if what in ("there", "ran") and busy_until <= now and queued:
            queued -= 1
            busy_until = now + takes_s(done + ended) / slots
            busy_s += busy_until - now
            heapq.heappush(due, (busy_until, next(numbers), "ran"))
        if ended and (now >= reported_at + 0.002 or not queued):
            reports.append((ended, busy_s))
            ended, busy_s, reported_at = 0, 0.0, now
            heapq.heappush(due, (now + trip_s / 2, next(numbers), "back"))
    return done, window


parcels: deque[int] = deque()
reports: deque[tuple[int, float]] = deque()


@pytest.fixture(autouse=True)
def _nothing_is_on_the_way() -> None:
    parcels.clear()
    reports.clear()


@pytest.mark.parametrize("trip_s", [0.0, 0.001, 0.01, 0.04, 0.1, 0.2, 0.5])
def test_p3_quick_work_keeps_distant_worker_busy(trip_s: float) -> None:
    done, window = held_up(trip_s, lambda _: 0.0001, 10.0)
    # the window needs a few round trips until the rate is known
    possible = 10_000 * (10.0 - 6 * trip_s)
    assert done >= 0.7 * min(possible, WORKER_WINDOW_MAX / max(trip_s, 1e-9) * 10)
    assert window.trip_s == trip_s


def test_p3_slow_first_item_does_not_starve_worker() -> None:
    done, _ = held_up(
        0.2, lambda number: 0.05 if number == 0 or number % 5000 == 4999 else 0.0001, 10.0
    )
    assert done >= 50_000


def test_p2_distant_slot_gets_two_items_of_slow_work() -> None:
    for takes_s in (0.25, 1.0):
        _, window = held_up(0.2, lambda _, each=takes_s: each, 60.0)
        assert window.limit == 2


def test_message_without_outcomes_keeps_rate() -> None:
    window = after([(1000, 1.0), (0, 1.0)])
    window.note_returned(1000, 1.0, 0.0, 2.0, idle=False)
    assert window.rate == 750.0


def test_remaining_time_follows_rate() -> None:
    assert after([(1000, 1.0)]).remaining_s(50) == 0.1
    assert WorkWindow(1).remaining_s(1) == inf

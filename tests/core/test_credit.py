"""How much may be on the way: the windows for work and for bytes, held to their promises."""

from __future__ import annotations

from math import inf

import pytest

from zmqdist.core.credit import HORIZON_S, ByteWindow, WorkWindow
from zmqdist.limits import WORKER_WINDOW_MAX

Step = tuple[int, float]
"""(pieces that came back, the time at which they did)."""


def after(steps: list[Step], slots: int = 1, per_slot_max: int = WORKER_WINDOW_MAX) -> WorkWindow:
    """The window of a worker that was given work at 0 s and has had some ever since."""
    window = WorkWindow(slots, per_slot_max)
    window.given(0.0)
    for count, now in steps:
        window.done(count, now, idle=False)
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
    ids=["new", "new, 16 slots", "slow", "slow, 4 slots", "quick", "quick, 4 slots", "own bound", "quick, then slow"],
)
def test_p1_the_limit_stays_between_two_and_the_maximum_for_each_slot(
    slots: int, per_slot_max: int, steps: list[Step], limit: int
) -> None:
    assert after(steps, slots, per_slot_max).limit == limit


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("takes_s", [HORIZON_S, 2 * HORIZON_S, 60.0])
def test_p2_work_that_takes_longer_than_the_horizon_is_given_out_two_for_a_slot(slots: int, takes_s: float) -> None:
    steps = [(slots, takes_s * turn) for turn in range(1, 20)]
    for turns in range(1, 20):
        assert after(steps[:turns], slots).limit == 2 * slots


def test_the_limit_follows_a_growing_rate_by_half_and_a_falling_one_at_once() -> None:
    window = after([(1000, 1.0)])
    assert (window.rate, window.limit) == (500.0, 25)
    window.done(1000, 2.0, idle=False)
    assert (window.rate, window.limit) == (750.0, 37)
    window.done(100, 3.0, idle=False)
    assert (window.rate, window.limit) == (100.0, 5)


def test_a_rate_is_taken_over_five_milliseconds_and_not_over_less() -> None:
    window = after([(1, 0.002), (1, 0.004)])
    assert (window.rate, window.limit) == (0.0, 2)
    window.done(3, 0.005, idle=False)  # five in 5 ms: the earlier ones count
    assert window.rate == pytest.approx(500.0)


def test_time_without_work_does_not_make_a_worker_slow() -> None:
    window = WorkWindow(1)
    for turn in range(2):
        window.given(turn * 100.0)
        window.given(turn * 100.0 + 0.5)  # what is given to one who has some starts no clock
        window.done(1000, turn * 100.0 + 1.0, idle=True)
    assert window.rate == pytest.approx(750.0)


def test_a_message_without_outcomes_says_nothing_about_the_rate() -> None:
    window = after([(1000, 1.0), (0, 50.0)])
    window.done(1000, 2.0, idle=False)
    assert window.rate == 750.0


def test_what_a_worker_holds_takes_as_long_as_its_rate_says_and_for_ever_while_that_is_unknown() -> None:
    assert after([(1000, 1.0)]).remaining_s(50) == 0.1
    assert WorkWindow(1).remaining_s(1) == inf


def test_p3_no_more_bytes_than_the_window_are_on_the_way() -> None:
    window = ByteWindow(100)
    assert [window.take(60), window.take(60), window.take(40), window.take(1)] == [True, False, True, False]
    window.arrived(60)
    assert [window.take(61), window.take(60)] == [False, True]


def test_p3_a_single_chunk_may_always_be_asked_for() -> None:
    window = ByteWindow(100)
    assert window.take(1000)
    assert not window.take(1)
    window.arrived(1000)
    assert window.take(1000)


def test_more_bytes_than_were_asked_for_are_a_mistake_of_the_caller() -> None:
    window = ByteWindow(100)
    window.take(10)
    with pytest.raises(AssertionError, match="more arrived than was asked for"):
        window.arrived(11)

"""When work came and was handed out, for the timeline (run_times.py)."""

from __future__ import annotations

import pytest

from zmqdist.limits import EVENTS_KEPT
from zmqdist.messages import SUBMISSION_SHIFT, Item
from zmqdist.scheduling.dispatcher.run_times import SPANS_MAX, RunTimes, Spans

RETRY = 1 << SUBMISSION_SHIFT


def items(*works: int, attempt: int = 0) -> list[Item]:
    return [(work, attempt, 0, 7, b"") for work in works]


def test_span_has_the_time_of_its_numbers() -> None:
    spans = Spans()
    spans.add(10, 20, 1.0)
    spans.add(20, 21, 2.0)
    spans.add(30, 40, 3.0)
    numbers = (9, 10, 19, 20, 21, 29, 30, 39, 40)
    assert [spans.time_of(number) for number in numbers] == [0, 1, 1, 2, 0, 0, 3, 3, 0]


def test_oldest_spans_are_forgotten() -> None:
    spans = Spans()
    for number in range(SPANS_MAX + 1):
        spans.add(number, number + 1, 1.0 + number)
    assert spans.time_of(0) == 0.0
    assert spans.time_of(SPANS_MAX) == 1.0 + SPANS_MAX


def test_works_that_came_together_have_one_time() -> None:
    times = RunTimes()
    times.note_submitted(1, items(5, 6, 7), {}, 4.0)
    assert [times.submitted(1, work, 0) for work in (4, 5, 7, 8)] == [
        (0, 0),
        (4, 4),
        (4, 4),
        (0, 0),
    ]
    assert times.submitted(2, 5, 0) == (0, 0)  # of another program


def test_work_that_waited_for_inputs_was_submitted_earlier() -> None:
    times = RunTimes()
    times.note_submitted(1, items(5, 6), {6: 1.5}, 4.0)
    assert times.submitted(1, 5, 0) == (4.0, 4.0)
    assert times.submitted(1, 6, 0) == (2.5, 4.0)


@pytest.mark.parametrize("later", [items(4), items(9, 6), items(6, 8, 8)])
def test_work_that_comes_late_has_its_own_time(later: list[Item]) -> None:
    times = RunTimes()
    times.note_submitted(1, items(5, 6, 7), {}, 1.0)
    times.note_submitted(1, later, {}, 2.0)
    assert times.submitted(1, later[0][0], 0)[1] == 2.0
    assert times.submitted(1, 7, 0)[1] == 1.0


def test_retry_has_another_time_than_the_first_submission() -> None:
    times = RunTimes()
    times.note_submitted(1, items(5, 6), {}, 1.0)
    assert times.submitted(1, 5, RETRY) == (0, 0)
    times.note_submitted(1, items(5, attempt=RETRY), {}, 9.0, retried=1)
    assert times.submitted(1, 5, RETRY + 2)[1] == 9.0
    assert times.submitted(1, 5, 1)[1] == 1.0


def test_retry_that_comes_first_has_its_time() -> None:
    times = RunTimes()
    times.note_submitted(1, items(5, attempt=RETRY), {}, 9.0, retried=1)
    assert times.submitted(1, 5, RETRY)[1] == 9.0


def test_times_of_single_works_are_bounded() -> None:
    times = RunTimes()
    times.note_submitted(1, items(*range(0, 2 * EVENTS_KEPT + 2, 2)), {}, 1.0)
    assert times.submitted(1, 0, 0) == (0, 0)
    assert times.submitted(1, 2 * EVENTS_KEPT, 0) == (1, 1)

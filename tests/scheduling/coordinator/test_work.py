"""The record of a work item of a coordinator: its states, and the numbers of its attempts."""

from __future__ import annotations

import pytest

from zmqdist import errors
from zmqdist.errors import LostStart
from zmqdist.messages import SUBMISSION_SHIFT
from zmqdist.scheduling.coordinator.options import WorkOptions
from zmqdist.scheduling.coordinator.work import Extra, State, Work

RESULTS = "WAITING DECIDING QUEUED FETCHING KEPT VALUE_LOST SUCCEEDED FAILED"
"""What a result, or the loss of the dispatcher that owes one, can make of a work item."""
ALLOWED = {
    "NEW": "WAITING QUEUED HELD FAILED",
    "WAITING": "QUEUED HELD VALUE_LOST SUCCEEDED FAILED",
    "QUEUED": "SUBMITTED WAITING VALUE_LOST SUCCEEDED FAILED",
    "SUBMITTED": f"{RESULTS} TAKING_BACK CANCELLING ABANDONED",
    "TAKING_BACK": f"{RESULTS} SUBMITTED CANCELLING ABANDONED",
    "CANCELLING": f"{RESULTS} ABANDONED",
    "FETCHING": RESULTS,
    "HELD": "CALLING FAILED",
    "CALLING": "RECEIVING SUCCEEDED FAILED",
    "RECEIVING": "SUCCEEDED FAILED",
    "DECIDING": "DELAYED VALUE_LOST SUCCEEDED FAILED",
    "DELAYED": "WAITING VALUE_LOST SUCCEEDED FAILED",
    "KEPT": "VALUE_LOST SUCCEEDED FAILED",
    "VALUE_LOST": "WAITING SUCCEEDED FAILED",
    "SUCCEEDED": "",
    "FAILED": "",
    "ABANDONED": "SUCCEEDED FAILED",
}


def new_work(state: State = State.NEW) -> Work:
    work = Work(3, 7, "train", b"packed")
    work.state = state
    return work


@pytest.mark.parametrize("before", State, ids=lambda state: state.name)
def test_state_changes_only_as_table_allows(before: State) -> None:
    for after in State:
        work = new_work(before)
        if after.name in ALLOWED[before.name].split():
            work.move(after)
            assert work.state is after
            continue
        text = f"work 3 cannot go from {before.name} to {after.name}"
        with pytest.raises(errors.InternalError, match=text):
            work.move(after)
        assert work.state is before, "a refused transition changes nothing"


@pytest.mark.parametrize(
    ("attempt", "first"),
    [(0, 1), (7, 1), (2**16 - 1, 1), (2**16, 2), (2**16 + 7, 2), (5 * 2**16 + 1, 6)],
)
def test_submission_has_range_of_65536_attempts(attempt: int, first: int) -> None:
    work = new_work()
    work.attempt = attempt
    work.begin_attempts()
    assert (work.attempt, 1 << SUBMISSION_SHIFT) == (first * 65536, 65536)


def test_record_without_rare_fields_has_their_defaults() -> None:
    work = new_work()
    assert (work.extra, work.is_detached, work.lost_starts) == (None, False, ())
    work.with_extra().lost_starts = (LostStart("worker:0", 0, -9, ""),)
    assert (work.with_extra() is work.extra, len(work.lost_starts)) == (True, 1)
    work.extra = Extra(WorkOptions(detached=True))
    assert work.is_detached


def test_record_has_no_dict() -> None:
    work = new_work()
    assert not hasattr(work, "__dict__")
    assert not hasattr(work.with_extra(), "__dict__")

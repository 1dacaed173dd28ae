"""Ten times as many drawn pipelines as seeds: 2,000 in the tier `all`. The drawing is in
tests/data/service/equivalence.py.

pytest tests/data/service/full/test_equivalence_of_many.py --seed 1234      draws its ten cases again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.data.service.equivalence import MODES, Services, check_equivalence, drawn
from zmqdist.data.iterators import Context
from zmqdist.data.service.dispatcher.machine.portions import PortionAssignment

CASES_OF_A_SEED = 10

pytestmark = pytest.mark.shares_cluster


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services() as services:
        yield services


def check_all(services: Services, cases: Iterable[int]) -> Counter[str]:
    """Check the cases, and count those of each mode that were run."""
    return Counter(drawn(case).mode for case in cases if check_equivalence(case, services))


@pytest.mark.timeout(300)
def test_service_gives_elements_of_plain_run(services: Services, seed: int) -> None:
    check_all(services, range(seed * CASES_OF_A_SEED, (seed + 1) * CASES_OF_A_SEED))


@pytest.mark.timeout(240)  # 300 cases, 45 s on two busy cores
def test_most_drawn_cases_are_run_in_each_mode(services: Services) -> None:
    ran = check_all(services, range(300))
    assert all(ran[mode] > 15 for mode in MODES), ran


def bug_of_states(monkeypatch: Any) -> None:
    """A loaded iterator counts its passes from its own dataset object."""
    monkeypatch.setattr(Context, "load", lambda *_: None)
    monkeypatch.setattr(Context, "load_pass", lambda *_: None)


def bug_of_later_passes(monkeypatch: Any) -> None:
    """A reader of a state gets only the rest of a pass that the saved reader has begun after it."""
    monkeypatch.setattr(PortionAssignment, "_earlier", lambda *_: [])


@pytest.mark.parametrize(
    ("bug", "mode"),
    [(bug_of_states, "local"), (bug_of_states, "ordered"), (bug_of_later_passes, "exactly_once")],
)
def test_planted_bug_is_found(services: Services, monkeypatch: Any, bug: Any, mode: str) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=r"instead of|too few"):
        check_all(services, [case for case in range(1000) if drawn(case).mode == mode])

"""Ten times as many drawn pipelines as seeds: 2,000 in the tier `all`. The drawing is in tests/data_service/equivalence.py.

pytest tests/data_service/full/test_equivalence_of_many.py --seed 1234      draws its ten cases again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.data_service.equivalence import MODES, Services, check_equivalence, drawn
from zmqdist.data.iterators import Context

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
def test_the_service_gives_the_elements_of_a_plain_run(services: Services, seed: int) -> None:
    check_all(services, range(seed * CASES_OF_A_SEED, (seed + 1) * CASES_OF_A_SEED))


def test_most_drawn_cases_are_run_in_each_mode(services: Services) -> None:
    ran = check_all(services, range(200))
    assert all(ran[mode] >= 10 for mode in MODES), ran


def test_a_state_without_the_number_of_the_pass_is_found(services: Services, monkeypatch: Any) -> None:
    """A planted bug: a loaded iterator counts its passes from its own dataset object, as it did once."""
    monkeypatch.setattr(Context, "load", lambda *_: None)
    monkeypatch.setattr(Context, "load_pass", lambda *_: None)
    with pytest.raises(AssertionError, match="instead of"):
        check_all(services, [case for case in range(600) if drawn(case).mode == "local"])

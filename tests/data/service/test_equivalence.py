"""A run by the service gives the elements of a plain run, whatever the pipeline, the mode and the
place at which a state is saved.

pytest tests/data/service/test_equivalence.py --seed 1234      draws one case again
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.data.service.equivalence import Services, check_equivalence

pytestmark = pytest.mark.shares_cluster


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services() as services:
        yield services


def test_service_gives_elements_of_plain_run(services: Services, seed: int) -> None:
    check_equivalence(seed, services)

"""How functions fail, and what becomes of the others, where slots are processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import zmqdist as zd
from tests.scheduling.coordinator import test_errors_of_rounds, test_rounds
from tests.scheduling.coordinator.helpers import select_tests
from tests.scheduling.coordinator.test_errors_of_rounds import coordinator as coordinator

pytestmark = pytest.mark.timeout(90)

globals().update(
    select_tests(test_errors_of_rounds, "coordinator")
    | select_tests(test_errors_of_rounds, "cluster")
    | select_tests(test_rounds, "coordinator")
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=3) as cluster:
        yield cluster

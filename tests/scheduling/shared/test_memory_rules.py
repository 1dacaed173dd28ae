"""No process ever sees another's later writes, however an array was transferred."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import zmqdist as zd
from tests.scheduling.shared.memory_walk import walk


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=2) as made:
        yield made


@pytest.mark.shares_cluster  # its tasks keep their arguments
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1])
def test_later_writes_are_seen_by_no_process(cluster: zd.local_cluster, seed: int) -> None:
    walk(cluster, seed)

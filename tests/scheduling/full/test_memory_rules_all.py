"""The random walk of test_memory_rules.py with other seeds, and without shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import zmqdist as zd
from tests.scheduling.shared.memory_walk import walk
from zmqdist.transport import shm_pool


@pytest.fixture(scope="module", params=["shared memory", "sockets"])
def cluster(request: pytest.FixtureRequest) -> Iterator[zd.local_cluster]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "sockets":
            patch.setenv(shm_pool.POOL_VARIABLE, "off")
            patch.setattr(shm_pool, "_pool", None)
            patch.setattr(shm_pool, "_tried", False)
        with zd.local_cluster(workers=2) as made:
            yield made


@pytest.mark.shares_cluster  # its tasks keep their arguments
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_later_writes_are_seen_by_no_process(cluster: zd.local_cluster, seed: int) -> None:
    walk(cluster, seed)

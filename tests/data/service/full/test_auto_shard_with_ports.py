"""Fixed shares of workers whose entries in the list have ports: each test has four workers that are
processes."""

from __future__ import annotations

import pytest

from tests.data.service.helpers import values
from tests.data.service.test_auto_shard import FILE_OR_DATA, WORKERS, cluster_of
from zmqdist.data import Dataset

# Tasks go on in the cluster's workers when their readers have gone.
pytestmark = pytest.mark.shares_cluster


@pytest.mark.parametrize("address", ["localhost:%port%", "localhost:%port_worker%"])
def test_anonymous_ports(address: str) -> None:
    """And NamedPorts."""
    with cluster_of(3, [address] * WORKERS) as cluster:
        mine = cluster.distribute(Dataset.range(20), FILE_OR_DATA)
        assert values(mine) == [3, 8, 13, 18]

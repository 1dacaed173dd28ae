"""A service whose secret is not in the usual place: it is named by what knows where the secret
is.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.data import Dataset
from zmqdist.data.service import ShardingPolicy, distribute, from_dataset_id, register_dataset
from zmqdist.errors import UnauthenticatedError
from zmqdist.transport import credentials

pytestmark = pytest.mark.shares_cluster

DYNAMIC = ShardingPolicy.DYNAMIC
TEN = list(range(10))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with zd.local_cluster(workers=1) as made:
        yield made


@pytest.mark.parametrize("options", [{}, {"ordered": True}], ids=str)
def test_cluster_stands_for_its_service(cluster: Any, options: dict[str, Any]) -> None:
    assert sorted(map(int, Dataset.range(10).apply(distribute(DYNAMIC, cluster, **options)))) == TEN
    with ClusterCoordinator(cluster) as coordinator:
        assert (
            sorted(map(int, Dataset.range(10).apply(distribute(DYNAMIC, coordinator, **options))))
            == TEN
        )


def test_registered_dataset_uses_secret_of_cluster(cluster: Any) -> None:
    register_dataset(cluster, Dataset.range(10), dataset_id="ten")
    assert sorted(map(int, from_dataset_id(DYNAMIC, cluster, "ten"))) == TEN


def test_address_does_not_reveal_secret(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "own_clusters", {})
    with pytest.raises(UnauthenticatedError):
        Dataset.range(10).apply(distribute(DYNAMIC, cluster.target))


def test_pickled_dataset_has_only_path_of_secret(cluster: Any, tmp_path: Path) -> None:
    pickled = pickle.dumps(Dataset.range(10).apply(distribute(DYNAMIC, cluster)))
    assert cluster.credentials.token_file.encode() in pickled
    assert Path(cluster.credentials.token_file).read_bytes().strip() not in pickled
    file = tmp_path / "dataset"
    file.write_bytes(pickled)
    code = "import json, pickle, sys; print(json.dumps(list(map(int, pickle.load(open(sys.argv[1], 'rb'))))))"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("ZMQDIST_")
    }
    command = [sys.executable, "-c", code, str(file)]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(json.loads(ran.stdout)) == TEN
    assert ran.stderr == ""

"""A PyTorch DataLoader over datasets: run where PyTorch is installed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader

from tests.data.service.helpers import TestCluster
from zmqdist.data import Dataset
from zmqdist.integrations.torch import IterableDataset

# Workers of the cluster keep the tasks of readers that have gone.
pytestmark = pytest.mark.shares_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with TestCluster(2) as cluster:
        yield cluster


def read(loader: DataLoader[torch.Tensor]) -> list[int]:
    return [int(x) for batch in loader for x in batch]


def test_arrays_become_tensors() -> None:
    dataset = Dataset.from_tensor_slices({"x": np.arange(6, dtype=np.float32)}).batch(3)
    first, second = DataLoader(IterableDataset(dataset), batch_size=None)
    assert first["x"].dtype == torch.float32
    assert second["x"].tolist() == [3, 4, 5]


def test_tensor_writes_stay_private() -> None:
    loader = DataLoader(
        IterableDataset(Dataset.from_tensor_slices(np.ones((2, 3))).cache()), batch_size=None
    )
    for _ in range(2):
        for tensor in loader:
            assert tensor.tolist() == [1, 1, 1]
            tensor.zero_()


def test_loader_has_length_of_dataset() -> None:
    assert len(IterableDataset(Dataset.range(7))) == 7


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_processes_share_epoch(workers: int) -> None:
    loader = DataLoader(
        IterableDataset(Dataset.range(20).batch(2)), batch_size=None, num_workers=workers
    )
    for _ in range(2):
        assert sorted(read(loader)) == list(range(20))


@pytest.mark.parametrize(
    "stay", [False, True], ids=["new processes each epoch", "processes that stay"]
)
def test_loader_processes_share_shuffle(stay: bool) -> None:
    dataset = Dataset.range(200).shuffle(200)
    loader = DataLoader(
        IterableDataset(dataset), batch_size=None, num_workers=2, persistent_workers=stay
    )
    epochs = [[int(x) for x in loader] for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(200))] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(40).map(lambda x: x, num_parallel_calls=4, deterministic=False),
        Dataset.range(4).flat_map(lambda x: Dataset.range(10 * x, 10 * x + 10).shuffle(10)),
    ],
    ids=["map in any order", "shuffle in a function"],
)
def test_loader_processes_share_order(dataset: Dataset) -> None:
    loader = DataLoader(IterableDataset(dataset), batch_size=None, num_workers=2)
    assert sorted(int(x) for x in loader) == list(range(40))


def test_persistent_processes_read_each_epoch(cluster: TestCluster) -> None:
    dataset = cluster.distribute(Dataset.range(100), "distributed_epoch").batch(5)
    loader = DataLoader(
        IterableDataset(dataset),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )
    for _ in range(2):
        assert sorted(read(loader)) == list(range(100))


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_processes_share_job(cluster: TestCluster, workers: int) -> None:
    dataset = cluster.distribute(Dataset.range(100), "distributed_epoch").batch(5)
    loader = DataLoader(
        IterableDataset(dataset),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
    )
    for _ in range(2):
        assert sorted(read(loader)) == list(range(100))

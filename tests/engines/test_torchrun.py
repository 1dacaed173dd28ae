"""Trainings of PyTorch in processes of a cluster, with torchrun's variables. Needs the package torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import zmqdist as zd

torch = pytest.importorskip("torch", reason="needs pip install torch")
from zmqdist.integrations import torchrun  # noqa: E402
from zmqdist.integrations.torch import IterableDataset  # noqa: E402

# a group of actors outlives its test by its grace
pytestmark = [pytest.mark.shares_cluster, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=2) as cluster:
        yield cluster


def train(dataset: Any = None) -> tuple[list[float], list[int], dict[str, str]]:
    """Train on two epochs. Return the weights at the end and the elements that were read."""
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    elements = []
    # the numbers of elements of the ranks differ
    with model.join():
        for _ in range(2):
            for numbers in DataLoader(IterableDataset(dataset), batch_size=None):
                elements += numbers.tolist()
                optimizer.zero_grad()
                model(numbers[:, None].float()).sum().backward()
                optimizer.step()
    variables = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    weights = [float(weight) for weight in model.module.parameters()]
    dist.destroy_process_group()
    return weights, elements, variables


def test_processes_train_one_model(cluster: zd.local_cluster) -> None:
    numbers = zd.data.Dataset.range(40).batch(4)
    remote = zd.data.service.distribute("distributed_epoch", cluster, job_name="training")
    first, second = torchrun.run(train, numbers.apply(remote), processes=2, target=cluster)
    assert first[0] == second[0]
    assert sorted(first[1] + second[1]) == sorted([*range(40)] * 2)
    assert [variables for _, _, variables in (first, second)] == [
        {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"} for rank in "01"
    ]


def fails(rank: int, how: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(1000):
        if step == 3 and dist.get_rank() == rank:
            if how == "dies":
                os._exit(7)
            raise ValueError("bad batch")
        dist.all_reduce(torch.ones(10))


@pytest.mark.parametrize("rank", [0, 1])
def test_death_of_rank_ends_training(cluster: zd.local_cluster, rank: int) -> None:
    with pytest.raises(zd.errors.ActorLostError, match="exit code 7"):
        torchrun.run(fails, rank, "dies", processes=2, target=cluster)


@pytest.mark.parametrize("rank", [0, 1])
def test_error_of_rank_ends_training(cluster: zd.local_cluster, rank: int) -> None:
    with pytest.raises(ValueError, match="bad batch"):
        torchrun.run(fails, rank, "raises", processes=2, target=cluster)


def test_impossible_resources_fail_at_once(cluster: zd.local_cluster) -> None:
    with pytest.raises(zd.errors.ActorLostError, match="gpu 1, which is more than a worker has"):
        torchrun.run(fails, 0, "raises", processes=2, target=cluster, resources={"gpu": 1})


class Trainer:
    def sum(self) -> tuple[float, bool]:
        import torch.distributed as dist

        with torchrun.rendezvous():
            dist.init_process_group("gloo")
            ones = torch.ones(1)
            dist.all_reduce(ones)
            dist.destroy_process_group()
        return float(ones), "RANK" in os.environ


def test_group_of_actors_meets_again(cluster: zd.local_cluster) -> None:
    with cluster.coordinator() as coordinator:
        team = coordinator.actors(Trainer, 2)
        for _ in range(2):
            assert team.sum().result(200) == [(2.0, False)] * 2


def test_task_alone_is_rank_zero() -> None:
    with zd.Server.create_local_server() as task, torchrun.rendezvous(task) as variables:
        assert (variables["RANK"], variables["WORLD_SIZE"]) == ("0", "1")
        assert os.environ["MASTER_PORT"] == variables["MASTER_PORT"]
    assert "MASTER_PORT" not in os.environ


def test_loaders_with_one_generator_share_epoch(cluster: zd.local_cluster) -> None:
    from torch.utils.data import DataLoader

    remote = zd.data.service.distribute("distributed_epoch", cluster, job_name="loaders")
    dataset = IterableDataset(zd.data.Dataset.range(100).batch(5).apply(remote))
    first, second = (
        DataLoader(
            dataset,
            batch_size=None,
            num_workers=1,
            multiprocessing_context="spawn",
            generator=torch.Generator().manual_seed(7),
            persistent_workers=True,
            pin_memory=torch.cuda.is_available(),
        )
        for _ in range(2)
    )
    for _ in range(2):
        one, other = iter(first), iter(second)
        numbers = [int(number) for loader in (one, other) for batch in loader for number in batch]
        assert sorted(numbers) == list(range(100))

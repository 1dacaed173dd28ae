"""State of an iterator over a service: who goes on from it, in another process or at another
dispatcher, gets the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.service.helpers import TestCluster
from zmqdist.data import Dataset
from zmqdist.data.service.policy import ShardingPolicy
from zmqdist.errors import (
    AbortedError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnimplementedError,
)

ROOT = Path(__file__).resolve().parents[3]
ONCE = {"processing_mode": ShardingPolicy.DYNAMIC, "delivery": "exactly_once"}
ORDERED = {"processing_mode": ShardingPolicy.DYNAMIC, "ordered": True}
COUNT = 20_000


@pytest.fixture
def cluster() -> Iterator[TestCluster]:
    with TestCluster(2, fault_tolerant_mode=False) as cluster:
        yield cluster


def take(iterator: Iterator[Any], count: int) -> list[int]:
    return [int(next(iterator)) for _ in range(count)]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("ended", [False, True], ids=["in the middle", "after its end"])
@pytest.mark.parametrize("after", [0, 1, 3000, COUNT])
def test_iterator_continues_from_state_of_another(
    cluster: TestCluster, after: int, ended: bool
) -> None:
    dataset = cluster.distribute(Dataset.range(COUNT), **ONCE)
    first = iter(dataset)
    read = take(first, after)
    state = through_json(first.state_dict())
    lost = list(first) if ended else take(first, min(2000, COUNT - after))
    second = iter(dataset)
    second.load_state_dict(state)
    rest = [int(x) for x in second]
    assert sorted(read + rest) == list(range(COUNT))
    assert len(lost) <= len(rest)
    first.close()


def test_ordered_read_continues_from_state(cluster: TestCluster) -> None:
    dataset = cluster.distribute(Dataset.range(COUNT), **ORDERED)
    first = iter(dataset)
    take(first, 1234)
    state = through_json(first.state_dict())
    assert len(json.dumps(state)) < 600
    take(first, 4000)
    second = iter(dataset)
    second.load_state_dict(state)
    assert [int(x) for x in second] == list(range(1234, COUNT))
    first.close()


def test_state_can_be_loaded_twice(cluster: TestCluster) -> None:
    dataset = cluster.distribute(Dataset.range(COUNT), **ORDERED)
    first = iter(dataset)
    take(first, 100)
    state = first.state_dict()
    for _ in range(2):
        again = iter(dataset)
        again.load_state_dict(state)
        assert take(again, 1000) == list(range(100, 1100))
        again.close()
    first.close()


def test_earlier_reader_is_aborted(cluster: TestCluster) -> None:
    dataset = cluster.distribute(Dataset.range(COUNT), **ONCE)
    first = iter(dataset)
    take(first, 100)
    second = iter(dataset)
    second.load_state_dict(first.state_dict())
    take(second, 1)
    with pytest.raises(AbortedError, match="Another reader has taken over"):
        for _ in first:
            pass
    second.close()
    first.close()


@pytest.mark.parametrize(
    "put_behind",
    [
        lambda dataset: dataset.batch(7),
        lambda dataset: dataset.shuffle(50, seed=3),
        lambda dataset: dataset.map(lambda x: x, num_parallel_calls=3).prefetch(5),
        lambda dataset: dataset.take(10_000),
    ],
    ids=["batch", "shuffle", "parallel map and prefetch", "take"],
)
def test_operators_behind_distribute_keep_state(cluster: TestCluster, put_behind: Any) -> None:
    dataset = put_behind(cluster.distribute(Dataset.range(COUNT), **ORDERED))
    first = iter(dataset)
    for _ in range(500):
        next(first)
    state = through_json(first.state_dict())
    rest = [x.tolist() for x in first]
    second = iter(dataset)
    second.load_state_dict(state)
    assert [x.tolist() for x in second] == rest


@pytest.mark.parametrize("read_on", [0, 150, 350], ids=["", "to the next pass", "to the end"])
@pytest.mark.parametrize("at", [0, 199, 200, 201, 250, 599, 600])
@pytest.mark.parametrize("terms", [ONCE, ORDERED], ids=["exactly once", "ordered"])
@pytest.mark.parametrize("name", ["job", None])
def test_repeat_continues_after_pass_of_state(
    cluster: TestCluster, terms: dict[str, Any], name: str | None, at: int, read_on: int
) -> None:
    def passes() -> Dataset:
        return cluster.distribute(Dataset.range(200), job_name=name, **terms).repeat(3)

    with iter(passes()) as first:
        begun = take(first, at)
        state = through_json(first.state_dict())
        take(first, min(read_on, 600 - at))
    with iter(passes()) as second:
        second.load_state_dict(state)
        read = begun + [int(x) for x in second]
    assert sorted(read) == sorted(3 * list(range(200)))
    assert "ordered" not in terms or read == 3 * list(range(200))


@pytest.mark.parametrize(
    "at", [0, 70, 100, None], ids=["before", "within", "behind the last element", "behind the end"]
)
def test_loop_of_epochs_continues_in_next_process(cluster: TestCluster, at: int | None) -> None:
    def epochs() -> Dataset:
        return cluster.distribute(Dataset.range(100), job_name="loop", **ORDERED)

    before = epochs()
    assert take(iter(before), 100) == list(range(100))
    with iter(before) as iterator:
        begun = list(iterator) if at is None else take(iterator, at)
        state = through_json(iterator.state_dict())
        assert len(list(iterator)) == 100 - len(begun)
    with iter(before) as iterator:  # the next epoch begins, and then the program is killed
        take(iterator, 30)
    after = epochs()
    iterator = iter(after)
    iterator.load_state_dict(state)
    assert [int(x) for x in [*begun, *iterator]] == list(range(100))
    for _ in range(2):
        assert [int(x) for x in after] == list(range(100))


def of_functions(distributed: Dataset) -> list[Dataset]:
    """Pipelines of two passes over a dataset that their functions capture."""
    return [
        Dataset.range(2).flat_map(lambda _: distributed),
        Dataset.range(2).flat_map(lambda _: Dataset.range(1).flat_map(lambda _: distributed)),
        Dataset.range(2).interleave(lambda _: distributed, cycle_length=2, num_parallel_calls=2),
        Dataset.range(1).flat_map(lambda _: distributed.repeat(2)),
    ]


@pytest.mark.parametrize("read_on", [0, 20, 80])
@pytest.mark.parametrize("at", [0, 10, 40, 41, 80])
@pytest.mark.parametrize("terms", [ONCE, ORDERED], ids=["exactly once", "ordered"])
def test_passes_that_functions_read_go_on_without_a_job_name(
    cluster: TestCluster, terms: dict[str, Any], at: int, read_on: int
) -> None:
    distributed = cluster.distribute(Dataset.range(40), **terms)
    for one, other in zip(of_functions(distributed), of_functions(distributed), strict=True):
        with iter(one) as first:
            read = take(first, at)
            state = through_json(first.state_dict())
            take(first, min(read_on, 80 - at))
        with iter(other) as second:
            second.load_state_dict(state)
            assert sorted(read + [int(x) for x in second]) == sorted(2 * list(range(40)))


@pytest.mark.parametrize(
    "terms", [ONCE, ORDERED, {}], ids=["exactly once", "ordered", "at most once"]
)
def test_passes_of_a_job_that_functions_read_have_no_state(
    cluster: TestCluster, terms: dict[str, Any]
) -> None:
    distributed = cluster.distribute(Dataset.range(40), job_name="captured", **terms)
    for dataset in of_functions(distributed):
        with iter(dataset) as first:
            before = first.state_dict()
            for _ in range(2):
                next(first)
                with pytest.raises(
                    UnimplementedError, match=r"the job 'captured' .* leave out job_name"
                ):
                    first.state_dict()
            list(first)
            with pytest.raises(UnimplementedError, match="the job 'captured'"):
                first.state_dict()
        with iter(dataset) as second:
            second.load_state_dict(before)
            with pytest.raises(UnimplementedError, match="the job 'captured'"):
                next(second)


def test_state_gives_no_elements_of_others(cluster: TestCluster) -> None:
    def reader() -> Dataset:
        return cluster.distribute(Dataset.range(COUNT), job_name="two", **ONCE).repeat(2)

    with iter(reader()) as one, iter(reader()) as two:
        begun = take(one, 300)
        state = through_json(one.state_dict())
        first = take(two, 100)
    with iter(reader()) as resumed:
        resumed.load_state_dict(state)
        rest = [int(x) for x in resumed]
    assert sorted(begun + first + rest) == sorted(2 * list(range(COUNT)))


@pytest.mark.parametrize("passes", [1, 2])
def test_shuffles_agree_on_all_workers(cluster: TestCluster, passes: int) -> None:
    def shuffled(x: Any) -> Dataset:
        return Dataset.range(4 * x, 4 * x + 4).shuffle(4)

    with TestCluster(1, fault_tolerant_mode=False) as other:
        whole, again = (
            each.distribute(Dataset.range(3000).flat_map(shuffled), **ORDERED).repeat(passes)
            for each in (cluster, other)
        )
        first = iter(whole)
        read = take(first, 12_000 * (passes - 1) + 1001)
        state = through_json(first.state_dict())
        rest = [int(x) for x in first]
        second = iter(again)
        second.load_state_dict(state)
        assert [int(x) for x in second] == rest
        assert sorted(read + rest) == sorted(passes * list(range(12_000)))
        assert passes == 1 or read[:1000] != read[12_000:13_000]


def test_error_behind_distribute_costs_one_element(cluster: TestCluster) -> None:
    def checked(x: Any) -> Any:
        if x == 5:
            raise ValueError
        return x

    iterator = iter(cluster.distribute(Dataset.range(1000), **ORDERED).map(checked))
    assert take(iterator, 5) == list(range(5))
    with pytest.raises(ValueError):
        next(iterator)
    assert [int(x) for x in iterator] == list(range(6, 1000))


_TRAIN = """
import json, sys
from zmqdist.data import Dataset
from zmqdist.data.service.client import distribute
dataset = Dataset.range(int(sys.argv[2])).apply(distribute("distributed_epoch", sys.argv[1], delivery="exactly_once"))
iterator = iter(dataset)
read = []
for element in iterator:
    read.append(int(element))
    if len(read) == 3000:
        print(json.dumps([read, iterator.state_dict()]), flush=True)
    if len(read) == 9000:
        print("on", flush=True)
        sys.stdin.read()
"""


def test_killed_trainer_continues_from_checkpoint(cluster: TestCluster) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", _TRAIN, cluster.target, str(COUNT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert trainer.stdout is not None
    read, state = json.loads(trainer.stdout.readline())
    assert trainer.stdout.readline() == "on\n"
    trainer.kill()
    trainer.communicate()
    iterator = iter(cluster.distribute(Dataset.range(COUNT), **ONCE))
    iterator.load_state_dict(state)
    assert sorted(read + [int(x) for x in iterator]) == list(range(COUNT))


def test_state_continues_at_another_dispatcher(cluster: TestCluster) -> None:
    with TestCluster(2, fault_tolerant_mode=False) as lost:
        first = iter(lost.distribute(Dataset.range(COUNT), **ONCE))
        read = take(first, 5000)
        state = through_json(first.state_dict())
        first.close()
    second = iter(cluster.distribute(Dataset.range(COUNT), **ONCE))
    second.load_state_dict(state)
    read += take(second, 5000)
    third = iter(cluster.distribute(Dataset.range(COUNT), **ONCE))
    third.load_state_dict(through_json(second.state_dict()))
    assert sorted(read + [int(x) for x in third]) == list(range(COUNT))
    second.close()


@pytest.mark.parametrize("options", [ONCE, ORDERED])
def test_state_can_be_loaded_twice_at_another_dispatcher(
    cluster: TestCluster, options: dict[str, Any]
) -> None:
    with (
        TestCluster(1, fault_tolerant_mode=False) as lost,
        iter(lost.distribute(Dataset.range(200), **options)) as first,
    ):
        read = take(first, 15)
        state = through_json(first.state_dict())
    for number in (50, 185):  # the program ends after 50 elements, without another state
        dataset = cluster.distribute(Dataset.range(200), job_name=f"twice {options}", **options)
        with iter(dataset) as iterator:
            iterator.load_state_dict(state)
            rest = take(iterator, number)
    assert sorted(read + rest) == list(range(200))


def test_consumers_go_on_each_from_its_own_state(cluster: TestCluster) -> None:
    def streams(job_name: str) -> list[Any]:
        told = {"job_name": job_name, "num_consumers": 2}
        return [
            iter(cluster.distribute(Dataset.range(COUNT), **ORDERED, **told, consumer_index=n))
            for n in range(2)
        ]

    first = streams("job")
    read = [take(each, 500) for each in first]
    states = [through_json(each.state_dict()) for each in first]
    for each in first:
        take(each, 500)
    second = streams("job")
    for consumer in (1, 0):
        second[consumer].load_state_dict(states[consumer])
        read[consumer] += [int(x) for x in second[consumer]]
    assert sorted(read[0] + read[1]) == list(range(COUNT))
    assert [sorted(each) for each in read] == read
    for each in first:
        each.close()


def test_state_of_another_dataset_is_refused(cluster: TestCluster) -> None:
    first = iter(cluster.distribute(Dataset.range(100), **ONCE))
    take(first, 5)
    for other in (Dataset.range(100).map(lambda x: x), Dataset.range(101)):
        second = iter(cluster.distribute(other, **ONCE))
        second.load_state_dict(first.state_dict())
        with pytest.raises(FailedPreconditionError, match="the state is of"):
            next(second)
        second.close()
    first.close()


def test_invalid_state_is_refused_at_load(cluster: TestCluster) -> None:
    iterator = iter(cluster.distribute(Dataset.range(100), **ONCE))
    state = iterator.state_dict()
    state["tree"]["own"]["reader"] = {"version": 1, "done": 5}
    with pytest.raises(InvalidArgumentError, match="not the state of a reader"):
        iterator.load_state_dict(state)
    iterator.close()


def test_reading_at_most_once_has_no_state(cluster: TestCluster) -> None:
    iterator = iter(cluster.distribute(Dataset.range(100)))
    with pytest.raises(UnimplementedError, match="exactly_once"):
        iterator.state_dict()
    iterator.close()

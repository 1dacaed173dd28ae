"""States of iterators with random operators: all later passes, too, are those of the iterator that
was saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from zmqdist import random as seed
from zmqdist.data import Dataset
from zmqdist.errors import InvalidArgumentError

SHUFFLED = Dataset.range(5).shuffle(5)
SEEDED = Dataset.range(5).shuffle(5, seed=9)

PIPELINES: dict[str, Callable[[], Dataset]] = {
    "shuffle": lambda: Dataset.range(8).shuffle(8, seed=5).repeat(4),
    "shuffle without a seed": lambda: Dataset.range(8).shuffle(8).repeat(4),
    "one order": lambda: Dataset.range(8).shuffle(8, reshuffle_each_iteration=False).repeat(3),
    "small buffer, batch": lambda: Dataset.range(9).shuffle(3, seed=5).batch(2).repeat(3),
    "nested repeat": lambda: Dataset.range(4).shuffle(4, seed=1).repeat(2).shuffle(3).repeat(3),
    "concatenate": lambda: SEEDED.concatenate(Dataset.range(4).shuffle(4, seed=5)).repeat(3),
    "two random sources": lambda: (
        Dataset.zip(SEEDED, Dataset.range(5).shuffle(5)).repeat(3).map(lambda x, y: 9 * x + y)
    ),
    "one dataset twice": lambda: Dataset.zip(SEEDED.repeat(3), SEEDED.repeat(2)).map(
        lambda x, y: 9 * x + y
    ),
    "cache": lambda: Dataset.range(8).shuffle(8).cache().repeat(3),
    "shuffle after cache": lambda: Dataset.range(8).shuffle(8).cache().shuffle(4).repeat(3),
    "random": lambda: Dataset.random(seed=3, rerandomize_each_iteration=True).take(5).repeat(3),
    "random without a seed": lambda: Dataset.random().take(5).repeat(3),
    "sample": lambda: Dataset.sample_from_datasets(
        [Dataset.range(4), Dataset.range(10, 14)], seed=2, rerandomize_each_iteration=True
    ).repeat(3),
    "sample without a seed": lambda: Dataset.sample_from_datasets([SEEDED, SHUFFLED]).repeat(3),
    "resample": lambda: (
        Dataset.range(9)
        .rejection_resample(lambda x: x % 2, [0.2, 0.8], seed=3)
        .map(lambda _, x: x)
        .repeat(3)
    ),
    "flat_map": lambda: Dataset.range(3).flat_map(lambda x: Dataset.range(4).shuffle(4)).repeat(2),
    "flat_map of one dataset": lambda: (
        Dataset.range(3).flat_map(lambda x: SHUFFLED if x % 2 else SEEDED).repeat(2)
    ),
    "repeat in flat_map": lambda: Dataset.range(2).flat_map(
        lambda x: Dataset.range(4).shuffle(4, seed=1).repeat(3)
    ),
    "nested flat_map": lambda: (
        Dataset.range(2).flat_map(lambda x: Dataset.range(2).flat_map(lambda y: SHUFFLED)).repeat(2)
    ),
    "interleave": lambda: (
        Dataset.range(4).interleave(lambda x: Dataset.range(x).shuffle(3), cycle_length=2).repeat(3)
    ),
    "parallel interleave": lambda: (
        Dataset.range(4)
        .interleave(lambda x: SHUFFLED.take(x), cycle_length=2, num_parallel_calls=2)
        .repeat(2)
    ),
    "group_by_window": lambda: (
        Dataset.range(12)
        .group_by_window(lambda x: x % 2, lambda key, window: window.shuffle(3), window_size=3)
        .repeat(2)
    ),
    "shuffle of windows": lambda: (
        Dataset.range(9).window(3).map(lambda w: w.shuffle(3)).flat_map(lambda w: w).repeat(2)
    ),
    "prefetch": lambda: Dataset.range(8).shuffle(8).prefetch(3).repeat(3).prefetch(2),
    "parallel map": lambda: (
        Dataset.range(8).shuffle(8).map(lambda x: x + 1, num_parallel_calls=2).repeat(3)
    ),
}


def numbers(elements: Iterator[Any]) -> list[Any]:
    return [x.tolist() for x in elements]


def resumed(dataset: Dataset, state: Any) -> list[Any]:
    iterator = iter(dataset)
    iterator.load_state_dict(json.loads(json.dumps(state)))
    return numbers(iterator)


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES.keys())
def test_passes_after_load_equal_saved_iterator(
    make: Callable[[], Dataset],
) -> None:
    count = len(numbers(iter(make())))
    for stop in range(count + 1):
        dataset = make()
        first = iter(dataset)
        for _ in range(stop):
            next(first)
        state = first.state_dict()
        early = resumed(dataset, state)
        rest = numbers(first)
        assert early == rest, f"the same dataset object, before the rest, at {stop}"
        assert resumed(dataset, state) == rest, (
            f"the same dataset object, after the rest, at {stop}"
        )
        assert resumed(make(), state) == rest, f"another dataset object, at {stop}"


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES.keys())
def test_resumed_iterator_has_state(make: Callable[[], Dataset]) -> None:
    first = iter(make())
    next(first)
    state: Any = first.state_dict()
    rest = numbers(first)
    read = []
    while len(read) < len(rest):
        iterator = iter(make())
        iterator.load_state_dict(state)
        read.append(next(iterator).tolist())
        state = json.loads(json.dumps(iterator.state_dict()))
        iterator.close()
    assert read == rest
    assert resumed(make(), state) == []


def test_iterators_of_one_state_are_independent() -> None:
    dataset = Dataset.range(6).shuffle(6, seed=4).repeat(3)
    first = iter(dataset)
    for _ in range(8):
        next(first)
    one, two = iter(dataset), iter(dataset)
    one.load_state_dict(first.state_dict())
    two.load_state_dict(first.state_dict())
    pairs = list(zip(one, two, strict=True))
    assert [one for one, _ in pairs] == [two for _, two in pairs] == list(first)


@pytest.mark.parametrize("stop", [0, 1, 7, 8, 9])
@pytest.mark.parametrize("seed", [5, None])
def test_epoch_loop_continues_after_state(stop: int, seed: int | None) -> None:
    def make() -> Dataset:
        return Dataset.range(8).shuffle(8, seed=seed)

    before = make()
    first = list(before)
    iterator = iter(before)
    part = list(islice(iterator, stop))  # with 9, the iterator has ended
    state = iterator.state_dict()
    rest = list(iterator)
    later = make()
    iterator = iter(later)
    iterator.load_state_dict(state)
    assert list(iterator) == rest
    epochs = [first, part + rest, list(later), list(later)]
    assert len(set(map(tuple, epochs))) == 4
    if seed is not None:
        again = make()
        assert epochs == [list(again) for _ in range(4)]
    # Load the state where it was saved, too.
    list(before)
    iterator = iter(before)
    iterator.load_state_dict(state)
    assert list(iterator) == rest
    assert seed is None or list(before) == epochs[2]


def test_fixed_order_outlives_process() -> None:
    def make() -> Dataset:
        return Dataset.range(8).shuffle(8, reshuffle_each_iteration=False)

    before = make()
    order = list(before)
    later = make()
    iterator = iter(later)
    iterator.load_state_dict(iter(before).state_dict())
    assert list(iterator) == list(later) == order


def test_cache_record_outlives_process() -> None:
    def make() -> Dataset:
        return Dataset.range(8).shuffle(8).cache()

    before = make()
    order = list(before)
    iterator = iter(before)
    next(iterator)
    later = make()
    again = iter(later)
    again.load_state_dict(iterator.state_dict())
    assert list(again) == order[1:]
    assert list(later) == order


def test_inner_dataset_order_follows_argument() -> None:
    shared = Dataset.range(6).shuffle(6, seed=1)
    order = list(Dataset.range(1).flat_map(lambda _: shared))
    assert list(Dataset.range(3).flat_map(lambda _: shared)) == 3 * order
    assert (
        list(Dataset.range(3).flat_map(lambda _: Dataset.range(6).shuffle(6, seed=1))) == 3 * order
    )


def test_unseeded_inner_datasets_have_own_orders() -> None:
    orders = list(
        Dataset.range(20).flat_map(lambda _: Dataset.range(20).shuffle(20)).batch(20).repeat(2)
    )
    assert len({tuple(order) for order in orders}) == 40


@pytest.fixture
def _no_global_seed_remains() -> Iterator[None]:
    yield
    seed.set_seed(None)


@pytest.mark.usefixtures("_no_global_seed_remains")
@pytest.mark.parametrize(
    "name",
    ["flat_map", "interleave", "parallel interleave", "group_by_window", "shuffle without a seed"],
)
def test_global_seed_repeats_resumed_runs(name: str) -> None:
    def run() -> Dataset:
        seed.set_seed(7)
        return PIPELINES[name]() if name != "parallel interleave" else parallel()

    def parallel() -> Dataset:
        return (
            Dataset.range(4)
            .interleave(lambda x: Dataset.range(9).shuffle(9), 2, num_parallel_calls=2)
            .repeat(2)
        )

    whole = numbers(iter(run()))
    assert len(set(map(str, (whole[at : at + 4] for at in range(0, len(whole), 4))))) > 1
    for stop in range(len(whole)):
        first = iter(run())
        begun = numbers(islice(first, stop))
        state = first.state_dict()
        assert begun + resumed(run(), state) == whole


def test_state_of_earlier_version_is_refused() -> None:
    iterator = iter(Dataset.range(3))
    with pytest.raises(
        InvalidArgumentError,
        match="the state has version 1, but this zmqdist reads 2: load it with the version",
    ):
        iterator.load_state_dict({**iterator.state_dict(), "version": 1})

"""Operators that join elements by their places, in processes that divide the positions: what
belongs together stays together."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.data.helpers import plain, read
from zmqdist.data import INFINITE_CARDINALITY, Dataset
from zmqdist.data.dataset import deserialize
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.splits import open_split, open_stream, portion_rules, split_providers
from zmqdist.errors import UnavailableError

TEN = Dataset.range(10)
ENDLESS = INFINITE_CARDINALITY


def even(dataset: Dataset) -> Dataset:
    return dataset.filter(lambda x: x % 2 == 0)


def choices(*numbers: int) -> Dataset:
    return Dataset.from_tensor_slices(np.array(numbers, np.int64))


@pytest.mark.parametrize(
    ("dataset", "counts"),
    [
        (Dataset.zip(TEN, Dataset.counter()), [10]),
        (Dataset.zip(TEN.map(abs).prefetch(2), Dataset.zip(TEN, TEN.enumerate())), [10]),
        (Dataset.zip(TEN, TEN).repeat(3), [30]),
        (Dataset.zip(TEN, TEN).repeat(), [ENDLESS]),
        (Dataset.zip(TEN, TEN).concatenate(TEN.enumerate()), [10, 10]),
        (Dataset.zip(TEN.batch(4), TEN), [ENDLESS]),
        (Dataset.zip(TEN.repeat(2), TEN.concatenate(TEN)), [ENDLESS]),
        (Dataset.zip(even(TEN), TEN), [ENDLESS]),
        (Dataset.zip((TEN,)), [10]),
        (TEN.enumerate(), [10]),
        (even(TEN).enumerate(), [ENDLESS]),
        (TEN.batch(4).enumerate(), [ENDLESS]),
        (Dataset.choose_from_datasets([TEN, TEN], choices(1, 0)), [ENDLESS]),
        (Dataset.sample_from_datasets([TEN, TEN], stop_on_empty_dataset=True), [ENDLESS]),
        (Dataset.sample_from_datasets([TEN, TEN]), [10, 10]),
        (
            Dataset.choose_from_datasets(
                [TEN, TEN], choices(1, 0).repeat(), stop_on_empty_dataset=False
            ),
            [10, 10],
        ),
        (Dataset.choose_from_datasets([TEN.repeat()] * 2, choices(1, 0)), [ENDLESS, ENDLESS]),
    ],
)
def test_inputs_in_step_count_as_one_source(dataset: Dataset, counts: list[int]) -> None:
    assert [each.cardinality() for each in split_providers(dataset)] == counts


def divided(dataset: Dataset, workers: int, draw: random.Random) -> list[Any]:
    """What several workers read together. They take turns at random, and one that has errors goes
    on."""
    providers = split_providers(dataset)
    text = dataset.serialize()  # each worker has a copy of its own, as in the service
    iterators = [
        open_split(deserialize(text), lambda source, repetition: providers[source].next(repetition))
        for _ in range(workers)
    ]
    found: list[Any] = []
    while iterators:
        iterator = draw.choice(iterators)
        elements = read(iterator, draw.randint(1, 3))
        found += elements
        if not elements:
            iterators.remove(iterator)
    return found


def drawn(draw: random.Random, depth: int = 3) -> Dataset:
    """A pipeline without operators that look at several elements of one worker (take, batch), and
    with elements (x, x + 1), ..."""
    if depth == 0:
        length = draw.randint(0, 9)
        return draw.choice(
            [Dataset.range(length), Dataset.from_tensor_slices(np.arange(length) * 3)]
        )
    below = partial(drawn, draw, depth - 1)
    kind = draw.choice(
        ["zip", "zip", "enumerate", "choose", "sample", "concatenate", "repeat", "chain", "chain"]
    )
    if kind == "zip":
        return Dataset.zip(*(inside(draw, below()) for _ in range(draw.randint(2, 3)))).map(total)
    if kind == "enumerate":
        return inside(draw, below()).enumerate(draw.randint(0, 2)).map(total)
    if kind == "choose":
        order = choices(*(draw.randint(0, 1) for _ in range(draw.randint(0, 12))))
        return Dataset.choose_from_datasets(
            [below(), inside(draw, below())], order, draw.random() < 0.5
        )
    if kind == "sample":
        return Dataset.sample_from_datasets(
            [below(), below()], seed=3, stop_on_empty_dataset=draw.random() < 0.5
        )
    if kind == "concatenate":
        return below().concatenate(below())
    return below().repeat(draw.randint(1, 3)) if kind == "repeat" else chained(draw, below())


def chained(draw: random.Random, dataset: Dataset) -> Dataset:
    return draw.choice(
        [
            lambda: dataset.map(lambda x: 100 // int(x - 2)),  # raises for x = 2
            lambda: dataset.map(lambda x: x + 1, num_parallel_calls=2, deterministic=True),
            lambda: dataset.filter(lambda x: x % 3 != 1),
            lambda: dataset.flat_map(lambda x: Dataset.range(x % 3)),
            lambda: dataset.interleave(
                lambda x: Dataset.zip(Dataset.range(x % 3), Dataset.counter(x)).map(total), 2
            ),
            lambda: dataset.prefetch(3),
            lambda: dataset.shuffle(4, seed=1),
        ]
    )()


def inside(draw: random.Random, dataset: Dataset) -> Dataset:
    """Below an operator that reads in step, every operator may stand."""
    more: list[Callable[[], Dataset]] = [
        lambda: dataset,
        lambda: dataset.take(4),
        lambda: dataset.skip(1),
        lambda: dataset.batch(2).map(lambda x: x.sum()),
        lambda: dataset.cache(),
        lambda: chained(draw, dataset),
    ]
    return draw.choice(more)()


def total(*parts: Any) -> Any:
    return sum((10**number * int(part) for number, part in enumerate(parts)), start=np.int64(0))


def multiset(elements: list[Any]) -> Counter[str]:
    return Counter(map(repr, elements))


@pytest.mark.parametrize("part", range(3))
def test_workers_compute_what_one_iterator_computes(part: int) -> None:
    for seed in range(part * 40, part * 40 + 40):
        draw = random.Random(seed)
        dataset = drawn(draw)
        alone = read(iter(deserialize(dataset.serialize())), 10_000)
        assert multiset(divided(dataset, draw.randint(1, 3), draw)) == multiset(alone), (
            f"seed {seed}"
        )


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.zip(TEN.shuffle(10), TEN.repeat()),
        Dataset.zip(Dataset.random(), TEN),
        Dataset.zip(TEN.map(lambda x: x, num_parallel_calls=4, deterministic=False), TEN),
        Dataset.zip(
            TEN.shuffle(3).map(lambda x: x, num_parallel_calls=4, deterministic=False), TEN
        ),
        TEN.shuffle(10).enumerate(),
    ],
)
def test_unseeded_workers_compute_same_order(dataset: Dataset) -> None:
    """Each side has each of its elements once, whichever worker yields it."""
    rows = divided(dataset, 3, random.Random(1))
    assert [len(set(side)) for side in zip(*rows, strict=True)] == [10, 10]
    assert len(rows) == 10


def test_unseeded_shuffles_differ() -> None:
    many = Dataset.range(100)
    rows = divided(Dataset.zip(many.shuffle(100), many.shuffle(100)), 2, random.Random(1))
    assert sum(x == y for x, y in rows) < 20


@pytest.mark.parametrize("side", [TEN, even(Dataset.range(20))], ids=["aligned", "counted"])
def test_returned_position_is_computed_again(side: Dataset) -> None:
    places = iter([3, 4, 7, 0, 1, 8, None])
    pairs = open_split(
        Dataset.zip(side.shuffle(1, seed=1), TEN), lambda source, repetition: next(places)
    )
    rows = [int(y) for _, y in pairs]
    assert rows == [3, 4, 7, 0, 1, 8]


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.zip(TEN.prefetch(2), TEN.map(abs, num_parallel_calls=2)),
        Dataset.zip(even(Dataset.range(20)).map(lambda x: x // 2), TEN),
        TEN.enumerate(),
    ],
    ids=["aligned", "counted", "enumerate"],
)
def test_position_server_may_be_away(dataset: Dataset) -> None:
    answers: list[Any] = [
        0,
        1,
        UnavailableError("away"),
        2,
        UnavailableError("away"),
        UnavailableError("away"),
        5,
        None,
    ]

    def ask(source: int, repetition: int) -> int | None:
        answer: int | Exception | None = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    rows = [row for row in read(open_split(dataset, ask), 100) if row != "an error"]
    assert [(x[1], y[1]) for x, y in rows] == [(place, place) for place in (0, 1, 2, 5)]


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.zip(TEN, TEN.map(abs)).repeat(2),
        Dataset.zip(even(Dataset.range(20)), TEN.shuffle(4)).repeat(2),
        TEN.enumerate().repeat(2),
        TEN.skip(1).enumerate().repeat(2),
    ],
)
def test_snapshot_stream_continues_anywhere(dataset: Dataset) -> None:
    def positions(source: int, repetition: int, taken: int) -> list[int]:
        return [place for place in range(10) if place % 3 != 2][taken : taken + 2]

    def opened() -> DatasetIterator:
        return open_stream(deserialize(dataset.serialize()), positions)

    whole = [plain(x) for x in opened()]
    for stop in range(len(whole)):
        first = opened()
        for _ in range(stop):
            next(first)
        second = opened()
        second.load_state_dict(first.state_dict())
        assert [plain(x) for x in second] == whole[stop:]


def test_portions_of_aligned_sources_are_rows() -> None:
    rows = Dataset.zip(Dataset.range(12), Dataset.range(5, 25).enumerate()).batch(2).repeat(3)
    assert portion_rules(rows) == (12, 3, 2)
    assert portion_rules(TEN.map(abs).enumerate()) == (10, 1, 1)


def test_failed_element_has_number_too() -> None:
    numbered = TEN.map(lambda x: 6 // int(2 - x)).enumerate()
    assert [int(x[0][1]) for x in read(iter(numbered), 4) if x != "an error"] == [0, 1, 3]

"""Dealing out: providers at one end, iterators that ask at the other."""

from __future__ import annotations

import pytest

from zmqdist.data import INFINITE_CARDINALITY, Dataset
from zmqdist.data.splits import SplitProvider, open_split, split_providers
from zmqdist.data.tree import deserialize
from zmqdist.errors import UnimplementedError


def counts(dataset: Dataset) -> list[int]:
    return [each.cardinality() for each in split_providers(dataset)]


@pytest.mark.parametrize(
    ("dataset", "wanted"),
    [
        (Dataset.range(9), [9]),
        (Dataset.range(9).repeat(9), [81]),
        (Dataset.range(9).repeat(3).repeat(2), [54]),
        (Dataset.range(9).repeat(0), [0]),
        (Dataset.range(9).repeat(-1), [INFINITE_CARDINALITY]),
        (Dataset.range(0).repeat(-1), [0]),
        (Dataset.from_tensors(1), [1]),
        (Dataset.from_tensor_slices([1, 2]).map(abs).batch(2).shuffle(3), [2]),
        (Dataset.random(), [INFINITE_CARDINALITY]),
        (Dataset.zip(Dataset.range(3), Dataset.range(5)), [3, 5]),
        (Dataset.range(3).concatenate(Dataset.range(5)), [3, 5]),
        (Dataset.choose_from_datasets([Dataset.range(5)] * 3, Dataset.range(3)), [5, 5, 5]),
        (Dataset.sample_from_datasets([Dataset.range(5)] * 3), [5, 5, 5]),
        (Dataset.range(3).flat_map(lambda x: Dataset.range(x)), [3]),
        (Dataset.range(3).enumerate(), [3]),
    ],
    ids=lambda value: value.op.told() if isinstance(value, Dataset) else None,
)
def test_each_source_has_a_provider(dataset: Dataset, wanted: list[int]) -> None:
    assert counts(dataset) == wanted


def test_providers_come_from_a_description_whose_functions_nobody_unpickles() -> None:
    text = Dataset.range(9).map(lambda x: x + 1).serialize()
    blob = text.split('"pickle":"')[1].split('"')[0]
    assert counts(deserialize(text.replace(blob, "AAAA"))) == [9]


def test_a_generator_cannot_be_dealt_out() -> None:
    with pytest.raises(UnimplementedError, match="Splitting is not implemented for from_generator"):
        split_providers(Dataset.from_generator(lambda: [1]).map(abs))


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(3, 30, 4).map(lambda x: x * 2),
        Dataset.from_tensor_slices([5, 1, 3]),
        Dataset.range(3).concatenate(Dataset.range(10, 15)),
        Dataset.range(4).flat_map(lambda x: Dataset.range(x)),
    ],
    ids=lambda dataset: str(dataset.op.name),
)
def test_two_that_share_the_splits_read_the_whole_once(dataset: Dataset) -> None:
    providers = split_providers(dataset)
    iterators = [open_split(dataset, lambda source, repetition: providers[source].next(repetition)) for _ in range(2)]
    found: list[int] = []
    ended = 0
    while ended < 2:
        ended = 0
        for iterator in iterators:
            x = next(iterator, None)
            if x is None:
                ended += 1
            else:
                found.append(int(x))
    assert sorted(found) == sorted(map(int, dataset))


def test_a_repeat_asks_for_the_next_repetition() -> None:
    asked: list[tuple[int, int]] = []
    dataset = Dataset.zip(Dataset.range(2), Dataset.range(2).repeat(2).map(lambda x: x)).repeat(2)
    providers = split_providers(dataset)

    def ask(source: int, repetition: int) -> int | None:
        asked.append((source, repetition))
        return providers[source].next(repetition)

    assert [tuple(map(int, row)) for row in open_split(dataset, ask)] == [(0, 0), (1, 1), (0, 0), (1, 1)]
    assert {repetition for source, repetition in asked if source == 0} == {0, 1}


def test_an_earlier_repetition_is_over_and_a_later_one_starts_over() -> None:
    provider = SplitProvider(2)
    assert [provider.next(0), provider.next(1), provider.next(0), provider.next(1), provider.next(1)] == [
        0,
        0,
        None,
        1,
        None,
    ]


def test_only_who_deals_knows_the_place() -> None:
    iterator = open_split(Dataset.range(7), lambda source, repetition: 3)
    assert next(iterator) == 3
    with pytest.raises(UnimplementedError, match="deals out the splits"):
        iterator.state_dict()

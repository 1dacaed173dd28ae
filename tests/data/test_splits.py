"""Dealing out: providers at one end, iterators that ask at the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqdist.data import INFINITE_CARDINALITY, Dataset
from zmqdist.data.dataset import deserialize
from zmqdist.data.interfaces import OPERATORS, make, operator
from zmqdist.data.iterators import OperatorNode
from zmqdist.data.ops.base import Op
from zmqdist.data.splits import SplitProvider, open_split, split_providers
from zmqdist.errors import UnavailableError, UnimplementedError


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
        (Dataset.range(9).repeat(-5), [INFINITE_CARDINALITY]),
        (Dataset.range(0).repeat(-1), [0]),
        (Dataset.from_tensors(1), [1]),
        (Dataset.from_tensor_slices([1, 2]).map(abs).batch(2).shuffle(3), [2]),
        (Dataset.random(), [INFINITE_CARDINALITY]),
        (Dataset.zip(Dataset.range(3), Dataset.range(5)), [3]),
        (Dataset.range(3).concatenate(Dataset.range(5)), [3, 5]),
        (
            Dataset.choose_from_datasets([Dataset.range(5)] * 3, Dataset.range(3)),
            [INFINITE_CARDINALITY],
        ),
        (Dataset.sample_from_datasets([Dataset.range(5)] * 3), [5, 5, 5]),
        (Dataset.range(3).flat_map(lambda x: Dataset.range(x)), [3]),
        (Dataset.range(3).enumerate(), [3]),
    ],
    ids=lambda value: value.op.one_line() if isinstance(value, Dataset) else None,
)
def test_source_has_split_provider(dataset: Dataset, wanted: list[int]) -> None:
    assert counts(dataset) == wanted


def test_split_providers_unpickle_nothing() -> None:
    text = Dataset.range(9).map(lambda x: x + 1).serialize()
    blob = text.split('"pickle":"')[1].split('"')[0]
    assert counts(deserialize(text.replace(blob, "AAAA"))) == [9]


def test_generator_has_no_splits() -> None:
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
def test_shared_splits_cover_dataset_once(dataset: Dataset) -> None:
    providers = split_providers(dataset)
    iterators = [
        open_split(dataset, lambda source, repetition: providers[source].next(repetition))
        for _ in range(2)
    ]
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


def test_ended_zip_takes_no_split_of_longer_input() -> None:
    dataset = Dataset.zip(Dataset.range(2), Dataset.range(3))
    (provider,) = split_providers(dataset)
    rows = open_split(dataset, lambda source, repetition: provider.next(repetition))
    assert [tuple(map(int, row)) for row in rows] == [(0, 0), (1, 1)]


def test_repeat_requests_next_repetition() -> None:
    requests: list[tuple[int, int]] = []
    dataset = Dataset.zip(Dataset.range(2), Dataset.range(2).map(lambda x: x)).repeat(2)
    providers = split_providers(dataset)

    def ask(source: int, repetition: int) -> int | None:
        requests.append((source, repetition))
        return providers[source].next(repetition)

    assert [tuple(map(int, row)) for row in open_split(dataset, ask)] == [
        (0, 0),
        (1, 1),
        (0, 0),
        (1, 1),
    ]
    assert {repetition for source, repetition in requests if source == 0} == {0, 1}


def test_later_repetition_starts_over() -> None:
    provider = SplitProvider(2)
    assert [
        provider.next(0),
        provider.next(1),
        provider.next(0),
        provider.next(1),
        provider.next(1),
    ] == [
        0,
        0,
        None,
        1,
        None,
    ]


def test_split_iterator_has_no_state() -> None:
    iterator = open_split(Dataset.range(7), lambda source, repetition: 3)
    assert next(iterator) == 3
    with pytest.raises(UnimplementedError, match="gives out the positions"):
        iterator.state_dict()


def test_saved_elements_are_split_by_files(tmp_path: Path) -> None:
    Dataset.range(30).save(str(tmp_path), shard_func=lambda x: x % 4)
    loaded = Dataset.load(str(tmp_path))
    assert counts(loaded) == [4]
    by_hand = Dataset.load(
        str(tmp_path), reader_func=lambda files: files.flat_map(lambda file: file)
    )
    assert counts(by_hand) == [4]


def test_snapshot_has_no_splits(tmp_path: Path) -> None:
    with pytest.raises(
        UnimplementedError, match="Splitting is not implemented for snapshot datasets"
    ):
        split_providers(Dataset.range(3).snapshot(str(tmp_path)).map(abs))


def test_source_explains_missing_splits() -> None:
    try:

        @operator("elsewhere", OperatorNode)
        class Elsewhere(Op):
            def split_count(self) -> int:
                raise UnimplementedError(
                    None, None, "Cannot create split providers for dataset of type Elsewhere"
                )

        with pytest.raises(
            UnimplementedError, match="Cannot create split providers for dataset of type Elsewhere"
        ):
            split_providers(Dataset.zip(Dataset.range(3), make(Elsewhere())))
    finally:
        OPERATORS.pop("elsewhere")


def test_split_request_is_repeated_after_error() -> None:
    answers: list[Any] = [0, UnavailableError(None, None, "away"), 1, None]

    def ask(source: int, repetition: int) -> int | None:
        answer: int | Exception | None = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    iterator = open_split(Dataset.range(9), ask)
    assert next(iterator) == 0
    with pytest.raises(UnavailableError):
        next(iterator)
    assert list(iterator) == [1]


def dealt(dataset: Dataset, workers: int = 3) -> list[list[Any]]:
    """What each of several workers reads, who take turns; the dealer gives a position to whoever
    asks."""
    providers = split_providers(dataset)
    iterators = [
        open_split(dataset, lambda source, repetition: providers[source].next(repetition))
        for _ in range(workers)
    ]
    found: list[list[Any]] = [[] for _ in iterators]
    going = list(range(workers))
    while going:
        for number in tuple(going):
            try:
                found[number].append(np.asarray(next(iterators[number])).tolist())
            except StopIteration:
                going.remove(number)
    return found


def test_endless_enumerate_counts_per_worker() -> None:
    providers = split_providers(dataset := Dataset.range(3).repeat().enumerate())
    for _ in range(2):
        iterator = open_split(
            dataset, lambda source, repetition: providers[source].next(repetition)
        )
        assert [int(next(iterator)[0]) for _ in range(5)] == list(range(5))


def test_choices_are_per_worker() -> None:
    wanted = [0, 2, 1, 1, 0]
    sources = [Dataset.from_tensors(x).repeat() for x in range(3)]
    found = dealt(
        Dataset.choose_from_datasets(
            sources, Dataset.from_tensor_slices(np.array(wanted, np.int64))
        )
    )
    assert found == [wanted] * 3


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.from_tensor_slices([1, 5, 0]).flat_map(Dataset.from_tensors),
        Dataset.from_tensor_slices([1, 5, 0]).interleave(Dataset.from_tensors, 2),
        Dataset.from_tensor_slices([1, 5, 0]).interleave(
            Dataset.from_tensors, 2, num_parallel_calls=2
        ),
        Dataset.range(20).repeat(5),
        Dataset.range(20).shuffle(20).repeat(5),
        Dataset.range(100).concatenate(Dataset.range(100, 200)),
    ],
    ids=lambda dataset: str(dataset.op.name),
)
def test_workers_read_whole_dataset(dataset: Dataset) -> None:
    assert sorted(x for one in dealt(dataset) for x in one) == sorted(map(int, dataset))


def test_windows_of_group_are_whole() -> None:
    grouped = Dataset.range(12).group_by_window(
        lambda x: x % 2, lambda key, rows: Dataset.zip(rows, Dataset.range(100)), window_size=3
    )
    assert sorted(x for one in dealt(grouped) for x, _ in one) == list(range(12))


@pytest.mark.parametrize("lengths", [(20, 100), (100, 20)])
def test_rows_end_with_shorter_source(lengths: tuple[int, int]) -> None:
    pairs = Dataset.zip(*map(Dataset.range, lengths))
    assert sum(map(len, dealt(pairs))) == 20
    assert dealt(pairs.repeat(3), 1) == [[[x, x] for x in range(20)] * 3]


def test_sources_of_different_rates_meet() -> None:
    tenth = Dataset.range(100).filter(lambda x: x % 10 == 0)
    assert sum(map(len, dealt(Dataset.zip(Dataset.range(100), tenth)))) == 10
    assert sum(map(len, dealt(Dataset.zip(Dataset.range(50), Dataset.range(10).repeat(10))))) == 50


@pytest.mark.parametrize(
    ("build", "needed"),
    [
        (lambda below: below, [1, 2, 3]),
        (lambda below: below.map(abs).ignore_errors(), [1, 2, 3]),
        (lambda below: below.batch(4), [4, 8, 12]),
        (lambda below: below.flat_map(lambda x: Dataset.range(2)), [1, 1, 2]),
        (lambda below: below.repeat(), [1, 2, 3]),
        (lambda below: below.take(2), [1, 2, 2]),
        (lambda below: below.shuffle(5), [5, 6, 7]),
        (lambda below: Dataset.zip(below, Dataset.range(9)), [1, 2, 3]),
    ],
)
def test_position_is_requested_before_its_element(
    build: Callable[[Dataset], Dataset], needed: list[int]
) -> None:
    count = 0

    def ask(source: int, repetition: int) -> int:
        nonlocal count
        count += 1
        return count - 1

    iterator = open_split(build(Dataset.counter()), ask)
    found = []
    for _ in needed:
        next(iterator, None)
        found.append(count)
    assert found == needed

"""How a pass ends: what is read to its end is complete, and what is empty is not the end of all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqdist import TensorSpec
from zmqdist.data import Dataset
from zmqdist.errors import InvalidArgumentError


class Counted:
    """A dataset of four numbers that counts how often it is computed."""

    def __init__(self) -> None:
        self.calls = 0

    def dataset(self) -> Dataset:
        return Dataset.range(4).map(self._element)

    def _element(self, x: Any) -> Any:
        self.calls += 1
        return x


KEEPING: dict[str, Callable[[Dataset, Path], Dataset]] = {
    "cache": lambda dataset, _: dataset.cache(),
    "cache_file": lambda dataset, folder: dataset.cache(str(folder / "kept")),
    "behind a prefetch": lambda dataset, _: dataset.cache().prefetch(1),
}
READING: dict[str, Callable[[Dataset], Dataset]] = {
    "take": lambda dataset: dataset.take(4),
    "take of a batch": lambda dataset: dataset.batch(2).take(2),
    "the second of a zip": lambda dataset: Dataset.zip(Dataset.range(4), dataset),
    "the first of a zip": lambda dataset: Dataset.zip(dataset, Dataset.range(4)),
    "both of a zip": lambda dataset: Dataset.zip(dataset, dataset.take(4)),
}


TWO_WRITERS = ("cache_file", "both of a zip")


@pytest.mark.parametrize(
    ("keeping", "reading"),
    [pair for pair in itertools.product(KEEPING, READING) if pair != TWO_WRITERS],
)
def test_full_read_completes_caches(keeping: str, reading: str, tmp_path: Path) -> None:
    counted = Counted()
    dataset = READING[reading](KEEPING[keeping](counted.dataset(), tmp_path))
    list(dataset)
    first = counted.calls
    list(dataset)
    assert counted.calls == first


def test_snapshot_behind_zip_is_complete(tmp_path: Path) -> None:
    dataset = Dataset.zip(Dataset.range(4), Dataset.range(4).snapshot(str(tmp_path)))
    list(dataset)
    assert list(tmp_path.glob("*/dataset.json"))


def test_take_of_fewer_reads_no_further() -> None:
    counted = Counted()
    assert len(list(counted.dataset().take(2))) == 2
    assert counted.calls == 2


def test_take_completes_cache_after_load() -> None:
    counted = Counted()
    dataset = counted.dataset().cache().take(4)
    with iter(dataset) as iterator:
        for _ in range(4):
            next(iterator)
        state = iterator.state_dict()
    with iter(dataset) as other:
        other.load_state_dict(state)
        assert list(other) == []
    calls = counted.calls
    assert [int(x) for x in dataset] == [0, 1, 2, 3]
    assert counted.calls == calls


def test_zip_ignores_errors_behind_its_end() -> None:
    failing = Dataset.range(9).map(lambda x: 6 // int(3 - x))
    assert [int(x) for x, _ in Dataset.zip(Dataset.range(3), failing)] == [0, 1, 2]


def test_empty_pass_is_not_last_pass() -> None:
    passes = iter([False, True, False, True])
    dataset = Dataset.range(1).filter(lambda _: next(passes)).repeat(4)
    assert [int(x) for x in dataset] == [0, 0]


def test_endless_repeat_ends_with_empty_pass() -> None:
    passes = iter([True, False])
    assert [int(x) for x in Dataset.range(1).filter(lambda _: next(passes)).repeat()] == [0]


def numbers_of(x: Any) -> Dataset:
    """Nothing for 0 and 1; of a form that only its first element tells."""
    return Dataset.range(max(0, int(x) - 1)).map(lambda y: y / 2)


def test_saved_data_may_begin_with_empty_dataset(tmp_path: Path) -> None:
    dataset = Dataset.range(4).flat_map(numbers_of)
    dataset.save(str(tmp_path))
    assert list(Dataset.load(str(tmp_path))) == [0.0, 0.0, 0.5]
    assert Dataset.load(str(tmp_path)).element_spec == TensorSpec((), np.float64)


def test_group_spec_without_complete_group() -> None:
    def halves(_: Any, rows: Dataset) -> Dataset:
        return rows.skip(1).map(lambda x: x / 2)

    grouped = Dataset.range(4).group_by_window(lambda x: x * 0, halves, 4)
    assert grouped.element_spec == TensorSpec((), np.float64)


def test_range_reaches_largest_number() -> None:
    assert [int(x) for x in Dataset.range(2**63 - 3, 2**63)] == [2**63 - 3, 2**63 - 2, 2**63 - 1]
    assert [int(x) for x in Dataset.range(-(2**63), 2**63, 2**62)] == list(
        range(-(2**63), 2**63, 2**62)
    )
    unsigned = Dataset.range(2**64 - 2, 2**64, output_type=np.uint64)
    assert [int(x) for x in unsigned] == [2**64 - 2, 2**64 - 1]
    assert Dataset.range(2**63).cardinality() == 2**63


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ((2**63 - 1, 2**63 + 1), np.int64),
        ((-1, 3), np.uint8),
        ((0, 300), np.uint8),
        ((0, -(2**64), -(2**62)), np.int64),
    ],
)
def test_range_beyond_dtype_is_refused(numbers: tuple[int, ...], dtype: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="holds"):
        Dataset.range(*numbers, output_type=dtype)


def stopping(x: Any, *more: Any) -> Any:
    if x == 2:
        raise StopIteration
    return x


FOUR = Dataset.range(4)
STOPPING: list[tuple[Callable[[], Any], str]] = [
    (lambda: FOUR.map(stopping), "map"),
    (lambda: FOUR.map(stopping, num_parallel_calls=2), "map"),
    (lambda: FOUR.map(stopping).batch(2).prefetch(1), "map"),
    (lambda: FOUR.filter(lambda x: stopping(x) >= 0), "filter"),
    (lambda: FOUR.take_while(lambda x: stopping(x) >= 0), "take_while"),
    (lambda: FOUR.scan(0, lambda state, x: (state, stopping(x))), "scan"),
    (lambda: FOUR.interleave(lambda x: Dataset.range(stopping(x)), 2), "interleave"),
    (
        lambda: FOUR.interleave(lambda x: Dataset.range(stopping(x)), 2, num_parallel_calls=2),
        "interleave",
    ),
    (lambda: FOUR.group_by_window(stopping, lambda key, rows: rows, 2), "group_by_window"),
    (
        lambda: FOUR.group_by_window(lambda x: x, lambda key, rows: stopping(2), 2),
        "group_by_window",
    ),
    (lambda: Dataset.from_generator(stopping, args=(2,)), "from_generator"),
    (lambda: Dataset.zip(FOUR, FOUR.map(stopping)), "map"),
]


@pytest.mark.parametrize(("build", "operator"), STOPPING)
def test_stop_iteration_names_operator(build: Callable[[], Dataset], operator: str) -> None:
    with pytest.raises(RuntimeError, match=rf"a function of {operator}\(.*raised StopIteration"):
        list(build())


@pytest.mark.parametrize(
    ("run", "method"),
    [
        (lambda folder: FOUR.reduce(0, lambda state, x: stopping(x)), "reduce"),
        (lambda folder: FOUR.save(folder, shard_func=stopping), "save"),
    ],
)
def test_stop_iteration_stays_inside_reductions(run: Any, method: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"a function of {method} raised StopIteration"):
        run(str(tmp_path / "saved"))

"""What a pipeline says before it runs: shapes as exact as the operators declare them; and
structures without leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.helpers import plain
from zmqdist import TensorSpec
from zmqdist.data import UNKNOWN_CARDINALITY, Dataset
from zmqdist.errors import InvalidArgumentError

ROWS = Dataset.from_tensor_slices(np.arange(12).reshape(6, 2))


def growing(x: Any) -> Any:
    return np.full(x + 1, x)


@pytest.mark.parametrize(
    ("dataset", "shape"),
    [
        (ROWS.padded_batch(4), (None, 2)),
        (ROWS.padded_batch(4, drop_remainder=True), (4, 2)),
        (ROWS.batch(3).padded_batch(2), (None, None, 2)),
        (ROWS.padded_batch(4, [-1]), (None, None)),
        (Dataset.range(4).map(growing).padded_batch(2), (None, None)),
        (
            Dataset.range(4)
            .map(growing, output_signature=TensorSpec((None,), np.int64))
            .padded_batch(2),
            (None, None),
        ),
        (ROWS.batch(4, drop_remainder=True).rebatch(2), (2, 2)),
        (ROWS.batch(4, drop_remainder=True).rebatch([2, 2]), (2, 2)),
        (ROWS.batch(4, drop_remainder=True).rebatch(3), (None, 2)),
        (ROWS.batch(4, drop_remainder=True).rebatch([2, 0]), (None, 2)),
        (ROWS.batch(4).rebatch(2), (None, 2)),
        (ROWS.rebatch(2), (2,)),
    ],
)
def test_spec_has_declared_sizes(dataset: Dataset, shape: tuple[int | None, ...]) -> None:
    assert dataset.element_spec == TensorSpec(shape, np.int64)
    for batch in dataset:
        assert dataset.element_spec.problem(batch) is None


def test_window_spec_allows_shorter_last_batch() -> None:
    batches = Dataset.range(5).batch(2)
    for joined in (
        batches.window(2).flat_map(lambda window: window),
        batches.group_by_window(lambda batch: 0, lambda key, window: window, 2),
    ):
        assert joined.element_spec == TensorSpec((None,), np.int64)


def test_first_element_declares_no_other_shape() -> None:
    rows = Dataset.range(4).map(growing)
    assert rows.element_spec == TensorSpec((1,), np.int64)  # computes the first element
    assert rows.unbatch().cardinality() == UNKNOWN_CARDINALITY
    assert rows.padded_batch(2).element_spec == TensorSpec((None, None), np.int64)


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [
        ([2, 0], [[0, 1], [], [2, 3], [], [4, 5], [], [6]]),
        ([0, 4], [[], [0, 1, 2, 3], [], [4, 5, 6]]),
        ([0, 0, 7], [[], [], [0, 1, 2, 3, 4, 5, 6], [], []]),
    ],
)
def test_rebatch_yields_batches_of_size_0(sizes: list[int], batches: list[list[int]]) -> None:
    rebatched = Dataset.range(7).batch(4).rebatch(sizes)
    assert [x.tolist() for x in rebatched] == batches
    assert {(x.dtype, x.ndim) for x in rebatched} == {(np.dtype(np.int64), 1)}


def test_batch_of_size_0_needs_rank() -> None:
    unknown = Dataset.range(4).map(growing, output_signature=TensorSpec(None, np.int64))
    with pytest.raises(InvalidArgumentError, match="needs arrays whose rank is known"):
        list(unknown.rebatch([0, 2]))


EMPTY = Dataset.from_tensor_slices({"x": (np.arange(4), ()), "y": {}})


@pytest.mark.parametrize(
    "change",
    [
        lambda below, folder: below,
        lambda below, folder: below.batch(2).unbatch(),
        lambda below, folder: below.batch(4).rebatch(3).unbatch(),
        lambda below, folder: below.padded_batch(3).unbatch(),
        lambda below, folder: below.batch(2, num_parallel_calls=2).unbatch().shuffle(1).cache(),
        lambda below, folder: Dataset.zip(
            {"x": below.map(lambda row: row["x"]), "y": below.map(lambda row: {})}
        ),
        lambda below, folder: below.save(folder) or Dataset.load(folder),
        lambda below, folder: below.concatenate(below).take(4).cache(folder + "/cache"),
    ],
)
def test_component_without_leaves_stays(change: Any, tmp_path: Path) -> None:
    dataset = change(EMPTY, str(tmp_path))
    elements = [plain(x) for x in dataset]
    assert elements == [{"x": (("int64", number), ()), "y": {}} for number in range(4)]
    assert dataset.element_spec == {"x": (TensorSpec((), np.int64), ()), "y": {}}

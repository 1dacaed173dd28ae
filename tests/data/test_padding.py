"""Text in arrays, and what is filled up: nothing is cut off, and what cannot be filled up is
refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zmqdist import TensorSpec
from zmqdist.data import Dataset, Sparse
from zmqdist.errors import InvalidArgumentError


def words() -> Dataset:
    """Arrays of one word, and of two."""
    return Dataset.range(1, 3).map(lambda n: np.array(["ab", "c"][: int(n)]))


def sparse() -> Dataset:
    return Dataset.range(2).map(lambda n: Sparse.of(np.eye(2) * n))


def ragged() -> Dataset:
    return Dataset.range(1, 5).map(np.arange).ragged_batch(2)


def test_long_padding_text_is_whole() -> None:
    (batch,) = words().padded_batch(2, padding_values="<pad>")
    assert batch.tolist() == [["ab", "<pad>"], ["ab", "c"]]
    (batch,) = words().map(lambda row: row.astype("S")).padded_batch(2, padding_values=b"<pad>")
    assert batch.tolist() == [[b"ab", b"<pad>"], [b"ab", b"c"]]


def test_bucket_padding_text_is_whole() -> None:
    batches = words().bucket_by_sequence_length(len, [9], [2, 1], padding_values="<pad>")
    assert [batch.tolist() for batch in batches] == [[["ab", "<pad>"], ["ab", "c"]]]


@pytest.mark.parametrize(
    ("dataset", "shapes"),
    [
        (Dataset.from_tensor_slices({"a": [[1], [2]]}), {"b": [2]}),
        (Dataset.from_tensor_slices({"a": [[1], [2]]}), [2]),
        (Dataset.from_tensor_slices(([[1], [2]], [[1], [2]])), 3),
        (Dataset.from_tensor_slices(([[1], [2]], [[1], [2]])), ([2],)),
    ],
    ids=["another key", "no dict", "no tuple", "too few parts"],
)
def test_padded_shapes_of_other_structure_are_refused(dataset: Dataset, shapes: Any) -> None:
    with pytest.raises(ValueError, match="has another structure than the elements"):
        dataset.padded_batch(2, padded_shapes=shapes)


@pytest.mark.parametrize("build", [sparse, ragged])
def test_ragged_and_sparse_elements_are_not_padded(
    build: Callable[[], Dataset],
) -> None:
    dataset = build()
    for padded in (
        lambda: dataset.padded_batch(2),
        lambda: dataset.bucket_by_sequence_length(lambda *_: 1, [3], [2, 2]),
    ):
        with pytest.raises(TypeError, match="fills up arrays"):
            list(padded())
        _ = dataset.element_spec  # now it is known before anything is read
        with pytest.raises(TypeError, match="fills up arrays"):
            padded()


def test_ragged_batch_of_sparse_elements_spec() -> None:
    dataset = sparse().ragged_batch(2)
    (batch,) = dataset
    assert batch.to_dense().shape == (2, 2, 2)
    assert dataset.element_spec == sparse().batch(2).element_spec


def test_padding_value_outside_dtype_is_refused() -> None:
    rows = Dataset.range(1, 3).map(
        lambda n: np.zeros(n, np.uint8), output_signature=TensorSpec((None,), np.uint8)
    )
    for value in (-1, 256):
        with pytest.raises(TypeError, match="does not fit"):
            rows.padded_batch(2, padding_values=value)


LOST = [[b"a\0", b"b"], ["a\0", "b"], [["a"], ["b\0"]], (1, [b"\0"])]
MIXED = [[1, "a"], ["a", b"a"], [[1.5], ["a"]], [np.array(1), "a"], (0, [True, "x"])]


@pytest.mark.parametrize(
    ("value", "text"), [*((x, "end in NUL") for x in LOST), *((x, "return a tuple") for x in MIXED)]
)
def test_list_of_mixed_text_is_refused(value: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        list(Dataset.range(1).map(lambda _: value))
    with pytest.raises(InvalidArgumentError, match=text):
        Dataset.from_tensors(value)


@pytest.mark.parametrize("value", ["a\0", b"a\0"])
def test_text_ending_in_nul_is_not_batched(value: Any) -> None:
    dataset = Dataset.range(2).map(lambda _: value)
    assert list(dataset) == [value] * 2
    for batched in (dataset.batch(2), dataset.padded_batch(2), dataset.ragged_batch(2)):
        with pytest.raises(InvalidArgumentError, match="end in NUL"):
            list(batched)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.arange(2), (1, 2)),
        ((1, 2), np.arange(2)),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "b": 2}, {"a": 1, "c": 2}),
        ({"a": 1}, (1,)),
    ],
)
def test_different_structures_are_not_batched(one: Any, other: Any) -> None:
    dataset = Dataset.range(2).map(lambda x: other if x else one)
    for batched in (dataset.batch(2), dataset.padded_batch(2), dataset.ragged_batch(2)):
        with pytest.raises(InvalidArgumentError, match="different structures"):
            list(batched)


def test_ragged_batch_has_one_dtype() -> None:
    with pytest.raises(InvalidArgumentError, match="one dtype"):
        list(Dataset.range(2).map(lambda x: np.ones(2) if x else np.arange(2)).ragged_batch(2))

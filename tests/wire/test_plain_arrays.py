"""Which arrays are more than plain arrays, and are refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqdist.errors import InvalidArgumentError
from zmqdist.specs import joined, plain_array, what_is_lost


class Metres(np.ndarray):
    """A subclass as packages for units have it."""


def _characters() -> np.ndarray[Any, Any]:
    with warnings.catch_warnings():  # newer versions of NumPy say that they will drop the class
        warnings.simplefilter("ignore", DeprecationWarning)
        return np.char.array(["a"])


MASKED = np.ma.masked_array([1.0, 2.0], [False, True])
SUBCLASSES = {
    "masked": (MASKED, r"numpy\.ma\.(core\.)?MaskedArray .*array\.filled\(value\).* array\.mask"),
    "masked without a mask": (np.ma.masked_array([1.0]), r"numpy\.ma\.(core\.)?MaskedArray"),
    "records": (
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        r"recarray .*np\.asarray makes a plain",
    ),
    "characters": (_characters(), "chararray"),
    "of a package": (np.arange(2.0).view(Metres), r"tests\.wire\.test_plain_arrays\.Metres"),
    "in a list": ([[1.0, 2.0], MASKED], "MaskedArray"),
    "in a tuple": ((MASKED, MASKED), "MaskedArray"),
}


@pytest.mark.parametrize("name", SUBCLASSES)
def test_subclass_of_array_is_refused_by_name(name: str) -> None:
    value, text = SUBCLASSES[name]
    with pytest.raises(InvalidArgumentError, match=f"^variable 'w': a .*{text}"):
        plain_array(value, "variable 'w'")


def test_list_without_array_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^values: not an array: "):
        plain_array([[1], [1, 2]], "values")


class Tensor:
    """An array of another package."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.arange(3)


def test_foreign_values_and_arrays_lose_nothing(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "m", np.float32, "w+", shape=(2,))
    for value in (
        1,
        2.5,
        "a",
        np.float32(1),
        np.arange(3),
        mapped,
        [1, [2]],
        [np.arange(2)],
        Tensor(),
    ):
        assert what_is_lost(value) == ""
    assert plain_array(Tensor(), "x").tolist() == [0, 1, 2]
    assert type(plain_array(mapped, "x")) is np.ndarray


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype(">i4"),
        np.dtype({"names": ["x", "y"], "formats": ["i4", "f4"], "offsets": [0, 0]}),
        np.dtype([("a", "i1"), ("b", "f8")], align=True),
    ],
    ids=str,
)
def test_joined_arrays_keep_byte_order_and_gaps(dtype: np.dtype[Any]) -> None:
    assert repr(joined([np.zeros(2, dtype), np.zeros(1, dtype)]).dtype) == repr(dtype)


def test_joined_texts_get_longest_dtype() -> None:
    assert joined([np.array(["a"]), np.array(["bcd"])]).tolist() == ["a", "bcd"]

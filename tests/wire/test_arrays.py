"""The encoding of arrays."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.wire.helpers import LAYOUTS, arrays, dtypes, same
from zmqdist.wire import arrays as wire
from zmqdist.wire.arrays import (
    BadArray,
    bytes_of,
    dtype_from_json,
    dtype_to_json,
    is_fortran,
    rebuild,
)


def travel(array: np.ndarray) -> np.ndarray:
    data = bytearray(bytes_of(array))
    return rebuild(
        dtype_from_json(dtype_to_json(array.dtype)), list(array.shape), is_fortran(array), data
    )


few = settings(max_examples=50, deadline=None)


@few
@given(dtypes)
def test_dtype_round_trip_keeps_offsets(dtype: np.dtype) -> None:
    back = dtype_from_json(dtype_to_json(dtype))
    assert repr(back) == repr(dtype)
    assert back == dtype


@few
@given(arrays())
def test_array_round_trip_of_any_layout(array: np.ndarray) -> None:
    back = travel(array)
    assert same(np.asarray(array), back)
    assert back.flags.writeable


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_memory_order_of_contiguous_array_is_kept(layout: str) -> None:
    array = LAYOUTS[layout](np.arange(24.0).reshape(2, 3, 4))
    back = travel(array)
    assert np.array_equal(back, array)
    assert back.flags.f_contiguous == array.flags.f_contiguous


@pytest.mark.parametrize("layout", ["C", "Fortran"])
def test_contiguous_array_is_not_copied(layout: str) -> None:
    array = LAYOUTS[layout](np.arange(6).reshape(2, 3).copy())
    assert np.shares_memory(np.frombuffer(bytes_of(array), np.uint8), array)
    data = bytearray(bytes_of(array))
    assert np.shares_memory(
        np.frombuffer(data, np.uint8), rebuild(array.dtype, [2, 3], is_fortran(array), data)
    )


def test_array_beyond_4_gib_is_viewed_whole(tmp_path: Path) -> None:
    side = 2**32 + 8
    # a sparse file, which needs neither memory nor disk
    array = np.memmap(tmp_path / "sparse", np.uint8, "w+", shape=(side,))
    array[-1] = 7
    data = bytes_of(array)
    assert data.nbytes == side
    assert rebuild(np.dtype("<u8"), [side // 8], False, data)[-1] == 7 << 56


@pytest.mark.parametrize("dtype", [object, np.dtype([("a", "i4"), ("b", object)])])
def test_object_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(BadArray, match=r"Python objects .*astype\(str\) makes text"):
        dtype_to_json(np.dtype(dtype))


@pytest.mark.parametrize(
    ("dtype", "problem"),
    [
        (np.dtype("i4", metadata={"unit": "m"}), "has metadata, which would be lost"),
        (
            np.dtype([("a", np.dtype("i4", metadata={"unit": "m"}))]),
            "has metadata, which would be lost",
        ),
        (np.dtype((np.int32, {"low": ("i2", 0), "high": ("i2", 2)})), "not one that zmqdist knows"),
        (np.dtype((np.record, "V8")), "not one that zmqdist knows"),
    ],
    ids=repr,
)
def test_lossy_dtypes_are_refused(dtype: Any, problem: str) -> None:
    with pytest.raises(BadArray, match=problem):
        dtype_to_json(dtype)


def test_array_of_most_dimensions_travels() -> None:
    most = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
    array = np.arange(2).reshape(2, *[1] * (most - 1))
    assert same(array, travel(array))


SIDES = [0, 1, 2**31 - 1, 2**31, 2**32, 2**40 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)]


def test_sizes_at_integer_bounds_need_exact_bytes() -> None:
    for first, second in itertools.product(SIDES, SIDES):
        fits = first >= 0 and second >= 0 and first * second == 8 and max(first, second) <= 2**40
        for shape in ([first, second], [second, 0, first]):
            try:
                array = rebuild(
                    np.dtype("u1"), shape, False, b"12345678" if 0 not in shape else b""
                )
            except BadArray:
                assert not fits, shape
            else:
                assert array.size in (0, 8), shape


@pytest.mark.parametrize(
    "shape",
    [None, 3, "3", [True], [1.0], [None], [[1]], [1] * 65],
    ids=lambda shape: repr(shape)[:20],
)
def test_invalid_shape_is_refused(shape: Any) -> None:
    with pytest.raises(BadArray, match="a shape"):
        rebuild(np.dtype("u1"), shape, False, b"1")


@pytest.mark.parametrize("dtype", ["V0", "S0", np.dtype([])])
def test_items_of_zero_bytes_are_bounded(dtype: Any) -> None:
    with pytest.raises(BadArray, match="larger than"):
        rebuild(np.dtype(dtype), [2**40, 2**40], False, b"")


def _deep(levels: int) -> Any:
    described: Any = "<f4"
    for _ in range(levels):
        described = ["array", described, [1]]
    return described


@pytest.mark.parametrize(
    "described",
    [
        None, 4, b"<f4", "", "O", "|O", "f4,f4", "(2,2)f8", "<f3", "<U99999999999", "<f4 ", "float_", "object", "<M8[parsec]",
        "<f16", "<f16/1", "<c32/1", "bfloat17", "int8_pickle", "float0", "builtins", [], ["fields"], ["array", "<f4"],
        ["array", "<f4", [-1]], ["array", "<f4", [2**62]], ["array", "<f4", [2**40, 2**40]], ["array", "<f4", "x"],
        ["fields", [["a", "<f4", 0, None]], 3, False], ["fields", [["a", "<f4", -1, None]], 4, False],
        ["fields", [["a", "<f4", 2**63, None]], 4, False], ["fields", [["a", "<f4", 0, None]], 2**63, False],
        ["fields", [["a", "<f4", 0, None]], -1, False], ["fields", [["a", "O", 0, None]], 8, False],
        ["fields", [["a", "<f4", 0, None], ["a", "<f4", 4, None]], 8, False], ["fields", [["a", "<f4", 0, 5]], 4, False],
        ["fields", [[1, "<f4", 0, None]], 4, False], ["fields", [], 2**50, False], ["fields", [["a"]], 4, False],
        ["fields", [["a", "<f4", 0, None]], 4, 1], _deep(65), _deep(10_000),
    ],
    ids=lambda described: None if isinstance(described, (str, bytes)) else type(described).__name__,
)  # fmt: skip
def test_undeclared_dtype_is_refused(described: Any) -> None:
    with pytest.raises(BadArray):
        dtype_from_json(described)


def test_foreign_long_double_is_refused() -> None:
    described = dtype_to_json(np.dtype(np.longdouble))
    assert isinstance(described, str)
    if "/" not in described:
        pytest.skip("long double is double here")
    assert dtype_from_json(described) == np.longdouble
    with pytest.raises(BadArray, match="long double"):
        dtype_from_json(described.partition("/")[0] + "/112")


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4"])
def test_ml_dtypes_travel_if_installed(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([[1, 2], [3, 4]], getattr(ml_dtypes, name))
    assert same(array, travel(array))
    assert dtype_to_json(array.dtype) == name


def test_missing_ml_dtypes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    wire._named_dtype.cache_clear()  # reach: the cache outlives tests that read such names
    with pytest.raises(BadArray, match="install ml_dtypes"):
        dtype_from_json("bfloat16")


def test_ml_dtypes_are_imported_when_named() -> None:
    code = "import sys, zmqdist.wire.safe as s; s.decode(*s.encode([1.5]), 'p'); sys.exit('ml_dtypes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

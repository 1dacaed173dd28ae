"""Results with `results: safe`: the accepted types, the refused ones, and the errors."""

from __future__ import annotations

import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqdist import errors
from zmqdist.wire import results, trusted

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 2**80, 1.5, 2j, "text", b"bytes", [1, (2, {"k": 3})], {1: 2}, Point(1, 2)],
)
def test_safe_value_round_trip(value: Any) -> None:
    assert results.unpack(results.pack(value), safe_only=True) == value


@pytest.mark.parametrize("size", [0, 10, 100_000])
def test_received_arrays_are_writable(size: int) -> None:
    packed = results.pack({"a": np.arange(size)})
    parts = [packed[0], *map(bytearray, packed[1:])] if isinstance(packed, list) else packed
    back = results.unpack(parts, safe_only=True)["a"]
    assert np.array_equal(back, np.arange(size))
    assert back.flags.writeable


def test_unsafe_type_is_named_with_place() -> None:
    with pytest.raises(errors.InvalidArgumentError) as raised:
        results.pack({"a": [1, {2}]})
    assert str(raised.value) == (
        "the function returned a value that `results: safe` refuses: value['a'][1] is a "
        "builtins.set: only None, bool, int, float, "
        "complex, str, bytes, list, tuple, namedtuple, dict, numpy scalars and arrays, tensors, "
        "TensorSpec are permitted; pass list(x); return one of these, or "
        "leave out `results: safe` if you trust the workers"
    )


def test_array_of_objects_is_refused() -> None:
    with pytest.raises(
        errors.InvalidArgumentError,
        match="value is an array that zmqdist does not send: dtype object holds Python",
    ):
        results.pack(np.array([object()]))


class Evil:
    """An object that leaves a mark when it is unpickled."""

    loaded = 0

    def __reduce__(self) -> Any:
        return _mark, ()


def _mark() -> int:
    Evil.loaded += 1
    return 0


def test_pickle_is_refused_unread() -> None:
    for packed in (pickle.dumps(Evil(), 5), [pickle.dumps(Evil(), 5), bytearray(8)]):
        with pytest.raises(
            errors.FailedPreconditionError,
            match="replied with a pickle, which `results: safe` refuses",
        ):
            results.unpack(packed, safe_only=True)
    error = results.unpack_error(trusted.pack_error(ValueError(1)), safe_only=True)
    assert isinstance(error, errors.FailedPreconditionError)
    assert "replied with a pickle" in error.message
    assert Evil.loaded == 0


def test_pickles_are_accepted_by_default() -> None:
    assert results.unpack(trusted.pack({1, 2}), safe_only=False) == {1, 2}
    assert isinstance(
        results.unpack_error(trusted.pack_error(ValueError(1)), safe_only=False), ValueError
    )


class Own(Exception):
    """A class of a user."""


@pytest.mark.parametrize(
    ("error", "cls", "text"),
    [
        (ValueError("bad"), ValueError, "bad"),
        (errors.NotFoundError("gone"), errors.NotFoundError, "gone"),
        (Own("mine"), errors.UnknownError, "Own: mine"),
        (SystemExit(3), errors.UnknownError, "SystemExit(3)"),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "no"), errors.UnknownError, "UnicodeDecodeError"),
        (StopIteration(1), StopIteration, "1"),
    ],
)
def test_error_of_known_class_keeps_class(error: BaseException, cls: type, text: str) -> None:
    back = results.unpack_error(results.pack_error(error, unpickling=True), safe_only=True)
    assert type(back) is cls
    assert text in str(back)
    cause = back.__cause__
    assert isinstance(cause, trusted.RemoteTraceback)
    assert cause.unpickling


@given(st.binary(max_size=200))
def test_random_bytes_are_value_or_error(data: bytes) -> None:
    try:
        results.unpack(results.SAFE + data, safe_only=True)
    except errors.WireError:
        pass
    assert isinstance(results.unpack_error(results.SAFE + data, safe_only=True), Exception)

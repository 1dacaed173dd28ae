"""Strategies for values that can travel, and an equality that compares types, NaNs and signs of
zero."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from zmqdist.specs import TensorSpec

Point = namedtuple("Point", ["x", "y"])
Renamed = namedtuple("Renamed", ["a", "def", "a"], rename=True)


def same(one: Any, two: Any) -> bool:
    """Return whether `two` is the value that a receiver of `one` should get, with all types."""
    if isinstance(one, tuple) and hasattr(one, "_fields"):
        named = type(one).__name__ == type(two).__name__ and one._fields == two._fields
        return named and all(map(same, one, two))
    if isinstance(one, np.ndarray):
        return (
            type(two) is np.ndarray
            and one.dtype == two.dtype
            and one.shape == two.shape
            and same_items(one, two)
        )
    if isinstance(one, np.generic):
        return (
            isinstance(two, np.generic)
            and one.dtype == two.dtype
            and same_items(np.asarray(one), np.asarray(two))
        )
    if type(one) is not type(two):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return same(list(one), list(two)) and same(list(one.values()), list(two.values()))
    if isinstance(one, complex):
        return same(one.real, two.real) and same(one.imag, two.imag)
    if isinstance(one, float):
        return one.hex() == two.hex() if not math.isnan(one) else math.isnan(two)
    return bool(one == two)


def same_items(one: np.ndarray, two: np.ndarray) -> bool:
    if one.dtype.names is not None:  # padding between fields may differ
        return all(same_items(one[name], two[name]) for name in one.dtype.names)
    if one.dtype.kind in "fc":
        return repr(one.tolist()) == repr(two.tolist())
    return one.tobytes() == two.tobytes()


dtypes = st.one_of(
    npst.scalar_dtypes(),
    npst.unicode_string_dtypes(max_len=4),
    npst.byte_string_dtypes(max_len=4),
    npst.nested_dtypes(max_itemsize=64),
    st.sampled_from(
        [
            np.dtype(">f4"),
            np.dtype("M8[25s]"),
            np.dtype("m8"),
            np.dtype("V5"),
            np.dtype("g"),
            np.dtype(np.longcomplex if hasattr(np, "longcomplex") else np.clongdouble),
            np.dtype([("a", "i1"), ("b", [("c", ">f8", (2, 3)), ("d", "U2")])], align=True),
            np.dtype(
                {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [8, 0], "itemsize": 20}
            ),
            np.dtype([(("title", "a"), "i4")]),
            np.dtype((np.record, [("a", "i1"), ("b", ">f8")])),
            np.dtype([("a", (np.record, [("b", "i4")]))]),
            np.dtype([]),
        ]
    ),
)

LAYOUTS = {
    "C": np.ascontiguousarray,
    "Fortran": np.asfortranarray,
    "every second": lambda a: np.repeat(a, 2, axis=-1)[..., ::2] if a.ndim else a,
    "backwards": lambda a: a[::-1] if a.ndim else a,
    "axes swapped": lambda a: np.moveaxis(a, 0, -1) if a.ndim else a,
    "broadcast": lambda a: np.broadcast_to(a, (2, *a.shape)),
}


def filled(draw: st.DrawFn, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if dtype.kind == "V" and not dtype.names:
        count = math.prod(shape) * dtype.itemsize
        return np.ndarray(shape, dtype, bytearray(draw(st.binary(min_size=count, max_size=count))))
    return draw(npst.arrays(dtype, shape, fill=st.nothing()))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    array = filled(draw, draw(dtypes), shape)
    array = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](array)
    if shape == () and array.shape == (1,):
        # np.ascontiguousarray adds a dimension to a scalar array
        array = array.reshape(())
    array.flags.writeable = array.flags.writeable and draw(st.booleans())
    return array


@st.composite
def scalars(draw: st.DrawFn) -> np.generic:
    return filled(draw, draw(dtypes), ())[()]


specs = st.builds(
    TensorSpec,
    st.none() | st.lists(st.none() | st.integers(0, 2**40), max_size=4),
    dtypes,
    st.none() | st.text(max_size=5),
)
texts = st.text(st.characters(exclude_categories=()), max_size=8)
integers = st.integers() | st.sampled_from(
    [0, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1]
)
keys = st.recursive(
    st.none() | st.booleans() | integers | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
    | texts | st.binary(max_size=8) | st.sampled_from([np.int64(3), np.float32(0.5), np.str_("a"), np.datetime64("2024")]),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=3,
)  # fmt: skip
leaves = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    st.floats(),
    st.complex_numbers(),
    texts,
    st.binary(max_size=8),
    arrays(),
    scalars(),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.builds(Point, inner, inner),
        st.builds(Renamed, inner, inner, inner),
        st.dictionaries(texts, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
    )


values = st.recursive(leaves | specs, containers, max_leaves=8)

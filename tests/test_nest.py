"""Structures, as in tf.nest."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqdist import nest

Point = namedtuple("Point", ["x", "y"])
SamePoint = namedtuple("Point", ["x", "y"])
Pair = namedtuple("Pair", ["x", "y"])

structures = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Point, inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=3).map(OrderedDict),
    ),
)


@given(structures)
def test_packed_leaves_give_structure_again(structure: Any) -> None:
    back = nest.pack_sequence_as(structure, nest.flatten(structure))
    assert back == structure
    assert type(back) is type(structure)
    nest.assert_same_structure(structure, back)


@given(structures)
def test_map_structure_keeps_structure(structure: Any) -> None:
    mapped = nest.map_structure(lambda one, two: (one, two), structure, structure)
    assert nest.flatten(nest.map_structure(str, structure)) == [
        str(leaf) for leaf in nest.flatten(structure)
    ]
    assert len(nest.flatten(mapped)) == 2 * len(nest.flatten(structure))


@pytest.mark.parametrize(
    ("structure", "leaves"),
    [
        (3, [3]),
        (None, [None]),
        ("abc", ["abc"]),
        ([], []),
        ({}, []),
        ([1, (2, [3, ()])], [1, 2, 3]),
        ({"b": 1, "a": (2, 3)}, [2, 3, 1]),
        (Point([1], {"z": 2, "y": 3}), [1, 3, 2]),
        ({2: "b", 1: "a"}, ["a", "b"]),
        ({1, 2}, [{1, 2}]),
    ],
)
def test_leaves_come_in_sorted_order(structure: Any, leaves: list[Any]) -> None:
    assert nest.flatten(structure) == leaves


def test_array_is_leaf() -> None:
    array = np.zeros(3)
    assert nest.flatten({"a": array})[0] is array
    assert not nest.is_nested(array)
    assert nest.is_nested([])


def test_packing_keeps_class_and_order() -> None:
    structure = {"d": defaultdict(list, b=1, a=2), "o": OrderedDict(b=1, a=2)}
    back = nest.pack_sequence_as(structure, ["da", "db", "oa", "ob"])
    assert back == {"d": {"b": "db", "a": "da"}, "o": OrderedDict(b="ob", a="oa")}
    assert list(back["o"]) == ["b", "a"]
    assert back["d"].default_factory is list
    assert structure["d"]["b"] == 1


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ([1, 2], ["a", None]),
        (Point(1, 2), SamePoint(3, 4)),
        ({"a": 1, "b": 2}, OrderedDict(b=1, a=2)),
        ((), ()),
        (1, np.zeros(3)),
    ],
)
def test_structures_with_other_leaves_are_equal(one: Any, two: Any) -> None:
    nest.assert_same_structure(one, two)


@pytest.mark.parametrize(
    ("one", "two", "error", "message"),
    [
        ([1], (1,), TypeError, r"\(top\): expected a list of 1, given a tuple of 1"),
        (
            {"a": [1, (2,)]},
            {"a": [1, [2]]},
            TypeError,
            r"\['a'\]\[1\]: expected a tuple of 1, given a list of 1",
        ),
        ({"a": 1, "b": 2}, [1, 2], TypeError, "expected a dict of 2, given a list of 2"),
        (Point(1, 2), (1, 2), TypeError, "expected a Point of 2, given a tuple of 2"),
        (Point(1, 2), Pair(1, 2), TypeError, "expected a Point of 2, given a Pair of 2"),
        ([1, 2], [1], ValueError, "expected 2 items, given 1"),
        ({"a": 1}, {"b": 1}, ValueError, r"expected the keys \['a'\], given \['b'\]"),
        (
            [1, Point(2, [3])],
            [1, Point(2, 3)],
            ValueError,
            r"\[1\]\.y: expected a list of 1, given a leaf \(int\)",
        ),
        (1, [1], ValueError, r"expected a leaf \(int\), given a list of 1"),
    ],
)
def test_difference_is_named_with_path(
    one: Any, two: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        nest.assert_same_structure(one, two)


def test_structure_comparison_without_types() -> None:
    nest.assert_same_structure([1, (2,)], (1, [2]), check_types=False)
    assert nest.map_structure(lambda a, b: a + b, [1], (2,), check_types=False) == [3]
    with pytest.raises(ValueError, match="items"):
        nest.assert_same_structure([1], (1, 2), check_types=False)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: nest.pack_sequence_as([1, 2], [1]),
            ValueError,
            "2 leaves, flat_sequence has 1 items",
        ),
        (lambda: nest.pack_sequence_as(1, [1, 2]), ValueError, "1 leaves, flat_sequence has 2"),
        (
            lambda: nest.pack_sequence_as([1], 3),
            TypeError,
            "flat_sequence must be a list or tuple, not int",
        ),
        (lambda: nest.map_structure(3, [1]), TypeError, "callable, not int"),
        (lambda: nest.map_structure(len), ValueError, "at least one structure"),
        (lambda: nest.map_structure(max, [1], [1, 2]), ValueError, "expected 1 items, given 2"),
        (lambda: nest.flatten([{1: 1, "a": 2}]), TypeError, "must be sortable"),
    ],
)
def test_wrong_arguments_are_explained(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_composite_is_one_leaf_unless_expanded() -> None:
    class Pair:
        def _nest_components(self) -> list[int]:
            return [2, 3]

    pair = Pair()
    assert nest.flatten([1, pair]) == [1, pair]
    assert nest.flatten([1, {"a": pair}, None], expand_composites=True) == [1, 2, 3, None]


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    __slots__ = ("x",)
    x: Any


@dataclasses.dataclass
class Holder:
    x: Any
    y: Any = dataclasses.field(default=0, init=False)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, -1),
        ([1, (2, "a")], [-1, (-2, "a")]),
        (Point(1, [2]), Point(-1, [-2])),
        ({1, 2}, {-1, -2}),
        (frozenset([1]), frozenset([-1])),
        (collections.deque([1, 2], 3), collections.deque([-1, -2], 3)),
        ({"b": 1, 3: 2, Colour.RED: 5}, {"b": -1, -3: -2, Colour.RED: -5}),
        (OrderedDict(b=1, a=2), OrderedDict(b=-1, a=-2)),
        (collections.Counter({1: 1}), collections.Counter({-1: -1})),
        (defaultdict(list, a=1), defaultdict(list, a=-1)),
        (Frozen([1]), Frozen([-1])),
        (Holder(Frozen(1)), Holder(Frozen(-1))),
    ],
    ids=repr,
)
def test_map_contents_keeps_classes_at_any_depth(value: Any, expected: Any) -> None:
    mapped = nest.map_contents(lambda part: -part if type(part) is int else part, value)
    assert (type(mapped), mapped) == (type(expected), expected)
    assert getattr(mapped, "maxlen", None) == getattr(value, "maxlen", None)
    assert nest.map_contents(lambda part: part, value) is value


def test_map_contents_of_object_array() -> None:
    array = np.array([[1, None], ["a", 2]], object)
    mapped = nest.map_contents(lambda part: [part] if type(part) is int else part, array)
    assert mapped.tolist() == [[[1], None], ["a", [2]]]
    assert array[0, 0] == 1


def test_map_contents_refuses_cyclic_value() -> None:
    value = Holder([1])
    value.x.append(value)
    assert nest.map_contents(lambda part: part, value) is value
    with pytest.raises(ValueError, match="a Holder contains itself"):
        nest.map_contents(lambda part: 2 if part == 1 else part, value)

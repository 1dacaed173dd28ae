"""Elements as one value, and back."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import zmqdist as zd
from tests.wire.helpers import Point, arrays, dtypes, filled, keys, same, scalars, texts, values
from zmqdist.data.composites import Ragged
from zmqdist.data.dataset import Dataset
from zmqdist.data.service.compression import compress_batch, decompress_batch
from zmqdist.data.service.elements import (
    EACH,
    ROW_BYTES_MAX,
    ROWS,
    SCALARS,
    check_spec,
    pack,
    unpack,
    weigh,
)
from zmqdist.data.structure import UNKNOWN_SPEC, DatasetSpec
from zmqdist.errors import InvalidArgumentError, UnimplementedError, WireError
from zmqdist.specs import TensorSpec
from zmqdist.wire import safe

slow_ok = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=50)


def travel(elements: list[Any]) -> list[Any]:
    body, frames = safe.encode(pack(elements))
    return unpack(safe.decode(body, [bytearray(frame) for frame in frames], "peer"), "peer")


# -- round trip ------------------------------------------------------------------------------------


@st.composite
def leaf_kinds(draw: st.DrawFn) -> st.SearchStrategy[Any]:
    """A strategy for leaves that are alike: strings, scalars of one dtype, arrays of one dtype and
    shape; or for any leaf."""
    dtype = draw(dtypes)
    shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    alike = st.composite(lambda draw: np.asarray(filled(draw, dtype, shape)))()
    scalar = st.composite(lambda draw: filled(draw, dtype, ())[()])()
    return draw(
        st.sampled_from(
            [texts, st.binary(max_size=8), alike, alike.map(np.asfortranarray), scalar, any_leaf]
        )
    )


any_leaf = st.one_of(texts, st.binary(max_size=8), arrays(), scalars())


def structures(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: st.tuples(*parts)),
        st.tuples(inner, inner).map(lambda parts: st.builds(Point, *parts)),
        st.dictionaries(keys, inner, max_size=3).map(st.fixed_dictionaries),
    )


@st.composite
def batches(draw: st.DrawFn) -> list[Any]:
    """Elements of one structure, of which some are perhaps of another."""
    one, other = draw(st.recursive(leaf_kinds(), structures, max_leaves=5)), draw(leaf_kinds())
    return draw(st.lists(one, max_size=4)) + draw(st.lists(other, max_size=draw(st.integers(0, 1))))


@slow_ok
@given(batches())
def test_elements_come_back_type_for_type(elements: list[Any]) -> None:
    assert same(elements, travel(elements))


EDGES: list[list[Any]] = [
    [np.int64(1), np.int64(-1)], [np.int64(1), np.int32(1)], [np.int64(1), np.array(1)], [np.array(1), np.array(2)],
    [np.array(1, ">i2"), np.array(2, ">i2")], [np.array([1], ">f8")] * 2, [np.array([1], ">f8"), np.array([1.0])],
    [np.datetime64(1, "s"), np.datetime64(2, "s")], [np.datetime64(1, "s"), np.datetime64(1000, "ms")],
    [np.array("a\0b"), np.array("abc")], [np.array(["ab", "c"]), np.array(["d", "ef"])], ["a\0", "b"], [b"a\0", b""],
    [np.array([b"a", b""]), np.array([b"b", b"cc"])], [np.zeros((2, 0)), np.zeros((2, 0))],
    [np.zeros(2, [("a", "i1"), ("b", "f8")])] * 2, [np.zeros(2, [("a", "i1"), ("b", "f8")])[0]] * 2,
    [np.array([b"12345"], "V5")] * 2, [np.bool_(True), np.bool_(False)], [np.float16(1), np.float16("nan")],
    [np.zeros(3), np.zeros(4)], [np.zeros((2, 3)), np.zeros((3, 2))], [np.array(["a", "b"])[0], "a"],
    [{(): "", 3: ""}, {3: "", (): ""}], [{np.int64(3): "", (): ""}, {(): "", np.int64(3): ""}],
    [{1: "a"}, {True: "b"}], [{"a": "b", 1: "c"}, {"a": "d", 1: "e"}], [{"a": "b", "c": "d"}, {"c": "e", "a": "f"}],
    [(), ()], [{}, {}], [((), np.int64(1)), ((), np.int64(2))], [(np.int64(1),), (np.int64(1), np.int64(2))],
    [{"a": np.int64(1), "b": "x"}, {"b": "y", "a": np.int64(2)}], [{"a": np.int64(1)}, {"b": np.int64(1)}],
    [{1: "a", ("b", 2): b"c"}] * 2, [(np.int64(1), "a"), Point(np.int64(1), "a")], [Point("a", ((), {})), Point("b", ((), {}))],
    [Ragged(np.arange(3), np.array([0, 1, 3])), Ragged(np.arange(2), np.array([0, 2, 2]))], [],
    [np.zeros(ROW_BYTES_MAX + 1, "u1"), np.ones(ROW_BYTES_MAX + 1, "u1")], ["x" * 2**17, "y" * 2**17],
]  # fmt: skip


def test_components_of_none_travel_beside_values() -> None:
    elements = [(np.int64(n), None, {"a": None}) for n in range(3)]
    assert travel(elements) == elements
    spec = (TensorSpec((), np.int64), None, {"a": None})
    check_spec(elements, spec)
    with pytest.raises(InvalidArgumentError, match=r"element\[1\]: expected None, given int64"):
        check_spec([(np.int64(1), np.int64(1), {"a": None})], spec)


def test_edge_batch_keeps_types() -> None:
    for elements in EDGES:
        assert same(elements, travel(elements)), str(elements)[:200]


def test_namedtuple_keeps_name_and_fields() -> None:
    (one,) = travel([Point(np.int64(1), "a")])
    assert (type(one).__name__, one._fields) == ("Point", ("x", "y"))
    assert type(one) is not Point


def test_python_values_become_leaves_or_are_refused() -> None:
    assert same(travel([[1, 2], (3.0,), "a"]), [np.array([1, 2]), (np.float64(3),), "a"])
    for wrong in (None, object(), np.array([None]), {"a": ([None],)}):
        with pytest.raises(InvalidArgumentError):
            pack([wrong])


def test_elements_that_hold_datasets_say_what_to_put_behind_them() -> None:
    window = Dataset.range(3)
    for elements in ([window], [(np.int64(1), window)] * 2, [np.int64(1), {"a": window}]):
        with pytest.raises(UnimplementedError, match=r"apply batch\(\) or flat_map\(\)"):
            pack(elements)


# -- columns ---------------------------------------------------------------------------------------


def test_many_small_elements_are_one_array_for_each_leaf() -> None:
    value = pack([{"n": np.int64(i), "row": np.full((2, 3), i, ">f4")} for i in range(100)])
    assert value["n"][0] == SCALARS
    assert value["n"][1].shape == (100,)
    assert value["row"][0] == ROWS
    assert value["row"][1].shape == (100, 2, 3)
    assert value["row"][1].dtype == ">f4"


def test_large_array_is_not_copied() -> None:
    large = [np.zeros(ROW_BYTES_MAX + 1, "u1") for _ in range(3)]
    value = pack([(np.int64(0), array) for array in large])
    assert all(entry is array for entry, array in zip(value[1][1:], large, strict=True))
    assert all(
        element[1] is array for element, array in zip(unpack(value, "peer"), large, strict=True)
    )


# -- privacy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (ROW_BYTES_MAX,)])
def test_received_arrays_are_writable_and_of_their_own(shape: tuple[int, ...]) -> None:
    sent = [np.full(shape, i) for i in range(3)]
    one, two, three = travel(sent)
    two[...] = 9
    assert (one == 0).all()
    assert (three == 2).all()
    assert all((array == i).all() for i, array in enumerate(sent))


def test_row_keeps_no_column() -> None:
    row = travel([np.zeros(100) for _ in range(50)])[7]
    while isinstance(row.base, np.ndarray):
        row = row.base
    assert row.base is None
    assert row.nbytes == 800


def test_large_frozen_array_stays_frozen() -> None:
    (large,) = travel([zd.freeze(np.zeros(2**20))])
    small, _ = travel([zd.freeze(np.zeros(4)), np.zeros(4)])
    assert not large.flags.writeable
    assert small.flags.writeable


# -- malformed -------------------------------------------------------------------------------------

EMPTY = [SCALARS, np.zeros(0)]


MALFORMED: list[Any] = [
    None, 1, "a", b"", [], (), {}, [None], [3], [-1], [True, np.zeros(2)], [False, np.zeros(2)], [1.0, np.zeros(2)],
    [SCALARS], [ROWS], [SCALARS, 1], [SCALARS, [1]], [SCALARS, np.zeros(2), 1], [SCALARS, np.zeros((2, 2))],
    [SCALARS, np.array(1)], [SCALARS, np.array(["a"])], [SCALARS, np.zeros(2, ">i8")], [SCALARS, np.zeros(2, "V3")],
    [ROWS, np.array(1)], [ROWS, np.zeros((2**30, 0))], [ROWS, np.zeros(2**30, "V0")], [ROWS, np.zeros(2), 1],
    [EACH, None], [EACH, 1], [EACH, 1.0], [EACH, True], [EACH, [1]], [EACH, (1,)], [EACH, {"a": 1}], [EACH, TensorSpec((), "i4")],
    ([SCALARS, np.zeros(2)], [SCALARS, np.zeros(3)]), {"a": EMPTY, "b": [EACH, "x"]}, (EMPTY, None), (EMPTY, ()), Point(EMPTY, 1),
    TensorSpec((), "i4"), np.zeros(3),
]  # fmt: skip


def refusal_of(value: Any) -> str:
    """Why a value is refused; what it was taken for, if it was not."""
    try:
        return f"taken for {unpack(value, 'worker:3')!r}"
    except WireError as error:
        return str(error)


def test_malformed_value_is_error_of_peer() -> None:
    for value in MALFORMED:
        assert "peer worker:3: not elements of a pipeline" in refusal_of(value), repr(value)


@slow_ok
@given(values)
def test_arbitrary_value_gives_elements_or_wire_error(value: Any) -> None:
    for wrapped in (value, [EACH, value], ([EACH, "a"], value), [ROWS, value], [SCALARS, value]):
        try:
            elements = unpack(wrapped, "peer")
        except WireError:
            continue
        assert same(elements, travel(elements))


def test_nesting_without_end_is_a_wire_error() -> None:
    value: Any = [EACH, "a"]
    for _ in range(100_000):
        value = (value,)
    with pytest.raises(WireError, match="nested too deeply"):
        unpack(value, "peer")


# -- weight and spec -------------------------------------------------------------------------------


def test_element_weight_is_its_memory() -> None:
    assert weigh(np.int64(1)) < 100
    assert weigh(np.zeros(1000)) == pytest.approx(8000, rel=0.05)
    assert weigh((np.zeros(1000), {"a": "x" * 1000, "b": b"y" * 1000})) == pytest.approx(
        10_000, rel=0.1
    )
    assert weigh("\U0001f600" * 1000) == pytest.approx(4000, rel=0.1)
    assert weigh(()) > 0
    assert weigh({}) > 0
    assert weigh(np.zeros(1, "V100")[0]) >= 100


@pytest.mark.parametrize(
    "make",
    [
        # a new text: one that was encoded before weighs more
        lambda: ["".join(["\xe9"] * 100)] * 42_000,
        lambda: [np.zeros(0)] * 57_000,
        lambda: [(np.int8(1), np.int16(1))[i % 2] for i in range(115_000)],
        lambda: [np.zeros(40_000 + i, "u1") for i in range(180)],
    ],
    ids=["texts", "arrays without elements", "numbers of NumPy", "arrays"],
)
def test_safe_codec_takes_seven_mebibytes(make: Callable[[], list[Any]]) -> None:
    elements = make()
    assert 6.5 * 2**20 < sum(map(weigh, elements)) < 7.2 * 2**20
    assert len(travel(elements)) == len(elements)


Other = namedtuple("Other", ["x", "z"])
IMAGE = TensorSpec((None, 3), "f4")
SPEC = {
    "image": (IMAGE, TensorSpec((), str)),
    "at": Point(TensorSpec((), "i8"), TensorSpec(None, "f8")),
}


def fitting() -> dict[str, Any]:
    return {"image": (np.zeros((5, 3), "f4"), "a"), "at": Point(np.int64(1), np.zeros((1, 2)))}


def test_elements_that_fit_their_spec_pass() -> None:
    longer = fitting() | {"image": (np.zeros((6, 3), "f4"), "bc")}
    check_spec([fitting(), fitting(), longer], SPEC)
    check_spec(travel([fitting()]), SPEC)
    check_spec([], SPEC)
    check_spec([None], UNKNOWN_SPEC)
    check_spec([Dataset.range(1)], DatasetSpec(TensorSpec((), "i8")))


@pytest.mark.parametrize(
    "late",
    [
        fitting() | {"image": (np.zeros((5, 4), "f4"), "a")},
        fitting() | {"image": (np.zeros((5, 3)), "a")},
        fitting() | {"at": Point(np.int32(1), np.zeros((1, 2)))},
        {"image": fitting()["image"]},
        "another",
    ],
    ids=["shape", "dtype", "scalar", "keys", "structure"],
)
def test_elements_are_compared_with_spec(late: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="element"):
        check_spec([fitting(), fitting(), late], SPEC)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"image": (np.zeros((5, 3)), "a")}, (r"element\['image'\]\[0\]: expected float32 .*, "
                                             r"given float64")),
        ({"image": (np.zeros((5, 4), "f4"), "a")}, (r"element\['image'\]\[0\]: expected .*\(None, "
                                                   r"3\), given .*\(5, 4\)")),
        ({"image": (np.zeros((5, 3), "f4"), b"a")}, r"element\['image'\]\[1\]: expected <U0"),
        ({"image": (np.zeros((5, 3), "f4"),)}, (r"element\['image'\]: expected a tuple of 2, given "
                                               r"tuple of 1")),
        ({"image": np.zeros((5, 3), "f4")}, (r"element\['image'\]: expected a tuple of 2, given "
                                            r"ndarray")),
        ({"at": (np.int64(1), np.zeros(1))}, (r"element\['at'\]: expected a namedtuple of x, y, "
                                             r"given tuple of 2")),
        ({"at": Other(np.int64(1), np.zeros(1))}, (r"element\['at'\]: expected .* x, y, given "
                                                  r"namedtuple of x, z")),
        ({"at": Point(np.int32(1), np.zeros(1))}, r"element\['at'\]\.x: expected int64"),
        ({"at": Point((), np.zeros(1))}, r"element\['at'\]\.x: expected int64.*, given tuple of 0"),
        ({"at": Point(Dataset.range(1), np.zeros(1))}, (r"element\['at'\]\.x: expected int64.*, "
                                                       r"given a dataset")),
        ({"more": np.int64(1)}, (r"element: expected the keys \['image', 'at'\], given the keys "
                                r"\['image', 'at', 'more'\]")),
    ],
)  # fmt: skip
def test_first_wrong_leaf_is_named(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        check_spec([fitting() | change], SPEC)


def test_array_in_place_of_dataset_is_named() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"element\[0\]: expected a dataset, given ndarray"
    ):
        check_spec([(np.zeros(1),)], (DatasetSpec(TensorSpec((), "i8")),))


@pytest.mark.parametrize("codec", ["", "LZ4"])
@pytest.mark.parametrize(("count", "nbytes"), [(300, 60_000), (1_100, 70_000), (40_000, 80)])
def test_wide_element_is_sent(count: int, nbytes: int, codec: str) -> None:
    element = {f"c{number}": np.full(nbytes // 8, number) for number in range(count)}
    body, frames = safe.encode(compress_batch(pack([element]), codec))
    value = decompress_batch(safe.decode(body, [bytearray(frame) for frame in frames], "p"), "p")
    [back] = unpack(value, "p")
    assert list(back) == list(element)
    assert all(
        np.array_equal(back[name], column) and back[name].flags.writeable
        for name, column in element.items()
    )

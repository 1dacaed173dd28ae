"""The safe codec: round trips, refusals of the sender, and untrusted bytes."""

from __future__ import annotations

import gc
import pickle
import threading
import tracemalloc
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.wire.helpers import Point, Renamed, same, values
from zmqdist import nest
from zmqdist.errors import InvalidArgumentError, WireError
from zmqdist.limits import (
    DEPTH_MAX,
    FRAMES_MAX,
    INLINE_BYTES_MAX,
    NAMEDTUPLE_FIELDS_MAX,
    NAMEDTUPLE_KINDS_MAX,
    SAFE_BODY_BYTES_MAX,
)
from zmqdist.specs import TensorSpec
from zmqdist.wire import safe
from zmqdist.wire.arrays import frozen

slow_ok = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=50)


def travel(value: Any) -> Any:
    body, frames = safe.encode(value)
    return safe.decode(body, [bytearray(frame) for frame in frames], "peer")


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


# -- round trip ------------------------------------------------------------------------------------


@slow_ok
@given(values)
def test_value_round_trip_keeps_types(value: Any) -> None:
    assert same(value, travel(value))


@pytest.mark.parametrize(
    "value",
    [
        True, 1, 1.0,
        2**64, -(2**63) - 1, 10**5000, float("nan"), -0.0, complex("nan+1j"), "\ud800", "a\0", b"", (), [], {}, (1,),
        [1], ((),), {"a": ()}, {1: 2, "a": 3, (1, ("b", None)): 4, np.int64(5): 6}, Point(1, [2]), Renamed(1, 2, 3),
        np.float32(1), np.array(1), np.bool_(True), np.str_("a\0"), np.bytes_(b"a\0"), np.str_("\ud800"),
        np.datetime64("NaT", "s"), np.void(b"ab"),
        np.array([b"", b""]), np.zeros((2, 0)), np.zeros(3, [("a", "i4"), ("b", "f8")])[0], TensorSpec(None, str, "x"),
        TensorSpec((None, 3), np.int64), [True, 1, 1.0, "1", b"1", None],
    ],
    ids=lambda value: f"{type(value).__name__}",
)  # fmt: skip
def test_edge_value_round_trip(value: Any) -> None:
    assert same(value, travel(value))
    assert same([value, (value, {"k": value})], travel([value, (value, {"k": value})]))


def test_large_values_travel_in_frames() -> None:
    small, large = (
        np.arange(INLINE_BYTES_MAX, dtype="u1"),
        np.arange(INLINE_BYTES_MAX + 1, dtype="u1"),
    )
    value = {
        "a": [large, "x" * 2**20, small],
        "b": (b"y" * 2**20, large[::2], np.asfortranarray(large[:-1].reshape(256, 256))),
    }
    body, frames = safe.encode(value)
    assert len(body) < INLINE_BYTES_MAX
    assert len(frames) == 4, "three large parts, and the joined frame with the others"
    assert same(value, travel(value))


def test_few_arrays_above_a_lower_bound_are_frames() -> None:
    value = [np.full(1001, number, "u1") for number in range(6)] + [np.ones(1000, "u1")]
    body, frames = safe.encode(value, 1000)
    assert len(frames) == 4, "further ones of medium size are in the body"
    assert same(value, safe.decode(body, [bytearray(frame) for frame in frames], "peer"))


def test_large_array_is_not_copied() -> None:
    array = np.zeros(2**20)
    _, [frame] = safe.encode([array])
    assert np.shares_memory(np.frombuffer(frame), array)
    body, _ = safe.encode([array])
    received = bytearray(frame)
    [back] = safe.decode(body, [received], "peer")
    assert np.shares_memory(np.frombuffer(received), back)


def test_body_is_snapshot() -> None:
    array, data, items = np.zeros(3), bytearray(b"abc"), [1]
    body, frames = safe.encode((array, data, items))
    array[:], data[:], items[:] = 1, b"xyz", [2]
    assert same(safe.decode(body, frames, "peer"), (np.zeros(3), b"abc", [1]))


@pytest.mark.parametrize("count", [3, 2**20])
@pytest.mark.parametrize("wrap", [bytes, bytearray])
def test_received_arrays_are_private(count: int, wrap: Any) -> None:
    sent = np.zeros(count, "u1")
    sent.flags.writeable = False
    body, frames = safe.encode([sent, sent])
    frames = [wrap(frame) for frame in frames]
    one, two = safe.decode(body, frames, "peer")
    one[:] = 1
    assert not two.any()
    assert not sent.any()
    if wrap is bytes:
        assert safe.decode(body, frames, "peer")[0].sum() == 0


def test_buffers_become_bytes_and_memmap_array(tmp_path: Any) -> None:
    assert travel([bytearray(b"a"), memoryview(b"abcd")[::2]]) == [b"a", b"ac"]
    assert same(
        np.ones(3, "u1"), travel(np.memmap(tmp_path / "map", "u1", "w+", shape=3) + np.uint8(1))
    )


def test_namedtuple_is_rebuilt_as_one_kind() -> None:
    one, two = travel([Point(1, 2), Point(3, 4)])
    assert type(one) is type(two) is not Point
    assert (one.x, two._fields) == (1, ("x", "y"))
    again = pickle.loads(pickle.dumps(one))
    assert type(again) is type(one)
    assert again == one
    nest.assert_same_structure(Point(0, 0), one)


def test_long_lists_travel_in_body() -> None:
    value = [list(range(200_000)), ["text"] * 100_000, [0.5] * 100_000]
    body, frames = safe.encode(value)
    assert len(body) > 2**20
    assert not frames
    assert travel(value) == value


# -- what is refused at the sender -----------------------------------------------------------------


class Colour(IntEnum):
    RED = 1


class Named(dict):  # type: ignore[type-arg]
    pass


Wide = namedtuple("Wide", [f"f{i}" for i in range(NAMEDTUPLE_FIELDS_MAX + 1)])
Odd = type("Odd name", (tuple,), {"_fields": ("a",)})


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([1, {"lock": (threading.Lock(),)}], (r"value\[1\]\['lock'\]\[0\] is a _thread.lock: only "
                                             r"None, bool")),
        (Point(1, [object()]), r"value\.y\[0\] is a builtins\.object"),
        ({1: 2, 3: Decimal(1)}, r"value\[3\] is a decimal\.Decimal"),
        (Colour.RED, r"value is a .*Colour"),
        ([OrderedDict()], r"value\[0\] is a collections\.OrderedDict"),
        (defaultdict(int), "value is a collections.defaultdict"),
        (Named(), "value is a .*Named"),
        ({1, 2}, "value is a builtins.set"),
        ({"a": np.array([1, "x"], object)}, r"value\['a'\] is an array .* holds Python objects"),
        (np.zeros(2, [("a", object)]), "Python objects"),
        ([np.ma.masked_array([1])], r"MaskedArray.*array\.filled"),
        ({frozenset(): 1}, "value has a key of type frozenset"),
        ({"a": {(1, object()): 1}}, r"value\['a'\] has a key of type tuple"),
        (lambda: 0, "value is a builtins.function"),
        (np.float64, "value is a builtins.type"),
        (np.void(b"x" * 2**20), "scalar of 1048576 bytes"),
        (nested(DEPTH_MAX + 1), f"nested deeper than {DEPTH_MAX}"),
        (Odd([1]), "no proper names"),
        (Wide(*Wide._fields), "no proper names"),
    ],
    ids=lambda value: None,
)  # fmt: skip
def test_unsupported_value_is_named_with_place(value: Any, problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=problem):
        safe.encode(value)


@dataclass
class Record:
    x: int = 1


@pytest.mark.parametrize(
    ("value", "way"),
    [
        (OrderedDict(a=1), "dict(x)"),
        (Colour.RED, "x.name or x.value"),
        ({1}, "list(x)"),
        (range(3), "list(x)"),
        (datetime(2020, 1, 1), "x.isoformat(), or np.datetime64(x)"),
        (timedelta(1), "np.timedelta64(x)"),
        (Record(), "dataclasses.asdict(x), of which Class(**fields) makes it again"),
        (Decimal(1), "str(x)"),
        (Path("a"), "str(x)"),
    ],
)
def test_refusal_says_how_to_convert(value: Any, way: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        safe.encode([value])
    assert str(raised.value).startswith(f"value[0] is a {type(value).__module__}.")
    assert str(raised.value).endswith(f"TensorSpec travel by RPC; pass {way}")


def test_value_that_contains_itself_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    with pytest.raises(InvalidArgumentError, match="contains itself"):
        safe.encode(cycle)


def test_refusal_keeps_no_object_alive() -> None:
    class Odd:
        pass

    odd = Odd()
    gone = weakref.ref(odd)
    gc.disable()
    try:
        with pytest.raises(InvalidArgumentError):
            safe.encode([1, {"a": odd}])
        del odd
        assert gone() is None
    finally:
        gc.enable()


def test_too_long_value_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="as arrays"):
        safe.encode([0.5] * (SAFE_BODY_BYTES_MAX // 9 + 1))


@pytest.mark.parametrize("count", [FRAMES_MAX - 2, FRAMES_MAX - 1, FRAMES_MAX + 500])
def test_value_may_have_more_arrays_than_frames(count: int) -> None:
    value = [np.full(INLINE_BYTES_MAX + 1, number % 256, "u1") for number in range(count)]
    body, frames = safe.encode(value)
    assert len(frames) == min(count, FRAMES_MAX - 1)
    back = safe.decode(body, [bytearray(frame) for frame in frames], "peer")
    assert all(
        np.array_equal(one, two) and two.flags.writeable
        for one, two in zip(value, back, strict=True)
    )


def test_medium_parts_do_not_count_as_body() -> None:
    count = 2 * SAFE_BODY_BYTES_MAX // INLINE_BYTES_MAX
    value = {
        f"{number}": (
            np.full(8192, number),
            np.ones(32, ">f8"),
            "x" * 60_000,
            b"y" * 60_000,
            number,
        )
        for number in range(count)
    }
    body, frames = safe.encode(value)
    assert len(body) < 2**20
    assert [type(frame) for frame in frames] == [bytes], "one joined frame"
    back = safe.decode(body, [bytearray(frame) for frame in frames], "peer")
    assert same(value, back)
    back["1"][0][:] = 7  # each array has memory of its own
    assert same(value["2"], back["2"])


def test_joined_frozen_arrays_stay_frozen() -> None:
    array = frozen(np.arange(8192))
    back = travel([array] * 40)
    assert not any(one.flags.writeable for one in back)
    assert same([np.arange(8192)] * 40, back)


@pytest.mark.parametrize(
    "value", [nested(DEPTH_MAX), {"a": nested(DEPTH_MAX - 1)}, {0: nested(DEPTH_MAX - 1)}]
)
def test_deepest_value_travels(value: Any) -> None:
    assert travel(value) == value


# -- any bytes give a value or a WireError ---------------------------------------------------------


def decoded(body: bytes, frames: list[Any]) -> None:
    """Check that these bytes give a value or a WireError, and that a small body makes a small
    value."""
    tracemalloc.start()
    try:
        safe.decode(body, frames, "the peer")
    except WireError as error:
        assert error.peer == "the peer"  # noqa: PT017
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # The constant is for classes of namedtuples and numpy's machinery; ten times it would be a
    # length field that was believed.
    assert peak < 2**20 + 100 * len(body)


buffers = st.lists(st.binary(max_size=16).map(bytearray), max_size=2)


@slow_ok
@given(st.binary(max_size=64), buffers)
def test_random_bytes_are_value_or_wire_error(body: bytes, frames: list[Any]) -> None:
    decoded(body, frames)


SIDES = [
    0,
    1,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -1,
    -(2**63),
    True,
    1.0,
    None,
]
dtypes_json = st.sampled_from(
    [
        "<f4",
        "|S0",
        "<U0",
        "|V0",
        "|V1",
        "<U999999999",
        "O",
        "bfloat16",
        "<f16/63",
        "<M8[s]",
        "g",
        7,
        "<c16",
    ]
)
few_bytes = st.binary(max_size=16)
shapes = st.lists(st.sampled_from(SIDES), max_size=4)
names = st.text(max_size=3)


def parts(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Strategies for extension types whose content only partly fits their tag."""

    def tagged(tag: int, *fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.tuples(st.just(tag), *(field | inner for field in fields))

    field = st.tuples(names, dtypes_json | inner, st.sampled_from(SIDES), st.none() | inner)
    fields = st.tuples(st.just("fields"), st.lists(field), st.sampled_from(SIDES), st.booleans())
    subarray = st.tuples(st.just("array"), dtypes_json | inner, shapes)
    return st.one_of(
        st.lists(inner, max_size=5),
        st.builds(lambda tag, rest: [tag, *rest], st.integers(-1, 11), st.lists(inner, max_size=5)),
        tagged(4, dtypes_json, shapes, st.booleans(), few_bytes | st.none()),
        tagged(4, fields | subarray, shapes, st.booleans(), few_bytes),
        tagged(5, dtypes_json | fields | subarray | st.sampled_from(["U", "S"]), few_bytes),
        tagged(3, names, st.lists(names, max_size=2), inner, inner),
        tagged(10, shapes, dtypes_json, st.none()),
        st.dictionaries(names | st.integers(0, 3), inner, max_size=3),
    )


items = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(SIDES)
    | dtypes_json
    | st.floats()
    | names
    | few_bytes,
    parts,
    max_leaves=12,
)


@slow_ok
@given(items, buffers)
def test_random_trees_are_value_or_wire_error(item: Any, frames: list[Any]) -> None:
    decoded(msgspec.msgpack.encode(item), frames)


@slow_ok
@given(values, st.data())
def test_damaged_value_is_value_or_wire_error(value: Any, data: st.DataObject) -> None:
    body, frames = safe.encode(value)
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(damaged)))
        damaged[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    decoded(bytes(damaged), [bytearray(frame) for frame in frames])


def _packed(item: Any) -> bytes:
    return msgspec.msgpack.encode(item)


@pytest.mark.parametrize(
    ("body", "frames", "problem"),
    [
        (b"", 0, "truncated"),
        (b"\x01\x01", 0, "trailing"),
        (b"\xdd\xff\xff\xff\xff", 0, "truncated"),
        (b"\xdf\xff\xff\xff\xff", 0, "truncated"),
        (b"\xc6\xff\xff\xff\xff", 0, "truncated"),
        (b"\xdb\xff\xff\xff\xff", 0, "truncated"),
        (b"\xdd\x00\xff\xff\xff" * 60, 0, "truncated"),
        (b"\x91" * 100_000, 0, "recursion"),
        (b"\x92\x01" * 65 + b"\x91\x01", 0, "deeper"),
        (b"\xd6\xff\0\0\0\1", 0, "unknown tag"),
        (b"\xd4\x05\0", 0, "unknown tag"),
        (b"\xa3\xed\xa0\x80", 0, "(utf|UTF)-8"),
        (_packed([]), 0, "unknown tag"),
        (_packed([99]), 0, "unknown tag"),
        (_packed([True]), 0, "unknown tag"),
        (_packed({1: 2}), 0, "not str"),
        (_packed([2, 1]), 0, "zip"),
        (_packed([2, [1], 1]), 0, "type that is not allowed for keys"),
        (_packed([3, "P", ["x"]]), 0, "another number"),
        (_packed([3, "P", ["x", "x"], 1, 2]), 0, "proper names"),
        (_packed([3, "P", ["class"], 1]), 0, "proper names"),
        (_packed([3, "import os", ["x"], 1]), 0, "proper names"),
        (_packed([3, "P", ["__class__"], 1]), 0, "proper names"),
        (_packed([3]), 0, "at least 3"),
        (_packed([4, "<f4", [1], False, b"123"]), 0, "needs 4 bytes, and 3 arrived"),
        (_packed([4, "<f4", [1], False, "1234"]), 0, "bytes belong"),
        (_packed([4, "<f4", [1], 0, b"1234"]), 0, "order"),
        (_packed([4, "<f4", [2**64 - 1], False, b""]), 0, "sizes from 0"),
        (_packed([4, "<f4", [2**40, 2**40], False, b""]), 0, "larger than"),
        (_packed([4, "<f4", [0, 2**40, 2**40], False, b""]), 0, "no array has shape"),
        (_packed([4, "|O", [1], False, b"12345678"]), 0, "no such dtype"),
        (_packed([4, "<f4", [1], False, None]), 0, "a frame is missing"),
        (_packed([4, "<f4", [1], False, None]), 2, "frames are not used"),
        (
            _packed([1, [4, "<f4", [1], False, None], [4, "<f4", [1], False, None]]),
            1,
            "a frame is missing",
        ),
        (_packed(1), 1, "frames are not used"),
        (_packed([6, 1, 2]), 0, "floats"),
        (_packed([8, b"\xff"]), 0, "utf-8"),
        (_packed([9, b"x"]), 0, "the place of bytes in the frames belongs"),
        (_packed([4, "<f4", [1], False, 4]), 0, "the joined frame is missing"),
        (_packed([4, "<f4", [1], False, 4]), 2, "1 frames are not used"),
        (_packed([4, "<f4", [1], False, 5]), 1, "not in the joined frame"),
        (_packed([4, "<f4", [1], False, -4]), 1, "not in the joined frame"),
        (_packed([4, "<f4", [1], False, 2**63]), 1, "not in the joined frame"),
        (_packed([4, "|u1", [2], False, 2]), 1, "2 bytes of the joined frame are not used"),
        (_packed([1, [9, 3], [8, 2]]), 1, "not in the joined frame"),
        (_packed([1, [4, "<f4", [1], False, None], [9, 4]]), 1, "the joined frame is missing"),
        (_packed([1, [9, 4], [4, "<f4", [1], False, None]]), 1, "a frame is missing"),
        (_packed([9, True]), 1, "the place of bytes in the frames belongs"),
        (_packed([10, 3, "<f4", None]), 0, "TensorSpec"),
        (_packed([10, [-1], "<f4", None]), 0, "negative"),
        (_packed([12, "torch", "", [4, "<f4", [1], False, b"1234"], 0]), 0, "items where 4"),
        (_packed([12, "torch", 1, [4, "<f4", [1], False, b"1234"]]), 0, "package or dtype"),
        (_packed([12, "torch", "load", [4, "<f4", [1], False, b"1234"]]), 0, "no dtype"),
        (_packed([12, "os", "load", [4, "<f4", [1], False, b"1234"]]), 0, "no dtype"),
        (_packed([12, "torch", "", [1]]), 0, "no array"),
        (
            _packed([1, *([3, f"P{i}", ["x"], 1] for i in range(NAMEDTUPLE_KINDS_MAX + 1))]),
            0,
            "kinds of namedtuple",
        ),
    ],
    ids=lambda value: None,
)
def test_invalid_bytes_error_names_peer(body: bytes, frames: int, problem: str) -> None:
    with pytest.raises(
        WireError, match=f"peer the peer: not a value of the safe codec: .*{problem}"
    ):
        safe.decode(body, [bytearray(b"1234")] * frames, "the peer")


@pytest.mark.parametrize(
    "filler", [b"\x80", b"\x90", b"\xc0", b"\xa1x", b"\x91\x01", b"\xce\xff\xff\xff\xff"]
)
def test_body_makes_bounded_memory(filler: bytes) -> None:
    count = 20_000
    decoded(b"\xdd" + (count + 1).to_bytes(4, "big") + b"\x01" + filler * count, [])


def test_oversized_body_is_not_decoded() -> None:
    with pytest.raises(WireError, match="at most"):
        safe.decode(bytes(SAFE_BODY_BYTES_MAX + 65_537), [], "peer")


def test_frozen_frame_becomes_read_only_array() -> None:
    body, (frame,) = safe.encode(np.arange(100_000))
    frozen = np.frombuffer(bytes(frame), np.uint8)
    got = safe.decode(body, [frozen], "peer")
    assert got.base is not None
    assert not got.flags.writeable
    assert np.shares_memory(got, frozen)
    assert safe.decode(body, [bytes(frame)], "peer").flags.writeable


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((300, 400)),
        np.asfortranarray(np.zeros((300, 400), ">f4")),
        np.zeros(40_000, "<M8[s]"),
    ],
    ids=["C", "Fortran", "times"],
)
def test_layout_of_one_array_is_known_early(value: np.ndarray[Any, Any]) -> None:
    body, _ = safe.encode(value)
    assert safe.single_array_layout(body, "peer") == (value.dtype, value.shape, value.flags.fnc)


@pytest.mark.parametrize(
    "value", [None, 3, [np.zeros(100_000)], {"a": np.zeros(100_000)}, np.zeros(3), "x" * 100_000]
)
def test_layout_is_none_for_other_values(value: Any) -> None:
    assert safe.single_array_layout(safe.encode(value)[0], "peer") is None


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x95\x04\xa2zz\x91\x01\xc2\xc0"])
def test_invalid_bytes_have_no_layout(body: bytes) -> None:
    with pytest.raises(WireError, match="peer"):
        safe.single_array_layout(body, "peer")

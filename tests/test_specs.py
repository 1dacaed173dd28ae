"""TensorSpec, function and convert."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest

from zmqdist.errors import InvalidArgumentError
from zmqdist.specs import TensorSpec, convert, function

# -- TensorSpec ------------------------------------------------------------------------------------


def test_spec_has_tensorflow_arguments() -> None:
    spec = TensorSpec([None, 3], name="x")
    assert (spec.shape, spec.dtype, spec.name) == ((None, 3), np.dtype(np.float32), "x")
    assert TensorSpec(()).shape == TensorSpec([]).shape == ()
    assert TensorSpec(None).shape is None
    assert TensorSpec(3).shape == TensorSpec([np.int64(3)]).shape == (3,)
    assert repr(spec) == "TensorSpec(shape=(None, 3), dtype=float32, name='x')"


def test_specs_compare_and_pickle_by_content() -> None:
    one, two = TensorSpec((2, None), "i4", "x"), TensorSpec([2, None], np.int32, "x")
    assert one == two == pickle.loads(pickle.dumps(one)) == copy.deepcopy(one)
    assert len({one, two}) == 1
    assert one not in (
        TensorSpec((2, None), "i4"),
        TensorSpec((2, 1), "i4", "x"),
        TensorSpec((2, None), "i8", "x"),
        3,
    )
    with pytest.raises(AttributeError):
        one.shape = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("spec", "array", "problem"),
    [
        (TensorSpec(()), np.float32(1), None),
        (TensorSpec(None, int), np.zeros((1, 2), int), None),
        (TensorSpec((None, 2), int), np.zeros((0, 2), int), None),
        (TensorSpec((), str), np.array("any length"), None),
        (
            TensorSpec((2, None), "i4"),
            np.zeros((3, 1), "i4"),
            "expected int32 of shape (2, None), given int32 of shape (3, 1)",
        ),
        (
            TensorSpec((), "i4", "n"),
            np.int64(1),
            "n: expected int32 of shape (), given int64 of shape ()",
        ),
        (TensorSpec(None, "f4"), np.zeros(2, ">f4"), "expected float32, given >f4 of shape (2,)"),
        (
            TensorSpec((1,)),
            np.zeros((), "f4"),
            "expected float32 of shape (1,), given float32 of shape ()",
        ),
        (
            TensorSpec((), bytes),
            np.array("text"),
            "expected |S0 of shape (), given <U4 of shape ()",
        ),
    ],
)
def test_spec_explains_wrong_array(spec: TensorSpec, array: Any, problem: str | None) -> None:
    assert spec.problem(array) == problem
    assert spec.is_compatible_with(array) == (problem is None)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([-1],), ValueError),
        ((["2"],), TypeError),
        (([1.0],), TypeError),
        (("no",), TypeError),
        (((), object), ValueError),
        (((), "no"), TypeError),
    ],
)
def test_wrong_spec_is_refused(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        TensorSpec(*arguments)


# -- convert ---------------------------------------------------------------------------------------


class Variable:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.arange(3, dtype="i4")


@pytest.mark.parametrize(
    ("value", "spec", "expected"),
    [
        (1, TensorSpec((), "i4"), np.int32(1)),
        (1, TensorSpec(None, "f4"), np.float32(1)),
        (True, TensorSpec((), bool), np.bool_(True)),
        (True, TensorSpec((), "i4"), np.int32(1)),
        (0.1, TensorSpec((), "f4"), np.float32(0.1)),
        (float("inf"), TensorSpec((), "f2"), np.float16("inf")),
        (float("nan"), TensorSpec((), "f4"), np.float32("nan")),
        (2, TensorSpec((), "c8"), np.complex64(2)),
        (1j, TensorSpec((), "c8"), np.complex64(1j)),
        (2**64 - 1, TensorSpec((), "u8"), np.uint64(2**64 - 1)),
        ([[1, 2], [3, 4]], TensorSpec((2, None), "u1"), np.array([[1, 2], [3, 4]], "u1")),
        ((1, 2.5), TensorSpec((2,), "f4"), np.array([1, 2.5], "f4")),
        ([], TensorSpec((0,)), np.zeros(0, "f4")),
        ("abc", TensorSpec((), str), np.array("abc")),
        (["a", "bcd"], TensorSpec((2,), "U3"), np.array(["a", "bcd"])),
        (b"abc", TensorSpec((), bytes), np.array(b"abc")),
        (np.int32(1), TensorSpec((), "i4"), np.int32(1)),
        ([np.int32(1), np.int32(2)], TensorSpec((2,), "i4"), np.array([1, 2], "i4")),
        (Variable(), TensorSpec((3,), "i4"), np.arange(3, dtype="i4")),
    ],
)
def test_weak_numbers_take_dtype_of_spec(value: Any, spec: TensorSpec, expected: Any) -> None:
    array = convert(value, spec)
    assert type(array) is np.ndarray
    assert array.dtype == expected.dtype
    assert np.array_equal(array, expected, equal_nan=expected.dtype.kind in "fc")


@pytest.mark.parametrize(
    ("value", "spec", "message"),
    [
        (2**31, TensorSpec((), "i4"), "expected int32"),
        (-1, TensorSpec((), "u1"), "expected uint8"),
        (1.0, TensorSpec((), "i4", "n"), r"n: expected int32, given float 1\.0"),
        (1, TensorSpec((), bool), "expected bool, given int 1"),
        (1j, TensorSpec((), "f4"), "expected float32, given complex"),
        (1e300, TensorSpec((), "f4"), "cannot hold float 1e"),
        (70_000, TensorSpec((), "f2"), "cannot hold int 70000"),
        (2**24 + 1, TensorSpec((), "f4"), "cannot hold int 16777217"),
        ([1, 2**53 + 1], TensorSpec((2,), "f8"), "cannot hold int 9007199254740993"),
        (10**5000, TensorSpec((), "f8"), "expected float64"),
        (10**5000, TensorSpec((), bool), "given int of 16610 bits"),
        ("abc", TensorSpec((), "U2"), "cannot hold str 'abc'"),
        (b"a\0", TensorSpec((), bytes), "cannot hold bytes"),
        ("abc", TensorSpec((), bytes), "given str"),
        ("1", TensorSpec((), "i4"), "given str '1'"),
        (1, TensorSpec((), "M8[s]"), r"expected datetime64\[s\], given int 1"),
        (None, TensorSpec(()), "given object"),
        (np.int64(1), TensorSpec((), "i4"), "expected int32 of shape (), given int64"),
        (np.float64(1), TensorSpec((), "f4"), "given float64"),
        ([np.int64(1), 2], TensorSpec((2,), "i4"), "given int64"),
        ([1, 2], TensorSpec((3,), "i4"), r"of shape \(3,\), given int32 of shape \(2,\)"),
        (1, TensorSpec((1,), "i4"), "of shape"),
        ([[1], [2, 3]], TensorSpec(None, "i4"), "inhomogeneous"),
        ([np.zeros(1), np.zeros(2)], TensorSpec(None, "f8", "x"), "x: not an array"),
    ],
    ids=lambda value: "",  # some of the numbers are too long to be printed
)
def test_lossy_conversion_is_refused(value: Any, spec: TensorSpec, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message.replace("()", r"\(\)")):
        convert(value, spec)


def test_ml_dtypes_numbers_are_checked() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert convert(1.5, TensorSpec((), ml_dtypes.bfloat16)) == 1.5
    for value, dtype in ((257, ml_dtypes.bfloat16), (1.5, ml_dtypes.int4), (300, ml_dtypes.int4)):
        with pytest.raises(InvalidArgumentError):
            convert(value, TensorSpec((), dtype))


# -- function --------------------------------------------------------------------------------------


@function(
    input_signature=[TensorSpec((), np.int32)], output_signature={"y": TensorSpec((), np.int32)}
)
def doubled(x: int) -> dict[str, int]:
    """Twice."""
    return {"y": 2 * x}


@function
def plain(x: int) -> int:
    return x


class Model:
    scale = 3

    @function(input_signature=[TensorSpec(())])
    def run(self, x: float) -> float:
        return self.scale * x


def test_decorated_function_keeps_name_and_specs() -> None:
    assert doubled(3) == {"y": 6}
    assert (doubled.__name__, doubled.__doc__, doubled.__module__) == (
        "doubled",
        "Twice.",
        __name__,
    )
    assert doubled.input_signature == [TensorSpec((), np.int32)]
    assert doubled.output_signature == {"y": TensorSpec((), np.int32)}
    assert plain(3) == 3
    assert plain.input_signature is plain.output_signature is None
    assert function(len, [TensorSpec(None)])([1]) == 1
    assert Model().run(2) == 6
    assert Model().run.input_signature == [TensorSpec(())]


def test_decorated_function_pickles_by_name() -> None:
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    assert pickle.loads(pickle.dumps(Model.run)) is Model.run
    n = 5
    local = function(lambda x: x + n, input_signature=(TensorSpec(()),))
    back = pickle.loads(cloudpickle.dumps(local))
    assert back(1) == 6
    assert back.input_signature == (TensorSpec(()),)


def test_decorated_function_of_main_may_recurse() -> None:
    names: dict[str, Any] = {"__name__": "__main__", "function": function}
    exec("@function\ndef fact(n): return n * fact(n - 1) if n else 1", names)
    assert pickle.loads(cloudpickle.dumps(names["fact"]))(4) == 24


def test_signature_is_copy() -> None:
    signature = [TensorSpec(())]
    decorated = function(plain, signature)
    signature.append(TensorSpec(()))
    assert decorated.input_signature == [TensorSpec(())]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([TensorSpec(())],), "wraps a callable, not list"),
        ((len, TensorSpec(())), "list or tuple with one item for each argument"),
        ((len, [np.int32]), "holds TensorSpecs only"),
        ((len, [], 3), "output_signature holds TensorSpecs only"),
    ],
)
def test_wrong_signatures_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        function(*arguments)

"""The trusted codec. Tests that depend on `__main__` run in a child process, which has another
`__main__`."""

from __future__ import annotations

import functools
import gc
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.wire.helpers import Point, arrays, containers, leaves, same
from zmqdist.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    LostStart,
    OpError,
    OutOfRangeError,
    UnknownError,
    WireError,
    WorkerLost,
)
from zmqdist.limits import ERROR_BYTES_MAX, FRAMES_MAX, INLINE_BYTES_MAX
from zmqdist.specs import TensorSpec, function
from zmqdist.transport.arrays import freeze
from zmqdist.wire import trusted
from zmqdist.wire.trusted import (
    RemoteTraceback,
    describe,
    pack,
    pack_call,
    pack_error,
    pack_function,
    pack_function_parts,
    unpack,
    unpack_error,
    unpack_parts,
)

slow_ok = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=50)


def travel(value: Any) -> Any:
    packed = pack(value)
    return unpack(packed) if isinstance(packed, bytes) else unpack_parts(packed)


def run_python(*arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(trusted.__file__).parents[2])}
    subprocess.run([sys.executable, *arguments], env=environment, check=True)


def in_main(source: str) -> dict[str, Any]:
    """Run a script as `__main__`, and return its names. No importable module has these names, as at
    a receiver."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    return names


# -- values ----------------------------------------------------------------------------------------


@slow_ok
@given(st.recursive(leaves, containers, max_leaves=8))
def test_pickled_value_round_trip(value: Any) -> None:
    assert same(value, travel(value))


@given(arrays())
def test_unpickled_arrays_are_private(array: np.ndarray) -> None:
    sent = array.copy()
    back = travel([array])[0]
    assert back.flags.writeable
    if back.size and back.dtype.itemsize:
        back.reshape(-1).view("V" + str(back.dtype.itemsize))[0] = b"\xff" * back.dtype.itemsize
    assert same(sent, array)


@pytest.mark.parametrize("size", [3, 10_000])
@pytest.mark.parametrize("layout", ["C", "F", "strided", "read-only"])
def test_small_packed_array_is_snapshot(size: int, layout: str) -> None:
    array = np.arange(2 * size, dtype="u2").reshape(2, size)
    if layout == "F":
        array = np.asfortranarray(array)
    view = array[:, ::2] if layout == "strided" else array[:]
    view.flags.writeable = layout != "read-only"
    expected, packed = view.copy("K"), pack({"a": view})
    array[:] = 0
    assert isinstance(packed, bytes)
    back = unpack(packed)
    assert same(expected, back["a"])
    assert back["a"].flags.writeable
    assert back["a"].flags.f_contiguous == expected.flags.f_contiguous


@pytest.mark.parametrize(
    ("count", "bytes_each", "parts"),
    [
        (1, INLINE_BYTES_MAX - 1000, 0),
        (1, INLINE_BYTES_MAX + 1, 1),
        (3, INLINE_BYTES_MAX - 1000, 0),
        (3, INLINE_BYTES_MAX + 1, 3),
        (FRAMES_MAX + 10, INLINE_BYTES_MAX + 1, FRAMES_MAX - 2),
    ],
)
def test_large_arrays_are_separate_parts(count: int, bytes_each: int, parts: int) -> None:
    packed = pack([np.full(bytes_each, n % 251, "u1") for n in range(count)])
    assert isinstance(packed, bytes) == (count * bytes_each < INLINE_BYTES_MAX)
    if isinstance(packed, list):
        assert len(packed) == 1 + parts
    assert all(
        (array == n % 251).all()
        for n, array in enumerate(
            travel([np.full(bytes_each, n % 251, "u1") for n in range(count)])
        )
    )


def test_long_text_is_list_of_one_blob() -> None:
    packed = pack("x" * INLINE_BYTES_MAX)
    assert isinstance(packed, list)
    assert unpack_parts(packed) == "x" * INLINE_BYTES_MAX


def test_writable_parts_become_arrays() -> None:
    packed = pack(np.zeros(2**20))
    assert isinstance(packed, list)
    received = bytearray(packed[1])
    assert np.shares_memory(unpack_parts([packed[0], received]), np.frombuffer(received))
    read_only = bytes(packed[1])
    back = unpack_parts([packed[0], read_only])
    back[:] = 1
    assert not any(read_only)


@pytest.mark.parametrize("layout", ["C", "F"])
def test_large_array_is_packed_without_copy(layout: Any) -> None:
    array = np.zeros((2**10, 2**10), order=layout)
    packed = pack([1, array])
    assert isinstance(packed, list)
    assert np.shares_memory(np.frombuffer(packed[1]), array)


def test_frozen_array_arrives_read_only() -> None:
    for count in (10, 2**20):
        frozen = freeze(np.arange(count))
        packed = pack(frozen)
        if isinstance(packed, list):
            assert np.shares_memory(np.frombuffer(packed[1]), frozen)
        back = travel(frozen)
        assert not back.flags.writeable
        assert np.array_equal(back, frozen)


def test_read_only_array_parts_become_arrays() -> None:
    frozen = freeze(np.arange(2**20))
    packed = pack(frozen)
    back = unpack_parts([packed[0], frozen.view(np.uint8)])
    assert np.shares_memory(back, frozen)


class Foreign:
    """An object of another package that gives its live memory to the pickle."""

    def __init__(self, data: bytearray) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Foreign, (pickle.PickleBuffer(self.data),)


def test_packed_arrays_may_be_in_cycles() -> None:
    """A memoryview that was exported to another object of the same cycle crashes the collector of
    Python 3.11."""
    for _ in range(5):
        packed = pack([np.zeros(2**16), np.zeros(2**16)])
        assert isinstance(packed, list)
        cycle: list[Any] = [packed, [np.frombuffer(part, np.uint8) for part in packed]]
        cycle.append(cycle)
        del cycle, packed
        gc.collect()


def test_foreign_large_memory_is_not_copied() -> None:
    data = bytearray(INLINE_BYTES_MAX * 2)
    packed = pack(Foreign(data))
    assert isinstance(packed, list)
    assert np.shares_memory(np.frombuffer(packed[1], np.uint8), np.frombuffer(data, np.uint8))
    assert not any(unpack_parts([packed[0], bytes(packed[1])]).data)


def test_object_arrays_and_shared_arrays_travel() -> None:
    array = np.zeros(100_000)
    objects = np.empty(2, object)
    objects[:] = [array, {"a": array}]
    back = travel([objects, array])
    assert back[0][0] is back[1]
    assert back[0][1]["a"] is back[1]
    assert back[1].flags.writeable


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, "a"), {}), (((1,), {}), {}), ((np.zeros(3),), {"x": 1}), ((), {"x": [1]})],
)
def test_call_round_trip(args: Any, kwargs: Any) -> None:
    packed = pack_call(args, kwargs)
    assert isinstance(packed, bytes)
    assert same((args, kwargs), unpack(packed))


def test_class_of_script_travels_by_value() -> None:
    names = in_main("class Pair:\n    def __init__(self, a): self.a = a\npair = Pair(3)")
    blob = pack(names["pair"])
    assert isinstance(blob, bytes)
    code = f"from zmqdist.wire.trusted import unpack; assert unpack({blob!r}).a == 3"
    run_python("-c", code)


# -- what cannot be pickled ------------------------------------------------------------------------


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def _capturing(value: Any) -> Any:
    return lambda: value


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (LOCK, r"value, a _thread\.lock, cannot be pickled: TypeError: cannot pickle"),
        ([1, {"a": (LOCK,)}], r"value\[1\]\['a'\]\[0\], a _thread\.lock"),
        (Point(1, Holder([LOCK])), r"value\[1\]\.held\[0\], a _thread\.lock"),
        (_capturing([LOCK]), r"value, which captures 'value'\[0\], a _thread\.lock"),
        (functools.partial(print, 1, file=LOCK), r"value\.keywords\['file'\], a _thread\.lock"),
        (np.array([1, LOCK], object), r"value\[1\], a _thread\.lock"),
        (Holder(LOCK).__init__, r"value\.__self__\.held, a _thread\.lock"),
        ((x for x in ()), "value, a generator"),
    ],
    ids=lambda value: None,
)
def test_unpicklable_value_is_named_with_place(value: Any, problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=problem) as caught:
        pack(value)
    assert caught.value.__cause__ is None, "the text says all"


def test_unpicklable_arguments_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^args\[1\], a _thread\.lock"):
        pack_call((1, LOCK), {})
    with pytest.raises(InvalidArgumentError, match=r"^kwargs\['x'\]\[0\], a _thread\.lock"):
        pack_call((1,), {"x": [LOCK]})


def test_captured_lock_is_named() -> None:
    names = in_main("import threading\nguard = threading.Lock()\ndef work():\n    with guard: pass")
    with pytest.raises(
        InvalidArgumentError, match=r"^__main__\.work, which captures 'guard', a _thread\.lock"
    ):
        pack_function(names["work"])


def test_cyclic_value_with_lock_is_refused() -> None:
    cycle: list[Any] = []
    cycle += [cycle, LOCK]
    with pytest.raises(InvalidArgumentError, match=r"_thread\.lock"):
        pack(cycle)


# -- functions -------------------------------------------------------------------------------------


def importable(x: int) -> int:
    return x + 1


def test_importable_function_travels_by_name() -> None:
    blob = pack_function(importable)
    assert len(blob) < 100
    assert unpack(blob) is importable


def test_functions_of_script_work_elsewhere() -> None:
    names = in_main(
        "N = 5\ndef helper(x): return x + N\ndef work(x): return [helper(x), (lambda: x * N)()]"
    )
    blob = pack_function(names["work"])
    run_python(
        "-c", f"from zmqdist.wire.trusted import unpack; assert unpack({blob!r})(2) == [7, 10]"
    )


def test_captured_large_arrays_are_separate_parts() -> None:
    plain, read_only, frozen = np.ones(2**14), np.ones(2**14), freeze(np.ones(2**14))
    read_only.flags.writeable = False
    pickled, *parts = pack_function_parts(lambda: (plain, read_only, frozen))
    assert len(pickled) < 2000
    places = {np.frombuffer(part, np.uint8).__array_interface__["data"][0] for part in parts}
    assert places == {array.__array_interface__["data"][0] for array in (plain, read_only, frozen)}
    there = [part if memoryview(part).readonly else bytearray(part) for part in parts]
    arrays = unpack_parts([pickled, *there])()
    assert [array.sum() for array in arrays] == [2.0**14] * 3
    arrays[1][:] = 0
    assert read_only.sum() == 2**14


def test_small_function_is_one_blob() -> None:
    small = np.ones(3)
    blob = pack_function_parts(lambda: small)
    assert isinstance(blob, bytes)
    assert unpack(blob)().sum() == 3
    with pytest.raises(InvalidArgumentError, match="captures 'LOCK'"):
        pack_function_parts(
            in_main("import threading\nLOCK = threading.Lock()\ndef f(): return LOCK")["f"]
        )


def test_captured_array_is_writable_snapshot() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    back = unpack(pack_function(lambda: array))()
    assert back is not array
    assert back.flags.writeable


def test_module_can_travel_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helpers_by_value.py").write_text("def double(x): return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import helpers_by_value

    cloudpickle.register_pickle_by_value(helpers_by_value)
    try:
        blob = pack_function(helpers_by_value.double)
    finally:
        cloudpickle.unregister_pickle_by_value(helpers_by_value)
    run_python("-c", f"from zmqdist.wire.trusted import unpack; assert unpack({blob!r})(2) == 4")


def test_missing_module_error_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def work(): pass\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    blobs = [pack_function(only_here.work), pack([only_here.Thing()])]
    monkeypatch.delitem(sys.modules, "only_here")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(tmp_path)])
    for blob in blobs:
        with pytest.raises(
            FailedPreconditionError,
            match=r"module 'only_here' is not importable in .* are pickled by name; .*PYTHONPATH",
        ):
            unpack(blob)


def test_module_version_error_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = pack_function(importable)
    monkeypatch.delattr(sys.modules[__name__], "importable")
    with pytest.raises(
        FailedPreconditionError, match=r"Can't get attribute 'importable'.*sender's version"
    ):
        unpack(blob)


def test_describe_names_all_callables() -> None:
    decorated = function(importable, [TensorSpec((), np.int64)])
    here = __name__
    assert (
        describe(importable)
        == describe(decorated)
        == describe(functools.partial(importable, 1))
        == f"{here}.importable"
    )
    assert describe(Holder(1).__init__) == f"{here}.Holder.__init__"
    assert describe(Holder(1)) == describe(Holder) == f"{here}.Holder"
    assert describe(len) == "builtins.len"


# -- errors ----------------------------------------------------------------------------------------


class Odd(Exception):
    """An exception that can be pickled, but whose constructor cannot be called with its args."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code


class Prefixed(Exception):
    """An exception whose constructor accepts its args, and changes them."""

    def __init__(self, text: str) -> None:
        super().__init__("sorry: " + text)


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _noted(error: BaseException) -> BaseException:
    error.__dict__["__notes__"] = ["a note"]
    return error


def raised(error: BaseException) -> BaseException:
    try:
        try:
            raise error
        except OSError:
            raise
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad", 3), KeyError("k"), FileNotFoundError(2, "No such file", "f.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ZeroDivisionError(), Odd(7, "no"), Prefixed("no"), Broken(1), OpError(None, None, "m", 3), WireError("p", "x"),
        InvalidArgumentError(None, None, "m", {"k": 1}), WorkerLost("f", (LostStart("w", 1, -9, "log"),)), KeyboardInterrupt(),
        SystemExit(3), _noted(ValueError("n")), ValueError(np.zeros(3)),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_exception_keeps_class_and_traceback(error: BaseException) -> None:
    blob = pack_error(raised(error))
    one, two = unpack_error(blob), unpack_error(blob)
    assert one is not two
    assert type(one) is type(error)
    assert same(error.args, one.args)
    if type(error) is not Broken:
        assert str(one) == str(error)
    assert {k: v for k, v in one.__dict__.items() if k != "args"} == {
        k: v for k, v in error.__dict__.items() if k != "args"
    }
    assert isinstance(one.__cause__, RemoteTraceback)
    assert "in raised" in str(one.__cause__)
    assert one.__traceback__ is None


def test_stop_iteration_ends_no_loop() -> None:
    error = unpack_error(pack_error(raised(StopIteration(3))))
    assert type(error) is OutOfRangeError
    assert str(error) == "StopIteration: 3"
    assert "StopIteration" in str(error.__cause__)


class Locked(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class Explosive(Exception):
    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise RuntimeError("cannot be rebuilt")


def _json_error(size: int) -> Exception:
    return json.JSONDecodeError("Expecting value", "1," * size, 2 * size - 2)


class Keyword(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


LEFT_OUT = "(a _thread.lock that cannot be pickled was left out)"
BIG = 3 * ERROR_BYTES_MAX

ODD_ERRORS: list[tuple[Any, str, dict[str, Any]]] = [
    (lambda: Locked(), "^locked$", {"lock": LEFT_OUT}),
    (lambda: _noted(Locked()), "^locked$", {"lock": LEFT_OUT, "__notes__": ["a note"]}),
    (lambda: _noted(_json_error(1)), r"line 1 column 1 \(char 0\)$", {"__notes__": ["a note"], "doc": "1,"}),
    (lambda: _json_error(BIG), (rf"line 1 column {2 * BIG - 1} \(char "
                               rf"{2 * BIG - 2}\)$"), {"pos": 2 * BIG - 2}),
    (lambda: UnicodeDecodeError("utf-8", b"a" * BIG + b"\xff", BIG, BIG + 1, "bad"),
     (rf"^'utf-8' codec can't decode byte 0xff in position 16: bad \(position {BIG} of {BIG + 1}, "
     rf"of which only"), {"start": 16}),
    (lambda: UnicodeEncodeError("ascii", "\xff" * BIG, 0, BIG, "bad"), "characters in position 0-63: bad", {"end": 64}),
    (lambda: ValueError("x" * BIG), "the last of them", {}),
    (lambda: ValueError(b"x" * BIG, 3), r"a bytes of \d+ bytes was left out\)', 3\)", {}),
    (lambda: ValueError(*range(2**20)), r"1048574, 1048575\)$", {}),
    (lambda: ValueError("v", threading.Lock()), (r"^\('v', '\(a _thread.lock that cannot be "
                                                r"pickled"), {}),
    (lambda: RuntimeError("outer", Odd(7, "no")), r"^\('outer', Odd\('no \(7\)'\)\)$", {}),
    (lambda: Keyword(code=3), "^code 3$", {"code": 3}),
    (lambda: Slotted(4), "^$", {"code": 4}),
    (lambda: FileNotFoundError(2, "no", "/f", threading.Lock()), "", {"errno": 2}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ODD_ERRORS)))
def test_large_exception_keeps_class(number: int) -> None:
    make, text, attributes = ODD_ERRORS[number]
    error = make()
    blob = pack_error(raised(error))
    back = unpack_error(blob)
    assert len(blob) < 2 * ERROR_BYTES_MAX
    assert type(back) is type(error)
    assert re.search(text, str(back)), str(back)[-200:]
    assert {name: getattr(back, name) for name in attributes} == attributes
    assert "in raised" in str(back.__cause__)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups of exceptions")
def test_group_names_count_of_missing_members() -> None:
    inner = ExceptionGroup("inner", [Odd(7, "no"), Explosive("x")])  # type: ignore[name-defined]  # noqa: F821
    error = ExceptionGroup("outer", [ValueError("v"), Locked(), inner])  # type: ignore[name-defined]  # noqa: F821
    back = unpack_error(pack_error(raised(error)))
    assert type(back) is type(error)
    assert str(back) == "outer (3 sub-exceptions)"
    value, locked, group = back.exceptions  # type: ignore[attr-defined]
    assert (type(value), type(locked), locked.lock) == (ValueError, Locked, LEFT_OUT)
    assert [type(member) for member in group.exceptions] == [Odd, Explosive]
    many = ExceptionGroup("many", [ValueError(str(n) * 1000) for n in range(3000)])  # type: ignore[name-defined]  # noqa: F821
    members = unpack_error(pack_error(raised(many))).exceptions  # type: ignore[attr-defined]
    assert (type(members[0]), str(members[-1])) == (ValueError, "2936 more errors were left out")


def test_exception_is_rebuilt_without_its_own_way() -> None:
    assert type(unpack_error(pack_error(Explosive("x")))) is Explosive


def test_unimportable_exception_is_unknown_error(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = pack_error(raised(Odd(7, "no")))
    monkeypatch.delattr(sys.modules[__name__], "Odd")
    back = unpack_error(blob)
    assert type(back) is UnknownError
    assert str(back).endswith("Odd: no (7)")


def test_exception_class_of_script_returns(tmp_path: Path) -> None:
    script = """
import subprocess, sys
from zmqdist.wire.trusted import *
class Mine(Exception): pass
def work(): raise Mine("from afar")
there = ("import sys; from zmqdist.wire.trusted import *\\n"
  "try: unpack(sys.stdin.buffer.read())()\\n"
  "except Exception as error: sys.stdout.buffer.write(pack_error(error))")
back = unpack_error(subprocess.run([sys.executable, "-c", there], input=pack_function(work), stdout=subprocess.PIPE, check=True).stdout)
assert type(back) is Mine, type(back)
assert "from afar" in str(back.__cause__) and "in work" in str(back.__cause__)
"""
    path = tmp_path / "script.py"
    path.write_text(script)
    run_python(str(path))


def test_handmade_module_is_not_importable() -> None:
    assert trusted.is_importable_module(sys)
    assert not trusted.is_importable_module(types.ModuleType("sys"))


def test_parts_in_cycle_can_be_collected() -> None:
    """The test runs in a process of its own, because the bug crashed the interpreter."""
    program = """
import gc, numpy as np
from zmqdist.wire import trusted
for _ in range(20):
    array = np.ones(10**6)
    cycle = [trusted.pack(array), array]
    cycle.append(cycle)
    del cycle, array
    gc.collect()
print("whole")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


class Ends(Exception):
    def __str__(self) -> str:
        raise SystemExit

    def __reduce__(self) -> Any:
        raise SystemExit


def test_hostile_exception_is_packed() -> None:
    error = unpack_error(pack_error(raised(Ends())))
    assert type(error) is Ends
    assert "Ends" in str(error.__cause__)


def test_traceback_survives_long_text() -> None:
    back = unpack_error(pack_error(raised(ValueError("x" * BIG))))
    assert "in raised" in str(back.__cause__)


def test_error_that_contains_itself_arrives() -> None:
    error = Locked()
    error.args = (error,)
    error.same, error.again = error, [error]  # type: ignore[attr-defined]
    back = unpack_error(pack_error(error))
    assert type(back) is Locked
    assert type(back.args[0]) is UnknownError


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups of exceptions")
def test_group_of_any_size_keeps_class() -> None:
    wide = ExceptionGroup("wide", [ValueError("x" * 100_000) for _ in range(60)])  # type: ignore[name-defined]  # noqa: F821
    outer = ExceptionGroup("outer", [wide, Odd(7, "no"), Locked()])  # type: ignore[name-defined]  # noqa: F821
    deep = outer
    for _ in range(300):
        deep = ExceptionGroup("deep", [deep])  # type: ignore[name-defined]  # noqa: F821
    for error in (wide, outer, deep, ExceptionGroup("m" * BIG, [Locked()])):  # type: ignore[name-defined]  # noqa: F821
        blob = pack_error(raised(error))
        assert len(blob) < 2 * ERROR_BYTES_MAX
        assert type(unpack_error(blob)) is type(error)
    inner, odd, locked = unpack_error(pack_error(outer)).exceptions  # type: ignore[attr-defined]
    assert {type(member) for member in inner.exceptions} == {ValueError}
    assert (type(odd), type(locked)) == (Odd, Locked)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (len, "builtins.len"),
        (str.upper, "str.upper"),
        (bytes.__add__, "bytes.__add__"),
        ("a".upper, "str.upper"),
        (int.from_bytes, "int.from_bytes"),
        (functools.partial(str.upper), "str.upper"),
        (OrderedDict, "collections.OrderedDict"),
    ],
)
def test_function_name_of_builtins(fn: Any, name: str) -> None:
    assert trusted.describe(fn) == name
    assert callable(trusted.unpack(trusted.pack_function(fn)))

"""Functions that are pickled once, and functions that are pickled each time."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest

from tests.wire.test_trusted import in_main
from zmqdist.errors import InvalidArgumentError
from zmqdist.specs import TensorSpec, function
from zmqdist.wire.functions import FunctionCache
from zmqdist.wire.trusted import unpack, unpack_parts


def lookup(cache: FunctionCache, fn: Callable[..., Any]) -> tuple[Any, bool]:
    """Return the pickle of a function, and whether the function captures nothing mutable."""
    constant = cache.pack_constant(fn)
    return (cache.pack_changing(fn), False) if constant is None else (constant, True)


STABLE = {
    "nothing captured": "def f(x): return x",
    "a number": "N = 5\ndef f(x): return x + N",
    "a nested tuple": "N = (1, ('a', b'b', None), frozenset({2.5, 1j}))\ndef f(x): return N",
    "a module": "import math\nimport os.path\ndef f(x): return math.floor(x), os.path.join",
    "numpy": "import numpy as np\nzero = np.float64(0)\ndef f(x): return np.sum(x) + zero",
    "numpy's functions by themselves": "from numpy import sum, float64\ndef f(x): return sum(x) + "
    "float64(1)",
    "an importable class": "from fractions import Fraction\ndef f(x): return Fraction(x)",
    "another function": "N = 5\ndef g(x): return x + N\ndef f(x): return g(x)",
    "functions that call each other": "def g(x): return f(x - 1)\ndef f(x): return x and g(x)",
    "itself in a closure": "def make():\n  def f(x): return x and f(x - 1)\n  return f\nf = make()",
    "a default": "def f(x=1, *, y=(2,)): return x, y",
    "a cell": "def make(n):\n  return lambda x: x + n\nf = make(3)",
    "a cell without a value": "def make():\n  def f(x): return x or late\n  return f\n  late = "
    "1\nf = make()",
    "a builtin": "def f(x): return len(x)",
    "a name that is nowhere": "def f(x): return nowhere",
    "a partial": "import functools\ndef g(a, b, *, c): return a, b, c\nf = functools.partial(g, "
    "1, c=2)",
    "an inner function's global": "N = 5\ndef f(x):\n  def inner(): return N\n  return inner()",
    "a comprehension's global": "N = 5\ndef f(x): return [N for _ in x]",
    "an attribute": "def f(x): return x\nf.limit = 3",
    "a mutable global with an attribute's name": "data = [1]\ndef f(x): return x.data",
    "specs": "from zmqdist.specs import *\n@function(input_signature=[{'a': "
    "TensorSpec(())}])\ndef f(x): return x",
    "a method of a str": "f = 'x'.join",
    "a cached function": "import functools\n@functools.cache\ndef f(x): return x and f(x - 1)",
    "another cached function": "import functools\n@functools.lru_cache(3)\ndef g(x): return "
    "x\ndef f(x): return g(x)",
}

MUTABLE = {
    "a list": "N = [5]\ndef f(x): return N",
    "a dict in a tuple": "N = (1, {})\ndef f(x): return N",
    "an array": "import numpy as np\nN = np.zeros(1)\ndef f(x): return N",
    "an instance": "class C: pass\nc = C()\ndef f(x): return c",
    "a class of the main script": "class C: limit = 1\ndef f(x): return C",
    "the class itself": "class f: limit = 1",
    "a list in a cell": "def make(n):\n  return lambda x: n\nf = make([3])",
    "a mutable default": "def f(x=[]): return x",
    "a mutable keyword default": "def f(*, x={}): return x",
    "a list behind two functions": "N = [1]\ndef h(): return N\ndef g(): return h()\ndef f(x): "
    "return g()",
    "a bound self": "class C:\n  def run(self, x): return x\nf = C().run",
    "a bound list": "f = [1].append",
    "a callable object": "class C:\n  def __call__(self, x): return x\nf = C()",
    "a list in a partial": "import functools\ndef g(a, b): return a\nf = functools.partial(g, [1])",
    "a mutable attribute": "def f(x): return x\nf.seen = []",
    "a module made by hand": "import types\nm = types.ModuleType('m')\ndef f(x): return m",
    "a list in a wrapped function": "import functools\nN = [1]\ndef g(x): return "
    "N\n@functools.wraps(g)\ndef f(x): return g(x)",
    "a list in a cached function": "import functools\nN = [1]\n@functools.cache\ndef f(x): return "
    "N",
    "a list behind specs": "from zmqdist.specs import *\nN = [1]\n@function\ndef f(x): return N",
}


@pytest.mark.parametrize("source", STABLE.values(), ids=list(STABLE))
def test_constant_function_is_pickled_once(source: str) -> None:
    cache, names = FunctionCache(), in_main(source)
    blob, stable = lookup(cache, names["f"])
    assert stable
    assert lookup(cache, names["f"])[0] is blob
    assert cache.pickles == 1
    assert callable(unpack(blob))


@pytest.mark.parametrize("source", MUTABLE.values(), ids=list(MUTABLE))
def test_mutable_captures_are_pickled_at_lookup(source: str) -> None:
    cache, names = FunctionCache(), in_main(source)
    assert not lookup(cache, names["f"])[1]
    assert not lookup(cache, names["f"])[1]
    assert cache.pickles == 2


REBOUND = {
    "a global": ("N = 5\ndef f(): return N", "N = 6", 6),
    "an equal number in another object": ("N = 1000\ndef f(): return N", "N = int('1000')", 1000),
    "a global behind a function": ("N = 5\ndef g(): return N\ndef f(): return g()", "N = 6", 6),
    "a function": ("def g(): return 1\ndef f(): return g()", "def g(): return 2", 2),
    "a nonlocal counter": (
        (
            "def make():\n  n = 0\n  def f(): return n\n  def up():\n    nonlocal n\n    n += 1\n  "
            "return f, up\nf, up = make()"
        ),
        "up()",
        1,
    ),
    "a default": ("def f(x=1): return x", "f.__defaults__ = (2,)", 2),
    "a keyword default": ("def f(*, x=1): return x", "f.__kwdefaults__['x'] = 2", 2),
    "an attribute": ("def f(): return f.limit\nf.limit = 1", "f.limit = 2", 2),
    "the code": ("def f(): return 1\ndef g(): return 2", "f.__code__ = g.__code__", 2),
    "the first default": ("def f(x): return x", "f.__defaults__ = (2,)", 2),
    "the first keyword default": ("def f(*, x): return x", "f.__kwdefaults__ = {'x': 2}", 2),
    "the first attribute": ("def f(): return 1", "f.limit = 2", 1),
    "a builtin that is now hidden": ("def f(): return len(())", "def len(x): return 7", 7),
    "a mutable one": ("N = 5\ndef f(): return N", "N = [6]", [6]),
    "a partial's keywords": (
        "import functools\nf = functools.partial(lambda x: x, x=1)",
        "f.keywords['x'] = 2",
        2,
    ),
}


@pytest.mark.parametrize(("source", "change", "value"), REBOUND.values(), ids=list(REBOUND))
def test_rebound_capture_is_pickled_again(source: str, change: str, value: Any) -> None:
    cache, names = FunctionCache(), in_main(source)
    before = lookup(cache, names["f"])[0]
    assert lookup(cache, names["f"])[0] is before
    exec(change, names)
    after = lookup(cache, names["f"])[0]
    assert after is not before
    assert cache.pickles == 2
    assert unpack(after)() == value


def test_changing_function_is_no_constant() -> None:
    array = np.zeros(2**14)
    cache, work = FunctionCache(), lambda: array
    assert cache.pack_constant(work) is None
    assert cache.pickles == 0
    blob, part = cache.pack_changing(work)
    assert (cache.pickles, len(part)) == (1, array.nbytes)
    assert unpack_parts([blob, bytearray(part)])().sum() == 0


def test_captured_objects_have_values_of_lookup() -> None:
    array = np.zeros(3)
    cache, work = FunctionCache(), lambda: array
    before = lookup(cache, work)[0]
    array[:] = 1
    after = lookup(cache, work)[0]
    assert unpack(before)().sum() == 0
    assert unpack(after)().sum() == 3


def test_functions_of_one_factory_differ() -> None:
    def make(n: int) -> Callable[[], int]:
        return lambda: n

    cache = FunctionCache()
    blobs = [lookup(cache, make(n))[0] for n in (1, 2, 1)]
    assert [unpack(blob)() for blob in blobs] == [1, 2, 1]
    assert blobs[0] is blobs[2]  # the same code and the same captured object
    assert cache.pickles == 2


def test_captures_in_other_variables_differ() -> None:
    names = in_main(
        "import functools\ndef g(*a, **k): return a, k\n"
        "def make(a, b):\n  return lambda: (a(), b if b is None else b())\n"
        "f1 = make(functools.partial(g, None), None)\nf2 = make(functools.partial(g), None)\n"
        "def h(*, x=1): return x\ndef h2(*, x): return h2.x\nh2.__code__ = "
        "h.__code__\nh2.__kwdefaults__ = None\nh2.x = 1\n"
    )
    cache = FunctionCache()
    assert unpack(lookup(cache, names["f1"])[0])() == (((None,), {}), None)
    assert unpack(lookup(cache, names["f2"])[0])() == (((), {}), None)
    assert lookup(cache, names["h"])[0] is not lookup(cache, names["h2"])[0]


def test_importable_functions_travel_by_name() -> None:
    # the name leads to another object: not by name
    decorated = function(time.monotonic, [TensorSpec(())])
    cache = FunctionCache()
    for fn in (np.linalg.norm, np.sum, len, time.sleep, functools.reduce, int):
        blob, stable = lookup(cache, fn)
        assert stable
        assert unpack(blob) is fn
    assert cache.pickles == 6
    assert lookup(cache, decorated)[1]


def test_function_by_value_carries_globals() -> None:
    from tests.wire import helpers

    cache = FunctionCache()
    assert lookup(cache, helpers.same)[1]
    cloudpickle.register_pickle_by_value(helpers)
    try:
        blob, _ = lookup(cache, helpers.same)
    finally:
        cloudpickle.unregister_pickle_by_value(helpers)
    assert cache.pickles == 2
    assert len(blob) > 500


def test_longest_unused_function_is_forgotten() -> None:
    def make(n: int) -> Callable[[], int]:
        return lambda: n

    cache = FunctionCache(kept_max=2)
    one, two, three = make(1), make(2), make(3)
    for fn in (one, two, one, three, one):
        lookup(cache, fn)
    assert cache.pickles == 3
    lookup(cache, two)
    assert cache.pickles == 4


def test_unpicklable_function_is_refused() -> None:
    lock = threading.Lock()
    cache = FunctionCache()
    with pytest.raises(InvalidArgumentError, match="captures 'lock'"):
        lookup(cache, lambda: lock)
    assert cache.pickles == 0

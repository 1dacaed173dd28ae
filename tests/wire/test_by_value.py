"""Functions and classes of a script that another process gets by value: wrappers, odd classes, and
the lines that tracebacks show."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import CodeType

import pytest

from zmqdist.wire import trusted
from zmqdist.wire.trusted import (
    FailedPreconditionError,
    pack_error,
    pack_function,
    unpack,
    unpack_error,
)

THERE = """
import subprocess, sys, struct
from zmqdist.wire.trusted import *

class There:
    def __init__(self):
        code = '''if True:
            import struct, sys
            from zmqdist.wire.trusted import *
            while size := sys.stdin.buffer.read(4):
                fn, args = unpack(sys.stdin.buffer.read(*struct.unpack("I", size)))
                try:
                    reply = b"v" + pack(fn(*args))
                except Exception as error:
                    reply = b"e" + pack_error(error)
                sys.stdout.buffer.write(struct.pack("I", len(reply)) + reply)
                sys.stdout.buffer.flush()
        '''
        self.child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, fn, *args):
        blob = pack((fn, args))
        self.child.stdin.write(struct.pack("I", len(blob)) + blob)
        self.child.stdin.flush()
        reply = self.child.stdout.read(*struct.unpack("I", self.child.stdout.read(4)))
        if reply[:1] == b"e":
            raise unpack_error(reply[1:])
        return unpack(reply[1:])

there = There()
"""

WRAPPERS = """
import contextlib, functools

@functools.cache
def cached(x): return x + 1

@functools.lru_cache(maxsize=7)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)

@functools.singledispatch
def kind(x): return "any"

@kind.register
def _(x: int): return "int"

def decorated(fn):
    @functools.wraps(fn)
    def inner(*args): return fn(*args)
    return inner

@decorated
def wrapped(x): return x + 1

@contextlib.contextmanager
def opened(): yield 3

def uses():
    with opened() as three:
        return three + cached(1), kind(1), fib(30)

class Holder:
    def __init__(self): self.v = 3
    @functools.cached_property
    def prop(self): return self.v + 1
    plus = functools.partialmethod(lambda self, y: self.v + y, 2)
    @functools.lru_cache
    def method(self): return 5
    @staticmethod
    @functools.cache
    def static(x): return x
    @functools.singledispatchmethod
    def kind(self, x): return "any"
    @kind.register
    def _(self, x: int): return "int"

def all_of(holder): return holder.prop, holder.plus(), holder.method(), holder.static(6), holder.kind(1), holder.kind("")

assert there(cached, 1) == there(functools.partial(cached, 1)) == there(wrapped, 1) == 2
assert there(fib, 30) == 832040
assert there(lambda: fib.cache_parameters()) == {"maxsize": 7, "typed": False}
assert (there(kind, 1), there(kind, "")) == ("int", "any")
assert there(uses) == (5, "int", 832040)
assert there(all_of, Holder()) == (4, 5, 5, 6, "int", "any")
assert there(Holder().plus) == 5 and there(Holder.static, 1) == 1
"""

CLASSES = """
import abc, collections, dataclasses, enum, typing

@dataclasses.dataclass(slots=True)
class Slots: x: int
@dataclasses.dataclass(slots=True)
class MoreSlots(Slots): y: int = 2
@dataclasses.dataclass(frozen=True, slots=True)
class Frozen: x: int
class Text:
    __slots__ = "only"
    def __init__(self): self.only = 1
    def __eq__(self, other): return self.only == other.only
class Private:
    __slots__ = ("__hidden", "__dict__")
    def __init__(self): self.__hidden, self.seen = 1, 2
    def __eq__(self, other): return (self.__hidden, self.seen) == (other.__hidden, other.seen)
class Colour(enum.Enum):
    RED = 1
    CRIMSON = 1
    BLUE = 2
    def label(self): return self.name
class Number(enum.IntEnum): ONE = 1; UNO = 1
class Bits(enum.Flag): A = 1; B = 2; BOTH = 3
class Named(typing.NamedTuple): a: int
class Typed(typing.TypedDict): a: int
T = typing.TypeVar("T")
@dataclasses.dataclass
class Box(typing.Generic[T]): x: T = 1
class Needs(typing.Protocol):
    def f(self): ...
class Base(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
@dataclasses.dataclass
class Concrete(Base):
    x: int = 1
    def f(self): return 2
class Outer:
    @dataclasses.dataclass
    class Inner: x: int = 1
    class Error(Exception): pass
class Registry:
    known = []
    def __init_subclass__(cls, *, tag): cls.tag = tag; Registry.known.append(cls.__name__)
@dataclasses.dataclass
class Registered(Registry, tag="t"): x: int = 1
class SlottedRegistry:
    __slots__ = ()
    def __init_subclass__(cls, tag): cls.tag = tag
class SlottedItem(SlottedRegistry, tag=3):
    __slots__ = ("x",)
    def __init__(self): self.x = 1
    def __eq__(self, other): return self.x == other.x
@dataclasses.dataclass
class Both(Registered, Box[int], tag="u"): z: int = 1
class Meta(type):
    def __call__(cls, *args): return super().__call__(*args)
@dataclasses.dataclass
class WithMeta(metaclass=Meta): x: int = 1
class Item:
    def __class_getitem__(cls, key): return key
def same(x): return x
def is_a(x, cls): return type(x) is cls and isinstance(x, cls)

values = [Slots(1), MoreSlots(1), Frozen(1), Text(), Private(), Named(1), Box(1), Concrete()]
values += [Outer.Inner(), Registered(), WithMeta(1), SlottedItem(), Both()]
for value in values:
    back = there(same, value)
    assert type(back) is type(value) and back == value, value
    assert there(is_a, value, type(value)), value
assert not hasattr(there(same, Slots(1)), "__dict__") and not there(hasattr, Slots(1), "__dict__")
for member in [*Colour, Colour.CRIMSON, Number.UNO, Bits.BOTH, Bits.A | Bits.B]:
    assert there(same, member) is member
assert there(lambda: Colour.CRIMSON.label() + Colour["BLUE"].label()) == "REDBLUE"
assert there(same, {"t": Typed(a=1)}) == {"t": {"a": 1}}
for cls in [Slots, Colour, Needs, Box, Box[int], Typed, Registered, Outer.Inner, Item, T]:
    assert there(same, cls) == cls
assert there(lambda: Item[3]) == 3
try:
    there(lambda: (_ for _ in ()).throw(Outer.Error("x")))
except Outer.Error: pass
assert Registry.known == ["Registered", "Both"] and there(lambda: Registered.tag) == "t"

Registered.tag = "later"
assert there(lambda cls: cls.tag, Registered) == "later", "changes reach the other process"
def changes(cls): cls.tag = "there"; return cls(7)
assert there(changes, Registered) == Registered(7) and Registered.tag == "later", "and never come back"
"""


DEMANDING = """
class Demanding(type):
    def __new__(cls, name, bases, names, *, flag): return super().__new__(cls, name, bases, names)
    def __init__(cls, name, bases, names, *, flag): pass
class Demanded(metaclass=Demanding, flag=1): pass
"""


def run(tmp_path: Path, source: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(THERE + source)
    environment = {**os.environ, "PYTHONPATH": str(Path(trusted.__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("source", [WRAPPERS, CLASSES], ids=["wrappers", "classes"])
def test_definitions_of_script_work_elsewhere(tmp_path: Path, source: str) -> None:
    run(tmp_path, source)


def test_class_that_cannot_be_rebuilt_is_named(tmp_path: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    exec(DEMANDING, names)
    blob = pack_function(names["Demanded"])  # type: ignore[arg-type]
    code = f"from zmqdist.wire.trusted import unpack; unpack({blob!r})"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "class Demanded of the program cannot be made again in process" in ended.stderr
    assert (
        "missing 1 required keyword-only argument: 'flag'; define it in a module that workers can "
        "import" in ended.stderr
    )


def test_script_object_pickled_by_name_is_refused() -> None:
    blob = b"\x80\x05c__main__\nno_such_object\n."
    with pytest.raises(
        FailedPreconditionError,
        match="an object of the program's script that is pickled by its name",
    ) as caught:
        unpack(blob)
    assert "PYTHONPATH" not in str(caught.value)


# -- the lines of tracebacks -----------------------------------------------------------------------

FAILS = textwrap.dedent("""
    def fails(x):
        y = x
        return (lambda: y /
                0)()

    class Holder:
        def method(self):
            raise ValueError("in method")
""")

ASKS = """
for fn, args in (fails, (1,)), (Holder().method, ()):
    try:
        there(fn, *args)
    except Exception as error:
        print(error.__cause__)
"""

NOTEBOOK = f"""
import linecache
cell = {FAILS!r}
linecache.cache["/tmp/ipykernel_1/2.py"] = len(cell), None, cell.splitlines(True), "/tmp/ipykernel_1/2.py"
exec(compile(cell, "/tmp/ipykernel_1/2.py", "exec"))
"""

NEW_CLOUDPICKLE = """
import cloudpickle, types
reduce = cloudpickle.Pickler.dispatch_table[types.CodeType]
def without_name(code):
    make, fields = reduce(code)
    return make, tuple("<dynamic-code>" if field == code.co_filename else field for field in fields)
cloudpickle.Pickler.dispatch_table[types.CodeType] = without_name
"""


@pytest.mark.parametrize("before", ["", NEW_CLOUDPICKLE], ids=["as it is", "without file names"])
@pytest.mark.parametrize("way", ["script", "notebook"])
def test_remote_traceback_shows_missing_source(tmp_path: Path, way: str, before: str) -> None:
    text = THERE + before + (NOTEBOOK if way == "notebook" else FAILS) + ASKS
    script = tmp_path / "script.py"
    script.write_text(text)
    if way == "script":  # the receiver has no such file
        text = f"exec(compile(open({str(script)!r}).read(), {str(script)!r}, 'exec'))"
        arguments, file = [str(script)], str(script)
    else:
        arguments, file = ["-c", text], "/tmp/ipykernel_1/2.py"
    environment = {**os.environ, "PYTHONPATH": str(Path(trusted.__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    first = 1 if way == "notebook" else (THERE + before).count("\n") + 1
    for line, name, shown in (
        (first + 3, "fails", "return (lambda: y /"),
        (first + 3, "<lambda>", "return (lambda: y /"),
        (first + 8, "method", 'raise ValueError("in method")'),
    ):
        at = lines.index(f'  File "{file}", line {line}, in {name}')
        assert lines[at + 1].strip() == shown


def test_unknown_source_lines_are_left_out(tmp_path: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile("\n\ndef fails():\n    return 1 / 0\n", "<nowhere>", "exec"), names)
    fails = unpack(pack_function(names["fails"]))  # type: ignore[arg-type]
    assert isinstance(fails.__code__, CodeType)
    with pytest.raises(ZeroDivisionError) as caught:
        fails()
    remote = str(unpack_error(pack_error(caught.value)).__cause__)
    assert '  File "<nowhere>", line 4, in fails\nZeroDivisionError' in remote

"""Functions, and values of any type, as bytes, for peers that may run code in this process. This is
the only module that pickles.

Rules
    Unpickling executes code that the sender has written, so call `unpack*` only for bytes of an
    authenticated peer that may send code.

    Plain pickle is tried first, because it is ten times faster. cloudpickle pickles what plain
    pickle refuses (lambdas, closures), and every value that refers to `__main__`, which is another
    module at the receiver. Functions and classes of importable modules are pickled by name, unless
    `send_by_value` was called for their module.

    A pickle is a snapshot. Large arrays are not in the pickle but beside it, as views of their
    memory, which the caller copies or sends before the program may change the arrays. Unpickled
    arrays are private and writable, even if the sender's array was read-only. Only frozen arrays
    are read-only at the receiver, too.

The source lines of functions that travel by value, so that a traceback of another process shows
them.

Rules
    The lines travel with the code, because the receiver may lack the file: it is on another host,
    or is a cell of a notebook or what was typed at a prompt. The receiver puts them into
    `linecache`, where tracebacks and `inspect` look.
    The lines of a piece of code are read once. A receiver does nothing for lines that it has.

Classes that travel by value: what cloudpickle leaves out, and the identity of classes that come
back.

Not here: which functions must be pickled again (functions.py), and the transport of the bytes.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import enum
import functools
import io
import linecache
import os
import pickle
import platform
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, Final, NoReturn, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import cloudpickle
import numpy as np

from zmqdist.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfRangeError,
    ResourceExhaustedError,
    UnknownError,
)
from zmqdist.limits import (
    DEPTH_MAX,
    ERROR_BYTES_MAX,
    FRAMES_MAX,
    FUNCTIONS_KEPT_MAX,
    INLINE_BYTES_MAX,
)
from zmqdist.specs import Function
from zmqdist.wire import foreign
from zmqdist.wire.arrays import (
    BadArray,
    bytes_of,
    dtype_from_json,
    dtype_to_json,
    frozen,
    is_fortran,
    is_frozen,
    rebuild,
    writable_alias,
)

R = TypeVar("R")


def here() -> str:
    """Return the name of this process for error texts."""
    return f"process {os.getpid()} on {platform.node()}"


def reduced_class(
    cls: Any, make: Any, args: Any, state: Any, items: Any, pairs: Any, fill: Any
) -> tuple[Any, ...]:
    """Return how a class is pickled by value, with what cloudpickle leaves out: slots, and second
    names of the members of an Enum."""
    fourth = args[3]
    if isinstance(cls, enum.EnumMeta):
        members: dict[str, Any] = dict(cls.__members__)
        fourth = {name: member.value for name, member in members.items()}
        state = (
            {name: value for name, value in state[0].items() if name not in fourth},
            *state[1:],
        )
    elif vars(cls).get("__slots__"):
        fourth = {**fourth, "__slots__": cls.__slots__}
    args = (*args[:3], fourth, *args[4:])
    _classes[args[-2]] = cls
    return make_class, (make, args), (fill, state), items, pairs, fill_class


_classes: WeakValueDictionary[str, type] = WeakValueDictionary()
"""Classes that were pickled by value or rebuilt, by the identifiers that cloudpickle gives to
classes."""

_rebuilt_classes: WeakSet[type] = WeakSet()


def make_class(make: Any, args: Any) -> type:
    """Return the class with this identifier, or rebuild it, without its attributes. Pickles refer
    to this function by its name."""
    cls = _classes.get(args[-2])
    if cls is None:
        try:
            cls = _without_init_subclass(make, args)
        except Exception as error:
            raise FailedPreconditionError(
                f"class {args[1]} of the program cannot be made again in {here()}: "
                f"{type(error).__name__}: {error}; define it in a "
                "module that workers can import"
            ) from error
        _rebuilt_classes.add(cls)
        _classes[args[-2]] = cls
    return cls


class _Quiet:
    """A base class that ends calls of `__init_subclass__`. That has run where the class was
    defined, with arguments that are not known."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


class _QuietSlots:
    """The same for classes whose objects have no `__dict__`."""

    __slots__ = ()
    __init_subclass__ = _Quiet.__dict__["__init_subclass__"]


def _without_init_subclass(make: Any, args: Any) -> type:
    bases = args[2]
    own = (
        cls
        for base in bases
        if isinstance(base, type)
        for cls in base.__mro__
        if "__init_subclass__" in vars(cls)
    )
    if not any(cls.__module__ not in ("builtins", "typing") for cls in own):
        return make(*args)  # type: ignore[no-any-return]
    quiet = _Quiet if bases[0].__dictoffset__ else _QuietSlots
    cls: type = make(*args[:2], (quiet, *bases), *args[3:])
    cls.__bases__ = cls.__bases__[1:]
    return cls


def fill_class(cls: type, state: tuple[Any, Any]) -> None:
    """Set the attributes of a class that was pickled by value, unless it comes back to the process
    that defines it, because other processes may have changed their copies. Pickles refer to this
    function by its name, so the name is part of the protocol.
    """
    if cls in _rebuilt_classes:
        state[0](cls, state[1])


def cached_by_code(fn: Callable[[CodeType], R]) -> Callable[[CodeType], R]:
    """Decorate a function of a code object. Its results are cached by the id of the code object,
    because comparing code objects is slow."""
    entries: dict[int, tuple[CodeType, R]] = {}

    @functools.wraps(fn)
    def cached(code: CodeType) -> R:
        entry = entries.get(id(code))
        if entry is None:
            if len(entries) >= 4 * FUNCTIONS_KEPT_MAX:
                entries.clear()
            # the entry keeps the code alive, so that no other code gets the id
            entry = entries[id(code)] = code, fn(code)
        return entry[1]

    return cached


_received: dict[tuple[str, int], str] = {}


@cached_by_code
def source_of(code: CodeType) -> str:
    """Return the source lines of a function's code, or "" if Python does not know them."""
    return "".join(_file_of(code)[code.co_firstlineno - 1 : last_line(code)])


def last_line(code: CodeType) -> int:
    """Return the number of the last line of a function's code."""
    return max(
        (line for part in nested_code(code) for line in _lines(part)), default=code.co_firstlineno
    )


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and the code of all functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)


def remember(filename: str, first: int, source: str) -> None:
    """Have tracebacks of this process show these lines of a file, whose first line has the number
    `first`."""
    if _received.get((filename, first)) == source:
        return
    if len(_received) >= 4 * FUNCTIONS_KEPT_MAX:
        for name, _ in _received:
            linecache.cache.pop(name, None)
        _received.clear()
    _received[filename, first] = source
    new, lines = source.splitlines(keepends=True), linecache.getlines(filename)
    if lines[first - 1 : first - 1 + len(new)] != new:
        lines = lines + ["\n"] * (first - 1 + len(new) - len(lines))
        lines[first - 1 : first - 1 + len(new)] = new
        # without a time, so it is not checked
        linecache.cache[filename] = sum(map(len, lines)), None, lines, filename


def _lines(code: CodeType) -> Iterator[int]:
    yield from (line for *_, line in code.co_lines() if line is not None)
    if sys.version_info >= (3, 11):  # an expression may end in a line in which nothing begins
        yield from (end for _, end, *_ in code.co_positions() if end is not None)


def _file_of(code: CodeType) -> list[str]:
    """Return all lines of the file, the cell or the input line that a code object was compiled
    from; [] if they are not known."""
    if lines := linecache.getlines(code.co_filename):
        return lines
    # what was typed, from Python 3.13 on
    return list(getattr(linecache, "_getlines_from_code", lambda _: ())(code))


Packed: TypeAlias = "bytes | list[Any]"
"""One blob of at most INLINE_BYTES_MAX, or a list of buffers that begins with the pickle. `unpack`
takes a blob, `unpack_parts` a list."""


class NotPicklableError(InvalidArgumentError, pickle.PicklingError):
    """The error for a value that cannot be pickled. The message names the part that is at fault,
    and its place."""


ATOMS = frozenset({NoneType, bool, int, float, complex, str, bytes})

GENERATES = "is a generator function, whose items would stay with the worker: call stream(), have it return a list, or read a Dataset"
"""The end of the error text for a function that cannot be scheduled."""

_NONE = pickle.dumps(None, 5)
_NO_ARGUMENTS = pickle.dumps(((), {}), 5)
"""The pickle of a call without arguments. It and `_NONE` are made once, because many calls have no
arguments and most results are None."""


# -- values ----------------------------------------------------------------------------------------


def pack(value: Any) -> Packed:
    """Return a small value as one blob, a large value as a list of buffers.

    The buffers show the memory of large arrays, so copy or send the buffers before the arrays
    change.

    Raises:
      InvalidArgumentError: part of the value cannot be pickled; the message names the part and its
        place. The cause is the original error if code of the program has raised it.
      ResourceExhaustedError: there is no memory for the pickle.
    """
    if value is None:
        return _NONE
    cls = type(value)
    if cls in ATOMS or (cls is tuple and ATOMS.issuperset(map(type, value))):
        blob = pickle.dumps(value, 5)
        return blob if len(blob) <= INLINE_BYTES_MAX else [blob]
    return _pack(value, (("value", value),))


def unpack(blob: bytes | bytearray | memoryview) -> Any:
    """Return the value of one blob. Its arrays are private and writable.

    Raises:
      FailedPreconditionError: the pickle names a module or an object that does not exist here.
      Exception: any exception that a class in the pickle raises while an object is rebuilt.
    """
    if blob == _NONE:
        return None
    if blob == _NO_ARGUMENTS:
        return (), {}
    return _loads(blob, ())


def unpack_parts(parts: Sequence[Any]) -> Any:
    """Return the value of a list of buffers, which must be in the order in which `pack` returned
    them. Raises the errors of `unpack`.

    A writable buffer becomes the memory of its array without a copy, and so does a read-only NumPy
    array, which is the memory of a frozen array. So pass only buffers to which no other code
    writes. Any other read-only buffer is copied.
    """
    buffers = [
        bytearray(part) if memoryview(part).readonly and not isinstance(part, np.ndarray) else part
        for part in parts[1:]
    ]
    return _loads(parts[0], buffers)


def pack_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Packed:
    """Return the pair (args, kwargs) of a function call, packed for `unpack` or `unpack_parts`.
    Raises the errors of `pack`. Errors name the arguments as `args[0]` and `kwargs['x']`.
    """
    if not args and not kwargs:
        return _NO_ARGUMENTS
    if not kwargs and ATOMS.issuperset(map(type, args)):
        blob = pickle.dumps((args, kwargs), 5)
        return blob if len(blob) <= INLINE_BYTES_MAX else [blob]
    return _pack((args, kwargs), (("args", args), ("kwargs", kwargs)))


def _pack(value: Any, roots: Sequence[tuple[str, Any]]) -> Packed:
    parts: list[Any] = []
    try:
        blob = _dumps(value, parts)
        return blob if not parts and len(blob) <= INLINE_BYTES_MAX else [blob, *parts]
    except MemoryError as error:
        # no part is at fault, so none is searched for
        detail = f": {error}" if str(error) else ""
        raise ResourceExhaustedError(
            f"no memory to pickle {roots[0][0]}{detail}. Send less at a time; NumPy arrays are not copied "
            "into the pickle, lists and text are"
        ) from error
    except Exception as error:
        _raise_not_picklable(roots, error)


class _Dump:
    """One run of a pickler: its rule for arrays, and the buffers that it collects beside the
    pickle.

    This object must not be part of a reference cycle, and must not pass views of views to the
    pickler. Otherwise the garbage collector of some versions of Python crashes on a memoryview from
    which a PickleBuffer in the same cycle was made.
    """

    def __init__(self, parts: list[Any] | None) -> None:
        self._parts = parts
        self._inner_code: set[int] = set()
        self.file = io.BytesIO()

    def reduce_array(self, array: np.ndarray[Any, Any]) -> tuple[Any, ...] | str:
        try:
            described = dtype_to_json(array.dtype)
        except BadArray:
            # arrays of objects, and dtypes of other packages, are pickled by NumPy's own rule
            return array.__reduce_ex__(5)
        fortran = is_fortran(array)
        if is_frozen(array):
            return _frozen, (described, array.shape, fortran, _buffer(bytes_of(array)))
        data = bytes_of(array)
        # With a read-only buffer, the array would also be read-only at the receiver.
        return _array, (
            described,
            array.shape,
            fortran,
            _buffer(writable_alias(data) if data.readonly and data else data),
        )

    def reduce_code(self, code: CodeType) -> tuple[Any, ...]:
        """Some versions of cloudpickle leave out the name of the file, and none sends the lines."""
        _, fields = cloudpickle.Pickler.dispatch_table[CodeType](code)
        source = "" if id(code) in self._inner_code else source_of(code)
        self._inner_code.update(map(id, nested_code(code)))
        return _code, (fields, code.co_filename, source)

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether this buffer stays in the pickle. If it does not, add it to the parts."""
        raw = buffer.raw()
        assert self._parts is not None
        if raw.nbytes <= INLINE_BYTES_MAX or len(self._parts) >= FRAMES_MAX - 2:
            return True
        self._parts.append(raw)
        return False


def _buffer(data: Any) -> pickle.PickleBuffer:
    # An empty buffer is a bytearray, because empty bytes would be read-only.
    return pickle.PickleBuffer(np.frombuffer(data, np.uint8) if len(data) else bytearray())  # type: ignore[arg-type]


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, dump: _Dump, callback: Callable[[pickle.PickleBuffer], bool] | None) -> None:
        by_dump: dict[type, Callable[[Any], Any]] = {
            np.ndarray: dump.reduce_array,
            CodeType: dump.reduce_code,
        }
        self.dispatch_table = ChainMap(
            _rules({**_RULES_BY_VALUE, **foreign.rules(_buffer), **by_dump}),
            cloudpickle.Pickler.dispatch_table,
        )
        super().__init__(dump.file, protocol=5, buffer_callback=callback)

    def reducer_override(self, value: Any) -> Any:
        reduced = super().reducer_override(value)
        return (
            reduced_class(value, *reduced)
            if isinstance(value, type) and isinstance(reduced, tuple) and len(reduced) == 6
            else reduced
        )


CACHED_FUNCTION: Final = type(functools.cache(len))
"""The type of functions with a cache, `functools.lru_cache`."""


def _reduce_cached(fn: Any) -> Any:
    if goes_by_name(fn):
        return fn.__reduce__()
    own = {
        name: value
        for name, value in vars(fn).items()
        if name not in ("__wrapped__", "cache_parameters")
    }
    return _cached, (fn.__wrapped__, *fn.cache_parameters().values()), own


def _cached(fn: Any, maxsize: int | None, typed: bool) -> Any:
    """Rebuild a function with a cache, which is empty. Pickles refer to this function by its name,
    so the name is part of the protocol."""
    return functools.lru_cache(maxsize, typed)(fn)


_RULES_BY_VALUE: Final[dict[type, Callable[[Any], Any]]] = {
    CACHED_FUNCTION: _reduce_cached,
    # before Python 3.12 the object has a lock
    functools.cached_property: lambda value: (
        type(value),
        (value.func,),
        {name: item for name, item in vars(value).items() if name != "lock"},
    ),
    # `functools.singledispatch` captures one
    WeakKeyDictionary: lambda value: (WeakKeyDictionary, (dict(value),)),
}


def _rules(table: dict[type, Callable[[Any], Any]]) -> dict[type, Callable[[Any], Any]]:
    """Return `table`, the rules of a pickler by type. If the program uses multiprocessing's
    managers, add a rule for their proxies."""
    managers = sys.modules.get("multiprocessing.managers")
    return table if managers is None else _WithProxies(table, managers.BaseProxy)


class _WithProxies(dict[type, Callable[[Any], Any]]):
    """Rules of a pickler by type, with a rule for the proxies of multiprocessing's managers: a
    proxy is sent with the key of its manager. A child of the program would inherit this key, but a
    worker is not a child of the program.
    """

    def __init__(self, table: dict[type, Callable[[Any], Any]], base: type) -> None:
        super().__init__(table)
        self._base = base

    def __missing__(self, cls: type) -> Callable[[Any], Any]:
        if issubclass(cls, self._base):
            return _reduce_proxy
        raise KeyError(cls)


def _reduce_proxy(proxy: Any) -> tuple[Any, ...]:
    rebuild, (cls, token, serializer, options) = proxy.__reduce__()
    return rebuild, (cls, token, serializer, {**options, "authkey": bytes(proxy._authkey)})


def _dumps(value: Any, parts: list[Any] | None) -> bytes:
    """Return the pickle of a value. If `parts` is given, large arrays are appended to this list and
    are not in the pickle."""
    dump = _Dump(parts)
    pickler = pickle.Pickler(dump.file, 5, buffer_callback=None if parts is None else dump.keep)
    pickler.dispatch_table = _rules(
        {**copyreg.dispatch_table, **foreign.rules(_buffer), np.ndarray: dump.reduce_array}
    )
    try:
        pickler.dump(value)
        blob = dump.file.getvalue()
        if (
            b"__main__" not in blob
            and b"__mp_main__" not in blob
            and not any(
                module.encode() in blob for module in cloudpickle.list_registry_pickle_by_value()
            )
        ):
            return blob
    except Exception:  # cloudpickle may pickle the value; if not, it raises its own error below
        pass
    if parts is not None:
        parts.clear()
    main = sys.modules.get("__mp_main__")
    if main is not None and main.__name__ == "__mp_main__":
        # a child of multiprocessing has the script under this name
        cloudpickle.register_pickle_by_value(main)
    dump = _Dump(parts)
    _CloudPickler(dump, None if parts is None else dump.keep).dump(value)
    return dump.file.getvalue()


def _array(
    described: Any, shape: tuple[int, ...], fortran: bool, buffer: Any
) -> np.ndarray[Any, Any]:
    """Rebuild an array. Pickles refer to this function by its name, so the name is part of the
    protocol."""
    return rebuild(dtype_from_json(described), shape, fortran, buffer)


def _code(fields: tuple[Any, ...], filename: str, source: str) -> CodeType:
    """Rebuild the code of a function. Pickles refer to this function by its name, so the name is
    part of the protocol."""
    code = CodeType(*fields).replace(co_filename=filename)
    if source:
        remember(filename, code.co_firstlineno, source)
    return code


def _frozen(
    described: Any, shape: tuple[int, ...], fortran: bool, buffer: Any
) -> np.ndarray[Any, Any]:
    """Rebuild a frozen array. Pickles refer to this function by its name, so the name is part of
    the protocol."""
    return frozen(rebuild(dtype_from_json(described), shape, fortran, buffer))


def _loads(blob: Any, buffers: Sequence[Any]) -> Any:
    try:
        return pickle.loads(blob, buffers=buffers)
    except ModuleNotFoundError as error:
        raise FailedPreconditionError(
            f"module {error.name!r} is not importable in {here()}: functions and classes of "
            f"importable modules are pickled by "
            "name; put it on the workers' PYTHONPATH, or send the module by value "
            "(zmqdist.coordinator.send_by_value)",
        ) from error
    except AttributeError as error:
        if not str(error).startswith("Can't get attribute"):
            raise
        if "module '__main__'" in str(error):
            raise FailedPreconditionError(
                f"{error} in {here()}: an object of the program's script that is pickled by its "
                f"name, and not by value, because its class "
                "has a rule of its own for pickling; define it in a module that workers can import"
            ) from error
        raise FailedPreconditionError(
            f"{error} in {here()}: functions and classes of importable modules are pickled by "
            f"name; put the sender's version "
            "of the module on the workers' PYTHONPATH",
        ) from error


# -- what cannot be pickled ------------------------------------------------------------------------


def _raise_not_picklable(roots: Sequence[tuple[str, Any]], error: Exception) -> NoReturn:
    """Search for the smallest part that cannot be pickled on its own, and raise an error that names
    its place."""
    path, smallest = roots[0]
    parts: Iterator[tuple[str, Any]] = iter(roots)
    parents: list[Any] = []
    while len(parents) < DEPTH_MAX:
        for where, part in parts:
            fault = None if any(part is parent for parent in parents) else _pickling_error(part)
            if fault is not None:
                path, smallest, error = (where if not parents else path + where), part, fault
                parents.append(part)
                parts = parts_of(part)
                break
        else:
            break
    frames = error.__traceback__
    while (
        frames is not None
        and frames.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _PICKLERS
    ):
        frames = frames.tb_next
    # An error of the pickler itself says no more than the text. Code of the program has frames that
    # are of use.
    cause = (
        error.with_traceback(frames)
        if frames is not None or isinstance(error, ValueError)
        else None
    )
    error.__suppress_context__ = True  # the context is the same error in a larger part
    reason = "pass its result" if _is_future(smallest) else f"{type(error).__name__}: {error}"
    raise NotPicklableError(
        f"{path}, a {type_name(smallest)}, cannot be pickled: {reason}"
    ) from cause


_PICKLERS: Final = frozenset({"zmqdist", "cloudpickle", "pickle", "copyreg"})


def _is_future(value: Any) -> bool:
    return hasattr(type(value), "add_done_callback")


def _pickling_error(value: Any) -> Exception | None:
    try:
        _dumps(value, None)
    except Exception as error:
        return error
    return None


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each part of an object with its place, as Python code that follows the name of the
    object."""
    match value:
        case _ if _is_future(value):
            return
        case Mapping():
            yield from ((f"[{key!r}]", item) for key, item in list(value.items()))
        case list() | tuple() | set() | frozenset():
            yield from ((f"[{index}]", item) for index, item in enumerate(value))
        case np.ndarray() if value.dtype.hasobject and value.dtype.names is None:
            yield from ((f"[{index}]", item) for index, item in enumerate(value.reshape(-1)))
        case Function():
            yield from parts_of(value.__wrapped__)
        case FunctionType():
            yield from (
                (f", which captures {name!r}", item) for name, item in _captured_by_name(value)
            )
        case MethodType():
            yield (".__self__", value.__self__)
            yield ("", value.__func__)
        case functools.partial():
            yield (".func", value.func)
            yield from ((f".args[{index}]", item) for index, item in enumerate(value.args))
            yield from ((f".keywords[{key!r}]", item) for key, item in value.keywords.items())
        case _ if not any("__reduce__" in cls.__dict__ for cls in type(value).__mro__[:-1]):
            # An object with its own rule for pickling is not searched, because its error already
            # names the fault.
            yield from ((f".{name}", item) for name, item in attributes_of(value))


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each attribute that is stored in the object itself."""
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        yield from (
            (name, getattr(value, name))
            for name in names
            if hasattr(value, name) and name != "__dict__"
        )


def _captured_by_name(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        yield name, cell_content(cell)
    yield from (
        (name, fn.__globals__[name]) for name in global_names(fn.__code__) if name in fn.__globals__
    )
    yield from (("a default", item) for item in fn.__defaults__ or ())
    yield from (fn.__kwdefaults__ or {}).items()
    yield from fn.__dict__.items()


def type_name(value: Any) -> str:
    """Return `module.name` of a value's class, or only the name if the class is built into
    Python.
    """
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


# -- functions -------------------------------------------------------------------------------------


def describe(fn: Any) -> str:
    """Return `module.name` of a function, method, partial, class or callable object, for error
    texts; `str.upper` and the like have no module."""
    if isinstance(fn, functools.partial):
        return describe(fn.func)
    if getattr(fn, "__qualname__", None) is None:
        fn = type(fn)
    module = getattr(fn, "__module__", None)
    return f"{module}.{fn.__qualname__}" if module else fn.__qualname__


def pack_function(fn: Callable[..., Any]) -> bytes:
    """Return a function, packed for `unpack`. An importable function is packed as its name, any
    other function as its code with a snapshot of each object that it captures.

    Raises:
      InvalidArgumentError: the function captures a value that cannot be pickled; the message names
        the value.
    """
    try:
        return _dumps(fn, None)
    except Exception as error:
        _raise_not_picklable(((describe(fn), fn),), error)


def pack_function_parts(fn: Callable[..., Any]) -> Packed:
    """Return a function as `pack_function` does, but with the large arrays that the function
    captures beside the pickle, as `pack` does.

    Raises the errors of `pack_function`; also raises ResourceExhaustedError if there is no memory
    for the pickle.
    """
    return _pack(fn, ((describe(fn), fn),))


class _Unset:
    """The type of UNSET, which stands for a captured variable that has no value."""


UNSET = _Unset()


def cell_content(cell: Any) -> Any:
    """Return the value of a closure cell, or UNSET if the cell's variable has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return UNSET


@cached_by_code
def global_names(code: CodeType) -> tuple[str, ...]:
    """Return the names of the globals that a function's code and its inner functions use.
    cloudpickle pickles the values of these globals.
    """
    names = {i.argval: None for i in dis.get_instructions(code) if i.opname in _GLOBAL_OPS}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(global_names(constant)))
    return tuple(names)


_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"})


def send_by_value(module: ModuleType | str) -> None:
    """Send the functions and classes of a module, and of its submodules, by value from now on,
    instead of by their names.

    >>> import colorsys  # in place of a module of yours
    >>> zd.coordinator.send_by_value(colorsys)
    >>> coordinator.submit(colorsys.rgb_to_hsv, 1, 0, 0).result()
    (0.0, 1.0, 1)

    Functions of `__main__`, including a notebook's cells, are sent by value in any case. Use this
    for a module that you edit beside a notebook, or that workers do not have, because workers then
    need not import the module. Each function is sent with the globals that it uses and their values
    at the time of scheduling, also after `importlib.reload(module)`. Sending by value costs some
    hundred microseconds for each function, and on a worker the module has no state that lasts from
    one function to the next.

    Args:
      module: an imported module, or its name.

    Raises:
      ValueError: no module of this name has been imported.
      TypeError: `module` is neither a module nor a name.
    """
    if isinstance(module, str):
        if module not in sys.modules:
            raise ValueError(f"no module {module!r} has been imported: import it first")
        module = sys.modules[module]
    if not isinstance(module, ModuleType):
        raise TypeError(f"send_by_value() takes a module or its name, not {type(module).__name__}")
    cloudpickle.register_pickle_by_value(module)


_MAINS = frozenset({"__main__", "__mp_main__"})
"""Names of the script's module. `__mp_main__` is its name in children of multiprocessing."""


def goes_by_name(value: Any) -> bool:
    """Return whether a function or class is pickled as its name, because an importable module has
    the object under this name."""
    name, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if name is None or path is None:
        return False
    target: Any = sys.modules.get(name)
    if target is None or not is_importable_module(target):
        return False
    for part in path.split("."):
        target = getattr(target, part, None)
    return target is value


def is_importable_module(module: ModuleType) -> bool:
    """Return whether a module is pickled as its name, because it is not `__main__`, not made by the
    program, and not sent by value."""
    name = getattr(module, "__name__", None)
    if name in _MAINS or name is None or sys.modules.get(name) is not module:
        return False
    by_value = cloudpickle.list_registry_pickle_by_value()
    return not by_value or not any(
        name == prefix or name.startswith(prefix + ".") for prefix in by_value
    )


# -- errors ----------------------------------------------------------------------------------------


class RemoteTraceback(Exception):
    """The traceback of an error in another process, as text. It is the `__cause__` of the copy of
    the error in this process.

    Attributes:
      unpickling: whether the error came before the function began, when the function or its
        arguments were unpickled in the other process.
      origin: the worker, process and host of the function; "" if none was recorded.
    """

    unpickling = False
    origin = ""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def pack_error(error: BaseException, *, unpickling: bool = False, origin: str = "") -> bytes:
    """Return an exception with its traceback, packed in a few times ERROR_BYTES_MAX bytes at most.
    This never raises.

    The exception keeps its class if that can be pickled *and* rebuilt, which this function tries;
    parts that are large or cannot be pickled become texts. If the class cannot be rebuilt, an
    UnknownError arrives whose text has the class name and the text of the exception. A
    StopIteration would end loops of the receiver, so it becomes an OutOfRangeError. `unpickling`
    means that the exception was raised before the function began; the RemoteTraceback then says so,
    and has the `origin`.
    """
    text = _cut(
        "".join(_cut(line, ERROR_BYTES_MAX // 16) for line in traceback.format_exception(error))
    )  # a long message leaves room for the frames
    if isinstance(error, StopIteration):
        error = OutOfRangeError(f"StopIteration: {text_of(error)}")
    return pickle.dumps(
        (_pickled_error(error), type_name(error), text_of(error), text, unpickling, origin), 5
    )


def unpack_error(blob: bytes | bytearray | memoryview) -> BaseException:
    """Return a new copy of the exception, with a RemoteTraceback as its `__cause__`."""
    pickled, type_name, text, remote, unpickling, origin = pickle.loads(blob)
    error: BaseException | None = None
    if pickled:
        # without its class, which this process may lack, only its name and the text are used
        with contextlib.suppress(Exception):
            error = _loads(pickled, ())
    if not isinstance(error, BaseException):
        error = UnknownError(f"{type_name}: {text}")
    cause = error.__cause__ = RemoteTraceback(remote)
    cause.unpickling, cause.origin = unpickling, origin
    return error


def as_ordinary_error(error: BaseException) -> BaseException:
    """Return an error that a function has raised, in a form that ends no other process.

    SystemExit and KeyboardInterrupt end the process that raises them, but must not end the process
    that gets the result. So each error outside of the class Exception becomes an UnknownError,
    whose `original_exception` is a copy of the error if Python itself defines it.
    """
    if isinstance(error, Exception):
        return error
    mild = UnknownError(f"the function raised {type(error).__name__}({text_of(error)})")
    if type(error) in _PROGRAM_ENDS and ATOMS.issuperset(map(type, error.args)):
        mild.original_exception = type(error)(*error.args)  # type: ignore[attr-defined]
    return mild.with_traceback(error.__traceback__)


_PROGRAM_ENDS: Final = (SystemExit, KeyboardInterrupt, GeneratorExit)

ERRORS_MAX: Final = 64
"""How many members of a large ExceptionGroup are sent. A part of a large exception may have this
fraction of its bytes."""

_RAISED_BY_METHODS: Final = (Exception, SystemExit, GeneratorExit)
"""Exceptions to expect from methods of a user's exception. KeyboardInterrupt is left out, because
it may be the user's Ctrl-C."""


class _Reduced:
    """A value that is unpickled as `make(*args)`."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        self.reduced = make, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def _rebuild_bare(
    cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    """Rebuild an exception without calling its constructor, because `args` often differ from the
    constructor's arguments."""
    base: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    error: BaseException = base.__new__(cls, *args)
    with contextlib.suppress(Exception):
        # sets what is not in `__dict__`, such as the parts of a UnicodeDecodeError
        base.__init__(error, *args)
    error.args = args
    for name, value in state.items():
        setattr(error, name, value)
    return error


def _forms(error: BaseException, bound: int, path: tuple[int, ...]) -> Iterator[Any]:
    """Yield the forms in which to pickle an exception. Each loses more than the one before it: the
    rule of the class, parts that are large or cannot be pickled, and in the end everything but the
    class and the text.
    """

    def portable(part: Any) -> Any:
        return _portable(part, bound, (*path, id(error)))

    def bare(args: tuple[Any, ...], state: dict[str, Any] | None = None) -> _Reduced:
        return _Reduced(_rebuild_bare, type(error), args, state or {})

    state = dict(attributes_of(error))
    yield error
    yield bare(error.args, state)
    args = (
        tuple(map(portable, error.args))
        if len(error.args) <= ERRORS_MAX
        else (text_of(error, bound),)
    )
    if isinstance(error, (UnicodeDecodeError, UnicodeEncodeError)):
        first, end = max(0, error.start - 16), min(error.end, error.start + 64)
        reason = f"{error.reason} (position {error.start} of {len(error.object)}, of which only this part was sent)"
        args = (
            error.encoding,
            error.object[first : end + 16],
            error.start - first,
            end - first,
            reason,
        )
    yield bare(args, {name: portable(item) for name, item in state.items()})
    yield bare((text_of(error, bound),))
    if sys.version_info >= (3, 11) and isinstance(error, BaseExceptionGroup):  # noqa: F821
        left_out = UnknownError(f"{len(error.exceptions)} errors were left out")
        yield bare((_cut(error.message, bound), [left_out]))


def _portable(part: Any, bound: int, path: tuple[int, ...]) -> Any:
    """Return a part of an exception in a form that can be pickled and rebuilt, as a text if nothing
    else can be.

    Args:
      part: the part.
      bound: how many bytes the exception may have.
      path: the ids of the exceptions that contain the part, because an exception may contain
        itself.
    """
    if isinstance(part, BaseException):
        blob = (
            b"" if id(part) in path or len(path) > DEPTH_MAX else _pickled_error(part, bound, path)
        )
        return (
            _Reduced(_loads, blob, ())
            if blob
            else UnknownError(f"{type_name(part)}: {text_of(part, bound)}")
        )
    if isinstance(part, (list, tuple)) and part and isinstance(part[0], BaseException):
        members = part[:ERRORS_MAX]
        left_out = len(part) - len(members)
        rest = [UnknownError(f"{left_out} more errors were left out")] if left_out else []
        share = (bound - 1024) // len(members)
        return [*(_portable(item, share, path) for item in members), *rest]
    if isinstance(part, str):
        return _cut(part, bound)
    try:
        blob = _dumps(part, None)
        if len(blob) <= min(bound // 4, ERROR_BYTES_MAX // ERRORS_MAX):
            pickle.loads(blob)
            return _Reduced(_loads, blob, ())
        problem = f"of {len(blob)} bytes"
    except _RAISED_BY_METHODS:
        problem = "that cannot be pickled"
    return f"(a {type_name(part)} {problem} was left out)"


def _pickled_error(
    error: BaseException, bound: int = ERROR_BYTES_MAX, path: tuple[int, ...] = ()
) -> bytes:
    """Return the pickle of an exception; empty if no form of the exception can be rebuilt with the
    same class in `bound` bytes.

    The first form, in which the class makes the copy, must give the same text and attributes.
    Otherwise the class has got wrong arguments.
    """
    for number, form in enumerate(_forms(error, bound, path)):
        try:
            blob = _dumps(form, None)
            copy = pickle.loads(blob) if len(blob) <= bound else None
            complete = dict(attributes_of(error)).keys() <= dict(attributes_of(copy)).keys()
            if type(copy) is type(error) and (
                number > 0 or (complete and text_of(copy) == text_of(error))
            ):
                return blob
        except _RAISED_BY_METHODS:
            continue
    return b""


def text_of(error: BaseException, bound: int = ERROR_BYTES_MAX) -> str:
    """Return the text of an exception, even if its `str` raises. If the text is long, return only
    its end."""
    try:
        return _cut(str(error), bound)
    except _RAISED_BY_METHODS as broken:
        return f"(its own str() raised {type(broken).__name__})"


def _cut(text: str, bound: int = ERROR_BYTES_MAX) -> str:
    """Return a text with halves of surrogate pairs escaped. If the text is long, return only its
    end, where a traceback has the place and the error.
    """
    if len(text) > bound // 4:
        text = f"({len(text)} characters, the last of them:) ..." + text[len(text) - bound // 8 :]
    return text.encode("utf-8", "backslashreplace").decode()

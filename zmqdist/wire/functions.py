"""The decision which functions must be pickled again: those that capture an object that may have
changed.

Rule (promises.md, Memory)
    A function is constant if it captures no mutable object, but only None, numbers, str, bytes,
    tuples and frozensets of these, importable modules and classes, and constant functions. It
    captures every object that cloudpickle adds to the pickle: closure cells, the globals that the
    code names, defaults, attributes, the `self` of a method, the parts of a partial. A constant
    function is pickled again if a captured name was bound to another object. To notice this, the
    key of the cache consists of the ids of all captured objects, and the cache refers to these
    objects, so that no id is used for another object. Any object that this module does not know
    counts as mutable. A function that binds captured names itself (`global`, `nonlocal`) is not
    constant, because its next run must see the values that its last run has left.

A cache hit takes a few microseconds, because only ids are compared, and no value is compared or
hashed.

Not here: pickling (trusted.py), and the numbers by which the receiver knows functions.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np

from zmqdist.limits import FUNCTIONS_KEPT_MAX
from zmqdist.specs import Function
from zmqdist.wire.trusted import (
    ATOMS,
    CACHED_FUNCTION,
    GENERATES,
    UNSET,
    Packed,
    cached_by_code,
    cell_content,
    describe,
    global_names,
    goes_by_name,
    is_importable_module,
    nested_code,
    pack_function,
    pack_function_parts,
)

P = TypeVar("P")


class FunctionCache:
    """A cache of the pickles of constant functions (see the rule above). It is not thread-safe; its
    owner holds a lock while using it.

    Attributes:
      pickles: number of times that a function was pickled.
    """

    def __init__(self, kept_max: int = FUNCTIONS_KEPT_MAX) -> None:
        """Make a cache of `kept_max` functions. When the cache is full, a new function replaces the
        one that was unused for longest."""
        self.pickles = 0
        self._kept_max = kept_max
        # Each entry refers to the captured objects, so that no other object can have their ids.
        self._entries: OrderedDict[tuple[int, ...], tuple[bytes, list[Any]]] = OrderedDict()
        self._bare: tuple[Any, ...] = (None, None, None, None, b"")
        """The latest function that captures nothing: the function, its code, name, module, and its
        pickle."""

    def pack_changing(self, fn: Callable[..., Any]) -> Packed:
        """Return the pickle of a function that is not constant, with the large arrays that it
        captures beside the pickle.

        Raises:
          InvalidArgumentError: `pack_function` cannot pack the function.
        """
        return self._counted(pack_function_parts, fn)

    def pack_constant(self, fn: Callable[..., Any]) -> bytes | None:
        """Return the pickle of a constant function; None if `fn` is not constant. The result is the
        same bytes object until a captured name is bound to another object.

        Raises:
          InvalidArgumentError: `pack_function` cannot pack the function. The cache is unchanged.
        """
        bare, code, name, module, blob = self._bare
        if (
            fn is bare
            and fn.__code__ is code
            and fn.__qualname__ is name
            and fn.__module__ is module
            and not (fn.__defaults__ or fn.__kwdefaults__ or fn.__dict__)
        ):
            return blob  # type: ignore[no-any-return]
        # a cache key of one id belongs to a function that is pickled by name
        named = self._entries.get((id(fn),))
        if named is not None and type(fn) is FunctionType and goes_by_name(fn):
            self._entries.move_to_end((id(fn),))
            return named[0]
        captured: list[Any] = []
        if not _collect(fn, captured, {}):
            return None
        key = tuple(map(id, captured))
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            if type(fn) is FunctionType and len(captured) == _BARE_PARTS:
                self._bare = (fn, *captured[:3], entry[0])
            return entry[0]
        blob = self._counted(pack_function, fn)
        self._entries[key] = (blob, captured)
        if len(self._entries) > self._kept_max:
            self._entries.popitem(last=False)
        return blob

    def _counted(self, pack: Callable[[Callable[..., Any]], P], fn: Callable[..., Any]) -> P:
        runs = fn
        while isinstance(runs, functools.partial):
            runs = runs.func
        if not (inspect.isroutine(runs) or isinstance(runs, type)):
            runs = type(runs).__call__
        if inspect.isgeneratorfunction(runs) or inspect.isasyncgenfunction(runs):
            raise TypeError(f"{describe(fn)} {GENERATES}")
        packed = pack(fn)
        self.pickles += 1
        return packed


class _Mark:
    """A separator between the parts of a cache key, so that two different functions cannot have the
    same key."""


_NEXT, _NAMED, _PARTIAL, _METHOD, _WITH_SPECS, _CACHED = (_Mark() for _ in range(6))

_BARE_PARTS = 4
"""The number of objects that decide about the pickle of a function that captures nothing: its code,
name and module, and _NEXT. A function of this kind has no closure, and its code names no globals."""

_OWN_ATTRIBUTES = frozenset(
    (
        "__wrapped__",
        "__module__",
        "__name__",
        "__qualname__",
        "__doc__",
        "input_signature",
        "output_signature",
        "cache_parameters",
    )
) | set(functools.WRAPPER_ASSIGNMENTS)


def _collect(value: Any, captured: list[Any], serials: dict[int, int]) -> bool:
    """Append to `captured` each object whose identity decides about the pickle of `value`. Return
    False at the first mutable object.

    Args:
      serials: a serial number for each function that was met before, by id, because functions may
        refer to themselves.
    """
    cls = type(value)
    if cls in ATOMS:
        captured.append(value)
        return True
    if cls is FunctionType:
        return _collect_function(value, captured, serials)
    if cls is tuple or cls is frozenset:
        captured.append(value)
        return ATOMS.issuperset(map(type, value)) or all(
            _collect(item, captured, serials) for item in value
        )
    if isinstance(value, ModuleType):
        captured.append(value)
        return is_importable_module(value)
    if isinstance(value, (np.number, np.bool_)):
        captured.append(value)
        return True
    if isinstance(value, type):
        captured.append(value)
        return goes_by_name(value)
    return _collect_callable(value, captured, serials)


def _collect_callable(value: Any, captured: list[Any], serials: dict[int, int]) -> bool:
    cls = type(value)
    if cls is Function and not goes_by_name(value):
        captured += (_WITH_SPECS, value.input_signature, value.output_signature)
        return value.__dict__.keys() <= _OWN_ATTRIBUTES and _collect(
            value.__wrapped__, captured, serials
        )
    if cls is MethodType:
        captured.append(_METHOD)
        return _collect(value.__func__, captured, serials) and _collect(
            value.__self__, captured, serials
        )
    if cls is BuiltinFunctionType:
        captured.append(value)
        return value.__self__ is None or _collect(value.__self__, captured, serials)
    if cls is functools.partial:
        captured += (_PARTIAL, len(value.args), *value.keywords, _NEXT)
        parts = (value.func, *value.args, *value.keywords.values())
        return not value.__dict__ and all(_collect(part, captured, serials) for part in parts)
    if cls is CACHED_FUNCTION and not goes_by_name(value):
        captured += (_CACHED, *value.cache_parameters().values())
        return value.__dict__.keys() <= _OWN_ATTRIBUTES and _collect(
            value.__wrapped__, captured, serials
        )
    captured.append(value)
    return goes_by_name(value) and _reduces_to_name(value)


def _reduces_to_name(value: Any) -> bool:
    """Return whether the value's own rule for pickling returns a name. Functions whose type is not
    FunctionType, such as NumPy's and cached functions, have such a rule.
    """
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        return isinstance(reduce(value) if reduce else value.__reduce_ex__(4), str)
    except Exception:
        # pickling the function will raise the same error, with a text that names the place of the
        # value
        return False


@cached_by_code
def _rebinds(code: CodeType) -> bool:
    """Return whether this code, or a function inside it, binds globals or cells of an outer
    function."""
    return any(
        op.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        or (
            op.opname in ("STORE_DEREF", "DELETE_DEREF")
            and op.argval in part.co_freevars
            and op.argval in code.co_freevars
        )
        for part in nested_code(code)
        for op in dis.get_instructions(part)
    )


def _collect_function(fn: FunctionType, captured: list[Any], serials: dict[int, int]) -> bool:
    if goes_by_name(fn):
        captured.append(fn)
        return True
    number = serials.get(id(fn))
    if number is not None:
        captured += (_NEXT, number)
        return True
    serials[id(fn)] = len(serials)
    code, names = fn.__code__, fn.__globals__
    if _rebinds(code):
        return False
    captured += (code, fn.__qualname__, fn.__module__)
    parts: list[Any] = []
    if fn.__closure__:
        parts += map(cell_content, fn.__closure__)
    for name in global_names(code):
        parts.append(names.get(name, UNSET))
    keywords, attributes = fn.__kwdefaults__, fn.__dict__
    if keywords or attributes:
        for named in (keywords or {}, attributes):
            captured += (_NAMED, *named)
            parts += named.values()
    if fn.__defaults__:
        parts += fn.__defaults__
    for part in parts:
        if part is UNSET:
            captured.append(UNSET)
        elif not _collect(part, captured, serials):
            return False
    captured.append(_NEXT)
    return True

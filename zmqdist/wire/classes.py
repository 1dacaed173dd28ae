"""Classes that travel by value: what cloudpickle leaves out, and the identity of classes that come
back.

Not here: the pickler (trusted.py).
"""

from __future__ import annotations

import enum
import os
import platform
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from zmqdist.errors import FailedPreconditionError


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
            name = args[1]
            raise FailedPreconditionError(
                f"class {name} of the program cannot be made again in {here()}: "
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

"""Checks of what users pass: that a value has the type that an annotation says, and that an option
exists.

`safe_repr` makes the texts by which objects name themselves at a prompt, in a notebook and in logs.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, reduce, wraps
from inspect import Parameter, signature
from types import NoneType
from typing import Any, Final, TypeVar, cast, get_type_hints

import msgspec

from zmqdist.errors import InvalidArgumentError

T = TypeVar("T", bound=Callable[..., Any])
R = TypeVar("R")

_PARTS: Final[dict[str, tuple[Any, str]]] = {
    "bool": (bool, "True or False"),
    "int": (int, "a whole number"),
    "str": (str, "a str"),
    "os.PathLike": (str, "a path"),
    "Callable": (Callable, "a function"),
    "Iterable": (Iterable, "an iterable"),
    "Collection": (Iterable, "an iterable"),
    "Sequence": (list, "a list"),
    "Mapping": (Mapping, "a mapping"),
    "None": (NoneType, "None"),
}
"""The parts of annotations that `checked` compares with the arguments: the type and the words for
each."""


class ArgumentTypeError(InvalidArgumentError, TypeError):
    """An argument or a field has a value of a wrong type."""


def check_type(name: str, value: Any, kind: Any, words: str) -> None:
    """Raise ArgumentTypeError if a value is not of a type such as `int | None`.

    A bool is no int, an int is a float, a NumPy scalar is the value that it holds, and a path is
    text.

    Args:
      name: the argument or field, for the text of the error.
      words: the type as text.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    plain = (
        value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value
    )
    try:
        msgspec.convert(plain, kind)
    except msgspec.ValidationError:
        raise ArgumentTypeError(f"{name} is {repr(value)[:100]}, wants {words}") from None


def check_fields(config: Any) -> None:
    """Raise ArgumentTypeError if a field of a dataclass is not of the type that its annotation
    says."""
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        words = (
            str(field.type)
            .replace("Sequence[str]", "a list of str")
            .replace(" | None", ", or None")
        )
        check_type(field.name, getattr(config, field.name), hints[field.name], words)


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


F = TypeVar("F", bound=Callable[..., Any])


def checks_options(
    call: str, *more: Callable[..., Any], but: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Return a decorator for a function, or the `__init__` of a class, that users call as `call`.
    An option that does not exist is a TypeError that names this call, not a function inside, and
    the nearest option that exists.

    Args:
      more: functions, also `__init__` of classes, to which the function passes its other options.
      but: options of `more` that users cannot set.
    """

    def decorate(fn: F) -> F:
        @wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check_options(call, kwargs, (fn, *more), but)
            return fn(*args, **kwargs)

        return cast(F, checked)

    return decorate


def check_options(
    call: str,
    options: Iterable[str],
    functions: tuple[Callable[..., Any], ...],
    but: tuple[str, ...] = (),
) -> None:
    """Raise TypeError, as `checks_options` describes, if an option is no parameter of the
    functions, or is one of `but`."""
    for name in options:
        if name not in (names := _option_names(functions, but)):
            hint = did_you_mean(name, names, "there are", repr)
            raise TypeError(f"{call} has no option {name!r}: {hint}")


@cache
def _option_names(functions: tuple[Callable[..., Any], ...], but: tuple[str, ...]) -> list[str]:
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    parameters = [part for fn in functions for part in signature(fn).parameters.values()]
    names = dict.fromkeys(part.name for part in parameters if part.kind in kinds)
    return [name for name in names if name not in ("self", *but)]


def did_you_mean(
    name: object,
    names: Iterable[str],
    otherwise: str = "there are:",
    form: Callable[[str], str] = str,
) -> str:
    """Return a hint for the text of an error about an unknown name: the nearest of `names`, or
    after `otherwise` all of them. `form` quotes the nearest name."""
    names = list(names)
    close = get_close_matches(str(name)[:100], names, n=1)
    if close:
        return f"did you mean {form(close[0])}?"
    return f"{otherwise} {', '.join(names) or 'none'}"


def converted(name: str, convert: Callable[..., R], value: Any, *more: Any) -> R:
    """Return `convert(value, *more)`. If it raises TypeError or ValueError, raise
    ArgumentTypeError, which names the argument."""
    try:
        return convert(value, *more)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{name}: {error}") from None


def checked(target: T) -> T:
    """Have each call of a function check its arguments first, by `check_type`. Use this as a
    decorator of a function that is called rarely, or of a class, whose constructor and public
    methods it changes.

    An argument is checked if its annotation has only bool, int, str, paths, functions, lists,
    iterables, mappings and None. Seconds are checked by clock.py.
    """
    if isinstance(target, type):
        for name, member in list(vars(target).items()):
            if isinstance(member, (staticmethod, classmethod)):
                setattr(target, name, type(member)(checked(member.__func__)))
            elif inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
                setattr(target, name, checked(member))
        return target
    checks: dict[str, tuple[tuple[type, ...], Any, str]] = {}
    for name, annotation in target.__annotations__.items():
        while annotation != (annotation := re.sub(r"\[[^][]*]", "", annotation)):
            pass  # drop the items of generic types, from the innermost outward
        parts = annotation.split(" | ")
        types = tuple(_PARTS[part][0] for part in parts if part in _PARTS)
        # msgspec allows an abstract class beside None only.
        mixed = len({*types} - {NoneType}) > 1 and not {Callable, Iterable}.isdisjoint(types)
        if name != "return" and len(types) == len(parts) and not mixed:
            words = " or ".join(_PARTS[part][1] for part in parts)
            checks[name] = types, reduce(operator.or_, types), words
    code = inspect.unwrap(target).__code__
    names = code.co_varnames[: code.co_argcount]

    @wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            types, kind, words = checks.get(name, ((object, bool), Any, ""))
            if not isinstance(value, types) or (type(value) is bool and bool not in types):
                check_type(name, value, kind, words)
        return target(*args, **kwargs)

    return call  # type: ignore[return-value]


def safe_repr(describe: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a `__repr__` that is `<Class text>`, with the text that `describe` returns, and that
    never raises: a debugger and a log also print objects that are half made or taken apart.

    `describe` sends no message, and its text has no secret.
    """

    @wraps(describe)
    def __repr__(self: Any) -> str:
        try:
            return f"<{type(self).__name__} {describe(self)}>"
        except Exception:
            return f"<{type(self).__name__} not open>"

    return __repr__

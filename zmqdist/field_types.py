"""Checks of what users pass: that a value has the type that an annotation says, and that an option exists."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from numbers import Number
from typing import Any, TypeVar, cast, get_type_hints

import msgspec

from zmqdist.errors import InvalidArgumentError


def check_type(name: str, value: Any, kind: Any, wanted: str) -> None:
    """Raise InvalidArgumentError if a value is not of a type such as `int | None`.

    A bool is no int, an int is a float, a NumPy number is the number that it holds, and a path is text.

    Args:
      name: the argument or field, for the text of the error.
      wanted: the type as text.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    plain = value.item() if isinstance(value, Number) and hasattr(value, "item") else value
    try:
        msgspec.convert(plain, kind)
    except msgspec.ValidationError:
        raise InvalidArgumentError(f"{name} is {value!r}, wants {wanted}") from None


def check_fields(config: Any) -> None:
    """Raise InvalidArgumentError if a field of a dataclass is not of the type that its annotation says."""
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        wanted = str(field.type).replace("Sequence[str]", "a list of str").replace(" | None", ", or None")
        check_type(field.name, getattr(config, field.name), hints[field.name], wanted)


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


F = TypeVar("F", bound=Callable[..., Any])


def checks_options(call: str, *more: Callable[..., Any], but: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Return a decorator for a function, or the `__init__` of a class, that users call as `call`. An
    option that does not exist is a TypeError that names this call, not a function inside, and the
    nearest option that exists.

    Args:
      more: functions, also `__init__` of classes, to which the function passes its other options.
      but: options of `more` that users cannot set.
    """

    def decorate(fn: F) -> F:
        @cache
        def known() -> list[str]:
            kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
            functions: tuple[Callable[..., Any], ...] = (fn, *more)
            parameters = [parameter for each in functions for parameter in signature(each).parameters.values()]
            names = dict.fromkeys(parameter.name for parameter in parameters if parameter.kind in kinds)
            return [name for name in names if name not in ("self", *but)]

        @wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name not in known():
                    close = get_close_matches(name, known(), n=1)
                    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known())}"
                    raise TypeError(f"{call} has no option {name!r}: {hint}")
            return fn(*args, **kwargs)

        return cast(F, checked)

    return decorate

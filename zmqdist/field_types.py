"""Checks that a value has the type that an annotation says, for the fields of configs and for other arguments."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import cache
from numbers import Number
from typing import Any, get_type_hints

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

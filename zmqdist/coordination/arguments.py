"""Checks of the arguments that peers send to the keeper, before a machine gets them."""

from __future__ import annotations

from math import inf, isfinite
from typing import Any, Final

from zmqdist.errors import InvalidArgumentError
from zmqdist.limits import KEY_CHARS_MAX

_INT64: Final = 2**63
_SHOWN_MAX: Final = 100
"""The largest number of characters of a wrong argument that an error text shows."""


def invalid_argument(expectation: str, value: Any) -> InvalidArgumentError:
    """Return the error for an argument that is not what was expected."""
    is_long = isinstance(value, str) and len(value) > _SHOWN_MAX
    shown = f"a str of {len(value)} characters" if is_long else repr(value)[:_SHOWN_MAX]
    return InvalidArgumentError(f"wanted {expectation}, not {shown}")


def text_argument(text: Any, label: str, least: int = 1) -> str:
    """Return a text of `least` to KEY_CHARS_MAX characters."""
    if type(text) is not str or not least <= len(text) <= KEY_CHARS_MAX:
        raise invalid_argument(f"{label}: a str of {least} to {KEY_CHARS_MAX} characters", text)
    return text


def number_argument(value: Any, label: str) -> int:
    """Return a whole number from 0 to 2**63 - 1."""
    if type(value) is not int or not 0 <= value < _INT64:
        raise invalid_argument(label, value)
    return value


def seconds_argument(timeout: Any) -> float:
    """Return a time-out in seconds; `inf` for None."""
    if timeout is None:
        return inf
    if type(timeout) not in (int, float) or not isfinite(timeout) or timeout < 0:
        raise invalid_argument("a time-out in seconds, 0 or more, or None", timeout)
    return float(timeout)


def list_argument(value: Any, label: str) -> list[Any]:
    """Return the items of a list or tuple."""
    if type(value) not in (list, tuple):
        raise invalid_argument(label, value)
    return list(value)

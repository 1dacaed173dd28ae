"""The texts by which objects name themselves at a prompt, in a notebook and in logs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


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

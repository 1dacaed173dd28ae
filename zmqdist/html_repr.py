"""`html_repr`: how objects show themselves in a notebook, as a small table of text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from html import escape
from typing import Any, Final

ROWS_MAX: Final = 20
"""The most rows of a table. A last row says how many there are besides."""

TEXT_CHARS_MAX: Final = 300
"""The most characters that a table shows of one value."""

HtmlRows = Iterable[tuple[str, object]]


def in_notebook() -> bool:
    """Return whether this process runs the cells of a notebook."""
    # does not import IPython, because a notebook has done so
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def html_repr(rows: Callable[[Any], HtmlRows]) -> Callable[[Any], str]:
    """Return a `_repr_html_` that is a table of the rows that `rows` returns, each a name and a
    value, under the name of the class. It never raises: of an object that is half made it shows
    the `repr`.

    Every value is shown as text, so that a name from another process cannot add a tag or a script
    to the notebook; an address of the web becomes a link. Rows with the value None are left out.
    `rows` sends no message.
    """

    @wraps(rows)
    def _repr_html_(self: Any) -> str:
        try:
            cells = [(name, value) for name, value in rows(self) if value is not None]
            if len(cells) > ROWS_MAX:
                cells[ROWS_MAX:] = [("", f"and {len(cells) - ROWS_MAX:,} more")]
            body = "".join(
                f"<tr><th style='text-align: left'>{escape(name)}</th>"
                f"<td style='text-align: left'>{_shown(str(value))}</td></tr>"
                for name, value in cells
            )
        except Exception:
            return f"<pre>{escape(repr(self))}</pre>"
        title = escape(type(self).__name__.lstrip("_"))
        return f"<table><thead><tr><th colspan=2>{title}</th></tr></thead>{body}</table>"

    return _repr_html_


def _shown(text: str) -> str:
    if text.startswith(("http://", "https://")) and text.isprintable():
        return f"<a href='{escape(text)}' rel='noreferrer'>{escape(text)}</a>"
    short = text if len(text) <= TEXT_CHARS_MAX else text[: TEXT_CHARS_MAX - 3] + "..."
    return escape("".join(char if char.isprintable() or char == "\n" else "?" for char in short))

"""The source lines of functions that travel by value, so that a traceback of another process shows
them.

Rules
    The lines travel with the code, because the receiver may lack the file: it is on another host,
    or is a cell of a notebook or what was typed at a prompt. The receiver puts them into
    `linecache`, where tracebacks and `inspect` look.
    The lines of a piece of code are read once. A receiver does nothing for lines that it has.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from types import CodeType

from zmqdist.limits import FUNCTIONS_KEPT_MAX

_sent: dict[int, tuple[CodeType, str]] = {}
"""By id, because comparing code objects is slow. The entry keeps the code alive, so that no other
code gets the id."""

_received: dict[tuple[str, int], str] = {}


def source_of(code: CodeType) -> str:
    """Return the source lines of a function's code, or "" if Python does not know them."""
    known = _sent.get(id(code))
    if known is None:
        if len(_sent) >= 4 * FUNCTIONS_KEPT_MAX:
            _sent.clear()
        lines = _file_of(code)[code.co_firstlineno - 1 : last_line(code)]
        known = _sent[id(code)] = code, "".join(lines)
    return known[1]


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

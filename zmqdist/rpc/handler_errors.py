"""An exception of a handler as the error of its call.

No function here raises. An exception is code of its author (its `__str__` may raise, its constructor may leave out the attributes
of OpError), and a call whose error could not be built would never get a reply.
"""

from __future__ import annotations

import os
import traceback
from typing import Final

from zmqdist import errors
from zmqdist.errors import OpError, UnavailableError
from zmqdist.limits import ERROR_CHARS_MAX
from zmqdist.messages import Reply

_CODES: Final = (
    (NotImplementedError, errors.UNIMPLEMENTED),
    ((ValueError, TypeError), errors.INVALID_ARGUMENT),
    (MemoryError, errors.RESOURCE_EXHAUSTED),
    (StopIteration, errors.OUT_OF_RANGE),
)
TRACEBACK: Final = "\n\nTraceback at the server:\n"
"""Separates class and text of an error from the traceback."""

_HERE: Final = os.path.dirname(__file__)


def failed(id: int, error: BaseException) -> Reply:
    """Return the error reply to call `id`. An OpError keeps its code and text; others get a code by class, and class and traceback
    as text.
    """
    return Reply(id, *code_and_message(error), b"")


def no_room(id: int, reason: str) -> Reply:
    """Return the error reply to call `id`, whose arguments exceed a bound; `reason` names the bound."""
    message = f"{reason}: send fewer at a time, or wait for answers; the call was not carried out"
    return Reply(id, errors.RESOURCE_EXHAUSTED, message, b"")


def stopping() -> UnavailableError:
    """Return the error of a call that a stopping server does not begin."""
    return UnavailableError("the server is stopping; the call was not carried out")


def code_and_message(error: BaseException) -> tuple[int, str]:
    """Return code and message of an error, for a Reply. The code is never OK; a message above ERROR_CHARS_MAX is shortened and says
    so.

    Never raises. Call it in a thread of zmqdist's own, because it treats a KeyboardInterrupt as one that the exception's code has
    raised.
    """
    try:
        if isinstance(error, OpError):
            return _code(error), _encodable(_cut(_message(error), ERROR_CHARS_MAX))
        code = next((code for kinds, code in _CODES if isinstance(error, kinds)), errors.UNKNOWN)
        return code, _encodable(_text(error))
    except BaseException:  # an attribute raised, or a text is not a str
        return errors.UNKNOWN, f"{_encodable(type(error).__name__)} (its text could not be made)"


def _code(error: OpError) -> int:
    """Return the error's code; UNKNOWN if it has none, or OK, which would turn the error into a value."""
    code = getattr(error, "error_code", getattr(error, "code", None))
    return int(code) if isinstance(code, int) and errors.OK < code <= errors.UNAUTHENTICATED else errors.UNKNOWN


def _message(error: OpError) -> str:
    message = getattr(error, "message", None)  # missing if a subclass does not call OpError's constructor
    return f"{type(error).__name__}: {', '.join(map(str, error.args))}" if message is None else str(message)


def _encodable(text: str) -> str:
    """Return `text` with undecodable bytes written as escapes. File names in a message need not be UTF-8."""
    return str.encode(text, "utf-8", "backslashreplace").decode()


def _cut(text: str, most: int) -> str:
    """Return `text` with its middle left out if it is longer than `most` characters."""
    lacks = len(text) - most
    if lacks <= 0:
        return text
    return f"{text[: most // 2]}\n... ({lacks} characters are left out here) ...\n{text[-(most // 2) :]}"


def _text(error: BaseException) -> str:
    """Return class, text and traceback of an error, without the leading frames of this package."""
    try:
        head = f"{type(error).__name__}: {error}"
    except BaseException:  # a __str__ that raises, SystemExit for instance
        return f"{type(error).__name__} (its text could not be made)"
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == _HERE:
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace))
    return f"{_cut(head, ERROR_CHARS_MAX // 2)}{TRACEBACK}{_cut(lines, ERROR_CHARS_MAX // 2)}"

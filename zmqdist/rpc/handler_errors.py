"""The error reply to a call whose handler has raised an exception.

No function here raises, because a call whose error cannot be built would never get a reply. An
exception runs code of the program: its `__str__` may raise, and the constructor of a subclass of
OpError may leave OpError's attributes unset.
"""

from __future__ import annotations

import os
import traceback
from typing import Final

from zmqdist.errors import (
    INVALID_ARGUMENT,
    OK,
    OUT_OF_RANGE,
    RESOURCE_EXHAUSTED,
    UNAUTHENTICATED,
    UNIMPLEMENTED,
    UNKNOWN,
    OpError,
    UnavailableError,
)
from zmqdist.limits import ERROR_CHARS_MAX
from zmqdist.messages import Reply

_CODES: Final = (
    (NotImplementedError, UNIMPLEMENTED),
    ((ValueError, TypeError), INVALID_ARGUMENT),
    (MemoryError, RESOURCE_EXHAUSTED),
    (StopIteration, OUT_OF_RANGE),
)
TRACEBACK: Final = "\n\nTraceback at the server:\n"
"""The text that separates the class and message of an error from the traceback."""

_HERE: Final = os.path.dirname(__file__)


def failed(id: int, error: BaseException) -> Reply:
    """Return the reply to call `id` for an exception of its handler. An OpError keeps its code and
    text. For another exception, its class decides the code, and the text consists of class, message
    and traceback.
    """
    return Reply(id, *code_and_message(error), b"")


def no_room(id: int, reason: str) -> Reply:
    """Return the error reply to call `id`, for whose arguments the server has no room. `reason`
    names the bound that they exceed."""
    message = f"{reason}: send fewer at a time, or wait for answers; the call was not carried out"
    return Reply(id, RESOURCE_EXHAUSTED, message, b"")


def stopping() -> UnavailableError:
    """Return the error of a call that the server does not begin because it stops."""
    return UnavailableError("the server is stopping; the call was not carried out")


def code_and_message(error: BaseException) -> tuple[int, str]:
    """Return the code and the message of an error, for a Reply. The code is never OK. A message of
    more than ERROR_CHARS_MAX characters is shortened, and the message says that it was.

    This never raises. Call it only in a thread of zmqdist, because it handles even a
    KeyboardInterrupt as an exception that the error's own code has raised.
    """
    try:
        if isinstance(error, OpError):
            return _code(error), _encodable(_cut(_message(error), ERROR_CHARS_MAX))
        code = next((code for kinds, code in _CODES if isinstance(error, kinds)), UNKNOWN)
        return code, _encodable(_text(error))
    except BaseException:
        # an attribute of the error has raised an exception, or its text is not a str
        return UNKNOWN, f"{_encodable(type(error).__name__)} (its text could not be made)"


def _code(error: OpError) -> int:
    """Return the error's code. Return UNKNOWN if the error has no code, or has the code OK, which
    would turn the error into a value."""
    code = getattr(error, "error_code", getattr(error, "code", None))
    return int(code) if isinstance(code, int) and OK < code <= UNAUTHENTICATED else UNKNOWN


def _message(error: OpError) -> str:
    # the attribute is missing if a subclass does not call OpError's constructor
    message = getattr(error, "message", None)
    return (
        f"{type(error).__name__}: {', '.join(map(str, error.args))}"
        if message is None
        else str(message)
    )


def _encodable(text: str) -> str:
    """Return `text` with lone surrogates written as escapes, so that it can be encoded. File names
    in a message, which need not be UTF-8, cause lone surrogates.
    """
    return str.encode(text, "utf-8", "backslashreplace").decode()


def _cut(text: str, most: int) -> str:
    """Return `text`, without its middle if it is longer than `most` characters."""
    lacks = len(text) - most
    if lacks <= 0:
        return text
    return f"{text[: most // 2]}\n... ({lacks} characters are left out here) ...\n{text[-(most // 2) :]}"


def _text(error: BaseException) -> str:
    """Return class, message and traceback of an error as one text. The traceback omits the leading
    frames of this package."""
    try:
        head = f"{type(error).__name__}: {error}"
    except BaseException:  # `__str__` of the error has raised an exception, for instance SystemExit
        return f"{type(error).__name__} (its text could not be made)"
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == _HERE:
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace))
    return f"{_cut(head, ERROR_CHARS_MAX // 2)}{TRACEBACK}{_cut(lines, ERROR_CHARS_MAX // 2)}"

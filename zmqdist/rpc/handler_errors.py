"""What a handler raised, as the error of its call.

Nothing here raises: an exception is its author's code (a `__str__` that raises, a constructor that leaves out the attributes of
OpError), and a call whose error cannot be made would never end.
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
"""Between class and text of an error, and where it was raised."""

_HERE: Final = os.path.dirname(__file__)


def failed(id: int, error: BaseException) -> Reply:
    """The answer to call `id`: an OpError keeps its code and text, anything else has a code by its class, and class and traceback."""
    return Reply(id, *code_and_message(error), b"")


def no_room(id: int, why: str) -> Reply:
    """The answer to call `id` whose arguments exceed a bound."""
    code_and_message = f"{why}: send fewer at a time, or wait for answers; the call was not carried out"
    return Reply(id, errors.RESOURCE_EXHAUSTED, code_and_message, b"")


def stopping() -> UnavailableError:
    """The error of a call that a server will not begin any more."""
    return UnavailableError("the server is stopping; the call was not carried out")


def code_and_message(error: BaseException) -> tuple[int, str]:
    """Code and message of an error, for a Reply. The code is one of an error, and a message above ERROR_CHARS_MAX says what it lacks.

    Never raises. To be called in a thread of ours: it takes a KeyboardInterrupt for the exception's own.
    """
    try:
        if isinstance(error, OpError):
            return _code(error), _encodable(_cut(_message(error), ERROR_CHARS_MAX))
        code = next((code for kinds, code in _CODES if isinstance(error, kinds)), errors.UNKNOWN)
        return code, _encodable(_text(error))
    except BaseException:  # attributes that raise, text that is none
        return errors.UNKNOWN, f"{_encodable(type(error).__name__)} (its text could not be made)"


def _code(error: OpError) -> int:
    """UNKNOWN for what is no code of an error: OK, too, which would make a value of it."""
    code = getattr(error, "error_code", getattr(error, "code", None))
    return int(code) if isinstance(code, int) and errors.OK < code <= errors.UNAUTHENTICATED else errors.UNKNOWN


def _message(error: OpError) -> str:
    message = getattr(error, "message", None)  # none where the constructor of a subclass does not call ours
    return f"{type(error).__name__}: {', '.join(map(str, error.args))}" if message is None else str(message)


def _encodable(text: str) -> str:
    """A text that may have the name of a file in it, whose bytes need not be UTF-8: with those written out."""
    return str.encode(text, "utf-8", "backslashreplace").decode()


def _cut(text: str, most: int) -> str:
    """A long text without its middle."""
    lacks = len(text) - most
    if lacks <= 0:
        return text
    return f"{text[: most // 2]}\n... ({lacks} characters are left out here) ...\n{text[-(most // 2) :]}"


def _text(error: BaseException) -> str:
    """Class, text and traceback, without the frames of this package."""
    try:
        head = f"{type(error).__name__}: {error}"
    except BaseException:  # a __str__ that raises, SystemExit for instance
        return f"{type(error).__name__} (its text could not be made)"
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == _HERE:
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace))
    return f"{_cut(head, ERROR_CHARS_MAX // 2)}{TRACEBACK}{_cut(lines, ERROR_CHARS_MAX // 2)}"

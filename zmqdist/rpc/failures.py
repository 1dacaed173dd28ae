"""What a handler raised, as the error of its call."""

from __future__ import annotations

import os
import traceback
from typing import Final

from zmqdist import errors
from zmqdist.errors import OpError
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
    return Reply(id, *told(error), b"")


def told(error: BaseException) -> tuple[int, str]:
    """Code and message of an error. Never raises."""
    if isinstance(error, OpError):
        return error.error_code, _encodable(error.message)
    code = next((code for kinds, code in _CODES if isinstance(error, kinds)), errors.UNKNOWN)
    return code, _encodable(_text(error))


def _encodable(text: str) -> str:
    """A text that may have the name of a file in it, whose bytes need not be UTF-8: with those written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _text(error: BaseException) -> str:
    """Class, text and traceback, without the frames of this package."""
    try:
        head = f"{type(error).__name__}: {error}"
        trace = error.__traceback__
        while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == _HERE:
            trace = trace.tb_next
        return f"{head}{TRACEBACK}{''.join(traceback.format_exception(type(error), error, trace))}"
    except Exception:  # a __str__ that raises
        return f"{type(error).__name__} (its text could not be made)"

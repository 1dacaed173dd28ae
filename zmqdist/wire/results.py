"""Results and errors of scheduled functions as bytes, in two forms: pickled (trusted.py), or with a
closed set of types (safe.py).

A program with `results: safe` marks each payload that it sends, and the worker then replies in the
safe form. The program refuses results that are pickles, and so does each worker that uses a result
of this program as an input. So if a worker sends a pickle in order to run code elsewhere, the
pickle causes an error instead.

    value   SAFE, then the body of the safe codec; the frames of the value follow as further parts
    error   SAFE, then MessagePack: code (-1 if it is not an OpError), class, text, traceback, whether the function had not begun
"""

from __future__ import annotations

import builtins
import traceback
from contextlib import suppress
from typing import Any, Final

import msgspec

from zmqdist.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    UnknownError,
    WireError,
    from_code,
)
from zmqdist.limits import ERROR_CHARS_MAX, INLINE_BYTES_MAX
from zmqdist.wire import safe, trusted

SAFE: Final = b"\xc5"
"""The mark of the safe form. No pickle and no MessagePack string begins with it. A payload with
this mark requires a result in the safe form.
"""

_SENDER: Final = "a worker"
_ERROR: msgspec.msgpack.Decoder[tuple[int, str, str, str, bool, str]] = msgspec.msgpack.Decoder(
    tuple[int, str, str, str, bool, str]
)
_FOREIGN: Final = -1


def pack(value: Any) -> trusted.Packed:
    """Return a result in the safe form: one blob or a list of buffers, as `trusted.pack` returns.

    Raises:
      InvalidArgumentError: the result contains a value of a type that the safe codec refuses. The
        text names the place and the type, and says what to do.
    """
    try:
        body, frames = safe.encode(value)
    except InvalidArgumentError as error:
        problem = error.message.replace("travel by RPC", "are permitted")
        raise InvalidArgumentError(
            f"the function returned a value that `results: safe` refuses: {problem}; return one "
            f"of these, or leave out "
            "`results: safe` if you trust the workers"
        ) from None
    return SAFE + body if not frames and len(body) < INLINE_BYTES_MAX else [SAFE + body, *frames]


def unpack(packed: Any, *, safe_only: bool) -> Any:
    """Return the value of a result, which is a blob or a list of buffers, in the safe form or
    pickled.

    Args:
      safe_only: whether to refuse a result that is a pickle.

    Raises:
      FailedPreconditionError: the result is a pickle, and `safe_only` refuses it.
      WireError: the bytes are damaged.
      Exception: any error of `trusted.unpack`.
    """
    head, frames = (packed[0], packed[1:]) if isinstance(packed, list) else (packed, [])
    if head[:1] == SAFE:
        return safe.decode(memoryview(head)[1:], frames, _SENDER)
    if safe_only:
        raise FailedPreconditionError(
            "a worker replied with a pickle, which `results: safe` refuses: it runs another "
            "version of zmqdist, or is not to be trusted"
        )
    return trusted.unpack_parts(packed) if isinstance(packed, list) else trusted.unpack(packed)


def pack_error(error: BaseException, *, unpickling: bool = False, origin: str = "") -> bytes:
    """Return an exception with its traceback, in the safe form. `unpack_error` keeps the class of
    an OpError, and of an Exception that is built into Python if its constructor takes a text alone.
    `unpickling` and `origin` are as in `trusted.pack_error`.
    """
    error = trusted.as_ordinary_error(error)
    code = error.error_code if isinstance(error, OpError) else _FOREIGN
    text = error.message if isinstance(error, OpError) else trusted.text_of(error)
    remote = "".join(traceback.format_exception(error))
    name = (
        type(error).__qualname__
        if type(error).__module__ == "builtins"
        else trusted.type_name(error)
    )
    return SAFE + msgspec.msgpack.encode(
        [code, name, _printable(text), _printable(remote), unpickling, origin]
    )


def unpack_error(packed: Any, *, safe_only: bool) -> BaseException:
    """Return a new copy of the exception, with a RemoteTraceback as its cause. If the error is a
    pickle and is refused, return an error that says so.
    """
    blob = bytes(packed)
    if blob[:1] != SAFE:
        if not safe_only:
            return trusted.unpack_error(blob)
        return FailedPreconditionError(
            "a function failed, and its worker replied with a pickle, which `results: safe` "
            "refuses: it runs another version of zmqdist, "
            "or is not to be trusted"
        )
    try:
        code, name, text, remote, unpickling, origin = _ERROR.decode(memoryview(blob)[1:])
    except (msgspec.DecodeError, ValueError) as problem:
        return WireError(_SENDER, f"damaged error: {problem}")
    error = _rebuilt(code, name, text)
    cause = error.__cause__ = trusted.RemoteTraceback(remote)
    cause.unpickling, cause.origin = unpickling, origin
    return error


def _rebuilt(code: int, name: str, text: str) -> BaseException:
    if code != _FOREIGN:
        return from_code(code, text)
    cls = getattr(builtins, name, None)
    if isinstance(cls, type) and issubclass(cls, Exception) and cls.__module__ == "builtins":
        # some constructors, such as UnicodeDecodeError's, need more arguments
        with suppress(TypeError):
            return cls(text)
    return UnknownError(f"{name}: {text}")


def _printable(text: str) -> str:
    return text[-ERROR_CHARS_MAX:].encode("utf-8", "backslashreplace").decode()

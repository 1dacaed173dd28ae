"""Results and errors of scheduled functions as bytes, in two forms: pickled (trusted.py), or of the closed set of types (safe.py).

A program with `results: safe` marks each payload that it sends, and the worker answers in the safe form. The program, and each worker that
uses such a result as an input, then refuses pickles: a worker that writes one to run code elsewhere gets an error in its place.

    value   SAFE, then the body of the safe codec; its frames follow as further parts
    error   SAFE, then MessagePack: code (-1 for a class of Python's), class, text, traceback, whether it was met before the function began
"""

from __future__ import annotations

import builtins
import traceback
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
"""Neither a pickle nor MessagePack's strings begin with it; in front of a payload it says in which form the result is wanted."""

_SENDER: Final = "a worker"
_ERROR: msgspec.msgpack.Decoder[tuple[int, str, str, str, bool]] = msgspec.msgpack.Decoder(
    tuple[int, str, str, str, bool]
)
_FOREIGN: Final = -1


def pack(value: Any) -> trusted.Packed:
    """A result in the safe form, as `trusted.pack`.

    Raises:
      InvalidArgumentError: it has something of another type; the text says where, which, and what to do.
    """
    try:
        body, frames = safe.encode(value)
    except InvalidArgumentError as error:
        problem = error.message.replace("travel by RPC", "are let through")
        raise InvalidArgumentError(
            f"the function returned what `results: safe` does not let through: {problem}; return one of these, or leave out "
            "`results: safe` if you trust the workers"
        ) from None
    if not frames and len(body) < INLINE_BYTES_MAX:
        return SAFE + body
    return [SAFE + body, *frames]


def unpack(packed: Any, *, safe_only: bool) -> Any:
    """The value of a blob or of a list of buffers, in either form.

    Args:
      safe_only: refuse a pickle.

    Raises:
      FailedPreconditionError: it is a pickle, and is refused.
      WireError: damaged.
      Exception: as `trusted.unpack`.
    """
    head, frames = (packed[0], packed[1:]) if isinstance(packed, list) else (packed, [])
    body = memoryview(head).cast("B")
    if bytes(body[:1]) == SAFE:
        return safe.decode(body[1:], frames, _SENDER)
    if safe_only:
        raise FailedPreconditionError(
            "a worker answered with a pickle, which `results: safe` refuses: it runs another version of zmqdist, or is not to be trusted"
        )
    return trusted.unpack_parts(packed) if isinstance(packed, list) else trusted.unpack(packed)


def pack_error(error: BaseException, *, unpickling: bool = False) -> bytes:
    """An exception with its traceback, in the safe form. Its class is kept if it is one of zmqdist's codes or of Python's own."""
    error = trusted.tamed(error)
    code = error.error_code if isinstance(error, OpError) else _FOREIGN
    text = error.message if isinstance(error, OpError) else trusted.text_of(error)
    remote = "".join(traceback.format_exception(error))
    name = type(error).__qualname__ if type(error).__module__ == "builtins" else trusted.type_name(error)
    told = [code, name, *(_printable(each) for each in (text, remote)), unpickling]
    return SAFE + msgspec.msgpack.encode(told)


def unpack_error(packed: Any, *, safe_only: bool) -> BaseException:
    """A fresh copy of the exception, with a RemoteTraceback as its cause. A pickle that is refused gives the error that says so."""
    blob = bytes(packed)
    if blob[:1] != SAFE:
        if not safe_only:
            return trusted.unpack_error(blob)
        return FailedPreconditionError(
            "a function failed, and its worker answered with a pickle, which `results: safe` refuses: it runs another version of zmqdist, "
            "or is not to be trusted"
        )
    try:
        code, name, text, remote, unpickling = _ERROR.decode(memoryview(blob)[1:])
    except (msgspec.DecodeError, ValueError) as problem:
        return WireError(_SENDER, f"damaged error: {problem}")
    error = _rebuilt(code, name, text)
    cause = error.__cause__ = trusted.RemoteTraceback(remote)
    cause.unpickling = unpickling
    return error


def _rebuilt(code: int, name: str, text: str) -> BaseException:
    if code != _FOREIGN:
        return from_code(code, text)
    cls = getattr(builtins, name, None)
    if isinstance(cls, type) and issubclass(cls, Exception) and cls.__module__ == "builtins":
        try:
            return cls(text)
        except TypeError:  # UnicodeDecodeError wants more
            pass
    return UnknownError(f"{name}: {text}")


def _printable(text: str) -> str:
    return text[-ERROR_CHARS_MAX:].encode("utf-8", "backslashreplace").decode()

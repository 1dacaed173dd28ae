"""Results of other work: how they come to be arguments, and how those that stay with their worker are fetched.

In the pickle of the arguments, or of a function that captures it, a result is a call of `input_value` with the number of its work. What it
stands for comes with each payload, beside the arguments: the packed result, or a reference to where it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from zmqdist import errors
from zmqdist.scheduling.worker.references import PartsFetcher, decode_inputs, decode_reference, is_reference
from zmqdist.wire import trusted

_of_thread = threading.local()
_LOSS: msgspec.msgpack.Decoder[tuple[int, bytes]] = msgspec.msgpack.Decoder(tuple[int, bytes])


class InputLost(Exception):
    """An input is not where it was kept. Only inside `call.run`.

    Attributes:
      work: the number of the work whose result it was.
      error: what to tell when it is not made again.
    """

    def __init__(self, work: int, error: errors.OpError) -> None:
        super().__init__(work, error)
        self.work = work
        self.error = error


def encode_loss(lost: InputLost) -> bytes:
    """The payload of INPUT_LOST."""
    return msgspec.msgpack.encode((lost.work, trusted.pack_error(lost.error)))


def decode_loss(payload: bytes) -> tuple[int, bytes]:
    """Which input was lost, and the packed error. Raises WireError for what is none."""
    try:
        return _LOSS.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        raise errors.WireError("?", f"damaged outcome: {error}") from None


def use_fetcher(fetcher: PartsFetcher) -> None:
    """The present thread runs functions: their inputs that are elsewhere are fetched by this one."""
    _of_thread.fetcher = fetcher


def prepare_inputs(payload: bytes, fetched: Callable[[bytes], list[Any]]) -> bytes:
    """Have the inputs of a payload ready for `input_value` in this thread; gives the packed arguments.

    Args:
      payload: what follows the mark.
      fetched: gets the parts that a reference stands for: many inputs may be too large for a message together.
    """
    if is_reference(payload):
        payload = bytes(fetched(payload)[0])
    _of_thread.inputs, packed = decode_inputs(payload)
    return packed


def input_value(work: int, name: str) -> Any:
    """What the pickle of a result calls; the name is part of the protocol.

    Args:
      work: the number of the work whose result it is; `name`: its function's, for the error.

    Raises:
      InputLost: it is not where it was kept.
      Exception: what a class in it raises while it is rebuilt.
    """
    encoded = _of_thread.inputs[work]
    if not is_reference(encoded):
        return trusted.unpack(encoded)
    try:
        return fetch(_of_thread.fetcher, encoded, name)
    except errors.UnavailableError as error:
        raise InputLost(work, error) from None


def kept_value(encoded: bytes, name: str) -> Any:
    """What the pickle of a kept result calls where it is no input, but part of what may be used at any time; the name is part of the
    protocol. Raises as `fetch`."""
    return fetch(_of_thread.fetcher, encoded, name)


def fetch(fetcher: PartsFetcher, encoded: bytes, name: str) -> Any:
    """The value, private to the caller; it stays with its holder, too.

    Args:
      encoded: the reference to it.
      name: of the function that returned it, for the error.

    Raises:
      UnavailableError: its holder has ended, or has let go of it.
      Exception: what a class in it raises while it is rebuilt.
    """
    reference = decode_reference(encoded)
    try:
        parts = fetcher.fetch(reference)
    except (errors.UnavailableError, errors.NotFoundError, errors.DeadlineExceededError) as error:
        holder = reference.address + (f" ({reference.holder})" if reference.holder else "")
        problem = (
            f"the value of {name} was kept by the worker at {holder} and is lost: schedule {name} again"
            f" ({error.message})"
        )
        raise errors.UnavailableError(problem) from None
    return trusted.unpack_parts(parts)

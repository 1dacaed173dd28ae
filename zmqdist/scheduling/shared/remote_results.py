"""Results of other work items as arguments of a function, and the fetch of kept values from their
workers.

A pickle of arguments, or of a function that captures the result, contains the result as a call of
`input_value` with the number of the work item. The payload carries the value for this call beside
the arguments: the packed result, or a reference to the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import msgspec

from zmqdist import errors
from zmqdist.scheduling.shared.references import (
    PartsFetcher,
    decode_inputs,
    decode_reference,
    is_reference,
)
from zmqdist.wire import results


class _OfThread(threading.local):
    """What the functions of the calling thread use.

    Attributes:
      fetcher: fetches the inputs of all functions which the thread runs.
      safe_only: whether the present function accepts inputs in the safe form only.
      inputs: the inputs of the present function, packed or as references, by work number.
    """

    fetcher: PartsFetcher
    safe_only = False
    inputs: dict[int, bytes]


of_thread = _OfThread()

PART_SHIFT: Final = 48
"""An input that is a part of a result has the number of the part above these bits, and the number
of the work item below."""

_LOSS: msgspec.msgpack.Decoder[tuple[int, bytes]] = msgspec.msgpack.Decoder(tuple[int, bytes])


class InputLost(Exception):
    """The holder no longer has the value of an input. Raised only inside `function_call.run`.

    Attributes:
      work: the number of the work item whose result the input is, with that of the part.
      error: the error with which the function fails if the input is not recomputed.
    """

    def __init__(self, work: int, error: errors.OpError) -> None:
        super().__init__(work, error)
        self.work = work
        self.error = error


def encode_loss(lost: InputLost) -> bytes:
    """Return the payload of an INPUT_LOST outcome for this lost input."""
    return msgspec.msgpack.encode((lost.work, results.pack_error(lost.error)))


def decode_loss(payload: bytes) -> tuple[int, bytes]:
    """Return the lost input and the packed error of an INPUT_LOST outcome. Raises WireError if the
    payload is damaged."""
    try:
        number, error = _LOSS.decode(payload)
        return number & ((1 << PART_SHIFT) - 1), error
    except (msgspec.DecodeError, ValueError) as error:
        raise errors.WireError("?", f"damaged outcome: {error}") from None


def prepare_inputs(payload: bytes, fetched: Callable[[bytes], list[Any]]) -> bytes:
    """Take the inputs out of a payload and store them for `input_value` of the calling thread.
    Return the packed arguments.

    Args:
      payload: the payload after its mark INPUTS, or a reference to it if the inputs are too large
        for a message.
      fetched: returns the parts of a reference.
    """
    if is_reference(payload):
        payload = bytes(fetched(payload)[0])
    of_thread.inputs, packed = decode_inputs(payload)
    return packed


def input_value(work: int, name: str) -> Any:
    """Return the value of an input. The pickle of a RemoteValue calls this function by name, so the
    name is part of the protocol.

    Args:
      work: the number of the work item whose result the input is, with that of the part.
      name: the function of that work item, for the error text.

    Raises:
      InputLost: the holder no longer has the value.
      Exception: raised by a class in the value while the value is unpickled.
    """
    encoded = of_thread.inputs[work]
    if not is_reference(encoded):
        return results.unpack(encoded, safe_only=of_thread.safe_only)
    try:
        return fetch(of_thread.fetcher, encoded, name, safe_only=of_thread.safe_only)
    except errors.UnavailableError as error:
        raise InputLost(work, error) from None


def kept_value(encoded: bytes, name: str) -> Any:
    """Return a kept value. The pickle of a resource's definition calls this function by name, so
    the name is part of the protocol.

    The pickle contains the reference itself, because a worker may build the resource at any time.
    Raises the errors of `fetch`.
    """
    return fetch(of_thread.fetcher, encoded, name, safe_only=of_thread.safe_only)


def fetch(fetcher: PartsFetcher, encoded: bytes, name: str, *, safe_only: bool = False) -> Any:
    """Fetch and unpickle a kept value. The caller gets a copy, and the holder keeps the value.
    Blocks as `Fetcher.fetch` does.

    Args:
      encoded: the reference to the value.
      name: the function that returned the value, for the error text.
      safe_only: whether to refuse a pickle with FailedPreconditionError.

    Raises:
      UnavailableError: the holder has ended, or has freed the value.
      Exception: raised by a class in the value while the value is unpickled.
    """
    reference = decode_reference(encoded)
    try:
        parts = fetcher.fetch(reference)
    except (errors.UnavailableError, errors.NotFoundError, errors.DeadlineExceededError) as error:
        holder = reference.address + (f" ({reference.holder})" if reference.holder else "")
        problem = (
            f"the value of {name} was kept by the worker at {holder} and is lost: schedule {name} "
            f"again"
            f" ({error.message})"
        )
        raise errors.UnavailableError(problem) from None
    return results.unpack(parts, safe_only=safe_only)

"""The functions that a client has as attributes, for the methods of its server.

These functions refer to the channel and not to the client, so that no reference cycle keeps a
dropped client alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import numpy as np

from zmqdist.clock import monotonic
from zmqdist.errors import InvalidArgumentError
from zmqdist.rpc import payload
from zmqdist.rpc.future import StatusOrResult, as_returned, outcome
from zmqdist.rpc.method_list import MethodInfo
from zmqdist.rpc.output_array import OutputArray
from zmqdist.rpc.signatures import Parameters, is_flat
from zmqdist.rpc.snapshots import snapshot
from zmqdist.rpc.streams import Stream
from zmqdist.transport.calls_machine import NEVER_S, ClientCall
from zmqdist.transport.channel import Channel


def due_after(timeout_in_ms: float, default_in_ms: float) -> float:
    """Return the deadline of a call that begins now, on the clock of `time.monotonic`. `inf` means
    no deadline.

    Args:
      timeout_in_ms: milliseconds, which may be a NumPy number. 0 or less means `default_in_ms`.
      default_in_ms: milliseconds. 0 or less means no deadline.

    Raises:
      TypeError, ValueError: `timeout_in_ms` is not a number.
    """
    try:
        if type(timeout_in_ms) in (bool, np.bool_):
            raise TypeError
        if timeout_in_ms <= 0:
            timeout_in_ms = default_in_ms
        if timeout_in_ms > 0:
            # Without `float`, a time-out that is a float32 would make a sum that is too coarse for
            # a clock.
            due = monotonic() + float(timeout_in_ms) / 1000
            return due if due < NEVER_S else inf
    except (TypeError, ValueError):  # `float` raises ValueError for an array
        text = f"timeout_in_ms is a number of milliseconds, 0 for the default, not {type(timeout_in_ms).__name__}"
        raise TypeError(text) from None
    except OverflowError:  # the int is too large for a float
        return inf
    if timeout_in_ms != timeout_in_ms:
        raise ValueError("timeout_in_ms is a number of milliseconds, 0 for the default, not NaN")
    return inf


def check_name(name: str) -> None:
    """Raise TypeError or InvalidArgumentError if `name` cannot be the name of a method."""
    if not isinstance(name, str):
        raise TypeError(f"method_name: a method's name is a str, not {type(name).__name__}")
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidArgumentError(
                f"{name!r} is no method's name: it is no text in UTF-8"
            ) from None


def packed_arguments(args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return the arguments of a call in the form in which they travel (methods.py)."""
    return {**named, "": args} if named else args


def _check(info: MethodInfo) -> Callable[[tuple[Any, ...], Mapping[str, Any]], None]:
    """Return a function that raises TypeError or ValueError for arguments with wrong names or, if
    there is a signature, another structure. A stub calls it before it sends the call.
    """
    parameters, specs = Parameters(info.signature), info.input_signature

    def check(args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if specs is None:
            parameters.check_names(len(args), named)
        else:
            parameters.fit(specs, args, named, lambda value, spec: None)

    return check


def _count(info: MethodInfo) -> int | None:
    """Return how many positional arguments a call must have to be sent without a check, if it has
    no arguments by name. `None` means any number. -1 means that every call needs a check.
    """
    specs = info.input_signature
    return None if specs is None else len(specs) if is_flat(specs) else -1


def stubs(
    channel: Channel, info: MethodInfo, default_in_ms: float
) -> tuple[Callable[..., Any], ...]:
    """Return the function `client.m` of a method and, unless the method is a stream, also
    `client.m_blocking`."""
    functions = (
        (_stream(channel, info, default_in_ms),)
        if info.streaming
        else _calls(channel, info, default_in_ms)
    )
    for function, name in zip(functions, (info.name, f"{info.name}_blocking"), strict=False):
        function.__name__ = function.__qualname__ = name
        function.__doc__ = f"RPC Call for {info.name} method to server {channel.address}"
    return functions


def _calls(
    channel: Channel, info: MethodInfo, default_in_ms: float
) -> tuple[Callable[..., Any], ...]:
    name, check, count = info.name, _check(info), _count(info)

    def prepare(
        args: tuple[Any, ...], named: dict[str, Any], timeout_in_ms: int, still: bool
    ) -> ClientCall:
        due = due_after(timeout_in_ms, default_in_ms)
        if named or (count is not None and len(args) != count):
            check(args, named)
        body, parts = payload.pack(packed_arguments(args, named) if named else args)
        return ClientCall(
            name,
            body,
            snapshot(parts, lends=channel.shares_memory, still=still) if parts else (),
            due,
        )

    def start(*args: Any, timeout_in_ms: int = 0, out: Any = None, **named: Any) -> StatusOrResult:
        read = as_returned if out is None else (output := OutputArray(out)).read
        call = prepare(args, named, timeout_in_ms, False)
        if out is not None:
            call.allocate = output.room
        channel.submit(call)
        return StatusOrResult(channel, call, read)

    def wait(*args: Any, timeout_in_ms: int = 0, out: Any = None, **named: Any) -> Any:
        read = as_returned if out is None else (output := OutputArray(out)).read
        call = prepare(args, named, timeout_in_ms, True)
        if out is not None:
            call.allocate = output.room
        try:
            channel.call_and_wait(call)
        except BaseException:
            # Ctrl-C, or a signal handler that raises, has ended the wait. The caller may now change
            # the arrays, so they must not be sent.
            channel.cancel(call)
            raise
        return outcome(call, channel.address, read)

    return start, wait


def _stream(channel: Channel, info: MethodInfo, default_in_ms: float) -> Callable[..., Stream]:
    name, check = info.name, _check(info)

    def begin(*args: Any, timeout_in_ms: int = 0, **named: Any) -> Stream:
        check(args, named)
        return Stream(
            channel, name, packed_arguments(args, named), due_after(timeout_in_ms, default_in_ms)
        )

    return begin

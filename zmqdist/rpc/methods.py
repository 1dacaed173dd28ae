"""Registered functions: which functions may be registered, and how the body of a call becomes their
arguments.

The body of a Call on the wire
    a tuple   the arguments, each with its structure
    a dict    the arguments by name, and under "" the tuple of the positional arguments
    a list    the leaves of the arguments, as `Client.call` sends them; this module packs the leaves into the structure of the signature

Not here: when and in which thread a function runs (service.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, Final

from zmqdist.errors import InvalidArgumentError, OpError, UnknownError, WireError
from zmqdist.rpc import payload
from zmqdist.rpc.method_list import MethodInfo, first_line
from zmqdist.rpc.signatures import Parameters, convert_args, convert_leaves, fit, signature_of
from zmqdist.specs import Function, convert, function

_NONE: Final[dict[str, Any]] = {}


class Method:
    """One registered function.

    Attributes:
      roles: roles that may call the method, besides `admin`; `None` means every authenticated peer.
      later: whether the function runs in the loop, takes a PendingCall before the arguments, and
        replies through it at any later time.
      streaming: whether the function is a generator function, whose calls are streams
        (generators.py).
      pooled: whether each call runs in a thread of the server's pool.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        input_signature: Any = None,
        output_signature: Any = None,
        *,
        inline: bool = False,
        roles: frozenset[str] | None = None,
        later: bool = False,
        streaming: bool = False,
    ) -> None:
        self.name = name
        self.later = later
        self.streaming = streaming
        self.batch = False
        self.pooled = not (inline or later or streaming)
        self.fn = fn
        self.inline = inline
        self.roles = None if roles is None else roles | {"admin"}
        self.input_signature = input_signature
        self.output_signature = output_signature
        self._doc = first_line(fn)
        self._parameters = Parameters(signature_of(partial(fn, None) if later else fn))

    def run(self, body: bytes, frames: Any, peer: str) -> Any:
        """Call the function with the arguments in `body` and `frames`. The list `frames` is
        emptied."""
        arguments = payload.unpack(body, frames, peer)
        if frames:
            # the caller refers to this list; an argument in the result is sent without a copy only
            # if nothing else refers to its frame
            frames.clear()
        if (
            type(arguments) is tuple
            and self.input_signature is None
            and self._parameters.problem(len(arguments)) is None
        ):
            # the most frequent case: the method has no signature to check
            value = self.fn(*arguments)
        else:
            args, named = self.checked(arguments, peer)
            del arguments
            value = self.fn(*args, **named)
        return value if self.output_signature is None else self.result(value)

    def result(self, value: Any) -> Any:
        """Return the function's result in the structure of its output signature, if it has an
        output signature. Raises UnknownError if the result does not fit.
        """
        if self.output_signature is None:
            return value
        try:
            return fit(self.output_signature, value, convert, "result")
        except (TypeError, ValueError, OpError, RecursionError) as error:
            raise UnknownError(
                f"{self.name} returned a value that does not fit its output_signature: {error}"
            ) from None

    def arguments(
        self, body: bytes, frames: Any, peer: str
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the function's arguments, decoded from `body` and `frames`. Raises
        InvalidArgumentError if they do not fit the function or its signature.
        """
        arguments = payload.unpack(body, frames, peer)
        if frames:
            frames.clear()
        return self.checked(arguments, peer)

    def checked(self, arguments: Any, peer: str) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return (positional arguments, arguments by name) of a decoded body. Raises
        InvalidArgumentError if they do not fit the function or its signature.
        """
        specs = self.input_signature
        named = _NONE
        try:
            kind = type(arguments)
            if kind is dict:
                arguments, named = _split(arguments, peer)
            elif kind is list and specs is not None:
                return convert_leaves(specs, arguments, self._parameters.optional), _NONE
            elif kind is not tuple and kind is not list:
                raise WireError(peer, "the arguments are neither a tuple, a list nor a dict")
            if specs is None:
                if named:
                    if self._parameters.signature is not None:
                        self._parameters.signature.bind(*arguments, **named)
                else:
                    problem = self._parameters.problem(len(arguments))
                    if problem is not None:
                        raise ValueError(problem)
                return list(arguments), named
            if not named and len(arguments) == len(specs):
                return convert_args(specs, arguments), _NONE
            return self._parameters.fit(specs, arguments, named, convert)
        except (TypeError, ValueError, OpError) as error:
            raise InvalidArgumentError(f"{self.name}: {error}") from None

    def info(self) -> MethodInfo:
        """Return the description of this method for clients."""
        return MethodInfo(
            self.name,
            self._parameters.signature,
            self.input_signature,
            self.output_signature,
            self.streaming,
            self.batch,
            self._doc,
        )


def _split(arguments: dict[Any, Any], peer: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = arguments.pop("", None)
    if type(args) is not tuple or not all(type(name) is str for name in arguments):
        raise WireError(peer, "arguments by name without a tuple of the positional ones")
    return args, arguments


def method_for(
    name: str,
    fn: Callable[..., Any],
    input_signature: Any,
    output_signature: Any,
    inline: bool,
    roles: frozenset[str] | None,
) -> Method:
    """Return a Method for `fn`. Raises the errors of `RpcService.register`."""
    if not callable(fn):
        raise TypeError(f"{name}: a method is a callable, not {type(fn).__name__}")
    function_of_method = fn.__func__ if isinstance(fn, MethodType) else fn
    declared = function_of_method if isinstance(function_of_method, Function) else None
    plain = fn if declared is None else declared.__wrapped__
    runs: Any = plain
    if not (inspect.isroutine(plain) or isinstance(plain, (type, partial))):
        runs = type(plain).__call__
    if inspect.iscoroutinefunction(runs) or inspect.isasyncgenfunction(runs):
        raise TypeError(f"{name}: an async function has no event loop here; register a plain one")
    streaming = inspect.isgeneratorfunction(runs)
    if streaming and inline:
        raise ValueError(
            f"{name}: a generator function has a thread of its own, so it cannot be inline"
        )
    if declared is not None:
        input_signature = declared.input_signature if input_signature is None else input_signature
        output_signature = (
            declared.output_signature if output_signature is None else output_signature
        )
    parameters = Parameters(signature_of(fn))
    if declared is not None and input_signature is None:
        if parameters.most != 0:
            raise ValueError(
                f"Input signature not specified for {name}: write "
                f"@zmqdist.function(input_signature=[...]) above it, "
                "or register a plain function"
            )
        input_signature = []
    checked = function(fn, input_signature, output_signature)
    if input_signature is not None:
        problem = parameters.problem(len(input_signature))
        if problem is not None:
            raise ValueError(
                f"the input signature of {name} does not fit the function: it {problem}"
            )
    return Method(
        name,
        fn,
        checked.input_signature,
        checked.output_signature,
        inline=inline,
        roles=roles,
        streaming=streaming,
    )

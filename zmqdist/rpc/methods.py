"""Registered functions: which functions may be registered, and how the body of a call becomes their
arguments.

The body of a Call on the wire
    a tuple   the arguments, each with its structure
    a dict    the arguments by name, and under "" the tuple of the positional arguments
    a list    the leaves of the arguments, as `Client.call` sends them; this module packs the leaves into the structure of the signature

Not here: when and in which thread a function runs (service.py).

Checks of arguments and results against specs and parameters. Client and server use the same
functions.

Rules
    A signature is a structure of TensorSpecs, with one item for each of the function's first
    parameters. Arguments for parameters that have a default may be left out. A parameter beyond the
    signature cannot be given.
    A value fits if it has the lists, tuples and dicts of the signature down to the specs, and at
    each spec an array, or a value of which `convert` (specs.py) makes an array, such as a list of
    numbers.
    A value with a dict where the signature has a list, for instance, causes a TypeError. A wrong
    number of items, or wrong keys, causes a ValueError. Both errors name the place.
    The client checks only the structure. The server also checks dtype and shape, and only the
    server's check decides.

The descriptions of a server's methods, in the form in which they travel, and in the form that
users see.

Two methods that every server has, for `zmqdist doctor`: a report about the server (kind,
version, clock), and an echo.
"""

from __future__ import annotations

import inspect
import os
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Final

from zmqdist import clock as time
from zmqdist import nest
from zmqdist._version import __version__
from zmqdist.errors import InvalidArgumentError, OpError, UnknownError, WireError
from zmqdist.rpc import payload
from zmqdist.rpc.admission_machine import ShortMethod
from zmqdist.rpc.figures import MethodFigures
from zmqdist.specs import Function, TensorSpec, convert, function
from zmqdist.wire.hello import PROTOCOL

METHODS: Final = "zmqdist.methods"
"""Name of the reserved method that returns the list of the server's methods without reserved ones.
`decode_methods` decodes this list."""

OPEN: Final = "zmqdist.open"
"""The method that starts a stream. Arguments: (number, method, arguments). The client chooses the
number, which identifies the stream in later calls.
"""
NEXT: Final = "zmqdist.next"
"""The method that requests items. Argument: (number). The server replies when at least one item is
ready."""
CLOSE: Final = "zmqdist.close"
"""The method that ends the stream at the server. Argument: (number)."""

PARAMETER_KIND: Callable[[int], Any] = type(inspect.Parameter.POSITIONAL_ONLY)


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """One method of a server. `str(info)` is a readable line: `scale(array, by=10) -> float32[?,
    3]`.

    >>> print(client.methods()["scale"])
    scale(array, by=2)...

    Attributes:
      name: the name to give to `Client.call`.
      signature: the parameters, or None if Python cannot determine them. Each default value is
        shown as a short text or as `...`.
      input_signature: structure of TensorSpec for the arguments, or None if the method has no input
        signature.
      output_signature: structure of TensorSpec for the result, or for each item of a stream. None
        means no output signature.
      streaming: whether the method is a generator function, so that calling it returns an iterator.
      batch: whether calls of several clients are joined along axis 0 and run as one.
      doc: the first line of the function's docstring.
    """

    name: str
    signature: inspect.Signature | None
    input_signature: Any
    output_signature: Any
    streaming: bool
    batch: bool
    doc: str

    def __str__(self) -> str:
        if self.signature is None:
            inputs = (
                ["..."] if self.input_signature is None else list(map(_shown, self.input_signature))
            )
        else:
            specs = list(self.input_signature or ())
            inputs = [
                _parameter(p, specs[position] if position < len(specs) else None)
                for position, p in enumerate(self.signature.parameters.values())
            ]
        output = "" if self.output_signature is None else _shown(self.output_signature)
        if self.streaming:
            output = f"stream of {output}" if output else "stream"
        return f"{self.name}({', '.join(inputs)}){f' -> {output}' if output else ''}"

    def to_wire(self) -> list[Any]:
        """Return the fields in the form in which they travel. The order is part of the protocol, so
        a new field is added at the end.

        >>> client.methods()["scale"].to_wire()[0]
        'scale'
        """
        parameters = None
        if self.signature is not None:
            parameters = [
                [p.name, int(p.kind), None if p.default is p.empty else _default(p.default)]
                for p in self.signature.parameters.values()
            ]
        return [
            self.name,
            self.input_signature,
            self.output_signature,
            parameters,
            self.streaming,
            self.batch,
            self.doc,
        ]


def decode_methods(listing: Any, peer: str) -> dict[str, MethodInfo]:
    """Return the methods in a server's reply to METHODS, by name. Raises WireError if `listing` is
    not a list of methods."""
    try:
        methods = [_decode_method(*item[:7]) for item in listing]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise WireError(peer, f"its list of methods cannot be read: {error}") from None
    return {info.name: info for info in methods}


def _decode_method(
    name: str, inputs: Any, outputs: Any, parameters: Any, streaming: bool, batch: bool, doc: str
) -> MethodInfo:
    for signature in (inputs, outputs):
        if signature is not None and not all(
            isinstance(spec, TensorSpec) for spec in nest.flatten(signature)
        ):
            raise TypeError(f"the signature of {name!r} holds a value that is not a TensorSpec")
    if (
        not isinstance(name, str)
        or not name.encode()
        or not isinstance(doc, str)
        or not isinstance(inputs, (list, tuple, type(None)))
    ):
        raise TypeError("an item without a name, or with a wrong description or signature")
    signature = None
    if parameters is not None:
        signature = inspect.Signature(
            [
                inspect.Parameter(
                    parameter,
                    PARAMETER_KIND(kind),
                    default=inspect.Parameter.empty if default is None else Default(str(default)),
                )
                for parameter, kind, default in parameters
            ]
        )
    return MethodInfo(name, signature, inputs, outputs, bool(streaming), bool(batch), doc)


class Default(str):
    """The text of a default value, as the server has sent it. Its `repr` has no quotes, so that a
    signature shows the value itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _default(value: Any) -> str:
    if isinstance(value, Default):
        return str(value)
    return (
        reprlib.repr(value)
        if isinstance(value, (bool, int, float, str, bytes, type(None)))
        else "..."
    )


def _parameter(parameter: inspect.Parameter, spec: Any) -> str:
    stars = (
        "*"
        if parameter.kind is parameter.VAR_POSITIONAL
        else "**"
        if parameter.kind is parameter.VAR_KEYWORD
        else ""
    )
    text = stars + parameter.name + ("" if spec is None or stars else f": {_shown(spec)}")
    return text if parameter.default is parameter.empty else f"{text}={_default(parameter.default)}"


def _shown(specs: Any) -> str:
    return str(nest.map_structure(lambda spec: Default(_spec(spec)), specs))


def _spec(spec: TensorSpec) -> str:
    sizes = (
        "..."
        if spec.shape is None
        else ", ".join("?" if size is None else str(size) for size in spec.shape)
    )
    return f"{spec.dtype}[{sizes}]"


def fit(spec: Any, value: Any, at_spec: Callable[[Any, TensorSpec], Any], path: str) -> Any:
    """Return `value` in the structure of `spec`. Each part that belongs to a TensorSpec is replaced
    by `at_spec(part, spec)`.

    Raises:
      TypeError, ValueError: `value` has another structure; the message calls the value `path`.
    """
    if isinstance(spec, TensorSpec):
        try:
            return at_spec(value, spec)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{path}: {error.message}") from None
    if isinstance(spec, dict):
        if not isinstance(value, dict):
            raise TypeError(f"{path}: expected a dict, given a {type(value).__name__}")
        if spec.keys() != value.keys():
            raise ValueError(
                f"{path}: expected the keys {sorted(spec)}, given {sorted(value, key=str)}"
            )
        return {
            key: fit(item, value[key], at_spec, f"{path}[{key!r}]") for key, item in spec.items()
        }
    fields = getattr(spec, "_fields", None)
    kind = list if isinstance(spec, list) else tuple
    if not isinstance(value, kind) or getattr(value, "_fields", None) != fields:
        kind_name = type(spec).__name__ if fields else kind.__name__
        raise TypeError(f"{path}: expected a {kind_name}, given a {type(value).__name__}")
    if len(spec) != len(value):
        raise ValueError(f"{path}: expected {len(spec)} items, given {len(value)}")
    items = [
        fit(item, part, at_spec, f"{path}[{n}]")
        for n, (item, part) in enumerate(zip(spec, value, strict=True))
    ]
    if fields:
        return type(value)(*items)
    return items if kind is list else tuple(items)


def is_flat(signature: Any) -> bool:
    """Return whether a signature has one TensorSpec for each argument, so that the structure of
    arguments is right if their number is right.
    """
    return all(isinstance(spec, TensorSpec) for spec in signature)


def convert_args(signature: Any, args: Any) -> list[Any]:
    """Return the arguments of a call as arrays. There must be as many arguments as specs.

    Raises:
      TypeError, ValueError, InvalidArgumentError: an argument does not fit its spec.
    """
    return [
        fit(spec, arg, convert, f"argument {n}")
        for n, (spec, arg) in enumerate(zip(signature, args, strict=True))
    ]


def convert_leaves(signature: Any, leaves: list[Any], optional: Collection[int]) -> list[Any]:
    """Return the arguments of a call, as arrays, from the flat list of their leaves. The last
    arguments may be missing if their positions are in `optional`.
    """
    leaf_count = len(nest.flatten(signature))
    while len(leaves) < leaf_count and len(signature) - 1 in optional:
        signature = signature[:-1]
        leaf_count = len(nest.flatten(signature))
    if len(leaves) != leaf_count:
        raise ValueError(f"expected {leaf_count} values, given {len(leaves)}")
    return convert_args(signature, nest.pack_sequence_as(signature, leaves))


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Return the parameters of a function, or None if Python cannot determine them, as for some
    functions that are written in C."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


class Parameters:
    """The parameters of a function, by position and by name. If Python cannot determine them, any
    arguments are accepted.

    Attributes:
      signature: Python's own description of the parameters, or None if Python cannot determine
        them.
      optional: positions of positional parameters that have a default.
      least, most: bounds on the number of positional arguments; `most` is None for a function with
        *args.
    """

    def __init__(self, signature: inspect.Signature | None) -> None:
        self.signature = signature
        self.least = 0
        self.most: int | None = None
        self._positions: dict[str, int] = {}
        self.optional: set[int] = set()
        self._names: set[str] | None = None
        if signature is None:
            return
        parameters = list(signature.parameters.values())
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self.least = sum(p.default is p.empty for p in positional)
        if all(p.kind is not p.VAR_POSITIONAL for p in parameters):
            self.most = len(positional)
        self._positions = {
            p.name: position
            for position, p in enumerate(positional)
            if p.kind is p.POSITIONAL_OR_KEYWORD
        }
        self.optional = {
            position for position, p in enumerate(positional) if p.default is not p.empty
        }
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            self._names = {
                *self._positions,
                *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
            }

    def problem(self, count: int) -> str | None:
        """Return why a call with `count` positional arguments and no other arguments is wrong, or
        None if it is right."""
        if self.least <= count and (self.most is None or count <= self.most):
            return None
        return _count_problem(self.least, self.most, count)

    def check_names(self, count: int, named: Mapping[str, Any]) -> None:
        """Check the names of arguments that are given beside `count` positional arguments. Raises
        TypeError for a wrong name."""
        for name in named:
            if not name or (self._names is not None and name not in self._names):
                # no argument is named "", because this key holds the positional arguments in a body
                # (methods.py)
                raise _unexpected(name)
            if self._positions.get(name, count) < count:
                raise _twice(name)

    def fit(
        self,
        specs: Any,
        args: Sequence[Any],
        named: Mapping[str, Any],
        at_spec: Callable[[Any, TensorSpec], Any],
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return (positional arguments, arguments by name) in the structure of a signature.
        `at_spec` is as in the function `fit`.

        Raises:
          TypeError, ValueError: an argument has another structure, is missing, or cannot be given.
        """
        by_position = dict(enumerate(args))
        for name, value in named.items():
            position = self._positions.get(name, len(specs))
            if position >= len(specs):
                raise _unexpected(name)
            if position in by_position:
                raise _twice(name)
            by_position[position] = value
        needed = set(range(len(specs))) - self.optional
        if len(args) > len(specs) or not (named or needed <= by_position.keys()):
            raise ValueError(_count_problem(len(needed), len(specs), len(by_position)))
        missing = needed - by_position.keys()
        if missing:
            raise ValueError(f"argument {min(missing)} is missing")
        fitted = {
            position: fit(specs[position], value, at_spec, f"argument {position}")
            for position, value in by_position.items()
        }
        leading = next(position for position in range(len(specs) + 1) if position not in fitted)
        by_name = {
            name: fitted[position]
            for name, position in self._positions.items()
            if leading < position and position in fitted
        }
        return [fitted[position] for position in range(leading)], by_name


def _unexpected(name: str) -> TypeError:
    return TypeError(f"got an unexpected keyword argument {name!r}")


def _twice(name: str) -> TypeError:
    return TypeError(f"got multiple values for argument {name!r}")


def _count_problem(least: int, most: int | None, count: int) -> str:
    counts = least if most in (None, least) else f"{least} to {most}"
    return f"expected {'at least ' if most is None else ''}{counts} arguments, given {count}"


_NONE: Final[dict[str, Any]] = {}


class Method:
    """One registered function.

    Attributes:
      roles: roles that may call the method, besides `admin`; `None` means every authenticated peer.
      later: whether the function runs in the loop, takes a PendingCall before the arguments, and
        replies through it at any later time.
      streaming: whether the function is a generator function, whose calls are streams
        (service.py).
      pooled: whether each call runs in a thread of the server's pool.
      figures: its calls that have ended, which the server's loop counts.
      short: whether the loop's thread runs its calls, if they are pooled.
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
        self.figures = MethodFigures()
        self.short = ShortMethod()
        self.fn = fn
        self.inline = inline
        self.roles = None if roles is None else roles | {"admin"}
        self.input_signature = input_signature
        self.output_signature = output_signature
        # the docstring of a callable object describes its class
        doc = inspect.getdoc(fn) if inspect.isroutine(fn) or hasattr(fn, "__wrapped__") else None
        self._doc = doc.strip().partition("\n")[0] if doc else ""
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
            # The most frequent case with a signature needs no look at names and defaults.
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
    # A generator runs in a thread of its own, because it may wait for its client.
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
    # As in TensorFlow: a declared function with arguments needs a signature.
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


SERVER_INFO: Final = "zmqdist.about"
ECHO: Final = "zmqdist.echo"
"""SERVER_INFO and ECHO are the reserved names of the two methods."""

ECHO_BYTES_MAX: Final = 65_536
"""Bytes. A payload of this size fills several packets of any link, but does not keep a server
busy.
"""


@dataclass(frozen=True)
class ServerInfo:
    """The report of a server about itself.

    Attributes:
      kind: the kind of server, such as "dispatcher", "worker", "rpc" or "server-worker:0".
      version: version of zmqdist.
      protocol, python: versions as (major, minor).
      incarnation: incarnation of the server's process.
      time_s: the server's clock when it replied, in seconds since 1970.
    """

    kind: str
    version: str
    protocol: tuple[int, int]
    python: tuple[int, int]
    pid: int
    incarnation: int
    time_s: float


def describe_server(kind: str, incarnation: int) -> list[Any]:
    """Return the report of this process about itself as a flat list. The order is part of the
    protocol, so a new item is added at the end.
    """
    return [
        kind,
        __version__,
        *PROTOCOL,
        *sys.version_info[:2],
        os.getpid(),
        incarnation,
        time.time(),
    ]


def echo(payload: Any) -> bytes:
    """Return the bytes that a client has sent. Raises InvalidArgumentError if `payload` is not
    bytes, or too long."""
    if not isinstance(payload, bytes) or len(payload) > ECHO_BYTES_MAX:
        raise InvalidArgumentError(f"{ECHO} takes bytes, at most {ECHO_BYTES_MAX}")
    return payload


def decode_server_info(reply: Any, peer: str) -> ServerInfo:
    """Return the report that a server's reply contains. Raises WireError if `reply` is not a
    report."""
    try:
        kind, version, major, minor, python_major, python_minor, pid, incarnation, time_s = reply[
            :9
        ]
        return ServerInfo(
            str(kind),
            str(version),
            (int(major), int(minor)),
            (int(python_major), int(python_minor)),
            int(pid),
            int(incarnation),
            float(time_s),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(peer, f"its report about itself cannot be read: {error}") from None

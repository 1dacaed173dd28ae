"""The descriptions of a server's methods, in the form in which they travel, and in the form that
users see."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zmqdist import nest
from zmqdist.errors import WireError
from zmqdist.specs import TensorSpec

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
                _parameter(p, specs[place] if place < len(specs) else None)
                for place, p in enumerate(self.signature.parameters.values())
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
        found = [_decode_method(*item[:7]) for item in listing]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise WireError(peer, f"its list of methods cannot be read: {error}") from None
    return {info.name: info for info in found}


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


def first_line(fn: Any) -> str:
    """Return the first line of a function's docstring, or "" for a callable object, whose docstring
    describes its class."""
    doc = inspect.getdoc(fn) if inspect.isroutine(fn) or hasattr(fn, "__wrapped__") else None
    return doc.strip().partition("\n")[0] if doc else ""


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

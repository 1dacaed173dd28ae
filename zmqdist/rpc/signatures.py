"""Arguments and results against their specs: the same walk on both ends.

Rules
    A signature is a structure of TensorSpecs. A value fits when it has the same containers down to the specs; what stands at
    a spec is one array, however it is written (a list is fine there).
    Another container is a TypeError, another number of items or other keys a ValueError; both name the place.
    The client checks the structure only; dtype and shape are the server's business, which has the last word.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from zmqdist import nest
from zmqdist.errors import InvalidArgumentError
from zmqdist.specs import TensorSpec, convert


def fit(spec: Any, value: Any, at_spec: Callable[[Any, TensorSpec], Any], path: str) -> Any:
    """`value` in the form of `spec`, with `at_spec(part, spec)` for each part that stands at a TensorSpec.

    Raises:
      TypeError, ValueError: it has another structure; `path` is what the message calls it.
    """
    if isinstance(spec, TensorSpec):
        try:
            return at_spec(value, spec)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(None, None, f"{path}: {error.message}") from None
    if isinstance(spec, dict):
        if not isinstance(value, dict):
            raise TypeError(f"{path}: expected a dict, given a {type(value).__name__}")
        if spec.keys() != value.keys():
            raise ValueError(f"{path}: expected the keys {sorted(spec)}, given {sorted(value, key=str)}")
        return {key: fit(item, value[key], at_spec, f"{path}[{key!r}]") for key, item in spec.items()}
    fields = getattr(spec, "_fields", None)
    kind = list if isinstance(spec, list) else tuple
    if not isinstance(value, kind) or getattr(value, "_fields", None) != fields:
        wanted = type(spec).__name__ if fields else kind.__name__
        raise TypeError(f"{path}: expected a {wanted}, given a {type(value).__name__}")
    if len(spec) != len(value):
        raise ValueError(f"{path}: expected {len(spec)} items, given {len(value)}")
    items = [fit(item, part, at_spec, f"{path}[{n}]") for n, (item, part) in enumerate(zip(spec, value, strict=True))]
    if fields:
        return type(value)(*items)
    return items if kind is list else tuple(items)


def is_flat(signature: Any) -> bool:
    """Whether each argument is one array: then there is no structure to check but the number."""
    return all(isinstance(spec, TensorSpec) for spec in signature)


def check_structure(signature: Any, args: tuple[Any, ...]) -> None:
    """The client's check. Raises TypeError or ValueError; nothing was sent."""
    _count(signature, args)
    for number, (spec, arg) in enumerate(zip(signature, args, strict=True)):
        fit(spec, arg, lambda value, spec: None, f"argument {number}")


def convert_args(signature: Any, args: Any) -> list[Any]:
    """The server's check: the arguments as arrays. Raises TypeError, ValueError or InvalidArgumentError."""
    _count(signature, args)
    return [fit(spec, arg, convert, f"argument {n}") for n, (spec, arg) in enumerate(zip(signature, args, strict=True))]


def convert_leaves(signature: Any, leaves: list[Any]) -> list[Any]:
    """The same for arguments that came flattened."""
    wanted = len(nest.flatten(signature))
    if len(leaves) != wanted:
        raise ValueError(f"expected {wanted} values, given {len(leaves)}")
    return convert_args(signature, nest.pack_sequence_as(signature, leaves))


def _count(signature: Any, args: Any) -> None:
    if len(args) != len(signature):
        raise ValueError(f"expected {len(signature)} arguments, given {len(args)}")


class Arity:
    """How many positional arguments a function takes; any number where Python cannot tell.

    Attributes:
      least, most: bounds; `most` is None for a function with *args.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.least = 0
        self.most: int | None = None
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):  # some functions written in C
            return
        places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.least = sum(p.default is p.empty for p in places)
        if all(p.kind is not p.VAR_POSITIONAL for p in parameters):
            self.most = len(places)

    def problem(self, count: int) -> str | None:
        """What is wrong with so many arguments; None when nothing is."""
        if self.least <= count and (self.most is None or count <= self.most):
            return None
        wanted = self.least if self.most in (None, self.least) else f"{self.least} to {self.most}"
        return f"expected {'at least ' if self.most is None else ''}{wanted} arguments, given {count}"

"""Checks of arguments and results against specs and parameters. Client and server use the same
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
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from zmqdist import nest
from zmqdist.errors import InvalidArgumentError
from zmqdist.specs import TensorSpec, convert


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
        wanted = type(spec).__name__ if fields else kind.__name__
        raise TypeError(f"{path}: expected a {wanted}, given a {type(value).__name__}")
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
    wanted = len(nest.flatten(signature))
    while len(leaves) < wanted and len(signature) - 1 in optional:
        signature = signature[:-1]
        wanted = len(nest.flatten(signature))
    if len(leaves) != wanted:
        raise ValueError(f"expected {wanted} values, given {len(leaves)}")
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
        self._places: dict[str, int] = {}
        self.optional: set[int] = set()
        self._names: set[str] | None = None
        if signature is None:
            return
        parameters = list(signature.parameters.values())
        places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.least = sum(p.default is p.empty for p in places)
        if all(p.kind is not p.VAR_POSITIONAL for p in parameters):
            self.most = len(places)
        self._places = {
            p.name: place for place, p in enumerate(places) if p.kind is p.POSITIONAL_OR_KEYWORD
        }
        self.optional = {place for place, p in enumerate(places) if p.default is not p.empty}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            self._names = {*self._places, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)}

    def problem(self, count: int) -> str | None:
        """Return why a call with `count` positional arguments and no other arguments is wrong, or
        None if it is right."""
        if self.least <= count and (self.most is None or count <= self.most):
            return None
        return _wanted(self.least, self.most, count)

    def check_names(self, count: int, named: Mapping[str, Any]) -> None:
        """Check the names of arguments that are given beside `count` positional arguments. Raises
        TypeError for a wrong name."""
        for name in named:
            if not name or (self._names is not None and name not in self._names):
                # no argument is named "", because this key holds the positional arguments in a body
                # (methods.py)
                raise _unexpected(name)
            if self._places.get(name, count) < count:
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
        by_place = dict(enumerate(args))
        for name, value in named.items():
            place = self._places.get(name, len(specs))
            if place >= len(specs):
                raise _unexpected(name)
            if place in by_place:
                raise _twice(name)
            by_place[place] = value
        needed = set(range(len(specs))) - self.optional
        if len(args) > len(specs) or not (named or needed <= by_place.keys()):
            raise ValueError(_wanted(len(needed), len(specs), len(by_place)))
        missing = needed - by_place.keys()
        if missing:
            raise ValueError(f"argument {min(missing)} is missing")
        fitted = {
            place: fit(specs[place], value, at_spec, f"argument {place}")
            for place, value in by_place.items()
        }
        leading = next(place for place in range(len(specs) + 1) if place not in fitted)
        by_name = {
            name: fitted[place]
            for name, place in self._places.items()
            if leading < place and place in fitted
        }
        return [fitted[place] for place in range(leading)], by_name


def _unexpected(name: str) -> TypeError:
    return TypeError(f"got an unexpected keyword argument {name!r}")


def _twice(name: str) -> TypeError:
    return TypeError(f"got multiple values for argument {name!r}")


def _wanted(least: int, most: int | None, given: int) -> str:
    wanted = least if most in (None, least) else f"{least} to {most}"
    return f"expected {'at least ' if most is None else ''}{wanted} arguments, given {given}"

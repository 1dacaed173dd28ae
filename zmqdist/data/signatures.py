"""Signatures: checks that the results of a user function, generator or source fit the spec that the
user has declared.

Python numbers and lists are converted to the signature's dtypes if this does not change their
values. A value that already has a dtype is never cast. If its dtype does not fit, the check raises
an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zmqdist.data.structure import LEAVES, element, invalid, is_dataset, problem_of
from zmqdist.errors import InvalidArgumentError
from zmqdist.specs import TensorSpec, convert

_ARRAYS = LEAVES - {str, bytes}


def as_spec(value: Any, spec: Any, path: str = "element") -> Any:
    """Return `value` as an element of `spec`.

    Raises:
      InvalidArgumentError: the value does not fit. The error text names the `path` of the leaf that
        does not fit.
    """
    if spec is None and value is None:
        return None
    if isinstance(spec, TensorSpec):
        try:
            return _leaf(value, spec)
        except InvalidArgumentError as error:
            raise invalid(f"{path}: {error.message}") from None
    if isinstance(spec, dict) and isinstance(value, dict) and spec.keys() == value.keys():
        return {key: as_spec(value[key], item, f"{path}[{key!r}]") for key, item in spec.items()}
    if isinstance(spec, tuple) and isinstance(value, (tuple, list)) and len(spec) == len(value):
        names = [f".{name}" for name in spec._fields] if hasattr(spec, "_fields") else None
        parts = enumerate(zip(value, spec, strict=True))
        items = [
            as_spec(item, part, path + (names[i] if names else f"[{i}]"))
            for i, (item, part) in parts
        ]
        return type(spec)(*items) if names else tuple(items)
    converted = None if value is None else element(value)
    problem = problem_of(converted, spec)
    if problem is not None:
        raise invalid(f"{path}: {problem}")
    return converted


def _leaf(value: Any, spec: TensorSpec) -> Any:
    if type(value) in _ARRAYS and spec.is_compatible_with(value):
        return value
    if isinstance(value, (str, bytes)):
        problem = problem_of(value, spec)
        if problem is not None:
            raise invalid(problem)
        return element(value)
    if isinstance(value, dict) or is_dataset(value):
        raise invalid(f"expected an array, given a {type(value).__name__}")
    array = convert(value, spec)
    return array if array.ndim else array[()]


def exact_fit(spec: Any) -> Callable[[Any], bool]:
    """Return a function that tells whether a value is an element of `spec` without conversion. The
    function takes less than a microsecond per array.
    """
    if isinstance(spec, TensorSpec):
        return _exact_leaf(spec)
    if isinstance(spec, tuple):
        parts, count = list(map(exact_fit, spec)), len(spec)

        def of_tuple(value: Any) -> bool:
            return (
                isinstance(value, tuple)
                and len(value) == count
                and all(fit(part) for fit, part in zip(parts, value, strict=True))
            )

        return of_tuple
    if isinstance(spec, dict):
        named = {key: exact_fit(part) for key, part in spec.items()}

        def of_dict(value: Any) -> bool:
            is_match = type(value) is dict and value.keys() == named.keys()
            return is_match and all(fit(value[key]) for key, fit in named.items())

        return of_dict
    return is_dataset if spec is not None else _is_none


def _is_none(value: Any) -> bool:
    return value is None


def _exact_leaf(spec: TensorSpec) -> Callable[[Any], bool]:
    dtype, shape = spec.dtype, spec.shape
    text = {"U": str, "S": bytes}.get(dtype.kind) if not shape and not dtype.itemsize else None

    def of_leaf(value: Any) -> bool:
        cls = type(value)
        if cls is text:
            return True
        if cls not in _ARRAYS:
            return False
        return (value.dtype == dtype and value.shape == shape) or spec.is_compatible_with(value)

    return of_leaf


class CheckedFunction:
    """A picklable wrapper of a function. It checks the function's results against a spec, and
    converts them if necessary."""

    def __init__(self, function: Callable[..., Any], spec: Any, operator: str) -> None:
        self._args = function, spec, operator
        self._function, self._fits = function, exact_fit(spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckedFunction, self._args

    def __call__(self, *args: Any) -> Any:
        value = self._function(*args)
        if self._fits(value):
            return value
        _, spec, operator = self._args
        try:
            return as_spec(value, spec)
        except InvalidArgumentError as error:
            raise invalid(
                f"the function of {operator} returned a value that does not fit its "
                f"output_signature: {error.message}"
            ) from None

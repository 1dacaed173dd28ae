"""The execution of an update of several variables, and the computation of initial values. The
caller holds the locks of the variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zmqdist.errors import InvalidArgumentError, OpError, UnknownError
from zmqdist.limits import INLINE_BYTES_MAX
from zmqdist.specs import TensorSpec
from zmqdist.variables.casts import cast
from zmqdist.variables.hosted_variable import HostedVariable
from zmqdist.variables.update_keys import AppliedUpdate
from zmqdist.wire import trusted

Changes = Sequence[tuple[Any, ...]]


def is_small(variables: Sequence[HostedVariable], changes: Changes) -> bool:
    """Return whether an update takes only microseconds. If so, the loop may execute it."""
    nbytes = 0
    for each, change in zip(variables, changes, strict=True):
        nbytes += each.storage.nbytes
        if nbytes > INLINE_BYTES_MAX or change[1] == "call":
            return False
    return True


def apply_changes(
    variables: Sequence[HostedVariable],
    changes: Changes,
    function: Callable[[bytes], tuple[str, Any]],
) -> tuple[Any, ...]:
    """Execute one change of each variable. The caller holds all locks. If this raises an error of
    `HostedVariable.prepare`, no variable has changed.

    Returns:
      The version of each variable, and whether it was changed: (version, changed, version, changed,
      ...).
    """
    commits = [
        each.prepare(change[1:], function) for each, change in zip(variables, changes, strict=True)
    ]
    outcomes: list[Any] = []
    for each, commit in zip(variables, commits, strict=True):
        changed = each.commit(commit)
        outcomes += (each.version, changed)
    return tuple(outcomes)


def apply_missing(
    applied: Mapping[int, AppliedUpdate],
    variables: Sequence[HostedVariable],
    changes: Changes,
    function: Callable[[bytes], tuple[str, Any]],
) -> tuple[Any, ...]:
    """Execute changes as `apply_changes` does, but skip the variables in `applied`, which contain
    the update already. For these variables, return the earlier outcomes.
    """
    missing = [index for index, change in enumerate(changes) if change[0] not in applied]
    outcomes = iter(
        apply_changes(
            [variables[index] for index in missing], [changes[index] for index in missing], function
        )
    )
    return tuple(
        item
        for change in changes
        for item in applied.get(change[0]) or (next(outcomes), next(outcomes))
    )


def with_values(results: Sequence[Any], variables: Sequence[HostedVariable]) -> tuple[Any, ...]:
    """Return a result of `apply_changes` with the values of the variables added: (version, changed,
    value, version, ...). The caller holds all locks.
    """
    outcomes = zip(results[::2], results[1::2], variables, strict=True)
    return tuple(
        item for version, changed, each in outcomes for item in (version, changed, each.read())
    )


def initial_value(label: str, initial: Any) -> Any:
    """Return the initial value of a variable as a new array. Raises UnknownError if the user's
    function raises, and InvalidArgumentError if the function's result has the wrong shape or dtype.
    """
    if isinstance(initial, TensorSpec):
        return np.zeros(initial.shape, initial.dtype)
    if not isinstance(initial, tuple):
        return np.array(initial, order="C")
    blob, spec, named = initial
    fn = trusted.unpack(blob)
    try:
        array = cast(fn(**named), spec.dtype, label)
    except OpError as error:
        raise UnknownError(f"the initializer of {label} raised: {error.message}") from error
    except Exception as error:
        raise UnknownError(
            f"the initializer of {label} raised {type(error).__name__}: {error}"
        ) from error
    if array.shape != tuple(spec.shape):
        text = f"the initializer of {label} made {array.dtype} of {array.shape}, wanted {spec.dtype} of {spec.shape}"
        raise InvalidArgumentError(text)
    return np.array(array, order="C")

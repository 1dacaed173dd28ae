"""Pipelines that depend on state outside their description, so that each worker would compute different elements.

Rules
    An operator depends on such state if it draws numbers without a seed: `random`, the selector of `sample_from_datasets`, and
    `rejection_resample`. A shuffle without a seed does not count, because each worker gets the same elements, only in
    another order. Whether a function depends on such state cannot be detected, so its author marks it with `stateful`.

    `Options.experimental_external_state_policy` decides what happens: "WARN" (the default), "IGNORE" or "FAIL", or an enum member
    with such a name.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from zmqdist.data.ops.base import Op, PickledFunction
from zmqdist.data.structure import invalid
from zmqdist.data.tree import Tree
from zmqdist.errors import FailedPreconditionError

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

_MARK = "zmqdist_stateful"
_POLICIES = ("WARN", "IGNORE", "FAIL")


def stateful(function: AnyFunction) -> AnyFunction:
    """Mark a function that depends on more than its arguments: random numbers, a counter, a file that changes. Use it as a decorator."""
    setattr(function, _MARK, True)
    return function


def stateful_operators(dataset: Tree) -> list[str]:
    """Return the operators that depend on external state, sources first, each as `explain` prints it.

    Runs and unpickles nothing, so the marks of functions are not known for a dataset that was made from a description.
    """
    return [each.op.one_line() for each in dataset.walk() if each.op.stateful() or _marked(each.op)]


def _marked(op: Op) -> bool:
    values = (getattr(op, field.name) for field in dataclasses.fields(op))
    return any(isinstance(value, PickledFunction) and value.marked(_MARK) for value in values)


def check_external_state(dataset: Tree) -> None:
    """Apply the dataset's policy to operators that depend on external state: do nothing, warn by UserWarning, or raise.

    Raises:
      FailedPreconditionError: there are such operators, and the policy is FAIL.
      InvalidArgumentError: the policy is unknown.
    """
    setting = dataset.options().experimental_external_state_policy
    policy = "WARN" if setting is None else str(setting).upper()
    if policy not in _POLICIES:
        raise invalid(f"experimental_external_state_policy is one of {', '.join(_POLICIES)}, not {setting!r}")
    found = [] if policy == "IGNORE" else stateful_operators(dataset)
    if not found:
        return
    text = (
        f"the dataset depends on external state, so that each worker computes different elements: {', '.join(found)}. Give a seed,"
        ' or set Options.experimental_external_state_policy = "IGNORE".'
    )
    if policy == "FAIL":
        raise FailedPreconditionError(text)
    warnings.warn(text, stacklevel=3)

"""Pipelines that depend on something their description does not hold, so that workers compute other elements than their owner would.

Rules
    Known of operators: numbers drawn without a seed (`random`, the selector of `sample_from_datasets`, `rejection_resample`). A shuffle
    without a seed does not count: whatever its order, the elements are the same. What a function does cannot be seen; its author
    marks it with `stateful`.

    What is done about it says `Options.experimental_external_state_policy`: "WARN" (the default), "IGNORE" or "FAIL", or a member
    of an enum with such a name.
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
    """Mark a function that depends on more than its arguments: on random numbers, a counter, a file that changes. A decorator."""
    setattr(function, _MARK, True)
    return function


def stateful_operators(dataset: Tree) -> list[str]:
    """The operators that depend on external state, sources first, each as `explain` tells it. Runs and unpickles nothing: of a dataset that
    came from a description the marks of functions are not known.
    """
    return [each.op.one_line() for each in dataset.walk() if each.op.stateful() or _marked(each.op)]


def _marked(op: Op) -> bool:
    values = (getattr(op, field.name) for field in dataclasses.fields(op))
    return any(isinstance(value, PickledFunction) and value.marked(_MARK) for value in values)


def check_external_state(dataset: Tree) -> None:
    """Do what the options of the dataset say about operators that depend on external state: nothing, a UserWarning, or an error.

    Raises:
      FailedPreconditionError: there are such operators, and the policy is FAIL.
      InvalidArgumentError: the policy is none.
    """
    setting = dataset.options().experimental_external_state_policy
    policy = "WARN" if setting is None else str(setting).upper()
    if policy not in _POLICIES:
        raise invalid(f"experimental_external_state_policy is one of {', '.join(_POLICIES)}, not {setting!r}")
    found = [] if policy == "IGNORE" else stateful_operators(dataset)
    if not found:
        return
    text = (
        f"the dataset depends on external state, so that each worker computes something else: {', '.join(found)}. Give a seed,"
        ' or set Options.experimental_external_state_policy = "IGNORE".'
    )
    if policy == "FAIL":
        raise FailedPreconditionError(text)
    warnings.warn(text, stacklevel=3)

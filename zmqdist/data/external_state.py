"""The check for pipelines that depend on state outside their description. Different workers would
compute different elements of such a pipeline.

Rules
    An operator depends on such state if it draws numbers without a seed: `random`, the selector of
    `sample_from_datasets`, and `rejection_resample`. A shuffle without a seed does not count,
    because every worker gets the same elements, only in another order. zmqdist cannot detect
    whether a function depends on such state, so the function's author has to mark it with
    `stateful`.

    `Options.experimental_external_state_policy` decides whether to warn, to ignore the state or to
    raise: "WARN" (the default), "IGNORE" or "FAIL", or an enum member with such a name.
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
    """Mark a function that depends on more than its arguments, for example on random numbers or a
    counter. Use this as a decorator."""
    setattr(function, _MARK, True)
    return function


def stateful_operators(dataset: Tree) -> list[str]:
    """Return the operators that depend on external state, sources first, each as `explain` prints
    it.

    No function is run or unpickled. In a dataset that was created from a description, the marks of
    functions are therefore unknown.
    """
    return [node.op.one_line() for node in dataset.walk() if node.op.stateful() or _marked(node.op)]


def _marked(op: Op) -> bool:
    values = (getattr(op, field.name) for field in dataclasses.fields(op))
    return any(isinstance(value, PickledFunction) and value.marked(_MARK) for value in values)


def check_external_state(dataset: Tree) -> None:
    """If operators depend on external state, do what the dataset's policy says: nothing, warn by
    UserWarning, or raise.

    Raises:
      FailedPreconditionError: operators depend on external state, and the policy is FAIL.
      InvalidArgumentError: the policy is unknown.
    """
    setting = dataset.options().experimental_external_state_policy
    policy = "WARN" if setting is None else str(setting).upper()
    if policy not in _POLICIES:
        raise invalid(
            f"experimental_external_state_policy is one of {', '.join(_POLICIES)}, not {setting!r}"
        )
    operators = [] if policy == "IGNORE" else stateful_operators(dataset)
    if not operators:
        return
    text = (
        f"the dataset depends on external state, so that each worker computes different elements: "
        f"{', '.join(operators)}. Give a seed,"
        ' or set Options.experimental_external_state_policy = "IGNORE".'
    )
    if policy == "FAIL":
        raise FailedPreconditionError(text)
    warnings.warn(text, stacklevel=3)

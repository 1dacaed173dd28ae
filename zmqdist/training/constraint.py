"""A step of an optimizer followed by a variable's constraint, as one function that runs at the
parameter server, so that no reader sees a value between the two."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from zmqdist.update_rules import UpdateRule


class Constrained:
    """A picklable update function. It keeps the slots of its rule."""

    def __init__(self, rule: UpdateRule, constraint: Callable[..., Any]) -> None:
        self.rule = rule
        self.constraint = constraint

    def __call__(self, value: Any, grad: Any, slots: dict[str, Any], step: int) -> Any:
        if slots.keys() != self.rule.slot_values.keys():
            slots.clear()
            slots.update(self.rule.slots(value))
        self.rule.update(value, grad, slots, step)
        return self.constraint(value)


def constrained(rule: Any, constraint: Callable[..., Any] | None) -> Any:
    """Return the function that applies `rule` and then `constraint`. Return `rule` itself if there
    is no constraint, or if it is a user's function, which makes the new value alone."""
    if constraint is None or not isinstance(rule, UpdateRule):
        return rule
    return _constrained(rule, constraint)


@lru_cache(maxsize=256)  # the same object again, so that it is pickled once
def _constrained(rule: UpdateRule, constraint: Callable[..., Any]) -> Constrained:
    # without the optimizer's `iterations`, which belong to the program
    return Constrained(UpdateRule.from_wire(*rule.to_wire()), constraint)

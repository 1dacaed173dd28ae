"""Learning rates that change with the step, for optimizers. Formulas, arguments and defaults are
those of Keras.

A schedule is a frozen dataclass of numbers. An optimizer sends it to the parameter server, which
computes the rate of each step there. Steps are counted for each variable, from 0, as the server
applies gradients. Only the schedules of this module run there: for a rate of your own make an
optimizer for each step, or write an update function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

__all__ = [
    "CosineDecay",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
]
__dir__ = __all__.copy  # dir() and completion show no other names


@dataclass(frozen=True)
class LearningRateSchedule:
    """The base class of all schedules. A schedule is called with a number of steps, and returns the
    rate.

    >>> zd.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)(20)
    0.025
    """

    def __post_init__(self) -> None:
        """Raises ValueError if a field is not of the type of its annotation, or outside the range
        that the formula allows."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _CHECKED:
                accepts, expected = _CHECKED[field.name]
            elif field.type == "bool":
                accepts, expected = _is_bool, "True or False"
            else:
                accepts, expected = _is_number, "a finite number of 0 or more"
            if value is None and field.default is None:
                continue
            if not accepts(value):
                raise ValueError(
                    f"{type(self).__name__}: {field.name} is {value!r:.80}, wants {expected}"
                )
            if field.name in ("boundaries", "values"):
                object.__setattr__(self, field.name, tuple(map(float, value)))

    def __call__(self, step: int) -> float:
        """Return the rate after `step` steps."""
        raise NotImplementedError

    def to_wire(self) -> list[Any]:
        """Return the name of the class and its fields, for `from_wire`. Raises ValueError if the
        class is not one of this module.

        >>> zd.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5).to_wire()
        ['ExponentialDecay', [0.1, 10, 0.5, False]]
        """
        if _KINDS.get(type(self).__name__) is not type(self):
            raise ValueError(
                f"{type(self).__name__} is none of {', '.join(_KINDS)}: for another learning rate "
                f"write an update function"
            )
        return [type(self).__name__, [getattr(self, field.name) for field in fields(self)]]

    @staticmethod
    def from_wire(name: str, values: Sequence[Any]) -> LearningRateSchedule:
        """Return the schedule that the result of `to_wire` describes. Raises ValueError if no
        schedule has this name and as many fields.

        >>> schedules = zd.optimizers.schedules
        >>> schedules.LearningRateSchedule.from_wire("CosineDecay", [0.1, 5, 0, None, 0])(5)
        0.0
        """
        kind = _KINDS.get(name)
        if kind is None or len(values) != len(fields(kind)):
            raise ValueError(
                f"no schedule {name!r} with {len(values)} fields; there are {', '.join(_KINDS)}"
            )
        return kind(*values)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float, np.number))
        and not isinstance(value, bool)
        and bool(0 <= value < math.inf)
    )


def _is_above_zero(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_increasing(value: Any) -> bool:
    return _are_numbers(value) and list(value) == sorted(set(value))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(map(_is_number, value))


_CHECKED: Final = {
    "decay_steps": (_is_above_zero, "a number above 0"),
    "boundaries": (_is_increasing, "a list of increasing numbers of 0 or more"),
    "values": (_are_numbers, "a list of numbers of 0 or more"),
}
"""Fields whose values are no plain numbers: the check, and what it wants."""


@dataclass(frozen=True)
class ExponentialDecay(LearningRateSchedule):
    """initial_learning_rate * decay_rate ** (step / decay_steps). With `staircase`, the quotient is
    a whole number.

    >>> zd.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5, staircase=True)(19)
    0.05
    """

    initial_learning_rate: float
    decay_steps: float
    decay_rate: float
    staircase: bool = False

    def __call__(self, step: int) -> float:
        periods = step / self.decay_steps
        power = math.floor(periods) if self.staircase else periods
        return float(self.initial_learning_rate * self.decay_rate**power)


@dataclass(frozen=True)
class InverseTimeDecay(LearningRateSchedule):
    """initial_learning_rate / (1 + decay_rate * step / decay_steps). With `staircase`, the quotient
    step / decay_steps is a whole number.

    >>> zd.optimizers.schedules.InverseTimeDecay(0.1, 10, 1)(10)
    0.05
    """

    initial_learning_rate: float
    decay_steps: float
    decay_rate: float
    staircase: bool = False

    def __call__(self, step: int) -> float:
        periods = step / self.decay_steps
        count = math.floor(periods) if self.staircase else periods
        return float(self.initial_learning_rate / (1 + self.decay_rate * count))


@dataclass(frozen=True)
class PolynomialDecay(LearningRateSchedule):
    """From initial_learning_rate to end_learning_rate in `decay_steps` steps, by the polynomial (1
    - step / decay_steps) ** power. With `cycle`, it rises again after each `decay_steps` steps.

    >>> zd.optimizers.schedules.PolynomialDecay(0.1, 10, 0.0)(5)
    0.05
    """

    initial_learning_rate: float
    decay_steps: float
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False

    def __call__(self, step: int) -> float:
        cycles = max(1, math.ceil(step / self.decay_steps)) if self.cycle else 1
        total = self.decay_steps * cycles
        left = 1 - min(step, total) / total
        span = self.initial_learning_rate - self.end_learning_rate
        return float(span * left**self.power + self.end_learning_rate)


@dataclass(frozen=True)
class PiecewiseConstantDecay(LearningRateSchedule):
    """values[0] up to and including step boundaries[0], values[1] up to boundaries[1], ..., and
    then the last value.

    >>> rate = zd.optimizers.schedules.PiecewiseConstantDecay([10, 20], [0.1, 0.01, 0.001])
    >>> rate(10), rate(11), rate(100)
    (0.1, 0.01, 0.001)
    """

    boundaries: Sequence[float]
    values: Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"PiecewiseConstantDecay: {len(self.boundaries)} boundaries need one value more, "
                f"not {len(self.values)}"
            )

    def __call__(self, step: int) -> float:
        return self.values[sum(step > boundary for boundary in self.boundaries)]


@dataclass(frozen=True)
class CosineDecay(LearningRateSchedule):
    """From initial_learning_rate to alpha * initial_learning_rate in `decay_steps` steps, by half a
    cosine.

    >>> zd.optimizers.schedules.CosineDecay(0.1, 10)(5)
    0.05

    With `warmup_target`, the rate first rises linearly from initial_learning_rate to it, in
    `warmup_steps` steps, and the cosine begins there.
    """

    initial_learning_rate: float
    decay_steps: float
    alpha: float = 0.0
    warmup_target: float | None = None
    warmup_steps: float = 0

    def __call__(self, step: int) -> float:
        start, after = self.initial_learning_rate, float(step)
        if self.warmup_target is not None:
            if step < self.warmup_steps:
                return float(start + (self.warmup_target - start) * step / self.warmup_steps)
            start, after = self.warmup_target, step - self.warmup_steps
        share = min(after, self.decay_steps) / self.decay_steps
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        return float(start * ((1 - self.alpha) * cosine + self.alpha))


_KINDS: Final[Mapping[str, type[LearningRateSchedule]]] = {
    kind.__name__: kind
    for kind in (
        CosineDecay,
        ExponentialDecay,
        InverseTimeDecay,
        PiecewiseConstantDecay,
        PolynomialDecay,
    )
}

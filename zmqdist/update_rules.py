"""The rules of optimizers: how a variable's new value follows from a gradient. Plain NumPy, usable in
any process.

A rule is a frozen dataclass of numbers and has no state. Its state for a variable is in the
variable's *slots*, which are arrays of the variable's shape that are stored beside the variable, at
its parameter server. For each element of the variable, a step reads and writes only this element
and the elements of the slots at the same place. A step may therefore run in pieces that stay in the
cache. With a sparse gradient (IndexedSlices) a step changes only the named rows and their slots, as
the "lazy" variants of other libraries do. If a row is named several times, the sum of its gradients
counts.

Formulas and defaults are those of Keras, except that the default of Momentum is 0.9. Not here: what
programs call (optimizers.py), where variables are stored, and which code applies a rule
(variables/hosted_variable.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zmqdist.schedules import LearningRateSchedule
from zmqdist.specs import IndexedSlices

PIECE: Final = 16_384
"""Elements that are computed at a time. Together with their slots and temporaries they fit into the
level-2 cache of a core."""

Array = NDArray[Any]


@dataclass(frozen=True)
class UpdateRule:
    """The base class of all rules. A subclass is a frozen dataclass that defines `_step`, and
    `slot_values` if it needs slots. A ps applies the subclasses of this module only.

    >>> optimizer, value = zd.optimizers.Momentum(0.1), np.zeros(2)
    >>> slots = optimizer.slots(value)
    >>> optimizer.update(value, np.ones(2), slots, 1)
    >>> value.tolist()
    [-0.1, -0.1]

    Attributes:
      learning_rate: a number of 0 or more, or a schedule (schedules.py), which gives a number for
        each step of a variable.
    """

    learning_rate: float | LearningRateSchedule = 0.01

    def __post_init__(self) -> None:
        """Raises ValueError if a field is not a finite number, or is outside the range that the
        formula allows."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "learning_rate" and isinstance(value, LearningRateSchedule):
                continue
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise ValueError(
                        f"{type(self).__name__}: {field.name} is {value!r}, wants True or False"
                    )
                continue
            good = (
                isinstance(value, (int, float, np.number))
                and not isinstance(value, bool)
                and math.isfinite(value)
            )
            if not good or value < 0 or (field.name in _BELOW_ONE and value >= 1):
                bound = "from 0 to below 1" if field.name in _BELOW_ONE else "of 0 or more"
                raise ValueError(
                    f"{type(self).__name__}: {field.name} is {value!r}, wants a number {bound}"
                )
            object.__setattr__(self, field.name, float(value))

    @property
    def slot_values(self) -> dict[str, float]:
        """The initial value of each slot, by the name of the slot."""
        return {}

    def to_wire(self) -> tuple[str, dict[str, Any]]:
        """Return the name of the class and the fields that differ from their defaults, for
        `from_wire`. Raises ValueError if the class is not one of this module, or one of those of
        zmqdist that are made from it.

        >>> zd.optimizers.SGD(0.5).to_wire()
        ('SGD', {'learning_rate': 0.5})
        """
        return self._wire

    @cached_property
    def _wire(self) -> tuple[str, dict[str, Any]]:
        classes = type(self), type(self).__bases__[0]
        name = next((name for name, kind in KINDS.items() if kind in classes), None)
        if name is None:
            raise ValueError(
                f"{self!r} is none of {', '.join(KINDS)}: for another rule write an update function"
            )
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.learning_rate, LearningRateSchedule):
            values["learning_rate"] = self.learning_rate.to_wire()
        defaults = {field.name: field.default for field in fields(self)}
        return name, {name: value for name, value in values.items() if value != defaults[name]}

    @staticmethod
    def from_wire(name: str, values: Mapping[str, Any]) -> UpdateRule:
        """Return the rule that the result of `to_wire` describes. Raises ValueError if no rule has
        this name and these fields.

        >>> zd.optimizers.Optimizer.from_wire("SGD", {"learning_rate": 0.5}).learning_rate
        0.5
        """
        kind = KINDS.get(name)
        if kind is None or values.keys() - {field.name for field in fields(kind)}:
            raise ValueError(
                f"no optimizer {name!r} with {sorted(values)}; there are {', '.join(KINDS)}"
            )
        rate = values.get("learning_rate")
        if isinstance(rate, (list, tuple)):
            values = {**values, "learning_rate": LearningRateSchedule.from_wire(*rate)}
        return kind(**values)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, which are counted from 1.

        >>> zd.optimizers.SGD(0.5).rate(1)
        0.5
        """
        rate = self.learning_rate
        return rate if isinstance(rate, float) else rate(step - 1)

    def slots(self, like: Array) -> dict[str, Array]:
        """Return new slots for a variable with the shape and dtype of `like`.

        >>> sorted(zd.optimizers.Adam().slots(np.zeros(2)))
        ['m', 'v']
        """
        return {
            name: np.full(like.shape, value, like.dtype) for name, value in self.slot_values.items()
        }

    def update(
        self,
        value: Array,
        grad: Array | IndexedSlices,
        slots: Mapping[str, Array],
        step: int,
        out: Array | None = None,
    ) -> None:
        """Apply one step in place.

        >>> value = np.zeros(2)
        >>> zd.optimizers.SGD(0.5).update(value, np.ones(2), {}, 1)
        >>> value.tolist()
        [-0.5, -0.5]

        Args:
          value: the value of the variable, an array of contiguous floats. It is changed, unless
            `out` is given.
          grad: the gradient. This is an array of the same shape, or some of its rows with valid
            indices (IndexedSlices).
          slots: the arrays that the method `slots` has returned. They are changed.
          step: the number of this step for this variable, from 1.
          out: an array of the same shape that gets the new value in place of `value`. Only a dense
            gradient allows `out`.
        """
        if isinstance(grad, IndexedSlices):
            self.update_rows(value, *summed(grad), slots, step)
            return
        target = value if out is None else out
        flat = [
            array.reshape(-1)
            for array in (value, np.ascontiguousarray(grad), target, *slots.values())
        ]
        coefficients = self._coefficients(step)
        for begin in range(0, max(flat[0].size, 1), PIECE):
            old, slope, new, *rest = (array[begin : begin + PIECE] for array in flat)
            self._step(old, slope, dict(zip(slots, rest, strict=True)), coefficients, new)

    def update_rows(
        self, value: Array, indices: Array, rows: Array, slots: Mapping[str, Array], step: int
    ) -> None:
        """Apply one step to some rows of `value`, in place. `indices` must be unique.

        >>> value = np.zeros((3, 2))
        >>> zd.optimizers.SGD(0.5).update_rows(value, np.array([1]), np.ones((1, 2)), {}, 1)
        >>> value.tolist()
        [[0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]
        """
        by, count = self._coefficients(step), max(1, PIECE // max(1, value[:1].size))
        for begin in range(0, len(indices), count):
            batch = indices[begin : begin + count]
            touched = {name: slot.take(batch, 0, mode="clip") for name, slot in slots.items()}
            # "clip" changes no index, because none is out of range
            new = value.take(batch, 0, mode="clip")
            self._step(new, rows[begin : begin + count], touched, by, new)
            value[batch] = new
            for name, slot in slots.items():
                slot[batch] = touched[name]

    def _coefficients(self, step: int) -> tuple[float, ...]:
        """Return the numbers of the formula that depend only on the step."""
        return (self.rate(step),)

    def _step(
        self, value: Array, grad: Array, slots: dict[str, Array], by: tuple[float, ...], out: Array
    ) -> None:
        """Compute `out` from `value`, and change the slots in place. `out` and `value` may be the
        same array."""
        raise NotImplementedError


_BELOW_ONE: Final = frozenset({"momentum", "beta_1", "beta_2", "rho"})


@dataclass(frozen=True)
class SGDRule(UpdateRule):
    """value -= learning_rate * grad.

    >>> zd.optimizers.SGD(0.5).learning_rate
    0.5

    With `momentum`: velocity = momentum * velocity - learning_rate * grad; value += velocity. With
    `nesterov` too: value += momentum * velocity - learning_rate * grad, with the new velocity.
    """

    momentum: float = 0.0
    nesterov: bool = False

    @property
    def slot_values(self) -> dict[str, float]:
        return {"velocity": 0.0} if self.momentum else {}

    def _step(
        self, value: Array, grad: Array, slots: dict[str, Array], by: tuple[float, ...], out: Array
    ) -> None:
        slope = grad * by[0]
        if not self.momentum:
            np.subtract(value, slope, out=out)
            return
        velocity = slots["velocity"]
        velocity *= self.momentum
        velocity -= slope
        if self.nesterov:
            np.subtract(velocity * self.momentum, slope, out=slope)
            np.add(value, slope, out=out)
        else:
            np.add(value, velocity, out=out)


@dataclass(frozen=True)
class MomentumRule(SGDRule):
    """SGD with a momentum of 0.9, unless another one is passed.

    >>> zd.optimizers.Momentum(0.1).momentum
    0.9
    """

    momentum: float = 0.9


@dataclass(frozen=True)
class AdagradRule(UpdateRule):
    """accumulator += grad ** 2; value -= learning_rate * grad / sqrt(accumulator + epsilon).

    >>> sorted(zd.optimizers.Adagrad(0.1).slots(np.zeros(2)))
    ['accumulator']
    """

    learning_rate: float | LearningRateSchedule = 0.001
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    @property
    def slot_values(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def _step(
        self, value: Array, grad: Array, slots: dict[str, Array], by: tuple[float, ...], out: Array
    ) -> None:
        accumulator = slots["accumulator"]
        square = grad * grad
        accumulator += square
        np.add(accumulator, self.epsilon, out=square)
        np.sqrt(square, out=square)
        slope = grad * by[0]
        slope /= square
        np.subtract(value, slope, out=out)


@dataclass(frozen=True)
class RMSpropRule(UpdateRule):
    """value -= learning_rate * grad / sqrt(v + epsilon), where v is the moving average of grad ** 2
    with the decay rho.

    >>> zd.optimizers.RMSprop(0.1).rho
    0.9

    With `centered`, the square of the moving average of grad is subtracted from v. With `momentum`:
    velocity = momentum * velocity + the step above without momentum; value -= velocity.
    """

    learning_rate: float | LearningRateSchedule = 0.001
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False

    @property
    def slot_values(self) -> dict[str, float]:
        used = {"v": True, "mean": self.centered, "velocity": self.momentum > 0}
        return {name: 0.0 for name, is_used in used.items() if is_used}

    def _step(
        self, value: Array, grad: Array, slots: dict[str, Array], by: tuple[float, ...], out: Array
    ) -> None:
        v = slots["v"]
        v *= self.rho
        v += (1 - self.rho) * grad * grad
        root = v + self.epsilon
        if self.centered:
            mean = slots["mean"]
            mean *= self.rho
            mean += (1 - self.rho) * grad
            root -= mean * mean
        slope = grad * by[0]
        slope /= np.sqrt(root, out=root)
        if self.momentum:
            velocity = slots["velocity"]
            velocity *= self.momentum
            velocity += slope
            slope = velocity
        np.subtract(value, slope, out=out)


@dataclass(frozen=True)
class AdamRule(UpdateRule):
    """value -= rate * m / (sqrt(v) + epsilon), where m and v are moving averages of grad and grad
    ** 2 with decays beta_1 and beta_2.

    >>> zd.optimizers.Adam(0.01).beta_1
    0.9

    The rate is learning_rate * sqrt(1 - beta_2 ** step) / (1 - beta_1 ** step).
    """

    learning_rate: float | LearningRateSchedule = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    @property
    def slot_values(self) -> dict[str, float]:
        return {"m": 0.0, "v": 0.0}

    def _coefficients(self, step: int) -> tuple[float, ...]:
        return (self.rate(step) * math.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step),)

    def _step(
        self, value: Array, grad: Array, slots: dict[str, Array], by: tuple[float, ...], out: Array
    ) -> None:
        m, v = slots["m"], slots["v"]
        term = np.subtract(grad, m)
        term *= 1 - self.beta_1
        m += term
        np.multiply(grad, grad, out=term)
        term -= v
        term *= 1 - self.beta_2
        v += term
        np.sqrt(v, out=term)
        term += self.epsilon
        np.divide(m, term, out=term)
        term *= by[0]
        np.subtract(value, term, out=out)


KINDS: Final[dict[str, type[UpdateRule]]] = {
    "SGD": SGDRule,
    "Momentum": MomentumRule,
    "Adagrad": AdagradRule,
    "RMSprop": RMSpropRule,
    "Adam": AdamRule,
}
"""The classes of all rules that a ps can apply, by name."""


def summed(grad: IndexedSlices) -> tuple[Array, Array]:
    """Return the unique indices of a sparse gradient, and for each index the sum of its rows."""
    return summed_rows(np.asarray(grad.indices), np.asarray(grad.values))


def summed_rows(indices: Array, rows: Array) -> tuple[Array, Array]:
    """Return the unique values of `indices`, and for each of them the sum of its rows, as `summed`
    does."""
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    new = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    starts = np.flatnonzero(new)
    if len(starts) == len(indices):
        return indices, rows
    return ordered[starts], np.add.reduceat(rows[order], starts, axis=0)

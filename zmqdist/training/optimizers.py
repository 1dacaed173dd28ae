"""The optimizers that programs make: an update rule (update_rules.py), with the methods that Keras
gives it for many variables.

An optimizer has no state but `iterations`, which is a variable. It is made when the program first
uses it, where variables are made: at a parameter server in `strategy.scope()`. Functions on workers
get its handle with the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from zmqdist import update_rules
from zmqdist.field_types import checked
from zmqdist.training.batches import apply_all
from zmqdist.training.variable import Variable


@checked
class Optimizer(update_rules.UpdateRule):
    """The base class of all optimizers.

    >>> weights, optimizer = zd.Variable([1.0, 2.0]), zd.optimizers.SGD(0.5)
    >>> _ = optimizer.apply_gradients([(np.ones(2), weights)])
    >>> weights.numpy()
    array([0.5, 1.5])

    Attributes:
      learning_rate: a number of 0 or more, or one of `zmqdist.optimizers.schedules`. It cannot be
        set: `dataclasses.replace` returns a changed optimizer, and slots stay with the variables.
    """

    @cached_property
    def iterations(self) -> Any:
        """The number of calls of `apply_gradients` since this attribute was first used, as a
        variable. With `step`, the calls for one step count once. Raises RuntimeError if a scheduled
        function is the first to use it, because such a function makes no variables.
        """
        return Variable(
            0, False, dtype=np.int64, name="iterations", aggregation="only_first_replica"
        )

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        *,
        step: int | None = None,
    ) -> Any:
        """Apply gradients to variables, with one message to each parameter server. Blocks until all
        are applied. Pairs whose gradient is None are left out; `name` has no effect.

        >>> optimizer, bias = zd.optimizers.SGD(0.5, momentum=0.9), zd.Variable(1.0)
        >>> int(optimizer.iterations), optimizer.apply_gradients([(1.0, bias)])
        (0, None)
        >>> int(optimizer.iterations), float(bias)
        (1, 0.5)

        Args:
          step: in synchronous mode the number of the step, as for `Variable.apply`.

        Raises:
          ValueError: there is no gradient.
          Other errors as `ParameterServerStrategy.apply`.
        """
        pairs = [(grad, variable) for grad, variable in grads_and_vars if grad is not None]
        if not pairs:
            raise ValueError("grads_and_vars: no gradients: each is None, or there are no pairs")
        apply_all(self, pairs, step)
        iterations = vars(self).get("iterations")
        if iterations is None:
            return
        if step is None:
            iterations.assign_add(1)
        else:
            iterations.apply(_count, 1, step=step)


def _count(value: Any, grad: Any, slots: Any, step: int) -> None:
    value += 1


@dataclass(frozen=True)
class SGD(update_rules.SGDRule, Optimizer):
    __doc__ = update_rules.SGDRule.__doc__


@dataclass(frozen=True)
class Momentum(update_rules.MomentumRule, Optimizer):
    __doc__ = update_rules.MomentumRule.__doc__


@dataclass(frozen=True)
class Adagrad(update_rules.AdagradRule, Optimizer):
    __doc__ = update_rules.AdagradRule.__doc__


@dataclass(frozen=True)
class RMSprop(update_rules.RMSpropRule, Optimizer):
    __doc__ = update_rules.RMSpropRule.__doc__


@dataclass(frozen=True)
class Adam(update_rules.AdamRule, Optimizer):
    __doc__ = update_rules.AdamRule.__doc__

"""Per-worker variables: each worker has a variable of its own, such as a counter or a cache for the
functions that run there.

Rules
    A function that captures a per-worker variable, or gets it as an argument, uses the variable of
    the worker that runs the function. The variable is a Variable in the process of the slot, and
    each slot process has its own. A restarted worker begins with the initial value.

Not here: how workers build and keep such objects (scheduling/coordinator/per_worker.py).
"""

from __future__ import annotations

from typing import Any

from zmqdist.scheduling.coordinator.per_worker import PerWorkerValues
from zmqdist.training.partition import Initial
from zmqdist.training.variable import Variable


class PerWorkerVariable:
    """The result of `Variable(..., per_worker_variable=True)` under a strategy.

    Attributes:
      name: the name that the variable has on each worker.
      shape, dtype: shape and dtype of each worker's variable. They are None if only the worker
        knows them.
    """

    trainable = False

    def __init__(
        self, values: PerWorkerValues, name: str, shape: tuple[int, ...] | None, dtype: Any
    ) -> None:
        self._values = values
        self.name = name
        self.shape = shape
        self.dtype = dtype

    def read_all(self) -> list[Any]:
        """Return the current values, in the order of the workers. Blocks until all workers have
        built their variables.

        Raises:
          CancelledError: a worker is lost. Its variable is missing until the worker has come back.
        """
        return self._values.fetch()

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> Any:
        return self._values.__reduce__()

    def __repr__(self) -> str:
        return f"<PerWorkerVariable {self.name!r} of {len(self)} workers>"


def create(coordinator: Any, name: str, kwargs: dict[str, Any]) -> PerWorkerVariable:
    """Have each worker make a variable.

    Args:
      kwargs: arguments of Variable. A function as `initial_value` is called on each worker.

    Raises:
      ValueError: `trainable` is set, or `initial_value` is missing.
    """
    if kwargs.get("trainable"):
        raise ValueError(f"variable {name!r} is a per-worker variable: it cannot be trainable")
    value, shape, dtype = kwargs.get("initial_value"), kwargs.get("shape"), kwargs.get("dtype")
    if not callable(value):
        initial = Initial.of(name, value, shape, dtype)
        shape, dtype = initial.shape, initial.dtype
    variable_kwargs = {**kwargs, "name": name, "trainable": False, "dtype": dtype, "shape": shape}
    values = coordinator.create_per_worker_resource(Variable, kwargs=variable_kwargs)
    return PerWorkerVariable(values, name, None if shape is None else tuple(shape), dtype)

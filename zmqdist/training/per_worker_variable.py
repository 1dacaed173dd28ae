"""Variables of which each worker has one of its own: counters and caches that belong to where a function runs.

Rules
    A function that captures one, or is given it, has the variable of the worker that runs it: a Variable that lives there, in the process
    of the slot. A worker that is started again begins with the initial value.

Not here: how workers build things and keep them (scheduling/coordinator/per_worker.py).
"""

from __future__ import annotations

from typing import Any

from zmqdist.scheduling.coordinator.per_worker import PerWorkerValues
from zmqdist.training.partition import Initial
from zmqdist.training.variable import Variable


class PerWorkerVariable:
    """What `Variable(..., per_worker_variable=True)` gives under a strategy.

    Attributes:
      name: of each of them.
      shape, dtype: of each of them; None where only the worker will know.
    """

    trainable = False

    def __init__(self, values: PerWorkerValues, name: str, shape: tuple[int, ...] | None, dtype: Any) -> None:
        self._values = values
        self.name = name
        self.shape = shape
        self.dtype = dtype

    def read_all(self) -> list[Any]:
        """The present values, in the order of the workers; waits until they are built.

        Raises:
          CancelledError: a worker is lost, and its variable with it until it is back.
        """
        return self._values.fetch()

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> Any:
        return self._values.__reduce__()

    def __repr__(self) -> str:
        return f"<PerWorkerVariable {self.name!r} of {len(self)} workers>"


def create(coordinator: Any, name: str, kwargs: dict[str, Any]) -> PerWorkerVariable:
    """Have each worker make one.

    Args:
      kwargs: of Variable. A function as initial_value is called at each worker.

    Raises:
      ValueError: it is to be trainable, or has no initial_value.
    """
    if kwargs.get("trainable"):
        raise ValueError(f"variable {name!r} is of each worker: it cannot be trainable")
    value, shape, dtype = kwargs.get("initial_value"), kwargs.get("shape"), kwargs.get("dtype")
    if not callable(value):
        initial = Initial.of(name, value, shape, dtype)
        shape, dtype = initial.shape, initial.dtype
    variable_kwargs = {**kwargs, "name": name, "trainable": False, "dtype": dtype, "shape": shape}
    values = coordinator.create_per_worker_resource(Variable, kwargs=variable_kwargs)
    return PerWorkerVariable(values, name, None if shape is None else tuple(shape), dtype)

"""Named values of a task: arrays, grouped in containers.

Rules
    An assignment stores a copy, and a read returns a copy, so that no later write to an array
    changes the copy of another owner. A variable has the dtype and shape of the assigned array; the
    next assignment may change both.
    A container is only a name under which several variables can be cleared at once. The name ""
    means the task's default container, which has the name of the task's job.

Not here: which session sees which variables (sessions.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqdist.errors import FailedPreconditionError, InvalidArgumentError
from zmqdist.specs import TensorSpec, plain_array
from zmqdist.transport.shm_pool import memory_for


class Variables:
    """Named variables of one task: the variables of one isolated session, or the variables that all
    other sessions share. Any thread may call the methods.
    """

    def __init__(self, task: str, default_container: str) -> None:
        self._task = task
        self._default = default_container
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], np.ndarray[Any, Any]] = {}

    def assign(self, name: str, value: Any, container: str = "") -> None:
        """Set a variable to a copy of `value`, which may be anything that NumPy can turn into an
        array.

        Raises:
          InvalidArgumentError: `name` is not a str, or `value` would be an array of Python objects.
        """
        key = self._key(name, container)
        array = _copied(array_of(name, value))
        with self._lock:
            self._values[key] = array

    def read(self, name: str, container: str = "") -> np.ndarray[Any, Any]:
        """Return a copy of a variable, which the caller owns. Raises FailedPreconditionError if the
        variable has not been assigned."""
        return _copied(self.stored(name, container))

    def stored(self, name: str, container: str = "") -> np.ndarray[Any, Any]:
        """Return the stored array of a variable, without a copy. The caller must not write to it.
        Raises the errors of `read`."""
        key = self._key(name, container)
        with self._lock:
            array = self._values.get(key)
        if array is None:
            raise FailedPreconditionError(
                f"variable {name!r} (container {key[0]!r}) of {self._task} was not "
                f"assigned, or was cleared by a reset"
            )
        return array

    def specs(self, container: str = "") -> dict[str, TensorSpec]:
        """Return the shape and dtype of each variable in a container, sorted by name."""
        with self._lock:
            arrays = sorted(
                (name, array)
                for (where, name), array in self._values.items()
                if where == (container or self._default)
            )
        return {name: TensorSpec(array.shape, array.dtype) for name, array in arrays}

    def clear(self, containers: Sequence[str] = ()) -> None:
        """Remove the variables of these containers; without names, remove all variables."""
        cleared = {container or self._default for container in containers}
        with self._lock:
            self._values = {
                key: array
                for key, array in self._values.items()
                if cleared and key[0] not in cleared
            }

    def _key(self, name: str, container: str) -> tuple[str, str]:
        if not isinstance(name, str) or not isinstance(container, str):
            raise InvalidArgumentError(
                f"variables and containers are named by text, not {name!r}, {container!r}"
            )
        return container or self._default, name


def array_of(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Return a value as an array that a variable can hold, perhaps a copy. Raises
    InvalidArgumentError if NumPy cannot make such an array.
    """
    array = plain_array(value, f"variable {name!r}")
    if array.dtype.hasobject:
        raise InvalidArgumentError(
            f"variable {name!r} cannot hold {type(value).__name__}: that is no array of "
            f"numbers or text"
        )
    return array


def _copied(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a copy of an array. The copy of a large array reuses memory of earlier arrays, because
    large variables are assigned again and again.
    """
    copy: np.ndarray[Any, Any] = np.ndarray(array.shape, array.dtype, memory_for(array.nbytes))
    np.copyto(copy, array)
    return copy

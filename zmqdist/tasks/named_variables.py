"""Named values that live on a task: arrays, in containers.

Rules
    What is stored is a copy of this moment, and so is what is read: nobody's later writes are seen by anybody else.
    Dtype and shape are kept as they came, and may be others at the next assignment.
    A container is only a name that several values can be cleared by; "" is the task's default one, which has its job's name.

Not here: who sees which variables (sessions.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqdist.errors import FailedPreconditionError, InvalidArgumentError
from zmqdist.specs import TensorSpec
from zmqdist.transport.receive_buffers import memory_for


class Variables:
    """The variables of one task that one session, or all that share them, can see. From any thread."""

    def __init__(self, task: str, default_container: str) -> None:
        self._task = task
        self._default = default_container
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], np.ndarray[Any, Any]] = {}

    def assign(self, name: str, value: Any, container: str = "") -> None:
        """Set a variable to a copy of anything that lends itself to an array.

        Raises:
          InvalidArgumentError: `name` is no text, or `value` would be an array of Python objects.
        """
        key = self._key(name, container)
        array = _copied(array_of(name, value))
        with self._lock:
            self._values[key] = array

    def read(self, name: str, container: str = "") -> np.ndarray[Any, Any]:
        """A copy of a variable, the caller's own. Raises FailedPreconditionError where it was not assigned."""
        return _copied(self.stored(name, container))

    def stored(self, name: str, container: str = "") -> np.ndarray[Any, Any]:
        """The array that is kept: nobody may write to it. Raises as `read`."""
        key = self._key(name, container)
        with self._lock:
            array = self._values.get(key)
        if array is None:
            text = (
                f"variable {name!r} (container {key[0]!r}) of {self._task} was not assigned, or was cleared by a reset"
            )
            raise FailedPreconditionError(text)
        return array

    def specs(self, container: str = "") -> dict[str, TensorSpec]:
        """What is in a container: name -> shape and dtype, sorted by name."""
        with self._lock:
            found = sorted(
                (name, array) for (where, name), array in self._values.items() if where == (container or self._default)
            )
        return {name: TensorSpec(array.shape, array.dtype) for name, array in found}

    def clear(self, containers: Sequence[str] = ()) -> None:
        """Forget what is in these containers; in all of them when none is named."""
        wanted = {container or self._default for container in containers}
        with self._lock:
            self._values = {key: array for key, array in self._values.items() if wanted and key[0] not in wanted}

    def _key(self, name: str, container: str) -> tuple[str, str]:
        if not isinstance(name, str) or not isinstance(container, str):
            raise InvalidArgumentError(f"variables and containers are named by text, not {name!r}, {container!r}")
        return container or self._default, name


def array_of(name: str, value: Any) -> np.ndarray[Any, Any]:
    """A value as the array that a variable holds, copied or not. Raises InvalidArgumentError where there is none."""
    try:
        array = np.asarray(value)
        problem = "that is no array of numbers or text" if array.dtype.hasobject else ""
    except ValueError as error:  # rows of different lengths, say
        problem = str(error)
    if problem:
        text = f"variable {name!r} cannot hold {type(value).__name__}: {problem}"
        raise InvalidArgumentError(text)
    return array


def _copied(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """In memory that is warm, where much of it is needed: large variables are assigned again and again."""
    copy: np.ndarray[Any, Any] = np.ndarray(array.shape, array.dtype, memory_for(array.nbytes))
    np.copyto(copy, array)
    return copy

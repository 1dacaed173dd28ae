"""What the tests of kept results schedule; workers import this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.scheduling.work import until
from zmqdist.coordinator import ClusterCoordinator, RemoteValue

MIB = 2**20
SIZE = 8 * MIB


def zeros() -> np.ndarray[Any, Any]:
    return np.zeros(SIZE, np.uint8)


def small() -> dict[str, int]:
    return {"a": 1}


def total(array: np.ndarray[Any, Any]) -> int:
    return int(array.sum(dtype=np.int64))


def writes_to_its_own(array: np.ndarray[Any, Any], folder: Path, number: int, others: int) -> int:
    """Writes while others have the same value, and looks at it when all have written."""
    array += number
    (folder / f"written-{number}").touch()
    until(lambda: len(list(folder.glob("written-*"))) == others)
    return total(array)


def kept(coordinator: ClusterCoordinator, fn: Any, *args: Any) -> RemoteValue:
    """A kept value, ready."""
    value = coordinator.schedule(fn, args, keep=True)
    assert value.exception(20) is None
    return value

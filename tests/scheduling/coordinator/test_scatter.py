"""`scatter`: a value that is pickled once for any number of functions."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(60)

SIZE = 2**17


class Counting:
    """Counts how often it is pickled."""

    pickles = 0

    def __reduce__(self) -> Any:
        Counting.pickles += 1
        return dict, ({"a": 1},)


def overwrite(array: Any) -> float:
    """Return the sum of the argument, which this call then changes."""
    before = float(array.sum())
    array[:] = 7
    return before


def test_value_is_pickled_once(in_slots: ClusterCoordinator) -> None:
    Counting.pickles = 0
    value = in_slots.scatter([Counting(), 2])
    uses = [in_slots.submit(list, value) for _ in range(20)]
    captured = in_slots.submit(lambda: value)
    assert in_slots.gather([*uses, captured], timeout=20) == [[{"a": 1}, 2]] * 21
    assert value.result() == [{"a": 1}, 2]
    assert Counting.pickles == 1


def test_large_array_is_copied_once_and_private_to_each_run(in_slots: ClusterCoordinator) -> None:
    array = np.ones(SIZE)
    value = in_slots.scatter(array)
    array[:] = 5
    sums = in_slots.gather([in_slots.submit(overwrite, value) for _ in range(20)], timeout=20)
    assert sums == [SIZE] * 20
    held = in_slots.snapshot().held
    assert (held.parts, held.bytes, held.copies) == (1, 8 * SIZE, 1)
    mine = value.result()
    mine[:] = 6
    assert value.result() is mine
    assert in_slots.submit(np.max, value).result(20) == 1.0


def test_array_is_read_without_shared_memory(no_shared_memory: None) -> None:
    with (
        zd.local_cluster(workers=2, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        value = coordinator.scatter({"array": np.ones(SIZE), "small": np.ones(3)})
        shapes = coordinator.submit(lambda held: [a.shape for a in held.values()], value)
        assert shapes.result(20) == [(SIZE,), (3,)]


def test_dropped_value_is_freed_after_its_uses(coordinator: ClusterCoordinator) -> None:
    value = coordinator.scatter(np.ones(SIZE))
    use = coordinator.submit(np.sum, value)
    del value
    gc.collect()
    assert use.result(20) == SIZE
    until(lambda: coordinator.snapshot().held.parts == 0)


def test_value_is_ready_and_of_its_coordinator(coordinator: ClusterCoordinator) -> None:
    value = coordinator.scatter([1])
    assert (value.done(), value.cancel(), value.exception()) == (True, False, None)
    assert repr(value) == "<RemoteValue of a scattered list: ready>"
    assert [*coordinator.as_completed([value])] == [value]
    assert coordinator.create_per_worker_resource(len, (value,))[0].result(20) == 1
    with pytest.raises(ValueError, match="only be given to functions of its own coordinator"):
        coordinator.scatter([value])
    with pytest.raises(errors.InvalidArgumentError, match="generator"):
        coordinator.scatter(number for number in ())


def test_value_passes_as_safe_result(threads: zd.local_cluster) -> None:
    with ClusterCoordinator(threads, results="safe") as coordinator:
        value = coordinator.scatter({"x": np.ones(SIZE)})
        assert coordinator.submit(lambda held: float(held["x"].sum()), value).result(20) == SIZE


def test_closed_coordinator_scatters_nothing(threads: zd.local_cluster) -> None:
    coordinator = ClusterCoordinator(threads)
    value = coordinator.scatter(np.ones(SIZE))
    coordinator.close()
    with pytest.raises(errors.FailedPreconditionError, match="its coordinator has been closed"):
        value.result()
    with pytest.raises(errors.FailedPreconditionError):
        coordinator.scatter(1)

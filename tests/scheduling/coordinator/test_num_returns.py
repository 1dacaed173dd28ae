"""`num_returns`: the items of a result as values of their own."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import call_count, logged_array, replace_worker
from tests.scheduling.coordinator.test_options import times
from tests.scheduling.work import begun, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator, RemoteValue

pytestmark = pytest.mark.timeout(90)

SIZE = 2**17


def ones_and_zeros(size: int) -> tuple[Any, ...]:
    return np.ones(size), np.zeros(size)


def logged_pair(folder: Path) -> list[Any]:
    return [logged_array(folder, "pair"), np.zeros(SIZE)]


def pair_at(folder: Path, well_at: int) -> tuple[int, str]:
    return times(folder, well_at), "end"


def parts(coordinator: ClusterCoordinator, count: int, fn: Any, *args: Any, **options: Any) -> Any:
    return coordinator.options(num_returns=count, **options).submit(fn, *args)


@pytest.mark.processes("scheduling")
@pytest.mark.parametrize("size", [3, SIZE], ids=["small", "large"])
@pytest.mark.parametrize("keep", [False, True], ids=["here", "kept"])
def test_parts_are_values_of_their_own(in_slots: ClusterCoordinator, size: int, keep: bool) -> None:
    ones, zeros = parts(in_slots, 2, ones_and_zeros, size, keep=keep)
    sums = [in_slots.submit(np.sum, part) for part in (zeros, ones)]
    both = in_slots.submit(np.add, ones, zeros)
    captured = in_slots.submit(lambda: float(zeros.sum()))
    assert in_slots.gather(sums, timeout=20) == [0.0, size]
    assert both.result(20).sum() == size
    assert captured.result(20) == 0.0
    assert (ones.result(20).sum(), zeros.result(20).sum()) == (size, 0.0)
    assert in_slots.submit(np.sum, ones).result(20) == size, "it is an input after `result`, too"
    in_slots.join(20)


def test_consumer_of_kept_part_fetches_only_its_part(no_shared_memory: None) -> None:
    with (
        zd.local_cluster(workers=2, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        _, zeros = parts(coordinator, 2, ones_and_zeros, SIZE, keep=True, worker=0)
        assert coordinator.options(worker=1).submit(np.sum, zeros).result(20) == 0.0
        assert sorted(worker.snapshot().fetches for worker in cluster.servers) == [0, 1]
        assert coordinator.snapshot().held.parts == 0


def test_part_that_program_has_changed_is_sent_changed(coordinator: ClusterCoordinator) -> None:
    ones, zeros = parts(coordinator, 2, ones_and_zeros, SIZE)
    ones.result(20)[:] = 5
    assert coordinator.submit(np.max, ones).result(20) == 5
    assert coordinator.submit(np.max, zeros).result(20) == 0


def test_kept_parts_are_dropped_with_the_last(
    in_threads: ClusterCoordinator, threads: zd.local_cluster
) -> None:
    def held_parts() -> int:
        return sum(worker.snapshot().held.parts for worker in threads.servers)

    ones, zeros = parts(in_threads, 2, ones_and_zeros, SIZE, keep=True)
    assert ones.exception(20) is None
    del zeros
    gc.collect()
    assert in_threads.submit(np.sum, ones).result(20) == SIZE
    assert held_parts() == 2
    del ones
    until(lambda: held_parts() == 0)


def test_wrong_number_of_parts_fails_all_parts(coordinator: ClusterCoordinator) -> None:
    first, second, third = parts(coordinator, 3, ones_and_zeros, 2)
    used = coordinator.submit(np.sum, third)
    for part in (first, second, third):
        with pytest.raises(ValueError, match=r"returned a tuple of 2, but .* num_returns=3"):
            part.result(20)
    assert isinstance(used.exception(20), errors.ClosureInputError)


def test_retries_concern_all_parts(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    count, end = parts(coordinator, 2, pair_at, tmp_path, 3, retries=2)
    assert (end.result(20), count.result(20)) == ("end", 3)
    coordinator.join(20)


def test_cancel_of_a_part_cancels_all(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    first, second = parts(in_threads, 2, waits, tmp_path)
    until(lambda: begun(tmp_path))
    assert second.cancel()
    until(lambda: (tmp_path / "cancelled-x").exists())
    assert isinstance(first.exception(20), errors.OpError | ValueError)


def test_lost_parts_are_computed_again_together(
    fragile: ClusterCoordinator, single: zd.local_cluster, tmp_path: Path
) -> None:
    ones, zeros = parts(fragile, 2, logged_pair, tmp_path, lineage=True)
    assert ones.exception(20) is None
    replace_worker(single)
    assert fragile.submit(np.sum, zeros).result(40) == 0.0
    assert int(ones.result(40)[0]) == 1
    assert call_count(tmp_path, "pair") == 2


def test_parts_are_completed_and_awaited_as_values(coordinator: ClusterCoordinator) -> None:
    async def awaited(value: RemoteValue[Any]) -> Any:
        return await value

    import asyncio

    pairs = coordinator.options(num_returns=2).map(divmod, [7, 9], [2, 2])
    values = [value for pair in pairs for value in pair]  # type: ignore[attr-defined]
    assert set(coordinator.as_completed(values, timeout=20)) == set(values)
    assert coordinator.gather(pairs) == [(3, 1), (4, 1)]
    assert asyncio.run(awaited(values[3])) == 1


def test_parts_pass_as_safe_results(threads: zd.local_cluster) -> None:
    with ClusterCoordinator(threads, results="safe") as coordinator:
        for size in (3, SIZE):
            ones, zeros = parts(coordinator, 2, ones_and_zeros, size)
            assert coordinator.submit(np.sum, zeros).result(20) == 0.0
            assert ones.result(20).sum() == size


@pytest.mark.parametrize(
    ("num_returns", "error", "message"),
    [
        (0, ValueError, "num_returns is 0, wants 1 to 1000, or None"),
        (1001, ValueError, "num_returns is 1001, wants 1 to 1000, or None"),
        ("2", TypeError, "num_returns is '2', wants a whole number"),
    ],
)
def test_bad_number_of_parts_is_refused(
    coordinator: ClusterCoordinator, num_returns: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        coordinator.options(num_returns=num_returns)

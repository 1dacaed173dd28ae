"""Results that stay with their worker, and are used by the next function without coming here."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import (
    KEPT_BYTES,
    check_shared_by_writers,
    kept_value,
    small,
    sum_of,
    zeros,
)
from tests.scheduling.work import go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def near(threads: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    """Workers whose stores a test can look into."""
    with ClusterCoordinator(threads) as coordinator:
        yield coordinator


def held_parts(cluster: zd.local_cluster) -> int:
    """Parts in the stores of workers that are threads."""
    return sum(worker.snapshot().held.parts for worker in cluster.servers)


# -- use -------------------------------------------------------------------------------------------


def test_kept_value_is_private_to_simultaneous_writers(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    value = check_shared_by_writers(coordinator, tmp_path)
    assert not value.get().any()


def test_kept_value_is_read_without_shared_memory(no_shared_memory: None, tmp_path: Path) -> None:
    with (
        zd.local_cluster(workers=2, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        value = check_shared_by_writers(coordinator, tmp_path)
        assert coordinator.snapshot().held.parts == 0
        mine = value.get()
        mine += 1
        assert coordinator.schedule(sum_of, (value,)).fetch(20) == 0


def test_kept_bytes_do_not_pass_coordinator(coordinator: ClusterCoordinator) -> None:
    value = kept_value(coordinator, zeros)
    assert coordinator.schedule(sum_of, (value,)).fetch(20) == 0
    snapshot = coordinator.snapshot()
    assert (snapshot.held.parts, snapshot.held.copies) == (0, 0), "nothing was held here"
    assert snapshot.memories == 0, "no memory of a worker was opened here"
    assert snapshot.connections == 0, "nothing was read from a worker"


def test_kept_value_is_fetched_once_and_stays_usable(coordinator: ClusterCoordinator) -> None:
    value = kept_value(coordinator, zeros)
    mine = value.fetch()
    assert mine.nbytes == KEPT_BYTES
    assert mine.flags.writeable
    assert value.get() is mine
    mine += 1
    assert coordinator.schedule(sum_of, (value,)).fetch(20) == 0, (
        "what is fetched is a copy of one's own"
    )


USES: list[Any] = [
    lambda value: (dict, (value,), None),
    lambda value: (lambda argument: argument["x"][1], ({"x": [0, value]},), None),
    lambda value: (lambda x: x, None, {"x": value}),
    lambda value: (lambda: value, None, None),
]


@pytest.mark.parametrize("use", USES, ids=["argument", "nested", "keyword", "captured"])
def test_small_kept_value_can_be_input_at_any_depth(
    coordinator: ClusterCoordinator, use: Any
) -> None:
    value = kept_value(coordinator, small)
    assert coordinator.schedule(*use(value)).fetch(20) == {"a": 1}
    assert value.fetch() == {"a": 1}


def test_kept_value_can_have_kept_inputs(coordinator: ClusterCoordinator) -> None:
    value = kept_value(coordinator, zeros)
    for _ in range(3):
        value = kept_value(coordinator, np.add, value, 1)
    assert coordinator.schedule(sum_of, (value,)).fetch(20) == 3 * KEPT_BYTES


def test_kept_value_can_be_awaited(near: ClusterCoordinator) -> None:
    async def main() -> int:
        return sum_of(await near.schedule(zeros, keep=True))

    assert asyncio.run(main()) == 0


def test_repr_of_kept_value(near: ClusterCoordinator) -> None:
    """It says where the value is, without fetching it."""
    value = kept_value(near, small)
    assert (
        repr(value)
        == "<RemoteValue of tests.scheduling.coordinator.helpers.small: kept by its worker>"
    )
    assert value.done()
    near.join(0)


def test_failed_function_keeps_nothing(near: ClusterCoordinator) -> None:
    value = near.schedule(int, ("x",), keep=True)
    with pytest.raises(ValueError, match="invalid literal"):
        value.fetch(20)
    with pytest.raises(ValueError, match="invalid literal"):
        near.join(20)
    with pytest.raises(errors.ClosureInputError, match="invalid literal"):
        near.schedule(sum_of, (value,)).fetch(20)


def test_kept_value_outlives_its_round(near: ClusterCoordinator) -> None:
    value = kept_value(near, zeros)
    near.schedule(int, ("x",))
    with pytest.raises(ValueError, match="invalid literal"):
        near.join(20)
    assert near.schedule(sum_of, (value,)).fetch(20) == 0


# -- the end of a value ----------------------------------------------------------------------------


def test_worker_holds_kept_value_until_it_is_dropped(
    near: ClusterCoordinator, threads: zd.local_cluster
) -> None:
    values = [kept_value(near, zeros) for _ in range(3)]
    assert held_parts(threads) == 3
    values[0].fetch()
    del values[0]
    gc.collect()
    until(lambda: held_parts(threads) == 2)
    near.schedule(zeros, keep=True)  # dropped before it has ended
    near.join(20)
    values.clear()
    gc.collect()
    until(lambda: held_parts(threads) == 0)


def test_kept_value_stays_for_unfinished_dependents(
    near: ClusterCoordinator, threads: zd.local_cluster, tmp_path: Path
) -> None:
    value = kept_value(near, zeros)
    for name in "ab":
        near.schedule(waits, (tmp_path, name))
    used = near.schedule(sum_of, (value,))
    del value
    gc.collect()
    go(tmp_path)
    assert used.fetch(20) == 0
    until(lambda: held_parts(threads) == 0)


def test_close_frees_kept_values(threads: zd.local_cluster) -> None:
    with ClusterCoordinator(threads) as coordinator:
        here, there = kept_value(coordinator, zeros), kept_value(coordinator, zeros)
        here.fetch()
        assert held_parts(threads) == 2
    until(lambda: held_parts(threads) == 0)
    assert sum_of(here.fetch()) == 0
    with pytest.raises(
        errors.UnavailableError,
        match=r"the value of .*\.zeros was kept by the worker at .* \(worker:[012]\) and is lost",
    ):
        there.fetch()

"""Results that stay with their worker, and are used by the next function without coming here."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.dispatch.work import go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator, RemoteValue
from zmqdist.net import arena

MIB = 2**20
SIZE = 8 * MIB

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def near(threads: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    """Workers whose stores a test can look into."""
    with ClusterCoordinator(threads) as made:
        yield made


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


def held(cluster: zd.local_cluster) -> int:
    """Parts in the stores of workers that are threads."""
    return sum(len(worker._shell._store) for worker in cluster._threads)


# -- use -----------------------------------------------------------------------------------------------------------------


def test_a_kept_value_is_used_by_two_workers_at_a_time_and_each_writes_to_its_own(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    value = kept(coordinator, zeros)
    used = [coordinator.schedule(writes_to_its_own, (value, tmp_path, number, 2)) for number in (1, 2)]
    assert coordinator.fetch(used) == [SIZE, 2 * SIZE]
    assert coordinator.schedule(total, (value,)).fetch(20) == 0
    assert not value.get().any()


@pytest.mark.parametrize("processes", [True, False], ids=["processes", "threads"])
def test_without_shared_memory_it_is_read_from_its_worker(
    processes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(arena.VARIABLE, "off")
    monkeypatch.setattr(arena, "_arena", None)
    monkeypatch.setattr(arena, "_tried", False)
    with zd.local_cluster(workers=2, processes=processes) as cluster, ClusterCoordinator(cluster) as coordinator:
        value = kept(coordinator, zeros)
        used = [coordinator.schedule(writes_to_its_own, (value, tmp_path, number, 2)) for number in (1, 2)]
        assert coordinator.fetch(used) == [SIZE, 2 * SIZE]
        assert len(coordinator._shell._store) == 0
        mine = value.get()
        mine += 1
        assert coordinator.schedule(total, (value,)).fetch(20) == 0


def test_its_bytes_do_not_pass_the_coordinator(coordinator: ClusterCoordinator) -> None:
    value = kept(coordinator, zeros)
    assert coordinator.schedule(total, (value,)).fetch(20) == 0
    shell = coordinator._shell
    fetcher = shell._fetching._fetcher
    assert (len(shell._store), shell._store.copies) == (0, 0), "nothing was held here"
    assert not fetcher.near._arenas, "no memory of a worker was opened here"
    assert not fetcher.clients._lines, "nothing was read from a worker"


def test_it_is_fetched_once_and_goes_on_being_an_argument(coordinator: ClusterCoordinator) -> None:
    value = kept(coordinator, zeros)
    mine = value.fetch()
    assert mine.nbytes == SIZE
    assert mine.flags.writeable
    assert value.get() is mine
    mine += 1
    assert coordinator.schedule(total, (value,)).fetch(20) == 0, "what is fetched is a copy of one's own"


USES: list[Any] = [
    lambda value: (dict, (value,), None),
    lambda value: (lambda given: given["x"][1], ({"x": [0, value]},), None),
    lambda value: (lambda x: x, None, {"x": value}),
    lambda value: (lambda: value, None, None),
]


@pytest.mark.parametrize("use", USES, ids=["argument", "nested", "keyword", "captured"])
def test_a_small_value_can_be_kept_and_given_at_any_depth(coordinator: ClusterCoordinator, use: Any) -> None:
    value = kept(coordinator, small)
    assert coordinator.schedule(*use(value)).fetch(20) == {"a": 1}
    assert value.fetch() == {"a": 1}


def test_a_kept_value_can_be_made_of_kept_ones(coordinator: ClusterCoordinator) -> None:
    value = kept(coordinator, zeros)
    for _ in range(3):
        value = kept(coordinator, np.add, value, 1)
    assert coordinator.schedule(total, (value,)).fetch(20) == 3 * SIZE


def test_a_frozen_result_is_read_only_wherever_it_is_used(in_processes: ClusterCoordinator) -> None:
    value = kept(in_processes, lambda: zd.freeze(np.ones(SIZE, np.uint8)))
    assert in_processes.schedule(lambda a: (a.flags.writeable, total(a)), (value,)).fetch(20) == (False, SIZE)


def test_a_kept_value_can_be_awaited(near: ClusterCoordinator) -> None:
    async def main() -> int:
        return total(await near.schedule(zeros, keep=True))

    assert asyncio.run(main()) == 0


def test_repr_and_exception_tell_that_it_is_with_its_worker(near: ClusterCoordinator) -> None:
    value = kept(near, small)
    assert repr(value) == f"<RemoteValue of {__name__}.small: kept by its worker>"
    assert value.done()
    near.join(0)


def test_a_function_that_fails_keeps_nothing(near: ClusterCoordinator) -> None:
    value = near.schedule(int, ("x",), keep=True)
    with pytest.raises(ValueError, match="invalid literal"):
        value.fetch(20)
    with pytest.raises(ValueError, match="invalid literal"):
        near.join(20)
    with pytest.raises(errors.ClosureInputError, match="invalid literal"):
        near.schedule(total, (value,)).fetch(20)


def test_a_kept_value_outlives_its_round(near: ClusterCoordinator) -> None:
    value = kept(near, zeros)
    near.schedule(int, ("x",))
    with pytest.raises(ValueError, match="invalid literal"):
        near.join(20)
    assert near.schedule(total, (value,)).fetch(20) == 0


# -- the end of a value --------------------------------------------------------------------------------------------------


def test_a_worker_holds_it_until_it_was_dropped_here(near: ClusterCoordinator, threads: zd.local_cluster) -> None:
    values = [kept(near, zeros) for _ in range(3)]
    assert held(threads) == 3
    values[0].fetch()
    del values[0]
    gc.collect()
    until(lambda: held(threads) == 2)
    near.schedule(zeros, keep=True)  # dropped before it has ended
    near.join(20)
    values.clear()
    gc.collect()
    until(lambda: held(threads) == 0)


def test_it_stays_for_a_function_that_was_given_it_and_has_not_ended(
    near: ClusterCoordinator, threads: zd.local_cluster, tmp_path: Path
) -> None:
    value = kept(near, zeros)
    for name in "ab":
        near.schedule(waits, (tmp_path, name))
    used = near.schedule(total, (value,))
    del value
    gc.collect()
    go(tmp_path)
    assert used.fetch(20) == 0
    until(lambda: held(threads) == 0)


def test_the_end_of_its_coordinator_frees_it(threads: zd.local_cluster) -> None:
    with ClusterCoordinator(threads) as coordinator:
        here, there = kept(coordinator, zeros), kept(coordinator, zeros)
        here.fetch()
        assert held(threads) == 2
    until(lambda: held(threads) == 0)
    assert total(here.fetch()) == 0
    with pytest.raises(
        errors.UnavailableError, match=r"the value of .*\.zeros was kept by the worker at .* and is lost"
    ):
        there.fetch()


def test_it_outlives_its_slot_but_not_its_worker() -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        slot = kept(coordinator, os.getpid)
        value = kept(coordinator, zeros)
        os.kill(slot.fetch(), signal.SIGKILL)
        assert coordinator.schedule(total, (value,)).fetch(20) == 0
        cluster.kill_worker(0)
        cluster.add_worker()
        for _ in range(2):
            with pytest.raises(
                errors.UnavailableError, match=rf"the value of {__name__}.zeros .* worker at 127.0.0.1:\d+"
            ):
                value.fetch()
        used = coordinator.schedule(total, (value,))
        with pytest.raises(errors.UnavailableError, match=rf"the value of {__name__}.zeros .* is lost: schedule"):
            used.fetch(20)
        with pytest.raises(errors.UnavailableError):
            coordinator.join(20)
        assert coordinator.schedule(small).fetch(20) == {"a": 1}

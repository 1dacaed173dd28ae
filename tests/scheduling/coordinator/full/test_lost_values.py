"""Values whose worker is killed: results that have arrived, kept ones, those with a lineage, and
large arrays that functions capture."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import (
    call_count,
    check_shared_by_writers,
    kept_value,
    logged_array,
    replace_worker,
    small,
    sum_of,
    zeros,
)
from tests.scheduling.work import begun, go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(90)

SIZE = 2**18


def test_kept_value_is_read_without_shared_memory(no_shared_memory: None, tmp_path: Path) -> None:
    with zd.local_cluster(workers=2) as cluster, ClusterCoordinator(cluster) as coordinator:
        value = check_shared_by_writers(coordinator, tmp_path)
        assert coordinator.snapshot().held.parts == 0
        mine = value.get()
        mine += 1
        assert coordinator.schedule(sum_of, (value,)).fetch(20) == 0


def test_kept_value_outlives_slot_but_not_worker() -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        slot = kept_value(coordinator, os.getpid)
        value = kept_value(coordinator, zeros)
        os.kill(slot.fetch(), signal.SIGKILL)
        assert coordinator.schedule(sum_of, (value,)).fetch(20) == 0
        cluster.kill_worker(0)
        until(lambda: cluster.dispatcher.num_workers == 0)
        cluster.add_worker()
        for _ in range(2):
            with pytest.raises(
                errors.UnavailableError,
                match=r"the value of tests.scheduling.coordinator.helpers.zeros .* worker at 127.0.0.1:\d+",
            ):
                value.fetch()
        used = coordinator.schedule(sum_of, (value,))
        with pytest.raises(
            errors.UnavailableError,
            match=r"the value of tests.scheduling.coordinator.helpers.zeros .* is lost: schedule",
        ):
            used.fetch(20)
        with pytest.raises(errors.UnavailableError):
            coordinator.join(20)
        assert coordinator.schedule(small).fetch(20) == {"a": 1}


def test_lost_value_is_recomputed_with_its_lost_inputs(
    fragile: ClusterCoordinator, single: zd.local_cluster, tmp_path: Path
) -> None:
    """For `get`, and for functions that have it as an input."""
    first = fragile.schedule(logged_array, (tmp_path, "first"), lineage=True)
    second = fragile.schedule(logged_array, (tmp_path, "second", first), lineage=True)
    assert second.exception(20) is None
    replace_worker(single)
    assert fragile.schedule(logged_array, (tmp_path, "third", second)).fetch(30)[0] == 3
    assert (
        call_count(tmp_path, "first"),
        call_count(tmp_path, "second"),
        call_count(tmp_path, "third"),
    ) == (
        2,
        2,
        1,
    )
    assert first.get(20)[0] == 1
    replace_worker(single, 1)
    assert second.get(30)[0] == 2
    assert second.get() is second.get()
    assert (call_count(tmp_path, "first"), call_count(tmp_path, "second")) == (3, 3)
    fragile.join(20)


def test_lost_value_without_lineage_fails_its_dependents(
    fragile: ClusterCoordinator, single: zd.local_cluster, tmp_path: Path
) -> None:
    first = fragile.schedule(logged_array, (tmp_path, "first"), keep=True)
    second = fragile.schedule(logged_array, (tmp_path, "second", first), lineage=True)
    assert second.exception(20) is None
    replace_worker(single)
    with pytest.raises(
        errors.UnavailableError,
        match=r"value of .*\.logged_array was kept by the worker at .* and is lost",
    ):
        second.get(30)
    third = fragile.schedule(logged_array, (tmp_path, "third", second))
    with pytest.raises(errors.ClosureInputError) as caught:
        third.get(30)
    assert isinstance(caught.value.original_exception, errors.UnavailableError)
    with pytest.raises(errors.ClosureInputError):
        fragile.join(20)
    fourth = fragile.schedule(logged_array, (tmp_path, "fourth", first), retries=3)
    with pytest.raises(errors.UnavailableError):
        fourth.get(30)
    with pytest.raises(errors.UnavailableError):
        fragile.join(20)


def test_close_ends_wait_for_lost_value(single: zd.local_cluster, tmp_path: Path) -> None:
    coordinator = ClusterCoordinator(single)
    value = coordinator.schedule(logged_array, (tmp_path, "value"), lineage=True)
    assert value.exception(20) is None
    single.kill_worker(0)
    raised: list[BaseException] = []

    def fetch() -> None:
        try:
            value.get(60)
        except Exception as error:
            raised.append(error)

    fetching = threading.Thread(target=fetch)
    fetching.start()
    until(lambda: coordinator.snapshot().kept == 0)
    coordinator.close()
    fetching.join(20)
    assert isinstance(raised[0], errors.UnavailableError)


def test_ready_value_survives_loss_of_whole_cluster() -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        values = [coordinator.schedule(np.full, (size, 7.0)) for size in (3, 3_000_000)]
        coordinator.join(20)
        cluster.kill_worker(0)
        cluster.dispatcher.stop()
        assert [float(value.get(20).sum()) for value in values] == [21.0, 21_000_000.0]
    # also when the coordinator has been closed
    assert [len(value.get()) for value in values] == [3, 3_000_000]


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "chunks"])
def test_captured_array_reaches_new_workers(
    request: pytest.FixtureRequest, tmp_path: Path, shared: bool
) -> None:
    """One in the place of a killed worker, and one that joins."""
    if not shared:
        request.getfixturevalue("no_shared_memory")
    array = np.ones(SIZE)

    def total(number: int) -> float:
        waits(tmp_path, str(number))
        return float(array.sum()) + number

    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        values = coordinator.map(total, range(4))
        until(lambda: begun(tmp_path))
        array[:] = 99
        cluster.kill_worker(0)
        cluster.restart_worker(0)
        cluster.add_worker()
        until(lambda: len(set(begun(tmp_path))) == 3)
        go(tmp_path)
        assert coordinator.fetch(values) == [float(SIZE) + number for number in range(4)]
        assert coordinator.snapshot().held.copies == 1
        until(lambda: coordinator.snapshot().held.parts == 0)

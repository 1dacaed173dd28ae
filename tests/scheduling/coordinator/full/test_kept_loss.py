"""Kept results whose worker is killed, and where processes share no memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import zmqdist as zd
from tests.scheduling.coordinator.kept_work import (
    SIZE,
    kept,
    small,
    total,
    writes_to_its_own,
    zeros,
)
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.transport import shm_pool


def test_without_shared_memory_it_is_read_from_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(shm_pool.POOL_VARIABLE, "off")
    monkeypatch.setattr(shm_pool, "_pool", None)
    monkeypatch.setattr(shm_pool, "_tried", False)
    with zd.local_cluster(workers=2) as cluster, ClusterCoordinator(cluster) as coordinator:
        value = kept(coordinator, zeros)
        used = [
            coordinator.schedule(writes_to_its_own, (value, tmp_path, number, 2))
            for number in (1, 2)
        ]
        assert coordinator.fetch(used) == [SIZE, 2 * SIZE]
        assert coordinator.snapshot().held.parts == 0
        mine = value.get()
        mine += 1
        assert coordinator.schedule(total, (value,)).fetch(20) == 0


def test_it_outlives_its_slot_but_not_its_worker() -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        slot = kept(coordinator, os.getpid)
        value = kept(coordinator, zeros)
        os.kill(slot.fetch(), signal.SIGKILL)
        assert coordinator.schedule(total, (value,)).fetch(20) == 0
        cluster.kill_worker(0)
        until(lambda: cluster.dispatcher.num_workers == 0)
        cluster.add_worker()
        for _ in range(2):
            with pytest.raises(
                errors.UnavailableError,
                match=r"the value of tests.scheduling.coordinator.kept_work.zeros .* worker at 127.0.0.1:\d+",
            ):
                value.fetch()
        used = coordinator.schedule(total, (value,))
        with pytest.raises(
            errors.UnavailableError,
            match=r"the value of tests.scheduling.coordinator.kept_work.zeros .* is lost: schedule",
        ):
            used.fetch(20)
        with pytest.raises(errors.UnavailableError):
            coordinator.join(20)
        assert coordinator.schedule(small).fetch(20) == {"a": 1}

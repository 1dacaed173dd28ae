"""With a start delay, workers begin with a coordinator's work one after the other."""

from __future__ import annotations

import time

import pytest

import zmqdist as zd
from tests.scheduling.coordinator import helpers
from zmqdist import data, errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.shared.config import START_DELAY_ENV, WorkerConfig

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("queue_max", [None, 2])
def test_start_delay_staggers_workers(
    monkeypatch: pytest.MonkeyPatch, queue_max: int | None
) -> None:
    monkeypatch.setenv(START_DELAY_ENV, "1")
    monkeypatch.setenv(START_DELAY_ENV + "_MAX", "2")
    with (
        zd.local_cluster(workers=3, processes=False) as cluster,
        ClusterCoordinator(cluster, queue_max=queue_max) as coordinator,
    ):
        scheduled_at = time.monotonic()
        began = [coordinator.schedule(time.monotonic, worker=index) for index in range(3)]
        assert all(
            when >= scheduled_at + index for index, when in enumerate(coordinator.fetch(began))
        )
        iterator = iter(coordinator.create_per_worker_dataset(data.Dataset.range(100)))
        firsts = [coordinator.schedule(helpers.first, (iterator,)) for _ in range(10)]
        coordinator.join()
        assert all(0 <= value < 10 for value in coordinator.fetch(firsts))


def test_delay_is_from_config_or_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert WorkerConfig("localhost:1").start_delay == (0.0, 0.0)
    monkeypatch.setenv(START_DELAY_ENV, "3")
    monkeypatch.setenv(START_DELAY_ENV + "_MAX", "soon")
    assert WorkerConfig("localhost:1").start_delay == (3.0, 0.0)
    assert WorkerConfig(
        "localhost:1", schedule_start_delay_s=0.5, schedule_start_delay_max_s=4
    ).start_delay == (0.5, 4)
    with pytest.raises(errors.InvalidArgumentError, match="schedule_start_delay_s is -1"):
        WorkerConfig("localhost:1", schedule_start_delay_s=-1)

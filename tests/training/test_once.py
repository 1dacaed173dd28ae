"""Functions that are scheduled with `once`: what is tried again counts once. With workers that die:
test_faults.py."""

from __future__ import annotations

from typing import Any

import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.shares_cluster  # servers in this process start threads as they need them

WITHIN_S = 30.0


def test_scheduled_functions_count_separately(
    strategy: zd.ParameterServerStrategy, coordinator: ClusterCoordinator
) -> None:
    with strategy.scope():
        iterations = zd.Variable(0)

    def step() -> None:
        iterations.assign_add(1)

    for _ in range(5):
        coordinator.schedule(step, once=True)
    coordinator.schedule(step)
    coordinator.join(WITHIN_S)
    assert iterations.numpy() == 6
    with pytest.raises(TypeError):
        coordinator.schedule(step, 5, once=True)  # type: ignore[arg-type]


def test_retried_once_function_counts_once(
    strategy: zd.ParameterServerStrategy, coordinator: ClusterCoordinator
) -> None:
    with strategy.scope():
        iterations, tries = zd.Variable(0), zd.Variable(0)

    def step(by: int) -> None:
        iterations.assign_add(by)
        if tries.numpy() == 0:
            tries.assign(1)
            raise ValueError("the first time")

    coordinator.schedule(step, kwargs={"by": 2}, once=True, retries=1)
    coordinator.join(WITHIN_S)
    assert iterations.numpy() == 2


def test_submit_follows_the_default_of_once(made: Any) -> None:
    strategy = made(aggregate="sync", workers_per_step=1)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        iterations, tries = zd.Variable(0), zd.Variable(0)

    def step(by: int) -> None:
        iterations.assign_add(by)
        if tries.numpy() == 0:
            tries.assign(1)
            raise ValueError("the first time")

    coordinator.options(retries=1).submit(step, by=2).result(WITHIN_S)
    coordinator.submit(step, 3).result(WITHIN_S)
    coordinator.gather(coordinator.map(step, [5, 7]), timeout=WITHIN_S)
    assert iterations.numpy() == 17

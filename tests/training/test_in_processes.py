"""What functions on workers do with variables and strategies, where workers and parameter servers
are processes.

The tests with `anywhere` and `cut_in` of other files run here once more: they share one cluster.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.training.test_batches import (
    test_apply_works_in_scheduled_functions,
)
from tests.training.test_caching import (
    test_scope_around_schedule_goes_along,
)
from tests.training.test_partitioned import (
    test_lookup_in_two_variables_moves_its_rows,
    test_lookup_moves_only_its_rows,
    test_part_initializer_runs_at_each_ps,
    test_scheduled_function_changes_the_original,
    test_whole_initializer_is_cut,
)
from tests.training.test_strategy import (
    test_additions_are_counted_once,
    test_methods_can_be_scheduled,
    test_run_outside_functions_warns,
    test_scheduled_function_changes_variables,
    test_scheduled_function_makes_no_variable,
    test_strategy_stub_runs_and_reduces,
)
from tests.training.test_training import (
    test_per_worker_variables_are_separate,
)
from tests.training.test_variables import (
    test_variables_work_in_scheduled_functions,
)
from zmqdist.coordinator import ClusterCoordinator

pytestmark = [
    pytest.mark.shares_cluster,
    pytest.mark.processes("parameter servers"),
    pytest.mark.processes("variables"),
]

__all__ = [
    "test_lookup_in_two_variables_moves_its_rows",
    "test_scheduled_function_changes_variables",
    "test_scheduled_function_changes_the_original",
    "test_scope_around_schedule_goes_along",
    "test_strategy_stub_runs_and_reduces",
    "test_scheduled_function_makes_no_variable",
    "test_additions_are_counted_once",
    "test_part_initializer_runs_at_each_ps",
    "test_whole_initializer_is_cut",
    "test_apply_works_in_scheduled_functions",
    "test_per_worker_variables_are_separate",
    "test_variables_work_in_scheduled_functions",
    "test_lookup_moves_only_its_rows",
    "test_methods_can_be_scheduled",
    "test_run_outside_functions_warns",
]


WITHIN_S = 60.0


@pytest.fixture(scope="module")
def anywhere_cluster(processes: zd.local_cluster) -> zd.local_cluster:
    return processes


def test_shard_info_initializer_runs_at_the_ps(made: Any, processes: zd.local_cluster) -> None:
    with made(zd.partitioners.FixedShardsPartitioner(2), cluster=processes).scope():
        pids = zd.Variable(
            lambda shard_info: np.full(shard_info.shape, os.getpid()), shape=(4,), dtype=np.int64
        )
    assert len({os.getpid(), *pids.numpy().tolist()}) == 3


def test_handles_of_a_process_are_one(made: Any, processes: zd.local_cluster) -> None:
    strategy = made(cluster=processes)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = zd.Variable(np.zeros(3), name="w", aggregation="mean")

    def step(given: Any) -> Any:
        given.assign_add(np.ones(3))
        return given is v, given.name, given.device, given.aggregation, type(given).__name__

    assert coordinator.schedule(step, (v,)).fetch() == (True, "w", v.device, "mean", "Variable")
    assert v.numpy().tolist() == [1.0, 1.0, 1.0]


def test_initializer_runs_at_the_ps(made: Any, processes: zd.local_cluster) -> None:
    strategy = made(cluster=processes)
    with strategy.scope():
        there = zd.Variable(lambda: np.full(2, os.getpid()), shape=(2,), dtype="i8")
        here = zd.Variable(lambda: np.full(2, os.getpid()))
    assert (here.numpy() == os.getpid()).all()
    assert (there.numpy() != os.getpid()).all()


def test_update_in_flight_fails_its_own_function(made: Any, processes: zd.local_cluster) -> None:
    """An update that the server refuses fails the function that made it, although the function has
    returned, and no function before or after it."""
    strategy = made(cluster=processes)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = zd.Variable(np.zeros(2))

    def refuse(value: Any, grad: Any, slots: Any, step: int) -> None:
        raise ValueError("refused")

    def step(number: int) -> str:
        if number == 3:
            v.apply(refuse, np.ones(2))
            return "has returned"
        v.assign_add(np.ones(2))
        return "done"

    steps = [coordinator.submit(step, number) for number in range(6)]
    errors = [type(value.exception(WITHIN_S)).__name__ for value in steps]
    assert errors == [*["NoneType"] * 3, "UnknownError", *["NoneType"] * 2]
    assert v.numpy().tolist() == [5.0, 5.0]


def test_update_in_flight_ends_before_the_next_action(
    made: Any, processes: zd.local_cluster
) -> None:
    """A function sees its own updates, and releases no lock before its last update is applied."""
    strategy = made(cluster=processes)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = zd.Variable(0)

    def increment() -> bool:
        with zd.Lock("increments"):
            before = int(v.numpy())
            v.assign(before + 1)
        v.assign_add(0)
        return bool(v.numpy() > before)

    values = [coordinator.submit(increment) for _ in range(20)]
    assert all(value.result(WITHIN_S) for value in values)
    assert v.numpy() == 20


def test_read_has_the_updates_of_earlier_functions_of_its_slot(
    made: Any, processes: zd.local_cluster
) -> None:
    """Else training with one worker would be as asynchronous as with several."""
    strategy = made(cluster=processes)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = zd.Variable(np.zeros(2))

    def slow(value: Any, grad: Any, slots: Any, step: int) -> Any:
        time.sleep(0.01)
        return value + grad

    def step() -> int:
        before = int(v.numpy()[-1])
        v.apply(slow, np.ones(2))
        return before

    steps = [coordinator.options(worker=0).submit(step) for _ in range(30)]
    assert [value.result(WITHIN_S) for value in steps] == list(range(30))


def test_update_is_made_while_its_function_runs(
    made: Any, processes: zd.local_cluster, tmp_path: Path
) -> None:
    """Others see an update soon, although its function goes on and others wait in its slot."""
    strategy = made(cluster=processes)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        begun, ended = zd.Variable(0), zd.Variable(0)
    seen = tmp_path / "seen"

    def step(number: int) -> bool:
        if number == 300:
            begun.assign_add(1)
            due = time.monotonic() + WITHIN_S
            while not seen.exists() and time.monotonic() < due:
                time.sleep(0.001)
            return seen.exists()
        ended.assign_add(1)
        return True

    steps = [coordinator.submit(step, number) for number in range(600)]
    due = time.monotonic() + WITHIN_S / 2
    while not begun.numpy() and time.monotonic() < due:
        pass
    assert begun.numpy() == 1
    seen.touch()
    assert all(value.result(2 * WITHIN_S) for value in steps)
    assert ended.numpy() == 599


def test_updates_in_flight_of_a_killed_slot_are_made_once(
    made: Any, processes: zd.local_cluster
) -> None:
    """The slot dies when it has begun the functions after an update, whose outcomes are lost."""
    strategy = made(cluster=processes)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        count, kills = zd.Variable(0), zd.Variable(0)

    def step(number: int) -> None:
        if number == 30:
            kills.assign_add(1)
            if kills.numpy() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        count.assign_add(1)

    steps = [coordinator.schedule(step, (number,), once=number != 30) for number in range(60)]
    coordinator.join(WITHIN_S)
    assert [value.exception() for value in steps] == [None] * 60
    assert count.numpy() == 60

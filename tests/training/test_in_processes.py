"""What functions on workers do with variables and strategies, where workers and parameter servers
are processes.

The tests with `anywhere` and `cut_in` of other files run here once more: they share one cluster.
"""

from __future__ import annotations

import os
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

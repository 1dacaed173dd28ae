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
    test_a_scope_around_schedule_goes_with_the_function,
)
from tests.training.test_partitioned import (
    test_a_lookup_in_two_variables_moves_rows_only_also_from_a_handle_that_was_sent,
    test_a_scheduled_function_uses_it_as_one_variable_and_changes_the_original,
    test_an_initializer_that_knows_parts_is_called_where_they_live_and_never_for_the_whole,
    test_an_initializer_that_makes_the_whole_is_cut,
    test_lookups_on_workers_move_the_rows_that_they_name_and_no_others,
)
from tests.training.test_strategy import (
    test_a_scheduled_function_changes_variables_and_returns_what_it_reads,
    test_a_strategy_arrives_on_a_worker_as_a_stub_that_runs_and_reduces,
    test_a_variable_cannot_be_made_in_a_scheduled_function,
    test_additions_of_many_scheduled_functions_are_all_counted_once,
    test_methods_of_objects_that_hold_everything_can_be_scheduled,
    test_run_and_reduce_outside_scheduled_functions_warn_each_time,
)
from tests.training.test_training import (
    test_each_worker_has_a_variable_of_its_own,
)
from tests.training.test_variables import (
    test_everything_works_in_scheduled_functions_too,
)
from zmqdist.coordinator import ClusterCoordinator

pytestmark = [
    pytest.mark.shares_cluster,
    pytest.mark.processes("parameter servers"),
    pytest.mark.processes("variables"),
]

__all__ = [
    "test_a_lookup_in_two_variables_moves_rows_only_also_from_a_handle_that_was_sent",
    "test_a_scheduled_function_changes_variables_and_returns_what_it_reads",
    "test_a_scheduled_function_uses_it_as_one_variable_and_changes_the_original",
    "test_a_scope_around_schedule_goes_with_the_function",
    "test_a_strategy_arrives_on_a_worker_as_a_stub_that_runs_and_reduces",
    "test_a_variable_cannot_be_made_in_a_scheduled_function",
    "test_additions_of_many_scheduled_functions_are_all_counted_once",
    "test_an_initializer_that_knows_parts_is_called_where_they_live_and_never_for_the_whole",
    "test_an_initializer_that_makes_the_whole_is_cut",
    "test_apply_works_in_scheduled_functions",
    "test_each_worker_has_a_variable_of_its_own",
    "test_everything_works_in_scheduled_functions_too",
    "test_lookups_on_workers_move_the_rows_that_they_name_and_no_others",
    "test_methods_of_objects_that_hold_everything_can_be_scheduled",
    "test_run_and_reduce_outside_scheduled_functions_warn_each_time",
]


@pytest.fixture(scope="module")
def anywhere_cluster(processes: zd.local_cluster) -> zd.local_cluster:
    return processes


def test_an_initializer_with_shard_info_is_called_where_the_shards_live(
    made: Any, processes: zd.local_cluster
) -> None:
    with made(zd.partitioners.FixedShardsPartitioner(2), cluster=processes).scope():
        pids = zd.Variable(
            lambda shard_info: np.full(shard_info.shape, os.getpid()), shape=(4,), dtype=np.int64
        )
    assert len({os.getpid(), *pids.numpy().tolist()}) == 3


def test_handles_arrive_in_another_process_as_one(made: Any, processes: zd.local_cluster) -> None:
    strategy = made(cluster=processes)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = zd.Variable(np.zeros(3), name="w", aggregation="mean")

    def step(given: Any) -> Any:
        given.assign_add(np.ones(3))
        return given is v, given.name, given.device, given.aggregation, type(given).__name__

    assert coordinator.schedule(step, (v,)).fetch() == (True, "w", v.device, "mean", "Variable")
    assert v.numpy().tolist() == [1.0, 1.0, 1.0]


def test_a_function_that_makes_the_value_runs_at_the_server_when_shape_and_dtype_are_given(
    made: Any, processes: zd.local_cluster
) -> None:
    strategy = made(cluster=processes)
    with strategy.scope():
        there = zd.Variable(lambda: np.full(2, os.getpid()), shape=(2,), dtype="i8")
        here = zd.Variable(lambda: np.full(2, os.getpid()))
    assert (here.numpy() == os.getpid()).all()
    assert (there.numpy() != os.getpid()).all()

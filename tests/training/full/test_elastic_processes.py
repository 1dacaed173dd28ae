"""Elastic clusters whose tasks are processes: what test_elastic.py shows with threads, once
more.
"""

from __future__ import annotations

import pytest

import zmqdist as zd
from tests.launch.helpers import eventually
from tests.training.test_elastic import (
    counter,
    is_back,
    missed,
    test_a_program_ends_the_servers_of_its_cluster,
    test_of_two_dead_workers_the_first_that_is_back_works_at_once,
    test_the_state_of_a_task_that_was_preempted_names_it_until_it_is_back,
    test_worker_addition_between_functions,
    test_worker_addition_midst_function,
    test_worker_restore_with_another_name,
    test_worker_restore_with_same_name,
)
from zmqdist.training.cluster_connection import connect

__all__ = [
    "counter",
    "test_worker_addition_between_functions",
    "test_worker_addition_midst_function",
    "test_worker_restore_with_same_name",
    "test_worker_restore_with_another_name",
    "test_a_program_ends_the_servers_of_its_cluster",
    "test_of_two_dead_workers_the_first_that_is_back_works_at_once",
    "test_the_state_of_a_task_that_was_preempted_names_it_until_it_is_back",
]


@pytest.fixture
def in_threads() -> bool:
    return False


def test_a_local_cluster_tells_of_its_tasks_in_the_same_way() -> None:
    with zd.local_cluster(workers=2, ps=2) as local:
        found = connect(local)
        is_back(found)
        local.kill_ps(1)
        local.kill_worker(0)
        eventually(lambda: missed(found) == [0, 3], "the losses are seen")
        local.restart_ps(1)
        local.restart_worker(0)
        is_back(found)
        assert found.add_worker() == 2
        eventually(lambda: found.task_states() == [None] * 5, "the third one is there, too")
        found.close()

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
    test_first_returning_worker_works_at_once,
    test_program_stops_the_servers,
    test_state_of_preempted_task,
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
    "test_program_stops_the_servers",
    "test_first_returning_worker_works_at_once",
    "test_state_of_preempted_task",
]


@pytest.fixture
def in_threads() -> bool:
    return False


def test_local_cluster_reports_task_states() -> None:
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

"""Who is chief, who counts, who leads: the rules for the names of jobs."""

from __future__ import annotations

from typing import Any

import pytest

from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.job_roles import (
    collective_leader,
    coordination_leader,
    id_in_cluster,
    is_chief,
    validate_cluster_spec,
    worker_count,
)

CHIEF = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1", "p:2"], "evaluator": ["e:1"]}
WORKERS = {"worker": ["w:1", "w:2", "w:3"]}
SPARSE = {"worker": {2: "w:1", 7: "w:2"}}


@pytest.mark.parametrize(
    "form", [dict, ClusterSpec, lambda jobs: ClusterSpec(jobs).as_cluster_def()]
)
def test_cluster_as_dict_spec_or_def(form: Any) -> None:
    validate_cluster_spec(form(CHIEF), "ps", 1)
    assert coordination_leader(form(CHIEF)) == ("ps", 0)


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id"),
    [
        (CHIEF, None, None),
        (CHIEF, "worker", 1),
        (CHIEF, "worker", None),
        (WORKERS, "evaluator", 3),
        (SPARSE, "worker", 7),
        ({**WORKERS, "dispatcher": ["d:1"]}, "dispatcher", 0),
        ({}, None, None),
    ],
)
def test_task_of_allowed_cluster_is_accepted(
    cluster: Any, task_type: str | None, task_id: int | None
) -> None:
    validate_cluster_spec(cluster, task_type, task_id)


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "expected"),
    [
        (
            {"master": ["m:1"]},
            None,
            None,
            "there is no job 'master' in a cluster that trains; allowed are chief, worker,",
        ),
        (
            {"chief": ["a:1", "b:1"]},
            None,
            None,
            "the cluster has 2 tasks of job 'chief', at most 1 is allowed",
        ),
        (
            {"evaluator": ["a:1", "b:1"]},
            None,
            None,
            "the cluster has 2 tasks of job 'evaluator', at most 1",
        ),
        (CHIEF, "master", 0, "there is no task type 'master'; allowed are"),
        (WORKERS, "ps", 0, "task type 'ps' is not a job of the cluster; it has worker"),
        (WORKERS, "worker", 3, "job 'worker' has no task 3; it has 0 to 2"),
        (WORKERS, "worker", -1, "job 'worker' has no task -1; it has 0 to 2"),
        (SPARSE, "worker", 0, "job 'worker' has no task 0; it has 2, 7"),
        ({"worker": []}, "worker", 0, "job 'worker' has no task 0; it has none"),
        (CHIEF, "evaluator", 1, "job 'evaluator' has no task 1; it has 0"),
    ],
)
def test_cluster_rules_raise_value_error(
    cluster: Any, task_type: str | None, task_id: int | None, expected: str
) -> None:
    for ask in (validate_cluster_spec, is_chief, collective_leader):
        with pytest.raises(ValueError) as caught:
            ask(cluster, task_type, task_id)
        assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("cluster", "task", "chief"),
    [
        (CHIEF, ("chief", 0), True),
        (CHIEF, ("worker", 0), False),
        (CHIEF, ("ps", 0), False),
        (CHIEF, ("evaluator", 0), True),
        (WORKERS, ("worker", 0), True),
        (WORKERS, ("worker", 1), False),
        (WORKERS, ("evaluator", 0), True),
        ({"chief": [], **WORKERS}, ("worker", 0), True),
        (SPARSE, ("worker", 2), True),
        (SPARSE, ("worker", 7), False),
        (WORKERS, (None, None), False),
        ({}, (None, None), True),
    ],
)
def test_chief_is_chief_evaluator_or_first_worker(cluster: Any, task: Any, chief: bool) -> None:
    assert is_chief(cluster, *task) is chief


def test_chief_and_workers_are_counted_and_the_evaluator_apart() -> None:
    assert [worker_count(CHIEF, job) for job in ("chief", "worker", "evaluator")] == [3, 3, 1]
    assert [worker_count(WORKERS, job) for job in ("worker", "evaluator")] == [3, 0]
    with pytest.raises(ValueError, match="a ps does not train, so it has no worker count"):
        worker_count(CHIEF, "ps")


def test_ids_begin_with_the_chief_and_follow_with_the_workers() -> None:
    assert [
        id_in_cluster(CHIEF, *task) for task in (("chief", 0), ("worker", 0), ("worker", 1))
    ] == [0, 1, 2]
    assert [id_in_cluster(WORKERS, "worker", index) for index in range(3)] == [0, 1, 2]
    assert [id_in_cluster(SPARSE, "worker", index) for index in (2, 7)] == [0, 1]
    assert id_in_cluster(CHIEF, "evaluator", 0) == 0
    with pytest.raises(ValueError, match="a ps has no rank among the workers"):
        id_in_cluster(CHIEF, "ps", 0)


@pytest.mark.parametrize(
    ("cluster", "task", "leader"),
    [
        (CHIEF, ("worker", 1), ("chief", 0)),
        (CHIEF, ("evaluator", 0), None),
        (WORKERS, ("worker", 2), ("worker", 0)),
        (SPARSE, ("worker", 7), ("worker", 2)),
        ({"ps": ["p:1"]}, ("ps", 0), None),
        ({}, (None, None), None),
    ],
)
def test_collective_leader_is_chief_or_worker(cluster: Any, task: Any, leader: Any) -> None:
    assert collective_leader(cluster, *task) == leader


@pytest.mark.parametrize(
    ("cluster", "leader"),
    [
        (CHIEF, ("ps", 0)),
        ({"chief": ["c:1"], **WORKERS}, ("chief", 0)),
        (WORKERS, ("worker", 0)),
        (SPARSE, ("worker", 2)),
        ({"ps": [], **WORKERS}, ("worker", 0)),
        ({"b": ["b:1"], "a": ["a:1"], "0": []}, ("a", 0)),
        ({"dispatcher": ["d:1"], "local": ["l:1"]}, ("local", 0)),
        ({"dispatcher": ["d:1"]}, None),
        ({}, None),
    ],
)
def test_coordination_leader_is_ps_chief_or_worker(cluster: Any, leader: Any) -> None:
    assert coordination_leader(cluster) == leader

"""S-1: which clusters can have a strategy with parameter servers. Nobody is contacted."""

from __future__ import annotations

from typing import Any

import pytest

import zmqdist as zd
from zmqdist.training.checks import check_cluster
from zmqdist.training.cluster_connection import connect

CHIEF, WORKER, PS = ["c:1"], ["w:1", "w:2"], ["p:1", "p:2"]
USUAL = {"chief": CHIEF, "worker": WORKER, "ps": PS}

REFUSED: dict[str, tuple[dict[str, Any], str | None, int | None, str]] = {
    "testEmptyCluster": ({}, None, None, "Cluster spec must be non-empty"),
    "testArbitraryJobName": (
        {**USUAL, "some_arbitrary_name": ["x:1"]},
        "chief",
        0,
        "Disallowed task type found in cluster spec: 'some_arbitrary_name'",
    ),
    "testArbitraryCurrentTaskType": (
        USUAL,
        "foobar",
        0,
        "Unrecognized task_type: foobar, valid task types are",
    ),
    "testOwnTypeMissing": (
        {"worker": WORKER, "ps": PS},
        "chief",
        0,
        "`task_type` 'chief' not found in cluster_spec",
    ),
    "testMoreThanOneChief": (
        {**USUAL, "chief": ["c:1", "c:2"]},
        "chief",
        1,
        "There must be at most one 'chief' job.",
    ),
    "testMoreThanOneEvaluator": (
        {**USUAL, "evaluator": ["e:1", "e:2"]},
        None,
        None,
        "There must be at most one 'evaluator' job.",
    ),
    "testTaskIdTooLarge": (USUAL, "worker", 2, "The `task_id` 2 exceeds the maximum id of worker"),
    "testLessThanOneWorker": (
        {"chief": CHIEF, "ps": PS},
        "chief",
        0,
        "There must be at least one worker.",
    ),
    "testLessThanOnePs": (
        {"chief": CHIEF, "worker": WORKER},
        "chief",
        0,
        "There must be at least one ps.",
    ),
    "testNoTaskOfPs": ({**USUAL, "ps": {}}, None, None, "There must be at least one ps."),
    "testGapAmongPs": (
        {**USUAL, "ps": {0: "p:1", 2: "p:2"}},
        None,
        None,
        "The ps must have the numbers 0 to 1",
    ),
}


@pytest.mark.parametrize(
    ("jobs", "task_type", "task_id", "message"), REFUSED.values(), ids=REFUSED.keys()
)
def test_bad_cluster_is_refused(
    jobs: dict[str, Any], task_type: str | None, task_id: int | None, message: str
) -> None:
    resolver = zd.resolvers.SimpleClusterResolver(
        zd.ClusterSpec(jobs), task_type=task_type, task_id=task_id
    )
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        connect(resolver)


@pytest.mark.parametrize(
    ("jobs", "task_type", "task_id"),
    [
        (USUAL, "chief", 0),
        (USUAL, None, None),
        (USUAL, "", None),
        (USUAL, "evaluator", 0),
        ({**USUAL, "evaluator": ["e:1"]}, "chief", 0),
        ({"worker": {3: "w:3"}, "ps": PS}, "worker", 3),
    ],
)
def test_good_cluster_is_accepted(
    jobs: dict[str, Any], task_type: str | None, task_id: int | None
) -> None:
    check_cluster(zd.ClusterSpec(jobs), task_type, task_id)


@pytest.mark.parametrize("source", [7, "127.0.0.1:5050", ["w:1"]])
def test_bad_source_is_refused(source: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"no cluster with parameter servers: .* wanted a cluster resolver, a ClusterSpec",
    ):
        connect(source)


def test_empty_environment_has_no_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ZMQDIST_CONFIG", raising=False)
    with pytest.raises(
        ValueError, match="no cluster was passed, and ZMQDIST_CONFIG names no running cluster"
    ):
        connect()


def test_local_cluster_without_ps_is_refused() -> None:
    message = r"There must be at least one ps\. This local_cluster has none"
    with (
        zd.local_cluster(workers=1, processes=False) as cluster,
        pytest.raises(ValueError, match=message),
    ):
        connect(cluster)

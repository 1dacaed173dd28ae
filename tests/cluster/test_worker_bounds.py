"""`min`, `max` and `idle_s` of the worker job: which of them fit together, and with what."""

from __future__ import annotations

import re
from typing import Any

import pytest

from zmqdist.cluster import ClusterConfig
from zmqdist.errors import ConfigError


def config(worker: dict[str, Any], **rest: Any) -> ClusterConfig:
    return ClusterConfig.from_dict(
        {"name": "c", "jobs": {"worker": worker}, "program": "python x.py", **rest}
    )


def test_bounds_are_taken_and_the_most_of_them_counts_for_cores() -> None:
    worker = config({"count": 2, "min": 1, "max": 8, "idle_s": 5}).jobs.worker
    assert worker is not None
    assert (worker.min, worker.max, worker.idle_s, worker.most()) == (1, 8, 5.0, 8)


def test_count_is_the_most_without_bounds() -> None:
    worker = config({"count": 2}).jobs.worker
    assert worker is not None
    assert worker.most() == 2


@pytest.mark.parametrize(
    ("worker", "rest", "text"),
    [
        ({"count": 2, "min": 1}, {}, "jobs.worker.min: is given without max"),
        ({"count": 2, "max": 3}, {}, "jobs.worker.max: is given without min"),
        ({"count": 2, "idle_s": 5}, {}, "jobs.worker.idle_s: is given without min and max"),
        ({"count": 3, "min": 4, "max": 2}, {}, "jobs.worker.min: is 4, and max is 2"),
        ({"count": 9, "min": 1, "max": 8}, {}, "jobs.worker.count: is 9, and min is 1 and max 8"),
        ({"count": 1, "min": 0, "max": 8}, {}, "jobs.worker.min: expected a whole number, 1 to"),
        ({"tasks": ["a:1"], "min": 1, "max": 2}, {}, "jobs.worker.tasks: lists the workers"),
        (
            {"count": 1, "min": 1, "max": 2},
            {"launcher": "ray"},
            "jobs.worker.max: has no effect with Ray",
        ),
        (
            {"count": 1, "min": 1, "max": 3},
            {"launcher": "ssh", "ssh": {"hosts": [{"host": "a", "slots": 2}]}},
            "ssh.hosts: the jobs have 3 workers and ps, and the hosts have 2 slots",
        ),
    ],
)
def test_contradicting_bounds_are_refused(
    worker: dict[str, Any], rest: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        config(worker, **rest)

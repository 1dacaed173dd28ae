"""`resources`, `memory_max_gb` and `nested_slots_max` of the worker job in a cluster file."""

from __future__ import annotations

import re
from typing import Any

import pytest

from zmqdist.cluster import ClusterConfig
from zmqdist.errors import ConfigError


def config(worker: dict[str, Any]) -> ClusterConfig:
    return ClusterConfig.from_dict(
        {"name": "c", "jobs": {"worker": {"count": 1, **worker}}, "program": "python x.py"}
    )


def test_resources_of_file_are_taken() -> None:
    worker = config(
        {"resources": {"gpu": "auto", "licence": 0.5}, "memory_max_gb": 4, "nested_slots_max": 0}
    ).jobs.worker
    assert worker is not None
    assert worker.nested_slots_max == 0
    assert worker.resources == {"gpu": "auto", "licence": 0.5}
    assert worker.memory_max_gb == 4


@pytest.mark.parametrize(
    ("worker", "text"),
    [
        ({"resources": {"licence": "auto"}}, "jobs.worker.resources.licence: is auto"),
        ({"resources": {"gpu": 0.5}}, "jobs.worker.resources.gpu: is 0.5"),
        ({"resources": {"gpu": -1}}, "jobs.worker.resources"),
        ({"resources": {"gpu": "all"}}, "jobs.worker.resources"),
        ({"resources": ["gpu"]}, "jobs.worker.resources[0]: expected a mapping"),
        (
            {"nested_slots_max": 5000},
            "jobs.worker.nested_slots_max: expected a whole number, 0 to 4096",
        ),
        ({"memory_max_gb": 0}, "jobs.worker.memory_max_gb: expected a number above 0"),
    ],
)
def test_mistake_in_resources_is_named(worker: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        config(worker)

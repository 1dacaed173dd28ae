"""The keys of a cluster file about addresses: what they may say, and what is told to the others."""

from __future__ import annotations

from typing import Any

import pytest

from zmqdist.cluster import ClusterConfig, ServingJob
from zmqdist.errors import ConfigError


def cluster(**keys: Any) -> dict[str, Any]:
    return {"name": "test", "jobs": {"worker": {"count": 1}}, "program": "python train.py", **keys}


@pytest.mark.parametrize(
    ("keys", "mistake"),
    [
        ({"ports": "5000"}, "ports: '5000' is not a range of ports: write it as 5000-5100"),
        (
            {"ports": "5100-5000"},
            "ports: '5100-5000' is not a range of ports: from 1 to 65535, the lower one first",
        ),
        (
            {"jobs": {"worker": {"count": 2, "advertise": "gw:5051"}}},
            "jobs.worker.advertise: names one port for 2 tasks (write the host alone)",
        ),
        (
            {"jobs": {"worker": {"count": 1, "advertise": "a b"}}},
            "jobs.worker.advertise: bad address 'a b': 'a b' is not a host name",
        ),
        (
            {"jobs": {"dispatcher": {"advertise": "0.0.0.0"}}},
            "jobs.dispatcher.advertise: bad address '0.0.0.0': no process can connect to it",
        ),
    ],
)
def test_mistake_names_its_key(keys: dict[str, Any], mistake: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig.from_dict(cluster(**keys))
    assert str(caught.value) == f"(dict):1: {mistake}"


def test_address_keys_are_read() -> None:
    jobs = {
        "dispatcher": {"address": "eth1:5050", "advertise": "gateway.example:6050"},
        "worker": {"count": 2, "host": "eth1", "advertise": "gateway.example"},
        "ps": {"tasks": ["gateway.example:6051"], "host": "eth1"},
    }
    config = ClusterConfig.from_dict(cluster(jobs=jobs, ports="5000-5100"))
    assert config.jobs.worker is not None
    assert config.jobs.worker.advertised_at(1) == "gateway.example:%port%"
    assert config.jobs.ps is not None
    assert config.jobs.ps.advertised_at(0) == "gateway.example:6051"


def test_task_advertises_bound_address_by_default() -> None:
    assert ServingJob(count=1).advertised_at(0) is None
    assert ServingJob(tasks=["127.0.0.1:5051"]).advertised_at(0) is None

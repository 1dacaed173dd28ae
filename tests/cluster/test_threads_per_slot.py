"""How many threads a slot has: what the cluster file and the environment may say."""

from __future__ import annotations

import re
from typing import Any

import pytest

from zmqdist import blas_threads
from zmqdist.cluster import ClusterConfig
from zmqdist.errors import ConfigError, InvalidArgumentError
from zmqdist.scheduling.shared.config import WorkerConfig


def test_threads_given_twice_are_refused() -> None:
    worker = {"count": 2, "threads_per_slot": 1, "env": {"MKL_NUM_THREADS": "2"}}
    with pytest.raises(
        ConfigError, match=re.escape("MKL_NUM_THREADS: is given together with threads_per_slot")
    ):
        ClusterConfig.from_dict(
            {"name": "test", "jobs": {"worker": worker}, "program": "python program.py"}
        )


def test_less_than_one_thread_is_refused() -> None:
    with pytest.raises(
        InvalidArgumentError, match="threads_per_slot is 0, wants 1 or more, or None"
    ):
        WorkerConfig("127.0.0.1:1", threads_per_slot=0)


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, 0),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "2"}, 0),
        ({"OMP_NUM_THREADS": "2,1"}, 0),
    ],
)
def test_status_shows_threads_if_variables_agree(environment: dict[str, Any], threads: int) -> None:
    assert blas_threads.threads_in(environment) == threads


def test_user_variable_disables_all() -> None:
    assert blas_threads.thread_variables(None, 1, {"MKL_NUM_THREADS": "7"}) == {}
    assert blas_threads.thread_variables(3, 1, {"MKL_NUM_THREADS": "7"}) == dict.fromkeys(
        blas_threads.VARIABLES, "3"
    )


def test_more_slots_than_cores_have_a_thread_each() -> None:
    assert set(blas_threads.thread_variables(None, 10_000, {}).values()) == {"1"}
    assert set(blas_threads.thread_variables(None, 1, {}).values()) == {str(blas_threads.cores())}

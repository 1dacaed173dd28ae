"""`memory_max_gb`: a function that takes too much memory ends with an error before the kernel ends a
process, and shared arrays do not count."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.errors import InvalidArgumentError, ResourceExhaustedError
from zmqdist.scheduling.shared.config import WorkerConfig
from zmqdist.transport.memory_limits import private_bytes

pytestmark = pytest.mark.shares_cluster

LARGE_BYTES = 400_000_000


def fill() -> None:
    """Take memory until this process is ended."""
    blocks = []
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if len(blocks) * 10**7 < LARGE_BYTES:
            blocks.append(b"x" * 10**7)
        else:
            time.sleep(0.01)


def wait_and_sum(array: NDArray[np.uint8]) -> int:
    total = int(array.sum())
    time.sleep(0.3)
    return total


@pytest.fixture(scope="module")
def bounded() -> Iterator[ClusterCoordinator]:
    with (
        zd.local_cluster(workers=1, memory_max_gb=0.25) as cluster,
        cluster.coordinator() as coordinator,
    ):
        yield coordinator


def test_function_that_takes_too_much_memory_fails(bounded: ClusterCoordinator) -> None:
    value = bounded.options(name="greedy").submit(fill)
    with pytest.raises(
        ResourceExhaustedError, match=r"greedy: its slot used 0\.\d+ GB .* memory_max_gb=0\.25"
    ):
        value.result(30)
    assert bounded.submit(abs, -1).result() == 1


def test_retries_of_greedy_function_are_those_of_errors(bounded: ClusterCoordinator) -> None:
    value = bounded.options(retries=1).submit(fill)
    assert isinstance(value.exception(30), ResourceExhaustedError)


def test_mapped_array_does_not_count(bounded: ClusterCoordinator) -> None:
    array = np.ones(LARGE_BYTES, np.uint8)
    assert bounded.submit(wait_and_sum, array).result() == LARGE_BYTES


def test_private_bytes_are_those_of_process() -> None:
    before = private_bytes(os.getpid())
    block = np.ones(10**8, np.uint8)
    assert 0.9e8 < private_bytes(os.getpid()) - before < 1.2e8
    assert block.all()
    assert private_bytes(2**22 + 1) == 0


def test_bound_needs_slots_that_are_processes() -> None:
    with pytest.raises(InvalidArgumentError, match="memory_max_gb is 1, wants more than 0 GB"):
        WorkerConfig("localhost:1", memory_max_gb=1)

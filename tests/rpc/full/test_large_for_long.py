"""Large arrays for as long and as large as it takes: many random exchanges, and an array of
gigabytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.rpc.helpers import change_everything_after_each_call
from zmqdist.rpc import ZmqClient, ZmqServer

Serve = Callable[..., ZmqServer]
Connect = Callable[..., ZmqClient]


@pytest.mark.parametrize("seed", range(2, 12))
def test_later_writes_stay_in_their_process(remote: ZmqClient, seed: int) -> None:
    change_everything_after_each_call(remote, seed)


def free_bytes() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


@pytest.mark.timeout(300)
def test_array_of_three_gib_passes(serve: Serve, connect: Connect, route: str) -> None:
    if free_bytes() < 8 * 2**30:
        pytest.skip("needs 8 GiB of free memory")
    step = 2**20
    # pages that nobody writes to cost nothing on this side
    array = np.zeros(3 * 2**30 + 5, np.uint8)
    array[::step] = np.arange(len(array[::step])) % 251
    array[-1] = 7

    def checksum(array: Any) -> Any:
        return [array.nbytes, array[::step].tolist(), int(array[-1]), int(np.count_nonzero(array))]

    wanted = checksum(array)
    assert (
        connect(serve(checksum=checksum).address, timeout_in_ms=250_000).checksum_blocking(array)
        == wanted
    )

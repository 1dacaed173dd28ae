"""What the tests of lineage schedule, and how they replace a worker; workers import this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import zmqdist as zd
from tests.scheduling.work import until


def made(folder: Path, name: str, *of: Any) -> np.ndarray[Any, Any]:
    """Notes each call."""
    with (folder / name).open("ab") as file:
        file.write(b".")
    return np.full(2**17, 1 + sum(int(value[0]) for value in of))


def calls(folder: Path, name: str) -> int:
    return (folder / name).stat().st_size


def replace(cluster: zd.local_cluster, index: int = 0) -> None:
    """Kill a worker and start another. What the dispatcher has not been told to be taken would run
    again by itself."""

    def is_settled() -> bool:
        rows = cluster.dispatcher.snapshot().coordinators
        return all(row.submitted - row.finished == row.queued + row.out for row in rows)

    until(is_settled)
    cluster.kill_worker(index)
    cluster.add_worker()

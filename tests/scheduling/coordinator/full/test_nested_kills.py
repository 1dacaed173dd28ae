"""Functions that schedule functions, while the dispatcher's process is killed and started again at
its port."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.scheduling.coordinator.full.test_nested_waits import running
from tests.scheduling.dispatcher_kills import StartDispatcher, StartWorker
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(180)

LEASE_S = 6.0  # a dispatcher's start takes seconds beside load


def marked(folder: str, outer: int, inner: int) -> int:
    """Leave a file that says which outer run this belongs to, for as long as this runs."""
    mark = Path(folder, f"{outer}.{inner}.{os.getpid()}")
    mark.touch()
    try:
        time.sleep(0.02)
    finally:
        mark.unlink()
    return 10 * outer + inner


def outer_sum(folder: str, outer: int) -> int:
    inner = ClusterCoordinator()
    values = [inner.submit(marked, folder, outer, number) for number in range(10)]
    return sum(inner.gather(values))


def marks(folder: Path, outer: int) -> list[str]:
    """Return the marks of work below an outer function whose processes live."""
    return [mark.name for mark in folder.glob(f"{outer}.*") if running(int(mark.suffix[1:]))]


def test_killed_dispatcher_costs_no_value_of_nested_work(
    port: int, start_worker: StartWorker, start_dispatcher: StartDispatcher, tmp_path: Path
) -> None:
    """Each value is right, or its error is that of a lost cluster; and what is below a function
    has ended before its value is there."""
    config = {"port": port, "lease_s": LEASE_S}
    address = f"127.0.0.1:{port}"
    for index in range(2):
        start_worker(address, index=index, slots=2)
    dispatcher = start_dispatcher(**config)
    late: list[str] = []
    with ClusterCoordinator(address, cluster_lost_limit_s=90.0) as coordinator:
        coordinator.submit(int).result(40)
        values = [coordinator.submit(outer_sum, str(tmp_path), outer) for outer in range(40)]
        for outer, value in enumerate(values):
            value.add_done_callback(
                lambda _, outer=outer: late.extend(marks(tmp_path, outer))  # type: ignore[misc]
            )
        for share in (4, 12):
            until(lambda share=share: sum(value.done() for value in values) >= share, 60)  # type: ignore[misc]
            os.kill(dispatcher.pid, signal.SIGKILL)
            dispatcher.wait()
            dispatcher = start_dispatcher(**config)
        for outer, value in enumerate(values):
            error = value.exception(120)
            if error is None:
                assert value.result() == 100 * outer + 45
            else:
                assert isinstance(error, errors.UnavailableError), error
        assert sum(value.exception() is None for value in values) >= 35
        coordinator.join(30)
        assert not any(marks(tmp_path, outer) for outer in range(40))
    assert late == []

"""Resources of functions as a program sees them, on workers that are threads; and functions that
run where their inputs are."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

import zmqdist as zd
from tests.scheduling.work import until
from zmqdist.coordinator import ClusterCoordinator, get_current_worker_index
from zmqdist.data.service import WorkerConfig
from zmqdist.errors import UnavailableError

peak_lock = threading.Lock()
running = peak = 0
gate = threading.Event()


def counted() -> None:
    """Count how many calls run at a time in this process."""
    global running, peak
    with peak_lock:
        running += 1
        peak = max(peak, running)
    time.sleep(0.01)
    with peak_lock:
        running -= 1


def wait_at_gate() -> None:
    gate.wait(30)


def index_and_sum(array: NDArray[np.uint8]) -> tuple[int, int]:
    return get_current_worker_index(), int(array.sum())


@pytest.fixture
def licensed() -> Iterator[ClusterCoordinator]:
    """A cluster of threads with four slots and two licences."""
    global peak
    peak = 0
    gate.clear()
    with (
        zd.local_cluster(
            workers=1, slots=4, processes=False, resources={"licence": 2}, growth_limit_s=0.0
        ) as cluster,
        cluster.coordinator() as coordinator,
    ):
        yield coordinator
        gate.set()


def test_functions_never_exceed_resources(licensed: ClusterCoordinator) -> None:
    one = licensed.options(resources={"licence": 1})
    licensed.gather([one.submit(counted) for _ in range(30)])
    assert peak == 2
    licensed.gather([licensed.schedule(counted, resources={"licence": 0.5}) for _ in range(30)])
    assert peak == 4


def test_functions_without_resources_run_beside(licensed: ClusterCoordinator) -> None:
    held = [licensed.options(resources={"licence": 2}).submit(wait_at_gate) for _ in range(3)]
    assert licensed.submit(abs, -1).result() == 1
    assert not any(value.done() for value in held)
    gate.set()
    licensed.join()


def test_cancelled_function_gives_its_resources_back(licensed: ClusterCoordinator) -> None:
    both = licensed.options(resources={"licence": 2})
    first, second = both.submit(wait_at_gate), both.submit(abs, -2)
    second.cancel()
    third = both.submit(abs, -3)
    gate.set()
    assert third.result() == 3
    first.result()


def test_too_large_request_fails_at_once_in_old_cluster(licensed: ClusterCoordinator) -> None:
    value = licensed.options(name="greedy", resources={"gpu": 1, "licence": 3}).submit(abs, 1)
    with pytest.raises(UnavailableError) as caught:
        value.result()
    assert (
        "greedy: it needs gpu 1, licence 3, which is more than a worker has in all (worker:0 has "
        "licence 2): ask for less" in str(caught.value)
    )


def test_too_large_request_is_logged_and_waits_for_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        zd.local_cluster(workers=1, processes=False) as cluster,
        cluster.coordinator() as coordinator,
        caplog.at_level(logging.WARNING),
    ):
        value = coordinator.options(name="patient", resources={"licence": 1}).submit(abs, -4)
        until(lambda: "patient waits: it needs licence 1" in caplog.text)
        (row,) = cluster.status()["demands"]
        assert (row["request"], row["waiting"]) == ("licence 1", 1)
        assert row["why"] == "no worker has so much"
        config = WorkerConfig(
            cluster.target, resources={"licence": 1}, token_file=cluster.credentials.token_file
        )
        with zd.WorkerServer(config):
            assert value.result() == 4


def test_executor_and_options_refuse_bad_amounts(licensed: ClusterCoordinator) -> None:
    with pytest.raises(ValueError, match=r"gpu is 1\.5, wants whole devices"):
        licensed.options(resources={"gpu": 1.5})
    with pytest.raises(TypeError, match="resources is 'gpu', wants a mapping"):
        licensed.schedule(abs, (1,), resources="gpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no use for the option resources"):
        licensed.options(resources={"licence": 1}).run(abs, 1)


def test_functions_run_on_host_of_large_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        zd.DispatchServer() as dispatcher,
        zd.WorkerServer(WorkerConfig(dispatcher.address, index=0)),
    ):
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        with (
            zd.WorkerServer(WorkerConfig(dispatcher.address, index=1)),
            ClusterCoordinator(dispatcher) as coordinator,
        ):
            until(lambda: len(coordinator.workers()) == 2)
            keep = coordinator.options(worker=1, keep=True)
            array = keep.submit(np.ones, 10**9 // 20, np.uint8)  # 50 ms away
            for _ in range(20):
                value = coordinator.submit(index_and_sum, array)
                assert value.result() == (1, 10**9 // 20)
            small = keep.submit(np.ones, 10**5, np.uint8)
            until(lambda: coordinator.submit(index_and_sum, small).result()[0] == 0)

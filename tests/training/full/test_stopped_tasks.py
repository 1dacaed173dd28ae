"""Tasks that are stopped, as a machine that swaps is, and go on later."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

import zmqdist as zd
from tests.launch.helpers import stop
from tests.training.helpers import PAUSE_S, WITHIN_S, Program
from zmqdist import errors
from zmqdist.scheduling.shared.config import WorkerConfig

pytestmark = pytest.mark.shares_cluster


@pytest.fixture
def two(clusters: Callable[..., zd.local_cluster]) -> Iterator[Program]:
    """With a short lease: what a stopped worker has runs elsewhere when it is over."""
    program = Program(clusters(2, lease_s=1.0))
    yield program
    program.strategy.close()


def test_stopped_worker_changes_nothing_later(two: Program) -> None:
    """F-4, F-9: its slot goes on, and its outcome comes when the step was run elsewhere."""
    for _ in range(4):
        two.coordinator.schedule(two.waiting(), once=True)
    two.begun(2)
    stopped = two.pid("worker:0")
    stop(stopped)
    try:
        two.go.assign(1)
        two.coordinator.join(WITHIN_S)
        assert two.iterations.numpy() == 4
    finally:
        os.kill(stopped, signal.SIGCONT)
    two.works()
    assert two.iterations.numpy() == 7


def test_late_outcome_of_lost_worker_is_dropped(two: Program) -> None:
    begun, go = two.iterations, two.go

    def pid() -> int:
        begun.assign_add(1)
        while go.numpy() == 0:
            threading.Event().wait(PAUSE_S)
        return os.getpid()

    value = two.coordinator.schedule(pid, worker=0)
    two.begun(1)
    stopped = two.pid("worker:0")
    stop(stopped)
    try:
        two.go.assign(1)
        address, secret = two.cluster.dispatcher.address, two.cluster.credentials.token_file
        with zd.WorkerServer(WorkerConfig(address, index=0, processes=False, token_file=secret)):
            assert value.fetch(WITHIN_S) == os.getpid()
            os.kill(stopped, signal.SIGCONT)
            two.coordinator.join(WITHIN_S)
            two.works()
            assert value.fetch() == os.getpid()
    finally:
        os.kill(stopped, signal.SIGCONT)
    two.cluster.kill_worker(0)


def test_stopped_ps_is_missed(two: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    two.coordinator.schedule(two.waiting(False))
    two.begun(1)
    stopped = two.pid("ps:1")
    stop(stopped)
    try:
        with monkeypatch.context() as hasty:
            hasty.setattr("zmqdist.variables.client.PS_PATIENCE_S", 0.2)
            with pytest.raises(errors.PSUnavailableError, match=r"ps:1 .*no reply from"):
                two.coordinator.join(WITHIN_S)
        two.works()
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert two.go.numpy() == 0

"""What only slots that are processes can show of rounds, inputs, options and kept values: they are
cut off, killed, and share no object."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import KEPT_BYTES, kept_value, sum_of
from tests.scheduling.coordinator.test_inputs import fails
from tests.scheduling.coordinator.test_rounds import (
    First,
    each_raising_call,
    fails_at_go,
    is_usable,
)
from tests.scheduling.work import begun, go, until, waits, writes, written
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.limits import ATTEMPTS_MAX


@each_raising_call
def test_raised_error_follows_end_of_all_running_work(
    in_processes: ClusterCoordinator, tmp_path: Path, call: Callable[[ClusterCoordinator], Any]
) -> None:
    bad = in_processes.schedule(fails_at_go, (tmp_path, First))
    long = in_processes.schedule(writes, (tmp_path, "long"))
    until(lambda: begun(tmp_path, "First") and begun(tmp_path, "long"))
    queued = [in_processes.schedule(writes, (tmp_path, f"queued{i}")) for i in range(5)]
    go(tmp_path)
    until(bad.done)
    with pytest.raises(First):
        call(in_processes)
    before = written(tmp_path)
    for value in (long, *queued):
        with pytest.raises(errors.CancelledError, match=r"cancelled.*schedule it again"):
            value.fetch(0)
    in_processes.join(20)
    in_processes.fetch([in_processes.schedule(time.sleep, (0.03,)) for _ in range(4)])
    assert written(tmp_path) == before > 0
    assert is_usable(in_processes)


def test_ended_round_cancels_work_waiting_for_input(
    in_processes: ClusterCoordinator, tmp_path: Path
) -> None:
    first = in_processes.schedule(waits, (tmp_path,))
    second = in_processes.schedule(len, (first,))
    until(lambda: begun(tmp_path))
    in_processes.schedule(fails)
    with pytest.raises(KeyError):
        in_processes.join(20)
    for value in (first, second):
        with pytest.raises(errors.CancelledError):
            value.fetch(0)
    go(tmp_path)
    assert in_processes.schedule(len, ("x",)).fetch(20) == 1


def test_slot_deaths_do_not_count_as_retries(
    in_processes: ClusterCoordinator, tmp_path: Path
) -> None:
    value = in_processes.schedule(lambda: os.kill(os.getpid(), signal.SIGKILL), retries=5)
    with pytest.raises(errors.WorkerLost, match=f"started {ATTEMPTS_MAX} times"):
        value.fetch(30)
    with pytest.raises(errors.WorkerLost):
        in_processes.join(20)


def test_run_call_that_ends_its_process_is_repeated(in_processes: ClusterCoordinator) -> None:
    with pytest.raises(errors.WorkerLost, match=f"at worker:0 was started {ATTEMPTS_MAX} times"):
        in_processes.run(os._exit, 3)


def test_running_function_is_cut_off_at_its_time_out(
    in_processes: ClusterCoordinator, tmp_path: Path
) -> None:
    value = in_processes.schedule(waits, (tmp_path,), timeout=0.5)
    with pytest.raises(
        errors.DeadlineExceededError, match=r"waits has not ended 0\.5 s after it was scheduled"
    ):
        value.fetch(20)
    assert value.done()
    with pytest.raises(errors.DeadlineExceededError):
        in_processes.join(20)
    assert in_processes.schedule(int).fetch(20) == 0


def test_frozen_result_is_read_only(in_processes: ClusterCoordinator) -> None:
    value = kept_value(in_processes, lambda: zd.freeze(np.ones(KEPT_BYTES, np.uint8)))
    assert in_processes.schedule(lambda a: (a.flags.writeable, sum_of(a)), (value,)).fetch(20) == (
        False,
        KEPT_BYTES,
    )

"""A child that is forked from a program in the middle of its work: nothing of the parent is its
own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from os import _exit
from pathlib import Path

import zmqdist as zd
from tests.scheduling.work import begun, go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

MADE_BEFORE = "this ClusterCoordinator was made before a fork: make a new one in the child process"
FAILED = 100


def in_child(fn: Callable[[], int]) -> int:
    """Return what `fn` returns in a forked child, or FAILED if it raises."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        code = FAILED
        try:
            code = fn()
        finally:
            _exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refusals(*calls: Callable[[], object], message: str = "") -> int:
    """Return how many calls are refused with this message."""
    count = 0
    for call in calls:
        try:
            call()
        except errors.FailedPreconditionError as error:
            count += message in str(error)
    return count


def test_forked_child_cannot_fetch_or_free_kept_value() -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        values = [coordinator.schedule(bytes, (100_000,), keep=True)]
        coordinator.join(20)

        def drop() -> int:
            count = refusals(lambda: values[0].get(10))
            values.clear()
            return count

        assert in_child(drop) == 1
        assert values[0].get(10) == bytes(100_000)


def test_forked_child_closes_nothing(tmp_path: Path) -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        value = coordinator.schedule(waits, (tmp_path,))
        until(lambda: begun(tmp_path))

        def close() -> int:
            began = time.monotonic()
            coordinator.close()
            cluster.close()
            assert time.monotonic() - began < 10.0
            return refusals(lambda: value.get(30))

        assert in_child(close) == 1
        assert cluster.credentials.token_file is not None
        assert Path(cluster.credentials.token_file).exists()
        go(tmp_path)
        assert value.get(20) == "x"


def test_forked_child_waits_for_no_thread_of_parent(tmp_path: Path) -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        coordinator.schedule(waits, (tmp_path,))
        joining = threading.Thread(target=coordinator.join)
        joining.start()
        until(lambda: coordinator.snapshot().waiting_for_end)
        calls: list[Callable[[], object]] = [
            lambda: coordinator.schedule(int),
            lambda: coordinator.join(30),
            coordinator.done,
        ]
        assert in_child(lambda: refusals(*calls, message=MADE_BEFORE)) == len(calls)
        go(tmp_path)
        joining.join()


def test_forked_child_calls_are_refused(tmp_path: Path) -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        value = coordinator.submit(waits, tmp_path)
        until(lambda: begun(tmp_path))
        calls: list[Callable[[], object]] = [
            lambda: coordinator.wait([value]),
            lambda: next(coordinator.as_completed([value])),
            lambda: value.add_done_callback(print),
            lambda: cluster.scale(2),
            cluster.add_worker,
            lambda: cluster.kill_worker(0),
            lambda: cluster.restart_worker(0),
        ]
        assert in_child(lambda: refusals(*calls)) == len(calls)
        go(tmp_path)
        assert value.result(20) == "x"


def test_forked_child_closing_strategy_leaves_variables() -> None:
    with (
        zd.local_cluster(workers=1, ps=1) as cluster,
        zd.ParameterServerStrategy(cluster) as strategy,
    ):
        with strategy.scope():
            variable = zd.Variable(1.0)

        def close() -> int:
            variable.assign_add(1.0)  # handles work there
            strategy.close()
            return 0

        assert in_child(close) == 0
        assert variable.numpy() == 2.0

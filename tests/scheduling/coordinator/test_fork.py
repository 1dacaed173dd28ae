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


def test_forked_child_cannot_fetch_or_free_kept_value() -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        values = [coordinator.schedule(bytes, (100_000,), keep=True)]
        coordinator.join(20)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                values[0].get(10)
            except errors.FailedPreconditionError:
                values.clear()
                code = 0
            finally:
                _exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert values[0].get(10) == bytes(100_000)


def test_forked_child_closes_nothing(tmp_path: Path) -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        value = coordinator.schedule(waits, (tmp_path,))
        until(lambda: begun(tmp_path))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                began = time.monotonic()
                coordinator.close()
                cluster.close()
                code = 0 if time.monotonic() - began < 10.0 else 2
                value.get(30)
                code = 3
            except errors.FailedPreconditionError:
                pass
            finally:
                _exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
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
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            refusals = 0
            for call in (
                lambda: coordinator.schedule(int),
                lambda: coordinator.join(30),
                coordinator.done,
            ):
                try:
                    call()
                except errors.FailedPreconditionError as error:
                    refusals += str(error) == MADE_BEFORE
            _exit(refusals)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        go(tmp_path)
        joining.join()


def test_forked_child_calls_are_refused(
    tmp_path: Path,
) -> None:
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
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            refusals = 0
            for call in calls:
                try:
                    call()
                except errors.FailedPreconditionError:
                    refusals += 1
            _exit(refusals)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
        go(tmp_path)
        assert value.result(20) == "x"


def test_forked_child_closing_strategy_leaves_variables() -> None:
    with (
        zd.local_cluster(workers=1, ps=1) as cluster,
        zd.ParameterServerStrategy(cluster) as strategy,
    ):
        with strategy.scope():
            variable = zd.Variable(1.0)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                variable.assign_add(1.0)  # handles work there
                strategy.close()
                code = 0
            finally:
                _exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert variable.numpy() == 2.0

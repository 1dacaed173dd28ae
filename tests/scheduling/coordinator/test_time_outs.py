"""Every wait of coordinators, executors and servers of the scheduling takes the same time-outs, and
refuses the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import Gate, passes_gate
from tests.time_outs import LONG, OVER, REFUSED, check_long, check_over, check_refused
from zmqdist import errors
from zmqdist.clock import duration
from zmqdist.coordinator import ClusterCoordinator


@dataclass
class Pending:
    """Work that waits at the gate."""

    coordinator: ClusterCoordinator
    executor: zd.Executor
    value: Any
    kept_value: Any
    resource: Any
    future: Any


@pytest.fixture
def pending(threads: zd.local_cluster) -> Iterator[Pending]:
    Gate.opened.clear()
    with ClusterCoordinator(threads) as coordinator, zd.Executor(threads) as executor:
        coordinator.workers()
        kept_value = coordinator.schedule(int, keep=True)
        kept_value.exception()
        yield Pending(
            coordinator,
            executor,
            coordinator.schedule(passes_gate),
            kept_value,
            coordinator.create_per_worker_resource(passes_gate),
            executor.submit(passes_gate),
        )
        Gate.opened.set()


WAITS: dict[str, Callable[[Pending, Any], Any]] = {
    "get": lambda pending, timeout: pending.value.get(timeout),
    "fetch": lambda pending, timeout: pending.value.fetch(timeout),
    "gather": lambda pending, timeout: pending.coordinator.gather(
        {"a": [pending.value]}, timeout=timeout
    ),
    "gather of a resource": lambda pending, timeout: pending.coordinator.gather(
        pending.resource, timeout=timeout
    ),
    "exception": lambda pending, timeout: pending.value.exception(timeout),
    "get of a resource": lambda pending, timeout: pending.resource[0].get(timeout),
    "fetch of a resource": lambda pending, timeout: pending.resource[0].fetch(timeout),
    "exception of a resource": lambda pending, timeout: pending.resource[0].exception(timeout),
    "fetch of all": lambda pending, timeout: pending.resource.fetch(timeout),
    "join": lambda pending, timeout: pending.coordinator.join(timeout),
    "as_completed": lambda pending, timeout: list(
        pending.coordinator.as_completed([pending.value], timeout)
    ),
    "result": lambda pending, timeout: pending.future.result(timeout),
    "exception of a Future": lambda pending, timeout: pending.future.exception(timeout),
    "map": lambda pending, timeout: list(pending.executor.map(passes_gate, [1], timeout=timeout)),
}


@pytest.mark.parametrize("wait", WAITS)
def test_waits_take_same_time_outs(pending: Pending, wait: str) -> None:
    def waits(timeout: Any) -> Any:
        return WAITS[wait](pending, timeout)

    for timeout in REFUSED:
        check_refused(waits, timeout)
    for timeout in OVER:
        check_over(waits, timeout)
    for timeout in LONG:
        check_long(waits, timeout, Gate.opened.set)


def test_done_waits_only_with_time_out(pending: Pending) -> None:
    wait = pending.coordinator.done
    for timeout in REFUSED:
        check_refused(wait, timeout)
    for timeout in [None, *OVER]:
        assert wait(timeout) is False
    for timeout in LONG[1:]:
        check_long(wait, timeout, Gate.opened.set)


def test_wait_takes_same_time_outs_and_raises_none(pending: Pending) -> None:
    def wait(timeout: Any) -> Any:
        return pending.coordinator.wait([pending.value], timeout=timeout)

    for timeout in REFUSED:
        check_refused(wait, timeout)
    for timeout in OVER:
        assert wait(timeout) == ([], [pending.value])
    for timeout in LONG:
        check_long(wait, timeout, Gate.opened.set)


def test_kept_value_takes_same_time_outs(pending: Pending) -> None:
    for timeout in REFUSED:
        check_refused(pending.kept_value.get, timeout)
    for timeout in [*OVER, *LONG]:
        assert pending.kept_value.get(timeout) == 0


def test_time_out_of_function_is_number_of_seconds(in_threads: ClusterCoordinator) -> None:
    for timeout in REFUSED:
        check_refused(lambda timeout: in_threads.schedule(int, timeout=timeout), timeout)
        check_refused(lambda timeout: in_threads.options(timeout=timeout), timeout)
    for timeout in LONG:
        assert in_threads.options(timeout=timeout).submit(int).get(20) == 0
        assert in_threads.schedule(int, timeout=timeout).get(20) == 0


@pytest.mark.parametrize("timeout", LONG)
def test_server_join_takes_same_time_outs(timeout: Any) -> None:
    with zd.local_cluster(workers=1, processes=False) as cluster:
        for wrong in REFUSED:
            check_refused(cluster.dispatcher.join, wrong)
        for over in OVER:
            check_over(cluster.dispatcher.join, over)
        check_long(cluster.dispatcher.join, timeout, cluster.dispatcher.stop)


@pytest.mark.parametrize("wrong", [*REFUSED, -1, None])
def test_duration_is_number_of_seconds(threads: zd.local_cluster, wrong: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"grace_s is .*, wants 0 s or more"):
        duration("grace_s", wrong)
    with pytest.raises(
        errors.InvalidArgumentError, match=r"cluster_lost_limit_s is .*, wants 0 s or more"
    ):
        ClusterCoordinator(threads, cluster_lost_limit_s=wrong)

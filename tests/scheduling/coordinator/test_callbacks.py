"""The thread of callbacks: nothing that a callback raises ends it, one that cannot be started is
said where it is needed, and a callback may wait for what its coordinator or executor does."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import Gate, passes_gate, refuse_threads
from tests.scheduling.work import until
from zmqdist.coordinator import ClusterCoordinator

CALLBACKS = "zmqdist-callbacks"


def threads_of_callbacks() -> int:
    return sum(thread.name == CALLBACKS for thread in threading.enumerate())


def test_callback_raises_if_no_thread_starts(
    in_threads: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = in_threads.schedule(int)
    called: list[Any] = []
    with monkeypatch.context() as full:
        refuse_threads(full, CALLBACKS)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            value.add_done_callback(called.append)
    value.add_done_callback(called.append)
    until(lambda: called == [value])


def test_callback_after_close_leaves_no_thread(
    threads: zd.local_cluster,
) -> None:
    with ClusterCoordinator(threads) as coordinator:
        value = coordinator.schedule(int)
        value.get(20)
    before = threads_of_callbacks()
    called: list[Any] = []
    value.add_done_callback(called.append)
    until(lambda: called == [value])
    until(lambda: threads_of_callbacks() <= before)


def called_back(
    register: Callable[[Callable[[Any], None]], object], does: Callable[[], Any]
) -> Any:
    """What `does()` returns in a callback that was registered while the function was waiting at the
    gate."""
    called_event = threading.Event()
    returned: list[Any] = []

    def callback(_: object) -> None:
        returned.append(does())
        called_event.set()

    register(callback)
    Gate.opened.set()
    assert called_event.wait(20), "the callback waits for itself"
    return returned[0]


async def awaited(value: Any) -> Any:
    return await value


async def wrapped(future: futures.Future[Any]) -> Any:
    return await asyncio.wrap_future(future)


async def run_in(executor: zd.Executor) -> Any:
    return await asyncio.get_running_loop().run_in_executor(executor, operator.neg, 3)


WITH_EXECUTOR: dict[str, tuple[Callable[[zd.Executor, Any, Any], Any], Any]] = {
    "result of its own": (lambda executor, own, peer: own.result(), 1),
    "result of another": (lambda executor, own, peer: peer.result(), 2),
    "exception of another": (lambda executor, own, peer: peer.exception(), None),
    "result of new work": (
        lambda executor, own, peer: executor.submit(operator.neg, 3).result(),
        -3,
    ),
    "cancel": (lambda executor, own, peer: peer.cancel(), False),
    "map": (
        lambda executor, own, peer: list(executor.map(operator.neg, [3, 4], buffersize=1)),
        [-3, -4],
    ),
    "wait": (lambda executor, own, peer: len(futures.wait([own, peer]).done), 2),
    "as_completed": (lambda executor, own, peer: len(list(futures.as_completed([own, peer]))), 2),
    "a callback": (
        lambda executor, own, peer: peer.add_done_callback(print) or peer.result(),
        2,
    ),
    "asyncio.wrap_future": (lambda executor, own, peer: asyncio.run(wrapped(peer)), 2),
    "run_in_executor": (lambda executor, own, peer: asyncio.run(run_in(executor)), -3),
    "shutdown": (lambda executor, own, peer: executor.shutdown(wait=True) or peer.result(0), 2),
    "shutdown, cancel": (
        lambda executor, own, peer: executor.shutdown(wait=True, cancel_futures=True),
        None,
    ),
    "shutdown, no wait": (lambda executor, own, peer: executor.shutdown(wait=False), None),
    "the end of a with": (lambda executor, own, peer: executor.__exit__(None, None, None), False),
    "kill_workers": (lambda executor, own, peer: executor.kill_workers(), None),
    "terminate_workers": (
        lambda executor, own, peer: executor.terminate_workers() or executor.shutdown(),
        None,
    ),
}


@pytest.mark.parametrize("case", WITH_EXECUTOR)
def test_future_callback_may_wait_for_executor(threads: zd.local_cluster, case: str) -> None:
    does, returns = WITH_EXECUTOR[case]
    Gate.opened.clear()
    with zd.Executor(threads) as executor:
        own, peer = executor.submit(passes_gate, 1), executor.submit(passes_gate, 2)
        assert called_back(own.add_done_callback, lambda: does(executor, own, peer)) == returns


def test_executor_callback_may_close_cluster() -> None:
    Gate.opened.clear()
    cluster = zd.local_cluster(workers=1, processes=False)
    executor = zd.Executor(cluster)
    future = executor.submit(passes_gate, 1)
    assert called_back(future.add_done_callback, lambda: cluster.close() or future.result(0)) == 1


def test_shutdown_returns_after_callbacks(threads: zd.local_cluster) -> None:
    Gate.opened.clear()
    called: list[int] = []
    with zd.Executor(threads) as executor:
        submitted = [executor.submit(passes_gate, number) for number in range(3)]
        submitted[0].add_done_callback(lambda _: submitted[2].result())
        for future in submitted:
            future.add_done_callback(lambda future: called.append(future.result()))
        Gate.opened.set()
    assert sorted(called) == [0, 1, 2]


WITH_COORDINATOR: dict[str, tuple[Callable[[ClusterCoordinator, Any, Any], Any], Any]] = {
    "get of its own": (lambda coordinator, own, peer: own.get(), 1),
    "get of another": (lambda coordinator, own, peer: peer.get(), 2),
    "exception of another": (lambda coordinator, own, peer: peer.exception(), None),
    "get of new work": (
        lambda coordinator, own, peer: coordinator.schedule(operator.neg, (3,)).get(),
        -3,
    ),
    "fetch": (lambda coordinator, own, peer: coordinator.fetch([own, peer]), [1, 2]),
    "map": (
        lambda coordinator, own, peer: coordinator.fetch(coordinator.map(operator.neg, [3, 4])),
        [-3, -4],
    ),
    "join": (lambda coordinator, own, peer: coordinator.join(), None),
    "done": (lambda coordinator, own, peer: coordinator.done(20), True),
    "as_completed": (
        lambda coordinator, own, peer: len(list(coordinator.as_completed([own, peer]))),
        2,
    ),
    "await": (lambda coordinator, own, peer: asyncio.run(awaited(peer)), 2),
    "as_completed of a resource": (lambda coordinator, own, peer: resources(coordinator), 3),
    "await of a resource": (
        lambda coordinator, own, peer: asyncio.run(
            awaited(coordinator.create_per_worker_resource(int)[0])
        ),
        0,
    ),
    "close": (lambda coordinator, own, peer: coordinator.close(), None),
}


def resources(coordinator: ClusterCoordinator) -> int:
    return len(list(coordinator.as_completed(coordinator.create_per_worker_resource(int))))


@pytest.mark.parametrize("case", WITH_COORDINATOR)
def test_value_callback_may_wait_for_coordinator(in_threads: ClusterCoordinator, case: str) -> None:
    does, returns = WITH_COORDINATOR[case]
    Gate.opened.clear()
    in_threads.workers()
    own, peer = in_threads.schedule(passes_gate, (1,)), in_threads.schedule(passes_gate, (2,))
    assert called_back(own.add_done_callback, lambda: does(in_threads, own, peer)) == returns


@pytest.mark.parametrize(
    "case", ["get of another", "join", "await", "as_completed of a resource", "close"]
)
def test_resource_callback_may_wait_for_coordinator(
    in_threads: ClusterCoordinator, case: str
) -> None:
    does, returns = WITH_COORDINATOR[case]
    Gate.opened.clear()
    in_threads.workers()
    resource = in_threads.create_per_worker_resource(passes_gate, (1,))[0]
    peer = in_threads.schedule(passes_gate, (2,))
    assert (
        called_back(resource.add_done_callback, lambda: does(in_threads, resource, peer)) == returns
    )

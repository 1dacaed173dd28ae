"""Values of which each worker has its own: where they are, who gets which, what happens when a
worker is lost, when they go."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.coordinator import helpers
from tests.scheduling.coordinator.helpers import stalled
from tests.scheduling.work import begun, go, until, waits
from zmqdist import errors
from zmqdist.coordinator import (
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValue,
    get_current_worker_index,
    get_num_workers,
)
from zmqdist.messages import Submit
from zmqdist.scheduling.coordinator.remote_value import RemoteValueStatus

# its dispatcher may start another thread of a pool
pytestmark = [pytest.mark.timeout(90), pytest.mark.shares_cluster]

WORKERS = 3


@pytest.fixture
def coordinator(any_queue: ClusterCoordinator) -> ClusterCoordinator:
    return any_queue


# -- what they are ---------------------------------------------------------------------------------


def test_per_worker_value(coordinator: ClusterCoordinator) -> None:
    counters = coordinator.create_per_worker_resource(helpers.counter)
    assert isinstance(counters, PerWorkerValues)
    for _ in range(10):
        coordinator.schedule(helpers.add, (counters,))
    coordinator.join()
    assert sum(counters.fetch()) == 10
    assert [value.get().worker for value in counters] == [0, 1, 2]


def test_resource_arguments_are_as_at_creation(in_three: ClusterCoordinator) -> None:
    start = np.array([100])
    counters = in_three.create_per_worker_resource(helpers.counter, kwargs={"start": start})
    start += 1
    assert counters.fetch() == [100] * WORKERS


def test_per_worker_values_are_in_order_of_workers(
    in_three: ClusterCoordinator,
) -> None:
    values = in_three.create_per_worker_resource(lambda: get_current_worker_index())
    assert len(values) == WORKERS
    assert isinstance(values[1], RemoteValue)
    assert values[1].fetch() == 1
    assert [value.get(20) for value in values] == [0, 1, 2]
    assert in_three.fetch({"last": values[2]}) == {"last": 2}


def test_per_worker_values_take_remote_values_only(in_three: ClusterCoordinator) -> None:
    with pytest.raises(AssertionError, match="should only take `RemoteValue`s"):
        PerWorkerValues([in_three.schedule(helpers.identity, (1,)), 2])  # type: ignore[list-item]
    in_three.join()


@pytest.mark.parametrize(
    "nested", ["as a keyword", "in lists and dicts", "captured", "captured by a method"]
)
def test_slice_of_worker_replaces_values_at_any_depth(
    coordinator: ClusterCoordinator, nested: str
) -> None:
    counters = coordinator.create_per_worker_resource(helpers.counter)

    class Step:
        def __init__(self) -> None:
            self.counters = counters

        def run(self) -> int:
            self.counters.value += 1
            return int(self.counters.value)

    def captures() -> int:
        counters.value += 1  # type: ignore[attr-defined]
        return int(counters.value)  # type: ignore[attr-defined]

    for _ in range(WORKERS):
        match nested:
            case "as a keyword":
                coordinator.schedule(helpers.add, kwargs={"counter": counters})
            case "in lists and dicts":
                coordinator.schedule(helpers.add_nested, ({"counters": [counters]},))
            case "captured":
                coordinator.schedule(captures)
            case _:
                coordinator.schedule(Step().run)
    coordinator.join()
    assert sum(counters.fetch()) == WORKERS


def test_worker_gets_its_own_value(coordinator: ClusterCoordinator) -> None:
    counters = coordinator.create_per_worker_resource(helpers.counter)
    pairs = helpers.schedule_on(coordinator, range(WORKERS), helpers.of_worker, counters)
    assert coordinator.fetch(pairs) == [(index, index) for index in range(WORKERS)]


def test_resource_may_use_another_resource(in_three: ClusterCoordinator) -> None:
    counters = in_three.create_per_worker_resource(helpers.counter)
    wrapped = in_three.create_per_worker_resource(helpers.identity, ([counters],))
    del counters
    gc.collect()
    assert (
        in_three.schedule(lambda nested: helpers.add(nested[0]), (wrapped,), worker=1).fetch(20)
        == 1
    )
    assert (
        in_three.schedule(lambda nested: helpers.add(nested[0]), (wrapped,), worker=1).fetch(20)
        == 2
    )


def test_kept_values_can_be_per_worker(in_three: ClusterCoordinator) -> None:
    values = PerWorkerValues(
        [in_three.schedule(helpers.identity, (10 * index,), keep=True) for index in range(WORKERS)]
    )
    in_three.join()
    assert in_three.schedule(helpers.identity, (values,), worker=2).fetch(20) == 20
    assert in_three.schedule(lambda: values, worker=0).fetch(20) == 0


def test_large_definition_is_held_once(
    in_three: ClusterCoordinator,
) -> None:
    array = np.arange(2**20)
    sums = in_three.create_per_worker_resource(lambda: array.sum())
    for _ in range(20):
        in_three.schedule(helpers.identity, (sums,))
    in_three.join()
    assert sums.fetch() == [array.sum()] * WORKERS
    assert in_three.snapshot().held.parts == 1
    del sums
    gc.collect()
    until(lambda: in_three.snapshot().held.parts == 0)


# -- what they are not -----------------------------------------------------------------------------


def test_single_value_of_resource_is_refused(in_three: ClusterCoordinator) -> None:
    counters = in_three.create_per_worker_resource(helpers.counter)
    with pytest.raises(ValueError, match="pass the PerWorkerValues to the function"):
        in_three.schedule(helpers.add, (counters[0],))


def test_resource_of_another_coordinator_is_refused(
    in_three: ClusterCoordinator, three_processes: zd.local_cluster
) -> None:
    counters = in_three.create_per_worker_resource(helpers.counter)
    with (
        ClusterCoordinator(three_processes) as second,
        pytest.raises(ValueError, match="by its own coordinator"),
    ):
        second.schedule(helpers.add, (counters,))


def test_unpicklable_resource_function_is_refused(in_three: ClusterCoordinator) -> None:
    lock = threading.Lock()
    with pytest.raises(errors.InvalidArgumentError, match="lock"):
        in_three.create_per_worker_resource(lambda: lock)
    with pytest.raises(TypeError, match="callable"):
        in_three.create_per_worker_resource(3)  # type: ignore[arg-type]


def test_unpicklable_resource_can_be_used_but_not_fetched(
    in_three: ClusterCoordinator,
) -> None:
    locks = in_three.create_per_worker_resource(threading.Lock)
    assert in_three.schedule(lambda lock: lock.locked(), (locks,)).fetch(20) is False
    with pytest.raises(errors.InvalidArgumentError, match="lock"):
        locks[0].fetch(20)


# -- errors ----------------------------------------------------------------------------------------


def test_input_error(coordinator: ClusterCoordinator) -> None:
    failing = coordinator.create_per_worker_resource(helpers.fails)
    result = coordinator.schedule(helpers.identity, (failing,))
    with pytest.raises(errors.ClosureInputError, match="Input has an error") as caught:
        coordinator.join()
    assert isinstance(caught.value.original_exception, KeyError)
    with pytest.raises(errors.ClosureInputError, match="no such thing"):
        result.fetch()
    coordinator.join()


def test_errored_input_not_used(coordinator: ClusterCoordinator) -> None:
    failing = coordinator.create_per_worker_resource(helpers.fails)
    result = coordinator.schedule(helpers.identity, (1,))
    coordinator.join()
    assert result.fetch() == 1
    with pytest.raises(KeyError, match="no such thing"):
        failing[0].fetch(20)
    assert isinstance(failing[1].exception(20), KeyError)
    assert failing[0].status is RemoteValueStatus.READY
    coordinator.join()


def test_failed_build_is_not_repeated_by_its_users(
    in_three: ClusterCoordinator, tmp_path: Path
) -> None:
    def builds() -> None:
        helpers.logged_counter(tmp_path)
        raise ValueError("not to be had")

    failing = in_three.create_per_worker_resource(builds)
    for _ in range(3):
        with pytest.raises(errors.ClosureInputError, match="not to be had"):
            in_three.schedule(helpers.identity, (failing,), worker=0).fetch(20)
        with pytest.raises(errors.ClosureInputError):
            in_three.join()
    assert len(list(tmp_path.glob("built-0-*"))) == 1


def test_resource_can_still_be_used_after_cancellation(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    counters = coordinator.create_per_worker_resource(helpers.counter)
    running = coordinator.schedule(waits, (tmp_path,))
    until(lambda: begun(tmp_path))
    coordinator.schedule(helpers.fails)
    with pytest.raises(KeyError):
        coordinator.join()
    with pytest.raises(errors.CancelledError):
        running.fetch()
    for _ in range(10):
        coordinator.schedule(helpers.add, (counters,))
    coordinator.join()
    assert sum(counters.fetch()) == 10
    go(tmp_path)


def test_resource_builds_belong_to_no_round(in_three: ClusterCoordinator, tmp_path: Path) -> None:
    def slow() -> str:
        return waits(tmp_path)

    values = in_three.create_per_worker_resource(slow)
    assert in_three.done()
    in_three.join(30)
    assert values[0].status is RemoteValueStatus.NOT_READY
    assert not values[0].done()
    with pytest.raises(TimeoutError):
        values[0].fetch(0.01)
    go(tmp_path)
    assert values.fetch(20) == ["x"] * WORKERS


# -- waiting in other ways -------------------------------------------------------------------------


def test_resource_value_can_be_awaited_and_calls_back(in_three: ClusterCoordinator) -> None:
    values = in_three.create_per_worker_resource(helpers.identity, (7,))
    called: list[RemoteValue] = []
    values[0].add_done_callback(called.append)
    until(lambda: called)
    assert called[0].fetch() == 7

    async def lookup() -> Any:
        return await values[1]

    assert asyncio.run(lookup()) == 7
    assert not values[0].cancel()


def test_resource_values_are_in_as_completed(in_three: ClusterCoordinator) -> None:
    values = [*in_three.create_per_worker_resource(helpers.identity, (7,))]
    assert [value.fetch(20) for value in in_three.as_completed(values, timeout=20)] == [7] * WORKERS


def test_resource_is_submitted_before_later_functions(
    in_three: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_three.create_per_worker_resource(int).fetch(20)
    with stalled(in_three, monkeypatch) as sent:
        values = in_three.create_per_worker_resource(int)
        plain = in_three.schedule(int)
    assert values.fetch(20) == [0] * WORKERS
    assert plain.fetch(20) == 0
    apart = [message.detached for message in sent if isinstance(message, Submit)]
    assert apart[: WORKERS + 1] == [True] * WORKERS + [False]


def test_closed_coordinator_builds_nothing(three_processes: zd.local_cluster) -> None:
    with ClusterCoordinator(three_processes) as coordinator:
        values = coordinator.create_per_worker_resource(int)
        assert values.fetch(20) == [0] * WORKERS
        dataset = coordinator.create_per_worker_dataset([1])
    for late in (values[0].get, dataset.build):
        with pytest.raises(errors.FailedPreconditionError, match="has been closed"):
            late()


# -- lost workers ----------------------------------------------------------------------------------


@pytest.mark.processes("per-worker values")
@pytest.mark.killed("per-worker values")
def test_value_of_lost_worker_is_aborted_until_its_return(
    three_processes: zd.local_cluster, in_three: ClusterCoordinator
) -> None:
    counters = in_three.create_per_worker_resource(helpers.counter)
    assert [
        in_three.schedule(helpers.add, (counters,), worker=index).fetch(20)
        for index in range(WORKERS)
    ] == [1] * WORKERS
    until(lambda: helpers.statuses(counters) == ["READY"] * WORKERS)
    three_processes.kill_worker(0)
    until(lambda: helpers.statuses(counters) == ["ABORTED", "READY", "READY"])
    with pytest.raises(errors.CancelledError, match="worker:0 is lost") as caught:
        counters[0].fetch(20)
    assert isinstance(caught.value.__cause__, errors.ClosureAbortedError)
    assert counters[1].fetch(20) == 1
    assert in_three.schedule(helpers.add, (counters,)).fetch(20) == 2  # the others go on
    three_processes.restart_worker(0)
    until(lambda: helpers.statuses(counters) == ["READY"] * WORKERS)
    assert sorted(counters.fetch(20)) == [0, 1, 2]
    assert counters[0].fetch(20) == 0


def test_dead_slot_rebuilds_resources_before_next_function(
    in_three: ClusterCoordinator, tmp_path: Path
) -> None:
    counters = in_three.create_per_worker_resource(helpers.logged_counter, (tmp_path,))
    value = in_three.schedule(helpers.add_and_exit_first, (counters, tmp_path), worker=0)
    assert value.fetch(20) == 1
    assert len(list(tmp_path.glob("built-0-*"))) == 2
    in_three.join()


def test_worker_joining_during_creation_builds_resource(in_three: ClusterCoordinator) -> None:
    created = [in_three.create_per_worker_resource(int)]
    runtime, arrive = (
        in_three._runtime,
        in_three._resources._members,
    )  # reach: a creation comes between two steps of an arrival
    lock = runtime.lock

    class MakesOne:
        """The lock, and somebody who is faster the first time."""

        def __enter__(self) -> None:
            if threading.current_thread().name != "zmqdist-coordinator" and len(created) == 1:
                runtime.lock = lock
                created.append(in_three.create_per_worker_resource(int))
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            runtime.lock = lock
            lock.release()

    runtime.lock = MakesOne()  # type: ignore[assignment]
    arrive([("worker:7", 1, 1, "here")], [])
    assert [len(values) for values in created] == [WORKERS + 1] * 2


# -- when they go ----------------------------------------------------------------------------------


def at_workers(coordinator: ClusterCoordinator) -> list[tuple[int, int, int]]:
    return coordinator.fetch(
        helpers.schedule_on(coordinator, range(WORKERS), helpers.living_objects)
    )


@pytest.mark.parametrize("captured", [False, True], ids=["argument", "captured"])
def test_dropped_values_are_freed_at_workers(in_three: ClusterCoordinator, captured: bool) -> None:
    before = at_workers(in_three)
    counters: Any = in_three.create_per_worker_resource(helpers.counter)
    step = functools.partial(helpers.add, counters) if captured else helpers.add
    for index in range(WORKERS):
        in_three.schedule(step, () if captured else (counters,), worker=index)
    in_three.join()
    assert [count for _, count, _ in at_workers(in_three)] == [count + 1 for _, count, _ in before]
    del counters, step
    gc.collect()
    until(lambda: at_workers(in_three) == before)
    assert in_three.snapshot().resources == 0


def test_unfinished_work_keeps_its_resource(in_three: ClusterCoordinator, tmp_path: Path) -> None:
    counters = in_three.create_per_worker_resource(helpers.logged_counter, (tmp_path,))
    assert counters.fetch(20) == [0] * WORKERS
    in_three.schedule(waits, (tmp_path,), worker=0)
    waiting = in_three.schedule(helpers.add, (counters,), worker=0)
    del counters
    gc.collect()
    assert in_three.snapshot().resources == 1
    go(tmp_path)
    assert waiting.fetch(20) == 1
    in_three.join()
    until(lambda: in_three.snapshot().resources == 0)
    assert len(list(tmp_path.glob("built-0-*"))) == 1


def test_close_frees_resources_at_workers(
    three_processes: zd.local_cluster, in_three: ClusterCoordinator
) -> None:
    before = at_workers(in_three)
    with ClusterCoordinator(three_processes) as second:
        counters = second.create_per_worker_resource(helpers.counter)
        assert counters.fetch(20) == [0] * WORKERS
        assert at_workers(in_three) != before
    until(lambda: at_workers(in_three) == before)


# -- where a function is ---------------------------------------------------------------------------


def test_function_knows_its_worker_and_worker_count(
    coordinator: ClusterCoordinator,
) -> None:
    pairs = coordinator.fetch(
        helpers.schedule_on(coordinator, range(WORKERS), helpers.worker_and_count)
    )
    assert pairs == [(index, WORKERS) for index in range(WORKERS)]


def test_worker_index_differs_by_worker(
    coordinator: ClusterCoordinator,
) -> None:
    lookup = get_current_worker_index
    assert {coordinator.schedule(lookup, worker=index).fetch(20) for index in (0, 2)} == {0, 2}


@pytest.mark.parametrize("lookup", [get_current_worker_index, get_num_workers])
def test_worker_index_is_error_outside_function(in_three: ClusterCoordinator, lookup: Any) -> None:
    with pytest.raises(RuntimeError, match="functions that run on a worker"):
        lookup()


def test_threads_of_function_know_its_worker(in_three: ClusterCoordinator) -> None:
    def lookup() -> int:
        indices: list[int] = []
        thread = threading.Thread(target=lambda: indices.append(get_current_worker_index()))
        thread.start()
        thread.join()
        return indices[0]

    assert in_three.schedule(lookup, worker=2).fetch(20) == 2


def test_thread_slots_share_resources_of_their_worker() -> None:
    with (
        zd.local_cluster(workers=2, slots=3, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        counters = coordinator.create_per_worker_resource(helpers.counter)
        for _ in range(30):
            coordinator.schedule(helpers.add, (counters,))
        coordinator.join()
        assert sum(counters.fetch(20)) == 30
        assert coordinator.schedule(helpers.worker_and_count, worker=1).fetch(20) == (1, 2)
        with pytest.raises(RuntimeError):
            get_current_worker_index()
        assert [worker.snapshot().resources for worker in cluster.servers] == [1, 1]
        del counters
        gc.collect()
        until(lambda: [worker.snapshot().resources for worker in cluster.servers] == [0, 0])

"""`submit`, `options`, `result` and `gather`: the coordinator in the words of the standard library,
of Dask and of Ray."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import run_in_threads
from tests.scheduling.coordinator.test_options import times
from tests.scheduling.work import begun, go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator, RemoteValue, Submitter

pytestmark = pytest.mark.timeout(90)


def echo(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


# -- submit ---------------------------------------------------------------------------------------


def test_submit_passes_all_arguments_to_function(in_threads: ClusterCoordinator) -> None:
    names = {"fn": 1, "self": 2, "args": 3, "kwargs": 4, "worker": 5, "timeout": 6, "name": 7}
    assert in_threads.submit(echo, 1, "two", **names).result(20) == ((1, "two"), names)
    assert in_threads.options(name="e").submit(echo, [3], **names).result(20) == (([3],), names)


def test_arguments_and_results_belong_to_caller(in_threads: ClusterCoordinator) -> None:
    items = [1, 2]
    first = in_threads.submit(echo, items)
    items.append(3)
    assert first.result(20) == (([1, 2],), {})
    first.result()[0][0].append("mine")
    assert first.result() == (([1, 2, "mine"],), {}) == first.get()
    assert in_threads.submit(len, first).result(20) == 2
    assert in_threads.submit(lambda echoed: echoed[0][0], first).result(20) == [1, 2, "mine"]


def test_thousand_results_come_in_order(in_threads: ClusterCoordinator) -> None:
    values = [in_threads.submit(divmod, number, 7) for number in range(1000)]
    assert in_threads.gather(values, timeout=60) == [divmod(number, 7) for number in range(1000)]


def test_submit_raises_no_error_of_another_function(in_threads: ClusterCoordinator) -> None:
    broken = in_threads.submit(int, "x")
    until(broken.done)
    assert in_threads.submit(int).result(20) == 0
    assert in_threads.gather(in_threads.map(abs, [-1, 2]), timeout=20) == [1, 2]
    assert in_threads.run(int) == dict.fromkeys(in_threads.workers(), 0)
    with pytest.raises(ValueError, match="invalid literal"):
        in_threads.schedule(int)
    assert in_threads.schedule(int).result(20) == 0  # it was raised once


def test_error_within_map_ends_nothing(in_threads: ClusterCoordinator) -> None:
    values = in_threads.map(int, ["1", "x", "3", "y", *map(str, range(4, 100))])
    finished, pending = in_threads.wait(values, timeout=60)
    assert (len(finished), pending) == (100, [])
    assert [number for number, value in enumerate(values) if value.exception()] == [1, 3]
    assert values[99].result() == 99


def test_submit_waits_for_room_beside_error(threads: zd.local_cluster, tmp_path: Path) -> None:
    with ClusterCoordinator(threads, queue_bytes_max=1000) as coordinator:
        broken = coordinator.submit(int, "x")
        until(broken.done)
        values: list[RemoteValue] = []
        submitting = threading.Thread(
            target=lambda: values.extend(
                coordinator.submit(lambda folder, _: waits(folder), tmp_path, b"x" * 600)
                for _ in range(3)
            )
        )
        submitting.start()
        until(lambda: coordinator.snapshot().waiting_for_room)
        go(tmp_path)
        submitting.join(60)
        assert coordinator.gather(values, timeout=60) == ["x"] * 3


@pytest.mark.parametrize("call", ["submit", "map"])
@pytest.mark.parametrize("through", ["coordinator", "options"])
def test_uncallable_is_refused(in_threads: ClusterCoordinator, call: str, through: str) -> None:
    submitter: Any = in_threads if through == "coordinator" else in_threads.options(priority=1)
    with pytest.raises(TypeError, match="callable, not int"):
        getattr(submitter, call)(5, [1])


# -- options --------------------------------------------------------------------------------------


def test_options_are_those_of_schedule(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    assert coordinator.options(retries=2).submit(times, tmp_path, 3).result(20) == 3
    assert (
        coordinator.options(worker=1).submit(zd.coordinator.get_current_worker_index).result(20)
        == 1
    )
    kept_value = coordinator.options(keep=True).submit(list, "ab")
    assert coordinator.submit(len, kept_value).result(20) == 2
    assert "kept by its worker" in repr(kept_value)
    recomputable = coordinator.options(lineage=True).submit(list, "abc")
    assert coordinator.submit(len, recomputable).result(20) == 3


def test_timeout_begins_with_each_submit(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    hasty = in_threads.options(timeout=0.2, name="hasty")
    for _ in range(2):
        late = hasty.submit(waits, tmp_path)
        with pytest.raises(
            errors.DeadlineExceededError, match=r"hasty has not ended 0\.2 s after it was scheduled"
        ):
            late.result(20)
    go(tmp_path)
    with pytest.raises(errors.DeadlineExceededError):
        in_threads.join(20)


def test_urgent_work_begins_first(tmp_path: Path) -> None:
    with (
        zd.local_cluster(workers=1, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        order: list[int] = []
        coordinator.submit(waits, tmp_path)
        until(lambda: begun(tmp_path))
        values = coordinator.map(waits, [tmp_path] * 20)
        last = coordinator.options(priority=-1).submit(waits, tmp_path)
        urgent = coordinator.options(priority=1).submit(waits, tmp_path)
        urgent.add_done_callback(lambda _: order.append(1))
        last.add_done_callback(lambda _: order.append(-1))
        go(tmp_path)
        coordinator.gather([values, urgent, last], timeout=20)
        until(lambda: len(order) == 2)
        assert order == [1, -1]


def test_options_are_added_without_changing_first(
    in_threads: ClusterCoordinator,
) -> None:
    first = in_threads.options(name="first", worker=0)
    second = first.options(worker=2, priority=1)
    here = zd.coordinator.get_current_worker_index
    values = [first.submit(here), second.submit(here), second.options(name=None).submit(here)]
    assert [(value.name.rpartition(".")[2], value.result(20)) for value in values] == [
        ("first", 0),
        ("first", 2),
        ("get_current_worker_index", 2),
    ]
    assert repr(second).startswith("<name='first', worker=2, priority=1 of <ClusterCoordinator")


def test_options_may_be_used_by_several_threads(in_threads: ClusterCoordinator) -> None:
    shared = in_threads.options(name="shared")
    results: list[list[int]] = []

    def gather() -> None:
        results.append(in_threads.gather(shared.map(abs, range(-50, 0)), timeout=60))

    run_in_threads(*[gather] * 4)
    assert results == [list(range(50, 0, -1))] * 4


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"retry": 1}, TypeError, r"options\(\) has no option retry: did you mean retries\?"),
        ({"time_out": 1}, TypeError, r"options\(\) has no option time_out: did you mean timeout\?"),
        (
            {"gpus": 1},
            TypeError,
            "has no option gpus: there are: name, worker, priority, retries, timeout, keep, lin",
        ),
        ({"name": 5}, TypeError, "name is 5, wants a text"),
        ({"name": "a\nb"}, ValueError, r"name is 'a\\nb', wants a text of 1 to 200 printable"),
        ({"name": ""}, ValueError, "name is '', wants a text of 1 to 200 printable characters"),
        (
            {"name": "x" * 201},
            ValueError,
            "name is 'xxx.*, wants a text of 1 to 200 printable characters",
        ),
        ({"worker": 1.5}, TypeError, "worker is 1.5, wants a whole number"),
        ({"worker": -1}, ValueError, "worker is -1, wants the index of a worker or its name"),
        ({"worker": "gpu"}, ValueError, "worker is 'gpu', wants the index of a worker or its name"),
        ({"priority": "high"}, TypeError, "priority is 'high', wants a whole number"),
        ({"priority": 2**31}, ValueError, "priority is 2147483648, wants a whole number from"),
        ({"retries": None}, TypeError, "retries is None, wants a whole number"),
        ({"retries": -1}, ValueError, "retries is -1, wants 0 or more"),
        ({"timeout": "soon"}, ValueError, "a time-out is a number of seconds, or None, not 'soon'"),
        ({"timeout": 0}, ValueError, "timeout is 0, wants more than 0 s"),
        ({"keep": "no"}, TypeError, "keep is 'no', wants True or False"),
        ({"lineage": 1}, TypeError, "lineage is 1, wants True or False"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(
    in_threads: ClusterCoordinator, options: Any, kind: type[Exception], message: str
) -> None:
    for submitter in (in_threads, in_threads.options(priority=1)):
        with pytest.raises(kind, match=message):
            submitter.options(**options)


# -- the name -------------------------------------------------------------------------------------


def test_name_is_in_errors_and_repr(in_processes: ClusterCoordinator) -> None:
    named = in_processes.options(name="lr=0.1")
    dead, slow = named.submit(os._exit, 7), named.submit(time.sleep, 60)
    assert repr(slow) == "<RemoteValue of lr=0.1: pending>"
    with pytest.raises(errors.WorkerLost, match=r"lr=0\.1 was started 3 times"):
        dead.result(60)
    with pytest.raises(TimeoutError, match=r"lr=0\.1 has not ended after 0\.01 s"):
        slow.result(0.01)
    slow.cancel()
    with pytest.raises(errors.CancelledError, match=r"lr=0\.1 was cancelled"):
        slow.result(20)
    assert slow.cancelled()
    assert not dead.cancelled()
    assert repr(slow) == "<RemoteValue of lr=0.1: cancelled>"


def test_name_is_in_remote_traceback_and_log(
    threads: zd.local_cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with ClusterCoordinator(threads) as coordinator:
        failed = coordinator.options(name="fold 3").submit(int, "x")
        with pytest.raises(ValueError, match="invalid literal") as caught:
            failed.result(20)
        name, first = str(caught.value.__cause__).splitlines()[2:4]
        assert name.startswith("fold 3, attempt 1 on worker:")
        assert first == "Traceback (most recent call last):"
        unseen = coordinator.options(name="fold 4").submit(int, "y")
        until(unseen.done)
    (logged,) = [
        record.message for record in caplog.records if "has not looked at" in record.message
    ]
    assert logged.endswith(
        "The first: fold 4: ValueError: invalid literal for int() with base 10: 'y'"
    )


def test_name_is_in_drain_report(tmp_path: Path) -> None:
    with (
        zd.local_cluster(workers=1, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        names = ["lr=0.1", "a.b", "in. short", "é"]
        values = [coordinator.options(name=name, keep=True).submit(int) for name in names]
        values.append(
            coordinator.options(keep=True).submit(zd.coordinator.get_current_worker_index)
        )
        coordinator.wait(values, timeout=20)
        with pytest.raises(errors.DrainRefusedError) as caught:
            coordinator.remove_worker(0)
    numbers = [value.work for value in values]
    shown = [
        "lr=0.1",
        "b",
        "in. short",
        "é",
        "get_current_worker_index",
    ]  # a dotted name is cut as those of functions are
    assert sorted(caught.value.values) == sorted(
        f"{name}-{work}" for name, work in zip(shown, numbers, strict=True)
    )


# -- gather ---------------------------------------------------------------------------------------


def test_gather_keeps_structure(in_threads: ClusterCoordinator) -> None:
    two = in_threads.submit(int, "2")
    structure = {"a": [two, (two, 3)], "b": {two}, "c": np.ones(2), two: "key"}
    gathered = in_threads.gather(structure, timeout=20)
    assert gathered["a"] == [2, (2, 3)]
    assert gathered["b"] == {2}
    assert gathered["c"] is structure["c"]
    assert gathered[2] == "key"
    assert structure["a"][0] is two, "what was given stays as it was"
    assert in_threads.gather(5) == 5
    assert in_threads.gather(value for value in (two, two)) == [2, 2]


def test_gather_raises_first_error_in_order(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    gate = in_threads.submit(waits, tmp_path)
    values = [in_threads.submit(fn, gate) for fn in (str, int, abs)]
    go(tmp_path)
    until(lambda: all(value.done() for value in values))
    with pytest.raises(ValueError, match="invalid literal"):
        in_threads.gather(values)
    with pytest.raises(TypeError):
        in_threads.gather(values[::-1])
    with pytest.raises((ValueError, TypeError)):
        in_threads.join(20)


def test_gather_has_one_time_out_for_all(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    values = in_threads.options(name="slow").map(waits, [tmp_path] * 2)
    zero = in_threads.submit(int)
    assert zero.result(20) == 0
    with pytest.raises(errors.DeadlineExceededError, match=r"slow has not ended after 0\.05 s"):
        in_threads.gather([zero, values], timeout=0.05)
    with pytest.raises(ValueError, match="a time-out is a number of seconds"):
        in_threads.gather(values, timeout="1")  # type: ignore[arg-type]
    go(tmp_path)
    assert in_threads.gather(values, timeout=20) == ["x", "x"]


def test_deadline_error_of_function_is_raised_unchanged(
    in_threads: ClusterCoordinator,
) -> None:
    def late() -> None:
        raise errors.DeadlineExceededError("the printer is slow")

    value = in_threads.submit(late)
    until(value.done)
    with pytest.raises(errors.DeadlineExceededError, match="the printer is slow"):
        in_threads.gather([value], timeout=0)
    with pytest.raises(errors.DeadlineExceededError):
        in_threads.join(20)


# -- map ------------------------------------------------------------------------------------------


def test_map_ends_with_shortest_iterable(in_threads: ClusterCoordinator) -> None:
    assert in_threads.gather(in_threads.map(pow, [2, 3, 4], iter([1, 2])), timeout=20) == [2, 9]
    assert in_threads.map(abs, []) == []


@pytest.mark.parametrize("iterables", [(), (5,), ([1], None)], ids=str)
def test_map_refuses_what_is_not_iterable(in_threads: ClusterCoordinator, iterables: Any) -> None:
    with pytest.raises(
        TypeError, match=r"at least one iterable|not iterable|must support iteration"
    ):
        in_threads.map(abs, *iterables)
    assert in_threads.snapshot().scheduled == 0


def test_iterable_error_in_map_leaves_scheduled_work(in_threads: ClusterCoordinator) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        in_threads.map(abs, items())
    in_threads.join(20)
    assert in_threads.snapshot().scheduled == 1


# -- reprs and types ------------------------------------------------------------------------------


def test_repr_has_address_and_state(tmp_path: Path) -> None:
    with (
        zd.local_cluster(workers=2, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        coordinator.workers()
        value = coordinator.submit(waits, tmp_path)
        address = re.escape(coordinator.target)
        assert re.fullmatch(
            rf"<ClusterCoordinator of {address}: 1 unfinished, 2 workers>", repr(coordinator)
        )
        go(tmp_path)
        assert value.result(20) == "x"
        coordinator.close()
        assert re.fullmatch(rf"<ClusterCoordinator of {address}: closed>", repr(coordinator))


def test_repr_without_dispatcher_says_so() -> None:
    with ClusterCoordinator("127.0.0.1:9") as coordinator:
        assert (
            repr(coordinator)
            == "<ClusterCoordinator of zmq://127.0.0.1:9: 0 unfinished, no dispatcher>"
        )


PUBLIC_NAMES = {
    RemoteValue: """
        add_done_callback cancel cancelled done exception fetch get name result status work
    """,
    ClusterCoordinator: """
        actor actors as_completed cancel_all close create_per_worker_dataset create_per_worker_resource
        credentials done failures fetch gather get_actor imap join kill map metrics options per_slot
        remove_worker run scale_workers scatter schedule slots snapshot stream submit target trace wait
        workers
    """,
    Submitter: "actor actors imap map options run stream submit",
}


def test_public_names_are_listed_by_dir() -> None:
    for kind, names in PUBLIC_NAMES.items():
        assert [name for name in dir(kind) if name[0] != "_"] == names.split()


def test_value_has_type_of_its_result(in_threads: ClusterCoordinator) -> None:
    value: RemoteValue[int] = in_threads.submit(int, "3")
    assert value.result(20) + 1 == 4
    assert RemoteValue[int] is not RemoteValue
    assert isinstance(value, RemoteValue)

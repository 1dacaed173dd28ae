"""The queue that closures wait in, after TensorFlow's CoordinatedClosureQueueTest: its cases, one
by one, on a real coordinator.

There a worker takes closures out of the queue, and puts back what it could not run. Here a
dispatcher hands work out: to put back is to end the slot process in which it runs. All with a queue
of two, but for those that need a longer one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import in_thread
from tests.scheduling.work import begun, counts, dies_first, exits, go, starts, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator, RemoteValue, get_current_worker_index


@pytest.fixture
def queue(processes: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(
        processes, queue_max=2, cancel_grace_s=0.2, cluster_lost_limit_s=30.0
    ) as coordinator:
        yield coordinator


class Other(Exception):
    """Not the first error."""


def fails() -> None:
    raise ValueError("Some error.")


def fails_at_go(folder: Path) -> None:
    waits(folder, "fails")
    raise ValueError("Some error.")


def fails_when_cancelled(folder: Path) -> None:
    """Ends some time after it was asked to, and with an error of its own."""
    waits(folder, "other")
    (folder / "ended-other").touch()
    raise Other("Fake cancellation error.")


def dies_or_counts(folder: Path, name: str, times: int) -> str:
    dies_first(folder, name, times, exits)
    return counts(folder, name)


def check_usable(queue: ClusterCoordinator) -> None:
    values = [queue.schedule(int, (str(i),)) for i in range(10)]
    queue.join(20)
    assert queue.fetch(values) == list(range(10))
    assert queue.done()


def test_basic(queue: ClusterCoordinator, tmp_path: Path) -> None:
    """Put, taken, not done, put back, taken again, finished, done."""
    value = queue.schedule(dies_first, (tmp_path, "x", 1, exits))
    gate = queue.schedule(waits, (tmp_path,))
    until(lambda: begun(tmp_path))
    assert not queue.done()
    assert value.get(20) == "x"
    assert not queue.done()
    go(tmp_path)
    queue.join(20)
    assert queue.done()
    assert gate.get() == "x"


def test_process_at_least_once(queue: ClusterCoordinator, tmp_path: Path) -> None:
    """Each worker puts back what it takes first; each label is processed; waiting four times is
    fine."""
    values = [
        queue.schedule(dies_or_counts, (tmp_path, str(i), 1 if i < 2 else 0)) for i in range(5)
    ]
    for _ in range(4):
        queue.join(20)
    assert queue.fetch(values) == ["0", "1", "2", "3", "4"]
    assert all(starts(tmp_path, str(i)) for i in range(5))


def test_join_that_waits_raises_later_error(queue: ClusterCoordinator, tmp_path: Path) -> None:
    queue.schedule(fails_at_go, (tmp_path,))
    until(lambda: begun(tmp_path))
    thread, raised = in_thread(queue.join)
    until(lambda: queue.snapshot().waiting_for_end)
    go(tmp_path)
    thread.join(20)
    assert repr(raised) == "[ValueError('Some error.')]"
    assert queue.done()


@pytest.mark.parametrize(
    "call", [lambda queue: queue.schedule(int), ClusterCoordinator.join], ids=["put", "wait"]
)
def test_schedule_and_join_return_after_running_work(
    queue: ClusterCoordinator, tmp_path: Path, call: Callable[[ClusterCoordinator], Any]
) -> None:
    """testWaitRaiseErrorAfterCancelClosure, testPutRaiseErrorAfterCancelClosure: the second error
    is not the one that is raised."""
    late = queue.schedule(fails_when_cancelled, (tmp_path,), worker=0)
    until(lambda: begun(tmp_path, "other"))
    untaken = queue.schedule(counts, (tmp_path, "untaken"), worker=0)
    bad = queue.schedule(fails, worker=1)
    until(bad.done)
    with pytest.raises(ValueError, match=r"Some error\."):
        call(queue)
    assert (tmp_path / "ended-other").exists(), "the second has ended before"
    assert (queue.snapshot().failed, queue.snapshot().unfinished) == (False, 0)
    assert isinstance(bad.exception(), ValueError)
    assert isinstance(late.exception(0), errors.CancelledError)
    assert isinstance(untaken.exception(0), errors.CancelledError)
    assert starts(tmp_path, "untaken") == 0
    check_usable(queue)


def test_thread_safety(queue: ClusterCoordinator, tmp_path: Path) -> None:
    """Ten threads put a hundred into a queue of two while some are put back; the wait returns, and
    it is done."""

    values: dict[str, RemoteValue] = {}

    def put(number: int) -> None:
        for i in range(10):
            name = f"{number}-{i}"
            values[name] = queue.schedule(
                dies_or_counts, (tmp_path, name, int(name in ("5-5", "7-7")))
            )

    threads = [in_thread(lambda number=number: put(number)) for number in range(10)]  # type: ignore[misc]
    for thread, raised in threads:
        thread.join(60)
        assert raised == [None]
    queue.join(60)
    assert queue.done()
    assert {name: value.get() for name, value in values.items()} == {name: name for name in values}
    assert len(values) == 100


def test_put_and_get_with_tag(queue: ClusterCoordinator, tmp_path: Path) -> None:
    """What is for one worker goes there alone, and what is apart does not count: done although it
    is pending."""
    here = queue.create_per_worker_resource(os.getppid).fetch(20)
    assert len(set(here)) == 2
    pids = {queue.schedule(os.getppid, worker=1).get(20) for _ in range(3)}
    assert pids == {here[1]}
    pending = queue.create_per_worker_resource(waits, (tmp_path,))
    until(lambda: len(begun(tmp_path)) == 2)
    queue.join(20)
    assert queue.done()
    assert not pending[0].done()
    go(tmp_path)
    assert pending.fetch(20) == ["x", "x"]


def test_detached_work_outlives_its_round(queue: ClusterCoordinator, tmp_path: Path) -> None:
    """R-4: its cancellation is separate."""
    value = queue.create_per_worker_resource(waits_on_the_first, (tmp_path,))[0]
    until(lambda: begun(tmp_path))
    until(queue.schedule(fails, worker=1).done)
    with pytest.raises(ValueError, match="Some error"):
        queue.join(20)
    assert not value.done()
    go(tmp_path)
    assert value.get(20) == "x"


def waits_on_the_first(folder: Path) -> str:
    return waits(folder) if get_current_worker_index() == 0 else "y"


def fill(queue: ClusterCoordinator, full: threading.Event) -> list[RemoteValue]:
    """Put work for worker 0 until the test has seen the queue full; the worker may take many."""
    values = []
    while not full.is_set():
        values.append(queue.schedule(int, worker=0))
    return values


def test_full_queue_does_not_hide_error(queue: ClusterCoordinator, tmp_path: Path) -> None:
    for name in ("stuck", "bad"):
        (tmp_path / name).mkdir()
    stuck = queue.schedule(waits, (tmp_path / "stuck",), worker=0)
    queue.schedule(fails_at_go, (tmp_path / "bad",), worker=1)
    until(lambda: begun(tmp_path / "bad") and begun(tmp_path / "stuck"))
    thread, raised = in_thread(lambda: fill(queue, threading.Event()))
    until(lambda: queue.snapshot().waiting_for_room, "it waits for room")
    go(tmp_path / "bad")
    thread.join(20)
    assert repr(raised) == "[ValueError('Some error.')]"
    assert isinstance(stuck.exception(0), errors.CancelledError)
    check_usable(queue)


def test_returned_work_never_waits_for_room(queue: ClusterCoordinator, tmp_path: Path) -> None:
    """The queue is full, and the one worker that could make room has to put back what it runs."""
    first = queue.schedule(dies_at_go, (tmp_path,), worker=0)
    until(lambda: begun(tmp_path))
    full = threading.Event()
    values: list[RemoteValue] = []
    thread, raised = in_thread(lambda: values.extend(fill(queue, full)))
    until(lambda: queue.snapshot().waiting_for_room, "it waits for room")
    full.set()
    go(tmp_path)
    thread.join(20)
    assert raised == [None]
    queue.join(20)
    assert first.get() == "x"
    assert {value.get() for value in values} == {0}


def dies_at_go(folder: Path) -> str:
    waits(folder)
    return dies_first(folder, "x", 1, exits)


def test_late_result_of_cancelled_round_is_dropped(
    queue: ClusterCoordinator, tmp_path: Path
) -> None:
    """The same function, scheduled again in the next round, gives the next round's result, and the
    first one ran to no end."""
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    late = queue.schedule(waits, (tmp_path / "1", "late"), worker=0)
    until(lambda: begun(tmp_path / "1"))
    until(queue.schedule(fails, worker=1).done)
    with pytest.raises(ValueError, match="Some error"):
        queue.join(20)
    go(tmp_path / "1")
    again = queue.schedule(waits, (tmp_path / "2", "again"), worker=0)
    go(tmp_path / "2")
    assert again.get(20) == "again"
    assert isinstance(late.exception(0), errors.CancelledError)

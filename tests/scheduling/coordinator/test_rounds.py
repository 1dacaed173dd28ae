"""schedule, join and done when a function fails: the first error wins and is raised once, and then
nothing runs any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import run_in_threads
from tests.scheduling.work import begun, counts, go, starts, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator, RemoteValue


class First(Exception):
    """The error that has to win."""


class Second(Exception):
    """One that comes later."""


def fails(kind: type[Exception] = First, text: str = "it failed") -> None:
    raise kind(text)


def fails_at_go(folder: Path, kind: type[Exception]) -> None:
    waits(folder, kind.__name__)
    raise kind


def schedules(coordinator: ClusterCoordinator) -> RemoteValue:
    return coordinator.schedule(int)


RAISING_CALLS: list[Callable[[ClusterCoordinator], Any]] = [
    ClusterCoordinator.join,
    ClusterCoordinator.done,
    schedules,
]
each_raising_call = pytest.mark.parametrize("call", RAISING_CALLS, ids=["join", "done", "schedule"])


@pytest.fixture(params=[None, 2], ids=["any queue", "queue of 2"])
def coordinator(
    request: pytest.FixtureRequest, threads: zd.local_cluster
) -> Iterator[ClusterCoordinator]:
    """On three workers."""
    options = {} if request.param is None else {"queue_max": request.param}
    with ClusterCoordinator(threads, cluster_lost_limit_s=5.0, **options) as coordinator:
        yield coordinator


def is_usable(coordinator: ClusterCoordinator) -> bool:
    """The next round is as good as the first."""
    values = [coordinator.schedule(int, (str(i),)) for i in range(5)]
    coordinator.join(20)
    return coordinator.fetch(values) == [0, 1, 2, 3, 4] and coordinator.done()


def first_error(call: Callable[[], Any], within_s: float = 20.0) -> BaseException:
    """Return what `call` raises when it is repeated until it raises."""
    errors_raised: list[BaseException] = []

    def look() -> bool:
        try:
            call()
        except Exception as error:
            errors_raised.append(error)
        return bool(errors_raised)

    until(look, "it raises", within_s)
    return errors_raised[0]


def test_join_without_work_returns_at_once(coordinator: ClusterCoordinator) -> None:
    coordinator.join()
    coordinator.join(0)
    assert coordinator.done()


def test_join_waits_for_all_and_may_be_repeated(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    for _ in range(2):
        for name in range(5):
            coordinator.schedule(counts, (tmp_path, str(name), 0.01))
        for _ in range(3):
            coordinator.join(20)
        assert coordinator.done()
    assert [starts(tmp_path, str(name)) for name in range(5)] == [2] * 5


def test_done_does_not_wait(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    coordinator.schedule(waits, (tmp_path,))
    assert coordinator.done() is False
    go(tmp_path)
    until(coordinator.done)


def test_join_raises_error_once(coordinator: ClusterCoordinator) -> None:
    for _ in range(2):
        good = [coordinator.schedule(int) for _ in range(3)]
        bad = coordinator.schedule(fails)
        with pytest.raises(First, match="it failed") as caught:
            coordinator.join(20)
        assert "in fails" in str(caught.value.__cause__)
        coordinator.join(20)
        assert coordinator.done()
        for value in good:
            assert value.done()
        with pytest.raises(First):
            bad.fetch()
    assert is_usable(coordinator)


def test_schedule_raises_earlier_error_in_the_end(coordinator: ClusterCoordinator) -> None:
    coordinator.schedule(fails)
    assert isinstance(first_error(lambda: coordinator.schedule(int)), First)
    coordinator.join(20)
    assert is_usable(coordinator)


def test_schedule_of_failing_functions_raises_one_error(
    coordinator: ClusterCoordinator,
) -> None:
    assert isinstance(first_error(lambda: coordinator.schedule(fails)), First)
    coordinator.join(20)
    assert is_usable(coordinator)


@each_raising_call
def test_first_error_of_round_is_raised(
    in_threads: ClusterCoordinator, tmp_path: Path, call: Callable[[ClusterCoordinator], Any]
) -> None:
    for name in "12":
        (tmp_path / name).mkdir()
    first = in_threads.schedule(fails_at_go, (tmp_path / "1", First))
    second = in_threads.schedule(fails_at_go, (tmp_path / "2", Second))
    until(lambda: begun(tmp_path / "1") and begun(tmp_path / "2"))
    go(tmp_path / "1")
    until(first.done)
    go(tmp_path / "2")
    until(second.done)
    with pytest.raises(First):
        call(in_threads)
    in_threads.join(20)
    assert is_usable(in_threads)


def test_failure_alone_stops_no_other_work(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    bad = in_threads.schedule(fails_at_go, (tmp_path, First))
    counted = [in_threads.schedule(counts, (tmp_path, str(i))) for i in range(20)]
    go(tmp_path)
    assert isinstance(bad.exception(20), First)
    assert in_threads.fetch(counted) == [str(i) for i in range(20)]
    with pytest.raises(First):
        in_threads.join()


def test_join_waits_for_running_functions_in_threads(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    """And tells it that it may end: `waits` asks `zmqdist.cancelled()`."""
    long = in_threads.schedule(waits, (tmp_path, "long"))
    until(lambda: begun(tmp_path, "long"))
    in_threads.schedule(fails)
    with pytest.raises(First):
        in_threads.join(20)
    assert (tmp_path / "cancelled-long").exists()
    with pytest.raises(errors.CancelledError):
        long.fetch(0)
    assert is_usable(in_threads)


def test_schedule_that_raises_schedules_nothing(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    until(in_threads.schedule(fails).done)
    with pytest.raises(First):
        in_threads.schedule(counts, (tmp_path, "never"))
    in_threads.join(20)
    assert starts(tmp_path, "never") == 0


def test_join_time_out_counts_unfinished_and_stops_nothing(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    values = [in_threads.schedule(waits, (tmp_path, str(i))) for i in range(4)]
    for timeout in (0.02, 0):
        with pytest.raises(TimeoutError, match="4 scheduled functions have not ended after"):
            in_threads.join(timeout)
    go(tmp_path)
    in_threads.join(20)
    assert in_threads.fetch(values) == ["0", "1", "2", "3"]


def test_error_is_raised_in_one_of_several_threads(in_threads: ClusterCoordinator) -> None:
    in_threads.schedule(fails).exception(20)
    outcomes: list[Any] = []
    barrier = threading.Barrier(4)

    def join() -> None:
        barrier.wait()
        try:
            outcomes.append(in_threads.join(20))
        except First as error:
            outcomes.append(error)

    run_in_threads(*[join] * 4)
    assert outcomes.count(None) == 3
    assert sum(isinstance(outcome, First) for outcome in outcomes) == 1


def test_schedule_waits_while_another_thread_joins(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    in_threads.schedule(waits, (tmp_path,))
    joining = threading.Thread(target=in_threads.join, args=(20,))
    joining.start()
    until(lambda: in_threads.snapshot().waiting_for_end)
    order: list[str] = []
    scheduling = threading.Thread(
        target=lambda: order.append(in_threads.schedule(str, ("later",)).get(20))
    )
    scheduling.start()
    assert in_threads.done() is False
    with pytest.raises(
        TimeoutError, match=r"waited 0\.01 s for the join\(\) or schedule\(\) of another thread"
    ):
        in_threads.join(0.01)
    assert not order
    go(tmp_path)
    joining.join(20)
    scheduling.join(20)
    assert order == ["later"]


def test_full_queue_blocks_schedule(tmp_path: Path) -> None:
    with (
        zd.local_cluster(workers=1, processes=False) as cluster,
        ClusterCoordinator(cluster, queue_max=2) as coordinator,
    ):
        values: list[RemoteValue] = []
        scheduling = threading.Thread(
            target=lambda: values.extend(
                coordinator.map(lambda i: waits(tmp_path, str(i)), range(8))
            )
        )
        scheduling.start()
        until(
            lambda: (
                (coordinator.snapshot().scheduled, coordinator.snapshot().waiting_for_room)
                == (4, 1)
            )
        )
        # one runs, its worker holds the next one, two wait, the fifth is kept out
        until(lambda: bool(begun(tmp_path)))
        assert coordinator.snapshot().scheduled == 4
        go(tmp_path)
        scheduling.join(20)
        assert coordinator.fetch(values) == [str(i) for i in range(8)]


def test_join_after_error_waits_no_longer_than_its_time(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    """A function that does not look whether its work is cancelled runs on."""
    begin_end_of_round(in_threads, str(tmp_path), 0.5)
    with pytest.raises(First, match="it failed"):
        in_threads.join(20)
    in_threads.join(float("inf"))
    assert in_threads.schedule(int).fetch(20) == 0


def test_repeated_join_ends_only_its_round(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    """`join` requests the end of a round that is ending already; the next round goes on."""
    for turn in range(100):
        begin_end_of_round(in_threads, str(tmp_path / str(turn)), 0.01)
        # so that `join` requests the end before, at and after the end of the round
        threading.Event().wait(turn / 50_000)
        with pytest.raises(First, match="it failed"):
            in_threads.join(20)
        assert in_threads.schedule(int).fetch(20) == 0


def test_work_scheduled_during_round_end_ends_before_join(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    for turn in range(100):
        begin_end_of_round(in_threads, str(tmp_path / str(turn)), 0.01)
        threading.Event().wait(turn / 50_000)
        later = in_threads.schedule(waits, (tmp_path, f"later{turn}"))
        with pytest.raises(First, match="it failed"):
            in_threads.join(20)
        assert later.done()


_releases: dict[str, tuple[threading.Event, threading.Event]] = {}


def holds_on(key: str) -> None:
    """In a thread: it does not ask whether it should end."""
    holding, release = _releases[key]
    holding.set()
    release.wait(20)


def begin_end_of_round(coordinator: ClusterCoordinator, key: str, timeout: float) -> None:
    """Have `join` time out while a function of the failed round holds on, and release it."""
    holding, release = _releases[key] = threading.Event(), threading.Event()
    coordinator.schedule(holds_on, (key,))
    assert holding.wait(20)
    coordinator.schedule(fails).exception(20)
    with pytest.raises(errors.DeadlineExceededError, match="1 scheduled functions have not ended"):
        coordinator.join(timeout)
    release.set()

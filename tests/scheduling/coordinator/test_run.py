"""`run` calls a function once on every worker."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.work import begun, go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator, get_current_worker_index

pytestmark = pytest.mark.timeout(90)

WORKERS = ["worker:0", "worker:1", "worker:2"]


def fails_on(*indices: int) -> int:
    here = get_current_worker_index()
    if here in indices:
        raise ValueError(f"no disk at {here}")
    return here


def test_function_is_called_once_per_worker(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    def mark(folder: Path, *, fn: str, worker: str) -> int:
        (folder / f"{fn}-{get_current_worker_index()}-{os.urandom(4).hex()}").touch()
        return get_current_worker_index()

    assert in_threads.run(mark, tmp_path, fn="called", worker="x") == dict(
        zip(WORKERS, range(3), strict=True)
    )
    assert sorted(path.name[:8] for path in tmp_path.iterdir()) == [
        "called-0",
        "called-1",
        "called-2",
    ]


def test_errors_of_run_are_by_worker(in_threads: ClusterCoordinator) -> None:
    with pytest.raises(ValueError, match="no disk at 1") as caught:
        in_threads.run(fails_on, 1, 2)
    failures: dict[str, BaseException] = caught.value.failures  # type: ignore[attr-defined]
    assert {name: str(error) for name, error in failures.items()} == {
        "worker:1": "no disk at 1",
        "worker:2": "no disk at 2",
    }
    assert "fails_on at worker:1, attempt 1 on worker:1 (process " in str(caught.value.__cause__)
    in_threads.join(20)  # its errors fail no round
    assert in_threads.submit(int).result(20) == 0


def test_run_waits_for_no_other_work(tmp_path: Path) -> None:
    with (
        zd.local_cluster(1, slots=2, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        running = coordinator.submit(waits, tmp_path)
        until(lambda: begun(tmp_path))
        assert coordinator.run(abs, -1) == {"worker:0": 1}
        assert not running.done()
        go(tmp_path)


def test_kept_values_alone_may_be_arguments(in_threads: ClusterCoordinator) -> None:
    value = in_threads.options(keep=True).submit(list, "abc")
    value.exception(20)
    assert in_threads.run(len, value) == dict.fromkeys(WORKERS, 3)
    with pytest.raises(
        ValueError, match=r"only a RemoteValue of keep=True that has ended can be given to all"
    ):
        in_threads.run(len, in_threads.submit(list, "abc"))
    assert in_threads.submit(len, in_threads.submit(list, "ab")).result(20) == 2


def test_late_call_is_cancelled_and_named(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    hasty = in_threads.options(timeout=0.3, name="probe")
    with pytest.raises(
        errors.DeadlineExceededError, match=r"probe at worker:0 has not ended after 0\.3 s"
    ) as caught:
        hasty.run(waits, tmp_path)
    assert list(caught.value.failures) == WORKERS  # type: ignore[attr-defined]
    until(lambda: (tmp_path / "cancelled-x").exists())
    assert in_threads.run(abs, -1) == dict.fromkeys(WORKERS, 1)


def test_run_without_workers_raises() -> None:
    refusal = pytest.raises(errors.UnavailableError, match=r"run\(\) found no worker: start one")
    with (
        zd.local_cluster(workers=0) as cluster,
        ClusterCoordinator(cluster) as coordinator,
        refusal,
    ):
        coordinator.run(abs, -1)


@pytest.mark.parametrize("option", ["worker", "retries", "keep", "lineage"])
def test_options_without_use_are_refused(in_threads: ClusterCoordinator, option: str) -> None:
    options: Any = {option: {"worker": 0, "retries": 1}.get(option, True)}
    with pytest.raises(
        ValueError, match=rf"run\(\) calls .* it has no use for the option {option}"
    ):
        in_threads.options(**options).run(abs, -1)


def test_uncallable_and_unpicklable_are_refused(
    in_threads: ClusterCoordinator,
) -> None:
    with pytest.raises(TypeError, match="take a callable, not int"):
        in_threads.run(5)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgumentError, match="cannot be pickled"):
        in_threads.run(abs, threading.Lock())
    assert in_threads.run(abs, -1) == dict.fromkeys(WORKERS, 1)


def test_arguments_are_copied_for_workers(in_threads: ClusterCoordinator) -> None:
    argument = [1]
    assert in_threads.run(lambda items: items.append(2) or items, argument) == {
        worker: [1, 2] for worker in WORKERS
    }
    assert argument == [1]


def test_full_queue_does_not_block_run(threads: zd.local_cluster, tmp_path: Path) -> None:
    with ClusterCoordinator(threads, queue_max=1) as coordinator:
        coordinator.submit(waits, tmp_path)
        until(lambda: begun(tmp_path))
        outcomes: list[Any] = []
        runner = threading.Thread(
            target=lambda: outcomes.append(coordinator.options(timeout=30.0).run(abs, -1))
        )
        runner.start()
        go(tmp_path)
        runner.join(30)
        assert outcomes == [dict.fromkeys(WORKERS, 1)]


def test_close_ends_run(threads: zd.local_cluster, tmp_path: Path) -> None:
    with ClusterCoordinator(threads) as coordinator:
        outcomes: list[BaseException] = []

        def run() -> None:
            try:
                coordinator.run(waits, tmp_path)
            except (errors.CancelledError, errors.FailedPreconditionError) as error:
                outcomes.append(error)

        runner = threading.Thread(target=run)
        runner.start()
        until(lambda: len(begun(tmp_path)) > 0)
        coordinator.close()
        runner.join(20)
        assert len(outcomes) == 1
        with pytest.raises(errors.FailedPreconditionError, match="has been closed"):
            coordinator.run(abs, -1)


def test_workers_just_registered_are_called() -> None:
    with (
        zd.local_cluster(workers=1, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        for count in (2, 3, 4):
            cluster.scale(count)
            assert len(coordinator.run(int)) == count

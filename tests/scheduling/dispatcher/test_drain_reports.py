"""Before a worker is drained, the dispatcher says what becomes of everything that the worker
has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import zmqdist as zd
from tests.cli.helpers import Ended, run_here
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.data.service.dispatcher.machine.snapshot import DataTaskRow
from zmqdist.messages import Message, Ping, ResultReceived, WorkDescribed
from zmqdist.scheduling.coordinator import runtime as coordinator_runtime
from zmqdist.scheduling.dispatcher import drain_report
from zmqdist.scheduling.dispatcher.drain_report import DrainReport
from zmqdist.transport.dealer import DealerConnection


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[zd.local_cluster]:
    # On a busy machine a program may need more than the default.
    monkeypatch.setattr(drain_report, "DESCRIBED_S", 20.0)
    with zd.local_cluster(workers=1, slots=2, processes=False) as made:
        yield made


def drain(cluster: zd.local_cluster, *options: str) -> Ended:
    secret = str(cluster.credentials.token_file)
    return run_here(
        "drain",
        cluster.dispatcher.address,
        "worker:0",
        "--token-file",
        secret,
        "--timeout",
        "10",
        *options,
    )


def make(number: int) -> list[int]:
    return [number]


def test_worker_without_values_leaves_at_once(cluster: zd.local_cluster) -> None:
    assert drain(cluster, "--dry-run").out == "worker:0 has nothing to lose\n"
    assert cluster.dispatcher.num_workers == 1
    assert drain(cluster).out == "worker:0 leaves; its running functions have 10 s to end\n"
    assert cluster.dispatcher.wait_for(lambda present: not present, 10.0)


def test_kept_values_without_lineage_refuse_drain(
    cluster: zd.local_cluster,
) -> None:
    with ClusterCoordinator(cluster) as coordinator:
        kept = [coordinator.schedule(make, (number,), keep=True) for number in range(3)]
        again = coordinator.schedule(make, (9,), lineage=True)
        coordinator.join()
        names = ", ".join(
            f"make-{value.work}" for value in sorted(kept, key=lambda value: value.work)
        )
        done = drain(cluster)
        assert done.code == 4
        assert done.out.splitlines() == [
            f"worker:0: lost: 3 kept values that have no lineage: {names}",
            (
                f"worker:0: recomputed: 1 kept value with a lineage, computed again when it is "
                f"needed: make-{again.work}"
            ),
        ]
        assert (
            done.err
            == "zmqdist drain: worker:0 stays, because something would be lost; --force drains it\n"
        )
        assert cluster.dispatcher.num_workers == 1
        assert drain(cluster, "--force").out.endswith(
            "worker:0 leaves; its running functions have 10 s to end\n"
        )


def test_refused_removal_names_lost_values(
    cluster: zd.local_cluster,
) -> None:
    with ClusterCoordinator(cluster) as coordinator:
        kept = coordinator.schedule(make, (1,), keep=True)
        coordinator.join()
        with pytest.raises(errors.DrainRefusedError) as caught:
            coordinator.remove_worker(0)
        assert str(caught.value) == (
            "a drain would lose what only the leaving workers have, so no worker leaves unless "
            "you force it: "
            f"worker:0: 1 kept value that has no lineage: make-{kept.work}"
        )
        assert (caught.value.workers, caught.value.values) == (
            ("worker:0",),
            (f"make-{kept.work}",),
        )
        assert coordinator.workers() == ["worker:0"]
        coordinator.remove_worker(0, force=True)
        assert cluster.dispatcher.wait_for(lambda present: not present, 10.0)


def test_value_just_received_is_in_report(
    cluster: zd.local_cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[tuple[DealerConnection, Message]] = []
    send = DealerConnection.send

    def send_late(dealer: DealerConnection, message: Message, *frames: Any) -> Any:
        if isinstance(message, ResultReceived) and message.keep:
            late.append((dealer, message))
            return True
        if isinstance(message, WorkDescribed):
            while late:
                send(*late.pop(0))
        return send(dealer, message, *frames)

    monkeypatch.setattr(DealerConnection, "send", send_late)
    with ClusterCoordinator(cluster) as coordinator:
        kept = coordinator.schedule(make, (1,), keep=True)
        coordinator.join()
        (report,) = cluster.dispatcher.drain_reports()
        assert (report.lost, report.unknown) == ((f"make-{kept.work}",), 0)


def test_dropped_value_is_in_no_report(cluster: zd.local_cluster) -> None:
    with ClusterCoordinator(cluster) as coordinator:
        value = coordinator.schedule(make, (1,), keep=True)
        coordinator.join()
        del value
        assert drain(cluster, "--dry-run").out == "worker:0 has nothing to lose\n"


def test_report_names_functions_and_resources(cluster: zd.local_cluster) -> None:
    begun, end = threading.Semaphore(0), threading.Event()
    running.begun, running.end = begun, end  # type: ignore[attr-defined]
    with ClusterCoordinator(cluster) as coordinator:
        table = coordinator.create_per_worker_resource(make, (1,))
        runs = [coordinator.schedule(running) for _ in range(2)]
        assert begun.acquire(timeout=10.0)
        assert begun.acquire(timeout=10.0), "the other slot has not begun"
        waits = coordinator.schedule(make, (1,), worker=0)
        try:
            (report,) = wait_for_report(
                cluster, {f"running-{value.work}" for value in runs}, waits.work
            )
        finally:
            end.set()
        coordinator.join()
        del table
    assert set(report.running) == {f"running-{value.work}" for value in runs}
    assert report.pinned == (f"make-{waits.work}",)
    assert report.resources == (
        "the resource of tests.scheduling.dispatcher.test_drain_reports.make",
    )
    assert report.losses == [f"1 function that only worker:0 may run: make-{waits.work}"]


def running() -> None:
    running.begun.release()  # type: ignore[attr-defined]
    running.end.wait(40.0)  # type: ignore[attr-defined]


def wait_for_report(cluster: zd.local_cluster, running: set[str], work: int) -> list[DrainReport]:
    """The report once these functions alone run, and the work item waits for its worker at the
    dispatcher."""
    deadline = time.monotonic() + 30.0
    while True:
        reports = cluster.dispatcher.drain_reports()
        if (
            any(name.endswith(f"-{work}") for name in reports[0].pinned)
            and set(reports[0].running) == running
        ):
            return reports
        assert time.monotonic() < deadline, reports
        threading.Event().wait(0.01)


def test_values_of_silent_program_count_as_lost(
    cluster: zd.local_cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ClusterCoordinator(cluster) as coordinator:
        value = coordinator.schedule(make, (1,), lineage=True)
        coordinator.join()
        monkeypatch.setattr(coordinator_runtime, "described", lambda *_: Ping())
        monkeypatch.setattr(drain_report, "DESCRIBED_S", 0.1)
        monkeypatch.setattr(drain_report, "DESCRIBED_S", 0.1)
        (report,) = cluster.dispatcher.drain_reports()
        assert value.work
    assert report.losses == [
        (
            "1 kept value about which their programs said nothing within 0.1 s, so they may have no "
            "lineage"
        )
    ]


def test_drain_of_missing_worker_is_not_found(cluster: zd.local_cluster) -> None:
    with pytest.raises(errors.NotFoundError, match="no worker worker:7 is registered here"):
        cluster.dispatcher.drain("worker", 7, 1.0)


@pytest.mark.parametrize(
    ("row", "losses", "line"),
    [
        (
            DataTaskRow("train", "FILE", False),
            ["1 data task whose rest no other worker reads: train (FILE)"],
            "lost: 1 data task whose rest no other worker reads: train (FILE)",
        ),
        (
            DataTaskRow("train", "DYNAMIC", True),
            [],
            "read on by other workers: 1 data task: train (DYNAMIC)",
        ),
    ],
)
def test_data_tasks_refuse_drain_by_their_mode(
    row: DataTaskRow, losses: list[str], line: str
) -> None:
    report = DrainReport("worker:0", data=(row,))
    assert report.losses == losses
    assert report.lines == [line]


def test_sentence_has_first_names_and_a_count() -> None:
    report = DrainReport("worker:0", lost=tuple(f"make-{number}" for number in range(12)))
    assert report.lines[0].startswith("lost: 12 kept values that have no lineage: make-0, make-1")
    assert report.lines[0].endswith("make-9 and 2 more")

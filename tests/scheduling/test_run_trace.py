"""The trace of a coordinator: valid whatever happens, and each run where it ran."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling import run_trace as traces

NASTY = '</script>"\\'

SLACK_S = 2.0
"""A run seems to be later by as much as the report of its worker took."""


def square(number: int) -> int:
    return number * number


def inverse(number: int) -> float:
    return 1 / number


class Counter:
    def add(self, count: int) -> int:
        return count


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the reports of workers however busy this host is."""
    monkeypatch.setattr(traces, "LATE_S", 30.0)


@pytest.fixture
def coordinator(cluster: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    with cluster.coordinator() as made:
        yield made


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=2) as made:
        yield made


def events(path: Path, phase: str) -> list[dict[str, Any]]:
    return [row for row in json.loads(path.read_text())["traceEvents"] if row["ph"] == phase]


def test_runs_are_in_rows_of_slots(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with coordinator.trace(path):
        values = [coordinator.options(name=NASTY).submit(square, number) for number in range(20)]
        coordinator.gather(values)
    runs = [row for row in events(path, "X") if row["cat"] == "task"]
    left_out = json.loads(path.read_text())["otherData"]
    assert {row["args"]["work"] for row in runs} == {value.work for value in values}, left_out
    assert {row["name"] for row in runs} == {NASTY}
    assert {row["args"]["outcome"] for row in runs} == {"value"}
    assert {row["args"]["attempt"] for row in runs} <= {1, 2}  # 2 if it moved to an idle worker
    processes = {
        row["pid"]: row["args"]["name"]
        for row in events(path, "M")
        if row["name"] == "process_name"
    }
    assert {processes[row["pid"]] for row in runs} <= {"worker:0", "worker:1"}
    rows = {
        (row["pid"], row["tid"]): row["args"]["name"]
        for row in events(path, "M")
        if row["name"] == "thread_name"
    }
    assert {rows[row["pid"], row["tid"]] for row in runs} == {"slot 0"}
    starts = {row["id"]: row for row in events(path, "s")}
    ends = {row["id"]: row for row in events(path, "f")}
    assert len(starts) == 20
    assert starts.keys() == ends.keys()
    assert all(starts[flow]["ts"] <= ends[flow]["ts"] + SLACK_S * 1e6 for flow in starts)
    for row in runs:
        assert row["args"]["waited_ms"] > -SLACK_S * 1e3
        assert row["args"]["ready_after_ms"] > -SLACK_S * 1e3


def test_first_run_of_a_new_process_is_in_the_trace(
    coordinator: ClusterCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "LATE_S", 5.0)  # the runs that end their process are not reported
    path = tmp_path / "run.json"
    with coordinator.trace(path):
        for _ in range(3):  # each ends its process, the next one is the first of another
            with pytest.raises(errors.OpError):
                coordinator.options(retries=0).submit(os._exit, 3).result()
            assert coordinator.submit(square, 3).result() == 9
            counter = coordinator.actor(Counter)
            assert counter.add(1).result() == 1
    kinds = [row["cat"] for row in events(path, "X") if row["args"].get("outcome") == "value"]
    assert kinds.count("task") == kinds.count("call") == 3


def test_calls_of_actors_are_in_rows_of_classes(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    counter = coordinator.actor(Counter)
    counter.add(1).result()
    with coordinator.trace(path):
        value = counter.add(2)
        value.result()
    (call,) = [row for row in events(path, "X") if row["cat"] == "call"]
    assert call["args"]["work"] == value.work
    rows = [row for row in events(path, "M") if row.get("tid") == call["tid"]]
    assert any("actor" in str(row["args"].get("name")) for row in rows)


def test_error_of_program_leaves_a_valid_file(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(ZeroDivisionError), coordinator.trace(path):
        coordinator.submit(inverse, len(events(path, "X"))).result()  # it is valid now, too
    (run,) = [row for row in events(path, "X") if row["cat"] == "task"]
    assert run["args"]["outcome"] == "error"


def test_file_is_bounded(
    coordinator: ClusterCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "RUNS_MAX", 5)
    path = tmp_path / "run.json"
    with coordinator.trace(path):
        coordinator.gather(coordinator.map(square, range(12)))
    assert len([row for row in events(path, "X") if row["cat"] == "task"]) == 5
    assert json.loads(path.read_text())["otherData"]["work_left_out"] == 7


def test_second_trace_is_refused(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    with (
        coordinator.trace(tmp_path / "run.json"),
        pytest.raises(errors.FailedPreconditionError, match="records a trace already"),
        coordinator.trace(tmp_path / "other.json"),
    ):
        pass
    with coordinator.trace(tmp_path / "other.json"):
        pass


def test_unwritable_path_fails_at_once(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), coordinator.trace(tmp_path / "no" / "run.json"):
        pass
    assert coordinator.submit(square, 2).result() == 4


def test_lost_dispatcher_leaves_a_valid_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with zd.local_cluster(workers=1) as cluster, cluster.coordinator() as coordinator:
        with coordinator.trace(path):
            coordinator.submit(square, 3).result()
            cluster.dispatcher.stop()
        assert [row["name"].rpartition(".")[2] for row in events(path, "X")][:1] == ["square"]


def test_trace_at_a_folder_is_refused_and_leaves_none(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(IsADirectoryError, match="runs"), coordinator.trace(tmp_path / "runs"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_trace_stays_where_the_program_began(
    coordinator: ClusterCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with coordinator.trace("run.json"):
        monkeypatch.chdir("/")
        coordinator.submit(square, 2).result()
    assert len([row for row in events(tmp_path / "run.json", "X") if row["cat"] == "task"]) == 1


def test_trace_of_a_closed_coordinator_leaves_no_file(
    cluster: zd.local_cluster, tmp_path: Path
) -> None:
    coordinator = cluster.coordinator()
    coordinator.close()
    trace = coordinator.trace(tmp_path / "run.json")
    with pytest.raises(errors.FailedPreconditionError, match="has been closed"), trace:
        pass
    assert [*tmp_path.iterdir()] == []

"""The facts of a cluster of real processes: what runs where, what failed, what the slots use."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.connection import DispatcherClient
from zmqdist.observe import status

HELD_BYTES = 100_000_000


def hangs(folder: Path) -> None:
    held = bytearray(HELD_BYTES)
    held[::4096] = b"x" * len(held[::4096])
    (folder / "began").touch()
    while not (folder / "open").exists():
        time.sleep(0.01)


def fails(number: int) -> None:
    raise ValueError(f"bad {number}")


def noop() -> None:
    pass


def echoes(data: bytes) -> bytes:
    return data


def dies() -> None:
    print("the last words", file=sys.stderr, flush=True)
    os._exit(7)


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, count: int) -> int:
        self.total += count
        return self.total

    def fail(self) -> None:
        raise RuntimeError("no count")


class Waiter:
    async def wait(self, seconds: float) -> float:
        import asyncio

        await asyncio.sleep(seconds)
        return seconds


@pytest.fixture(scope="module")
def coordinator(cluster: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(cluster) as made:
        made.submit(noop).result(20)  # makes its connections
        yield made


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=2) as made:
        made.status()  # makes its connection
        yield made


def facts(cluster: zd.local_cluster, *, timeline: bool = False) -> dict[str, Any]:
    address = cluster.target.removeprefix("zmq://")
    with DispatcherClient(address, cluster.credentials, "client", 20.0) as client:
        return dict(client.call("facts", 0, timeline))


def row_of(cluster: zd.local_cluster, function: str) -> dict[str, Any]:
    rows = facts(cluster)["functions"]
    return next((row for row in rows if row["name"].endswith(function)), {"count": 0})


def test_status_shows_what_hangs_and_what_failed(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    hanging = coordinator.submit(hangs, tmp_path)
    until((tmp_path / "began").exists)
    for number in range(5):
        with pytest.raises(ValueError, match="bad"):
            coordinator.submit(fails, number).result(20)

    def slot() -> dict[str, Any] | None:
        slots = [slot for row in facts(cluster)["workers"] for slot in row["slots_now"]]
        return next((slot for slot in slots if slot["rss_bytes"] > HELD_BYTES), None)

    running = until(slot)
    assert running["function"].endswith("hangs")
    assert running["state"] == "running"
    assert (running["work"], running["pid"] > 0) == (hanging.work, True)
    until(lambda: (later := slot()) and later["since_s"] > running["since_s"] > 0)
    record = facts(cluster)
    failures = [entry for entry in record["failures"] if entry["function"].endswith("fails")]
    assert [entry["message"] for entry in failures] == [f"bad {number}" for number in range(5)]
    assert failures[0]["error"] == "ValueError"
    assert "in fails" in failures[0]["traceback"]
    assert "function_call" not in failures[0]["traceback"]
    text = "\n".join(status.lines(status.checked(record)))
    assert "hangs" in text
    assert "ValueError: bad 4" in text
    until(lambda: row_of(cluster, "fails").get("failed") == 5)
    (tmp_path / "open").touch()
    hanging.result(20)


def test_figures_of_function_count_every_run(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator
) -> None:
    coordinator.gather(coordinator.map(noop_of, range(3000)))
    until(lambda: row_of(cluster, "noop_of")["count"] == 3000)
    row = row_of(cluster, "noop_of")
    assert 0 < row["p50_s"] <= row["p99_s"] <= row["max_s"] < 20
    assert row["cpu_s"] > 0
    totals = facts(cluster)["totals"]
    assert totals["submitted"] >= 3000


def noop_of(_: int) -> None:
    pass


def test_bytes_of_large_arguments_and_results_count(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator
) -> None:
    assert len(coordinator.submit(echoes, bytes(1_000_000)).result(20)) == 1_000_000
    row = until(lambda: (row := row_of(cluster, "echoes"))["count"] and row)
    assert row["bytes_in"] >= 1_000_000
    assert row["bytes_out"] >= 1_000_000


def test_slot_that_dies_leaves_its_last_words(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator
) -> None:
    with pytest.raises(errors.WorkerLost):
        coordinator.submit(dies).result(30)
    deaths = [death for death in facts(cluster)["slot_deaths"] if death["exit_code"] == 7]
    assert len(deaths) == 3
    assert deaths[-1]["function"].endswith("dies")
    assert "the last words" in deaths[-1]["last_lines"]
    (failure,) = [entry for entry in facts(cluster)["failures"] if entry["error"] == "WorkerLost"]
    assert failure["function"].endswith("dies")


def test_actor_has_figures_and_failures(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator
) -> None:
    actor = coordinator.actor(Counter)
    for _ in range(10):
        actor.add(1).result(20)
    with pytest.raises(RuntimeError):
        actor.fail().result(20)

    def row() -> dict[str, Any] | None:
        rows = facts(cluster)["actors"]
        return next((row for row in rows if row["cls"] == "Counter" and row["calls"] == 11), None)

    found = until(row)
    assert (found["failed"], found["waiting"]) == (1, 0)
    assert found["rss_bytes"] > 0
    assert 0 < found["p50_s"] <= found["p99_s"]
    assert row_of(cluster, "Counter.add")["count"] == 10
    (failure,) = [e for e in facts(cluster)["failures"] if e["function"] == "Counter.fail"]
    assert (failure["error"], failure["message"]) == ("RuntimeError", "no count")
    coordinator.kill(actor)


def test_calls_of_asynchronous_actor_have_durations(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator
) -> None:
    actor = coordinator.actor(Waiter)
    calls = [actor.wait(0.05) for _ in range(3)]
    assert [call.result(20) for call in calls] == [0.05] * 3
    row = until(lambda: (row := row_of(cluster, "Waiter.wait"))["count"] == 3 and row)
    assert row["p50_s"] >= 0.04
    coordinator.kill(actor)


def test_timeline_has_runs_while_it_is_watched(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator
) -> None:
    def runs() -> list[Any]:
        coordinator.submit(noop).result(20)
        events = facts(cluster, timeline=True)["timeline"]["events"]
        return [run for run in events if run[4].endswith("noop")]

    run = until(runs)[-1]
    assert run[5].startswith("worker:")
    assert run[9] <= run[10] <= time.time() + 1
    assert run[11:13] == ["value", "task"]
    assert 0 < run[7] <= run[13] <= run[8] <= run[9]


def test_threads_have_figures_too() -> None:
    with (
        zd.local_cluster(workers=1, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        coordinator.submit(noop).result(20)
        with pytest.raises(ValueError, match="bad"):
            coordinator.submit(fails, 1).result(20)
        until(lambda: row_of(cluster, "noop")["count"] == 1)
        (failure,) = facts(cluster)["failures"]
        assert failure["message"] == "bad 1"


def test_work_that_waits_for_input_is_counted(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    first = coordinator.submit(hangs, tmp_path)
    last = coordinator.submit(str, first)
    until(lambda: [row for row in facts(cluster)["waiting"] if row["reason"] == "input"])
    (tmp_path / "open").touch()
    assert last.result(20) == "None"


def test_program_has_name_and_pid(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator
) -> None:
    coordinator.submit(noop).result(20)
    rows = facts(cluster)["coordinators"]
    assert os.getpid() in [row["pid"] for row in rows]

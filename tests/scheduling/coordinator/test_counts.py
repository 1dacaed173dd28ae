"""What scheduling much work costs, as counts on real processes: messages, pickles, and what is left
afterwards."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import functions_sent, record_sent, stalled
from tests.scheduling.work import until
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.limits import BATCH_ITEMS_MAX
from zmqdist.messages import Submit

WORKS = 2 * BATCH_ITEMS_MAX + 1


class Noted:
    """Says in which process it was unpickled, each time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, number: int) -> int:
        return number

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with (self.folder / f"unpickled-{os.getpid()}").open("ab") as file:
            file.write(b".")


def test_busy_loop_submits_in_full_messages(
    in_processes: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stalled(in_processes, monkeypatch) as sent:
        values = in_processes.map(abs, range(WORKS))
    assert in_processes.fetch(values) == list(range(WORKS))
    counts = [len(message.items) for message in sent if isinstance(message, Submit)]
    assert counts == [BATCH_ITEMS_MAX, BATCH_ITEMS_MAX, 1]


def test_function_is_pickled_sent_and_unpickled_once(
    in_processes: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = record_sent(monkeypatch)
    text = "".join(["it is ", "another one each time that it is unpickled"])

    def plain(_: int) -> int:
        from tests.scheduling import work

        met = work.__dict__.setdefault("met", {})
        met[id(text)] = text  # so it lives, and nothing else has its id
        return len(met)

    before = in_processes.snapshot().functions_pickled
    assert in_processes.fetch(in_processes.map(plain, range(WORKS))) == [1] * WORKS
    assert in_processes.snapshot().functions_pickled == before + 1
    assert functions_sent(sent) == [1]


def test_mutable_capture_is_unpickled_for_each_run(
    in_processes: ClusterCoordinator, tmp_path: Path
) -> None:
    noted = functools.partial(Noted(tmp_path))
    assert in_processes.fetch(in_processes.map(noted, range(WORKS))) == list(range(WORKS))
    assert sum(path.stat().st_size for path in tmp_path.glob("unpickled-*")) == WORKS


def test_tables_are_empty_after_results_are_fetched(
    in_processes: ClusterCoordinator, processes: zd.local_cluster
) -> None:
    values = in_processes.map(abs, range(WORKS))
    in_processes.join(20)
    assert in_processes.fetch(values) == list(range(WORKS))
    snapshot = in_processes.snapshot()
    assert (snapshot.unfinished, snapshot.queued, snapshot.records) == (0, 0, 0)
    assert (snapshot.held.parts, snapshot.kept) == (0, 0)

    def is_empty() -> bool:
        snapshot = processes.dispatcher.snapshot()
        workers = sum(row.leases + row.running for row in snapshot.workers)
        return (
            snapshot.queued
            + workers
            + sum(row.out + row.held + row.queued for row in snapshot.coordinators)
            == 0
        )

    until(is_empty)

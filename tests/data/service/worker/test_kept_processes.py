"""Processes that are kept after their last task: which task runs in them, and when they end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.data.service.helpers import Service, serving, until
from tests.data.service.test_shared_processes import FakeProcesses
from tests.data.service.worker.test_task_process import process_of, worker_process
from zmqdist.data.dataset import Dataset
from zmqdist.data.service.worker import task_process
from zmqdist.data.service.worker.task_orders import tasks_ended
from zmqdist.data.service.worker.task_process import KEPT_MAX
from zmqdist.scheduling.shared.config import DispatcherConfig
from zmqdist.servers.dispatch_server import DispatchServer
from zmqdist.transport.memory_limits import is_alive

PIDS = Dataset.range(1).map(process_of)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProcesses]:
    monkeypatch.setattr(task_process, "SPARE_S", 600.0)
    made = FakeProcesses(4)
    yield made
    made.close()


def end_code(fakes: FakeProcesses, child: int, count: int = 1) -> None:
    """Report that user code of `count` tasks has ended, as the process does."""
    with tasks_ended(fakes.children[child].memory) as ended:
        ended[0] = count


def test_next_task_of_dataset_runs_in_kept_process(fakes: FakeProcesses) -> None:
    for number in range(4000, 4003):
        fakes.begin(number)
        assert len(fakes.children) == 1
        end_code(fakes, 0, number - 3999)
        fakes.loop.run(fakes.tasks.drop, number)


def test_process_whose_user_code_runs_takes_no_task(fakes: FakeProcesses) -> None:
    fakes.begin(4000)
    fakes.loop.run(fakes.tasks.drop, 4000)
    fakes.begin(4001)
    assert fakes.running() == [0, 1]


def test_worker_keeps_a_bounded_number_of_processes(fakes: FakeProcesses) -> None:
    for number in range(KEPT_MAX + 1):
        fakes.begin(number)
    for number in range(KEPT_MAX + 1):
        fakes.loop.run(fakes.tasks.drop, number)
    assert fakes.children[0].read_orders() == 1  # up to the end of the orders
    assert len(fakes.loop.run(lambda: fakes.tasks.kept)) == KEPT_MAX


def test_leaving_worker_keeps_no_process(fakes: FakeProcesses) -> None:
    for number in (4000, 4001):
        fakes.begin(number)
    fakes.loop.run(fakes.tasks.drop, 4000)
    fakes.loop.run(fakes.tasks.leave)
    assert fakes.children[0].read_orders() == 1
    fakes.loop.run(fakes.tasks.drop, 4001)
    assert fakes.children[1].read_orders() == 1


def test_kept_process_ends_after_its_time(
    fakes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_process, "KEPT_S", 0.0)
    fakes.begin(4000)
    fakes.loop.run(fakes.tasks.drop, 4000)
    assert fakes.children[0].read_orders() == 1


@pytest.fixture
def spared(fakes: FakeProcesses, monkeypatch: pytest.MonkeyPatch) -> FakeProcesses:
    """A worker that runs a task and has a spare process."""
    monkeypatch.setattr(task_process, "SPARE_S", 0.0)
    fakes.begin(4000)
    until(lambda: len(fakes.children) == 2, "a spare process")
    return fakes


def test_next_task_runs_in_spare_process(spared: FakeProcesses) -> None:
    spared.begin(4001)
    until(lambda: len(spared.children) == 3, "the next spare process")
    assert spared.running() == [1, 1, 0]


def test_idle_spare_process_ends(fakes: FakeProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_process, "SPARE_S", 0.0)
    monkeypatch.setattr(task_process, "SPARE_KEPT_S", 0.0)
    fakes.begin(4000)
    until(lambda: len(fakes.children) == 2, "a spare process")
    assert fakes.children[1].read_orders() == 0  # up to the end of the orders
    assert fakes.loop.run(lambda: fakes.tasks.spare) is None


def test_dead_spare_process_gets_no_task(spared: FakeProcesses) -> None:
    spared.loop.run(spared.exits[1], -9)
    assert spared.running() == [1]
    spared.begin(4001)
    assert spared.running()[:2] == [1, 1]


def test_leaving_worker_ends_spare_process(spared: FakeProcesses) -> None:
    spared.loop.run(spared.tasks.leave)
    assert spared.children[1].read_orders() == 0
    spared.loop.run(spared.exits[1], 0)
    spared.begin(4001)
    assert spared.running() == [1, 1]
    assert len(spared.children) == 3


@pytest.mark.processes("data service")
def test_new_iterators_of_a_dataset_share_processes() -> None:
    seen: set[int] = set()
    with serving() as service:
        dataset = service.whole(PIDS)

        def read() -> bool:
            """Read, and return whether an earlier iterator had the same process."""
            pid = int(next(iter(dataset)))
            found = pid in seen
            seen.add(pid)
            return found

        until(read, "a kept process")


@pytest.mark.processes("data service")
def test_new_dataset_gets_another_process() -> None:
    with serving() as service:
        first = {int(next(iter(service.whole(PIDS)))) for _ in range(5)}
        second = int(next(iter(service.whole(Dataset.range(2).map(process_of)))))
    assert second not in first


@pytest.mark.processes("data service")
def test_kept_processes_end_with_killed_worker() -> None:
    with DispatchServer(DispatcherConfig()) as dispatcher, worker_process(dispatcher) as worker:
        pid = int(next(iter(Service(dispatcher, []).whole(PIDS))))
        worker.kill()
        until(lambda: not is_alive(pid), "the end of the kept process")

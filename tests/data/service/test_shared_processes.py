"""Tasks that share a process, because the worker has as many processes as it may: what they share,
and what dies with what."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.data.service.helpers import Service, serving, until
from tests.data.service.worker.test_task_process import process_of, read_all
from zmqdist.data.dataset import Dataset
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service.dispatcher.machine.records import DYNAMIC
from zmqdist.data.service.task_errors import describe_exit
from zmqdist.data.service.worker import task_process
from zmqdist.data.service.worker.task_orders import ROWS_BYTES, progress_of_replies
from zmqdist.data.service.worker.task_process import TaskProcesses
from zmqdist.data.service.worker.tasks_machine import WorkerTask, WorkerTaskState
from zmqdist.errors import UnavailableError, UnknownError
from zmqdist.limits import TASK_PROCESSES_PER_CORE
from zmqdist.transport.loop import Loop

PIDS = Dataset.range(1_000_000).map(process_of)
KILLED_AT = 500


def dies_at_one_element(x: Any) -> Any:
    if int(x) == KILLED_AT:
        ctypes.string_at(0)
    return x


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """One worker whose tasks share one process."""
    monkeypatch.setattr(task_process, "cores", lambda: 1 / TASK_PROCESSES_PER_CORE)
    with serving() as found:
        yield found


class FakeChild:
    """A process that only notes whether it was killed."""

    def __init__(self, descriptors: list[int]) -> None:
        self.orders = socket.socket(fileno=os.dup(descriptors[0]))
        self.memory = mmap.mmap(descriptors[1], ROWS_BYTES)
        for descriptor in descriptors:
            os.close(descriptor)
        self.killed = False

    def read_orders(self) -> int:
        """Read the first message, which has no descriptors, and the orders up to the end of the
        socket. Return the number of orders."""
        number = 0
        self.orders.recv(1 << 16)
        while descriptors := socket.recv_fds(self.orders, 1, 3)[1]:
            number += 1
            for descriptor in descriptors:
                os.close(descriptor)
        return number

    def kill(self) -> None:
        self.killed = True

    def tail(self) -> str:
        return ""


def task_of(number: int, *, ordered: bool = False) -> WorkerTask:
    terms = ("1000", DYNAMIC, 0, "AUTO", False, "at_most_once", ordered)
    return WorkerTask([number, 2000, "1000", "fingerprint", terms, 1, 0, 0, -1, "job", 0])


class FakeProcesses:
    """TaskProcesses whose processes are FakeChildren."""

    def __init__(self, processes_max: int) -> None:
        self.loop = Loop("test")
        self.children: list[FakeChild] = []
        self.exits: list[Any] = []
        self.tasks = TaskProcesses(self.loop, self._spawn, "127.0.0.1", "127.0.0.1:1", 1, 1.0)
        self.tasks.address = "127.0.0.1:2"
        self.tasks.processes_max = processes_max
        self.tasks.crashed = self._crashed
        self.reports: list[tuple[int, str]] = []
        self.confirm: list[Any] = []
        self.loop.start()

    def _spawn(self, descriptors: Any, exited: Any) -> Any:
        self.children.append(FakeChild(list(descriptors)))
        self.exits.append(exited)
        return self.children[-1]

    def _crashed(self, number: int, how: str, then: Any) -> None:
        self.reports.append((number, how))
        self.confirm.append(then)

    def begin(self, number: int, *, portioned: bool = False) -> WorkerTask:
        """Begin a task, and have a reader connect."""
        task = task_of(number, ordered=portioned)
        self.loop.run(self.tasks.begin, task)
        self.connect(number)
        return task

    def connect(self, number: int) -> None:
        """Connect as a reader does, and wait until a process has the task."""
        before = self.running()
        host, port = self.loop.run(self.tasks.location, number).split(":")
        with socket.create_connection((host, int(port))):
            until(lambda: self.running() != before, "the task in a process")

    def running(self) -> list[int]:
        """The number of tasks of each process."""
        return self.loop.run(lambda: [len(process.tasks) for process in self.tasks.processes])

    def close(self) -> None:
        self.loop.run(self.tasks.close)
        self.loop.stop()
        for child in self.children:
            child.orders.close()
            child.memory.close()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProcesses]:
    monkeypatch.setattr(task_process, "SPARE_S", 600.0)
    made = FakeProcesses(2)
    yield made
    made.close()


def test_task_joins_process_with_fewest_tasks(
    fakes: FakeProcesses,
) -> None:
    first = fakes.begin(4000)
    for number in range(4001, 4005):
        fakes.begin(number)
    assert fakes.running() == [3, 2]
    fakes.loop.run(fakes.tasks.drop, 4003)
    first.enter(WorkerTaskState.DONE)
    fakes.begin(4005)
    assert fakes.running() == [3, 2]
    fakes.begin(4006)
    assert sum(fakes.running()) == 6
    assert len(fakes.children) == 2


def test_process_ends_with_its_last_task(fakes: FakeProcesses) -> None:
    for number in range(4000, 4004):
        fakes.begin(number)
    fakes.loop.run(fakes.tasks.drop, 4000)
    assert fakes.running() == [1, 2]
    fakes.loop.run(fakes.tasks.drop, 4002)
    assert fakes.children[0].read_orders() == 2
    assert fakes.loop.run(lambda: fakes.tasks.unsent)
    fakes.begin(4004)
    assert len(fakes.children) == 3  # no task joins a process that ends


def test_process_with_stuck_replies_is_killed(
    fakes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_process, "END_S", 0.01)
    fakes.begin(4000)
    (child,) = fakes.children
    moves = 50

    def move() -> None:
        nonlocal moves
        if moves:
            moves -= 1
            with progress_of_replies(child.memory) as progress:
                progress[0] += 1

    fakes.loop.at_end_of_turn(move)
    fakes.loop.run(fakes.tasks.drop, 4000)
    until(lambda: moves < 10 or child.killed, "several looks at the process")
    assert not child.killed
    until(lambda: child.killed, "its end")
    assert not moves


def test_tasks_run_alone_after_shared_crash(
    fakes: FakeProcesses,
) -> None:
    for number in range(4000, 4004):
        fakes.begin(number, portioned=True)
    fakes.loop.run(fakes.exits[0], -signal.SIGKILL)
    assert fakes.reports == [(4000, ""), (4002, "")]
    for confirm in fakes.confirm:
        fakes.loop.run(confirm)
    until(
        lambda: fakes.running() == [2, 1, 1],
        "two more processes, because the readers still wait at the ports",
    )
    fakes.loop.run(fakes.exits[2], -signal.SIGKILL)
    assert fakes.reports[2:] == [(4000, describe_exit(-signal.SIGKILL))]


def test_task_waits_for_next_process(fakes: FakeProcesses) -> None:
    fakes.begin(4000)
    fakes.begin(4001)
    for child in fakes.children:
        child.orders.close()  # the worker has not heard of the crash yet
    fakes.loop.run(fakes.tasks.begin, task_of(4002))
    host, port = fakes.loop.run(fakes.tasks.location, 4002).split(":")
    with socket.create_connection((host, int(port))):
        fakes.loop.run(fakes.exits[0], -signal.SIGKILL)
        until(lambda: len(fakes.children) == 3, "a process for the task")


def test_ended_reader_leaves_shared_process_running(
    service: Service,
) -> None:
    with iter(service.dealt(PIDS)) as stays:
        (first,) = {int(next(stays)) for _ in range(10)}
        descriptors = len(os.listdir(f"/proc/{first}/fd"))
        for _ in range(3):
            with iter(service.dealt(PIDS)) as ends:
                assert int(next(ends)) == first
        until(lambda: service.workers[0].num_tasks == 1, "the end of the tasks")
        assert {int(next(stays)) for _ in range(10)} == {first}
        # No pipe, page, listening socket or connection of a task that has ended stays open in the
        # shared process.
        until(
            lambda: len(os.listdir(f"/proc/{first}/fd")) <= descriptors,
            "the end of their descriptors",
        )


def test_killed_shared_process_is_one_error_per_reader(service: Service) -> None:
    with contextlib.ExitStack() as stack:
        iterators: list[DatasetIterator] = [
            stack.enter_context(iter(service.dealt(PIDS))) for _ in range(3)
        ]
        (first,) = {int(next(iterator)) for iterator in iterators}
        os.kill(first, signal.SIGKILL)
        later = set()
        for iterator in iterators:
            problems, pid = [], first
            while pid == first:
                try:
                    pid = int(next(iterator))
                except UnknownError as error:
                    problems.append(str(error))
            assert len(problems) == 1
            assert "SIGKILL" in problems[0]
            assert "shared with 2 more" in problems[0]
            later.add(pid)
        assert len(later) == 3


def test_whole_iteration_ends_with_shared_process(service: Service) -> None:
    with iter(service.whole(PIDS)) as whole, iter(service.whole(PIDS.repeat())) as other:
        first = int(next(whole))
        assert int(next(other)) == first
        os.kill(first, signal.SIGKILL)
        for iterator in (whole, other):
            with pytest.raises(UnknownError, match=r"SIGKILL[^$]*cannot go on"):
                list(iterator)


def test_deadly_function_costs_neighbours_nothing(service: Service) -> None:
    with iter(service.dealt(Dataset.range(30_000), delivery="exactly_once")) as beside:
        found = [int(next(beside))]
        killer = service.dealt(
            Dataset.range(1000).map(dies_at_one_element), delivery="exactly_once"
        )
        with pytest.raises(
            UnavailableError, match=r"3 processes died while they computed positions 4\d\d to 5\d\d"
        ):
            list(killer)
        found += [int(x) for x in beside]
    assert sorted(found) == list(range(30_000))
    assert read_all(service.dealt(Dataset.range(3))) == ([0, 1, 2], [])

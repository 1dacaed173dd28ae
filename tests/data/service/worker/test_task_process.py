"""Tasks of the data service in processes of their own: what dies with what, what readers are told,
and what goes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.data.service.helpers import Service, serving, until
from tests.zygote import ServerProcess
from zmqdist.data.dataset import Dataset
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service.client import from_dataset_id, register_dataset
from zmqdist.data.service.worker import task_process
from zmqdist.data.service.worker.task_process import CRASHES_MAX, TaskProcesses
from zmqdist.data.service.worker.task_threads import TaskThreads
from zmqdist.data.service.worker.tasks_machine import WorkerTask
from zmqdist.errors import UnknownError
from zmqdist.limits import HEARTBEAT_SERVER_S
from zmqdist.rpc.service import RpcService
from zmqdist.scheduling.shared.config import DispatcherConfig
from zmqdist.servers.dispatch_server import DispatchServer
from zmqdist.transport import dealer
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop
from zmqdist.transport.memory_limits import is_alive

READ_ALL = 60_000


def process_of(x: Any) -> int:
    return os.getpid()


def dies_at(values: set[int], how: Callable[[], None]) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        if int(x) in values:
            how()
        return x

    return step


def read_all(dataset: Dataset) -> tuple[list[int], list[UnknownError]]:
    """What came, and the errors between."""
    with iter(dataset) as iterator:
        return read_rest(iterator)


def read_rest(iterator: DatasetIterator) -> tuple[list[int], list[UnknownError]]:
    found: list[int] = []
    problems: list[UnknownError] = []
    while True:
        try:
            for x in iterator:
                found.append(int(x))
            return found, problems
        except UnknownError as error:
            problems.append(error)


@contextlib.contextmanager
def worker_process(dispatcher: DispatchServer) -> Iterator[ServerProcess]:
    """A worker with process slots, in a process that can be killed."""
    process = ServerProcess("worker", dispatcher_address=dispatcher.address, processes=True)
    try:
        yield process
    finally:
        process.kill()


@pytest.mark.processes("data service")
def test_user_code_runs_in_a_process_for_each_task() -> None:
    with serving(workers=2) as service:
        pids = {int(pid) for pid in service.whole(Dataset.range(10).map(process_of))}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_elements_of_reader_keep_order() -> None:
    with serving() as service:
        assert [int(x) for x in service.whole(Dataset.range(20_000))] == list(range(20_000))


def test_large_elements_arrive_whole() -> None:
    with serving() as service:
        found = list(service.whole(Dataset.range(4).map(lambda x: np.full(1 << 18, x))))
    assert [int(each[0]) for each in found] == [0, 1, 2, 3]
    assert all((each == each[0]).all() for each in found)


def test_tasks_draw_numbers_of_their_own() -> None:
    with serving(workers=1) as service:
        drawn = [
            float(next(iter(service.whole(Dataset.range(1).map(lambda x: np.random.random())))))
            for _ in range(2)
        ]
    assert drawn[0] != drawn[1]


def test_connection_of_task_process_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle process costs the dispatcher as few heartbeats as a worker does."""
    seen: list[float] = []
    monkeypatch.setattr(dealer, "configure", lambda socket, heartbeat_s: seen.append(heartbeat_s))
    loop = Loop("test")
    loop.start()
    with DispatchServer(DispatcherConfig()) as dispatcher:
        tasks = TaskThreads(loop, RpcService("task"), dispatcher.address, Credentials(), 1, 1.0)
        tasks.connect()
        until(lambda: seen, "an attempt to connect")
        assert set(seen) == {HEARTBEAT_SERVER_S}
        loop.run(tasks.close)
    loop.stop()


@contextlib.contextmanager
def task_without_process() -> Iterator[tuple[Loop, tuple[str, int], list[Callable[[int], None]]]]:
    """Yield the loop, the address of a task, and a function for each process that was ordered; the
    function reports the end of the process, which never runs."""
    exits: list[Callable[[int], None]] = []
    with contextlib.ExitStack() as stack:

        def spawn(descriptors: Any, exited: Callable[[int], None]) -> Any:
            exits.append(exited)
            for descriptor in descriptors:
                stack.callback(os.close, descriptor)
            return SimpleNamespace(tail=lambda: "")

        loop = Loop("test")
        stack.callback(loop.stop)
        tasks = TaskProcesses(loop, spawn, "127.0.0.1", "127.0.0.1:1", 1, 1.0)
        tasks.address = "127.0.0.1:2"
        loop.start()
        stack.callback(loop.run, tasks.close)
        told = [4000, 2000, "1000", "fingerprint", ("1000", 0), 0, 0, 0, -1, "job", 0]
        loop.run(lambda: tasks.begin(WorkerTask(told)))
        host, port = tasks.location(4000).split(":")
        yield loop, (host, int(port)), exits


def test_unread_task_has_no_process() -> None:
    with task_without_process() as (_, address, exits):
        assert not exits
        with socket.create_connection(address):
            until(lambda: exits, "a process for the task")


def test_crashes_in_a_row_cost_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process lives where there is no memory for one; the reader still waits for elements."""
    pauses_s: list[float] = []

    def next_pause_s(pause_s: float) -> float:
        pauses_s.append(pause_s)
        return pause_s + 0.001

    monkeypatch.setattr(task_process, "next_pause_s", next_pause_s)
    with (
        task_without_process() as (loop, address, exits),
        socket.create_connection(address),
    ):
        for count in range(1, 5):
            until(lambda count=count: len(exits) >= count, "a process for the task")
            loop.run(exits[count - 1], 1)
    assert pauses_s == pytest.approx([0.0, 0.001, 0.002, 0.003])


def test_segfault_costs_only_its_task() -> None:
    with serving() as service:
        with pytest.raises(UnknownError) as caught:
            list(service.whole(Dataset.range(10).map(dies_at({5}, lambda: ctypes.string_at(0)))))
        text = str(caught.value)
        assert "SIGSEGV" in text
        assert "dataset 1000" in text
        assert service.workers[0].advertised_address in text
        assert "Fatal Python error: Segmentation fault" in text
        assert "dies_at" in text or "step" in text
        assert [int(x) for x in service.whole(Dataset.range(3))] == [0, 1, 2]


def test_whole_iteration_ends_with_crash() -> None:
    """It would give everything before the crash a second time."""
    with serving() as service:
        dataset = service.whole(Dataset.range(10).map(dies_at({5}, lambda: os._exit(7))))
        with iter(dataset) as iterator:
            for _ in range(2):
                with pytest.raises(UnknownError, match=r"exit code 7[^$]*cannot go on"):
                    list(iterator)


def test_dynamic_iteration_continues_after_crash() -> None:
    with serving() as service:
        found, problems = read_all(
            service.dealt(Dataset.range(2000).map(dies_at({1000}, lambda: os._exit(7))))
        )
    (problem,) = problems
    assert "exit code 7" in str(problem)
    assert "position 1000 of source 0" in str(problem)
    assert len(found) == len(set(found))
    assert 1000 not in found
    assert 1999 in found


def test_repeatedly_dying_task_fails_for_good() -> None:
    with (
        serving() as service,
        iter(
            service.dealt(Dataset.range(1000).map(dies_at(set(range(1000)), lambda: os._exit(1))))
        ) as iterator,
    ):
        problems: list[str] = []
        while not (problems and "failed for good" in problems[-1]):
            with pytest.raises(
                UnknownError, match=r"another process continues|failed for good"
            ) as raised:
                next(iterator)
            problems.append(str(raised.value))
        assert len(problems) <= CRASHES_MAX  # fewer where several deaths come between two questions
        with pytest.raises(UnknownError, match="failed for good"):
            next(iterator)


def test_killed_process_is_one_error() -> None:
    with (
        serving() as service,
        iter(service.dealt(Dataset.range(1_000_000).map(process_of))) as iterator,
    ):
        later = first = int(next(iterator))
        os.kill(first, signal.SIGKILL)
        problems = []
        while later == first:
            try:
                later = int(next(iterator))
            except UnknownError as error:
                problems.append(str(error))
        assert len(problems) == 1
        assert "SIGKILL" in problems[0]
        assert "memory" in problems[0]


def test_task_processes_end_with_worker() -> None:
    with DispatchServer(DispatcherConfig()) as dispatcher, worker_process(dispatcher) as worker:
        service = Service(dispatcher, [])
        iterator = iter(service.whole(Dataset.range(10).repeat().map(process_of)))
        child = int(next(iterator))
        assert is_alive(child)
        worker.kill()
        until(lambda: not is_alive(child), "the end of the child")
        iterator.close()


def test_leaving_worker_loses_no_element() -> None:
    with (
        serving(workers=2) as service,
        iter(service.dealt(Dataset.range(READ_ALL).map(lambda x: x))) as iterator,
    ):
        found = [int(next(iterator)) for _ in range(10)]
        leaving = threading.Thread(target=service.workers[0].stop, args=(60.0,))
        leaving.start()
        found += [int(x) for x in iterator]
        leaving.join()
        assert Counter(found) == Counter(range(READ_ALL))


def test_stopping_a_worker_does_not_wait_for_user_code() -> None:
    with serving() as service:
        iterator = iter(
            service.whole(
                Dataset.range(10).map(lambda x: (x, os.getpid(), time.sleep(1000.0 * (x > 0)) or 0))
            )
        )
        child = int(next(iterator)[1])
        service.workers[0].stop()
        until(lambda: not is_alive(child), "the end of the child")
        iterator.close()


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("processes", [True, False])
def test_dropping_an_iterator_does_not_wait_for_user_code(
    ahead: int, processes: bool, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    goes_on = tmp_path / "goes on"

    def slow(x: Any) -> Any:
        while x > 0 and not goes_on.exists():
            begun.touch()
            time.sleep(0.01)
        return x

    with serving(processes=processes) as service:
        iterator = iter(service.whole(Dataset.range(10).map(slow)).prefetch(ahead))
        assert int(next(iterator)) == 0
        until(begun.exists, "the user's function")
        iterator.close()
        goes_on.touch()  # a thread of this process has to end


def test_killed_reader_leaves_others_running(
    child: Callable[..., subprocess.Popen[str]],
) -> None:
    with serving() as service:
        dataset = Dataset.range(80_000)
        id = register_dataset(service.dispatcher.target, dataset)
        told = ("distributed_epoch", service.dispatcher.target, id)
        program = """
import sys
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service.client import from_dataset_id
iterator = iter(from_dataset_id(*sys.argv[1:], job_name="shared"))
print(int(next(iterator)), flush=True)
sys.stdin.read()
"""
        other = child(program, *told)
        assert other.stdout is not None
        taken = int(other.stdout.readline())
        iterator = iter(from_dataset_id(*told, job_name="shared"))
        found = [int(next(iterator))]
        other.kill()
        found += [int(x) for x in iterator]
        assert len(found) == len(set(found))
        assert taken not in found
        assert len(found) > 40_000
        until(lambda: not service.workers[0].num_tasks, "the end of the task")

"""Ctrl-C at each point of what a program does: afterwards the same works, and nothing is left."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

import zmqdist as zd
from tests.interrupts import interrupted_runs
from tests.scheduling.work import until
from zmqdist.data import Dataset
from zmqdist.data.iterators import DatasetIterator

pytestmark = [
    pytest.mark.timeout(120),
    # Python reports an interrupt that arrives in a finalizer, and goes on.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def count_to(limit: int) -> Iterator[int]:
    yield from range(limit)


class Program:
    """What a program has of a cluster, and the operations that are interrupted."""

    def __init__(self, cluster: zd.local_cluster) -> None:
        self.coordinator = cluster.coordinator()
        self.executor = zd.Executor(cluster)
        self.counter = self.coordinator.options(name="counter").actor(Counter)
        self.queue = zd.Queue("jobs", cluster=cluster)

    def submit(self) -> None:
        self.executor.submit(abs, -1)

    def submit_and_wait(self) -> None:
        self.executor.submit(abs, -1).result()

    def map(self) -> None:
        list(self.executor.map(abs, range(3)))

    def cancel(self) -> None:
        self.executor.submit(time.sleep, 0.01).cancel()

    def schedule_and_join(self) -> None:
        self.coordinator.schedule(abs, (-1,))
        self.coordinator.join()

    def gather(self) -> None:
        self.coordinator.gather(self.coordinator.map(abs, range(3)))

    def stream(self) -> None:
        list(self.coordinator.stream(count_to, 3))

    def wait(self) -> None:
        self.coordinator.wait([self.coordinator.submit(abs, -1)])

    def call_actor(self) -> None:
        self.counter.total().result()

    def find_actor(self) -> None:
        self.coordinator.get_actor("counter")

    def put(self) -> None:
        self.queue.put(1)
        self.queue.get_nowait()


OPERATIONS = [name for name in vars(Program) if not name.startswith("_")]


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    with zd.local_cluster(workers=1) as cluster:
        program = Program(cluster)
        yield program
        program.executor.shutdown()
        program.coordinator.close()


@pytest.mark.shares_cluster
@pytest.mark.parametrize("name", OPERATIONS)
def test_interrupted_operation_works_again(program: Program, name: str) -> None:
    operation = getattr(program, name)
    for point in interrupted_runs(operation):
        operation()
        assert program.executor.submit(abs, -2).result(30) == 2, point
    assert point > 20


DATASETS: dict[str, Callable[[], Dataset]] = {
    "prefetch": lambda: Dataset.range(4).prefetch(2),
    "parallel map": lambda: Dataset.range(4).map(abs, num_parallel_calls=2),
    "parallel interleave": lambda: Dataset.range(3).interleave(
        lambda _: Dataset.range(2), cycle_length=2, num_parallel_calls=2, deterministic=False
    ),
}


@pytest.mark.parametrize("name", DATASETS)
def test_interrupted_iteration_leaves_no_thread(name: str) -> None:
    dataset = DATASETS[name]()
    count, before = len(list(dataset)), threading.active_count()
    for point in interrupted_runs(lambda: list(dataset)):
        assert len(list(dataset)) == count, point
    assert point > 50
    until(lambda: threading.active_count() <= before, "no thread is left")


@pytest.mark.parametrize("name", DATASETS)
def test_interrupted_iterator_goes_on(name: str) -> None:
    iterators: list[DatasetIterator] = []

    def read_all() -> None:
        iterators.append(iter(DATASETS[name]()))
        list(iterators[-1])

    for _ in interrupted_runs(read_all):
        while iterators:
            with iterators.pop() as iterator:
                list(iterator)  # what Ctrl-C has left

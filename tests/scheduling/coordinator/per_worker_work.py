"""What the tests of per-worker resources schedule; workers import this module."""

from __future__ import annotations

import gc
from os import _exit
from pathlib import Path
from typing import Any

import numpy as np

from zmqdist import data
from zmqdist.coordinator import PerWorkerValues, get_current_worker_index, get_num_workers
from zmqdist.scheduling.shared import resources
from zmqdist.scheduling.shared.datasets import WorkerIterator


class Counter:
    """A value that functions of its worker change."""

    def __init__(self, worker: int, value: int = 0) -> None:
        self.worker = worker
        self.value = value

    def numpy(self) -> Any:
        return np.int64(self.value)


def counter(start: int = 0) -> Counter:
    return Counter(get_current_worker_index(), start)


def logged_counter(folder: Path) -> Counter:
    """Leaves a file for each time that it is called."""
    index = get_current_worker_index()
    builds = len(list(folder.glob(f"built-{index}-*")))
    (folder / f"built-{index}-{builds}").touch()
    return Counter(index)


def add(counter: Counter, amount: int = 1) -> int:
    counter.value += amount
    return counter.value


def add_nested(nested: dict[str, Any]) -> int:
    return add(nested["counters"][0])


def add_and_exit_first(counter: Counter, folder: Path) -> int:
    """Ends its process the first time."""
    try:
        (folder / "exited").touch(exist_ok=False)
    except FileExistsError:
        return add(counter)
    _exit(3)


def of_worker(counter: Counter) -> tuple[int, int]:
    return counter.worker, get_current_worker_index()


def fails() -> None:
    raise KeyError("no such thing")


def same(value: Any) -> Any:
    return value


def total(iterator: Any) -> int:
    return sum(int(x) for x in iterator)


_ONE_OBJECT = data.Dataset.range(100).shuffle(100, seed=3)


def one_object() -> data.Dataset:
    return _ONE_OBJECT


def elements(iterator: Any) -> list[int]:
    return [int(x) for x in iterator]


def first(iterator: Any) -> Any:
    return next(iterator)


def first_of_dataset(dataset: Any) -> Any:
    return next(iter(dataset))


def add_firsts(one: Any, other: Any) -> int:
    return int(next(one)) + int(next(other))


def by_index() -> Any:
    return data.Dataset.range(10).shard(3, get_current_worker_index())


def one_to_two() -> Any:
    return data.Dataset.range(1, 2)


def ten_more(x: Any) -> Any:
    return x + 10


def mapped() -> Any:
    return data.Dataset.range(0, 2).map(ten_more)


def shuffled() -> Any:
    return data.Dataset.range(100).shuffle(100)


def generated() -> Any:
    """A generator: it can be read once only."""
    yield from range(3)


def not_a_dataset() -> int:
    return 5


def where() -> tuple[int, int]:
    return get_current_worker_index(), get_num_workers()


def alive() -> tuple[int, int, int]:
    """In the slot that runs this: resources in its table, counters and iterators that live."""
    gc.collect()
    found = [type(each) for each in gc.get_objects()]
    return len(resources.current_resources()), found.count(Counter), found.count(WorkerIterator)


def statuses(values: PerWorkerValues) -> list[str]:
    return [value.status.value for value in values]

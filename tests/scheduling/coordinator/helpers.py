"""What the tests of coordinators share: functions that they schedule, and ways to wait, to count
messages and to interrupt.

Workers import this module, so it imports no pytest.
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from os import _exit
from pathlib import Path
from sys import _current_frames
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

import zmqdist as zd
from tests.scheduling.work import until
from zmqdist import data
from zmqdist.coordinator import (
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValue,
    get_current_worker_index,
    get_num_workers,
)
from zmqdist.messages import Define, Message, Submit
from zmqdist.scheduling.shared import resources
from zmqdist.scheduling.shared.datasets import WorkerIterator
from zmqdist.transport.dealer import DealerConnection

if TYPE_CHECKING:
    import pytest


def select_tests(module: ModuleType, fixture: str) -> dict[str, Callable[..., Any]]:
    """Return the tests of a module that use a fixture, for `globals().update` of another module,
    which has another fixture of that name."""
    tests = {name: fn for name, fn in vars(module).items() if name.startswith("test_")}
    return {name: fn for name, fn in tests.items() if fixture in inspect.signature(fn).parameters}


# -- threads ---------------------------------------------------------------------------------------


def in_thread(fn: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Return a thread that calls `fn`, and a list to which it adds what `fn` returns or raises."""
    outcomes: list[Any] = []

    def run() -> None:
        try:
            outcomes.append(fn())
        except BaseException as error:
            outcomes.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcomes


def run_in_threads(*calls: Callable[[], object]) -> None:
    """Call these functions at the same time, each in its own thread, and wait for all."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


class Gate:
    """Functions in threads of this process wait here until the test opens the gate."""

    opened = threading.Event()


def passes_gate(number: int = 1) -> int:
    assert Gate.opened.wait(30)
    return number


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let no thread of this name start, as where the process may have no more."""
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)


def interrupt_when_waiting() -> None:
    """Send SIGINT to this process once its main thread has stood at one place of zmqdist for a
    while."""
    threading.Thread(target=_interrupt, daemon=True).start()


def _interrupt() -> None:
    main = threading.main_thread().ident
    assert main is not None
    repeats, before = 0, None
    while repeats < 20:
        frame = _current_frames()[main]
        position = (id(frame), frame.f_lasti)
        outer = frame
        while outer is not None and "scheduling" not in outer.f_code.co_filename:
            outer = outer.f_back
        repeats = repeats + 1 if position == before and outer is not None else 0
        before = position
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGINT)


# -- messages --------------------------------------------------------------------------------------


def record_sent(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """Return a list that grows by each message of this process's connections, in whichever thread:
    a loop that sleeps is served by others."""
    sent: list[Message] = []
    send = DealerConnection.send

    def recording(self: DealerConnection, message: Message, *rest: Any) -> bool:
        sent.append(message)
        return send(self, message, *rest)

    monkeypatch.setattr(DealerConnection, "send", recording)
    return sent


def functions_sent(sent: list[Message]) -> list[int]:
    """Return how many functions went to the dispatcher, message by message."""
    return [len(message.functions) for message in sent if isinstance(message, Define)]


@contextmanager
def stalled(
    coordinator: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Message]]:
    """Stop the coordinator's loop in the middle of sending a function while the body runs, so that
    what the body schedules arrives there at once; yield what it sends afterwards."""
    assert coordinator.schedule(abs, (-1,)).get(20) == 1  # the dispatcher is there
    sent = record_sent(monkeypatch)
    send = DealerConnection.send
    reached, gate = threading.Event(), threading.Event()

    def stalling(self: DealerConnection, message: Message, *rest: Any) -> bool:
        was_sent = send(self, message, *rest)
        if isinstance(message, Submit) and not reached.is_set():
            reached.set()
            assert gate.wait(30)
            sent.clear()
        return was_sent

    monkeypatch.setattr(DealerConnection, "send", stalling)
    coordinator.schedule(int)
    assert reached.wait(20)
    try:
        yield sent
    finally:
        gate.set()


# -- kept values and lineage -----------------------------------------------------------------------

KEPT_BYTES = 8 * 2**20


def zeros() -> np.ndarray[Any, Any]:
    return np.zeros(KEPT_BYTES, np.uint8)


def small() -> dict[str, int]:
    return {"a": 1}


def sum_of(array: np.ndarray[Any, Any]) -> int:
    return int(array.sum(dtype=np.int64))


def add_into(array: np.ndarray[Any, Any], folder: Path, number: int, writers: int) -> int:
    """Write to the array while others have the same value, and return its sum when all have
    written."""
    array += number
    (folder / f"written-{number}").touch()
    until(lambda: len(list(folder.glob("written-*"))) == writers)
    return sum_of(array)


def kept_value(coordinator: ClusterCoordinator, fn: Any, *args: Any) -> RemoteValue:
    """Return a kept value that is ready."""
    value = coordinator.schedule(fn, args, keep=True)
    assert value.exception(20) is None
    return value


def check_shared_by_writers(coordinator: ClusterCoordinator, folder: Path) -> RemoteValue:
    """Two functions at a time write to a kept value, and each to its own copy."""
    value = kept_value(coordinator, zeros)
    sums = [coordinator.schedule(add_into, (value, folder, number, 2)) for number in (1, 2)]
    assert coordinator.fetch(sums) == [KEPT_BYTES, 2 * KEPT_BYTES]
    assert coordinator.schedule(sum_of, (value,)).fetch(20) == 0
    return value


def logged_array(folder: Path, name: str, *inputs: Any) -> np.ndarray[Any, Any]:
    """Count the call in a file."""
    with (folder / name).open("ab") as file:
        file.write(b".")
    return np.full(2**17, 1 + sum(int(value[0]) for value in inputs))


def call_count(folder: Path, name: str) -> int:
    """Return how often `logged_array` was called under this name."""
    return (folder / name).stat().st_size


def replace_worker(cluster: zd.local_cluster, index: int = 0) -> None:
    """Kill a worker and start another, once the dispatcher knows that all its results are taken:
    else the work would run again by itself."""

    def is_settled() -> bool:
        rows = cluster.dispatcher.snapshot().coordinators
        return all(row.submitted - row.finished == row.queued + row.out for row in rows)

    until(is_settled)
    cluster.kill_worker(index)
    cluster.add_worker()


# -- per-worker resources --------------------------------------------------------------------------


def schedule_on(
    coordinator: ClusterCoordinator, workers: Iterable[int], fn: Any, *args: Any
) -> list[RemoteValue]:
    """Schedule the function once on each of these workers."""
    return [coordinator.schedule(fn, args, worker=index) for index in workers]


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
    """Leave a file for each call."""
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
    """End the process the first time."""
    try:
        (folder / "exited").touch(exist_ok=False)
    except FileExistsError:
        return add(counter)
    _exit(3)


def of_worker(counter: Counter) -> tuple[int, int]:
    return counter.worker, get_current_worker_index()


def fails() -> None:
    raise KeyError("no such thing")


def identity(value: Any) -> Any:
    return value


def worker_and_count() -> tuple[int, int]:
    return get_current_worker_index(), get_num_workers()


def living_objects() -> tuple[int, int, int]:
    """Return, of the slot that runs this, the resources in its table, and the counters and
    iterators that live."""
    gc.collect()
    types = [type(item) for item in gc.get_objects()]
    return len(resources.current_resources()), types.count(Counter), types.count(WorkerIterator)


def statuses(values: PerWorkerValues) -> list[str]:
    return [value.status.value for value in values]


# -- per-worker datasets ---------------------------------------------------------------------------


def elements(iterator: Any) -> list[int]:
    return [int(x) for x in iterator]


def total(iterator: Any) -> int:
    return sum(elements(iterator))


def first(iterator: Any) -> Any:
    return next(iterator)


def first_of_dataset(dataset: Any) -> Any:
    return next(iter(dataset))


def add_firsts(left: Any, right: Any) -> int:
    return int(next(left)) + int(next(right))


_SHARED_DATASET = data.Dataset.range(100).shuffle(100, seed=3)


def shared_dataset() -> data.Dataset:
    """The same object at each call."""
    return _SHARED_DATASET


def shard_by_index() -> Any:
    return data.Dataset.range(10).shard(3, get_current_worker_index())


def one_to_two() -> Any:
    return data.Dataset.range(1, 2)


def add_ten(x: Any) -> Any:
    return x + 10


def mapped() -> Any:
    return data.Dataset.range(0, 2).map(add_ten)


def shuffled() -> Any:
    return data.Dataset.range(100).shuffle(100)


def generated() -> Any:
    """A generator: it can be read once only."""
    yield from range(3)


def not_a_dataset() -> int:
    return 5

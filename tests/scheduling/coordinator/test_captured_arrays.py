"""Large arrays that functions capture travel once for each content, and are as they were at
`schedule`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import functions_sent, record_sent
from tests.scheduling.work import begun, go, until, waits
from zmqdist.coordinator import ClusterCoordinator, RemoteValue
from zmqdist.limits import INLINE_BYTES_MAX
from zmqdist.wire.trusted import pack_function

SIZE = 2**18
# its workers keep connections to those from which they fetched
pytestmark = pytest.mark.shares_cluster


class Model:
    """Its weights lie in a list in a dict."""

    def __init__(self, weights: Any) -> None:
        self.layers = {"first": [weights]}

    def first(self, number: int) -> float:
        return float(self.layers["first"][0].reshape(-1)[number])


def of_global(weights: Any) -> Callable[[int], float]:
    """A function of a module that is nowhere, so that its globals go along."""
    names = {"weights": weights, "__name__": "__main__"}
    exec("def first(number): return float(weights.reshape(-1)[number])", names)
    return names["first"]  # type: ignore[return-value]


CAPTURES: dict[str, Callable[[Any], Callable[[int], float]]] = {
    "a cell": lambda weights: lambda number: float(weights.reshape(-1)[number]),
    "a global": of_global,
    "a nested object": lambda weights: (lambda model: lambda number: model.first(number))(
        Model(weights)
    ),
    "a bound self": lambda weights: Model(weights).first,
    "a default": lambda weights: lambda number, w=weights: float(w.reshape(-1)[number]),
}
ARRAYS: dict[str, Callable[[], Any]] = {
    "plain": lambda: np.zeros(SIZE),
    "of two dimensions, by columns": lambda: np.zeros((512, SIZE // 512), order="F"),
    "every second element": lambda: np.zeros(2 * SIZE)[::2],
    "read-only": lambda: np.broadcast_to(np.zeros(SIZE), (SIZE,)),
}


PLAIN_ARRAY, IN_CELL = ARRAYS["plain"], CAPTURES["a cell"]
ONCE = {name: (capture, PLAIN_ARRAY) for name, capture in CAPTURES.items()} | {
    name: (IN_CELL, array) for name, array in ARRAYS.items()
}


def occupy(coordinator: ClusterCoordinator, folder: Path) -> list[RemoteValue]:
    """Have every slot wait until `go`: what is scheduled meanwhile stays held."""
    count = len(coordinator.workers())
    gates = coordinator.map(lambda number: waits(folder, str(number)), range(count))
    until(lambda: len(begun(folder)) == count)
    return gates


@pytest.mark.parametrize(("capture", "array"), ONCE.values(), ids=list(ONCE))
def test_unchanged_captured_array_is_copied_once(
    in_threads: ClusterCoordinator, tmp_path: Path, capture: Any, array: Callable[[], Any]
) -> None:
    first = capture(array())
    occupy(in_threads, tmp_path)
    values = [in_threads.schedule(first, (7,)) for _ in range(5)]
    held_parts = in_threads.snapshot().held
    assert (held_parts.copies, held_parts.parts, held_parts.bytes) == (1, 1, 8 * SIZE)
    go(tmp_path)
    assert in_threads.fetch(values) == [0.0] * 5


@pytest.mark.parametrize("capture", CAPTURES.values(), ids=list(CAPTURES))
def test_captured_array_is_copied_at_each_change(
    in_slots: ClusterCoordinator, tmp_path: Path, capture: Any
) -> None:
    array = np.zeros(SIZE)
    first = capture(array)
    occupy(in_slots, tmp_path)
    values = []
    for number in (1, 1, 2, 3, 3):
        array[7] = number
        values.append(in_slots.schedule(first, (7,)))
    array[:] = 99
    assert in_slots.snapshot().held.copies == 3
    go(tmp_path)
    assert in_slots.fetch(values) == [1.0, 1.0, 2.0, 3.0, 3.0]


def test_read_only_array_change_through_view_counts(
    in_threads: ClusterCoordinator,
) -> None:
    array = np.zeros(SIZE)
    view = array[:]
    array.flags.writeable = False
    values = []
    for number in range(3):
        view[7] = number
        values.append(in_threads.schedule(lambda: float(array[7])))
    view[7] = 99
    assert in_threads.fetch(values) == [0.0, 1.0, 2.0]


def test_replaced_captured_array_counts(
    in_threads: ClusterCoordinator,
) -> None:
    model = Model(np.zeros(SIZE))
    values = []
    for number in range(3):
        model.layers["first"][0] = np.full(SIZE, number)
        values.append(in_threads.schedule(model.first, (7,)))
    assert in_threads.fetch(values) == [0.0, 1.0, 2.0]


def test_captured_array_writes_stay_in_their_run(
    in_slots: ClusterCoordinator,
) -> None:
    array = np.zeros(SIZE)

    def adds(_: int) -> float:
        nonlocal array
        array += 1
        return float(array.sum())

    assert in_slots.fetch(in_slots.map(adds, range(8))) == [float(SIZE)] * 8
    assert array.sum() == 0


def test_read_only_captured_array_arrives_writable(
    in_slots: ClusterCoordinator,
) -> None:
    array = np.zeros(SIZE)
    array.flags.writeable = False

    def adds() -> float:
        array[:] += 1
        return float(array.sum())

    assert in_slots.fetch([in_slots.schedule(adds) for _ in range(4)]) == [float(SIZE)] * 4
    assert array.sum() == 0


def test_frozen_array_is_never_copied(
    in_slots: ClusterCoordinator,
) -> None:
    model = Model(zd.freeze(np.ones(SIZE)))

    def looks() -> tuple[float, bool]:
        (weights,) = model.layers["first"]
        return float(weights.sum()), weights.flags.writeable

    values = [in_slots.schedule(looks) for _ in range(10)]
    assert in_slots.snapshot().held.copies == 0
    assert in_slots.fetch(values) == [(float(SIZE), False)] * 10


def test_function_with_large_arrays_is_sent_once(
    in_processes: ClusterCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = record_sent(monkeypatch)
    gates = occupy(in_processes, tmp_path)
    frozen, array = zd.freeze(np.zeros(SIZE)), np.zeros(SIZE)
    values = [in_processes.schedule(lambda: float(frozen[7] + array[7])) for _ in range(20)]
    go(tmp_path)
    assert in_processes.fetch([gates, values]) == [["0", "1"], [0.0] * 20]
    assert sum(functions_sent(sent)) == 2, "the one that waits, and this one"


def changing(array: Any) -> Iterator[int]:
    """Numbers for `map`, and a change before each."""
    for number in range(6):
        array[:] = number + 1
        yield number


@pytest.mark.parametrize("size", [10, SIZE], ids=["in the pickle", "beside it"])
def test_map_copies_its_function_once(in_slots: ClusterCoordinator, size: int) -> None:
    array = np.zeros(size)
    before = in_slots.snapshot().functions_pickled
    values = in_slots.map(lambda number: float(array[number]), changing(array))
    after = in_slots.snapshot()
    assert (after.functions_pickled - before, after.held.copies) == (1, int(size == SIZE))
    assert in_slots.fetch(values) == [0.0] * 6


@pytest.mark.parametrize("size", [10, SIZE], ids=["in the pickle", "beside it"])
def test_executor_map_copies_function_once(threads: zd.local_cluster, size: int) -> None:
    model = Model(np.zeros(size))
    with zd.Executor(threads) as executor:
        assert list(executor.map(model.first, changing(model.layers["first"][0]))) == [0.0] * 6
        assert executor.submit(model.first, 7).result(20) == 6.0
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.map(model.first, [1])


def test_map_function_may_capture_pending_values(
    in_slots: ClusterCoordinator, tmp_path: Path
) -> None:
    gate = in_slots.schedule(waits, (tmp_path,))
    model = Model(np.ones(SIZE))
    values = in_slots.map(lambda number: (gate, model.first(number)), range(4))
    model.layers.clear()
    go(tmp_path)
    assert in_slots.fetch(values) == [("x", 1.0)] * 4


def test_captured_arrays_are_freed_after_their_work(
    in_slots: ClusterCoordinator, tmp_path: Path
) -> None:
    array = np.ones(SIZE)
    values = [in_slots.schedule(lambda: (waits(tmp_path), array.sum()))]
    values += [in_slots.schedule(lambda: array.sum()) for _ in range(3)]
    values += in_slots.map(lambda number: array[number], range(3))
    values += [
        in_slots.schedule(lambda: array.sum(), keep=True),
        in_slots.schedule(lambda: array.sum(), retries=2),
    ]
    assert in_slots.snapshot().held.parts > 0
    go(tmp_path)
    in_slots.join(30)
    del values
    gc.collect()
    until(lambda: in_slots.snapshot().held.parts == 0)
    until(lambda: in_slots.snapshot().records == 0)


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("changes", [True, False], ids=["mutable", "immutable"])
def test_function_at_inline_bound_arrives_whole(
    in_threads: ClusterCoordinator, more: int, changes: bool
) -> None:
    def of(count: int) -> Callable[[], int]:
        text = b"x" * count
        captured = [text] if changes else (text,)
        return lambda: len(captured[0])

    besides = len(pack_function(of(60_000))) - 60_000
    count = INLINE_BYTES_MAX - besides + more
    assert len(pack_function(of(count))) == INLINE_BYTES_MAX + more
    assert [in_threads.schedule(of(count)).get(20) for _ in range(2)] == [count] * 2


def test_freed_function_is_forgotten_later(
    in_threads: ClusterCoordinator,
) -> None:
    for number in range(10):
        array = np.full(SIZE, number)
        assert in_threads.schedule(lambda array=array: float(array[7])).get(20) == number
        until(lambda: in_threads.snapshot().held.parts == 0)
    assert in_threads.snapshot().functions == 1


def test_evicted_array_is_fetched_again(
    no_shared_memory: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without shared memory, so that the worker fetches it; it keeps less than two of them."""
    monkeypatch.setattr("zmqdist.scheduling.worker.worker_cache.WORKER_CACHE_BYTES_MAX", 8 * SIZE)
    first_model, second_model = (Model(np.full(SIZE, number)) for number in (1, 2))
    with (
        zd.local_cluster(workers=1, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        gate = coordinator.schedule(waits, (tmp_path,))
        values = [
            coordinator.schedule(model.first, (7,))
            for model in (first_model, second_model, first_model, second_model)
        ]
        assert coordinator.snapshot().held.copies == 2
        go(tmp_path)
        assert coordinator.fetch([gate, *values]) == ["x", 1.0, 2.0, 1.0, 2.0]
        assert cluster.servers[0].snapshot().fetches == 4  # type: ignore[union-attr]

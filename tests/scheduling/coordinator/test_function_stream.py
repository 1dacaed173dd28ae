"""`stream`: the values of a generator function as they are made."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.coordinator.test_options import times
from tests.scheduling.work import go, until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(60)

SIZE = 2**17


def logged(folder: Path, numbers: Iterator[int]) -> Iterator[int]:
    """Yield the numbers, and create a file for each that was made, and one at the end."""
    try:
        for number in numbers:
            (folder / f"made-{number}").touch()
            yield number
    finally:
        (folder / "closed").touch()


def made(folder: Path) -> int:
    return len(list(folder.glob("made-*")))


def halts(folder: Path) -> Iterator[int]:
    """Yield a number, and another when the test creates the file `go`."""
    yield 1
    until(lambda: (folder / "go").exists())
    yield 2


def breaks(folder: Path, well_at: int) -> Iterator[int]:
    yield 1
    yield times(folder, well_at)


def squares(count: int) -> Iterator[int]:
    for number in range(count):
        yield number**2


async def squares_later(count: int) -> AsyncIterator[int]:
    for number in range(count):
        await asyncio.sleep(0)
        yield number**2


@pytest.mark.parametrize("fn", [squares, squares_later, lambda n: [i**2 for i in range(n)]])
def test_values_come_in_order(in_slots: ClusterCoordinator, fn: Any) -> None:
    stream = in_slots.stream(fn, 500, ahead=20)
    assert list(stream) == [number**2 for number in range(500)]
    assert stream.arrived == 500
    assert list(stream) == []
    in_slots.join(20)


def test_value_comes_before_next_is_made(in_slots: ClusterCoordinator, tmp_path: Path) -> None:
    stream = in_slots.stream(halts, tmp_path)
    assert next(stream) == 1
    go(tmp_path)
    assert list(stream) == [2]


@pytest.mark.parametrize("shared", [True, False])
def test_large_arrays_are_private_and_in_order(shared: bool, request: Any) -> None:
    if not shared:
        request.getfixturevalue("no_shared_memory")
    with (
        zd.local_cluster(workers=1, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):

        def arrays() -> Iterator[Any]:
            buffer = np.zeros(SIZE)
            for number in range(20):
                buffer[:] = number  # the same memory each time
                yield {"array": buffer, "number": number} if number % 2 else number

        values = list(coordinator.stream(arrays, ahead=5))
        assert [value["array"].min() for value in values[1::2]] == list(range(1, 20, 2))
        assert [value["array"].max() for value in values[1::2]] == list(range(1, 20, 2))
        values[1]["array"][:] = 5
        assert values[3]["array"][0] == 3


def test_function_waits_for_its_reader(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    stream = in_threads.stream(logged, tmp_path, range(100), ahead=4)
    until(lambda: made(tmp_path) == 5)
    assert in_threads.submit(abs, -1).result(20) == 1
    assert made(tmp_path) == 5, "four have arrived, and the fifth waits"
    assert next(stream) == 0
    until(lambda: made(tmp_path) == 6)
    assert list(stream) == list(range(1, 100))


def test_error_comes_after_the_values(in_slots: ClusterCoordinator, tmp_path: Path) -> None:
    stream = in_slots.stream(breaks, tmp_path, 9)
    assert next(stream) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="call 1"):
            next(stream)
    with pytest.raises(ValueError, match="call 1"):
        in_slots.join(20)


def test_retry_leaves_out_what_has_arrived(in_slots: ClusterCoordinator, tmp_path: Path) -> None:
    stream = in_slots.options(retries=2).stream(breaks, tmp_path, 3)
    assert list(stream) == [1, 3]


@pytest.mark.parametrize("end", ["close", "drop", "cancel_all", "timeout", "other error"])
def test_end_of_stream_closes_its_generator(
    in_slots: ClusterCoordinator, tmp_path: Path, end: str
) -> None:
    timeout = 1.0 if end == "timeout" else None
    options = in_slots.options(timeout=timeout)
    stream = options.stream(logged, tmp_path, itertools.count(), ahead=3)
    assert [next(stream), next(stream)] == [0, 1]
    if end == "close":
        stream.close()
        assert list(stream) == []
    elif end == "cancel_all":
        in_slots.cancel_all()
        with pytest.raises(errors.CancelledError):
            list(stream)
    elif end == "timeout":
        with pytest.raises(errors.DeadlineExceededError):
            list(stream)
    elif end == "other error":
        in_slots.submit(int, "x")
        with pytest.raises(ValueError, match="invalid literal"):
            in_slots.join(20)
        with pytest.raises(errors.CancelledError):
            list(stream)
    del stream
    gc.collect()
    until(lambda: (tmp_path / "closed").exists())
    until(lambda: in_slots.snapshot().unfinished == 0)
    assert in_slots.submit(abs, -1).result(20) == 1


def test_stream_is_taken_in_async_for(in_threads: ClusterCoordinator) -> None:
    async def main() -> list[int]:
        return [value async for value in in_threads.stream(squares, 3)]

    assert asyncio.run(main()) == [0, 1, 4]


def test_values_of_remote_values_and_lambdas(in_threads: ClusterCoordinator) -> None:
    start = in_threads.submit(int, "5")
    stream = in_threads.stream(lambda first, *, count: range(first, first + count), start, count=2)
    assert list(stream) == [5, 6]


def test_values_pass_in_the_safe_form(threads: zd.local_cluster) -> None:
    with ClusterCoordinator(threads, results="safe") as coordinator:
        stream = coordinator.stream(lambda: iter([{"a": np.ones(SIZE)}, 2, object()]))
        assert next(stream)["a"].sum() == SIZE
        assert next(stream) == 2
        with pytest.raises(errors.InvalidArgumentError, match="results: safe"):
            next(stream)


def test_wrong_uses_are_refused(in_threads: ClusterCoordinator) -> None:
    with pytest.raises(TypeError, match="it returned a int"):
        list(in_threads.stream(abs, -1))
    with pytest.raises(TypeError, match="takes a callable"):
        in_threads.stream(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no use for the option keep"):
        in_threads.options(keep=True).stream(squares, 3)
    with pytest.raises(ValueError, match="ahead is 0"):
        in_threads.stream(squares, 3, ahead=0)


def test_hundred_streams_share_the_slots(in_threads: ClusterCoordinator) -> None:
    streams = [in_threads.stream(squares, 10, ahead=10) for _ in range(100)]
    assert [list(stream) for stream in streams] == [[n**2 for n in range(10)]] * 100
    until(lambda: in_threads.snapshot().records == 0)


def test_closed_coordinator_ends_its_streams(threads: zd.local_cluster, tmp_path: Path) -> None:
    coordinator = ClusterCoordinator(threads)
    stream = coordinator.stream(logged, tmp_path, itertools.count(), ahead=2)
    assert next(stream) == 0
    coordinator.close()
    with pytest.raises(errors.CancelledError):
        list(stream)
    until(lambda: (tmp_path / "closed").exists())

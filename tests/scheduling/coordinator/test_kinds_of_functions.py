"""Async functions run to their end, generator functions and Futures are refused by name, and
libraries call `map`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator


async def adds(number: int, more: int = 1) -> int:
    await asyncio.sleep(0)
    return number + more


class Adds:
    async def __call__(self, number: int) -> int:
        return await adds(number)

    async def method(self, number: int) -> int:
        return await adds(number)


def returns_coroutine(number: int) -> Any:
    return adds(number)


async def fails(number: int) -> int:
    raise ValueError(f"not {number}")


ASYNC = [
    adds,
    Adds(),
    Adds().method,
    functools.partial(adds, more=1),
    returns_coroutine,
    lambda number: adds(number),
]


@pytest.mark.parametrize("fn", ASYNC)
def test_async_functions_run_to_completion(
    in_slots: ClusterCoordinator, fn: Callable[..., Any]
) -> None:
    assert in_slots.schedule(fn, (1,)).get(20) == 2
    assert in_slots.create_per_worker_resource(fn, (1,))[0].get(20) == 2
    with pytest.raises(ValueError, match="not 1"):
        in_slots.schedule(fails, (1,)).get(20)


@pytest.mark.parametrize("fn", ASYNC)
def test_executor_runs_async_functions(threads: zd.local_cluster, fn: Callable[..., Any]) -> None:
    with zd.Executor(threads) as executor:
        assert executor.submit(fn, 1).result(20) == 2
        assert list(executor.map(fn, [1, 2])) == [2, 3]


def generates(number: int) -> Iterator[int]:
    yield number


async def generates_later(number: int) -> AsyncIterator[int]:
    yield number


class Generates:
    def __call__(self, number: int) -> Iterator[int]:
        yield number


def returns_generator(number: int) -> Iterator[int]:
    return (item for item in range(number))


GENERATORS = [
    (generates, "generates"),
    (generates_later, "generates_later"),
    (Generates(), "Generates"),
    (functools.partial(generates, 1), "generates"),
]
REFUSED = r"is a generator function, whose items would stay with the worker: call stream\(\), have it return a list, or read a Dataset"


@pytest.mark.parametrize(("fn", "name"), GENERATORS)
def test_generator_function_is_refused_at_schedule(
    threads: zd.local_cluster, in_threads: ClusterCoordinator, fn: Callable[..., Any], name: str
) -> None:
    with zd.Executor(threads) as executor:
        for schedule in (in_threads.schedule, executor.submit, in_threads.map, executor.map):
            for _ in range(2):  # the second time from the cache of pickles
                with pytest.raises(TypeError, match=rf"test_kinds_of_functions.{name} {REFUSED}"):
                    schedule(fn, [1])


def test_returned_generator_is_refused_by_worker(
    in_threads: ClusterCoordinator,
) -> None:
    with pytest.raises(TypeError, match=f"returns_generator {REFUSED}"):
        in_threads.schedule(returns_generator, (3,)).get(20)


def test_future_argument_is_refused_by_name(
    threads: zd.local_cluster, in_threads: ClusterCoordinator
) -> None:
    with zd.Executor(threads) as executor:
        own = executor.submit(int)
        kinds: list[tuple[futures.Future[Any], str]] = [
            (own, "_Future"),
            (futures.Future(), "Future"),
        ]
        for future, kind in kinds:
            for argument, path in (
                (future, ""),
                ([future], r"\[0\]"),
                ({"a": (future,)}, r"\['a'\]\[0\]"),
            ):
                message = rf"args\[0\]{path}, a \S*\.{kind}, cannot be pickled: pass its result"
                with pytest.raises(errors.InvalidArgumentError, match=message):
                    in_threads.schedule(id, (argument,))
                with pytest.raises(errors.InvalidArgumentError, match=message):
                    executor.submit(id, argument).result(20)


READ_BY_DASK = "_max_workers"


def test_library_calls_of_map_get_numbers(
    threads: zd.local_cluster, in_threads: ClusterCoordinator
) -> None:
    with zd.Executor(threads, max_workers=2) as executor:
        for call in (executor.map, in_threads.map):
            # as emcee
            assert [float(value) for value in call(pow, [2.0, 3.0], [3, 2])] == [8.0, 9.0]
            energies = np.empty(2)
            energies[:] = np.array(list(call(abs, [-1.5, 2.5])))  # as scipy
            assert energies.tolist() == [1.5, 2.5]
        assert getattr(executor, READ_BY_DASK) == 2
    with zd.Executor(threads) as executor:
        assert getattr(executor, READ_BY_DASK) == 3

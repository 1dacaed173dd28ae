"""asyncio and concurrent.futures take RemoteValues, Futures of an Executor and RPC calls, or say
what to pass instead."""

from __future__ import annotations

import asyncio
import operator
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent import futures
from typing import Any

import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.rpc import Client, ZmqServer

Start = Callable[[int], Any]


@pytest.fixture
def starts(in_threads: ClusterCoordinator) -> Iterator[dict[str, Start]]:
    """What begins `-number` in each way, by the name of the type of its result."""
    server = ZmqServer("127.0.0.1:0")
    server.register("neg", operator.neg)
    server.start()
    with Client.create("zmq", server.address, "", 20_000) as client:
        yield {
            "RemoteValue": lambda number: in_threads.schedule(operator.neg, (number,)),
            "StatusOrResult": lambda number: client.call("neg", (number,)),
        }
    server.stop()


async def by_gather(start: Start) -> list[Any]:
    return await asyncio.gather(start(1), start(2))


async def by_shield(start: Start) -> list[Any]:
    return [await asyncio.shield(start(number)) for number in (1, 2)]


async def by_wait_for(start: Start) -> list[Any]:
    return [await asyncio.wait_for(start(number), 20) for number in (1, 2)]


async def by_as_completed(start: Start) -> list[Any]:
    return [await awaitable for awaitable in asyncio.as_completed([start(1), start(2)])]


async def by_wait(start: Start) -> list[Any]:
    finished, _ = await asyncio.wait([asyncio.ensure_future(start(number)) for number in (1, 2)])
    return [await task for task in finished]


async def by_task_group(start: Start) -> list[Any]:
    async def result_of(number: int) -> Any:
        return await start(number)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(result_of(number)) for number in (1, 2)]
    return [task.result() for task in tasks]


WAYS = [by_gather, by_shield, by_wait_for, by_as_completed, by_wait]
WAYS += [by_task_group] if sys.version_info >= (3, 11) else []


def leaves(values: list[Any]) -> list[int]:
    return sorted(value[0] if isinstance(value, list) else value for value in values)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["RemoteValue", "StatusOrResult"])
def test_asyncio_waits_for_values(
    starts: dict[str, Start], kind: str, way: Callable[[Start], Awaitable[list[Any]]]
) -> None:
    async def run() -> list[Any]:
        return await way(starts[kind])

    assert leaves(asyncio.run(run())) == [-2, -1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.wait makes tasks of values")
@pytest.mark.parametrize("kind", ["RemoteValue", "StatusOrResult"])
def test_asyncio_wait_refuses_values(starts: dict[str, Start], kind: str) -> None:
    async def run() -> None:
        await asyncio.wait([starts[kind](1)])

    with pytest.raises(
        TypeError, match=r"asyncio.wait takes tasks .*: pass asyncio.ensure_future\(value\)"
    ):
        asyncio.run(run())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.wait refuses Futures itself")
def test_asyncio_wait_refuses_executor_futures(threads: zd.local_cluster) -> None:
    with zd.Executor(threads) as executor:

        async def run() -> None:
            await asyncio.wait([executor.submit(operator.neg, 1)])

        with pytest.raises(TypeError, match=r"or asyncio.wrap_future\(future\)"):
            asyncio.run(run())


@pytest.mark.parametrize("wait", [futures.wait, lambda values: list(futures.as_completed(values))])
@pytest.mark.parametrize("kind", ["RemoteValue", "StatusOrResult"])
def test_concurrent_futures_refuse_values(starts: dict[str, Start], kind: str, wait: Any) -> None:
    with pytest.raises(
        TypeError, match=f"waits for Futures, and a {kind} is none: pass Futures of an Executor"
    ):
        wait([starts[kind](1)])

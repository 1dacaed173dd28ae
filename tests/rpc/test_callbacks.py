"""A done-callback of a call may wait for whatever its client and the server do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zmqdist.rpc import ZmqClient, ZmqServer

Serve = Callable[..., ZmqServer]
Connect = Callable[..., ZmqClient]
Does = Callable[[ZmqServer, ZmqClient, Any, Any], Any]


async def awaited(*calls: Any) -> list[Any]:
    async def one(call: Any) -> Any:
        return await call

    return await asyncio.gather(*map(one, calls))


def awaits_in_another_thread(call: Any) -> Any:
    """Await the call in the event loop of another thread, and wait for this thread."""
    returned: list[Any] = []
    thread = threading.Thread(target=lambda: returned.extend(asyncio.run(awaited(call))))
    thread.start()
    thread.join()
    return returned


CASES: dict[str, tuple[Does, Any]] = {
    "value of its own": (lambda server, client, own, other: own.get_value(), 1),
    "value of another": (lambda server, client, own, other: other.get_value(), 2),
    "is_ok of another": (lambda server, client, own, other: other.is_ok(), True),
    "a call": (lambda server, client, own, other: client.m_blocking(3), 3),
    "a stream": (lambda server, client, own, other: list(client.stream_of(3)), [0, 1, 2]),
    "a callback": (
        lambda server, client, own, other: other.add_done_callback(print) or other.get_value(),
        2,
    ),
    "await": (lambda server, client, own, other: asyncio.run(awaited(own, other)), [1, 2]),
    "await in a thread": (
        lambda server, client, own, other: awaits_in_another_thread(client.m(3)),
        [3],
    ),
    "refresh": (lambda server, client, own, other: client.refresh(), None),
    "stop of the server": (
        lambda server, client, own, other: server.stop() or other.get_error()[0],
        0,
    ),
    "close": (lambda server, client, own, other: client.close(), None),
}


@pytest.mark.parametrize("case", CASES)
def test_callback_may_call_its_client(serve: Serve, connect: Connect, case: str) -> None:
    gate, ended = threading.Event(), threading.Event()
    returned: list[Any] = []

    def m(number: int) -> int:
        assert gate.wait(20)
        return number

    def stream_of(count: int) -> Iterator[int]:
        yield from range(count)

    server = serve(m=m, stream_of=stream_of)
    client = connect(server.address)
    own, other = client.m(1), client.m(2)
    does, returns = CASES[case]

    def callback(_: object) -> None:
        returned.append(does(server, client, own, other))
        ended.set()

    own.add_done_callback(callback)
    gate.set()
    assert ended.wait(20), "the callback waits for itself"
    assert returned == [returns]

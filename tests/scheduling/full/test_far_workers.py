"""A worker that is 200 ms away, there and back: a proxy between it and its dispatcher holds each
byte back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmqdist as zd
from tests.scheduling.work import until
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.shared.config import WorkerConfig

TRIP_S = 0.2


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float
) -> None:
    """Forward each byte `delay_s` after it has arrived; bytes do not wait for earlier ones to be
    delivered."""
    loop = asyncio.get_running_loop()
    try:
        while data := await reader.read(2**16):
            loop.call_later(delay_s, writer.write, data)
    except ConnectionError:
        pass
    loop.call_later(delay_s, writer.close)


@contextmanager
def far(address: str, trip_s: float) -> Iterator[str]:
    """Yield an address of a proxy that delays the bytes to and from the server at `address`."""
    host, _, port = address.removeprefix("zmq://").rpartition(":")
    loop = asyncio.new_event_loop()
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(host, int(port))
        writers.extend((writer, to_server))
        for ends in ((reader, to_server), (from_server, writer)):
            task = asyncio.ensure_future(_forward(*ends, trip_s / 2))
            tasks.add(task)

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:

        async def end() -> None:
            server.close()
            for task in tasks:
                task.cancel()
            for writer in writers:
                writer.close()
            await asyncio.gather(
                *tasks, *(writer.wait_closed() for writer in writers), return_exceptions=True
            )

        asyncio.run_coroutine_threadsafe(end(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


def test_distant_worker_is_busy_with_quick_work() -> None:
    with zd.DispatchServer() as dispatcher, far(dispatcher.address, TRIP_S) as address:
        worker = zd.WorkerServer(WorkerConfig(address))
        with ClusterCoordinator(dispatcher) as coordinator:
            values = coordinator.map(abs, range(5_000))
            until(lambda: dispatcher.snapshot().workers[0].window > 100, "more is on the way")
            assert coordinator.fetch(values) == list(range(5_000))
        worker.stop()

"""Both ends of one wait: `await` at the client, `zmqdist.cancelled()` in the handler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.rpc.helpers import Hosted, until
from zmqdist import cancelled, errors
from zmqdist.rpc import ZmqClient, ZmqServer
from zmqdist.rpc.admission_machine import ShortMethod

Serve = Callable[..., ZmqServer]
Connect = Callable[..., ZmqClient]


# -- await -----------------------------------------------------------------------------------------


def test_call_is_awaited_from_several_loops(serve: Serve, connect: Connect) -> None:
    client = connect(serve(add=lambda a, b: a + b).address)

    async def use() -> Any:
        many = await asyncio.gather(*(client.add(number, b=1) for number in range(200)))
        one = client.add(1, 2)
        return many, await one, await one, one.get_value()

    for _ in range(2):
        assert asyncio.run(use()) == (list(range(1, 201)), 3, 3, 3)
    early = client.add(5, 5)
    assert early.get_value() == 10

    async def again() -> Any:
        return await early

    assert asyncio.run(again()) == 10


def test_await_raises_as_get_value_does(serve: Serve, connect: Connect) -> None:
    def fail() -> None:
        raise KeyError("k")

    hold = threading.Event()
    client = connect(serve(fail=fail, hold=lambda: hold.wait(30)).address)

    async def use() -> None:
        with pytest.raises(errors.UnknownError, match="KeyError: 'k'"):
            await client.fail()
        with pytest.raises(errors.DeadlineExceededError):
            await client.hold(timeout_in_ms=10)

    asyncio.run(use())
    hold.set()


def test_tasks_run_during_await(serve: Serve, connect: Connect) -> None:
    release = threading.Event()
    client = connect(serve(hold=lambda: release.wait(30), echo=lambda value: value).address)

    async def use() -> list[int]:
        held = asyncio.ensure_future(awaited(client.hold()))
        got = [await client.echo(number) for number in range(5)]
        assert not held.done()
        release.set()
        assert await held
        return got

    assert asyncio.run(use()) == list(range(5))


async def awaited(outcome: Any) -> Any:
    return await outcome


def test_cancelling_the_task_that_awaits_cancels_the_call(serve: Serve, connect: Connect) -> None:
    running, ended = threading.Event(), threading.Event()

    def work() -> None:
        running.set()
        until(cancelled)
        ended.set()

    client = connect(serve(work=work).address)

    async def use() -> None:
        outcome = client.work()
        task = asyncio.ensure_future(awaited(outcome))
        assert await asyncio.get_running_loop().run_in_executor(None, running.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert outcome.get_error()[0] == errors.CANCELLED

    asyncio.run(use())
    assert ended.wait(30)


def test_call_outlives_its_event_loop(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    client = connect(serve(hold=lambda: release.wait(30)).address)
    outcome = client.hold()
    loop = asyncio.new_event_loop()
    coroutine = awaited(outcome)
    task = loop.create_task(coroutine)
    loop.call_soon(loop.stop)
    loop.run_forever()
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # reach: asyncio has no public switch for it
    loop.close()
    told = threading.Event()
    outcome.add_done_callback(lambda outcome: told.set())  # after the other one
    release.set()
    assert outcome.get_value() is True
    assert told.wait(30)
    coroutine.close()
    assert not caplog.records


# -- cancelled() -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["cancel", "close", "deadline"])
def test_handler_sees_cancellation(serve: Serve, connect: Connect, way: str) -> None:
    running, ended = threading.Event(), threading.Event()
    before: list[bool] = []

    def work() -> None:
        before.append(cancelled())
        running.set()
        until(cancelled)
        ended.set()

    client = connect(serve(work=work).address)
    outcome = client.work(timeout_in_ms=500 if way == "deadline" else 0)
    assert running.wait(30)
    if way == "cancel":
        outcome.cancel()
    elif way == "close":
        client.close()
    assert ended.wait(30)
    assert before == [False]
    assert not cancelled(), "outside a handler nobody asks for anything"


@pytest.mark.parametrize("batch", [False, True])
def test_thread_without_call_is_not_cancelled(connect: Connect, batch: bool) -> None:
    server = Hosted(threads_max=1)
    running, left = threading.Event(), threading.Event()
    after: list[bool] = []

    def work(rows: Any) -> Any:
        running.set()
        until(cancelled)
        return rows

    options: Any = {"batch": True, "max_delay_ms": 0} if batch else {}
    server.service.register("work", work, **options)
    with server:
        client = connect(server.address)
        outcome = client.work(np.zeros(1))
        assert running.wait(30)
        outcome.cancel()
        server.service.submit(lambda: (after.append(cancelled()), left.set()))
        assert left.wait(30)
    assert after == [False]


def test_next_call_of_thread_is_not_cancelled(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = threading.Event()
    threads: list[int] = []

    def work() -> Any:
        threads.append(threading.get_ident())
        running.set()
        until(cancelled)

    def ask() -> Any:
        threads.append(threading.get_ident())
        return cancelled()

    monkeypatch.setattr(ShortMethod, "holds", lambda method, now: False)
    server = Hosted(threads_max=1)
    server.service.register("work", work)
    server.service.register("ask", ask)
    with server:
        client = connect(server.address)
        outcome = client.work()
        assert running.wait(30)
        outcome.cancel()
        assert client.ask_blocking() is False
        assert threads[0] == threads[1]


# -- the example -----------------------------------------------------------------------------------


def test_echo_example_runs() -> None:
    import zmqdist as zd

    @zd.function(input_signature=[zd.TensorSpec([], np.int32), zd.TensorSpec([], np.int32)])
    def _remote_add_fn(a: Any, b: Any) -> Any:
        return np.add(a, b)

    server = zd.rpc.Server.create("zmq", "localhost:0")
    server.register("addition", _remote_add_fn)
    server.start()
    client = zd.rpc.Client.create("zmq", address=server.address, name="test_client")
    a = np.int32(2)
    b = np.int32(3)
    result = client.call(
        args=[a, b], method_name="addition", output_specs=zd.TensorSpec((), np.int32)
    )
    if result.is_ok():
        assert result.get_error() == (zd.errors.OK, "")
        assert result.get_value() == 5
    result = client.addition(a, b)
    if result.is_ok():
        assert result.get_value() == 5
    assert client.addition_blocking(a, b) == 5
    client.close()
    server.stop()

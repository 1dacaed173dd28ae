"""`snapshot()` of a client and of a server: what each figure counts, before, while and after."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from os import _exit

import numpy as np
import pytest

from tests.ports import free_address
from tests.rpc.helpers import until
from zmqdist.errors import FailedPreconditionError
from zmqdist.rpc import ClientSnapshot, ServerSnapshot, ZmqClient, ZmqServer

Serve = Callable[..., ZmqServer]
Connect = Callable[..., ZmqClient]


def test_call_is_counted_at_both_ends(serve: Serve, connect: Connect) -> None:
    hold = threading.Event()
    server = serve(hold=lambda: hold.wait(30))
    client = connect(server.address)
    assert client.snapshot().calls == server.snapshot().calls == 0
    held = client.hold()
    seen = until(lambda: (now := server.snapshot()).calls_running and now)
    assert (seen.clients, seen.calls, seen.calls_queued, seen.threads) == (1, 1, 0, 1)
    here = client.snapshot()
    assert (here.connected, here.calls_in_flight, here.calls_waiting, here.calls) == (True, 1, 0, 1)
    hold.set()
    assert held.get_value()
    assert client.snapshot().calls == 0
    until(lambda: server.snapshot().calls_running == 0)
    assert server.snapshot().calls == 0


def test_threads_that_wait_are_counted(serve: Serve, connect: Connect) -> None:
    hold = threading.Event()
    client = connect(serve(hold=lambda: hold.wait(30)).address)
    threads = [threading.Thread(target=client.hold_blocking) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: client.snapshot().threads_waiting == 3)
    hold.set()
    for thread in threads:
        thread.join()
    assert client.snapshot().threads_waiting == 0


def test_calls_without_a_server_wait(connect: Connect) -> None:
    client = connect(free_address(), listing=False)
    assert not client.snapshot().connected
    client.call("m")
    assert (client.snapshot().calls_waiting, client.snapshot().calls_in_flight) == (1, 0)


def test_work_for_which_there_is_no_thread_is_queued(serve: Serve, connect: Connect) -> None:
    hold = threading.Event()
    server = serve(hold=lambda: hold.wait(30))
    client = connect(server.address)
    bound = server.snapshot().threads_max
    held = [client.hold() for _ in range(bound + 5)]
    seen = until(
        lambda: (now := server.snapshot()).calls == bound + 5 and now.calls_running == bound and now
    )
    assert (seen.threads, seen.calls_queued) == (bound, 5)
    hold.set()
    for each in held:
        each.get_value()


def test_streams_and_batches_are_counted(serve: Serve, connect: Connect) -> None:
    def numbers() -> Iterator[int]:
        yield from range(1000)

    running, hold = threading.Event(), threading.Event()

    def twice(rows: np.ndarray) -> np.ndarray:
        running.set()
        hold.wait(30)
        return rows * 2

    server = ZmqServer("127.0.0.1:0")
    server.register("numbers", numbers)
    server.register("twice", twice, batch=True, max_batch=4, max_delay_ms=0)
    with server:
        client = connect(server.address)
        stream = client.numbers()
        assert next(stream) == 0
        assert server.snapshot().streams == 1
        stream.close()
        until(lambda: server.snapshot().streams == 0)
        first = client.twice(np.ones(1))
        assert running.wait(20)
        rest = [client.twice(np.ones(1)) for _ in range(3)]
        until(lambda: server.snapshot().calls_batched == 3)
        assert server.snapshot().calls == 4
        hold.set()
        assert [each.get_value().tolist() for each in (first, *rest)] == [[2.0]] * 4
        assert server.snapshot().calls_batched == 0


def test_snapshot_is_immutable(serve: Serve, connect: Connect) -> None:
    server = serve()
    for taken in (server.snapshot(), connect(server.address).snapshot()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            taken.transfers = 1  # type: ignore[misc]


def test_figures_exist_before_start_and_after_stop(serve: Serve, connect: Connect) -> None:
    assert ZmqServer("127.0.0.1:0").snapshot() == ServerSnapshot()
    server = serve(echo=lambda value: value)
    client = connect(server.address)
    assert client.echo_blocking(3) == 3
    server.stop()
    assert server.snapshot().calls == server.snapshot().faults == 0
    assert server.snapshot().messages_received >= 3  # hello, the listing, echo
    client.close()
    assert not client.snapshot().connected
    assert (
        dataclasses.replace(client.snapshot(), messages_sent=0, messages_received=0)
        == ClientSnapshot()
    )


def test_forked_child_has_no_figures(serve: Serve, connect: Connect) -> None:
    server = serve()
    client = connect(server.address)
    pid = os.fork()
    if not pid:
        wrong = 0
        for one in (server, client):
            try:
                one.snapshot()
            except FailedPreconditionError as error:
                wrong += "before a fork" not in error.message
            else:
                wrong += 1
        _exit(wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

"""Calls of methods that take microseconds run in the loop's thread. What is not short loses it, and
nobody else waits for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.rpc.helpers import until
from zmqdist import cancelled, errors
from zmqdist.messages import Call
from zmqdist.rpc import Server, ZmqClient, ZmqServer
from zmqdist.rpc.admission_machine import (
    BAR_S,
    BAR_S_MAX,
    CREDIT_S,
    LONG_SHARE,
    SHORT_S,
    ShortMethod,
)
from zmqdist.rpc.handler_pool import HandlerPool
from zmqdist.rpc.methods import Method
from zmqdist.rpc.short_calls import ShortCall, ShortCalls
from zmqdist.transport.calls_machine import ServedCall

Serve = Callable[..., ZmqServer]
Connect = Callable[..., ZmqClient]

PAUSE_S = CREDIT_S / 3
"""A call that was short, but the system paused its process meanwhile."""


# -- what counts as short --------------------------------------------------------------------------


def test_method_is_short_until_its_calls_are_not() -> None:
    method = ShortMethod()
    for number in range(10_000):
        method.ran(SHORT_S, number / 1000)
    assert method.holds(10.0)
    method.ran(CREDIT_S + 2 * SHORT_S, 10.0)
    assert not method.holds(10.0)


def test_rare_pauses_of_the_process_do_not_count() -> None:
    method = ShortMethod()
    for second in range(1000):
        method.ran(PAUSE_S, second * PAUSE_S / LONG_SHARE)
        method.ran(SHORT_S / 10, second * PAUSE_S / LONG_SHARE)
    assert method.holds(second * PAUSE_S / LONG_SHARE)


@pytest.mark.parametrize("took_s", [2 * SHORT_S, 0.005, 5.0])
def test_method_that_is_always_longer_is_not_short(took_s: float) -> None:
    method, now, calls = ShortMethod(), 0.0, 0
    while method.holds(now):
        now += took_s
        method.ran(took_s, now)
        calls += 1
    assert (calls - 1) * (took_s - SHORT_S) <= CREDIT_S + LONG_SHARE * now


@pytest.mark.parametrize("every_s", [0.01, 0.1, 1.0])
def test_long_calls_take_a_small_share_of_the_loop(every_s: float) -> None:
    method, now, lost_s = ShortMethod(), 0.0, 0.0
    while now < 3600.0:
        if method.holds(now):
            method.ran(0.01, now)
            lost_s += 0.01
        now += every_s
    assert lost_s <= 2 * LONG_SHARE * now + CREDIT_S


def test_method_is_tried_again_ever_more_rarely() -> None:
    method, now, tries = ShortMethod(), 0.0, []
    while now < 3600.0:
        if method.holds(now):
            tries.append(now)
            method.ran(1.0, now)
        now += 0.25
    pauses = [later - sooner for sooner, later in pairwise(tries)]
    assert pauses[:3] == [BAR_S, 2 * BAR_S, 4 * BAR_S]
    assert pauses[-1] == BAR_S_MAX


def test_method_that_was_short_for_long_is_tried_again_soon() -> None:
    method = ShortMethod()
    for now in (0.0, BAR_S, 3 * BAR_S):
        method.ran(1.0, now)
    method.ran(1.0, 1000.0)
    assert not method.holds(1000.0 + BAR_S / 2)
    assert method.holds(1000.0 + BAR_S)


# -- where calls run -------------------------------------------------------------------------------


def test_short_calls_run_in_the_loop_thread_and_long_ones_do_not(
    serve: Serve, connect: Connect
) -> None:
    client = connect(
        serve(
            loop=threading.get_ident,
            short=threading.get_ident,
            long=lambda: time.sleep(0.1) or threading.get_ident(),
            inline=frozenset({"loop"}),
        ).address
    )
    assert client.short_blocking() == client.loop_blocking()
    client.long_blocking()  # after the second one in the loop's thread
    client.long_blocking()
    assert client.long_blocking() != client.loop_blocking()


def test_first_call_that_waits_delays_nobody(serve: Serve, connect: Connect) -> None:
    go = threading.Event()
    server = serve(wait=lambda: go.wait(30), now=lambda: 1, inline=frozenset({"now"}))
    client, other = connect(server.address), connect(server.address)
    waiting = [client.wait() for _ in range(10)]
    assert other.now_blocking() == 1
    until(lambda: server.snapshot().calls_running == 10)
    assert not any(call.done() for call in waiting)
    go.set()
    assert [call.get_value() for call in waiting] == [True] * 10


def test_calls_that_meet_each_other_meet(serve: Serve, connect: Connect) -> None:
    meeting = threading.Barrier(8)
    client = connect(serve(meet=lambda: meeting.wait(30)).address)
    for _ in range(3):
        calls = [client.meet() for _ in range(8)]
        assert sorted(call.get_value() for call in calls) == list(range(8))


def test_short_call_may_call_its_own_server(serve: Serve, connect: Connect) -> None:
    clients: list[ZmqClient] = []
    server = serve(
        down=lambda depth: clients[0].down_blocking(depth - 1) + 1 if depth else 0,
    )
    clients.append(connect(server.address))
    assert connect(server.address).down_blocking(5) == 5


def test_one_thread_runs_one_call_at_a_time(connect: Connect) -> None:
    running: list[int] = []
    most: list[int] = []

    def work(wait_s: float, _array: Any = None) -> None:
        running.append(1)
        most.append(len(running))
        time.sleep(wait_s)
        running.pop()

    server = Server.create("zmq", "127.0.0.1:0", threads_max=1)
    server.register("work", work)
    server.register("other", work)
    with server:
        client = connect(server.address)
        calls = []
        for number in range(120):
            method = client.work if number % 2 else client.other
            large = (np.zeros(9000),) if number % 3 == 0 else ()
            calls.append(method(0.02 if number % 20 == 0 else 0.0, *large))
        for call in calls:
            call.get_value()
    assert max(most) == 1
    assert len(most) == 120


def test_waiting_calls_go_to_threads_when_one_takes_long(connect: Connect) -> None:
    go = threading.Event()
    server = Server.create("zmq", "127.0.0.1:0", threads_max=4)
    server.register("work", lambda number: go.wait(30) if number == 3 else number)
    with server:
        client = connect(server.address)
        calls = [client.work(number) for number in range(1000)]
        done = [call.get_value() for call in calls[:3] + calls[4:]]
        assert not calls[3].done()
        go.set()
        assert calls[3].get_value() is True
        assert done == [number for number in range(1000) if number != 3]


def test_call_in_the_loop_thread_sees_that_it_is_cancelled(serve: Serve, connect: Connect) -> None:
    began, saw = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        until(cancelled)
        saw.set()

    client = connect(serve(work=work, asks=cancelled).address)
    call = client.work()
    assert began.wait(30)
    call.cancel()
    assert saw.wait(30)
    assert client.asks_blocking() is False


def test_stop_waits_for_the_call_in_the_loop_thread(connect: Connect) -> None:
    began, go = threading.Event(), threading.Event()

    def work() -> int:
        began.set()
        assert go.wait(30)
        return 7

    server = Server.create("zmq", "127.0.0.1:0")
    server.register("work", work)
    server.start()
    call = connect(server.address).work()
    assert began.wait(30)
    stopping = threading.Thread(target=server.stop, args=(30.0,))
    stopping.start()
    go.set()
    stopping.join(30)
    assert call.get_value() == 7
    assert not stopping.is_alive()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError])
def test_error_in_the_loop_thread_ends_only_its_call(
    serve: Serve, connect: Connect, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error

    client = connect(serve(fail=fail, ok=lambda: 1).address)
    assert client.fail().get_error()[0] in (errors.UNKNOWN, errors.RESOURCE_EXHAUSTED)
    assert client.ok_blocking() == 1


def test_work_waits_while_the_pool_is_occupied() -> None:
    pool, seen = HandlerPool("test", 1), []
    assert pool.occupy()
    assert not pool.occupy()
    pool.submit(seen.append, 1)
    assert not pool.wait_idle(0.05)
    assert not seen
    pool.release()
    assert pool.wait_idle(20)
    assert seen == [1]
    pool.stop()


def test_pool_is_not_occupied_beyond_its_threads() -> None:
    pool, go = HandlerPool("test", 2), threading.Event()
    for _ in range(3):
        pool.submit(go.wait, 30)
    until(lambda: pool.counts()[1] == 2)
    assert not pool.occupy()
    go.set()
    assert pool.wait_idle(20)
    assert pool.occupy()
    pool.stop()


@pytest.mark.parametrize(("threads_max", "occupied"), [(1, False), (2, True)])
def test_pool_of_one_thread_keeps_the_order(
    threads_max: int, occupied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, held = HandlerPool("test", threads_max), list[threading.Thread]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: held.append(thread))
        pool.submit(int)
    assert pool.occupy() == occupied
    if occupied:
        pool.release()
    for thread in held:
        thread.start()
    assert pool.wait_idle(20)
    pool.stop()


# -- what their callers do -------------------------------------------------------------------------


def test_cancel_right_after_the_call_is_seen(serve: Serve, connect: Connect) -> None:
    def patient() -> None:
        until(cancelled)

    server = serve(patient=patient)
    client = connect(server.address)
    for _ in range(30):
        client.patient().cancel()
    until(lambda: server.snapshot().calls == 0)


def test_calls_of_a_client_that_has_gone_do_not_run(serve: Serve, connect: Connect) -> None:
    ran: list[int] = []

    def work(number: int) -> None:
        ran.append(number)
        until(cancelled) if number == 0 else time.sleep(0.002)

    server = serve(work=work)
    client = connect(server.address)
    for number in range(500):
        client.work(number)
    until(lambda: ran)
    client.close()
    until(lambda: server.snapshot().calls == 0 and server.snapshot().calls_running == 0)
    assert len(ran) < 500


def test_value_after_the_deadline_is_not_sent(serve: Serve, connect: Connect) -> None:
    def late() -> str:
        until(cancelled)
        return "garbage"

    client = connect(serve(late=late).address)
    for _ in range(20):
        with pytest.raises(errors.DeadlineExceededError):
            client.late_blocking(timeout_in_ms=3)


def test_many_calls_that_are_a_little_long_go_to_threads(serve: Serve, connect: Connect) -> None:
    server = serve(nap=lambda: time.sleep(0.005))
    client = connect(server.address)
    for call in [client.nap() for _ in range(200)]:
        call.get_value()
    assert server.snapshot().threads > 8


def test_error_while_a_call_begins_harms_no_other() -> None:
    begun: list[ShortCall] = []

    def begin(*call: Any) -> None:
        begun.append(ShortCall(*call))
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")

    class Loop:
        faults = 0

        def run_apart(self, *fns: Callable[[], None]) -> None:
            self.overdue = fns[2]

        def fault(self, source: str) -> None:
            self.faults += 1

    pool, loop = HandlerPool("test", 1), Loop()
    calls = ShortCalls(pool, lambda *call: (None, ()), lambda *ended: None, begin)
    calls.attach(loop)  # type: ignore[arg-type]
    method = Method("m", lambda: None)
    for number in range(4):
        served = ServedCall(None, Call(number, "m", 1, 0, b""), 1.0)
        assert calls.add(ShortCall(served, None, method, b"", []), 0)  # type: ignore[arg-type]
    loop.overdue()
    assert (len(begun), loop.faults) == (4, 1)
    assert pool.occupy(), "nothing occupies the pool"
    pool.stop()

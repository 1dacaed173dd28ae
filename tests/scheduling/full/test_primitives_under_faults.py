"""Locks and queues of programs in processes of their own, which are killed and stopped, and of a
dispatcher that is killed and started again."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.dispatcher_kills import StartDispatcher
from tests.scheduling.work import until
from zmqdist import errors

LEASE_S = 2.0

HOLDER = """
import sys, time
import zmqdist as zd
from zmqdist import errors
lock = zd.Lock("l", cluster=sys.argv[1])
lock.acquire()
print("held", lock.fence, flush=True)
sys.stdin.readline()
try:
    zd.Queue("late", cluster=sys.argv[1]).put("after the stop")
    lock.release()
    print("released", flush=True)
except errors.AbortedError as error:
    print("lost", error.message, flush=True)
sys.stdin.read()
"""

ADDER = """
import queue, sys
import zmqdist as zd
lock, total = zd.Lock("l", cluster=sys.argv[1]), zd.Queue("total", cluster=sys.argv[1])
print("begun", flush=True)
while True:
    with lock:
        try:
            total.put(total.get(timeout=0.2) + 1)
        except queue.Empty:
            pass  # an adder has died with the number
"""

GETTER = """
import sys
import zmqdist as zd
jobs = zd.Queue("jobs", cluster=sys.argv[1])
print("begun", flush=True)
while True:
    print(jobs.get(), flush=True)
"""

Program = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def program() -> Iterator[Program]:
    """Return `program(code, address)`, which starts a program and waits for its first line."""
    made: list[subprocess.Popen[str]] = []

    def start(code: str, address: str, first: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        made.append(process)
        assert process.stdout is not None
        assert first in process.stdout.readline()
        return process

    yield start
    for process in made:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


def test_killed_program_frees_lock(program: Program) -> None:
    with zd.DispatchServer() as dispatcher:
        holder = program(HOLDER, dispatcher.address, "held")
        lock = zd.Lock("l", cluster=dispatcher)
        assert not lock.acquire(timeout=0.2)
        waited = time.monotonic()
        holder.kill()
        assert lock.acquire(timeout=20)
        assert time.monotonic() - waited < 5.0, "sooner than a lease"
        lock.release()


def test_stopped_program_loses_lock_after_lease(program: Program) -> None:
    with zd.DispatchServer(lease_s=LEASE_S) as dispatcher:
        holder = program(HOLDER, dispatcher.address, "held")
        os.kill(holder.pid, signal.SIGSTOP)
        lock = zd.Lock("l", cluster=dispatcher)
        assert not lock.acquire(timeout=LEASE_S / 4)
        assert lock.acquire(timeout=20)
        os.kill(holder.pid, signal.SIGCONT)
        assert line_of(holder).startswith("lost this process lost lock 'l' before the release")
        assert not zd.Lock("l", cluster=dispatcher).acquire(timeout=0.1), "it is still held here"
        assert zd.Queue("late", cluster=dispatcher).get(timeout=5) == "after the stop"
        lock.release()


def test_shortly_stopped_program_keeps_lock(program: Program) -> None:
    with zd.DispatchServer(lease_s=4 * LEASE_S) as dispatcher:
        holder = program(HOLDER, dispatcher.address, "held")
        lock = zd.Lock("l", cluster=dispatcher)
        os.kill(holder.pid, signal.SIGSTOP)
        assert not lock.acquire(timeout=LEASE_S / 2)
        os.kill(holder.pid, signal.SIGCONT)
        assert line_of(holder) == "released\n"
        assert lock.acquire(timeout=20)
        lock.release()


def test_lock_survives_kill_of_dispatcher(
    port: int, program: Program, start_dispatcher: StartDispatcher
) -> None:
    address, lease_s = f"127.0.0.1:{port}", 3 * LEASE_S  # longer than the start of a dispatcher
    dispatcher = start_dispatcher(port=port, lease_s=lease_s)
    holder = program(HOLDER, address, "held")
    lock, fences = zd.Lock("l", cluster=address), list[int]()

    def take() -> None:
        with lock:
            fences.append(lock.fence)

    waiter = threading.Thread(target=take, daemon=True)
    waiter.start()
    dispatcher.kill()
    dispatcher.wait()
    start_dispatcher(port=port, lease_s=lease_s)
    waiter.join(1.2 * lease_s)
    assert not fences, "the holder has named its lock to the new dispatcher"
    assert line_of(holder) == "released\n"
    waiter.join(20)
    assert len(fences) == 1


def test_killed_adders_count_exactly_or_lose_number(program: Program) -> None:
    """An adder that dies between `get` and `put` takes the number with it, and the test puts the
    next one. Otherwise each sum is one above the last."""
    with zd.DispatchServer() as dispatcher:
        total = zd.Queue("total", cluster=dispatcher)
        lock = zd.Lock("l", cluster=dispatcher)
        total.put(0)
        adders = [program(ADDER, dispatcher.address, "begun") for _ in range(3)]
        last = 0
        for _ in range(4):
            until(lambda: read(lock, total, last) > last + 5)  # noqa: B023
            victim = adders.pop(0)
            victim.kill()
            victim.wait()
            adders.append(program(ADDER, dispatcher.address, "begun"))
            last = read(lock, total, last)


def read(lock: zd.Lock, total: zd.Queue, lost: int) -> int:
    """Return the number. If it was lost with an adder, put the next one."""
    with lock:
        try:
            number: int = total.get(timeout=0.1)
        except queue.Empty:
            number = lost + 1
        assert number >= lost
        assert total.empty(), "the lock excludes others"
        total.put(number)
        return number


def test_item_goes_to_one_of_killed_getters(program: Program) -> None:
    count, received = 600, list[int]()
    with zd.DispatchServer() as dispatcher:
        jobs = zd.Queue("jobs", cluster=dispatcher)
        getters = [program(GETTER, dispatcher.address, "begun") for _ in range(3)]

        def end(getter: Any) -> None:
            getter.kill()
            assert getter.stdout is not None
            received.extend(int(line) for line in getter.stdout.read().split())

        for number in range(count):
            jobs.put(number)
            if number % 150 == 100:
                end(getters.pop(0))
                getters.append(program(GETTER, dispatcher.address, "begun"))
        until(jobs.empty)
        # what a getter had received when it died has returned, and reaches another getter
        time_out = threading.Event()
        until(lambda: time_out.wait(0.3) or jobs.empty())
        for getter in getters:
            end(getter)
    assert len(received) == len({*received})
    assert count - len(received) <= 4, "one for each kill, which was confirmed and not printed"


def test_getters_notice_lost_queue(port: int, start_dispatcher: StartDispatcher) -> None:
    address = f"127.0.0.1:{port}"
    dispatcher = start_dispatcher(port=port, lease_s=LEASE_S)
    jobs = zd.Queue("jobs", cluster=address)
    jobs.put(1)
    dispatcher.kill()
    dispatcher.wait()
    start_dispatcher(port=port, lease_s=LEASE_S)
    with pytest.raises(errors.AbortedError, match="was restarted, so the state of queue 'jobs'"):
        jobs.get(timeout=20)
    jobs.put(2)
    assert jobs.get() == 2

"""Locks, semaphores, queues and events by name, at a dispatcher in this process, and in functions on
worker processes."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.ports import free_port
from zmqdist import errors, limits
from zmqdist.coordination.primitives_client import PrimitivesLink, link_to
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import ZmqClient
from zmqdist.transport.credentials import Credentials


@pytest.fixture
def at(dispatcher: zd.DispatchServer) -> Iterator[str]:
    """The address of a dispatcher whose loop has no fault in the end."""
    yield dispatcher.address
    assert dispatcher._loop.faults == 0  # reach: nothing else shows faults of the loop


def in_thread(fn: Callable[..., Any], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=fn, args=args, daemon=True)
    thread.start()
    return thread


def test_lock_excludes_threads(at: str) -> None:
    inside, seen = [0], list[int]()

    def work() -> None:
        for _ in range(10):
            with zd.Lock("l", cluster=at):
                inside[0] += 1
                seen.append(inside[0])
                inside[0] -= 1

    threads = [in_thread(work) for _ in range(5)]
    for thread in threads:
        thread.join(30)
    assert seen == [1] * 50


def test_lock_is_used_like_that_of_threading(at: str) -> None:
    lock = zd.Lock("l", cluster=at)
    assert lock.acquire()
    assert lock.locked()
    assert not lock.acquire(False)
    assert not lock.acquire(blocking=False)
    assert not lock.acquire(timeout=0.01)
    assert not lock.acquire(True, 0.01)
    assert lock.fence > 0
    zd.Lock("l", cluster=at).release()  # another object of this process
    assert not lock.locked()
    assert lock.fence == 0
    assert lock.acquire(timeout=-1)
    lock.release()
    with pytest.raises(RuntimeError, match="this process does not hold lock 'l'"):
        lock.release()


@pytest.mark.parametrize(
    "arguments",
    [{"timeout": -2}, {"blocking": False, "timeout": 1}, {"timeout": "soon"}],
)
def test_wrong_time_out_of_acquire_is_refused(at: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="time"):
        zd.Lock("l", cluster=at).acquire(**arguments)


def test_fences_grow(at: str) -> None:
    fences = []
    for _ in range(3):
        with zd.Lock("l", cluster=at) as lock:
            fences.append(lock.fence)
    assert fences == sorted({*fences})


def test_semaphore_counts_places(at: str) -> None:
    places = zd.Semaphore("s", 2, cluster=at)
    with places, places:
        assert places.locked()
        assert not places.acquire(timeout=0.01)
    assert not places.locked()
    with pytest.raises(ValueError, match="value is 0, wants 1 or more"):
        zd.Semaphore("s", 0, cluster=at)
    with places, pytest.raises(errors.InvalidArgumentError, match="in use with size 2, so it"):
        zd.Semaphore("s", 3, cluster=at).acquire()


def test_queue_is_used_like_that_of_standard_library(at: str) -> None:
    jobs = zd.Queue("q", 2, cluster=at)
    assert jobs.empty()
    jobs.put({"a": 1})
    jobs.put_nowait(None)
    assert jobs.full()
    assert jobs.qsize() == 2
    with pytest.raises(queue.Full):
        jobs.put_nowait(3)
    with pytest.raises(queue.Full):
        jobs.put(3, timeout=0.01)
    assert zd.Queue("q", cluster=at).get() == {"a": 1}
    assert jobs.get() is None
    with pytest.raises(queue.Empty):
        jobs.get_nowait()
    with pytest.raises(queue.Empty):
        jobs.get(timeout=0.01)


def test_array_in_queue_is_private_and_writable(at: str) -> None:
    jobs = zd.Queue("q", cluster=at)
    array = np.arange(50_000)
    jobs.put([array, "with an array beside the pickle"])
    array[0] = 7
    copy, _ = jobs.get()
    copy[1] = 5
    assert copy[0] == 0


def test_getter_waits_for_putter(at: str) -> None:
    jobs, items = zd.Queue("q", cluster=at), list[Any]()
    getter = in_thread(lambda: items.append(jobs.get()))
    zd.Queue("q", cluster=at).put(5)
    getter.join(20)
    assert items == [5]


@pytest.mark.parametrize(
    ("item", "kind", "text"),
    [
        (bytes(2**20), errors.InvalidArgumentError, r"does not fit.*at most 1048576 bytes an item"),
        (np.zeros(2**18), errors.InvalidArgumentError, r"an item of \d+ bytes does not fit"),
        (threading.Lock(), errors.InvalidArgumentError, "pickle"),
    ],
    ids=["bytes", "array", "lock"],
)
def test_item_that_cannot_travel_is_refused(
    at: str, item: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        zd.Queue("q", cluster=at).put(item)
    assert zd.Queue("q", cluster=at).empty()


def test_bytes_of_all_queues_are_bounded(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "QUEUED_BYTES_MAX", 2_000)
    jobs = zd.Queue("q", cluster=at)
    jobs.put(bytes(1_000))
    with pytest.raises(errors.ResourceExhaustedError, match="at most 2000 are kept"):
        zd.Queue("other", cluster=at).put(bytes(1_000))
    jobs.get()
    zd.Queue("other", cluster=at).put(bytes(1_000))


def test_safe_queue_unpickles_nothing(at: str) -> None:
    safe, any_form = zd.Queue("q", cluster=at, results="safe"), zd.Queue("q", cluster=at)
    safe.put((1, np.ones(20_000)))
    number, array = any_form.get()
    assert (number, array.sum()) == (1, 20_000)
    with pytest.raises(errors.InvalidArgumentError, match="results: safe"):
        safe.put({1, object()})
    any_form.put({"a": 1})
    with pytest.raises(errors.FailedPreconditionError, match="results: safe"):
        safe.get()
    assert pickle.loads(pickle.dumps(safe))._target.form.safe_only  # reach: what it would unpickle


def test_event_is_used_like_that_of_threading(at: str) -> None:
    stop = zd.Event("e", cluster=at)
    assert not stop.is_set()
    assert not stop.wait(0.01)
    waits = list[bool]()
    threads = [in_thread(lambda: waits.append(stop.wait(20))) for _ in range(3)]
    stop.set()
    for thread in threads:
        thread.join(20)
    assert waits == [True] * 3
    assert stop.wait(0)
    stop.clear()
    assert not stop.is_set()


@pytest.mark.parametrize(
    "make",
    [
        lambda at: zd.Lock("x", cluster=at),
        lambda at: zd.Semaphore("x", 3, cluster=at),
        lambda at: zd.Queue("x", 4, cluster=at),
        lambda at: zd.Event("x", cluster=at),
    ],
)
def test_objects_are_pickled_by_name_and_cluster(at: str, make: Callable[[str], Any]) -> None:
    primitive = make(at)
    copy = pickle.loads(pickle.dumps(primitive))
    assert type(copy) is type(primitive)
    assert repr(copy) == repr(primitive) == f"<{type(copy).__name__} 'x' at {at}>"
    assert copy._size == primitive._size  # reach: no method of all four shows it


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda at: zd.Lock("", cluster=at), "1 to 1024 characters, not 0"),
        (lambda at: zd.Queue("x" * 1025, cluster=at), "1 to 1024 characters, not 1025"),
        (lambda at: zd.Lock(5, cluster=at), "name"),  # type: ignore[arg-type]
        (lambda at: zd.Event("x", cluster="nowhere"), "nowhere"),
        (lambda at: zd.Event("x"), "no target was given"),
    ],
)
def test_wrong_argument_is_refused(at: str, call: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(at)


def test_interrupted_waiter_leaves_its_line(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupt(Exception):
        """In the place of KeyboardInterrupt, which would end the run of the tests."""

    lock = zd.Lock("l", cluster=at)
    lock.acquire()
    former = PrimitivesLink._call  # reach: what Ctrl-C interrupts

    def interrupted(self: PrimitivesLink, step: Any) -> Any:
        if step.method == "request":
            internal_client.start(self._rpc, "primitives.request", *step.args)  # reach: as the link
            raise Interrupt
        return former(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(PrimitivesLink, "_call", interrupted)
        with pytest.raises(Interrupt):
            lock.acquire()
    lock.release()
    assert lock.acquire(timeout=20)
    lock.release()


def test_thousand_waiters_hold_no_thread(at: str) -> None:
    client = ZmqClient(at, security=Credentials().client(at, "submit"))
    call = partial(internal_client.start, client)
    try:
        call("primitives.open", 1, os.getpid(), []).get_value()
        before = threading.active_count()
        waits = [
            call("primitives.request", 1, number, "acquire", "lock", "l", 1, b"", None)
            for number in range(1, 1001)
        ]
        places = list[int]()
        for number, wait in enumerate(waits, 1):
            places.append(wait.get_value())
            call("primitives.renew", 1, os.getpid(), [], [number])
        assert places == sorted(places)
        assert threading.active_count() <= before + 1, "one thread reads replies"
    finally:
        client.close()


HOSTILE: list[tuple[Any, ...]] = [
    ("open", -1, 1, []),
    ("open", "x", 1, []),
    ("open", 1, None, []),
    ("open", 1, 1, 5),
    ("open", 1, 1, [5]),
    ("open", 1, 1, [(1, "queue", "q", 1, 1)]),
    ("open", 1, 1, [(1, "lock", "l", 2, 1)]),
    ("open", 1, 1, [(1, ["lock"], "l", 1, 1)]),
    ("open", 1, 1, [(1, "lock", "l", 1, 2**63)]),
    ("renew", 1, 1, None, []),
    ("renew", 1, 1, [], ["a"]),
    ("renew", 1, 1, [-1], []),
    ("renew", [], 1, [], []),
    ("renew", 1, 1, [1] * (limits.PRIMITIVE_REQUESTS_MAX + 1), []),
    ("request", 1, 1, "steal", "lock", "l", 1, b"", None),
    ("request", 1, 1, ["acquire"], "lock", "l", 1, b"", None),
    ("request", 1, 1, "acquire", "door", "l", 1, b"", None),
    ("request", 1, 1, "acquire", ["lock"], "l", 1, b"", None),
    ("request", 1, 1, "acquire", "lock", "l" * 1025, 1, b"", None),
    ("request", 1, 1, "acquire", "lock", b"l", 1, b"", None),
    ("request", 1, 1, "acquire", "lock", "l", 2, b"", None),
    ("request", 1, 1, "acquire", "lock", "l", None, b"", None),
    ("request", 1, 1, "acquire", "semaphore", "s", 0, b"", None),
    ("request", 1, 1, "acquire", "semaphore", "s", -1, b"", None),
    ("request", 1, 1, "acquire", "semaphore", "s", 1.5, b"", None),
    ("request", 1, 1, "put", "queue", "q", True, b"", None),
    ("request", 1, 1, "put", "queue", "q", 2**63, b"", None),
    ("request", 1, 1, "put", "queue", "q", None, "text", None),
    ("request", 1, 1, "put", "queue", "q", None, bytes(2**20 + 1), None),
    ("request", 1, 1, "put", "queue", "q", None, np.zeros(3), None),
    ("request", 1, -1, "put", "queue", "q", None, b"", None),
    ("request", 1, 1, "get", "queue", "q", None, b"", -1.0),
    ("request", 1, 1, "get", "queue", "q", None, b"", float("nan")),
    ("request", 1, 1, "get", "queue", "q", None, b"", "soon"),
    ("request", 1, 1),
]


@pytest.mark.parametrize("message", HOSTILE, ids=lambda message: str(message)[:60])
def test_hostile_message_is_refused(at: str, message: tuple[Any, ...]) -> None:
    client = ZmqClient(at, security=Credentials().client(at, "submit"))
    try:
        internal_client.start(client, "primitives.open", 1, 1, []).get_value()
        method, *args = message
        call = internal_client.start(client, f"primitives.{method}", *args)
        with pytest.raises(errors.InvalidArgumentError):
            call.get_value()
    finally:
        client.close()
    assert zd.Queue("q", cluster=at).empty()


def test_connection_has_one_client(at: str) -> None:
    client = ZmqClient(at, security=Credentials().client(at, "submit"))
    call = partial(internal_client.start, client)
    try:
        call("primitives.open", 1, 1, []).get_value()
        call("primitives.request", 1, 1, "acquire", "lock", "l", 1, b"", None).get_value()
        call("primitives.open", 2, 1, []).get_value()
        assert zd.Lock("l", cluster=at).acquire(timeout=limits.LEASE_S / 2)
        zd.Lock("l", cluster=at).release()
        with pytest.raises(errors.AbortedError):
            call("primitives.renew", 1, 1, [], [1]).get_value()
    finally:
        client.close()


def test_names_are_bounded(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PRIMITIVES_MAX", 3)
    for number in range(3):
        zd.Event(str(number), cluster=at).set()
    with pytest.raises(errors.ResourceExhaustedError, match="3 locks, semaphores, queues"):
        zd.Lock("l", cluster=at).acquire()
    zd.Event("0", cluster=at).clear()
    with zd.Lock("l", cluster=at):
        pass


def test_place_survives_restart_of_dispatcher() -> None:
    port = free_port()
    at = f"127.0.0.1:{port}"
    with zd.DispatchServer(port=port, lease_s=1.0):
        lock = zd.Lock("l", cluster=at)
        assert lock.acquire(timeout=10), "one lease after the start of the dispatcher"
        fence = lock.fence
    with zd.DispatchServer(port=port, lease_s=1.0):
        other = PrimitivesLink(at, Credentials())
        request = other.machine.request("acquire", ("lock", "l"), 1, b"", time.monotonic() + 3.0, 0)
        assert other.run(request)[0] is None
        assert lock.fence == fence
        lock.release()
        assert lock.acquire(timeout=10)
        assert lock.fence > fence
        lock.release()


def test_state_of_queue_and_event_is_lost_with_dispatcher() -> None:
    port = free_port()
    at = f"127.0.0.1:{port}"
    jobs, stop = zd.Queue("q", cluster=at), zd.Event("e", cluster=at)
    failures = list[str]()

    def wait() -> None:
        with pytest.raises(errors.AbortedError) as failure:
            zd.Queue("empty", cluster=at).get()
        failures.append(failure.value.message)
        del failure

    with zd.DispatchServer(port=port):
        jobs.put(1)
        stop.set()
        waiter = in_thread(wait)
        while not zd.Queue("empty", cluster=at).empty():
            pass
    with zd.DispatchServer(port=port):
        for call in (jobs.get, stop.is_set):
            with pytest.raises(errors.AbortedError, match="was restarted, so the state of"):
                call()
        waiter.join(20)
        assert ["was restarted" in text for text in failures] == [True]
        assert jobs.empty()
        assert not stop.is_set()


def test_operation_without_dispatcher_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmqdist.coordination.primitives_client_machine.CONNECT_S", 0.2)
    lock = zd.Lock("l", cluster=f"127.0.0.1:{free_port()}")
    with pytest.raises(errors.UnavailableError, match=r"no dispatcher has answered at .* for 0.2"):
        lock.acquire(timeout=0.1)


def test_dropped_objects_keep_held_place(at: str) -> None:
    zd.Lock("l", cluster=at).acquire()
    assert zd.Lock("l", cluster=at).locked()
    link = link_to(at, Credentials())
    assert link.machine.hold(("lock", "l"), time.monotonic()) is not None
    del link
    zd.Lock("l", cluster=at).release()


def counted(at: str) -> int:
    with zd.Lock("l", cluster=at):
        total = zd.Queue("n", cluster=at)
        total.put(total.get(timeout=20) + 1)
        return total.qsize()


def test_tasks_share_lock_and_queue(at: str) -> None:
    total = zd.Queue("n", cluster=at)
    total.put(0)
    with (
        zd.Server.create_local_server() as one,
        zd.Server.create_local_server() as two,
        zd.Session(one.target) as first,
        zd.Session(two.target) as second,
    ):
        assert [session.run(counted, at) for session in (first, second, first)] == [1, 1, 1]
    assert total.get() == 3


def test_forked_process_holds_nothing_of_its_parent(at: str) -> None:
    lock, jobs = zd.Lock("l", cluster=at), zd.Queue("q", cluster=at)
    with lock:
        child = os.fork()
        if not child:
            outcome = 1
            try:
                if not lock.acquire(timeout=0.1):
                    jobs.put(os.getpid())
                    outcome = 0
            finally:
                os._exit(outcome)
        assert jobs.get(timeout=20) == child
        assert os.waitpid(child, 0)[1] == 0
    with lock:
        pass


# -- in functions on workers -----------------------------------------------------------------------


def adds(counter: zd.Queue, lock: zd.Lock) -> int:
    """Add 1 to the number in a queue, which only a lock makes exact."""
    with lock:
        number: int = counter.get(timeout=20)
        time.sleep(0.001)
        counter.put(number + 1)
    return os.getpid()


def own_names() -> list[str]:
    """Use each kind in a function, which names no cluster."""
    with zd.Lock("l"), zd.Semaphore("s", 2):
        zd.Queue("n").put("from a function")
        zd.Event("e").set()
    return [repr(zd.Lock("l")), repr(pickle.loads(pickle.dumps(zd.Lock("l"))))]


def gets(name: str) -> Any:
    return zd.Queue(name).get(timeout=30)


def puts(name: str, item: int) -> None:
    zd.Queue(name, 1).put(item, timeout=30)


def waits_for(name: str) -> bool:
    return zd.Event(name).wait(30)


def sets(name: str) -> None:
    zd.Event(name).set()


def dies_holding(lock: zd.Lock, attempts: zd.Queue) -> None:
    attempts.put(os.getpid())
    lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes("shared primitives")
def test_functions_on_workers_share_lock_and_queue(cluster: zd.local_cluster) -> None:
    counter, lock = zd.Queue("n", cluster=cluster), zd.Lock("l", cluster=cluster)
    counter.put(0)
    with cluster.coordinator() as coordinator:
        pids = coordinator.gather([coordinator.submit(adds, counter, lock) for _ in range(40)])
    assert len({*pids}) > 1
    assert counter.get() == 40


def test_function_finds_its_cluster(cluster: zd.local_cluster) -> None:
    with cluster.coordinator() as coordinator:
        first, second = coordinator.submit(own_names).result()
    assert first == second
    stop = zd.Event("e", cluster=cluster)
    assert stop.is_set()
    stop.clear()
    assert zd.Queue("n", cluster=cluster).get() == "from a function"


class Adder:
    """An actor that adds to a number in a queue."""

    def __init__(self) -> None:
        self.lock, self.total = zd.Lock("l"), zd.Queue("n")

    def add(self, count: int) -> None:
        for _ in range(count):
            with self.lock:
                self.total.put(self.total.get(timeout=20) + 1)

    def hold(self) -> int:
        self.lock.acquire()
        return self.lock.fence


def test_actors_share_lock_until_they_are_killed(cluster: zd.local_cluster) -> None:
    total, lock = zd.Queue("n", cluster=cluster), zd.Lock("l", cluster=cluster)
    total.put(0)
    with cluster.coordinator() as coordinator:
        first, second = coordinator.actor(Adder), coordinator.actor(Adder)
        coordinator.gather([first.add(20), second.add(20)])
        assert total.get() == 40
        assert first.hold().result() > 0
        assert not lock.acquire(timeout=0.1)
        coordinator.kill(first)
        assert lock.acquire(timeout=limits.LEASE_S / 2)
        lock.release()


@pytest.mark.parametrize("processes", [True, False])
def test_function_that_waits_gives_its_place_to_later_work(processes: bool) -> None:
    with zd.local_cluster(workers=1, processes=processes) as small, small.coordinator() as co:
        getter, waiter = co.submit(gets, "q"), co.submit(waits_for, "e")
        putters = [co.submit(puts, "q", number) for number in range(2)]
        setter = co.submit(sets, "e")
        last = co.submit(gets, "q")
        assert {getter.result(), last.result()} == {0, 1}
        assert waiter.result()
        co.gather([*putters, setter])


def test_waits_beyond_bound_keep_their_places() -> None:
    with (
        zd.local_cluster(workers=1, processes=False) as small,
        small.coordinator() as co,
    ):
        getters = [co.submit(gets, "q") for _ in range(100)]
        jobs = zd.Queue("q", cluster=small)
        for number in range(100):
            jobs.put(number)
        assert sorted(co.gather(getters)) == [*range(100)]


@pytest.mark.killed("shared primitives")
@pytest.mark.shares_cluster
def test_killed_holder_frees_lock_at_once(cluster: zd.local_cluster) -> None:
    lock, attempts = zd.Lock("l", cluster=cluster), zd.Queue("pids", cluster=cluster)
    with cluster.coordinator() as coordinator:
        value = coordinator.submit(dies_holding, lock, attempts)
        assert isinstance(value.exception(), errors.UnavailableError)
    assert lock.acquire(timeout=limits.LEASE_S / 2)
    lock.release()
    assert len({attempts.get() for _ in range(limits.ATTEMPTS_MAX)}) == limits.ATTEMPTS_MAX

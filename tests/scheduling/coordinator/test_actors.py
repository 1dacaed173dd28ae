"""Actors as programs use them: calls, their order and their ends, handles, names and lifetimes."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.limits import STREAM_AHEAD
from zmqdist.transport.credentials import Credentials


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.seen: list[Any] = []

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise ValueError("as asked")

    def echo(self, value: Any) -> Any:
        return value

    def note(self, value: Any) -> list[Any]:
        self.seen.append(value)
        return self.seen

    def wait_for(self, path: str) -> int:
        while not os.path.exists(path):
            if zd.cancelled():
                return -1
            time.sleep(0.005)
        return self.count

    def add_at(self, other: Any, number: int) -> int:
        result: int = other.add(number).result(20)
        return result

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def stop(self, code: int) -> None:
        os._exit(code)

    def itself(self, handle: Any) -> None:
        handle.add(1)


class Source:
    def __init__(self) -> None:
        self.made = 0
        self.is_closed = False

    def count(self, end: int, size: int = 0) -> Iterator[Any]:
        try:
            for number in range(end):
                self.made += 1
                yield np.full(size, number) if size else number
        finally:
            self.is_closed = True

    def fail_after(self, end: int) -> Iterator[int]:
        yield from range(end)
        raise ValueError("no more")

    def state(self) -> tuple[int, bool]:
        return self.made, self.is_closed


class AsyncSource:
    async def count_async(self, end: int) -> Any:
        for number in range(end):
            await asyncio.sleep(0)
            yield number

    def count_plain(self, end: int) -> Iterator[int]:
        yield from range(end)


class Broken:
    def __init__(self) -> None:
        raise RuntimeError("no such model")

    def use(self) -> None:
        pass


class Waiter:
    def __init__(self) -> None:
        self.running = self.most = 0
        self.event = asyncio.Event()

    async def wait(self) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.event.wait()
        finally:
            self.running -= 1
        return self.most

    async def open(self) -> None:
        self.event.set()

    def count(self) -> int:
        return self.running


@pytest.fixture
def cluster(processes: zd.local_cluster) -> zd.local_cluster:
    return processes


@pytest.fixture
def coordinator(in_processes: ClusterCoordinator) -> ClusterCoordinator:
    return in_processes


def add_to(counter: Any, number: int) -> int:
    result: int = counter.add(number).result(20)
    return result


def is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


# -- calls -----------------------------------------------------------------------------------------


def test_calls_run_in_order_of_caller(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter, 1)
    values = [counter.add(1) for _ in range(1000)]
    assert coordinator.gather(values) == list(range(2, 1002))


def test_actor_has_process_of_its_own(coordinator: ClusterCoordinator) -> None:
    counters = [coordinator.actor(Counter) for _ in range(3)]
    pids = coordinator.gather([counter.pid() for counter in counters])
    slots = coordinator.gather(coordinator.map(lambda _: os.getpid(), range(4)))
    assert len({*pids}) == 3
    assert not {*pids} & {*slots, os.getpid()}


def test_large_arguments_of_init_live_with_their_actor(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter, np.ones(1 << 17))
    assert counter.add(1).result(20)[0] == 2.0
    assert coordinator.snapshot().held.parts == 1
    del counter
    gc.collect()
    until(lambda: coordinator.snapshot().held.parts == 0)


def test_error_of_method_is_raised_and_actor_lives(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter)
    with pytest.raises(ValueError, match="as asked") as raised:
        counter.fail().result(20)
    assert "Counter.fail" in str(raised.value.__cause__)
    assert counter.add(1).result(20) == 1


def test_error_of_init_is_that_of_each_call(coordinator: ClusterCoordinator) -> None:
    broken = coordinator.actor(Broken)
    calls = [broken.use(), broken.use()]
    for call in calls:
        with pytest.raises(RuntimeError, match="no such model"):
            call.result(20)
    with pytest.raises(RuntimeError, match="no such model"):
        broken.use().result(20)


@pytest.mark.parametrize("name", ["ad", "_count", "__len__"])
def test_unknown_method_is_refused(coordinator: ClusterCoordinator, name: str) -> None:
    counter = coordinator.actor(Counter)
    with pytest.raises(AttributeError, match="the actor Counter has no method"):
        getattr(counter, name)
    assert set(dir(counter)) >= {"add", "pid"}


def test_method_of_class_calls_that_of_actor(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter, 1)
    assert counter[Counter.add](2).result(20) == counter.add(0).result(20) == 3
    assert repr(counter[Counter.add].options(name="sum")) == "<method sum>"


@pytest.mark.parametrize(
    ("method", "error", "text"),
    [
        (0, TypeError, "0 is no public method of the actor's class"),
        (SimpleNamespace(__name__="add"), TypeError, "is no public method of the actor's class"),
        (Counter.__init__, TypeError, "is no public method of the actor's class"),
        (str.upper, AttributeError, "the actor Counter has no method upper"),
    ],
)
def test_index_that_is_no_method_is_refused(
    coordinator: ClusterCoordinator, method: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        coordinator.actor(Counter)[method]


def test_handle_is_not_iterable(coordinator: ClusterCoordinator) -> None:
    with pytest.raises(TypeError, match="is no public method"):
        list(coordinator.actor(Counter))  # type: ignore[call-overload]


def test_arguments_are_those_of_the_moment(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter)
    numbers = [1]
    array = np.zeros(200_000)
    calls = counter.echo(numbers), counter.echo(array)
    numbers.append(2)
    array[:] = 7
    assert calls[0].result(20) == [1]
    assert not calls[1].result(20).any()


def test_large_array_travels_both_ways(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter)
    array = np.arange(1 << 20, dtype=np.float64)
    for _ in range(3):
        result = counter.echo(array).result(30)
        np.testing.assert_array_equal(result, array)
        result[:] = 0  # the caller owns it


def test_pending_input_holds_back_later_calls(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    counter, gate = coordinator.actor(Counter), tmp_path / "gate"
    pending = coordinator.submit(_wait_for, str(gate))
    calls = [counter.note(pending), counter.note("later")]
    gate.touch()
    assert calls[1].result(20) == ["opened", "later"]


def _wait_for(path: str) -> str:
    while not os.path.exists(path):
        time.sleep(0.005)
    return "opened"


def test_failed_input_fails_its_call_only(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter)
    call, later = counter.note(coordinator.submit(int, "x")), counter.note(1)
    with pytest.raises(errors.ClosureInputError):
        call.result(20)
    assert later.result(20) == [1]


def test_result_is_input_of_function_and_of_actor(coordinator: ClusterCoordinator) -> None:
    first, second = coordinator.actor(Counter, 1), coordinator.actor(Counter, 10)
    assert second.add(first.add(1)).result(20) == 12
    assert coordinator.submit(abs, first.add(-5)).result(20) == 3


def test_join_and_rounds_ignore_calls(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    counter, gate = coordinator.actor(Counter), tmp_path / "gate"
    failed, waiting = counter.fail(), counter.wait_for(str(gate))
    failed.exception(20)
    coordinator.submit(abs, -1)
    coordinator.join(20)
    assert not waiting.done()
    gate.touch()
    assert waiting.result(20) == 0


def test_timeout_ends_call_and_not_actor(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    counter = coordinator.actor(Counter, 5)
    slow = counter.wait_for.options(timeout=0.2, name="slow one")(str(tmp_path / "never"))
    with pytest.raises(errors.DeadlineExceededError, match="slow one"):
        slow.result(20)
    assert counter.add(1).result(20) == 6


def test_cancelled_calls_end_early_or_never_run(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    counter = coordinator.actor(Counter)
    running, waiting, last = (
        counter.wait_for(str(tmp_path / "never")),
        counter.note("cancelled"),
        counter.note("last"),
    )
    assert waiting.cancel()
    assert running.cancel()
    assert last.result(20) == ["last"]
    assert running.cancelled()
    assert waiting.cancelled()


def test_call_of_own_method_is_refused(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter)
    with pytest.raises(errors.FailedPreconditionError, match="would wait for itself"):
        counter.itself(counter).result(20)


def test_async_methods_run_concurrently(coordinator: ClusterCoordinator) -> None:
    waiter = coordinator.actor(Waiter)
    calls = [waiter.wait() for _ in range(50)]
    waiter.open()
    assert max(coordinator.gather(calls)) == 50


def test_concurrency_bounds_async_calls(coordinator: ClusterCoordinator) -> None:
    waiter = coordinator.options(concurrency=3).actor(Waiter)
    calls = [waiter.wait() for _ in range(2)]
    waiter.open().result(20)
    calls += [waiter.wait() for _ in range(10)]
    assert max(coordinator.gather(calls)) <= 3


def test_cancelled_async_call_is_interrupted(coordinator: ClusterCoordinator) -> None:
    waiter = coordinator.actor(Waiter)
    call = waiter.wait()
    until(lambda: waiter.count().result(20) == 1)
    call.cancel()
    until(lambda: waiter.count().result(20) == 0)


def test_call_is_awaitable(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter)

    async def run() -> list[int]:
        return await asyncio.gather(counter.add(1), counter.add(1))

    assert asyncio.run(run()) == [1, 2]


def test_threads_share_handle(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter)

    def add_often() -> None:
        for _ in range(100):
            counter.add(1).result(20)

    threads = [threading.Thread(target=add_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counter.add(0).result(20) == 400


# -- generators ------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [0, 1, 1000])
def test_generator_streams_in_order(coordinator: ClusterCoordinator, end: int) -> None:
    assert list(coordinator.actor(Source).count(end)) == list(range(end))


def test_large_values_stream(coordinator: ClusterCoordinator) -> None:
    source = coordinator.actor(Source)
    sums = [int(array[0]) for array in source.count(100, 50_000)]
    assert sums == list(range(100))


def test_generator_waits_for_reader(coordinator: ClusterCoordinator) -> None:
    source = coordinator.actor(Source)
    stream = source.count(10_000)
    assert next(stream) == 0
    stream.close()
    made, is_closed = source.state().result(20)
    assert made <= 3 * STREAM_AHEAD
    assert is_closed


def test_dropped_stream_closes_generator(coordinator: ClusterCoordinator) -> None:
    source = coordinator.actor(Source)
    for number in source.count(1_000_000):
        if number == 3:
            break
    gc.collect()
    assert source.state().result(20)[1]


def test_error_of_generator_follows_its_values(coordinator: ClusterCoordinator) -> None:
    values: list[int] = []
    with pytest.raises(ValueError, match="no more"):
        values.extend(coordinator.actor(Source).fail_after(40))
    assert values == list(range(40))


@pytest.mark.parametrize("method", ["count_async", "count_plain"])
def test_generators_of_async_actor_stream(coordinator: ClusterCoordinator, method: str) -> None:
    source = coordinator.actor(AsyncSource)
    streams = [getattr(source, method)(200) for _ in range(2)]

    async def read(stream: Any) -> list[int]:
        return [value async for value in stream]

    async def read_both() -> list[list[int]]:
        return await asyncio.gather(*map(read, streams))

    assert asyncio.run(read_both()) == [list(range(200))] * 2


def test_death_ends_stream_after_its_values(coordinator: ClusterCoordinator) -> None:
    source = coordinator.actor(_Dying)
    values: list[int] = []
    with pytest.raises(errors.ActorLostError):
        values.extend(source.count())
    assert values == list(range(len(values)))


class _Dying:
    def count(self) -> Iterator[int]:
        yield from range(20)
        os._exit(1)


# -- handles ---------------------------------------------------------------------------------------


@pytest.mark.shares_cluster  # slots and actors that use handles stay connected
def test_handle_travels_to_functions_and_actors(coordinator: ClusterCoordinator) -> None:
    counter, other = coordinator.actor(Counter, 1), coordinator.actor(Counter)
    assert coordinator.submit(add_to, counter, 2).result(20) == 3
    assert coordinator.submit(lambda: add_to(counter, 2)).result(20) == 5
    assert other.add_at(counter, 2).result(20) == 7


@pytest.mark.shares_cluster
def test_handle_in_result_is_the_same_actor(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter)
    returned = coordinator.submit(lambda value: value, counter).result(20)
    assert returned == counter
    assert {returned, counter} == {counter}
    assert pickle.loads(pickle.dumps(counter)).add(1).result(20) == 1


def test_actor_ends_with_its_last_handle(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter)
    pid = counter.pid().result(20)
    same = pickle.loads(pickle.dumps(counter))
    del counter
    gc.collect()
    assert same.pid().result(20) == pid
    del same
    gc.collect()
    until(lambda: is_gone(pid))


def test_actors_dropped_at_once_end(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator
) -> None:
    for _ in range(20):
        coordinator.options(name="dropped").actor(Counter)
    machine = coordinator._runtime.machine  # reach: an actor that never ends shows nowhere else
    until(lambda: not machine.actors.actors)


def test_unfinished_work_keeps_actor(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    counter, gate = coordinator.actor(Counter, 4), tmp_path / "gate"
    pid = counter.pid().result(20)
    call = counter.wait_for(str(gate))
    del counter
    gc.collect()
    gate.touch()
    assert call.result(20) == 4
    del call
    gc.collect()
    until(lambda: is_gone(pid))


@pytest.mark.shares_cluster
def test_argument_of_init_lives_with_its_actor(coordinator: ClusterCoordinator) -> None:
    first = coordinator.actor(_Stage, coordinator.actor(_Stage, None))
    gc.collect()
    assert first.run(1).result(20) == 3


class _Stage:
    def __init__(self, following: Any) -> None:
        self.following = following

    async def run(self, number: int) -> int:
        number += 1
        return number if self.following is None else await self.following.run(number)


@pytest.mark.shares_cluster
def test_handle_elsewhere_does_not_keep_actor(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator
) -> None:
    keeper = coordinator.actor(_Keeper)
    with ClusterCoordinator(cluster) as maker:
        counter = maker.options(name="elsewhere").actor(Counter)
        counter.add(1).result(20)
        found = coordinator.get_actor("elsewhere", 20)
        keeper.keep(found).result(20)
    # the end of its program reaches it a moment later
    until(lambda: isinstance(found.add(1).exception(20), errors.ActorLostError))
    until(lambda: isinstance(keeper.add(1).exception(20), errors.ActorLostError))


class _Keeper:
    def keep(self, handle: Any) -> None:
        self.handle = handle

    def add(self, number: int) -> int:
        result: int = self.handle.add(number).result(20)
        return result


# -- names and lifetimes ---------------------------------------------------------------------------


def test_actor_is_found_by_name(cluster: zd.local_cluster, coordinator: ClusterCoordinator) -> None:
    tally = coordinator.options(name="tally").actor(Counter)
    tally.add(1).result(20)
    with ClusterCoordinator(cluster) as other:
        found = other.get_actor("tally", 20)
        assert found.add(1).result(20) == 2
        assert "Counter" in repr(found)
    assert tally.add(1).result(20) == 3


def test_unknown_name_is_not_found(coordinator: ClusterCoordinator) -> None:
    with pytest.raises(errors.NotFoundError, match="nobody"):
        coordinator.get_actor("nobody", 20)


def test_refused_program_finds_no_actor(cluster: zd.local_cluster, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0" * 64)
    (tmp_path / "token").chmod(0o600)
    credentials = Credentials(token_file=str(tmp_path / "token"))
    target = SimpleNamespace(target=cluster.target, credentials=credentials)
    with ClusterCoordinator(target) as stranger:
        for _ in range(2):  # while it is refused, and afterwards
            with pytest.raises(errors.UnauthenticatedError):
                stranger.get_actor("tally")


def test_name_belongs_to_one_actor(coordinator: ClusterCoordinator) -> None:
    first = coordinator.options(name="once").actor(Counter, 1)
    first.add(0).result(20)
    second = coordinator.options(name="once").actor(Counter, 2)
    with pytest.raises(errors.ActorLostError, match="once") as raised:
        second.add(0).result(20)
    assert not raised.value.maybe_executed
    assert first.add(0).result(20) == 1


def test_name_is_free_at_once_after_kill(coordinator: ClusterCoordinator) -> None:
    first = coordinator.options(name="reused").actor(Counter, 1)
    first.sleep(60)
    until(lambda: "live" in repr(first))
    coordinator.kill(first)
    second = coordinator.options(name="reused").actor(Counter, 2)
    assert second.add(0).result(20) == 2
    assert coordinator.get_actor("reused", 20) == second


def test_detached_actor_outlives_its_program(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator
) -> None:
    with ClusterCoordinator(cluster) as maker:
        detached = maker.options(name="kept", lifetime="detached").actor(Counter)
        pid = detached.pid().result(20)
    found = coordinator.get_actor("kept", 20)
    assert found.add(3).result(20) == 3
    coordinator.kill(found)
    until(lambda: is_gone(pid))


def test_killed_actor_ends_its_calls(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter)
    counter.add(1).result(20)
    running = counter.sleep(60)
    coordinator.kill(counter)
    with pytest.raises(errors.ActorLostError) as raised:
        running.result(20)
    assert raised.value.maybe_executed
    with pytest.raises(errors.ActorLostError, match="was killed by its program") as raised:
        counter.add(1).result(20)
    assert not raised.value.maybe_executed


# -- deaths ----------------------------------------------------------------------------------------


def test_handle_of_another_coordinator_is_not_killed(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator
) -> None:
    counter = coordinator.actor(Counter)
    with ClusterCoordinator(cluster) as other, pytest.raises(ValueError, match="another coord"):
        other.kill(counter)


def test_log_says_why_actor_waits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zmqdist.limits.WAIT_LOG_S", 0.2)
    with zd.local_cluster(workers=1, processes=False) as threads, threads.coordinator() as caller:
        counter = caller.actor(Counter)
        until(lambda: "the actor Counter waits: the workers have actors_max 0" in caplog.text)
        caller.kill(counter)


def test_death_of_process_says_how(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter)
    os.kill(counter.pid().result(20), signal.SIGKILL)
    call = counter.wait_for("/nonexistent")
    with pytest.raises(errors.ActorLostError, match="SIGKILL") as raised:
        call.result(20)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (copy.call, copy.maybe_executed) == ("Counter.wait_for", raised.value.maybe_executed)


def test_calls_during_death_are_maybe_executed(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.actor(Counter)
    call = counter.stop(3)
    with pytest.raises(errors.ActorLostError, match="exit code 3") as raised:
        call.result(20)
    assert raised.value.maybe_executed


def test_restarted_actor_begins_again(coordinator: ClusterCoordinator) -> None:
    counter = coordinator.options(restarts=1).actor(Counter, 5)
    assert counter.add(1).result(20) == 6
    with pytest.raises(errors.ActorLostError):
        counter.stop(1).result(20)
    assert counter.add(1).result(20) == 6
    with pytest.raises(errors.ActorLostError):
        counter.stop(1).result(20)
    with pytest.raises(errors.ActorLostError) as raised:
        counter.add(1).result(20)
    assert not raised.value.maybe_executed


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"lifetime": "long"}, ValueError, 'wants "detached"'),
        ({"lifetime": "detached"}, ValueError, "needs a name"),
        ({"restarts": -1}, ValueError, "wants 0 or more"),
        ({"restarts": True}, TypeError, "wants a whole number"),
        ({"concurrency": 0}, ValueError, "wants 1 or more"),
        ({"concurrency": 2}, ValueError, "has no `async def` method"),
        ({"worker": "x"}, ValueError, "wants the index of a worker"),
        ({"retries": 1}, ValueError, "it has no use for the option retries"),
        ({"restart": 1}, TypeError, "restarts"),
    ],
)
def test_wrong_option_is_refused(
    coordinator: ClusterCoordinator,
    options: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        coordinator.options(**options).actor(Counter)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda c: c.actor(abs), TypeError, "takes a class"),
        (lambda c: c.actor(Counter, threading.Lock()), errors.InvalidArgumentError, "lock"),
        (
            lambda c: c.actor(Counter, c.submit(abs, 1)),
            errors.InvalidArgumentError,
            "pass its result",
        ),
        (lambda c: c.options(restarts=1).submit(abs, 1), ValueError, "no use for restarts"),
        (lambda c: c.actors(Counter, 0), ValueError, "wants 1 or more members"),
        (lambda c: c.actor(Counter).add.options(timeout=-3), ValueError, "more than 0 s"),
        (lambda c: setattr(c.actor(Counter), "count", 5), AttributeError, "on the handle"),
    ],
)
def test_wrong_argument_is_refused(
    coordinator: ClusterCoordinator,
    make: Callable[[ClusterCoordinator], object],
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        make(coordinator)

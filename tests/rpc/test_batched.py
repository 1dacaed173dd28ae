"""Methods whose concurrent calls run as one."""

from __future__ import annotations

import math
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.rpc.helpers import until
from zmqdist import cancelled, errors
from zmqdist.rpc import ZmqClient, ZmqServer
from zmqdist.specs import TensorSpec

Connect = Callable[..., ZmqClient]
ROWS = TensorSpec((None, 2), np.float32)
LATE_MS = 60_000
"""A delay that no test waits for: batches run when they are full."""


@pytest.fixture
def batched() -> Iterator[Callable[..., ZmqServer]]:
    """batched(fn, ...): a server with `m`, which runs in batches."""
    made: list[ZmqServer] = []

    def make(fn: Callable[..., Any], *signatures: Any, **options: Any) -> ZmqServer:
        server = ZmqServer("127.0.0.1:0")
        server.register("m", fn, *signatures, batch=True, **options)
        server.start()
        made.append(server)
        return server

    yield make
    for server in made:
        server.stop(0.5)
        assert (server.snapshot().calls, server.snapshot().faults) == (0, 0)


def rows(*numbers: int) -> Any:
    return np.array([[number, 10 * number] for number in numbers], np.float32)


def test_calls_of_clients_run_as_one_batch(batched: Any, connect: Connect) -> None:
    seen: list[Any] = []

    def double(array: Any) -> Any:
        seen.append(array.shape)
        return array * 2

    server = batched(double, max_batch=6, max_delay_ms=LATE_MS)
    clients = [connect(server.address) for _ in range(3)]
    outcomes = [client.m(rows(number, number + 1)) for number, client in enumerate(clients)]
    for number, outcome in enumerate(outcomes):
        np.testing.assert_array_equal(outcome.get_value(), rows(number, number + 1) * 2)
    assert seen == [(6, 2)]


def test_structures_are_joined_leaf_by_leaf(batched: Any, connect: Connect) -> None:
    def work(given: Any, *, scale: Any) -> Any:
        assert type(given["pair"]) is tuple
        return {"sum": given["a"] + given["pair"][0] * scale, "rest": [given["pair"][1]]}

    client = connect(batched(work, max_batch=3, max_delay_ms=LATE_MS).address)
    ask = [
        client.m(
            {"a": np.arange(n), "pair": (np.ones(n), rows(*range(n)))}, scale=np.full(n, float(n))
        )
        for n in (1, 2)
    ]
    np.testing.assert_array_equal(ask[0].get_value()["sum"], [1.0])
    np.testing.assert_array_equal(ask[1].get_value()["sum"], [2.0, 3.0])
    np.testing.assert_array_equal(ask[1].get_value()["rest"][0], rows(0, 1))


def test_calls_of_different_kinds_are_separate_batches(batched: Any, connect: Connect) -> None:
    seen: list[Any] = []

    def note(array: Any) -> Any:
        seen.append((array.dtype.str, array.shape))
        return array

    client = connect(batched(note, max_batch=2, max_delay_ms=LATE_MS).address)
    given = [
        np.zeros(1),
        np.zeros(1, np.int64),
        np.zeros((1, 3)),
        np.zeros(1),
        np.zeros(1, np.int64),
        np.zeros((1, 3)),
    ]
    outcomes = [client.m(array) for array in given]
    for outcome, array in zip(outcomes, given, strict=True):
        assert (outcome.get_value().dtype, outcome.get_value().shape) == (array.dtype, array.shape)
    assert sorted(seen) == [("<f8", (2,)), ("<f8", (2, 3)), ("<i8", (2,))]


def test_call_waits_at_most_the_delay(batched: Any, connect: Connect) -> None:
    client = connect(batched(lambda array: array + 1, max_batch=1000, max_delay_ms=1).address)
    np.testing.assert_array_equal(client.m_blocking(np.arange(3)), [1, 2, 3])
    assert client.m_blocking(np.zeros((0, 5))).shape == (0, 5)
    assert client.m_blocking(np.zeros(5000)).sum() == 5000


def test_calls_gather_while_batch_runs(batched: Any, connect: Connect) -> None:
    running, release = threading.Event(), threading.Event()
    sizes: list[int] = []

    def slow(array: Any) -> Any:
        sizes.append(len(array))
        running.set()
        assert release.wait(30)
        return array

    client = connect(batched(slow, max_batch=64, max_delay_ms=0).address)
    outcomes = [client.m(np.zeros(1))]
    assert running.wait(30)
    outcomes += [client.m(np.zeros(1)) for _ in range(10)]
    assert client.methods()  # so the server has seen all of them
    release.set()
    assert all(outcome.is_ok() for outcome in outcomes)
    assert sizes == [1, 10]


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (
            lambda array: array[1:],
            (
                r"a batch of 3 rows, and returned an array of shape \(2,\), which does not have as "
                r"many rows"
            ),
        ),
        (
            lambda array: array.sum(),
            "a batch of 3 rows, and returned a float64, which does not have as many rows",
        ),
        (
            lambda array: {"a": array, "b": 5},
            "a batch of 3 rows, and returned a int, which does not have as many rows",
        ),
        (
            lambda array: None,
            "a batch of 3 rows, and returned a NoneType, which does not have as many rows",
        ),
    ],
)
def test_result_with_wrong_rows_fails_its_batch(
    batched: Any, connect: Connect, result: Any, told: str
) -> None:
    client = connect(batched(result, max_batch=3, max_delay_ms=LATE_MS).address)
    outcomes = [client.m(np.zeros(n)) for n in (1, 2)]
    for outcome in outcomes:
        with pytest.raises(errors.UnknownError, match=told):
            outcome.get_value()


def test_exception_fails_calls_of_its_batch_only(batched: Any, connect: Connect) -> None:
    def picky(array: Any) -> Any:
        if (array < 0).any():
            raise ValueError("negative")
        return array

    client = connect(batched(picky, max_batch=2, max_delay_ms=LATE_MS).address)
    bad = [client.m(np.array([1.0])), client.m(np.array([-1.0]))]
    good = [client.m(np.array([1.0])), client.m(np.array([2.0]))]
    for outcome in bad:
        with pytest.raises(errors.InvalidArgumentError, match=r"ValueError: negative\n"):
            outcome.get_value()
    assert [float(outcome.get_value()[0]) for outcome in good] == [1.0, 2.0]


def test_cancelled_calls_are_left_out(batched: Any, connect: Connect) -> None:
    running, release = threading.Event(), threading.Event()
    seen: list[Any] = []

    def note(array: Any) -> Any:
        seen.append(array.tolist())
        running.set()
        assert release.wait(30)
        return array

    server = batched(note, max_batch=1, max_delay_ms=0)
    client, leaver = connect(server.address), connect(server.address)
    first = client.m(np.array([0.0]))
    assert running.wait(30)
    cancelled_one, gone, late = (
        client.m(np.array([1.0])),
        leaver.m(np.array([2.0])),
        client.m(np.array([3.0]), timeout_in_ms=20),
    )
    kept = client.m(np.array([4.0]))
    assert leaver.methods()
    cancelled_one.cancel()
    leaver.close()
    assert late.get_error()[0] == errors.DEADLINE_EXCEEDED
    assert gone.get_error()[0] == errors.CANCELLED
    until(lambda: client.methods() and server.snapshot().clients == 1)
    arrived = time.monotonic()  # of all calls; the server's clock for `late` began before
    until(lambda: time.monotonic() > arrived + 0.02)
    release.set()
    assert first.is_ok()
    assert kept.is_ok()
    assert seen == [[0.0], [4.0]]


def test_cancelled_calls_leave_nothing_behind_batch(batched: Any, connect: Connect) -> None:
    running, release = threading.Event(), threading.Event()

    def slow(array: Any) -> Any:
        running.set()
        assert release.wait(30)
        return array

    server = batched(slow, max_batch=2, max_delay_ms=0)
    client = connect(server.address)
    first = client.m(np.zeros(2))
    assert running.wait(30)
    for _ in range(5):
        late = client.m(np.zeros(1))
        assert client.methods()  # it has arrived
        late.cancel()
    until(lambda: server.snapshot().calls_batched == 0)
    release.set()
    assert first.is_ok()


def test_batch_without_callers_is_cancelled(batched: Any, connect: Connect) -> None:
    running, ended = threading.Event(), threading.Event()

    def work(array: Any) -> Any:
        running.set()
        until(cancelled)
        ended.set()
        return array

    client = connect(batched(work, max_batch=2, max_delay_ms=LATE_MS).address)
    one, two = client.m(np.zeros(1)), client.m(np.zeros(1))
    assert running.wait(30)
    one.cancel()
    assert not ended.wait(0.02)
    two.cancel()
    assert ended.wait(30)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((5,), "wanted arrays, given a int"),
        ((np.float64(1),), "wanted arrays, given a float64"),
        ((np.zeros(()),), "wanted arrays, given an array without rows"),
        (("text",), "wanted arrays, given a str"),
        ((np.zeros(2), np.zeros(3)), "arrays of the same number of rows, given with 2 and 3 rows"),
        (([],), "arrays of the same number of rows, given none at all"),
    ],
)
def test_arguments_without_rows_are_refused(
    batched: Any, connect: Connect, args: Any, told: str
) -> None:
    client = connect(batched(lambda *args: args[0], max_batch=2, max_delay_ms=LATE_MS).address)
    one = client.m(np.zeros(1))
    with pytest.raises(errors.InvalidArgumentError, match=told):
        client.m_blocking(*args)
    two = client.m(np.zeros(1))
    assert one.is_ok()
    assert two.is_ok()


def test_wrong_rows_cost_only_their_peer(batched: Any, connect: Connect) -> None:
    """An array without bytes can have any number of rows, and a dict keys that cannot be sorted."""
    server = batched(lambda array: np.asarray(array) * 2, max_batch=4, max_delay_ms=1)
    liar, client = connect(server.address), connect(server.address)
    lies = [
        liar.m(np.zeros((2**40, 0), np.uint8)),
        liar.m({1: np.zeros(1), "a": np.zeros(1)}),
        liar.m(np.zeros(0)),
    ]
    lies += [liar.call("m", [np.zeros(1)] * 3), liar.m(None), liar.m()]
    np.testing.assert_array_equal(client.m_blocking(np.ones(1)), [2.0])
    for lie in lies:
        lie.get_error()


def test_signatures_make_arrays_of_what_is_given_and_check_it(
    batched: Any, connect: Connect
) -> None:
    client = connect(
        batched(lambda a: a.sum(axis=1).tolist(), [ROWS], TensorSpec((None,), np.float64)).address
    )
    np.testing.assert_array_equal(client.m_blocking([[1, 2], [3, 4]]), [3.0, 7.0])
    with pytest.raises(errors.InvalidArgumentError, match="expected float32"):
        client.m_blocking(np.zeros((1, 3), np.float32))
    assert str(client.methods()["m"]) == "m(a: float32[?, 2]) -> float64[?]"
    assert client.methods()["m"].batch


def test_stopping_server_runs_waiting_batches(batched: Any, connect: Connect) -> None:
    server = batched(lambda array: array + 1, max_batch=100, max_delay_ms=LATE_MS)
    client = connect(server.address)
    outcomes = [client.m(np.zeros(n)) for n in (1, 2)]
    assert client.methods()
    server.stop()
    assert [outcome.get_value().tolist() for outcome in outcomes] == [[1.0], [1.0, 1.0]]


def test_stopping_server_runs_batches_one_by_one(batched: Any, connect: Connect) -> None:
    running, release, guard = threading.Event(), threading.Event(), threading.Lock()
    together: list[bool] = []

    def work(array: Any) -> Any:
        together.append(not guard.acquire(blocking=False))
        running.set()
        assert release.wait(30)
        if not together[-1]:
            guard.release()
        return array

    server = batched(work, max_batch=100, max_delay_ms=0)
    client = connect(server.address)
    outcomes = [client.m(np.zeros(1))]
    assert running.wait(30)
    outcomes += [client.m(np.zeros((1, 2))), client.m(np.zeros((1, 3)))]
    assert client.methods()
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    until(lambda: server.snapshot().threads == 3)
    release.set()
    stopping.join()
    assert all(outcome.is_ok() for outcome in outcomes)
    assert together == [False] * 3


Pair = namedtuple("Pair", "a b")
Other = namedtuple("Other", "a c")


def test_containers_of_other_kinds_are_other_batches(batched: Any, connect: Connect) -> None:
    seen: list[Any] = []

    def note(given: Any) -> Any:
        seen.append(len(given[0]))
        return given

    client = connect(batched(note, max_batch=100, max_delay_ms=20).address)
    one = np.zeros(1)
    outcomes = [
        client.m(given) for given in (Pair(one, one), Other(one, one), (one, one), [one, one])
    ]
    values = [outcome.get_value() for outcome in outcomes]
    assert [type(value).__name__ for value in values] == ["Pair", "Other", "tuple", "list"]
    assert values[0]._fields == ("a", "b")
    assert seen == [1] * 4


@pytest.mark.parametrize(
    "options",
    [
        {"inline": True},
        *({"max_batch": rows} for rows in (0, -1, 2.5, math.nan, None, "4", True)),
        *({"max_delay_ms": delay} for delay in (-1, math.nan, math.inf, None, "1")),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="batch"):
        ZmqServer("127.0.0.1:0").register("m", lambda a: a, batch=True, **options)

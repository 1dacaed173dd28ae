"""Sessions with one target, over real sockets: contract 3.4 and S7, the bullets by name."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.ports import free_addresses
from zmqdist.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    UnavailableError,
    UnknownError,
)
from zmqdist.tasks.server import Server
from zmqdist.tasks.session import Session
from zmqdist.wire.trusted import RemoteTraceback

Opened = Callable[..., Session]

QUEUES: dict[str, queue.Queue[Any]] = {}
"""What functions of these tests wait on: the servers are in this process, and this module is
imported by its name."""


@pytest.fixture
def slot(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a queue of this test alone: a function that gives up late must not be heard by
    the next test."""
    name = request.node.name
    QUEUES[name] = queue.Queue()
    yield name
    del QUEUES[name]


def dequeue(name: str) -> Any:
    """As whoever writes a function that may wait for long does it: a thread cannot be ended, so it
    looks whether it should."""
    while not zd.cancelled():
        try:
            return QUEUES[name].get(timeout=0.02)
        except queue.Empty:
            continue
    QUEUES[name].put("gave up")
    return None


@pytest.fixture
def server() -> Iterator[Server]:
    with Server.create_local_server() as server:
        yield server
        server.stop(2.0)
        assert server.snapshot().faults == 0
        assert server.snapshot().functions_running == 0


@pytest.fixture
def opened(server: Server) -> Iterator[Opened]:
    sessions: list[Session] = []

    def make(target: Any = None, **options: Any) -> Session:
        sessions.append(Session(server.target if target is None else target, options or None))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()
        assert not session.snapshot().pending


def test_run_step(opened: Opened) -> None:
    """testRunStep"""
    product = opened().run(np.matmul, np.array([[2.0, 2.0]]), np.array([[1.0], [1.0]]))
    np.testing.assert_array_equal(product, [[4.0]])


def test_multiple_sessions(opened: Opened) -> None:
    """testMultipleSessions"""
    first, second = opened(), opened()
    for session in (first, second):
        assert session.run(lambda: np.matmul([[2.0, 2.0]], [[1.0], [1.0]]).tolist()) == [[4.0]]
    first.close()
    second.close()


def test_reset_fails(opened: Opened, server: Server) -> None:
    """testResetFails"""
    first = opened()
    first.assign("v0", 1.0)
    first.assign("v1", 2.0)
    with pytest.raises(NotFoundError, match="nonsense"):
        Session.reset("nonsense")
    with pytest.raises(DeadlineExceededError, match="localhost:0"):
        Session.reset("zmq://localhost:0", config={"operation_timeout_in_ms": 5})
    Session.reset(server.target, ["unknown"])
    second = opened()
    assert (second.read("v0"), second.read("v1")) == (1.0, 2.0)


@pytest.mark.parametrize(
    "target", ["", "grpc://localhost:1", "zmq://", "zmq://host", "local", None, 7]
)
def test_bad_target_is_not_found(target: Any) -> None:
    with pytest.raises(NotFoundError, match=r"wanted .zmq://host:port."):
        Session(target)


LARGE = (10_000, 3_000)


def _whole(array: np.ndarray[Any, Any]) -> bool:
    return array.shape == LARGE and array.dtype == np.float32 and array.min() == array.max() == 0.5


def test_large_constant(opened: Opened) -> None:
    """testLargeConstant: captured by the function."""
    constant = np.full(LARGE, 0.5, np.float32)
    assert opened().run(lambda: (constant.shape, constant.min(), constant.max())) == (
        LARGE,
        0.5,
        0.5,
    )


def test_captured_array_is_fresh_at_each_run(opened: Opened) -> None:
    session, constant = opened(), np.zeros(2**20)

    def write() -> float:
        constant[:] += 1
        return float(constant.sum())

    assert [session.run(write), session.run(write)] == [2**20, 2**20]
    constant[:] = 1
    assert session.run(write) == 2**21
    assert constant.sum() == 2**20


def test_large_fetch(opened: Opened) -> None:
    """testLargeFetch"""
    fetched = opened().run(lambda: np.full(LARGE, 0.5, np.float32))
    assert _whole(fetched)
    assert fetched.flags.writeable


def test_large_feed(opened: Opened) -> None:
    """testLargeFeed, and 120 MB as a variable in each direction (S7.4)"""
    session = opened()
    fed = np.full(LARGE, 0.5, np.float32)
    assert session.run(_whole, fed)
    session.assign("large", fed)
    fed[:] = 0
    assert _whole(session.read("large"))


def test_close_cancels_blocking_operation(opened: Opened, slot: str) -> None:
    """testCloseCancelsBlockingOperation"""
    session = opened()
    began = threading.Event()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            session.run(_tell_and_dequeue, slot)
        except CancelledError as error:
            raised.append(error)

    QUEUES["began"] = began  # type: ignore[assignment]
    thread = threading.Thread(target=wait)
    thread.start()
    assert began.wait(30)
    session.close()
    thread.join(30)
    assert "the session was closed (Session.close)" in str(raised[0])
    assert QUEUES[slot].get(timeout=30) == "gave up"
    with pytest.raises(FailedPreconditionError, match="closed"):
        session.run(int)


def _tell_and_dequeue(name: str) -> Any:
    QUEUES["began"].set()  # type: ignore[attr-defined]
    return dequeue(name)


def test_ctrl_c_cancels_the_function(opened: Opened, slot: str) -> None:
    session = opened()
    began = QUEUES["began"] = threading.Event()  # type: ignore[assignment]

    def interrupt() -> None:
        assert began.wait(30)  # type: ignore[attr-defined]
        # the function may begin before its call has come back to who made it
        until(lambda: session.snapshot().pending)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        session.run(_tell_and_dequeue, slot)
    thread.join(30)
    assert QUEUES[slot].get(timeout=30) == "gave up"
    assert session.run(len, "abc") == 3


def test_interactive_session(opened: Opened, server: Server) -> None:
    """testInteractiveSession: an option that is not supported only warns."""
    with (
        pytest.warns(UserWarning, match="'graph_options' is TensorFlow's"),
        Session(server, {"graph_options": {}}) as one,
    ):
        assert one.run(lambda: np.float32(42.0)) == 42.0


@pytest.mark.parametrize(
    "make", [Session, lambda target, config: Session.reset(target, config=config)]
)
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (
            "cluster_def",
            (
                "is no option of a session: a session works on the cluster of its target: start the "
                "servers with that cluster"
            ),
        ),
        (
            "operation_timeout_ms",
            "is no option of a session: did you mean 'operation_timeout_in_ms'?",
        ),
        (
            "slots",
            "is no option of a session: it may have isolate_session_state, operation_timeout_in_ms",
        ),
    ],
)
def test_unknown_option_is_refused(
    make: Callable[..., object], server: Server, option: str, expected: str
) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        make(server, {option: 1})
    assert raised.value.message == f"config[{option!r}] {expected}"


def test_timeout_raises_exception(opened: Opened, slot: str) -> None:
    """testTimeoutRaisesException: by the call's own time-out and by the session's."""
    for session, timeout_in_ms in ((opened(), 1000), (opened(operation_timeout_in_ms=1000), 0)):
        assert session.run(int, timeout_in_ms=20_000) == 0  # to connect is part of the time
        with pytest.raises(
            DeadlineExceededError, match=r"dequeue on localhost:0 did not end in time"
        ):
            session.run(dequeue, slot, timeout_in_ms=timeout_in_ms)
        assert QUEUES[slot].get(timeout=30) == "gave up"


def test_extend_after_queue_runners(opened: Opened, slot: str) -> None:
    """testExtendAfterQueueRunners: new work while functions of the session wait in the
    background.
    """
    session = opened()
    waiting = [threading.Thread(target=session.run, args=(dequeue, slot)) for _ in range(3)]
    for thread in waiting:
        thread.start()
    session.assign("v", 1.0)
    session.run(lambda: zd.Server.current().variables.assign("v", 8.0))
    assert session.read("v") == 8.0
    for _ in waiting:
        QUEUES[slot].put(None)
    for thread in waiting:
        thread.join(30)


def test_isolate_session_state(opened: Opened) -> None:
    """testIsolateSessionState"""
    sharing = [opened(), opened()]
    isolated = [opened(isolate_session_state=True), opened(isolate_session_state=True)]
    for session in sharing + isolated:
        with pytest.raises(
            FailedPreconditionError,
            match=r"'v' \(container 'localhost'\) of localhost:0 was not assigned",
        ):
            session.read("v")
    sharing[0].assign("v", np.int32(86))
    assert sharing[1].read("v") == 86
    for session in isolated:
        with pytest.raises(FailedPreconditionError):
            session.read("v")
    isolated[0].assign("v", 37)
    assert isolated[0].read("v") == 37
    with pytest.raises(FailedPreconditionError):
        isolated[1].read("v")
    sharing[1].assign("v", [86, 99])
    isolated[1].assign("v", [19, 86])
    np.testing.assert_array_equal(sharing[0].read("v"), [86, 99])
    assert isolated[0].read("v") == 37
    np.testing.assert_array_equal(
        isolated[1].run(lambda: zd.Server.current().variables.read("v")), [19, 86]
    )


def test_shape_changing_isolate_state(opened: Opened) -> None:
    """testShapeChangingIsolateState: the later form, in which sharing sessions may change
    shapes.
    """
    first = opened()
    first.assign("w", np.zeros((2, 3)))
    first.assign("w", np.ones(4, np.int16))
    first.close()
    later = opened()
    read = later.read("w")
    assert (read.shape, read.dtype, read.sum()) == ((4,), np.int16, 4)
    with pytest.raises(FailedPreconditionError):
        opened(isolate_session_state=True).read("w")


def test_server_config_is_the_default(made: Callable[..., Server]) -> None:
    server = made(
        {"local": ["localhost:0"]},
        config={"isolate_session_state": True, "operation_timeout_in_ms": 200},
    )
    with Session(server) as isolated, Session(server, {"isolate_session_state": False}) as sharing:
        isolated.assign("v", 1)
        with pytest.raises(FailedPreconditionError):
            sharing.read("v")
        QUEUES["default"] = queue.Queue()
        with pytest.raises(DeadlineExceededError):
            isolated.run(dequeue, "default")
        assert QUEUES["default"].get(timeout=30) == "gave up"
        del QUEUES["default"]


# -- run -------------------------------------------------------------------------------------------


def test_error_keeps_class_and_traceback(opened: Opened) -> None:
    session = opened()
    with pytest.raises(ZeroDivisionError) as expected:
        session.run(lambda: 1 // 0)
    assert isinstance(expected.value.__cause__, RemoteTraceback)
    assert "1 // 0" in str(expected.value.__cause__)
    with pytest.raises(zd.errors.UnavailableError, match=r"^its own$"):
        session.run(_raise, zd.errors.UnavailableError(None, None, "its own"))
    with pytest.raises(UnknownError, match=r"SystemExit\(3\)"):
        session.run(_raise, SystemExit(3))
    with pytest.raises(
        ValueError, match=r"'holds'.*a _thread.lock that cannot be pickled was left out"
    ):
        session.run(_raise_unpicklable)


def _raise(error: BaseException) -> None:
    raise error


def _raise_unpicklable() -> None:
    raise ValueError("holds", threading.Lock())


def test_unpicklable_argument_is_refused_first(opened: Opened) -> None:
    session = opened("localhost:1")
    with pytest.raises(InvalidArgumentError, match=r"args\[0\], a _thread.lock, cannot be pickled"):
        session.run(len, threading.Lock())
    captured = threading.Lock()
    with pytest.raises(InvalidArgumentError, match="captures 'captured'"):
        session.run(lambda: captured)


def test_mutable_capture_is_sent_at_each_run(
    opened: Opened,
) -> None:
    session = opened()
    seen: list[int] = []

    def remember(value: int) -> int:
        seen.append(value)
        return len(seen)

    assert [session.run(remember, 1), session.run(remember, 2)] == [1, 1]
    seen.append(0)
    assert session.run(remember, 3) == 2
    assert seen == [0]


def _counting() -> list[Callable[[], int]]:
    names: dict[str, Any] = {"__name__": "__main__", "n": 0}
    exec("def in_global():\n    global n\n    n += 1\n    return n", names)
    n = 0

    def in_cell() -> int:
        nonlocal n
        n += 1
        return n

    def within() -> int:
        def inner() -> int:
            nonlocal n
            n += 1
            return n

        return inner()

    return [names["in_global"], in_cell, within]


@pytest.mark.parametrize("fn", _counting(), ids=["global", "nonlocal", "nonlocal within"])
def test_globals_of_a_run_are_lost(opened: Opened, fn: Callable[[], int]) -> None:
    assert [opened().run(fn), opened().run(fn)] == [1, 1]


def test_immutable_capture_is_pickled_once(opened: Opened, server: Server) -> None:
    session = opened()
    add = eval("lambda a, b: a + b")  # of no importable module
    assert [session.run(add, 1, number) for number in range(20)] == list(range(1, 21))
    assert session.snapshot().functions_pickled == 1
    assert server.snapshot().functions_cached == 1


def test_arguments_and_values_are_snapshots(opened: Opened) -> None:
    session = opened()
    for size in (10, 200_000):
        given = np.arange(size)
        kept = session.run(lambda a: a, given)
        given[0] = 7
        assert kept[0] == 0
        kept[0] = 5
        session.assign("s", given)
        given[0] = 9
        first, second = session.read("s"), session.read("s")
        first[0] = 1
        assert (second[0], session.read("s")[0]) == (7, 7)
        session.run(lambda: zd.Server.current().variables.read("s").fill(3))
        assert session.read("s")[0] == 7


def test_frozen_argument_stays_frozen(opened: Opened) -> None:
    frozen = zd.freeze(np.arange(300_000))
    writable, total = opened().run(lambda a: (a.flags.writeable, int(a.sum())), frozen)
    assert (writable, total) == (False, int(frozen.sum()))


@pytest.mark.parametrize(
    "value",
    [
        True,
        7,
        2.5,
        1j,
        "text",
        np.float16(3),
        np.zeros((0, 3)),
        [[1, 2], [3, 4]],
        np.array(["a", "bc"]),
        np.datetime64("2026-01-01"),
    ],
)
def test_variables_keep_dtype_and_shape(opened: Opened, value: Any) -> None:
    session = opened()
    session.assign("v", value)
    wanted, read = np.asarray(value), session.read("v")
    assert isinstance(read, np.ndarray)
    assert (read.dtype, read.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(read, wanted)
    assert session.variables() == {"v": zd.TensorSpec(wanted.shape, wanted.dtype)}


def test_bad_value_is_no_variable(opened: Opened) -> None:
    session = opened()
    for value in (object(), None, [1, [2]]):
        with pytest.raises(InvalidArgumentError, match=r"variable 'v'.*(cannot hold|not an array)"):
            session.assign("v", value)
    with pytest.raises(InvalidArgumentError, match="no array of numbers or text"):
        session.run(lambda: zd.Server.current().variables.assign("v", object()))
    with pytest.raises(InvalidArgumentError, match="named by text"):
        session.assign(3, 1)  # type: ignore[arg-type]


def test_current_server_runs_the_function(opened: Opened, server: Server) -> None:
    assert opened().run(lambda: zd.Server.current().target) == server.target
    with pytest.raises(FailedPreconditionError, match=r"Session\.run"):
        Server.current()
    server.variables.assign("here", 1)
    assert opened().read("here") == 1


def test_functions_may_exceed_rpc_threads(opened: Opened, slot: str) -> None:
    session = opened()
    got: list[Any] = []
    waiting = [
        threading.Thread(target=lambda: got.append(session.run(dequeue, slot))) for _ in range(40)
    ]
    for thread in waiting:
        thread.start()
    for number in range(40):
        session.run(_put, slot, number)
    for thread in waiting:
        thread.join(20)
    assert sorted(got) == list(range(40))


def _put(name: str, value: Any) -> None:
    QUEUES[name].put(value)


# -- time-outs and resets --------------------------------------------------------------------------


def test_absent_target_is_awaited_and_named(opened: Opened) -> None:
    (address,) = free_addresses(1)
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=f"missing task {address}"):
        opened(f"zmq://{address}").read("v", timeout_in_ms=50)
    assert time.monotonic() - began >= 0.05
    late = opened(f"zmq://{address}")
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(late.run(int)))
    waiting.start()
    with Server({"local": [address]}):
        waiting.join(20)
        assert answers == [0]
        late.close()


def test_lost_task_is_named_as_missing(opened: Opened, made: Callable[..., Server]) -> None:
    spec = {"worker": free_addresses(2)}
    servers = [made(spec, "worker", index) for index in range(2)]
    session = opened(servers[0])
    assert session.run(int, task="worker:1") == 0
    servers[1].stop()

    def error() -> OpError:
        with pytest.raises(OpError) as caught:
            session.run(int, task="worker:1", timeout_in_ms=50)
        return caught.value

    while isinstance(found := error(), UnavailableError):
        # it was in flight when the client noticed
        assert "may have executed it" in found.message
    assert isinstance(found, DeadlineExceededError)
    assert (
        f"int was not begun in time: missing task worker:1 at {spec['worker'][1]}" in found.message
    )


def test_foreign_server_is_refused(opened: Opened) -> None:
    with (
        zd.rpc.Server.create("zmq", "127.0.0.1:0") as other,
        pytest.raises(FailedPreconditionError, match="not a task's server"),
    ):
        opened(other.address).read("v")


def test_reset_ends_waits_of_other_sessions(opened: Opened, server: Server, slot: str) -> None:
    session = opened()
    began = QUEUES["began"] = threading.Event()  # type: ignore[assignment]
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            session.run(_tell_and_dequeue, slot)
        except AbortedError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert began.wait(30)  # type: ignore[attr-defined]
    Session.reset(server.target)
    thread.join(30)
    assert "Session.reset was called at localhost:0" in str(raised[0])
    assert QUEUES[slot].get(timeout=30) == "gave up"
    with pytest.raises(AbortedError, match=r"Session\.reset"):
        session.read("v")


def test_reset_ends_session_at_unused_tasks(
    made: Callable[..., Server], opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zmqdist.tasks.sessions.SESSIONS_MAX", 2)
    spec = {"worker": free_addresses(2)}
    servers = [made(spec, "worker", index) for index in range(2)]
    sessions = [opened(servers[0]) for _ in range(2)]
    for session in sessions:
        session.variables()
    Session.reset(servers[0].target)
    for session in sessions:
        with pytest.raises(AbortedError, match=r"Session\.reset was called at worker:0"):
            session.assign("v", 1, task="worker:1")
        session.close()
    with opened(servers[0]) as session:
        session.variables()
        Session.reset(servers[0].target)
    assert servers[1].snapshot().sessions_refused == 2  # the last ones


@pytest.mark.parametrize("timeout", ["1", None, float("nan"), True])
def test_time_out_is_a_number_of_milliseconds(opened: Opened, server: Server, timeout: Any) -> None:
    with pytest.raises(
        zd.errors.InvalidArgumentError, match="a time-out is a number of milliseconds"
    ):
        opened().run(int, timeout_in_ms=timeout)
    with pytest.raises(
        zd.errors.InvalidArgumentError, match="a time-out is a number of milliseconds"
    ):
        opened(operation_timeout_in_ms=timeout)
    with pytest.raises(
        zd.errors.InvalidArgumentError, match="a time-out is a number of milliseconds"
    ):
        Session.reset(server.target, timeout_in_ms=timeout)


@pytest.mark.parametrize("timeout", [np.float64(60_000), np.int64(60_000), 1e300])
def test_time_out_of_numpy_or_very_long(opened: Opened, timeout: float) -> None:
    assert opened().run(int, timeout_in_ms=timeout) == 0


KEPT: list[Any] = []
"""What `keep_variables` found: the server is in this process, and this module is imported by its
name."""


def keep_variables() -> None:
    KEPT.append(Server.current().variables)


def test_reset_frees_isolated_variables(opened: Opened, server: Server) -> None:
    session = opened(isolate_session_state=True)
    session.assign("v", 1)
    session.run(keep_variables)
    (own,) = KEPT
    KEPT.clear()
    assert own.specs()
    Session.reset(server.target)
    assert not own.specs()


def test_cached_functions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmqdist.tasks.sessions.FUNCTIONS_KEPT_MAX", 2)
    with Server.create_local_server() as server, Session(server) as session:
        for number in range(4):
            assert session.run(lambda number=number: number) == number
        assert server.snapshot().functions_cached == 2


def test_session_config_must_be_a_dict(server: Server) -> None:
    with pytest.raises(zd.errors.InvalidArgumentError, match="the config of a session is a dict"):
        Session(server, 5)  # type: ignore[arg-type]


def test_closed_session_leaves_nothing(
    opened: Opened, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zmqdist.tasks.sessions.SESSION_LOST_S", 0.0)
    closed, lost = (
        opened(isolate_session_state=True),
        Session(server, {"isolate_session_state": True}),
    )
    for session in (closed, lost):
        session.assign("v", 1)
    assert server.snapshot().sessions == 2
    closed.close()
    assert server.snapshot().sessions == 1
    del lost, session
    until(lambda: not server.snapshot().sessions)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)  # the pause of a poll with a deadline


def test_sessions_are_bounded(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmqdist.tasks.sessions.SESSIONS_MAX", 1)
    first, second = opened(), opened()
    first.assign("v", 1)
    with pytest.raises(zd.errors.ResourceExhaustedError, match="has its 1 sessions already"):
        second.read("v")
    first.close()
    assert second.read("v") == 1


def test_restarted_task_aborts_its_sessions(opened: Opened) -> None:
    (address,) = free_addresses(1)
    session = opened(address)
    with Server({"local": [address]}):
        session.assign("v", 1)
    with Server({"local": [address]}):
        with pytest.raises(AbortedError, match="restarted: make a new one"):
            session.read("v")
        session.close()


def test_stop_cancels_functions_after_the_grace(made: Callable[..., Server], slot: str) -> None:
    server = made({"local": ["localhost:0"]})
    began = QUEUES["began"] = threading.Event()  # type: ignore[assignment]
    with Session(server) as session:
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                session.run(_tell_and_dequeue, slot)
            except zd.errors.UnavailableError as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        assert began.wait(30)  # type: ignore[attr-defined]
        server.stop(0.05)
        thread.join(30)
        assert (
            "_tell_and_dequeue on local:0: local:0 was stopped, and this operation had not ended"
            in str(raised[0])
        )
    assert QUEUES[slot].get(timeout=30) == "gave up"

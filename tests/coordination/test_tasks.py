"""Tasks of a cluster that meet at barriers and hear of each other: real sockets, and processes
where somebody dies."""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.coordination.helpers import KEEPER, TASK, Caller, Cut, Keeper, assert_waited_for, until
from tests.ports import free_address
from zmqdist import errors
from zmqdist.coordination import client as coordination_client
from zmqdist.coordination.client import CoordinationClient, TaskState, task_of
from zmqdist.rpc import ZmqClient, internal_client
from zmqdist.servers.dispatch_server import DispatchServer
from zmqdist.transport.credentials import Credentials

Keep = Callable[..., Keeper]
Join = Callable[..., CoordinationClient]
Child = Callable[..., "subprocess.Popen[str]"]


def said(process: subprocess.Popen[str]) -> str:
    """The next line of a child."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


# -- barriers --------------------------------------------------------------------------------------


@pytest.mark.processes("coordination")
def test_processes_meet_at_barriers(keep: Keep, join: Join, child: Child) -> None:
    keeper = keep(3)
    children = [child(TASK, keeper.address, f"worker:{index}", "x y x") for index in (1, 2)]
    client = join(keeper, "worker:0")
    for name in ("x", "y", "x"):
        client.barrier(name, 60)
    for process in children:
        assert [said(process) for _ in range(4)] == [
            "registered",
            "passed x",
            "passed y",
            "passed x",
        ]


def test_subset_meets_without_others(keep: Keep, join: Join) -> None:
    keeper = keep(3)
    clients = [join(keeper, f"worker:{index}") for index in range(2)]
    other = Caller(clients[1].barrier, "b", 30, [("worker", 1), "/job:worker/replica:0/task:0"])
    clients[0].barrier("b", 30, ["worker:0", "worker:1"])
    assert other.ended() is None
    with pytest.raises(
        errors.InvalidArgumentError, match="worker:9 is not in the cluster, which has worker:0"
    ):
        clients[0].barrier("c", 30, ["worker:0", "worker:9"])


def test_timed_out_barrier_names_missing_tasks(keep: Keep, join: Join) -> None:
    keeper = keep(3)
    clients = [join(keeper, f"worker:{index}") for index in range(3)]
    waiting = Caller(clients[1].barrier, "b", 0.2)
    until(lambda: keeper.waiting == 4)  # three questions for errors, and this
    with pytest.raises(
        errors.DeadlineExceededError,
        match=r"2/3 tasks came, the first was worker:1; missing: worker:2",
    ):
        clients[0].barrier("b")
    assert isinstance(waiting.ended(), errors.DeadlineExceededError)
    with pytest.raises(errors.DeadlineExceededError, match="2/3"):
        clients[2].barrier("b", 30)
    callers = [Caller(client.barrier, "b", 30) for client in clients]
    assert [caller.ended() for caller in callers] == [None] * 3


@pytest.mark.killed("coordination")
def test_killed_task_ends_barriers_by_name(keep: Keep, join: Join, child: Child) -> None:
    """At once: its connection may be away for an hour here, but the kernel knows that the process
    has ended."""
    keeper = keep(3, reconnect_grace_s=3600.0, heartbeat_timeout_s=3600.0)
    clients = [join(keeper, f"worker:{index}") for index in range(2)]
    victim = child(TASK, keeper.address, "worker:2", "")
    assert said(victim) == "registered"
    waiting = [Caller(client.barrier, "b") for client in clients]
    until(lambda: keeper.missing("b") == ("worker:2",))
    victim.kill()
    for caller in waiting:
        error = caller.ended()
        assert isinstance(error, errors.InternalError)
        assert f"worker:2 is lost: its process (pid {victim.pid}) has ended" in str(error)
    with pytest.raises(errors.InternalError, match="worker:2 is lost"):
        clients[0].barrier("another")
    until(lambda: clients[0].errors)
    [(task, reported)] = clients[0].errors
    assert (task, type(reported)) == ("worker:2", errors.UnavailableError)


def test_stopped_task_is_missed(keep: Keep, join: Join, child: Child) -> None:
    keeper = keep(2, heartbeat_timeout_s=1.0)
    client = join(keeper, "worker:0")
    victim = child(TASK, keeper.address, "worker:1", "")
    assert said(victim) == "registered"
    waiting = Caller(client.barrier, "b")
    victim.send_signal(signal.SIGSTOP)
    error = waiting.ended()
    assert isinstance(error, errors.InternalError)
    assert "worker:1 is lost: nothing was heard of it for 1 s" in str(error)


def test_abandoned_wait_does_not_count(keep: Keep, join: Join) -> None:
    keeper = keep(2)
    join(keeper, "worker:0", 77).register(30)
    other = join(keeper, "worker:1")
    by_hand = ZmqClient(keeper.address, security=Credentials().client(keeper.address, "worker"))
    pending = internal_client.start(
        by_hand, "coordination.barrier", ("worker", 0, 77), "b", 0, None, None
    )
    until(lambda: keeper.missing("b") == ("worker:1",))
    pending.cancel()
    until(lambda: keeper.missing("b") == ())
    with pytest.raises(
        errors.DeadlineExceededError,
        match="1/2 tasks came, the first was worker:1; missing: worker:0",
    ):
        other.barrier("b", 0.1)
    by_hand.close()


def test_barrier_is_cancelled_by_any_member(keep: Keep, join: Join) -> None:
    keeper = keep(2)
    clients = [join(keeper, f"worker:{index}") for index in range(2)]
    waiting = Caller(clients[0].barrier, "b")
    clients[1].register(30)
    until(lambda: keeper.missing("b"))
    clients[1].cancel_barrier("b")
    assert isinstance(waiting.ended(), errors.CancelledError)
    with pytest.raises(errors.FailedPreconditionError, match="nothing to cancel"):
        clients[1].cancel_barrier("b")


def test_endless_wait_is_logged_with_missing_tasks(
    keep: Keep, join: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordination_client, "WAIT_LOG_S", 0.05)
    keeper = keep(2, heartbeat_timeout_s=4.0)
    client = join(keeper, "worker:0")
    with caplog.at_level(logging.WARNING, "zmqdist.coordination"):
        waiting = [Caller(client.barrier, "b"), Caller(client.kv.get, "k")]
        until(
            lambda: (
                "s at barrier 'b', for worker:1" in caplog.text and "s for key 'k'" in caplog.text
            )
        )
    client.cancel_barrier("b")
    client.kv.set("k", 1)
    assert [type(caller.ended()) for caller in waiting] == [errors.CancelledError, type(None)]


def test_time_out_is_number_of_seconds(keep: Keep, join: Join) -> None:
    client = join(keep(1), "worker:0")
    wrong: list[Any] = [float("nan"), "1", True]
    for timeout in wrong:
        with pytest.raises(
            errors.InvalidArgumentError, match="a time-out is a number of seconds"
        ) as caught:
            client.barrier("b", timeout)
        assert str(timeout)[:10] in str(caught.value)


def test_time_out_may_be_numpy_or_very_long(keep: Keep, join: Join) -> None:
    client = join(keep(1), "worker:0")
    client.kv.set("k", 1)
    right: list[Any] = [np.float64(60), np.float32(60), np.int64(60), 1e300, float("inf"), 10**400]
    for timeout in right:
        client.barrier("b", timeout)
        assert client.kv.get("k", timeout) == 1, timeout


@pytest.mark.parametrize("tasks", ["worker:0", 7])
def test_single_name_for_list_of_tasks_is_refused(keep: Keep, join: Join, tasks: Any) -> None:
    client = join(keep(1), "worker:0")
    with pytest.raises(errors.InvalidArgumentError, match="no list of tasks: wanted one like"):
        client.barrier("b", 30, tasks)


# -- who is there ----------------------------------------------------------------------------------


def test_task_states_and_alive_tasks(keep: Keep, join: Join) -> None:
    keeper = keep([("ps", 0), ("worker", 0), ("worker", 1)])
    ps, worker = join(keeper, ("ps", 0), 5), join(keeper, "worker:0", 6)
    ps.register(30)
    worker.register(30)
    assert ps.task_states() == {
        "ps:0": TaskState("up", 5, 0, ""),
        "worker:0": TaskState("up", 6, 0, ""),
        "worker:1": TaskState("missing", 0, 0, ""),
    }
    assert list(ps.task_states(["worker"])) == ["worker:0", "worker:1"]
    assert [ps.check_alive(task) for task in ("worker:0", ("worker", 1), "/job:ps/task:0")] == [
        True,
        False,
        True,
    ]
    with pytest.raises(
        errors.InvalidArgumentError, match="worker:7 is not in the cluster, which has ps:0"
    ):
        ps.check_alive("worker:7")
    asking_too = Caller(worker.alive_tasks)
    assert ps.alive_tasks() == ["ps:0", "worker:0"]
    assert (asking_too.ended(), asking_too.value) == (None, ["ps:0", "worker:0"])


def test_wait_for_all_gives_devices_of_all(keep: Keep, join: Join) -> None:
    keeper = keep(2)
    other = Caller(join(keeper, "worker:1").wait_for_all, ["b0"], 30)
    assert join(keeper, "worker:0").wait_for_all(["a0", "a1"]) == ["a0", "a1", "b0"]
    assert (other.ended(), other.value) == (None, ["a0", "a1", "b0"])


@pytest.mark.parametrize(
    "name", ["worker", "worker:x", ":1", "/job:worker", ("worker", -1), 7, None, "/nonsense"]
)
def test_wrong_name_of_task_is_refused(name: str) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        task_of(name)


# -- errors of tasks -------------------------------------------------------------------------------


def test_reported_error_reaches_tasks_until_reset(keep: Keep, join: Join) -> None:
    keeper = keep(2)
    clients = [join(keeper, f"worker:{index}") for index in range(2)]
    heard: list[tuple[str, str]] = []
    clients[0].on_error(lambda task, error: heard.append((task, f"{error.error_code} {error}")))
    clients[0].register(30)
    clients[1].report_error(errors.DATA_LOSS, "the disk is gone")
    until(lambda: heard)
    assert heard == [("worker:1", "15 worker:1 reported an error: the disk is gone")]
    with pytest.raises(errors.OpError, match="the disk is gone"):
        clients[1].barrier("b")
    clients[1].reset()
    clients[1].beat()
    waiting = Caller(clients[0].barrier, "another", 30)
    clients[1].barrier("another", 30)
    assert waiting.ended() is None


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_callback_error_does_not_stop_later_errors(
    keep: Keep, join: Join, error: type[BaseException]
) -> None:
    keeper = keep(2)
    clients = [join(keeper, f"worker:{index}") for index in range(2)]
    heard: list[str] = []

    def hear(task: str, reported: errors.OpError) -> None:
        heard.append(reported.message)
        raise error

    clients[0].on_error(hear)
    clients[0].register(30)
    for text in ("first", "second"):
        clients[1].report_error(errors.DATA_LOSS, text)
        until(lambda: heard and text in heard[-1])  # noqa: B023  it is waited for in this turn
        clients[1].reset()


def test_slow_callback_does_not_delay_beats(keep: Keep, join: Join) -> None:
    keeper = keep(2, heartbeat_timeout_s=4.0)
    clients = [join(keeper, f"worker:{index}") for index in range(2)]
    goes_on, heard = threading.Event(), []

    def hear(task: str, error: errors.OpError) -> None:
        heard.append(error.message)
        assert goes_on.wait(30)

    clients[0].on_error(hear)
    clients[0].register(30)
    clients[1].report_error(errors.DATA_LOSS, "first")
    until(lambda: heard)
    beaten_at = keeper.service.snapshot().tasks["worker:0"].heard_at
    until(lambda: keeper.service.snapshot().tasks["worker:0"].heard_at > beaten_at + 2)
    assert clients[0].task_states()["worker:0"].state == "up"
    clients[1].reset()
    clients[1].report_error(errors.DATA_LOSS, "second")
    goes_on.set()
    until(lambda: len(heard) == 2)  # in order
    assert ["first" in heard[0], "second" in heard[1]] == [True, True]


def test_reset_ends_with_keeper_and_client(keep: Keep, join: Join) -> None:
    keeper = keep(2)
    gone, stays = join(keeper, "worker:0"), join(free_address(), "worker:1")
    gone.register(30)
    keeper.stop()
    until(lambda: gone.snapshot().state == "lost")
    with pytest.raises(errors.UnavailableError, match="has gone"):
        gone.reset()
    resetting = Caller(stays.reset)  # nobody was ever there
    until(lambda: stays.snapshot().state == "resetting")
    stays.close()
    error = resetting.ended()
    assert isinstance(error, errors.CancelledError)
    assert str(error) == "worker:1 was closed while this request waited"
    assert "zmqdist-coordination-worker:1" not in [thread.name for thread in threading.enumerate()]


def test_new_incarnation_is_refused_until_reset(keep: Keep, join: Join) -> None:
    keeper = keep(2)
    watcher, first = join(keeper, "worker:0"), join(keeper, "worker:1", 1)
    watcher.register(30)
    first.register(30)
    second = join(keeper, "worker:1", 2)
    with pytest.raises(
        errors.AbortedError,
        match="worker:1 registered again as another incarnation, without a reset",
    ):
        second.register(30)
    until(lambda: watcher.errors)
    assert [task for task, _ in watcher.errors] == ["worker:1"]
    second.reset()
    second.register(30)
    until(lambda: keeper.service.snapshot().tasks["worker:1"].incarnation == 2)
    with pytest.raises(errors.OpError):
        first.beat()
    assert watcher.task_states()["worker:1"].state == "up"


def test_recoverable_task_returns_silently(keep: Keep, join: Join, child: Child) -> None:
    keeper = keep(2, recoverable_jobs=frozenset(("worker",)))
    client = join(keeper, "worker:0")
    victim = child(TASK, keeper.address, "worker:1", "")
    assert said(victim) == "registered"
    client.register(30)
    victim.kill()
    successor = child(TASK, keeper.address, "worker:1", "b")
    assert said(successor) == "registered"
    client.barrier("b", 60)
    assert said(successor) == "passed b"
    assert client.errors == []


def test_tasks_leave_together_or_are_in_error(keep: Keep, join: Join) -> None:
    keeper = keep(3, shutdown_timeout_s=30.0)
    clients = [join(keeper, f"worker:{index}") for index in range(3)]
    for client in clients:
        client.register(30)
    callers = [Caller(client.shutdown) for client in clients]
    assert [caller.ended() for caller in callers] == [None] * 3
    with pytest.raises(
        errors.FailedPreconditionError, match="worker:0 can make no more requests to the keeper"
    ):
        clients[0].barrier("b")
    keeper = keep(2, shutdown_timeout_s=0.1)
    early, late = join(keeper, "worker:0"), join(keeper, "worker:1")
    early.register(30)
    late.register(30)
    with pytest.raises(errors.DeadlineExceededError, match="1/2 tasks came"):
        early.shutdown()
    with pytest.raises(errors.OpError, match="worker:1 did not shut down with the others"):
        late.beat()


def test_leaving_task_lives_while_it_waits(keep: Keep, join: Join) -> None:
    keeper = keep(2, shutdown_timeout_s=60.0, heartbeat_timeout_s=4.0)
    early, late = join(keeper, "worker:0"), join(keeper, "worker:1")
    early.register(30)
    late.register(30)
    waiting = keeper.waiting
    leaving = Caller(early.shutdown)
    until(lambda: keeper.waiting > waiting)
    waits_since = keeper.service.snapshot().tasks["worker:0"].heard_at
    until(lambda: keeper.service.snapshot().tasks["worker:0"].heard_at > waits_since + 2)
    late.shutdown()
    assert leaving.ended() is None


def test_former_incarnation_does_not_return(keep: Keep, join: Join) -> None:
    keeper = keep(2)
    watcher, former = join(keeper, "worker:0"), join(keeper, "worker:1", 1)
    former.register(30)
    successor = CoordinationClient(keeper.address, "worker:1", 2)
    with pytest.raises(errors.AbortedError):
        successor.register(30)
    successor.reset()
    successor.register(30)
    with pytest.raises(errors.OpError):
        former.beat()
    successor.close(notify=False)
    until(lambda: watcher.task_states()["worker:1"].state == "error")


def test_errors_during_absence_are_heard_later(keep: Keep, join: Join) -> None:
    keeper = keep(2)
    cut = Cut(keeper.address)
    watcher, other = join(cut.address, "worker:0"), join(keeper, "worker:1")
    watcher.register(30)
    other.register(30)
    until(lambda: keeper.waiting == 2)  # both ask for errors
    cut.away()
    until(lambda: keeper.service.snapshot().tasks["worker:0"].away)
    other.report_error(errors.DATA_LOSS, "while the other one was away")
    cut.back()
    until(lambda: watcher.errors)
    assert [task for task, _ in watcher.errors] == ["worker:1"]
    watcher.close()
    cut.away()


def test_closed_or_dropped_client_has_left(keep: Keep, join: Join) -> None:
    keeper = keep(3)
    watcher, closed = join(keeper, "worker:0"), join(keeper, "worker:1")
    dropped = CoordinationClient(keeper.address, "worker:2")
    for client in (watcher, closed, dropped):
        client.register(30)
    closed.close()
    closed.close()
    assert watcher.task_states()["worker:1"].state == "left"
    with pytest.raises(errors.InternalError, match="worker:1 has left"):
        watcher.barrier("b")
    del dropped, client
    gc.collect()
    until(lambda: keeper.service.snapshot().tasks["worker:2"].away)


# -- the keeper ------------------------------------------------------------------------------------


def test_absent_keeper_is_awaited_until_time_out(keep: Keep, join: Join) -> None:
    address = free_address()
    client = join(address, "worker:0", keeper="the leader ps:0")
    with pytest.raises(errors.DeadlineExceededError) as caught:
        client.barrier("b", 0.1)
    assert_waited_for(f"the leader ps:0 at {address}", caught.value, 0.1)
    waiting = Caller(client.barrier, "b")
    keep(1, address=address)
    assert waiting.ended() is None


def test_killed_keeper_is_named_and_succeeded(join: Join, child: Child) -> None:
    process = child(KEEPER, "127.0.0.1:0", "2")
    address = said(process)
    clients = [join(address, f"worker:{index}", keeper="the leader ps:0") for index in range(2)]
    for _ in range(2):
        callers = [Caller(client.barrier, "b", 60) for client in clients]
        assert [caller.ended() for caller in callers] == [None] * 2
    clients[0].kv.set("k", "of the former life")
    waiting = Caller(clients[0].barrier, "b"), Caller(clients[1].kv.get, "another")
    process.kill()
    process.wait()
    for caller in waiting:
        error = caller.ended()
        assert isinstance(error, errors.UnavailableError)
        assert f"the leader ps:0 at {address}, which keeps barriers and keys, has gone" in str(
            error
        )
    with pytest.raises(errors.UnavailableError, match="the leader ps:0"):
        clients[0].kv.try_get("k")
    assert said(child(KEEPER, address, "2")) == address
    until(lambda: is_back(clients[0]) and is_back(clients[1]))
    with pytest.raises(errors.NotFoundError):
        clients[0].kv.try_get("k")
    callers = [Caller(client.barrier, "b", 60) for client in clients]
    assert [caller.ended() for caller in callers] == [None] * 2


def test_request_between_keepers_does_not_wait(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper(2)
    client = join(keeper, "worker:0", keeper="the leader ps:0")
    client.register(30)
    asked_early = Caller(client.kv.get, "k")
    until(lambda: keeper.waiting == 2)
    news = threading.Event()
    become = (
        coordination_client.KeeperLink._set_state
    )  # reach: that moment cannot be held from outside

    def hold_back(self: coordination_client.KeeperLink, *state: Any) -> None:
        news.wait(30)
        become(self, *state)

    monkeypatch.setattr(coordination_client.KeeperLink, "_set_state", hold_back)
    keeper.loop.stop()  # without a word to anybody
    assert isinstance(asked_early.ended(), errors.UnavailableError)
    asked_late = Caller(client.kv.get, "k")
    until(lambda: client.snapshot().requests)
    news.set()
    error = asked_late.ended()
    assert isinstance(error, errors.UnavailableError)
    assert "the leader ps:0" in str(error)


def is_back(client: CoordinationClient) -> bool:
    try:
        client.register(0)
    except errors.UnavailableError:
        return False
    return True


def test_stopping_keeper_ends_waits(keep: Keep, join: Join) -> None:
    keeper = keep(2)
    client = join(keeper, "worker:0")
    waiting = [
        Caller(client.barrier, "b"),
        Caller(client.kv.get, "k"),
        Caller(client.alive_tasks, ["worker:0", "worker:1"]),
    ]
    assert waiting[2].ended() is None
    until(lambda: keeper.waiting == 3)
    keeper.service.stop("the keeper stops")
    assert [type(caller.ended()) for caller in waiting[:2]] == [errors.CancelledError] * 2


def test_DoNotAllowPollForErrorIfServiceHasStopped(keep: Keep) -> None:
    """UNAVAILABLE here, INTERNAL in TensorFlow: it is nobody's bug."""
    keeper = keep(1)
    keeper.service.stop("the keeper stops")
    with ZmqClient(
        keeper.address, security=Credentials().client(keeper.address, "worker")
    ) as client:
        code, text = internal_client.start(
            client, "coordination.poll", ("worker", 0, 1), 0
        ).get_error()
    assert (code, text) == (errors.UNAVAILABLE, "the service of barriers and keys has stopped here")


# -- strangers and garbage -------------------------------------------------------------------------

WHO = ("worker", 0, 1)
GARBAGE = [
    ("register", ("worker", 0), 1),
    ("register", WHO, -1),
    ("register", ("worker", "0", 1), 1),
    ("register", ("w" * 2000, 0, 1), 1),
    ("register", ("worker", 5, 1), 1),
    ("register", ("worker", 0, 2**70), 1),
    ("register",),
    ("poll", WHO, "0"),
    ("poll", "who", 0),
    ("beat", None),
    ("reset", "worker", "x"),
    ("leave", [], True),
    ("report_error", WHO, 0, "fine"),
    ("report_error", WHO, 99, "no such code"),
    ("report_error", WHO, 3, b"bytes"),
    ("barrier", WHO, "", 0, None, None),
    ("barrier", WHO, "zmqdist.shutdown", 0, None, None),
    ("barrier", WHO, "b", -1, None, None),
    ("barrier", WHO, "b", True, None, None),
    ("barrier", WHO, "b", 0, float("nan"), None),
    ("barrier", WHO, "b", 0, -5, None),
    ("barrier", WHO, "b", 0, None, "worker:0"),
    ("barrier", WHO, "b", 0, None, [("worker",)]),
    ("cancel_barrier", WHO, 7, 0),
    ("wait_for_all", WHO, ["d"] * 5000, None),
    ("wait_for_all", WHO, [7], None),
    ("alive", WHO, [["worker", None]]),
    ("states", "worker"),
    ("missing", None),
    ("kv_set", 7, "value", False),
    ("kv_set", "", "value", False),
    ("kv_get", "k", "soon"),
    ("kv_get", "k" * 2000, None),
    ("kv_delete", "/"),
    ("kv_increment", "n", 1.5),
    ("kv_increment", "n", 2**80),
]


def test_garbage_is_error_of_caller_alone(keep: Keep, join: Join) -> None:
    keeper = keep(2)
    with ZmqClient(
        keeper.address, security=Credentials().client(keeper.address, "worker")
    ) as client:
        for method, *args in GARBAGE:
            try:
                code, text = internal_client.start(
                    client, f"coordination.{method}", *args
                ).get_error()
            except errors.InvalidArgumentError as error:  # it does not even travel
                code, text = error.error_code, error.message
            assert code == errors.INVALID_ARGUMENT, f"{method}{str(args)[:60]}: {code} {text}"
    join(keeper, "worker:0").register(30)


@pytest.mark.parametrize(
    ("key", "shown"),
    [(5, "5"), ("", "''"), ("k" * 2000, "a str of 2000 characters"), (None, "None")],
    ids=["a number", "no characters", "too many characters", "nothing"],
)
def test_wrong_key_is_shown_whole(keep: Keep, key: object, shown: str) -> None:
    keeper = keep(1)
    with ZmqClient(
        keeper.address, security=Credentials().client(keeper.address, "worker")
    ) as client:
        code, text = internal_client.start(client, "coordination.kv_increment", key, 1).get_error()
    assert code == errors.INVALID_ARGUMENT
    assert text.endswith(f"a str of 1 to 1024 characters, not {shown}")


def test_stranger_gets_no_reply(keep: Keep) -> None:
    keeper = keep(2)
    with ZmqClient(keeper.address) as client:
        methods = [info[0] for info in internal_client.start(client, "zmqdist.methods").get_value()]
        assert len(methods) > 15
        for method in sorted(methods):
            code, text = internal_client.start(client, method).get_error()
            assert code == errors.PERMISSION_DENIED
            assert "role client may not call coordination." in text


# -- other hosts -----------------------------------------------------------------------------------


def test_dispatcher_keeps_barriers_and_keys(join: Join) -> None:
    with DispatchServer() as dispatcher:
        clients = [join(dispatcher.target, ("trainer", index)) for index in range(2)]
        names = ["trainer:0", "trainer:1"]
        for client in clients:
            client.register(30)
        with pytest.raises(errors.InvalidArgumentError, match="name its tasks"):
            clients[0].barrier("b", 30)
        waiting = Caller(clients[0].barrier, "b", 30, names)
        clients[1].barrier("b", 30, names)
        assert waiting.ended() is None
        clients[0].kv.set("k", 1)
        assert clients[1].kv.get("k") == 1
        assert sorted(clients[1].task_states()) == names
        for client in clients:
            client.close()

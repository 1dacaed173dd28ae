"""What callers see when something goes wrong: servers that die, threads that race, Ctrl-C, wrong
secrets."""

from __future__ import annotations

import gc
import random
import subprocess
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.launch.helpers import stop
from tests.rpc.helpers import Hosted, address_of, until
from zmqdist import errors
from zmqdist.limits import CHUNK_BYTES
from zmqdist.rpc import Client, Server, ZmqClient, ZmqServer
from zmqdist.transport import channel
from zmqdist.wire import headers

Serve = Callable[..., ZmqServer]
Connect = Callable[..., ZmqClient]
Child = Callable[..., "subprocess.Popen[str]"]

SERVER = """
import sys, time
from zmqdist.rpc import Server
server = Server.create("zmq", sys.argv[1])
server.register("sleep", time.sleep)
server.register("echo", lambda value: value, inline=True)
server.start()
print(server.address, flush=True)
sys.stdin.read()
"""


# -- the server goes -------------------------------------------------------------------------------


def test_killed_server_is_unavailable_at_once(child: Child, connect: Connect) -> None:
    process = child(SERVER, "127.0.0.1:0")
    client = connect(address_of(process), timeout_in_ms=30_000)
    outcome = client.sleep(60)
    assert client.echo_blocking(1) == 1
    assert not outcome.done()
    began = time.monotonic()
    process.kill()
    assert outcome.get_error()[0] == errors.UNAVAILABLE
    assert time.monotonic() - began < 20  # and not when the deadline or the function's time was up
    with pytest.raises(
        errors.UnavailableError, match=r"'sleep' was in flight; the server may have executed it"
    ):
        outcome.get_value()


def test_call_waits_for_absent_server(child: Child, connect: Connect) -> None:
    process = child(SERVER, "127.0.0.1:0")
    client = connect(address := address_of(process), timeout_in_ms=30_000)
    process.kill()
    process.wait()
    until(lambda: client.echo(0, timeout_in_ms=20).get_error()[0] == errors.DEADLINE_EXCEEDED)
    outcomes = [client.echo(number) for number in range(5)]
    assert not any(outcome.done() for outcome in outcomes)
    child(SERVER, address)
    assert [outcome.get_value() for outcome in outcomes] == list(range(5))
    assert client.echo_blocking("again") == "again"


def test_listing_is_repeated_after_lost_connection(child: Child, connect: Connect) -> None:
    process = child(SERVER, "127.0.0.1:0")
    client = connect(address := address_of(process), timeout_in_ms=30_000)
    stop(process.pid)
    found: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: found.append(client.methods()), daemon=True)
    asking.start()
    until(lambda: client.snapshot().calls_in_flight == 1)
    process.kill()
    process.wait()
    child(SERVER, address)
    asking.join(30)
    assert "echo" in found[0]


def test_pool_work_is_refused_after_stop() -> None:
    server = Hosted(threads_max=1)
    running, release = threading.Event(), threading.Event()
    refused: list[errors.OpError] = []

    def slow() -> None:
        running.set()
        release.wait(30)

    with server:
        server.service.submit(slow, refuse=refused.append)
        assert running.wait(30)
        server.service.submit(slow, refuse=refused.append)
        server.service.submit(slow)
        assert not server.service.stop(0.0), "one was running"
        release.set()
    assert [error.error_code for error in refused] == [errors.UNAVAILABLE]


def test_stopping_refuses_new_calls_and_answers_those_that_run(
    serve: Serve, connect: Connect
) -> None:
    running, release = threading.Event(), threading.Event()

    def slow() -> str:
        running.set()
        release.wait(30)
        return "answered"

    server = serve(slow=slow)
    client = connect(server.address)
    outcome = client.slow()
    assert running.wait(30)
    stopper = threading.Thread(target=server.stop)
    stopper.start()
    assert client.slow(timeout_in_ms=50).get_error()[0] in (
        errors.UNAVAILABLE,
        errors.DEADLINE_EXCEEDED,
    )
    release.set()
    assert outcome.get_value() == "answered"
    stopper.join(30)
    server.stop()
    with pytest.raises(errors.FailedPreconditionError, match="make a new one"):
        server.start()


def test_handler_beyond_grace_does_not_keep_server(serve: Serve, connect: Connect) -> None:
    running, release = threading.Event(), threading.Event()
    server = serve(slow=lambda: (running.set(), release.wait(30)))
    outcome = connect(server.address).slow()
    assert running.wait(30)
    server.stop(grace_s=0.01)
    assert outcome.get_error()[0] == errors.UNAVAILABLE
    release.set()


# -- many threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spin_s", [0.0, channel.SPIN_S], ids=["sleeping at once", "looking first"])
def test_mixed_calls_of_threads_never_stall(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch, spin_s: float
) -> None:
    monkeypatch.setattr(channel, "SPIN_S", spin_s)
    noted: list[int] = []

    def late(value: int, delay_s: float) -> int:
        time.sleep(delay_s)  # the work of this handler
        return value

    server = serve(
        inline=frozenset({"echo"}), echo=lambda value: value, late=late, note=noted.append
    )
    client = connect(server.address)
    wrong: list[Any] = []
    sent: list[int] = []

    def mixed(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for number in range(60):
                kind = rng.randrange(6)
                if kind == 0:
                    assert client.late_blocking(number, rng.random() * 0.02) == number
                elif kind == 1:
                    assert client.echo_blocking(number) == number
                elif kind == 2:
                    outcomes = [client.echo(n) for n in range(rng.randrange(1, 30))]
                    assert [outcome.get_value() for outcome in outcomes] == list(
                        range(len(outcomes))
                    )
                elif kind == 3:
                    code = client.late(
                        number, 0.02, timeout_in_ms=rng.randrange(1, 40)
                    ).get_error()[0]
                    assert code in (0, errors.DEADLINE_EXCEEDED)
                elif kind == 4:
                    for n in range(rng.randrange(1, 5)):
                        client.note(n)  # and nobody asks about it
                        sent.append(n)
                else:
                    ended = threading.Event()
                    client.late(number, 0.001).add_done_callback(
                        lambda outcome, ended=ended: ended.set()
                    )
                    assert ended.wait(30)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=mixed, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    until(lambda: len(noted) == len(sent))
    until(lambda: client.echo_blocking(0) == client.snapshot().calls == 0)
    until(lambda: server.snapshot().calls == 0)


def test_more_handlers_than_threads_wait_in_line(serve: Serve, connect: Connect) -> None:
    barrier = threading.Barrier(8)
    client = connect(serve(meet=lambda: barrier.wait(30)).address)
    outcomes = [client.meet() for _ in range(64)]
    assert sorted(outcome.get_value() for outcome in outcomes) == sorted(list(range(8)) * 8)


# -- Ctrl-C ----------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys, threading, time
from zmqdist.transport import channel
from zmqdist.wire import headers
from zmqdist.rpc import Client, Server
channel.SLICE_S = 40.0
release = threading.Event()
server = Server.create("zmq", "127.0.0.1:0")
server.register("wait", release.wait)
server.register("echo", lambda value: value, inline=True)
server.start()
client = Client.create("zmq", server.address)
if sys.argv[1] == "follower":  # another thread leads, so that the main thread follows
    other = threading.Thread(target=lambda: client.wait_blocking(), daemon=True)
    other.start()
    while not client._channel._leader:
        pass
def switches():
    with open(f"/proc/self/task/{os.getpid()}/status") as file:
        return [line for line in file if "ctxt_switches" in line or line.startswith("State:")]
def asleep():  # for a while: Python misses a signal between its last look and the system call, until that has ended
    before = switches()
    threading.Event().wait(0.02)
    return before == switches() and "sleeping" in str(before)
def interrupt():
    waiting = 2 if sys.argv[1] == "follower" else 1
    while client.snapshot().threads_waiting < waiting or not asleep():
        pass
    interrupt.at = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
for turn in range(3):
    threading.Thread(target=interrupt).start()
    try:
        client.wait_blocking()
    except KeyboardInterrupt:
        assert time.monotonic() - interrupt.at < 20, "it ended with a slice, not with the signal"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert client.echo_blocking(turn) == turn
release.set()
if sys.argv[1] == "follower":
    other.join()
seen = client.snapshot()
assert seen.calls == seen.stalls == 0, seen
client.close()
server.stop()
print("usable")
"""


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_ctrl_c_ends_a_wait_and_leaves_the_client_usable(child: Child, role: str) -> None:
    assert child(INTERRUPTED, role).communicate(timeout=30)[0] == "usable\n"


# -- the client goes -------------------------------------------------------------------------------


def test_closing_a_client_cancels_what_is_pending(serve: Serve, connect: Connect) -> None:
    release = threading.Event()
    client = connect(serve(slow=lambda: release.wait(30)).address)
    outcomes = [client.slow() for _ in range(3)]
    client.close()
    release.set()
    assert {outcome.get_error()[0] for outcome in outcomes} == {errors.CANCELLED}
    assert client.slow().get_error()[0] == errors.FAILED_PRECONDITION
    client.close()


def test_client_lives_as_long_as_its_calls(serve: Serve) -> None:
    server = serve(echo=lambda value: value)
    assert Client.create("zmq", server.address, "", 5000).echo("kept").get_value() == "kept"
    told: list[Any] = []
    Client.create("zmq", server.address, "", 5000).echo("told").add_done_callback(
        lambda outcome: told.append(outcome.get_value())
    )
    gc.collect()
    until(lambda: told == ["told"])


def test_dropped_client_leaves_no_thread(serve: Serve) -> None:
    server = serve()
    server.stop()
    client = ZmqClient(server.address)
    client.call("m")
    # others of this process may read for tests before this one
    reader = f"zmqdist-reader-{server.address}"
    assert reader in {thread.name for thread in threading.enumerate()}
    del client
    until(lambda: reader not in {thread.name for thread in threading.enumerate()})


def test_cancelled_call_never_begins(serve: Serve, connect: Connect) -> None:
    release = threading.Event()
    ran: list[int] = []
    server = serve(hold=lambda: release.wait(30), note=ran.append)
    client = connect(server.address)
    held = [client.hold() for _ in range(server.snapshot().threads_max)]
    outcome = client.note(1)
    assert client.methods()  # so the server has seen all of them
    assert outcome.cancel()
    assert client.methods()  # and the cancelling
    assert outcome.get_error()[0] == errors.CANCELLED
    assert not outcome.cancel()
    release.set()
    assert all(one.is_ok() for one in held)
    client.note_blocking(2)
    assert ran == [2]


# -- secrets and addresses -------------------------------------------------------------------------


def test_wrong_token_is_unauthenticated(serve: Serve, tmp_path: Any) -> None:
    server = serve(m=lambda: 1)
    (tmp_path / "other").write_text("another token, long enough to be one, surely so")
    (tmp_path / "other").chmod(0o600)
    with pytest.raises(errors.UnauthenticatedError, match="refused"):
        Client.create("zmq", server.address, "", 20_000, token_file=tmp_path / "other")
    client = ZmqClient(server.address, token_file=tmp_path / "other")
    assert client.call("m").get_error()[0] == errors.UNAUTHENTICATED
    assert client.call("m").get_error()[0] == errors.UNAUTHENTICATED
    client.close()


@pytest.mark.parametrize(
    ("address", "error", "told"),
    [
        ("nonsense", errors.InvalidArgumentError, "is not an address"),
        ("0.0.0.0:0", errors.FailedPreconditionError, "keygen"),
        ("taken", errors.UnknownError, "could not bind .*in use"),
    ],
)
def test_unusable_address_fails_at_once(
    serve: Serve, address: str, error: type[Exception], told: str
) -> None:
    if address == "taken":
        address = serve().address
    with pytest.raises(error, match=told):
        Server.create("zmq", address).start()


def test_second_start_does_nothing(serve: Serve) -> None:
    server = serve()
    address = server.address
    server.start()
    assert server.address == address != "127.0.0.1:0"
    for call in (Server().start, lambda: Server().register("m", print), lambda: Client().call("m")):
        with pytest.raises(NotImplementedError):
            call()


# -- what handlers do ------------------------------------------------------------------------------


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("inline", [frozenset(), frozenset({"m"})], ids=["pool", "inline"])
@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [
        (ValueError("bad"), errors.INVALID_ARGUMENT, "ValueError: bad\n"),
        (TypeError("bad"), errors.INVALID_ARGUMENT, "TypeError: bad\n"),
        (NotImplementedError("not yet"), errors.UNIMPLEMENTED, "NotImplementedError: not yet\n"),
        (MemoryError(), errors.RESOURCE_EXHAUSTED, "MemoryError: \n"),
        (StopIteration(), errors.OUT_OF_RANGE, "StopIteration: \n"),
        (KeyError("k"), errors.UNKNOWN, "KeyError: 'k'\n"),
        (TimeoutError("late"), errors.UNKNOWN, "TimeoutError: late\n"),
        (SystemExit(3), errors.UNKNOWN, "SystemExit: 3\n"),
        (Rude(), errors.UNKNOWN, "Rude ("),
        (errors.NotFoundError(None, None, "no such key"), errors.NOT_FOUND, "no such key"),
        (errors.DeadlineExceededError(None, None, "inner"), errors.DEADLINE_EXCEEDED, "inner"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_exception_arrives_with_code_and_traceback(
    serve: Serve,
    connect: Connect,
    raised: BaseException,
    code: int,
    told: str,
    inline: frozenset[str],
) -> None:
    def m() -> None:
        raise raised

    client = connect(serve(inline=inline, m=m).address)
    got, message = client.m().get_error()
    assert (got, message[: len(told)]) == (code, told)
    assert ("in m\n" in message) == (told.endswith("\n"))
    with pytest.raises(errors.exception_type_from_error_code(code)):
        client.m_blocking()


def test_value_that_cannot_travel_is_refused(serve: Serve, connect: Connect) -> None:
    client = connect(serve(give=lambda: {"a": [1, object()]}, take=lambda value: None).address)
    with pytest.raises(errors.InvalidArgumentError, match=r"\['a'\]\[1\].*object"):
        client.give_blocking()
    with pytest.raises(errors.InvalidArgumentError, match="set"):
        client.take({1, 2})


# -- large values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        2**16,
        2**16 + 1,
        CHUNK_BYTES - 1,
        CHUNK_BYTES,
        CHUNK_BYTES + 1,
        2 * CHUNK_BYTES,
        2**24 + 1,
    ],
)
def test_array_of_any_size_arrives_writable(serve: Serve, connect: Connect, size: int) -> None:
    client = connect(serve(echo=lambda array: array).address, timeout_in_ms=30_000)
    given = np.arange(size, dtype=np.uint8)
    got = client.echo_blocking({"a": given, "b": given[::2]})
    assert np.array_equal(got["a"], given)
    assert np.array_equal(got["b"], given[::2])
    assert got["a"].flags.writeable


def test_argument_is_a_snapshot(serve: Serve, connect: Connect) -> None:
    client = connect(serve(total=lambda array: int(array.sum())).address)
    array = np.ones(10**6, np.int64)
    outcome = client.total(array)
    array[:] = 7
    assert outcome.get_value() == 10**6


def test_result_is_a_snapshot(serve: Serve, connect: Connect) -> None:
    state = np.zeros(10**6, np.int64)

    def step() -> Any:
        state[:] += 1
        return state

    client = connect(serve(inline=frozenset({"step"}), step=step).address)
    outcomes = [client.step() for _ in range(4)]
    assert [set(np.unique(outcome.get_value())) for outcome in outcomes] == [{1}, {2}, {3}, {4}]


def test_call_during_stop_waits_for_next_server(serve: Serve, connect: Connect) -> None:
    running, release = threading.Event(), threading.Event()

    def hold() -> bool:
        running.set()
        return release.wait(30)

    server = serve(hold=hold, m=lambda: 1)
    client, address = connect(server.address), server.address
    held = client.hold()
    assert running.wait(30)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    until(lambda: not held.done() and not client.snapshot().connected)  # it has said goodbye
    late = client.m()
    assert not late.done()
    release.set()
    stopping.join()
    assert held.get_value() is True
    serve(address, m=lambda: 2)
    assert late.get_value() == 2


FORKED_SERVER = """
import os
import warnings
from zmqdist.rpc import Client, Server
server = Server.create("zmq", "127.0.0.1:0")
server.register("m", lambda: 1)
server.start()
warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # Python 3.12: such a fork may deadlock
pid = os.fork()
if not pid:
    server.stop()
    del server
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
with Client.create("zmq", server.address) as client:
    print(client.m_blocking(), flush=True)
server.stop()
"""


def test_forked_child_keeps_server_of_parent(child: Child) -> None:
    assert child(FORKED_SERVER).communicate(timeout=30)[0] == "1\n"


def test_missing_memory_is_an_error_of_the_call(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    client = connect(serve(wait=lambda: go.wait(30)).address)
    calls = [client.wait() for _ in range(3)]

    def decode(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(channel, "headers", SimpleNamespace(decode=decode, encode=headers.encode))
    go.set()
    for call in calls:
        with pytest.raises(errors.ResourceExhaustedError, match="no memory here for a message"):
            call.get_value()

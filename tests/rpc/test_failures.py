"""Whatever a handler does, its call ends, with an error that says what happened, and the server
goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.rpc.helpers import Hosted
from zmqdist import errors
from zmqdist.errors import OpError
from zmqdist.limits import DEPTH_MAX, ERROR_CHARS_MAX, HANDLER_THREADS_MAX
from zmqdist.rpc import ZmqClient, ZmqServer
from zmqdist.rpc.handler_errors import code_and_message
from zmqdist.rpc.handler_pool import HandlerPool
from zmqdist.rpc.service import PendingCall

Serve = Callable[..., ZmqServer]
Connect = Callable[..., ZmqClient]


class Ends(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class NoText(Exception):
    def __str__(self) -> Any:
        return 5


class Bare(OpError):
    """Its constructor does not call that of OpError."""

    def __init__(self, what: str) -> None:
        self.what = what


class Missing(errors.NotFoundError):
    def __init__(self, what: str) -> None:
        self.what = what


class Hostile(OpError):
    def __init__(self) -> None:
        pass

    @property
    def message(self) -> str:  # type: ignore[override]
        raise SystemExit


class Text(str):
    def encode(self, *_: Any) -> bytes:
        raise KeyboardInterrupt


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


LONG = "ä" * 8_000_000

RAISED = {
    "a message that is no str": (
        lambda: errors.NotFoundError(None, None, 5),
        errors.NOT_FOUND,
        "5",
    ),  # type: ignore[arg-type]
    "a message of bytes": (lambda: errors.AbortedError(None, None, b"no"), errors.ABORTED, "b'no'"),  # type: ignore[arg-type]
    "an error as message": (
        lambda: errors.AbortedError(None, None, ValueError("no")),
        errors.ABORTED,
        "no",
    ),  # type: ignore[arg-type]
    "a str of its own": (
        lambda: errors.NotFoundError(None, None, Text("no")),
        errors.NOT_FOUND,
        "no",
    ),
    "no message": (lambda: Bare("x"), errors.UNKNOWN, "Bare: x"),
    "no message, and a code": (lambda: Missing("x"), errors.NOT_FOUND, "Missing: x"),
    "a message that raises": (Hostile, errors.UNKNOWN, "Hostile (its text could not be made)"),
    "code 0": (lambda: OpError(None, None, "no", 0), errors.UNKNOWN, "no"),
    "a code that there is not": (lambda: OpError(None, None, "no", 99), errors.UNKNOWN, "no"),
    "a code that is no number": (lambda: OpError(None, None, "no", "5"), errors.UNKNOWN, "no"),  # type: ignore[arg-type]
    "a __str__ that ends threads": (Ends, errors.UNKNOWN, "Ends (its text could not be made)"),
    "a __str__ that gives no str": (NoText, errors.UNKNOWN, "NoText (its text could not be made)"),
    "SystemExit": (lambda: SystemExit(2), errors.UNKNOWN, "SystemExit: 2"),
    "KeyboardInterrupt": (KeyboardInterrupt, errors.UNKNOWN, "KeyboardInterrupt: "),
    "GeneratorExit": (GeneratorExit, errors.UNKNOWN, "GeneratorExit: "),
}
"""What is raised, and the code and the beginning of the text that its caller gets."""


def in_the_pool(serve: Serve, connect: Connect, fail: Callable[[], Any]) -> Any:
    return connect(serve(m=fail, ok=int).address).m()


def inline(serve: Serve, connect: Connect, fail: Callable[[], Any]) -> Any:
    return connect(serve(m=fail, inline=frozenset({"m"})).address).m()


def batched(serve: Serve, connect: Connect, fail: Callable[[], Any]) -> Any:
    server = ZmqServer("127.0.0.1:0")
    server.register("m", lambda array: fail(), batch=True)
    with server:
        call = connect(server.address).m(np.zeros(3))
        call.get_error()
        assert connect(server.address).m(np.zeros(3)).get_error() == call.get_error()
    return call


class _Stream:
    """A stream as a call."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def get_error(self) -> tuple[int, str]:
        try:
            list(self._stream)
        except OpError as error:
            return error.error_code, error.message
        return 0, ""


def streamed(serve: Serve, connect: Connect, fail: Callable[[], Any]) -> Any:
    def m() -> Iterator[int]:
        yield 1
        fail()

    return _Stream(connect(serve(m=m).address).m())


@pytest.mark.parametrize("way", [in_the_pool, inline, batched, streamed])
@pytest.mark.parametrize("kind", RAISED)
def test_exception_of_handler_ends_its_call(
    serve: Serve, connect: Connect, kind: str, way: Callable[..., Any]
) -> None:
    make, code, text = RAISED[kind]

    def fail() -> None:
        raise make()

    got, message = way(serve, connect, fail).get_error()
    assert (got, message[: len(text)]) == (code, text)


@pytest.mark.parametrize("raises", [False, True], ids=["fails", "raises"])
@pytest.mark.parametrize("kind", RAISED)
def test_exception_of_later_method_ends_its_call(connect: Connect, kind: str, raises: bool) -> None:
    make, code, text = RAISED[kind]

    def later(asked: PendingCall) -> None:
        if raises:
            raise make()
        asked.fail(make())

    hosted = Hosted()
    hosted.service.register_later("m", later)
    with hosted:
        got, message = connect(hosted.address).call("m").get_error()
    assert (got, message[: len(text)]) == (code, text)


def test_errors_keep_handler_threads(serve: Serve, connect: Connect) -> None:
    def fail() -> None:
        raise Ends

    client = connect(serve(fail=fail, ok=lambda: 1).address)
    for call in [client.fail() for _ in range(2 * HANDLER_THREADS_MAX)]:
        assert call.get_error()[0] == errors.UNKNOWN
    assert client.ok_blocking() == 1


def test_work_that_raises_does_not_end_a_thread_of_the_pool(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool, done = HandlerPool("test", 1), threading.Event()

    def fail() -> None:
        raise SystemExit

    pool.submit(fail)
    pool.submit(done.set)
    assert done.wait(20)
    assert pool.wait_idle(20)
    pool.stop()
    assert "a bug in zmqdist" in caplog.text


@pytest.mark.parametrize(
    "error", [ValueError(LONG), errors.NotFoundError(None, None, LONG)], ids=["plain", "OpError"]
)
def test_long_error_text_loses_its_middle(error: Exception) -> None:
    try:
        raise error
    except Exception as raised:
        _, text = code_and_message(raised)
    assert len(text) < ERROR_CHARS_MAX + 500
    assert "characters are left out here)" in text
    assert text.endswith(("ä" * 100, "ä" * 100 + "\n"))


def test_calls_beside_one_with_a_long_error_are_not_harmed(serve: Serve, connect: Connect) -> None:
    def fail() -> None:
        raise ValueError(LONG)

    client = connect(serve(fail=fail, ok=lambda: 1).address)
    calls = [client.fail(), client.ok(), client.fail(), client.ok()]
    assert [call.get_error()[0] for call in calls] == [
        errors.INVALID_ARGUMENT,
        0,
        errors.INVALID_ARGUMENT,
        0,
    ]


def test_failing_callback_harms_no_other(serve: Serve, connect: Connect) -> None:
    release, called = threading.Event(), threading.Event()
    call = connect(serve(m=lambda: release.wait(20)).address).m()
    call.add_done_callback(lambda call: sys.exit())
    call.add_done_callback(lambda call: called.set())
    release.set()
    assert called.wait(20)


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    "value",
    [deep(DEPTH_MAX + 1), deep(1000), deep(50_000), LOOP],
    ids=["65", "1000", "50000", "loop"],
)
def test_deep_nesting_is_invalid_at_both_ends(serve: Serve, connect: Connect, value: Any) -> None:
    client = connect(serve(take=lambda value: None, give=lambda: value).address)
    for ask in (client.take, client.take_blocking, lambda value: client.take(value=value)):
        with pytest.raises(
            errors.InvalidArgumentError, match="deeper than 64 levels, or contains itself"
        ):
            ask(value)
    assert client.give().get_error()[0] == errors.INVALID_ARGUMENT
    assert "deeper than 64 levels" in client.give().get_error()[1]


@pytest.mark.parametrize("value", [deep(1000), deep(50_000), LOOP], ids=["1000", "50000", "loop"])
def test_unreachable_leaves_are_invalid(serve: Serve, connect: Connect, value: Any) -> None:
    client = connect(serve(take=lambda value: None).address)
    with pytest.raises(
        errors.InvalidArgumentError, match="deeper than 64 levels, or contains itself"
    ):
        client.call("take", value)


def test_returned_generator_error_explains_streams(serve: Serve, connect: Connect) -> None:
    def count() -> Iterator[int]:
        yield 1

    client = connect(serve(m=lambda: count()).address)
    with pytest.raises(errors.InvalidArgumentError, match="register the generator function itself"):
        client.m_blocking()

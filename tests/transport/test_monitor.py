"""What the monitor concludes about a connecting socket, event by event, without a socket."""

from __future__ import annotations

import errno
import re

import pytest
import zmq
from zmq import Event

from zmqdist.errors import FailedPreconditionError, UnauthenticatedError, UnavailableError
from zmqdist.transport.dealer import CLOSES_MAX, MISMATCH, Change, ConnectionWatch
from zmqdist.transport.security import CURVE, NONE, PLAIN, ClientSecurity

UP, DOWN, PROBE_NEEDED = Change

ADDRESS = "10.0.0.1:5050"
CRYPTOGRAPHIC = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)


def watch(mechanism: str = PLAIN) -> ConnectionWatch:
    return ConnectionWatch(ADDRESS, ClientSecurity(mechanism, "worker", "token /somewhere"))


def attempt(watch: ConnectionWatch, *events: tuple[int, int]) -> list[object]:
    watch.begin()
    return [verdict for event, value in events if (verdict := watch.feed(event, value)) is not None]


def kinds(verdicts: list[object]) -> list[object]:
    """Return the verdicts, each text or error as its type."""
    return [verdict if isinstance(verdict, Change) else type(verdict) for verdict in verdicts]


@pytest.mark.parametrize(
    ("events", "verdicts"),
    [
        ([(Event.CONNECTED, 9), (Event.HANDSHAKE_SUCCEEDED, 9)], [UP]),
        (
            [(Event.CONNECTED, 9), (Event.HANDSHAKE_SUCCEEDED, 9), (Event.DISCONNECTED, 9)],
            [UP, DOWN],
        ),
        (
            [(Event.CONNECTED, 9), (Event.HANDSHAKE_FAILED_AUTH, 400), (Event.DISCONNECTED, 9)],
            [UnauthenticatedError, str],
        ),
        ([(Event.CONNECTED, 9), (Event.HANDSHAKE_FAILED_PROTOCOL, MISMATCH)], [PROBE_NEEDED]),
        ([(Event.CONNECTED, 9), (Event.HANDSHAKE_FAILED_NO_DETAIL, errno.EPIPE)], [str]),
        ([(Event.CONNECTED, 9), (Event.HANDSHAKE_FAILED_PROTOCOL, CRYPTOGRAPHIC)], [str]),
        ([(Event.CONNECTED, 9), (Event.HANDSHAKE_FAILED_NO_DETAIL, errno.EAGAIN)], [str]),
        ([(Event.CONNECTED, 9), (Event.DISCONNECTED, 9)], [str]),
        ([(Event.CLOSED, 9)], [str]),
        ([(int(zmq.EVENT_CONNECT_RETRIED), 50)], []),
    ],
)
def test_verdicts_of_one_attempt(events: list[tuple[int, int]], verdicts: list[object]) -> None:
    assert kinds(attempt(watch(), *events)) == verdicts


def test_third_closed_handshake_needs_probe() -> None:
    one = watch(CURVE)
    closed = [(Event.CONNECTED, 9), (Event.HANDSHAKE_FAILED_NO_DETAIL, errno.EPIPE)]
    verdicts = [verdict for _ in range(CLOSES_MAX) for verdict in attempt(one, *closed)]
    assert kinds(verdicts) == [str] * (CLOSES_MAX - 1) + [PROBE_NEEDED]


@pytest.mark.parametrize(
    "between",
    [[(Event.CLOSED, 9)], [(Event.CONNECTED, 9), (Event.HANDSHAKE_SUCCEEDED, 9)]],
    ids=["nobody listens", "it worked once"],
)
def test_unrelated_event_ends_row_of_closed_handshakes(between: list[tuple[int, int]]) -> None:
    one = watch(CURVE)
    closed = [(Event.CONNECTED, 9), (Event.HANDSHAKE_FAILED_NO_DETAIL, errno.EPIPE)]
    for _ in range(3):
        for _ in range(CLOSES_MAX - 1):
            assert type(attempt(one, *closed)[0]) is str
        attempt(one, *between)


def test_busy_server_is_no_refusal() -> None:
    one = watch(CURVE)
    for _ in range(10):
        (verdict,) = attempt(
            one, (Event.CONNECTED, 9), (Event.HANDSHAKE_FAILED_NO_DETAIL, errno.EAGAIN)
        )
        assert verdict == "the server did not finish the handshake in time: it may be very busy"


def doubted(mechanism: str, closes: int, mismatch: bool) -> ConnectionWatch:
    one = watch(mechanism)
    for _ in range(closes):
        attempt(one, (Event.CONNECTED, 9), (Event.HANDSHAKE_FAILED_NO_DETAIL, errno.EPIPE))
    if mismatch:
        attempt(one, (Event.CONNECTED, 9), (Event.HANDSHAKE_FAILED_PROTOCOL, MISMATCH))
    return one


@pytest.mark.parametrize(
    ("ours", "closes", "mismatch", "greeting", "error", "problem"),
    [
        (
            CURVE,
            3,
            False,
            "CURVE",
            UnauthenticatedError,
            "does not have the key that this side expects",
        ),
        (
            PLAIN,
            3,
            False,
            "PLAIN",
            UnavailableError,
            "closed 3 handshakes in a row: its log may say why",
        ),
        (
            PLAIN,
            3,
            False,
            "CURVE",
            FailedPreconditionError,
            "uses CURVE keys, this side the user's token",
        ),
        (
            CURVE,
            0,
            True,
            "PLAIN",
            FailedPreconditionError,
            "uses the user's token (PLAIN), this side CURVE keys",
        ),
        (
            CURVE,
            0,
            True,
            "NULL",
            FailedPreconditionError,
            "uses no security, in plaintext, this side CURVE keys",
        ),
        (NONE, 0, True, "CURVE", FailedPreconditionError, "uses CURVE keys, this side no security"),
        (
            PLAIN,
            0,
            True,
            None,
            FailedPreconditionError,
            "does not use the user's token (PLAIN), as this side does",
        ),
        (
            PLAIN,
            3,
            False,
            "",
            FailedPreconditionError,
            "is not a zmqdist server: is the port right?",
        ),
        (
            PLAIN,
            3,
            False,
            "GSSAPI",
            FailedPreconditionError,
            "is not a zmqdist server: is the port right?",
        ),
    ],
)
def test_greeting_decides(
    ours: str,
    closes: int,
    mismatch: bool,
    greeting: str | None,
    error: type[Exception],
    problem: str,
) -> None:
    refusal = doubted(ours, closes, mismatch).judge(greeting)
    assert type(refusal) is error
    assert re.search(re.escape(problem), str(refusal))
    assert ADDRESS in str(refusal)


@pytest.mark.parametrize(
    ("closes", "mismatch", "greeting"),
    [(3, False, None), (0, True, "PLAIN"), (2, True, "PLAIN")],
    ids=["gone since", "restarted with ours since", "the same after two closed handshakes"],
)
def test_inconclusive_greeting_means_retry(
    closes: int, mismatch: bool, greeting: str | None
) -> None:
    assert doubted(PLAIN, closes, mismatch).judge(greeting) is None


@pytest.mark.parametrize(
    ("mechanism", "status", "problem"),
    [
        (
            PLAIN,
            400,
            (
                "it belongs to another user or to a cluster with a token of its own "
                "(local_cluster, launch), "
                "or was started with another ZMQDIST_TOKEN_FILE"
            ),
        ),
        (CURVE, 400, "that public key is not in the server's `authorized` file"),
        (NONE, 400, "it wants a token or a key"),
        (PLAIN, 500, "its authentication failed with status 500"),
    ],
)
def test_refused_secret_is_named_with_source(mechanism: str, status: int, problem: str) -> None:
    (refusal,) = attempt(
        watch(mechanism), (Event.CONNECTED, 9), (Event.HANDSHAKE_FAILED_AUTH, status)
    )
    assert isinstance(refusal, UnauthenticatedError)
    assert (
        str(refusal)
        == f"the server at {ADDRESS} refused this side as worker (token /somewhere): {problem}"
    )

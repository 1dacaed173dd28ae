"""Which clients and servers accept each other, over real sockets; and which secrets are used."""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.transport.helpers import Dialled, Served, until
from zmqdist.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    UnauthenticatedError,
)
from zmqdist.transport import keys
from zmqdist.transport.security import (
    CURVE,
    NONE,
    PLAIN,
    client_security,
    listening_users,
    server_security,
)

Serve = Callable[..., Served]
Dial = Callable[..., Dialled]
Child = Callable[..., "subprocess.Popen[str]"]

SHOWN_WITHIN_S = 20.0


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Return the options of `server_security` and `client_security` for a name in the table."""
    for name in ("keys", "others", "mixed"):
        keys.keygen(tmp_path / name)
    keys.create(tmp_path / "tokens" / "other-token")
    mixed = tmp_path / "mixed"  # the server's right key, but a key of our own that it does not know
    (mixed / "server.pub").write_bytes((tmp_path / "keys" / "server.pub").read_bytes())
    return {
        "token": {},
        "other token": {"token_file": tmp_path / "tokens" / "other-token"},
        "keys": {"keys_dir": tmp_path / "keys"},
        "other keys": {"keys_dir": tmp_path / "others"},
        "unknown key": {"keys_dir": mixed},
        "nothing": {"insecure": True},
    }


@pytest.fixture(autouse=True)
def _private_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir(mode=0o700)


@pytest.mark.parametrize("both", ["token", "other token", "keys", "nothing"])
def test_equal_secrets_connect(
    serve: Serve, dial: Dial, folders: dict[str, dict[str, Any]], both: str
) -> None:
    served = serve(server_security("127.0.0.1", **folders[both]))
    dialled = dial(served.address, client_security(served.address, "submit", **folders[both]))
    dialled.expect("up")
    assert dialled.ask(1).message == ("admin" if both == "nothing" else "submit")


REFUSALS = [
    (
        "token",
        "other token",
        UnauthenticatedError,
        "refused this side as client (token ",
        "another ZMQDIST_TOKEN_FILE",
    ),
    (
        "keys",
        "unknown key",
        UnauthenticatedError,
        "refused this side as client (key ",
        "not in the server's `authorized`",
    ),
    (
        "keys",
        "other keys",
        UnauthenticatedError,
        "does not have the key that this side expects",
        "`server.pub`",
    ),
    (
        "token",
        "nothing",
        FailedPreconditionError,
        "uses the user's token (PLAIN), this side no security",
        "leave out",
    ),
    (
        "token",
        "keys",
        FailedPreconditionError,
        "uses the user's token (PLAIN), this side CURVE keys",
        "leave out the keys",
    ),
    (
        "keys",
        "nothing",
        FailedPreconditionError,
        "uses CURVE keys, this side no security",
        "ZMQDIST_KEYS_DIR",
    ),
    (
        "keys",
        "token",
        FailedPreconditionError,
        "uses CURVE keys, this side the user's token",
        "ZMQDIST_KEYS_DIR",
    ),
    (
        "nothing",
        "token",
        FailedPreconditionError,
        "uses no security, in plaintext, this side the user's token",
        "insecure",
    ),
    (
        "nothing",
        "keys",
        FailedPreconditionError,
        "uses no security, in plaintext, this side CURVE keys",
        "insecure",
    ),
]


@pytest.mark.parametrize(("server", "client", "error", "cause", "advice"), REFUSALS)
# a mismatch is a race: the client may see either of its two forms
@pytest.mark.parametrize("attempt", range(3))
def test_refusal_names_likely_cause(
    serve: Serve,
    dial: Dial,
    folders: dict[str, dict[str, Any]],
    server: str,
    client: str,
    error: type[OpError],
    cause: str,
    advice: str,
    attempt: int,
) -> None:
    served = serve(server_security("127.0.0.1", **folders[server]))
    began = time.monotonic()
    dialled = dial(served.address, client_security(served.address, "client", **folders[client]))
    refusal = dialled.expect("refused", SHOWN_WITHIN_S)[1]
    assert time.monotonic() - began < SHOWN_WITHIN_S
    assert type(refusal) is error
    assert served.address in str(refusal)
    assert cause in str(refusal)
    assert advice in str(refusal)
    assert keys.user_token()[0].decode() not in str(refusal)
    assert not served.shown


def test_foreign_server_is_reported(dial: Dial, child: Child) -> None:
    shouting = child(
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "print(server.getsockname()[1], flush=True)\n"
        "while True:\n"
        "    connection, _ = server.accept()\n"
        "    connection.sendall(b'SSH-2.0-OpenSSH_9.6\\r\\n')\n"
    )
    assert shouting.stdout is not None
    address = f"127.0.0.1:{int(shouting.stdout.readline())}"
    error = dial(address).expect("refused", SHOWN_WITHIN_S)[1]
    assert (
        str(error)
        == f"the process that listens on {address} is not a zmqdist server: is the port right?"
    )


def test_client_waits_for_stopped_server(dial: Dial, child: Child) -> None:
    """The kernel accepts the connection, and no process answers the handshake: this is not a
    refusal."""
    frozen = child(
        "import os, signal, socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "print(server.getsockname()[1], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    assert frozen.stdout is not None
    dialled = dial(f"127.0.0.1:{int(frozen.stdout.readline())}")
    until(
        lambda: (
            dialled.dealer.trouble
            == "the server accepted the connection, but has not finished the handshake"
        )
    )
    with pytest.raises(queue.Empty):
        dialled.expect("refused", 0.3)


def test_refused_client_connects_when_cause_is_gone(
    serve: Serve, dial: Dial, folders: dict[str, dict[str, Any]]
) -> None:
    served = serve(server_security("127.0.0.1", **folders["other token"]))
    dialled = dial(served.address)
    dialled.expect("refused")
    served.loop.stop()
    again = serve(address=served.address)
    dialled.loop.run(dialled.dealer.reconnect)
    dialled.expect("up")
    assert dialled.ask(1).id == 1
    assert len(again.shown) == 1


def test_client_waits_for_future_server(serve: Serve, dial: Dial) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    dialled = dial(address)
    until(lambda: dialled.dealer.trouble == "no process listens there")
    serve(address=address)
    dialled.expect("up")


# -- a listener of another user --------------------------------------------------------------------

STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
print("somebody connected", flush=True)
"""

as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user"
)


@as_root
def test_token_is_hidden_from_other_user(dial: Dial, child: Child) -> None:
    stranger = child(STRANGER, "0")
    assert stranger.stdout is not None
    address = f"127.0.0.1:{int(stranger.stdout.readline())}"
    error = dial(address).expect("refused")[1]
    assert isinstance(error, UnauthenticatedError)
    assert f"user 65534 listens on {address}, not this user (0)" in str(error)
    stranger.kill()
    assert stranger.stdout.read() == "", "the client did not even connect"


@as_root
@pytest.mark.parametrize("late_s", [0.0, 0.5], ids=["at once", "before the end was noticed"])
def test_port_thief_learns_nothing(serve: Serve, dial: Dial, child: Child, late_s: float) -> None:
    served = serve()
    dialled = dial(served.address)
    dialled.expect("up")
    hold = threading.Event()
    if late_s:  # ZeroMQ's own thread has all the time to connect again, if it were allowed to
        dialled.loop.call_soon(hold.wait, 10.0)
    served.loop.stop()
    stranger = child(STRANGER, served.address.split(":")[1])
    assert stranger.stdout is not None
    stranger.stdout.readline()
    threading.Timer(late_s, hold.set).start()
    dialled.expect("down")
    assert "user 65534 listens on" in str(dialled.expect("refused")[1])
    stranger.kill()
    assert stranger.stdout.read() == ""


@pytest.mark.parametrize(
    ("bound", "queried", "found"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.2", "127.0.0.1", False),
        ("::1", "::1", True),
        ("::1", "127.0.0.1", False),
        ("127.0.0.1", "::1", False),
    ],
)
def test_listener_user_is_found_by_port(bound: str, queried: str, found: bool) -> None:
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    if family == socket.AF_INET6 and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    with socket.socket(family) as server:
        server.bind((bound, 0))
        port = server.getsockname()[1]
        assert listening_users(queried, port) == set(), "bound is not listening"
        server.listen()
        assert listening_users(queried, port) == ({os.geteuid()} if found else set())


def test_unknown_listener_user_needs_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*args: Any) -> None:
        raise PermissionError("hidden")

    monkeypatch.setattr("zmqdist.transport.security._collect_listening", unreadable)
    with pytest.raises(
        FailedPreconditionError,
        match=r"cannot find out which user listens on 127\.0\.0\.1:1 .*zmqdist keygen",
    ):
        client_security("127.0.0.1:1", "client").may_connect("127.0.0.1:1")


# -- choosing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "node1", "127.0.0.1.example.org"])
def test_remote_address_needs_keys_on_both_ends(host: str) -> None:
    address = f"[{host}]:1" if ":" in host else f"{host}:1"
    for attempt in (lambda: server_security(host), lambda: client_security(address, "client")):
        with pytest.raises(
            FailedPreconditionError,
            match=r"no CURVE keys are given: make some with `zmqdist keygen DIR`",
        ):
            attempt()


@pytest.mark.parametrize(
    ("environment", "options", "mechanism"),
    [
        ({}, {}, PLAIN),
        ({"ZMQDIST_KEYS_DIR": "keys"}, {}, CURVE),
        ({}, {"keys_dir": "keys"}, CURVE),
        ({"ZMQDIST_KEYS_DIR": "keys"}, {"token_file": "token"}, PLAIN),
        ({"ZMQDIST_KEYS_DIR": "keys"}, {"insecure": True}, CURVE),
        ({"ZMQDIST_TOKEN_FILE": "token"}, {}, PLAIN),
        ({}, {"insecure": True}, NONE),
    ],
)
def test_mechanism_follows_from_secrets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    options: dict[str, Any],
    mechanism: str,
) -> None:
    keys.keygen(tmp_path / "keys")
    keys.create(tmp_path / "tokens" / "token")
    paths = {"keys": str(tmp_path / "keys"), "token": str(tmp_path / "tokens" / "token")}
    for name, value in environment.items():
        monkeypatch.setenv(name, paths[value])
    options = {name: paths.get(value, value) for name, value in options.items()}
    assert server_security("127.0.0.1", **options).mechanism == mechanism
    assert client_security("127.0.0.1:1", "client", **options).mechanism == mechanism


def test_insecure_server_warns_at_start(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        server_security("0.0.0.0", insecure=True)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "0.0.0.0 is served without authentication and encryption" in caplog.text


def test_unknown_role_is_refused() -> None:
    with pytest.raises(
        InvalidArgumentError, match="'root' is not a role: client, observe, submit, worker, admin"
    ):
        client_security("127.0.0.1:1", "root")


def test_repr_has_no_secret(folders: dict[str, dict[str, Any]]) -> None:
    for name in ("token", "keys"):
        server = server_security("127.0.0.1", **folders[name])
        client = client_security("127.0.0.1:1", "worker", **folders[name])
        shown = f"{server!r} {client!r}"
        secrets = [
            server.policy.token,
            client.token,
            server.key and server.key.secret,
            client.key and client.key.secret,
        ]
        assert any(secrets)
        assert not any(secret.decode() in shown for secret in secrets if secret)

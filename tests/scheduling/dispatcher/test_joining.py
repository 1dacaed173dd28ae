"""Processes that join a dispatcher by tickets, over real sockets: the rights of a joined key, and
their limits."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import zmqdist as zd
from tests.cli.helpers import run
from tests.launch.helpers import stop
from tests.ports import free_port
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.data.dataset import Dataset
from zmqdist.data.service.client import distribute
from zmqdist.messages import Join, Joined, Refused, Register
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.methods import SERVER_INFO
from zmqdist.scheduling.dispatcher.key_service import KeyService
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.transport import keys, router
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.dealer import DealerConnection
from zmqdist.transport.endpoint import split
from zmqdist.transport.join_ticket import JoinTicket, decode_ticket, join
from zmqdist.transport.keyring_machine import JOINING
from zmqdist.transport.loop import Loop
from zmqdist.transport.security import CURVE, ClientSecurity, Policy, ServerSecurity
from zmqdist.wire.hello import our_hello

LARGE = 300_000
"""Bytes above INLINE_BYTES_MAX: they are fetched from the process that holds them."""

Member = Callable[..., str]


@pytest.fixture
def all_keys(no_shared_memory: None, tmp_path: Path) -> str:
    """The static keys of the cluster. Shared memory is off, so that all large payloads are fetched
    over connections."""
    keys.keygen(tmp_path / "keys")
    return str(tmp_path / "keys")


@pytest.fixture
def dispatcher(all_keys: str) -> Iterator[zd.DispatchServer]:
    with zd.DispatchServer(DispatcherConfig(keys_dir=all_keys)) as made:
        yield made


@pytest.fixture
def member(dispatcher: zd.DispatchServer, tmp_path: Path) -> Member:
    """Return `member(name)`, which makes the key folder of a process that joined under that
    name.
    """

    def member(name: str, **options: Any) -> str:
        folder = tmp_path / f"member-{len(list(tmp_path.iterdir()))}"
        join(decode_ticket(dispatcher.open_join(name, **options)), folder)
        return str(folder)

    return member


@pytest.fixture
def start() -> Iterator[Callable[..., zd.WorkerServer]]:
    """Return `start(dispatcher, folder, **config)`, which starts a worker with threads. It stops
    with the test."""
    made: list[zd.WorkerServer] = []

    def start(dispatcher: zd.DispatchServer, folder: str, **config: Any) -> zd.WorkerServer:
        made.append(zd.WorkerServer(WorkerConfig(dispatcher.address, keys_dir=folder, **config)))
        return made[-1]

    yield start
    for worker in made:
        worker.stop()


@pytest.fixture
def admin(dispatcher: zd.DispatchServer, all_keys: str) -> Iterator[ZmqClient]:
    security = Credentials(keys_dir=all_keys).client(dispatcher.address, "admin")
    with ZmqClient(dispatcher.address, "admin", security=security) as made:
        yield made


def program(dispatcher: zd.DispatchServer, folder: str) -> ClusterCoordinator:
    class Place:
        target = dispatcher.target
        credentials = Credentials(keys_dir=folder)

    return ClusterCoordinator(Place(), cluster_lost_limit_s=30.0, cancel_grace_s=0.2)


def until(condition: Callable[[], Any], within_s: float = 20.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        threading.Event().wait(0.01)
    return value


def call(address: str, folder: str, role: str, method: str, *args: Any) -> Any:
    security = Credentials(keys_dir=folder).client(address, role)
    with ZmqClient(address, "tried", security=security) as client:
        return ask(client, method, *args)


def ask(client: ZmqClient, method: str, *args: Any) -> Any:
    return internal_client.start(client, method, *args, due=time.monotonic() + 20.0).get_value()


# -- what a joined worker does ---------------------------------------------------------------------


def test_joined_processes_exchange_large_arrays(
    dispatcher: zd.DispatchServer, member: Member, start: Callable[..., zd.WorkerServer]
) -> None:
    for index in range(2):
        start(dispatcher, member(f"worker:{index}"), index=index)
    with program(dispatcher, member("submit")) as coordinator:
        kept = [coordinator.schedule(np.full, args=(LARGE, n), keep=True) for n in (1, 2)]
        sums = [
            coordinator.schedule(lambda one, two: one + two, args=tuple(kept)) for _ in range(4)
        ]
        argument = coordinator.schedule(np.sum, args=(np.ones(LARGE),))
        assert all(np.array_equal(each.fetch(), np.full(LARGE, 3)) for each in sums)
        assert argument.fetch() == LARGE


def test_joined_and_static_keys_work_together(
    dispatcher: zd.DispatchServer,
    member: Member,
    start: Callable[..., zd.WorkerServer],
    all_keys: str,
) -> None:
    start(dispatcher, member("worker:0"), index=0)
    start(dispatcher, all_keys, index=1)
    with program(dispatcher, all_keys) as coordinator:
        kept = [coordinator.schedule(np.full, args=(LARGE, n), keep=True) for n in (1, 2)]
        for _ in range(4):
            assert (
                coordinator.schedule(lambda one, two: (one + two)[0], args=tuple(kept)).fetch() == 3
            )


# -- limits of a joined key ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("shutdown", (0.0,)),
        ("drain", ("worker", 0, 0.0)),
        ("keys", ()),
        ("keys_token", ("admin", "h:1", 60.0, "")),
    ],
)
def test_joined_worker_is_no_submitter_or_admin(
    dispatcher: zd.DispatchServer, member: Member, method: str, args: tuple[Any, ...]
) -> None:
    with pytest.raises(errors.PermissionDeniedError, match=f"role worker may not call {method}"):
        call(dispatcher.address, member("worker:0"), "submit", method, *args)


def test_joined_worker_cannot_schedule(dispatcher: zd.DispatchServer, member: Member) -> None:
    with (
        pytest.raises(
            errors.PermissionDeniedError, match="role worker may not send RegisterCoordinator"
        ),
        program(dispatcher, member("worker:0")) as coordinator,
    ):
        coordinator.schedule(int).fetch()


def test_joined_worker_registers_only_its_name(
    dispatcher: zd.DispatchServer, member: Member, start: Callable[..., zd.WorkerServer]
) -> None:
    folder = member("worker:3")
    with pytest.raises(
        errors.PermissionDeniedError,
        match="the key of this process is for worker:3, so it may not register as worker:4",
    ):
        start(dispatcher, folder, index=4)
    with pytest.raises(errors.PermissionDeniedError, match="so it may not register as worker"):
        start(dispatcher, folder)
    assert start(dispatcher, folder, index=3).name == "worker:3"


def test_forgotten_key_registers_under_no_name() -> None:
    """Its key is as unknown as one that never joined; a static key may take any name of its
    role.
    """
    static, forgotten = bytes(32), bytes([1]) * 32
    service = KeyService(ServerSecurity(CURVE, Policy(roles={static: "worker"})), None)
    register = Register(1, "worker", 4, 1, [], [], 1, "host")
    problems = [service.name_problem(mock.Mock(key=key), register) for key in (static, forgotten)]
    assert problems == [
        "",
        (
            "the key of this process was replaced or revoked, so it may not register as worker:4: "
            "join with a new ticket"
        ),
    ]


def test_parameter_server_cannot_register_as_worker(
    dispatcher: zd.DispatchServer, member: Member, start: Callable[..., zd.WorkerServer]
) -> None:
    with pytest.raises(errors.PermissionDeniedError, match="the key of this process is for ps:0"):
        start(dispatcher, member("ps:0"), job="ps", index=0)


def test_joined_worker_is_no_dispatcher(
    dispatcher: zd.DispatchServer,
    member: Member,
    start: Callable[..., zd.WorkerServer],
    all_keys: str,
) -> None:
    impostor = start(dispatcher, member("worker:0"), index=0)
    with pytest.raises(
        errors.UnauthenticatedError, match="does not have the key that this side expects"
    ):
        call(impostor.address, all_keys, "submit", "facts")


def test_joining_key_may_only_join(dispatcher: zd.DispatchServer, all_keys: str) -> None:
    from zmqdist.transport.security import ClientSecurity

    ticket = decode_ticket(dispatcher.open_join("worker:0"))
    security = ClientSecurity(CURVE, "worker", key=keys.new_pair(), server_key=ticket.server_key)
    with ZmqClient(dispatcher.address, "stranger", security=security) as client:
        pending = client.call("facts", timeout_in_ms=1_000)
        with pytest.raises(errors.OpError):
            pending.get_value()
    assert until(lambda: dispatcher.snapshot() is not None)
    status = call(dispatcher.address, all_keys, "client", "facts")
    assert status["dropped"]["not allowed"] >= 1


# -- tickets ---------------------------------------------------------------------------------------


def test_ticket_admits_one_process(dispatcher: zd.DispatchServer, tmp_path: Path) -> None:
    ticket = decode_ticket(dispatcher.open_join("worker:0"))
    join(ticket, tmp_path / "one")
    with pytest.raises(
        errors.UnauthenticatedError, match="the join token for worker:0 has been used already"
    ):
        join(ticket, tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_join_into_file_keeps_ticket(dispatcher: zd.DispatchServer, tmp_path: Path) -> None:
    ticket = decode_ticket(dispatcher.open_join("worker:0"))
    (tmp_path / "file").touch()
    with pytest.raises(
        errors.FailedPreconditionError, match=r"is no folder for keys, but a file.* was not used"
    ):
        join(ticket, tmp_path / "file")
    assert join(ticket, tmp_path / "others") == "worker"


def test_join_without_parent_folder_keeps_ticket(
    dispatcher: zd.DispatchServer, tmp_path: Path
) -> None:
    ticket = decode_ticket(dispatcher.open_join("worker:0"))
    folder = tmp_path / "gone" / "keys"
    with pytest.raises(
        errors.FailedPreconditionError,
        match=r"make the folder above it first\. The join ticket was not",
    ):
        join(ticket, folder)
    assert not folder.parent.exists()
    folder.parent.mkdir()
    assert join(ticket, folder) == "worker"


def test_join_into_removed_folder_writes_no_key(
    dispatcher: zd.DispatchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    new_pair = keys.new_pair

    def removes_first() -> keys.KeyPair:
        folder.rmdir()  # as the next agent does with the folder of a killed one
        return new_pair()

    monkeypatch.setattr(keys, "new_pair", removes_first)
    with pytest.raises(
        errors.FailedPreconditionError,
        match=r"cannot write the keys of worker:0 to .*No such file.* is used: get a new one",
    ):
        join(decode_ticket(dispatcher.open_join("worker:0")), folder / "keys")
    assert not folder.exists()


def test_late_ticket_is_refused_as_late(dispatcher: zd.DispatchServer, tmp_path: Path) -> None:
    ticket = decode_ticket(dispatcher.open_join("worker:0", valid_s=0.001))
    with pytest.raises(
        errors.UnauthenticatedError,
        match="the join token for worker:0 expired 0 s ago: ask for a new ticket",
    ):
        until(lambda: join(ticket, tmp_path / "one"))


def test_ticket_for_wrong_role_is_refused(dispatcher: zd.DispatchServer, tmp_path: Path) -> None:

    ticket = replace(decode_ticket(dispatcher.open_join("worker:0")), name="submit")
    with pytest.raises(
        errors.PermissionDeniedError,
        match="the join token is for worker:0, and this process wants to join as 'submit'",
    ):
        join(ticket, tmp_path / "one")


def test_unknown_key_is_refused_without_open_ticket(
    dispatcher: zd.DispatchServer, all_keys: str, tmp_path: Path
) -> None:
    from zmqdist.transport.join_ticket import JoinTicket

    ticket = JoinTicket("worker:0", dispatcher.address, keys.load_server_public(all_keys), "1", "s")
    with pytest.raises(errors.UnauthenticatedError, match="the dispatcher has no open join token"):
        join(ticket, tmp_path / "one")


@pytest.mark.parametrize("name", ["worker", "worker:x", "worker:-1", "", "a b:1", "king"])
def test_invalid_name_gets_no_ticket(dispatcher: zd.DispatchServer, name: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="cannot join: wanted JOB:INDEX"):
        dispatcher.open_join(name)


def test_dispatcher_without_keys_has_no_tickets() -> None:
    with (
        zd.DispatchServer() as plain,
        pytest.raises(errors.FailedPreconditionError, match="has no CURVE keys"),
    ):
        plain.open_join("worker:0")


@pytest.mark.timeout(120)
def test_wrong_tokens_slow_no_other_and_fill_no_log(
    dispatcher: zd.DispatchServer,
    member: Member,
    start: Callable[..., zd.WorkerServer],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:

    start(dispatcher, member("worker:0"), index=0)
    wrong = replace(decode_ticket(dispatcher.open_join("worker:1")), secret="guessed")
    caplog.set_level(logging.INFO)
    refused: list[str] = []

    def guess() -> None:
        for _ in range(250):
            try:
                join(wrong, tmp_path / "never")
            except errors.UnauthenticatedError as error:
                refused.append(error.message)

    began = time.monotonic()
    threads = [threading.Thread(target=guess) for _ in range(4)]
    with program(dispatcher, member("submit")) as coordinator:
        coordinator.schedule(int).fetch()
        for thread in threads:
            thread.start()
        refused_meanwhile = []
        while any(thread.is_alive() for thread in threads):
            before = len(refused)
            coordinator.schedule(int).fetch()
            refused_meanwhile.append(len(refused) - before)
        for thread in threads:
            thread.join()
    took_s = time.monotonic() - began
    assert len(refused) == 1000
    assert max(refused_meanwhile) < 100, "a function waits for few guesses"
    lines = [
        record
        for record in caplog.records
        if "join" in record.message or "refused" in record.message
    ]
    assert len(lines) <= took_s + 2
    assert "guessed" not in caplog.text


class Stranger:
    """A connection with an unknown key to a dispatcher with an open ticket. Its events are "up",
    "down" and the messages that arrive."""

    def __init__(self, ticket: JoinTicket, pair: keys.KeyPair | None = None) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pair = pair or keys.new_pair()
        security = ClientSecurity(CURVE, JOINING, "a test", key=pair, server_key=ticket.server_key)
        self.loop = Loop("zmqdist-stranger")
        self.dealer = DealerConnection(
            self.loop,
            ticket.dispatcher,
            security,
            our_hello("client", 1, "stranger"),
            on_up=lambda hello: self.events.put("up"),
            on_message=lambda message, frames: self.events.put(message),
            on_down=lambda: self.events.put("down"),
            on_refused=self.events.put,
        )
        self.dealer.connect()
        self.loop.start()

    def __enter__(self) -> Stranger:
        assert self.events.get(timeout=20) == "up"
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.stop()


def test_process_without_token_is_disconnected(
    dispatcher: zd.DispatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time, the kernel gives the connection a descriptor of one that ended before."""
    ticket = decode_ticket(dispatcher.open_join("worker:1"))
    for _ in range(5):
        socket.create_connection(split(ticket.dispatcher)).close()
    monkeypatch.setattr(router, "HANDSHAKE_S", 0.2)
    with Stranger(ticket) as stranger:
        for expected in ("down", "up", "down"):
            assert stranger.events.get(timeout=20) == expected


def test_process_without_reply_joins_again(
    dispatcher: zd.DispatchServer,
) -> None:
    ticket, pair = decode_ticket(dispatcher.open_join("worker:1")), keys.new_pair()
    for _ in range(2):
        with Stranger(ticket, pair) as stranger:
            stranger.loop.run(
                stranger.dealer.send, Join(ticket.number, ticket.secret.encode(), ticket.name)
            )
            assert stranger.events.get(timeout=20) == Joined("worker", "worker:1")


def test_connection_may_show_one_token(dispatcher: zd.DispatchServer, tmp_path: Path) -> None:
    ticket = decode_ticket(dispatcher.open_join("worker:1"))
    with Stranger(ticket) as stranger:
        for secret in ("guessed", ticket.secret):
            stranger.loop.run(
                stranger.dealer.send, Join(ticket.number, secret.encode(), ticket.name)
            )
        assert isinstance(stranger.events.get(timeout=20), Refused)
        assert stranger.events.get(timeout=20) == "down"
    assert join(ticket, tmp_path / "keys-of-1") == "worker"


# -- revocation ------------------------------------------------------------------------------------


def test_revoked_worker_is_lost_at_once(
    dispatcher: zd.DispatchServer,
    member: Member,
    start: Callable[..., zd.WorkerServer],
    admin: ZmqClient,
) -> None:
    first = start(dispatcher, member("worker:0"), index=0)
    held = threading.Event()
    with program(dispatcher, member("submit")) as coordinator:
        _waiting[:] = [held]
        running = coordinator.schedule(_hold)
        until(lambda: first.snapshot().running)
        start(dispatcher, member("worker:1"), index=1)
        ask(admin, "keys_revoke", "worker:0")
        assert first.join(3.0)
        assert first.ended is not None
        assert first.ended.code == errors.UNAUTHENTICATED
        assert (
            "the key of this process (worker:0) was revoked at the dispatcher" in first.ended.error
        )
        held.set()
        assert running.fetch() == 1


_waiting: list[threading.Event] = []


def _hold() -> int:
    return int(_waiting[0].wait(20))


def test_revoked_key_is_refused_everywhere(
    dispatcher: zd.DispatchServer,
    member: Member,
    start: Callable[..., zd.WorkerServer],
    admin: ZmqClient,
) -> None:
    shown_by = member("worker:0")
    other = start(dispatcher, shown_by, index=0)
    folder = member("worker:1")
    with contextlib.ExitStack() as stack:
        # A connection to another member, over which the key is good now.
        shown = keys.decode_public(keys.load_role(shown_by, "worker").public)
        security = Credentials(keys_dir=folder).client(other.address, "worker", shown)
        client = stack.enter_context(ZmqClient(other.address, "member", security=security))
        assert ask(client, SERVER_INFO)
        ask(admin, "keys_revoke", "worker:1")
        until(lambda: _failure(client))
        with pytest.raises(errors.UnauthenticatedError, match="was revoked"):
            ask(client, SERVER_INFO)
    with pytest.raises(
        errors.UnauthenticatedError, match=r"the key of this process \(worker:1\) was revoked"
    ):
        start(dispatcher, folder, index=1)


def _failure(client: ZmqClient) -> errors.OpError | None:
    try:
        ask(client, SERVER_INFO)
    except errors.OpError as error:
        return error
    return None


def test_static_key_can_be_revoked(
    dispatcher: zd.DispatchServer,
    all_keys: str,
    start: Callable[..., zd.WorkerServer],
    admin: ZmqClient,
) -> None:
    worker = start(dispatcher, all_keys, index=0)
    ask(admin, "keys_revoke", "worker")
    assert worker.join(3.0)
    with pytest.raises(errors.UnauthenticatedError, match="was revoked"):
        start(dispatcher, all_keys, index=0)


def test_unknown_key_cannot_be_revoked(dispatcher: zd.DispatchServer, admin: ZmqClient) -> None:
    with pytest.raises(errors.NotFoundError, match="'worker:9'"):
        ask(admin, "keys_revoke", "worker:9")


# -- rotation --------------------------------------------------------------------------------------


def test_members_replace_keys_without_losing_work(
    dispatcher: zd.DispatchServer,
    member: Member,
    start: Callable[..., zd.WorkerServer],
    admin: ZmqClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from zmqdist.transport.peer_keys import voucher_for

    folders = [member(f"worker:{index}") for index in range(2)]
    before = [keys.load_role(folder, "worker").public for folder in folders]
    for index, folder in enumerate(folders):
        voucher_for(dispatcher.address, folder, "worker").own()
        start(dispatcher, folder, index=index)
    with program(dispatcher, member("submit")) as coordinator:
        kept = coordinator.schedule(np.full, args=(LARGE, 1), keep=True)
        assert coordinator.schedule(np.sum, args=(kept,)).fetch() == LARGE
        assert ask(admin, "keys_rotate", "") == 2
        until(
            lambda: all(
                keys.load_role(f, "worker").public != old
                for f, old in zip(folders, before, strict=True)
            )
        )

        def replaced() -> int:
            coordinator.schedule(np.sum, args=(kept,)).fetch()
            return sum(row["state"] == "replaced" for row in ask(admin, "keys"))

        assert replaced() == 2
        end = time.monotonic() + 7.0
        while time.monotonic() < end:  # the old keys become invalid meanwhile
            assert coordinator.schedule(np.sum, args=(kept,)).fetch() == LARGE
        assert dispatcher.num_workers == 2
        assert dispatcher.snapshot().losses_count == 0


@pytest.mark.processes("data service")
def test_data_tasks_are_read_after_rotation(
    dispatcher: zd.DispatchServer,
    member: Member,
    start: Callable[..., zd.WorkerServer],
    admin: ZmqClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process of the task starts when the folder has the next key."""
    from zmqdist.transport.peer_keys import voucher_for

    folder = member("worker:0")
    before = keys.load_role(folder, "worker").public
    voucher_for(dispatcher.address, folder, "worker").own()
    start(dispatcher, folder, index=0, processes=True)
    until(lambda: ask(admin, "keys_rotate", "worker:0"))
    until(lambda: keys.load_role(folder, "worker").public != before)
    monkeypatch.setenv(keys.KEYS_DIR_VARIABLE, member("submit"))
    dataset = Dataset.range(5).apply(distribute("distributed_epoch", dispatcher.address))
    assert sorted(int(x) for x in dataset) == list(range(5))


# -- restart ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False], ids=["with work_dir", "without"])
def test_work_dir_keeps_members_over_restart(
    all_keys: str, tmp_path: Path, start: Callable[..., zd.WorkerServer], kept: bool
) -> None:
    config = DispatcherConfig(
        port=free_port(), keys_dir=all_keys, work_dir=str(tmp_path / "work") if kept else None
    )
    with zd.DispatchServer(config) as first:
        join(decode_ticket(first.open_join("worker:0")), tmp_path / "member")
        worker = start(first, str(tmp_path / "member"), index=0)
    with zd.DispatchServer(config) as second:
        if kept:
            until(lambda: second.num_workers == 1)
            assert (tmp_path / "work" / "keyring.json").stat().st_mode & 0o777 == 0o600
        else:
            assert worker.join(20.0)
            assert worker.ended is not None
            assert "join again with a new ticket" in worker.ended.error


@pytest.mark.killed("joining")
@pytest.mark.timeout(120)
def test_killed_dispatcher_remembers_keys(
    all_keys: str,
    tmp_path: Path,
    start_dispatcher: Callable[..., subprocess.Popen[str]],
    start: Callable[..., zd.WorkerServer],
) -> None:
    class Place:
        address = f"127.0.0.1:{free_port()}"

    config = {
        "port": int(Place.address.rpartition(":")[2]),
        "keys_dir": all_keys,
        "work_dir": str(tmp_path / "work"),
    }
    first = start_dispatcher(**config)
    for name in ("worker:0", "worker:1"):
        ticket = call(Place.address, all_keys, "admin", "keys_token", name, Place.address, 60.0, "")
        join(decode_ticket(ticket), tmp_path / name)
    call(Place.address, all_keys, "admin", "keys_revoke", "worker:1")
    first.kill()
    first.wait(10.0)
    start_dispatcher(**config)
    start(Place, str(tmp_path / "worker:0"), index=0)  # type: ignore[arg-type]
    with pytest.raises(
        errors.UnauthenticatedError, match=r"\(worker:1\) was revoked at the dispatcher"
    ):
        start(Place, str(tmp_path / "worker:1"), index=1)  # type: ignore[arg-type]
    until(lambda: call(Place.address, all_keys, "admin", "facts")["workers"])
    assert [row["name"] for row in call(Place.address, all_keys, "admin", "facts")["workers"]] == [
        "worker:0"
    ]


# -- secrets ---------------------------------------------------------------------------------------


def test_secrets_are_never_shown(
    dispatcher: zd.DispatchServer, member: Member, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    text = dispatcher.open_join("worker:0")
    ticket = decode_ticket(text)
    join(ticket, tmp_path / "one")
    pair = keys.load_role(tmp_path / "one", "worker")
    with pytest.raises(errors.OpError) as refused:
        join(ticket, tmp_path / "two")
    shown = f"{ticket!r} {pair!r} {refused.value!r} {refused.value} {caplog.text} {Credentials(keys_dir=str(tmp_path / 'one'))!r}"
    assert ticket.secret not in shown
    assert pair.secret.decode() not in shown
    assert os.stat(tmp_path / "one").st_mode & 0o777 == 0o700
    assert os.stat(tmp_path / "one" / "worker.key").st_mode & 0o777 == 0o600


# -- processes -------------------------------------------------------------------------------------


def _shown_by(pid: int) -> str:
    """Arguments and environment of a process, as every process of its user can read them."""
    return "".join(
        Path("/proc", str(pid), name).read_text(errors="replace") for name in ("cmdline", "environ")
    )


@pytest.mark.processes("joining")
@pytest.mark.timeout(120)
def test_worker_process_joins_by_descriptor(
    dispatcher: zd.DispatchServer, member: Member, tmp_path: Path
) -> None:
    text = dispatcher.open_join("worker:3")
    reading, writing = os.pipe()
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "zmqdist_cli",
        "worker",
        "--dispatcher",
        dispatcher.address,
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [*command, "--ticket-fd", str(reading)],
        pass_fds=[reading],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    os.close(reading)
    with open(writing, "w") as stream:
        stream.write(text)
    try:
        assert dispatcher.wait_for(lambda members: ("worker", 3) in members, 60.0)
        with program(dispatcher, member("submit")) as coordinator:
            slot, environ, total = coordinator.schedule(
                _looks_at_itself, args=(np.ones(LARGE),)
            ).fetch()
        assert total == LARGE
        (pair,) = [
            keys.load_role(file.parent, "worker")
            for file in tmp_path.glob("zmqdist-*/keys/worker.key")
        ]
        shown = _shown_by(process.pid) + _shown_by(int(slot)) + environ
        for secret in (decode_ticket(text).secret, pair.secret.decode()):
            assert secret not in shown
    finally:
        process.terminate()
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0, out
    assert "worker:3 of" in out
    assert decode_ticket(text).secret not in out
    assert not list(tmp_path.glob("zmqdist-*")), "its keys are removed with it"


@pytest.mark.timeout(120)
def test_worker_with_foreign_address_replaces_its_key(
    dispatcher: zd.DispatchServer, admin: ZmqClient, tmp_path: Path
) -> None:
    port = dispatcher.address.rpartition(":")[2]
    ticket = tmp_path / "ticket"
    ticket.touch(0o600)
    ticket.write_text(dispatcher.open_join("worker:0", dispatcher=f"localhost:{port}"))
    command = [sys.executable, "-m", "zmqdist_cli", "worker", "--dispatcher", f"127.0.0.1:{port}"]
    process = subprocess.Popen(
        [*command, "--ticket-file", str(ticket), "--keys", str(tmp_path / "mine")]
    )
    try:
        assert dispatcher.wait_for(lambda members: ("worker", 0) in members, 60.0)
        first = keys.load_role(tmp_path / "mine", "worker").public
        until(lambda: ask(admin, "keys_rotate", "worker:0"))
        until(lambda: keys.load_role(tmp_path / "mine", "worker").public != first)
    finally:
        process.terminate()
        process.wait(30.0)


def _looks_at_itself(array: Any) -> tuple[int, str, float]:
    import os

    return os.getpid(), str(dict(os.environ)), float(array.sum())


@pytest.mark.timeout(120)
def test_joined_parameter_server_is_found_by_its_key(member: Member) -> None:
    address = f"127.0.0.1:{free_port()}"
    with zd.Server({"ps": [address]}, "ps", 0, keys_dir=member("ps:0", address=address)):
        assert call(address, member("submit"), "submit", SERVER_INFO)[0] == "server-ps:0"
        assert call(address, member("worker:0"), "worker", SERVER_INFO)[0] == "server-ps:0"


@pytest.mark.timeout(300)
def test_command_manages_tickets_and_keys(
    dispatcher: zd.DispatchServer,
    all_keys: str,
    tmp_path: Path,
    start: Callable[..., zd.WorkerServer],
) -> None:
    target, secret = dispatcher.address, ("--keys", all_keys)
    made = run(
        "keys", "token", target, "--role", "worker:1", "--output", str(tmp_path / "ticket"), *secret
    )
    assert (made.code, made.err) == (0, "")
    assert (tmp_path / "ticket").stat().st_mode & 0o777 == 0o600
    joined = run("keys", "join", str(tmp_path / "mine"), "--ticket-file", str(tmp_path / "ticket"))
    assert joined.out.startswith(f"ok: joined {target} as worker:1")
    again = run("keys", "join", str(tmp_path / "other"), "--ticket-file", str(tmp_path / "ticket"))
    assert again.code == 4
    assert again.err.count("\n") == 1
    assert "has been used already" in again.err
    start(dispatcher, str(tmp_path / "mine"), index=1)
    rows = json.loads(run("keys", "list", target, "--json", *secret).out)
    assert [(row["state"], row["name"]) for row in rows if row["state"] != "static"] == [
        ("joined", "worker:1")
    ]
    assert "joined    worker  worker:1" in run("keys", "list", target, *secret).out
    for name in ([], ["--name", "worker:1"]):
        # the folder was made by `keys join`, so no process owns it
        none = run("keys", "rotate", target, *name, *secret)
        assert (none.code, none.out) == (1, "")
        assert (
            f"no connected {' '.join(['member', *name[1:]])} can make a new key itself" in none.err
        )
    assert run("keys", "revoke", target, "worker:1", *secret).out.startswith("revoked ")
    unknown = run("keys", "revoke", target, "worker:1", *secret)
    assert (unknown.code, unknown.err.count("\n")) == (1, 1)
    assert "no key in use has this name or this text" in unknown.err


# -- vouching --------------------------------------------------------------------------------------


def test_new_member_is_accepted_by_members(
    dispatcher: zd.DispatchServer, member: Member, start: Callable[..., zd.WorkerServer]
) -> None:
    shown_by = member("worker:0")
    worker = start(dispatcher, shown_by, index=0)
    shown = keys.decode_public(keys.load_role(shown_by, "worker").public)
    for index in range(20):
        folder = member(f"submit:{index}")
        # The worker has asked about no such key before, and connects to the dispatcher of its own
        # accord.
        security = Credentials(keys_dir=folder).client(worker.address, "submit", shown)
        with ZmqClient(worker.address, "new", security=security) as client:
            assert ask(client, SERVER_INFO)[0] == "worker"


@pytest.mark.timeout(120)
def test_members_wait_for_silent_dispatcher(
    all_keys: str,
    tmp_path: Path,
    start_dispatcher: Callable[..., subprocess.Popen[str]],
    start: Callable[..., zd.WorkerServer],
) -> None:
    class Place:
        address = f"127.0.0.1:{free_port()}"

    process = start_dispatcher(port=int(Place.address.rpartition(":")[2]), keys_dir=all_keys)
    for name in ("worker:0", "submit"):
        ticket = call(Place.address, all_keys, "admin", "keys_token", name, Place.address, 60.0, "")
        join(decode_ticket(ticket), tmp_path / name)
    worker = start(Place, str(tmp_path / "worker:0"), index=0)  # type: ignore[arg-type]
    shown = keys.decode_public(keys.load_role(tmp_path / "worker:0", "worker").public)
    # The program knows the worker's key; the worker does not know the program's.
    credentials = Credentials(keys_dir=str(tmp_path / "submit"))
    first = credentials.client(worker.address, "submit", shown)
    other = replace(
        first,
        voucher=None,
        key=keys.load_role(tmp_path / "submit", "submit"),
        server_key=keys.encode_public(shown).encode(),
    )
    stop(process.pid)
    try:
        with ZmqClient(worker.address, "waits", security=other) as client:
            pending = internal_client.start(client, SERVER_INFO, due=time.monotonic() + 30.0)
            with pytest.raises(errors.DeadlineExceededError):
                internal_client.start(client, SERVER_INFO, due=time.monotonic() + 1.0).get_value()
            process.send_signal(signal.SIGCONT)
            assert pending.get_value()[0] == "worker"
    finally:
        process.send_signal(signal.SIGCONT)


@pytest.mark.timeout(120)
def test_joined_program_reads_elements(
    dispatcher: zd.DispatchServer,
    member: Member,
    start: Callable[..., zd.WorkerServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from zmqdist.data import Dataset
    from zmqdist.data.service import distribute

    monkeypatch.setenv("ZMQDIST_KEYS_DIR", member("submit"))
    for index, processes in enumerate((True, False)):
        start(dispatcher, member(f"worker:{index}"), index=index, processes=processes)
    dataset = (
        Dataset.range(8)
        .map(lambda n: np.full(LARGE, n))
        .apply(distribute("parallel_epochs", dispatcher.target))
    )
    assert sorted(int(element[0]) for element in dataset) == sorted([*range(8)] * 2)

"""With keys each process has only the secret of its own role, and all other processes give it the
rights of this role."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import zmqdist as zd
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.data import Dataset
from zmqdist.data.service import distribute
from zmqdist.launch.connection import DispatcherClient
from zmqdist.launch.log_follower import KEPT
from zmqdist.rpc import ZmqClient, ZmqServer
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.transport import keys
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.keys import keygen

pytestmark = pytest.mark.shares_cluster

LARGE = 300_000
"""Bytes above INLINE_BYTES_MAX: they are fetched from the process that holds them."""


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[..., str]:
    """Return `folder_of(role)`, which makes a folder with the secret of that role and the public
    data, as SECURITY.md says."""
    cluster = tmp_path / "all"
    keygen(cluster)

    def folder_of(role: str) -> str:
        made = tmp_path / f"{role}-{len(list(tmp_path.iterdir()))}"
        made.mkdir(mode=0o700)
        for name in (f"{role}.key", "server.pub", "authorized"):
            shutil.copy(cluster / name, made / name)
        return str(made)

    return folder_of


def another_worker(folder: str, all_: Path) -> None:
    """Give the worker with this folder a key of its own, and list it in the `authorized` file of
    every process."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    Path(folder, "worker.key").write_text(f"public {public}\nsecret {secret}\n")
    for authorized in all_.glob("*/authorized"):
        authorized.write_text(f"{authorized.read_text()}worker {public}\n")


@pytest.fixture
def roles(
    folder_of: Callable[..., str],
    tmp_path: Path,
    no_shared_memory: None,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[zd.DispatchServer]:
    """A dispatcher and two workers with a key each, and this process as a program; without shared
    memory, to fetch over connections."""
    server, one, two, program = (
        folder_of(role) for role in ("server", "worker", "worker", "submit")
    )
    another_worker(two, tmp_path)
    monkeypatch.setenv("ZMQDIST_KEYS_DIR", program)
    with zd.DispatchServer(DispatcherConfig(keys_dir=server)) as dispatcher:
        workers = [
            zd.WorkerServer(
                WorkerConfig(dispatcher.address, keys_dir=keys_dir, processes=request.param)
            )
            for keys_dir in (one, two)
        ]
        yield dispatcher
        for worker in workers:
            worker.stop()


def sized(array: Any) -> Any:
    return np.full(LARGE, len(array) % 251, np.uint8)


@pytest.mark.parametrize("roles", [False, True], indirect=True, ids=["threads", "processes"])
def test_processes_need_only_their_own_secret(
    roles: zd.DispatchServer,
) -> None:
    with ClusterCoordinator(roles.address) as coordinator:
        for index in range(2):
            found = coordinator.schedule(sized, (np.zeros(LARGE, np.uint8),), worker=index).fetch()
            assert (found.shape, found[0]) == ((LARGE,), LARGE % 251)
        held = coordinator.schedule(sized, ("x",), worker=0)
        assert coordinator.schedule(np.sum, (held,), worker=1).fetch() == LARGE
    dataset = Dataset.range(20).apply(
        distribute("distributed_epoch", roles.address, data_transfer_protocol="zmq")
    )
    assert sorted(int(each) for each in dataset) == list(range(20))


def test_worker_key_is_no_dispatcher_key(
    folder_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, program = folder_of("worker"), folder_of("submit")
    monkeypatch.setenv("ZMQDIST_KEYS_DIR", program)
    with pytest.raises(
        errors.FailedPreconditionError, match=r"there is no key file .*worker-\d+/server\.key"
    ):
        zd.DispatchServer(DispatcherConfig(keys_dir=worker))
    shutil.copy(Path(worker, "worker.key"), Path(worker, "server.key"))
    with (
        zd.DispatchServer(DispatcherConfig(keys_dir=worker)) as played,
        pytest.raises(
            errors.UnauthenticatedError, match="does not have the key that this side expects"
        ),
    ):
        ClusterCoordinator(played.address).schedule(int).fetch()


@pytest.mark.parametrize(
    ("role", "taken"), [("worker", True), ("submit", True), ("client", False), (None, False)]
)
def test_payloads_come_from_workers_and_programs(
    folder_of: Callable[..., str], role: str | None, taken: bool
) -> None:
    credentials = Credentials(keys_dir=folder_of("submit"))
    public = (
        zmq.curve_keypair()[0] if role is None else keys.load_role(folder_of(role), role).public
    )
    if taken:
        assert (
            credentials.client("127.0.0.1:1", "submit", keys.decode_public(public)).server_key
            == public
        )
        return
    with pytest.raises(errors.UnauthenticatedError) as raised:
        credentials.client("127.0.0.1:1", "submit", keys.decode_public(public))
    assert (
        f"its public key {public.decode()} is not that of a worker or a program in "
        in raised.value.message
    )


def test_refusal_names_key_of_connection(folder_of: Callable[..., str], tmp_path: Path) -> None:
    folder = folder_of("submit")
    used = keys.load_role(folder, "submit").public.decode()
    security = Credentials(keys_dir=folder).client("127.0.0.1:1", "submit")
    keygen(tmp_path / "others")
    shutil.copy(tmp_path / "others" / "submit.key", Path(folder, "submit.key"))
    assert security.source == f"key {used}, read from {folder}/submit.key"


def test_observer_reads_the_inside_and_no_more(folder_of: Callable[..., str]) -> None:
    server, worker, observer = (folder_of(role) for role in ("server", "worker", "observe"))
    credentials = Credentials(keys_dir=observer)
    with (
        zd.DispatchServer(DispatcherConfig(keys_dir=server)) as dispatcher,
        zd.WorkerServer(WorkerConfig(dispatcher.address, keys_dir=worker)),
        DispatcherClient(dispatcher.address, credentials, "observe", 20.0) as client,
    ):
        assert [row["name"] for row in client.call("facts")["workers"]] == ["worker:0"]
        assert client.call("stack", "worker:0") != {}
        assert client.call("profile", "", 0.1) == {"stacks": {}, "failed": {}}
        assert client.call("logs", "", KEPT, 0.0)["failed"] == {}
        for call in (("shutdown", 1.0), ("drain", "worker", 0, 1.0), ("keys",)):
            with pytest.raises(errors.PermissionDeniedError, match="role observe may not call"):
                client.call(*call)


def test_observer_calls_no_method_of_other_servers(folder_of: Callable[..., str]) -> None:
    server, observer = folder_of("server"), folder_of("observe")
    rpc = ZmqServer("127.0.0.1:0", keys_dir=server)
    try:
        rpc.register("secret", lambda: 1)
        rpc.start()
        security = Credentials(keys_dir=observer).client(rpc.address, "observe")
        with pytest.raises(errors.PermissionDeniedError, match="only read the inside"):
            ZmqClient(rpc.address, "", True, 5_000, security=security)
    finally:
        rpc.stop()


def test_monitor_uses_its_own_key_or_a_client_s(
    folder_of: Callable[..., str], tmp_path: Path
) -> None:
    folders = [(str(tmp_path / "all"), "observe"), (folder_of("client"), "client")]
    with zd.DispatchServer(DispatcherConfig(keys_dir=folder_of("server"))) as dispatcher:
        for folder, role in folders:
            credentials = Credentials(keys_dir=folder)
            with (
                DispatcherClient(dispatcher.address, credentials, "observe", 20.0) as monitor,
                pytest.raises(errors.PermissionDeniedError, match=f"role {role} may not call"),
            ):
                monitor.call("shutdown", 0.0)


def test_observer_of_another_server_gets_the_reason(folder_of: Callable[..., str]) -> None:
    rpc = ZmqServer("127.0.0.1:0", keys_dir=folder_of("server"))
    try:
        rpc.start()
        credentials = Credentials(keys_dir=folder_of("observe"))
        with pytest.raises(errors.FailedPreconditionError, match="is no dispatcher"):
            DispatcherClient(rpc.address, credentials, "observe", 20.0)
    finally:
        rpc.stop()


def test_refused_message_is_in_the_facts(folder_of: Callable[..., str]) -> None:
    server, client = folder_of("server"), folder_of("client")
    shutil.copy(Path(client, "client.key"), Path(client, "worker.key"))
    with zd.DispatchServer(DispatcherConfig(keys_dir=server)) as dispatcher:
        with pytest.raises(errors.PermissionDeniedError):
            zd.WorkerServer(WorkerConfig(dispatcher.address, keys_dir=client)).join()
        credentials = Credentials(keys_dir=client)
        with DispatcherClient(dispatcher.address, credentials, "observe", 20.0) as reader:
            (refusal,) = reader.call("facts")["refusals"]
    assert "role client may not send Register" in refusal["reason"]
    assert refusal["peer"]

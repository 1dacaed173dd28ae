"""Faults in the surroundings of a cluster are reported at once, at the right place, in one
sentence."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.rpc import Client
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.transport import keys
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.keys import keygen

Secrets = dict[str, Any]


@pytest.fixture
def ours(request: pytest.FixtureRequest, tmp_path: Path) -> Secrets:
    return secrets(tmp_path / "ours", request.param)


@pytest.fixture
def others(request: pytest.FixtureRequest, tmp_path: Path) -> Secrets:
    return secrets(tmp_path / "others", request.param)


def secrets(folder: Path, kind: str) -> Secrets:
    """Return the fields of a config that say where its secret is."""
    folder.mkdir(mode=0o700)
    if kind == "keys":
        keygen(folder / "keys")
        return {"keys_dir": str(folder / "keys")}
    if kind == "token":
        keys.create(folder / "token")
        return {"token_file": str(folder / "token")}
    return {"insecure": True}


PAIRS = [
    (
        "token",
        "token",
        errors.UnauthenticatedError,
        "refused this side as .* started with another ZMQDIST_TOKEN_FILE",
    ),
    ("keys", "keys", errors.UnauthenticatedError, "key"),
    (
        "keys",
        "token",
        errors.FailedPreconditionError,
        "uses CURVE keys, this side the user's token.*ZMQDIST_KEYS_DIR",
    ),
    (
        "token",
        "keys",
        errors.FailedPreconditionError,
        "uses the user's token .*, this side CURVE keys",
    ),
    (
        "token",
        "insecure",
        errors.FailedPreconditionError,
        "uses the user's token .*, this side no security",
    ),
]


@pytest.mark.parametrize(("ours", "others", "kind", "text"), PAIRS, indirect=["ours", "others"])
@pytest.mark.filterwarnings("ignore:.*insecure")
def test_worker_with_wrong_secret_logs_refusal(
    ours: Secrets, others: Secrets, kind: type[Exception], text: str
) -> None:
    with zd.DispatchServer(DispatcherConfig(**ours)) as dispatcher:
        with pytest.raises(kind, match=text) as caught:
            zd.WorkerServer(WorkerConfig(dispatcher.address, **others))
        assert dispatcher.address in str(caught.value)
        assert dispatcher.num_workers == 0
        for secret in others.values():
            assert not Path(str(secret)).is_file() or Path(secret).read_text().strip() not in str(
                caught.value
            )
        with zd.WorkerServer(WorkerConfig(dispatcher.address, **ours)):
            # and no other worker is affected
            assert dispatcher.num_workers == 1


@pytest.mark.parametrize(("ours", "others", "kind", "text"), PAIRS[:4], indirect=["ours", "others"])
def test_coordinator_with_wrong_secret_is_refused(
    ours: Secrets, others: Secrets, kind: type[Exception], text: str
) -> None:
    with (
        zd.DispatchServer(DispatcherConfig(**ours)) as dispatcher,
        ClusterCoordinator(with_secrets(dispatcher, others)) as coordinator,
    ):
        asks = (
            lambda: coordinator.schedule(int).get(20),
            lambda: (coordinator.schedule(int), coordinator.join(20)),
        )
        for ask in asks * 2:  # before the reply of the dispatcher has arrived, and after it
            with pytest.raises(kind, match=text):
                ask()


class with_secrets:
    """A target whose secrets differ from those of its dispatcher."""

    def __init__(self, dispatcher: zd.DispatchServer, given: Secrets) -> None:
        self.target = dispatcher.target
        self.credentials = Credentials(**given)


@pytest.mark.parametrize("ours", ["token", "keys"], indirect=True)
def test_dispatcher_as_target_brings_its_secret(ours: Secrets) -> None:
    with (
        zd.DispatchServer(DispatcherConfig(**ours)) as dispatcher,
        zd.WorkerServer(WorkerConfig(dispatcher.address, **ours)),
        ClusterCoordinator(dispatcher) as coordinator,
    ):
        assert coordinator.schedule(int).get(20) == 0
        assert len(coordinator.schedule(bytes, (3_000_000,)).get(20)) == 3_000_000


def test_unknown_host_of_dispatcher_is_an_error() -> None:
    text = r"nosuch\.invalid:5950: the name 'nosuch\.invalid' cannot be looked up"
    for connects in (
        lambda: zd.WorkerServer(WorkerConfig("nosuch.invalid:5950", insecure=True)),
        lambda: ClusterCoordinator("nosuch.invalid:5950"),
    ):
        with pytest.raises(errors.OpError) as caught:
            connects()
        assert re.search(text, str(caught.value)) or "no CURVE keys" in str(caught.value)


def test_port_in_use_is_an_error(port: int) -> None:
    with zd.DispatchServer(DispatcherConfig(port=port)) as dispatcher:
        text = re.escape(
            f"could not bind 127.0.0.1:{port}: the port is in use; stop the process that listens "
            f"there, or take port 0"
        )
        with pytest.raises(errors.UnknownError, match=text):
            zd.DispatchServer(DispatcherConfig(port=port))
        with pytest.raises(errors.UnknownError, match=text):
            zd.WorkerServer(WorkerConfig(dispatcher.address, port=port))
        assert dispatcher.num_workers == 0


BINDS: list[tuple[str, type[Exception], str]] = [
    ("192.0.2.1", errors.FailedPreconditionError, "keys"),
    ("0.0.0.0", errors.FailedPreconditionError, "keys"),
    ("no-such-host.invalid", Exception, r"no-such-host\.invalid"),
]


@pytest.mark.parametrize(("host", "kind", "text"), BINDS, ids=[row[0] for row in BINDS])
def test_unbindable_address_is_an_error(host: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        zd.DispatchServer(DispatcherConfig(host=host))


def test_server_of_other_kind_is_an_error() -> None:
    """For example, the port of a worker in place of the dispatcher's."""
    with (
        zd.DispatchServer() as dispatcher,
        zd.WorkerServer(WorkerConfig(dispatcher.address)) as worker,
    ):
        # The error is raised by whichever of the two calls comes after the refusal.
        with (
            ClusterCoordinator(worker.address, cluster_lost_limit_s=0.5) as coordinator,
            pytest.raises(errors.OpError),
        ):
            coordinator.schedule(int).get(20)
        assert dispatcher.num_workers == 1


def test_client_may_not_schedule(tmp_path: Path) -> None:
    """A process with the key of a client may call methods, but sends no code."""
    folder = secrets(tmp_path / "ours", "keys")["keys_dir"]
    for name in ("submit.key", "worker.key", "admin.key", "server.key", "authorized"):
        assert (Path(folder) / name).exists()
    with zd.DispatchServer(DispatcherConfig(keys_dir=folder)) as dispatcher:
        client = Client.create("zmq", dispatcher.address, timeout_in_ms=20_000, keys_dir=folder)
        assert client.facts_blocking()["queued"] == 0
        with pytest.raises(errors.PermissionDeniedError):
            client.shutdown_blocking(0.0)
        client.close()
        (Path(folder) / "submit.key").unlink()
        with pytest.raises(errors.FailedPreconditionError, match=r"submit\.key"):
            ClusterCoordinator(dispatcher)


def test_configs_can_be_written_down(start_dispatcher: Callable[..., Any]) -> None:
    """The launcher passes them to its children in this form."""
    assert WorkerConfig(
        **json.loads(json.dumps(asdict(WorkerConfig("127.0.0.1:1"))))
    ) == WorkerConfig("127.0.0.1:1")


def test_slots_beyond_descriptors_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_of = resource.getrlimit
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda which: (256, 4096) if which == resource.RLIMIT_NOFILE else limit_of(which),
    )
    with (
        zd.DispatchServer() as dispatcher,
        pytest.raises(
            errors.ResourceExhaustedError,
            match=r"128 slots need 608 descriptors.*may open only 256",
        ),
    ):
        zd.WorkerServer(WorkerConfig(dispatcher.address, slots=128, processes=True))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"members": [',
        b"\xff\x00",
        b"[]",
        b'{"members": 5, "revoked": []}',
        b'{"members": [["x"]], "revoked": []}',
    ],
    ids=["empty", "half", "binary", "list", "wrong type", "short row"],
)
def test_damaged_keyring_is_named_and_unchanged(tmp_path: Path, content: bytes) -> None:
    keygen(tmp_path / "keys")
    keyring = tmp_path / "work" / "keyring.json"
    keyring.parent.mkdir(mode=0o700)
    keyring.write_bytes(content)
    keyring.chmod(0o600)
    with pytest.raises(
        errors.DataLossError, match=r"the keyring .*keyring\.json is damaged .*put back a copy"
    ):
        zd.DispatchServer(
            DispatcherConfig(keys_dir=str(tmp_path / "keys"), work_dir=str(keyring.parent))
        )
    assert keyring.read_bytes() == content


def test_keyring_without_file_is_refused(tmp_path: Path) -> None:
    keygen(tmp_path / "keys")
    (tmp_path / "work" / "keyring.json").mkdir(parents=True, mode=0o700)
    with pytest.raises(
        errors.FailedPreconditionError, match=r"cannot read the keyring .*Is a directory"
    ):
        zd.DispatchServer(
            DispatcherConfig(keys_dir=str(tmp_path / "keys"), work_dir=str(tmp_path / "work"))
        )

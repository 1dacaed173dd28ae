"""`zmqdist keys` and the options of roles that join by a ticket: mistakes are refused before the
ticket is used, and name their cause."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import zmqdist as zd
from tests.cli.conftest import Open
from tests.cli.helpers import run, run_here
from tests.ports import free_address
from zmqdist import errors
from zmqdist.launch.exit_codes import ExitCode
from zmqdist.scheduling.shared.config import DispatcherConfig
from zmqdist.transport import keys
from zmqdist.transport.join_ticket import decode_ticket, join


@pytest.fixture(scope="module")
def all_keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The static keys of the cluster."""
    folder = tmp_path_factory.mktemp("cluster") / "keys"
    keys.keygen(folder)
    return str(folder)


@pytest.fixture
def dispatcher(all_keys: str) -> Iterator[zd.DispatchServer]:
    with zd.DispatchServer(DispatcherConfig(keys_dir=all_keys)) as server:
        yield server


def write_ticket(path: Path, text: str) -> str:
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def content_of(folder: Path | str) -> dict[str, str]:
    return {file.name: file.read_text() for file in Path(folder).iterdir()}


# -- the folder of `keys join` ---------------------------------------------------------------------


def test_join_refuses_folder_of_other_keys(dispatcher: zd.DispatchServer, tmp_path: Path) -> None:
    keys.keygen(tmp_path / "keys")
    before = content_of(tmp_path / "keys")
    ticket = write_ticket(tmp_path / "ticket", dispatcher.open_join("admin"))
    refused = run_here("keys", "join", str(tmp_path / "keys"), "--ticket-file", ticket)
    assert refused.code == ExitCode.REFUSED
    assert refused.err == (
        f"zmqdist keys: {tmp_path / 'keys'} has keys already (server.key), which the key of admin "
        f"must not replace: name another "
        "folder. The join ticket was not used\n"
    )
    assert content_of(tmp_path / "keys") == before
    assert (
        run_here("keys", "join", str(tmp_path / "mine"), "--ticket-file", ticket).code
        == ExitCode.OK
    )


@pytest.mark.parametrize("name", ["worker:2", "submit"])
def test_join_refuses_folder_of_other_name(
    dispatcher: zd.DispatchServer, tmp_path: Path, name: str
) -> None:
    join(decode_ticket(dispatcher.open_join("worker:1")), tmp_path / "mine")
    before = content_of(tmp_path / "mine")
    ticket = write_ticket(tmp_path / "ticket", dispatcher.open_join(name))
    refused = run_here("keys", "join", str(tmp_path / "mine"), "--ticket-file", ticket)
    assert (refused.code, refused.err.count("\n")) == (ExitCode.REFUSED, 1)
    assert content_of(tmp_path / "mine") == before


def test_process_rejoins_in_its_folder(dispatcher: zd.DispatchServer, tmp_path: Path) -> None:
    join(decode_ticket(dispatcher.open_join("worker:1")), tmp_path / "mine")
    older = keys.load_role(tmp_path / "mine", "worker").public
    ticket = write_ticket(tmp_path / "ticket", dispatcher.open_join("worker:1"))
    assert (
        run_here("keys", "join", str(tmp_path / "mine"), "--ticket-file", ticket).code
        == ExitCode.OK
    )
    assert keys.load_role(tmp_path / "mine", "worker").public != older


def test_join_refuses_folder_of_other_cluster(
    dispatcher: zd.DispatchServer, tmp_path: Path
) -> None:
    keys.keygen(tmp_path / "others")
    with zd.DispatchServer(DispatcherConfig(keys_dir=str(tmp_path / "others"))) as second:
        join(decode_ticket(second.open_join("worker:1")), tmp_path / "mine")
    ticket = write_ticket(tmp_path / "ticket", dispatcher.open_join("worker:1"))
    assert (
        run_here("keys", "join", str(tmp_path / "mine"), "--ticket-file", ticket).code
        == ExitCode.REFUSED
    )


# -- the tickets of roles --------------------------------------------------------------------------


def is_unused(ticket: str, folder: Path) -> bool:
    """Use a ticket, and return whether the dispatcher admits its process."""
    return run_here("keys", "join", str(folder), "--ticket-file", ticket).code == ExitCode.OK


@pytest.mark.parametrize(
    ("name", "report"),
    [
        (
            "worker:13",
            "server: the join ticket is for worker:13, and this process was started as ps:0",
        ),
        ("ps:1", "server: the join ticket is for ps:1, and this process was started as ps:0"),
        ("ps:0", "zmqdist keys token --role ps:0 --listens 127.0.0.1:"),
    ],
)
def test_server_refuses_ticket_without_address(
    dispatcher: zd.DispatchServer, tmp_path: Path, name: str, report: str
) -> None:
    ticket = write_ticket(tmp_path / "ticket", dispatcher.open_join(name))
    spec = json.dumps({"ps": [free_address(), free_address()]})
    refused = run("server", "--spec", spec, "--job", "ps", "--index", "0", "--ticket-file", ticket)
    assert (refused.code, refused.out, refused.err.count("\n")) == (ExitCode.USAGE, "", 1)
    assert report in refused.err
    assert is_unused(ticket, tmp_path / "mine")


def test_server_joins_with_ticket_of_address(
    dispatcher: zd.DispatchServer, tmp_path: Path, all_keys: str, terminal: Open
) -> None:
    address = free_address()
    output = run_here(
        "keys",
        "token",
        dispatcher.address,
        "--role",
        "ps:0",
        "--listens",
        address,
        "--keys",
        all_keys,
    )
    ticket = write_ticket(tmp_path / "ticket", output.out)
    terminal("server", "--spec", json.dumps({"ps": [address]}), "--ticket-file", ticket).saw(
        f"ps:0 at zmq://{address}"
    )


def test_ticket_refused_for_bad_address(
    dispatcher: zd.DispatchServer,
) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="'a b:1' is not an address"):
        dispatcher.open_join("ps:0", address="a b:1")


@pytest.mark.parametrize("option", ["--index=6", "--job=other"])
def test_worker_refuses_ticket_of_other_name(
    dispatcher: zd.DispatchServer, tmp_path: Path, option: str
) -> None:
    ticket = write_ticket(tmp_path / "ticket", dispatcher.open_join("worker:2"))
    refused = run("worker", "--dispatcher", dispatcher.address, option, "--ticket-file", ticket)
    assert (refused.code, refused.out, refused.err.count("\n")) == (ExitCode.USAGE, "", 1)
    assert "worker: the join ticket is for worker:2, and this process was started as" in refused.err
    assert is_unused(ticket, tmp_path / "mine")


@pytest.mark.parametrize("same_keys", [True, False], ids=["of the same keys", "of other keys"])
def test_worker_keeps_ticket_from_other_dispatcher(
    dispatcher: zd.DispatchServer, all_keys: str, tmp_path: Path, same_keys: bool
) -> None:
    keys.keygen(tmp_path / "others")
    ticket = write_ticket(tmp_path / "ticket", dispatcher.open_join("worker:0"))
    with zd.DispatchServer(
        DispatcherConfig(keys_dir=all_keys if same_keys else str(tmp_path / "others"))
    ) as second:
        second.open_join("worker:0")  # so that it lets unknown keys in to join
        refused = run("worker", "--dispatcher", second.address, "--ticket-file", ticket)
    assert (refused.code, refused.out, refused.err.count("\n")) == (ExitCode.REFUSED, "", 1)
    assert f"could not join the dispatcher at {second.address} as worker:0" in refused.err
    assert (
        f"the join ticket names the dispatcher at "
        f"{decode_ticket(Path(ticket).read_text()).dispatcher}" in refused.err
    )
    assert is_unused(ticket, tmp_path / "mine")


def test_worker_joins_only_its_dispatcher(dispatcher: zd.DispatchServer, tmp_path: Path) -> None:
    silent = free_address()
    ticket = decode_ticket(dispatcher.open_join("worker:0"))
    with pytest.raises(errors.DeadlineExceededError) as refused:
        join(ticket, tmp_path / "mine", dispatcher=silent, timeout_s=0.5)
    assert silent in refused.value.message
    assert ticket.dispatcher in refused.value.message
    join(ticket, tmp_path / "mine")


# -- revoking --------------------------------------------------------------------------------------


@pytest.fixture
def own_keys(tmp_path: Path) -> str:
    """Static keys that the test may revoke."""
    keys.keygen(tmp_path / "own")
    return str(tmp_path / "own")


def rows_of(target: str, folder: str) -> list[tuple[str, str]]:
    rows = json.loads(run_here("keys", "list", target, "--json", "--keys", folder).out)
    return sorted((row["state"], row["name"]) for row in rows)


def test_revoke_refuses_key_of_command(own_keys: str) -> None:
    with zd.DispatchServer(DispatcherConfig(keys_dir=own_keys)) as dispatcher:
        refused = run_here("keys", "revoke", dispatcher.address, "admin", "--keys", own_keys)
        assert (refused.code, refused.out) == (ExitCode.REFUSED, "")
        assert refused.err == (
            "zmqdist keys: 'admin' includes the key of this command, which is the last admin key: "
            "use the key of another admin, "
            "or --force\n"
        )
        assert ("static", "admin") in rows_of(dispatcher.address, own_keys)


def test_revoke_force_reports_key_of_command(own_keys: str) -> None:
    with zd.DispatchServer(DispatcherConfig(keys_dir=own_keys)) as dispatcher:
        own = keys.load_role(own_keys, "admin").public.decode()
        result = run_here(
            "keys", "revoke", dispatcher.address, "admin", "--force", "--keys", own_keys
        )
        assert (result.code, result.out, result.err) == (
            ExitCode.OK,
            f"revoked {own} (static key of admin)\n",
            "",
        )
        later = run_here("keys", "list", dispatcher.address, "--keys", own_keys)
        assert later.code == ExitCode.REFUSED
        assert "was revoked" in later.err


def test_admin_key_revoked_by_other_admin(own_keys: str, tmp_path: Path) -> None:
    with zd.DispatchServer(DispatcherConfig(keys_dir=own_keys)) as dispatcher:
        join(decode_ticket(dispatcher.open_join("admin:1")), tmp_path / "mine")
        mine = str(tmp_path / "mine")
        refused = run_here("keys", "revoke", dispatcher.address, "admin:1", "--keys", mine)
        assert (
            refused.err
            == "zmqdist keys: 'admin:1' includes the key of this command: use the key of another "
            "admin, or --force\n"
        )
        assert (
            run_here("keys", "revoke", dispatcher.address, "admin", "--keys", mine).code
            == ExitCode.OK
        )
        assert rows_of(dispatcher.address, mine)[-1] == ("static", "worker")
        assert ("revoked", "admin") in rows_of(dispatcher.address, mine)


def test_revoke_lists_keys_and_takes_public_key(own_keys: str, tmp_path: Path) -> None:
    with zd.DispatchServer(DispatcherConfig(keys_dir=own_keys)) as dispatcher:
        public = {}
        for name in ("submit", "submit:1"):
            join(decode_ticket(dispatcher.open_join(name)), tmp_path / name)
            public[name] = keys.load_role(tmp_path / name, "submit").public.decode()
        static = keys.load_role(own_keys, "submit").public.decode()
        first = run_here(
            "keys", "revoke", "--keys", own_keys, "--", dispatcher.address, public["submit"]
        )
        assert first.out == f"revoked {public['submit']} (joined key of submit)\n"
        assert ("static", "submit") in rows_of(dispatcher.address, own_keys)
        by_name = run_here("keys", "revoke", dispatcher.address, "submit", "--keys", own_keys)
        assert by_name.out == f"revoked {static} (static key of submit)\n"
        assert ("joined", "submit:1") in rows_of(dispatcher.address, own_keys)

"""`zmqdist keys` and the options of roles that join by a ticket: mistakes are refused before the ticket is used, and name their cause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import zmqdist as zd
from tests.cli.running import run_here
from zmqdist.scheduling.dispatcher.config import DispatcherConfig
from zmqdist.transport import keys
from zmqdist.transport.ticket import decode_ticket, join
from zmqdist_cli.exit_codes import ExitCode


@pytest.fixture(scope="module")
def all_keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The static keys of the cluster."""
    folder = tmp_path_factory.mktemp("cluster") / "keys"
    keys.keygen(folder)
    return str(folder)


@pytest.fixture
def dispatcher(all_keys: str) -> Iterator[zd.DispatchServer]:
    with zd.DispatchServer(DispatcherConfig(keys_dir=all_keys)) as made:
        yield made


def write_ticket(path: Path, text: str) -> str:
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def content_of(folder: Path | str) -> dict[str, str]:
    return {file.name: file.read_text() for file in Path(folder).iterdir()}


# -- the folder of `keys join` -------------------------------------------------------------------------------------------


def test_join_refuses_a_folder_of_other_keys_and_does_not_use_the_ticket(
    dispatcher: zd.DispatchServer, tmp_path: Path
) -> None:
    keys.keygen(tmp_path / "keys")
    before = content_of(tmp_path / "keys")
    ticket = write_ticket(tmp_path / "ticket", dispatcher.open_join("admin"))
    refused = run_here("keys", "join", str(tmp_path / "keys"), "--ticket-file", ticket)
    assert refused.code == ExitCode.REFUSED
    assert refused.err == (
        f"zmqdist keys: {tmp_path / 'keys'} has keys already (server.key), which the key of admin must not replace: name another "
        "folder. The join ticket was not used\n"
    )
    assert content_of(tmp_path / "keys") == before
    assert run_here("keys", "join", str(tmp_path / "mine"), "--ticket-file", ticket).code == ExitCode.OK


@pytest.mark.parametrize("name", ["worker:2", "submit"])
def test_join_refuses_the_folder_of_a_process_that_joined_under_another_name(
    dispatcher: zd.DispatchServer, tmp_path: Path, name: str
) -> None:
    join(decode_ticket(dispatcher.open_join("worker:1")), tmp_path / "mine")
    before = content_of(tmp_path / "mine")
    ticket = write_ticket(tmp_path / "ticket", dispatcher.open_join(name))
    refused = run_here("keys", "join", str(tmp_path / "mine"), "--ticket-file", ticket)
    assert (refused.code, refused.err.count("\n")) == (ExitCode.REFUSED, 1)
    assert content_of(tmp_path / "mine") == before


def test_a_process_may_join_again_under_its_name_in_its_folder(dispatcher: zd.DispatchServer, tmp_path: Path) -> None:
    join(decode_ticket(dispatcher.open_join("worker:1")), tmp_path / "mine")
    older = keys.load_role(tmp_path / "mine", "worker").public
    ticket = write_ticket(tmp_path / "ticket", dispatcher.open_join("worker:1"))
    assert run_here("keys", "join", str(tmp_path / "mine"), "--ticket-file", ticket).code == ExitCode.OK
    assert keys.load_role(tmp_path / "mine", "worker").public != older


def test_join_refuses_the_folder_of_the_same_name_at_another_cluster(
    dispatcher: zd.DispatchServer, tmp_path: Path
) -> None:
    keys.keygen(tmp_path / "others")
    with zd.DispatchServer(DispatcherConfig(keys_dir=str(tmp_path / "others"))) as other:
        join(decode_ticket(other.open_join("worker:1")), tmp_path / "mine")
    ticket = write_ticket(tmp_path / "ticket", dispatcher.open_join("worker:1"))
    assert run_here("keys", "join", str(tmp_path / "mine"), "--ticket-file", ticket).code == ExitCode.REFUSED

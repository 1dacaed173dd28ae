"""The files that hold secrets: the user's token, and CURVE keys with `zmqdist keygen`."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from tests.helpers import run_command
from zmqdist.errors import AlreadyExistsError, FailedPreconditionError
from zmqdist.transport import keys
from zmqdist.transport.keys import ROLES
from zmqdist_cli.keys import keygen as keygen_command


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the path of the user's own token."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of-its-own"))
    return keys.default_path()


# -- the token -------------------------------------------------------------------------------------


def test_token_is_made_once(own: Path) -> None:
    old = os.umask(0)
    try:
        secret, path = keys.user_token()
    finally:
        os.umask(old)
    assert path == own
    assert (mode(own), mode(own.parent)) == (0o600, 0o700)
    assert keys.user_token() == (secret, own)
    assert [entry.name for entry in own.parent.iterdir()] == ["token"]
    assert len(secret) >= 40


def test_home_folder_replaces_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert keys.user_token()[1] == tmp_path / ".local" / "state" / "zmqdist" / "token"
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/not/allowed/by/the/standard")
    assert keys.default_path() == tmp_path / ".local" / "state" / "zmqdist" / "token"


def test_concurrent_first_uses_agree(own: Path) -> None:
    found: list[bytes] = []
    barrier = threading.Barrier(8)

    def first_use() -> None:
        barrier.wait()
        found.append(keys.user_token()[0])

    threads = [threading.Thread(target=first_use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_named_token_file_is_used(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named"
    named.write_text("n" * 40 + "\n")
    named.chmod(0o600)
    assert keys.user_token(named) == (b"n" * 40, named)
    monkeypatch.setenv("ZMQDIST_TOKEN_FILE", str(named))
    assert keys.user_token() == (b"n" * 40, named)
    assert not own.exists()


def spoil_mode(path: Path) -> None:
    path.chmod(0o640)


def spoil_folder(path: Path) -> None:
    path.parent.chmod(0o755)


def spoil_owner(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 65534, 65534)


def spoil_content(path: Path) -> None:
    path.write_text("short")


def spoil_empty(path: Path) -> None:
    path.write_text("")


def spoil_lines(path: Path) -> None:
    path.write_text("x" * 30 + "\n" + "y" * 30)


def spoil_bytes(path: Path) -> None:
    path.write_bytes(b"\xff" * 40)


def spoil_kind(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (
            spoil_mode,
            r"token is open to other users \(mode 0640\): make it private with `chmod 600`",
        ),
        (
            spoil_folder,
            r"the folder of the token, .* is open to other users \(mode 0755\): .*`chmod 700`",
        ),
        (spoil_owner, r"token belongs to user 65534, this process runs as 0"),
        (spoil_content, "is not a token"),
        (spoil_empty, "is not a token"),
        (spoil_lines, "is not a token"),
        (spoil_bytes, "is not a token"),
        (spoil_kind, "is not a plain file"),
    ],
)
def test_insecure_token_is_refused(own: Path, spoil: Callable[[Path], None], problem: str) -> None:
    secret, _ = keys.user_token()
    spoil(own)
    with pytest.raises(FailedPreconditionError, match=problem) as raised:
        keys.user_token()
    assert secret.decode() not in str(raised.value)


def test_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        FailedPreconditionError, match=r"cannot read the token file .*/missing: No such file"
    ):
        keys.user_token(tmp_path / "missing")


def test_unwritable_token_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        FailedPreconditionError, match=r"cannot make the token file .*set ZMQDIST_TOKEN_FILE"
    ):
        keys.user_token()


# -- keys ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.keygen(tmp_path / "keys")
    return tmp_path / "keys"


def test_keys_are_private_pairs(folder: Path) -> None:
    assert mode(folder) == 0o700
    assert {mode(path) for path in folder.iterdir()} == {0o600}
    server = keys.load_role(folder, "server")
    assert keys.load_server_public(folder) == server.public == zmq.curve_public(server.secret)
    authorized = keys.load_authorized(folder)
    assert sorted(authorized.values()) == sorted(ROLES)
    for role in ROLES:
        assert authorized[zmq.utils.z85.decode(keys.load_role(folder, role).public)] == role
    assert len({path.read_bytes() for path in folder.iterdir()}) == len(list(folder.iterdir()))


def test_keys_are_replaced_by_force_only(folder: Path) -> None:
    before = keys.load_role(folder, "server")
    with pytest.raises(
        AlreadyExistsError, match=r"has keys already \(server\.key\); --force replaces them"
    ):
        keys.keygen(folder)
    assert keys.load_role(folder, "server") == before
    keys.keygen(folder, force=True)
    assert keys.load_role(folder, "server") != before


def damage_text(path: Path) -> None:
    path.write_text("nothing of use")


def damage_pair(path: Path) -> None:
    lines = path.read_text().splitlines()
    public, _ = zmq.curve_keypair()
    path.write_text(
        "\n".join(
            f"public {public.decode()}" if line.startswith("public") else line for line in lines
        )
    )


def damage_length(path: Path) -> None:
    path.write_text(path.read_text()[:-2])


def damage_binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)))


def open_to_others(path: Path) -> None:
    path.chmod(0o644)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_key_file_of_root_may_have_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes mounts a Secret with fsGroup, and systemd a credential with an access list, as
    such a file: of root, with mode 0440."""
    keys.keygen(tmp_path / "keys")
    (tmp_path / "keys" / "worker.key").chmod(0o440)
    with pytest.raises(FailedPreconditionError, match="mode 0440"):
        keys.load_role(tmp_path / "keys", "worker")
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    assert keys.load_role(tmp_path / "keys", "worker").public
    (tmp_path / "keys" / "worker.key").chmod(0o460)
    with pytest.raises(FailedPreconditionError, match="mode 0460"):
        keys.load_role(tmp_path / "keys", "worker")


def load_all(folder: Path) -> None:
    keys.load_role(folder, "server")
    keys.load_server_public(folder)
    keys.load_authorized(folder)
    keys.load_role(folder, "worker")


@pytest.mark.parametrize(
    ("name", "spoil", "problem"),
    [
        (
            "server.key",
            Path.unlink,
            r"there is no key file .*server\.key: make a cluster's keys with `zmqdist keygen",
        ),
        ("server.key", open_to_others, r"server\.key is open to other users \(mode 0644\)"),
        ("server.key", damage_text, r"server\.key is damaged: wanted one line `public`"),
        (
            "server.key",
            damage_pair,
            r"server\.key is damaged: its public and secret key do not belong together",
        ),
        ("server.key", damage_length, r"server\.key is damaged: wanted one line `secret`"),
        ("server.key", damage_binary, r"server\.key is damaged"),
        ("server.pub", damage_text, r"server\.pub is damaged"),
        ("server.pub", lambda path: path.chmod(0o666), r"server\.pub is open to other users"),
        ("authorized", damage_text, r"authorized:1: 'nothing' is not a role"),
        (
            "authorized",
            lambda path: path.write_text("# x\nworker abc\n"),
            r"authorized:2: not a public key",
        ),
        ("worker.key", Path.unlink, r"there is no key file .*worker\.key"),
    ],
)
def test_unusable_key_file_is_named(
    folder: Path, name: str, spoil: Callable[[Path], object], problem: str
) -> None:
    secret = keys.load_role(folder, "server").secret.decode()
    spoil(folder / name)
    with pytest.raises(FailedPreconditionError, match=problem) as raised:
        load_all(folder)
    assert secret not in str(raised.value)
    assert secret not in repr(keys.KeyPair(b"public", secret.encode()))


# -- the command -----------------------------------------------------------------------------------


def test_keygen_prints_no_secret(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    done = run_command(keygen_command, str(folder))
    assert (done.exit_code, done.stderr) == (0, "")
    assert (
        done.stdout
        == f"ok: keys in {folder}; keep them secret, and set ZMQDIST_KEYS_DIR={folder}\n"
    )

    again = run_command(keygen_command, str(folder))
    assert (again.exit_code, again.stdout) == (2, "")
    assert (
        again.stderr
        == f"zmqdist keygen: {folder} has keys already (server.key); --force replaces them\n"
    )
    assert run_command(keygen_command, str(folder), "--force").exit_code == 0

    (tmp_path / "file").write_text("")
    assert run_command(keygen_command, str(tmp_path / "file" / "below")).exit_code == 2
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            assert (
                not line.startswith("secret ") or line.split()[1] not in done.stdout + again.stderr
            )

"""CURVE keys of a cluster, as files in one folder (0700, each file 0600).

    server.key   key pair of the servers, including the dispatcher
    server.pub   the public key of that pair: all other processes need it
    client.key, observe.key, submit.key, worker.key, admin.key
                 a key pair for each role (security.py)
    authorized   which public key may act as which role: lines `role public`; public data

A process that only connects needs `server.pub` and the key of one role; a server needs `server.key`
and `authorized`. Workers, and programs that schedule work, also listen, so that other processes can
fetch results from them. Their listening socket shows the key of their own role, and they announce
this key with their address. A process that fetches a result looks the key up in `authorized`
(security.py). So no worker and no program needs a secret with which it could pose as the
dispatcher.

The folder of a process that joined (join_ticket.py) has the public key of the dispatcher as
`server.pub`, one key pair, which the process made itself, and a file `joined` with its name, its
role and the address of its dispatcher. It has no `authorized`, because its dispatcher vouches for
the keys of other processes (peer_keys.py).

A key file is text: a line `public KEY` and a line `secret KEY`, each key in the 40 characters of
Z85; lines that start with `# ` are comments. A secret never appears in an error or a repr.

The user's token proves to a process, on loopback, that its peer belongs to the same user. zmqdist
makes the token on first use in `$XDG_STATE_HOME/zmqdist/token`
(`~/.local/state/zmqdist/token`); the folder is 0700, the file 0600. The environment variable
ZMQDIST_TOKEN_FILE, or an argument, names another file.

A token file must belong to this user, and no other user may be able to read the file, because
another user could then know the token. The text of a token never appears in an error.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from zmqdist.errors import AlreadyExistsError, FailedPreconditionError
from zmqdist.platforms import IS_WINDOWS, open_flags

TOKEN_FILE_VARIABLE: Final = "ZMQDIST_TOKEN_FILE"
KEYS_DIR_VARIABLE: Final = "ZMQDIST_KEYS_DIR"
_NEW_FILE: Final = open_flags("O_WRONLY", "O_CREAT", "O_EXCL", "O_NOFOLLOW")
TOKEN_BYTES_MIN: Final = 32
TOKEN_BYTES_MAX: Final = 255
"""Bytes. ZeroMQ does not accept a longer password."""


def user_token(path: str | Path | None = None) -> tuple[bytes, Path]:
    """Return the token and the path of its file.

    The file is `path`, or else the file that ZMQDIST_TOKEN_FILE names, or else the user's own file.
    Only the user's own file is made if it is missing.

    Raises:
      FailedPreconditionError: the file is missing, not private or damaged, or cannot be made.
    """
    named = path or os.environ.get(TOKEN_FILE_VARIABLE)
    if named:
        return load(named), Path(named)
    own = default_path()
    if not own.exists():
        create(own)
    _check_folder(own.parent)
    return load(own), own


def default_path() -> Path:
    """Return the path of the user's own token."""
    base = os.environ.get("XDG_STATE_HOME")
    if base and os.path.isabs(base):
        return Path(base, "zmqdist", "token")
    try:
        return Path.home() / ".local" / "state" / "zmqdist" / "token"
    except RuntimeError:
        raise FailedPreconditionError(
            f"this user has no home folder for a token: set {TOKEN_FILE_VARIABLE} to a file of your own"
        ) from None


def create(path: str | Path) -> None:
    """Make a token file and its folder. An existing file stays as it is, even if another process
    has made it at the same moment.

    Raises:
      FailedPreconditionError: the folder is not private, or cannot be written.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(path.parent)
        fd = os.open(part, _NEW_FILE, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(secrets.token_urlsafe(32).encode() + b"\n")
            # `os.link` never replaces a file, so the second of two processes uses the token of the
            # first
            os.link(part, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(part)
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot make the token file {path}: {error.strerror}; set {TOKEN_FILE_VARIABLE} to a file of "
            f"your own",
        ) from None


def load(path: str | Path) -> bytes:
    """Read a token file. Its folder is not checked.

    Raises:
      FailedPreconditionError: the file is missing, not this user's, readable by others, or not a
        token.
    """
    path = Path(path)
    text = read_private(path, "token file").strip()
    if not TOKEN_BYTES_MIN <= len(text) <= TOKEN_BYTES_MAX or not text.isascii() or b"\n" in text:
        raise FailedPreconditionError(
            f"{path} is not a token: it must be one line of {TOKEN_BYTES_MIN} to "
            f"{TOKEN_BYTES_MAX} characters; replace or remove it",
        )
    return text


def read_private(
    path: Path, kind: str, *, owners: tuple[int, ...] = (), mode_bits: int = 0o077
) -> bytes:
    """Return the content of a small file that only its owner may access.

    Args:
      kind: the kind of file, for errors, such as "token file".
      owners: user ids besides this process's own that may own it.
      mode_bits: permissions that must not be set.

    Raises:
      FailedPreconditionError: the file cannot be read, is not a plain file, belongs to another
        user, or is open to others.
    """
    try:
        fd = os.open(path, open_flags("O_RDONLY", "O_CLOEXEC", "O_NONBLOCK"))
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            problem = _problem(status, owners, mode_bits)
            if problem is None and not stat.S_ISREG(status.st_mode):
                problem = "is not a plain file"
            if problem is None:
                return file.read()
    except OSError as error:
        raise FailedPreconditionError(f"cannot read the {kind} {path}: {error.strerror}") from None
    raise FailedPreconditionError(f"the {kind} {path} {problem}")


def _check_folder(folder: Path) -> None:
    try:
        status = os.stat(folder)
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot check the folder {folder}: {error.strerror}"
        ) from None
    require_private(status, f"the folder of the token, {folder},", mode_bits=0o077)


def require_private(status: os.stat_result, subject: str, *, mode_bits: int) -> None:
    """Raise FailedPreconditionError if a file or folder belongs to another user, or if other users
    may access it.

    Args:
      subject: the name of the file or folder in the error, such as "the folder /x".
      mode_bits: permissions that must not be set.
    """
    problem = _problem(status, (), mode_bits)
    if problem:
        raise FailedPreconditionError(f"{subject} {problem}")


def _problem(status: os.stat_result, owners: tuple[int, ...], mode_bits: int) -> str | None:
    if IS_WINDOWS:  # the rights are an access list there, which `stat` does not show
        return None
    if status.st_uid != os.geteuid():
        if status.st_uid not in owners:
            return f"belongs to user {status.st_uid}, this process runs as {os.geteuid()}: use a file of your own"
        # A file of root may be readable by its group, because Kubernetes (fsGroup) and systemd
        # (LoadCredential) hand out such files. A process reads such a file as a member of the
        # file's group, or by an access list, whose mask appears in the group's bits.
        mode_bits &= ~stat.S_IRGRP
    mode = stat.S_IMODE(status.st_mode)
    if mode & mode_bits:
        private_mode = mode & ~mode_bits
        return f"is open to other users (mode {mode:04o}): make it private with `chmod {private_mode:o}`"
    return None


OBSERVER: Final = "observe"
"""The role of a process that may read the inside of a cluster at its dispatcher (facts, stacks,
profiles, logs), and nothing else."""

NOT_OBSERVABLE: Final = "role observe may only read the inside of a dispatcher"
"""What every other server answers to this role."""
ROLES: Final = ("client", OBSERVER, "submit", "worker", "admin")
_SERVER: Final = "server"
AUTHORIZED: Final = "authorized"
JOINED: Final = "joined"


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, each key as the 40 bytes of Z85 that ZeroMQ takes."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class JoinedFolder:
    """The content of the file `joined`. `dispatcher` is "host:port"."""

    name: str
    role: str
    dispatcher: str


def keygen(folder: str | Path, *, force: bool = False) -> None:
    """Make the keys of a cluster and write them to `folder`.

    Args:
      force: replace existing keys. Processes with the old keys then cannot connect any more.

    Raises:
      AlreadyExistsError: the folder has keys and `force` is not set. Nothing was changed.
      FailedPreconditionError: the folder cannot be written, or libzmq has no CURVE.
    """
    if not zmq.has("curve"):
        raise FailedPreconditionError(
            "this build of libzmq has no CURVE: install pyzmq from a wheel"
        )
    folder = Path(folder)
    try:
        there = key_files(folder)
        if there and not force:
            raise AlreadyExistsError(
                f"{folder} has keys already ({there[0]}); --force replaces them"
            )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        authorized = ["# role and public key of each process that may connect"]
        for name in (_SERVER, *ROLES):
            pair = new_pair()
            write_role(folder, name, pair)
            if name == _SERVER:
                write_public(folder, pair.public)
            else:
                authorized.append(f"{name} {pair.public.decode()}")
        _write(folder / AUTHORIZED, "\n".join(authorized) + "\n")
    except OSError as error:
        raise FailedPreconditionError(f"cannot write keys to {folder}: {error.strerror}") from None


def key_files(folder: Path) -> list[str]:
    """Return the names of the key files that a folder has: those of `keygen`, and those of a
    process that joined. Raises OSError."""
    names = [f"{name}.key" for name in (_SERVER, *ROLES)] + [f"{_SERVER}.pub", AUTHORIZED, JOINED]
    return [name for name in names if (folder / name).exists()]


def new_pair() -> KeyPair:
    """Return a new key pair."""
    return KeyPair(*zmq.curve_keypair())


def write_public(folder: Path, server_key: bytes) -> None:
    """Write `server.pub`. Raises OSError."""
    _write(
        folder / f"{_SERVER}.pub", f"# public CURVE key: {_SERVER}\npublic {server_key.decode()}\n"
    )


def write_role(folder: Path, role: str, pair: KeyPair) -> None:
    """Write the key pair of a role; an older file is replaced in one step. Raises OSError."""
    _write(
        folder / f"{role}.key",
        f"# CURVE key pair: {role}. Keep it secret.\n"
        f"public {pair.public.decode()}\nsecret {pair.secret.decode()}\n",
    )


def write_joined(folder: Path, membership: JoinedFolder) -> None:
    """Write the file that marks the folder of a process that joined. Raises OSError."""
    _write(
        folder / JOINED,
        f"name {membership.name}\nrole {membership.role}\ndispatcher {membership.dispatcher}\n",
    )


def load_joined(folder: str | Path) -> JoinedFolder | None:
    """Return the content of the file `joined`; None for a folder that `keygen` made. Raises
    FailedPreconditionError if the file is damaged.
    """
    path = Path(folder, JOINED)
    if not path.exists():
        return None
    values = dict(_lines(path, 0o022).values())
    if set(values) != {"name", "role", "dispatcher"} or values["role"] not in ROLES:
        raise FailedPreconditionError(f"{path} is damaged: join again with a new ticket")
    return JoinedFolder(**values)


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.new")
    part.unlink(missing_ok=True)
    fd = os.open(part, _NEW_FILE, 0o600)
    with open(fd, "w") as file:
        file.write(text)
    shutil.move(part, path)


def load_role(folder: str | Path, role: str) -> KeyPair:
    """Return the key pair of a role, or of "server". Raises FailedPreconditionError if the file is
    missing, damaged or not private."""
    path = Path(folder, f"{role}.key")
    lines = _lines(path, 0o077)
    pair = KeyPair(_key(path, lines, "public"), _key(path, lines, "secret"))
    if zmq.curve_public(pair.secret) != pair.public:
        raise FailedPreconditionError(
            f"{path} is damaged: its public and secret key do not belong together; copy it again, "
            f"or make new keys"
        )
    return pair


def load_server_public(folder: str | Path) -> bytes:
    """Return the server's public key. Raises FailedPreconditionError if the file is missing,
    writable by other users, or damaged."""
    path = Path(folder, f"{_SERVER}.pub")
    return _key(path, _lines(path, 0o022), "public")


def load_authorized(folder: str | Path) -> dict[bytes, str]:
    """Return the role of each public key (32 bytes) in the file `authorized`. Raises the errors of
    `load_server_public`.

    The result is empty for the folder of a process that joined, because such a folder has no file
    `authorized`.
    """
    path = Path(folder, AUTHORIZED)
    if not path.exists() and Path(folder, JOINED).exists():
        return {}
    roles: dict[bytes, str] = {}
    for number, (role, text) in _lines(path, 0o022).items():
        if role not in ROLES:
            raise FailedPreconditionError(
                f"{path}:{number}: {role[:20]!r} is not a role: {', '.join(ROLES)}"
            )
        key = decode_key(text)
        if key is None:
            raise FailedPreconditionError(f"{path}:{number}: not a public key of 40 characters")
        roles[key] = role
    return roles


def decode_public(public: bytes) -> bytes:
    """Return the 32 bytes that a public key in Z85 encodes. `load_authorized` returns keys in this
    form, too."""
    return z85.decode(public)


def encode_public(public: bytes) -> str:
    """Return a public key of 32 bytes as the 40 characters that key files contain."""
    return z85.encode(public).decode()


def _lines(path: Path, mode_bits: int) -> dict[int, tuple[str, str]]:
    """Return (first word, rest of the line) of a key file by line number. A file may belong to
    root, because root often mounts secrets for other users.
    """
    if not path.exists():
        raise FailedPreconditionError(
            f"there is no key file {path}: make a cluster's keys with `zmqdist keygen "
            f"{path.parent}`, or copy this file from "
            "the host where they were made (SECURITY.md says which process needs which)",
        )
    text = read_private(path, "key file", owners=(0,), mode_bits=mode_bits).decode(
        "ascii", "replace"
    )
    lines: dict[int, tuple[str, str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("# "):
            word, _, rest = line.partition(" ")
            lines[number] = (word, rest.strip())
    return lines


def _key(path: Path, lines: dict[int, tuple[str, str]], word: str) -> bytes:
    values = [rest for name, rest in lines.values() if name == word]
    if len(values) != 1 or decode_key(values[0]) is None:
        raise FailedPreconditionError(
            f"{path} is damaged: wanted one line `{word}` with a key of 40 characters; "
            "run `zmqdist keygen`, or `zmqdist keys join` if this process joined"
        )
    return values[0].encode()


def decode_key(text: str) -> bytes | None:
    """Return the 32 bytes of a public key of 40 characters; None if `text` is not a key."""
    try:
        key = z85.decode(text.encode())
    except (KeyError, ValueError, UnicodeError):
        return None
    return key if len(key) == 32 else None

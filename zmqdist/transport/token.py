"""The user's token: on loopback it proves to a process that its peer belongs to the same user.

zmqdist makes the token on first use in `$XDG_STATE_HOME/zmqdist/token`
(`~/.local/state/zmqdist/token`); the folder is 0700, the file 0600. The environment variable
ZMQDIST_TOKEN_FILE, or an argument, names another file.

A token file must belong to this user, and no other user may be able to read the file, because
another user could then know the token. The text of a token never appears in an error.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from zmqdist.errors import FailedPreconditionError

ENVIRONMENT: Final = "ZMQDIST_TOKEN_FILE"
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
    named = path or os.environ.get(ENVIRONMENT)
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
            f"this user has no home folder for a token: set {ENVIRONMENT} to a file of your own"
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
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
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
            f"cannot make the token file {path}: {error.strerror}; set {ENVIRONMENT} to a file of "
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
    path: Path, what: str, *, owners: tuple[int, ...] = (), mode_bits: int = 0o077
) -> bytes:
    """Return the content of a small file that only its owner may access.

    Args:
      what: the kind of file, for errors, such as "token file".
      owners: user ids besides this process's own that may own it.
      mode_bits: permissions that must not be set.

    Raises:
      FailedPreconditionError: the file cannot be read, is not a plain file, belongs to another
        user, or is open to others.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            problem = _problem(status, owners, mode_bits)
            if problem is None and not stat.S_ISREG(status.st_mode):
                problem = "is not a plain file"
            if problem is None:
                return file.read()
    except OSError as error:
        raise FailedPreconditionError(f"cannot read the {what} {path}: {error.strerror}") from None
    raise FailedPreconditionError(f"the {what} {path} {problem}")


def _check_folder(folder: Path) -> None:
    try:
        status = os.stat(folder)
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot check the folder {folder}: {error.strerror}"
        ) from None
    require_private(status, f"the folder of the token, {folder},", mode_bits=0o077)


def require_private(status: os.stat_result, what: str, *, mode_bits: int) -> None:
    """Raise FailedPreconditionError if a file or folder belongs to another user, or if other users
    may access it.

    Args:
      what: the name of the file or folder in the error, such as "the folder /x".
      mode_bits: permissions that must not be set.
    """
    problem = _problem(status, (), mode_bits)
    if problem:
        raise FailedPreconditionError(f"{what} {problem}")


def _problem(status: os.stat_result, owners: tuple[int, ...], mode_bits: int) -> str | None:
    if status.st_uid != os.geteuid():
        if status.st_uid not in owners:
            return f"belongs to user {status.st_uid}, this process runs as {os.geteuid()}: use a file of your own"
        # A file of root may be readable by its group, because Kubernetes (fsGroup) and systemd
        # (LoadCredential) hand out such files. A process reads such a file as a member of the
        # file's group, or by an access list, whose mask appears in the group's bits.
        mode_bits &= ~stat.S_IRGRP
    mode = stat.S_IMODE(status.st_mode)
    if mode & mode_bits:
        wanted = mode & ~mode_bits
        return f"is open to other users (mode {mode:04o}): make it private with `chmod {wanted:o}`"
    return None
